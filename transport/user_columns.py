"""What a user's column holds: one array of any shape, or one text, which says itself what it is.

    bytes = kind (1) | dimensions (1) | padding to 4 | each dimension (4, little-endian) | padding to 8 | the elements

The run's own columns need no such header, because their type follows from their name; a user's name says nothing. NaN
and infinity are the user's business.

Owns: the codec. Invariant: what ``decode_value`` returns has exactly the shape, type and elements that were encoded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from transport.errors import MessageError
from transport.types import MAX_DIMENSIONS, Column

Value: TypeAlias = "NDArray[Any] | str"
Values: TypeAlias = "Sequence[object] | NDArray[Any]"
"""Values of many rows: one each, or the rows of one array."""
EncodedPieces: TypeAlias = tuple[bytes, bytes | memoryview]
"""Header and elements."""
ColumnBytes: TypeAlias = bytes | memoryview
"""A value as it is read; views belong to their reader and are read-only."""

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""As for a run's column: more is a mistake, not a row."""

_TEXT = 0
_KINDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("?"),
    2: np.dtype("u1"),
    3: np.dtype("i1"),
    4: np.dtype("<i2"),
    5: np.dtype("<i4"),
    6: np.dtype("<i8"),
    7: np.dtype("<f2"),
    8: np.dtype("<f4"),
    9: np.dtype("<f8"),
}
_KIND_OF = {dtype: kind for kind, dtype in _KINDS.items()}


def encode_value(value: object) -> bytes:
    """The bytes of one value.

    Args:   value: a text, or anything that numpy makes an array of bool, integers or floats of.
    Raises: ValueError: another type (bfloat16: view it as int16), or more than MAX_VALUE_BYTES.
    """
    return b"".join(encode_pieces(value))


def encode_pieces(value: object) -> EncodedPieces:
    """As ``encode_value``, the header and the elements apart: those of an array are not copied, so it must not change
    until they are written."""
    if isinstance(value, str):
        return _checked(_header(_TEXT, ()), value.encode())
    array = np.asarray(value)
    kind = _KIND_OF.get(array.dtype.newbyteorder("<"))
    if kind is None or array.ndim > MAX_DIMENSIONS or _span_bytes(array.shape, kind) > MAX_VALUE_BYTES:
        known = ", ".join(str(dtype) for dtype in _KIND_OF)
        raise ValueError(f"no column holds {array.dtype} of shape {array.shape}; text and {known} can be stored")
    return _checked(_header(kind, array.shape), _elements(array.astype(_KINDS[kind], copy=False)))


@dataclass(frozen=True, slots=True)
class Table(Sequence[EncodedPieces]):
    """Encoded values of one type and shape, so that what holds for one holds for all.

    head: of each.  elements: of all, one value after another.  of_each: bytes of elements.
    """

    head: bytes
    elements: memoryview
    of_each: int

    @property
    def nbytes(self) -> int:
        """Of each value."""
        return len(self.head) + self.of_each

    def __len__(self) -> int:
        return len(self.elements) // self.of_each

    @overload
    def __getitem__(self, at: int) -> EncodedPieces: ...
    @overload
    def __getitem__(self, at: slice) -> Table: ...
    def __getitem__(self, at: int | slice) -> EncodedPieces | Table:
        if isinstance(at, int):
            start = range(len(self))[at] * self.of_each
            return self.head, self.elements[start : start + self.of_each]
        start, end, step = at.indices(len(self))
        if step != 1:
            raise ValueError("values of a table are next to each other")
        return Table(self.head, self.elements[start * self.of_each : end * self.of_each], self.of_each)

    def __iter__(self) -> Iterator[EncodedPieces]:
        head, elements, of_each = self.head, self.elements, self.of_each
        return ((head, elements[start : start + of_each]) for start in range(0, len(elements), of_each))


def encode_values(values: Values) -> Sequence[EncodedPieces]:
    """Each of ``values`` as ``encode_pieces`` does; the rows of one array ([N, ...]) all at once."""
    array: NDArray[Any] = values if isinstance(values, np.ndarray) else np.empty(0)
    if array.ndim < 2 or not array.size:
        return [encode_pieces(value) for value in values]
    head, first = encode_pieces(array[0])
    return Table(head, _elements(array.astype(array.dtype.newbyteorder("<"), copy=False)), len(first))


def sizes_of(values: Sequence[Sequence[bytes | memoryview]]) -> Sequence[int]:
    """Bytes of each value, which is in pieces; of one only where all have as many."""
    if isinstance(values, Table):
        return [values.nbytes]
    sizes = [sum(map(len, value)) for value in values]
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def _elements(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checked(head: bytes, elements: bytes | memoryview) -> EncodedPieces:
    nbytes = len(head) + len(elements)
    if nbytes > MAX_VALUE_BYTES:
        raise ValueError(f"a value of {nbytes} bytes is over the limit of {MAX_VALUE_BYTES}")
    return head, elements


def _header(kind: int, shape: tuple[int, ...]) -> bytes:
    head = struct.pack(f"<BBxx{len(shape)}I", kind, len(shape), *shape)
    return head + bytes(-len(head) % 8)


def decode_value(column: Column, raw: ColumnBytes) -> Value:
    """The value: an array (read-only, a view of ``raw``) or a text. Raises MessageError for any other bytes."""
    kind, shape, start = _read_header(column, raw)
    return _value(column, raw, kind, shape, start)


def decode_values(column: Column, raws: Iterable[ColumnBytes]) -> list[Value]:
    """Each as ``decode_value`` does. A header is read once for all values that have it, and the same size."""
    headers: dict[tuple[bytes, int], tuple[int, tuple[int, ...], int]] = {}
    values: list[Value] = []
    for raw in raws:
        key = (bytes(raw[: _start(raw)]), len(raw)) if len(raw) > 1 else (b"", 0)
        header = headers.get(key)
        if header is None:
            header = headers[key] = _read_header(column, raw)
        values.append(_value(column, raw, *header))
    return values


def decode_table(column: Column, raws: Sequence[ColumnBytes]) -> NDArray[Any] | list[Value]:
    """All values as one read-only array [N, ...] where they are arrays of one type and shape, else one by one.

    Values that lie in one buffer at equal distances are not copied.
    """
    keys = {(bytes(raw[: _start(raw)]) if len(raw) > 1 else b"", len(raw)) for raw in raws}
    if len(keys) != 1 or raws[0][:1] in (b"", bytes([_TEXT])):
        return decode_values(column, raws)
    kind, shape, start = _read_header(column, raws[0])
    table = _as_table(raws)
    elements = table[:, start : len(raws[0])].view(_KINDS[kind])
    return elements.reshape(len(raws), *shape)


def _as_table(raws: Sequence[ColumnBytes]) -> NDArray[np.uint8]:
    """[N, bytes or more] of values of one size, which do not overlap and lie in their order where they share a buffer:
    then the ends tell that they are at equal distances."""
    rows = [np.frombuffer(raw, np.uint8) for raw in (raws[0], raws[-1])]
    first, last = (row.__array_interface__["data"][0] for row in rows)
    stride = len(raws[0]) + -len(raws[0]) % 8
    shared = {id(raw.obj) if isinstance(raw, memoryview) else id(raw) for raw in raws}
    if len(shared) == 1 and last - first == (len(raws) - 1) * stride:
        return np.lib.stride_tricks.as_strided(rows[0], (len(raws), len(raws[0])), (stride, 1), writeable=False)
    table = np.stack([np.frombuffer(raw, np.uint8) for raw in raws])
    table.flags.writeable = False
    return table


def _value(column: Column, raw: ColumnBytes, kind: int, shape: tuple[int, ...], start: int) -> Value:
    if kind == _TEXT:
        return _text(column, raw[start:])
    array = np.frombuffer(raw, _KINDS[kind], offset=start)
    return array if len(shape) == 1 else array.reshape(shape)


def check_value(column: Column, raw: bytes) -> None:
    """Raises MessageError unless ``raw`` is what ``encode_value`` gives."""
    kind, _, start = _read_header(column, raw)
    if kind == _TEXT:
        _text(column, raw[start:])


def check_values(column: Column, values: Iterable[Sequence[bytes | memoryview]]) -> None:
    """``check_value`` for values in pieces. Arrays with one header and one size are right or wrong together, so each
    such pair is looked at once."""
    seen: set[tuple[bytes, int]] = set()
    for value in values[:1] if isinstance(values, Table) else values:
        head = bytes(value[0]) if len(value) > 1 else b""
        key = (head, sum(map(len, value)))
        if key in seen:
            continue
        raw = b"".join(value)
        check_value(column, raw)
        if raw[0] != _TEXT and len(head) >= _start(raw):
            seen.add(key)


def _start(raw: ColumnBytes) -> int:
    """Where the elements begin behind a header."""
    return -(-(4 + 4 * raw[1]) // 8) * 8


def _read_header(column: Column, raw: ColumnBytes) -> tuple[int, tuple[int, ...], int]:
    """Kind, shape, and where the elements begin; their number is checked."""
    if not 8 <= len(raw) <= MAX_VALUE_BYTES or raw[1] > MAX_DIMENSIONS:
        raise MessageError(f"column {column} has {len(raw)} bytes, which are no value")
    kind, start = raw[0], _start(raw)
    if len(raw) < start or (kind != _TEXT and kind not in _KINDS):
        raise MessageError(f"column {column} has {len(raw)} bytes of an unknown kind")
    shape: tuple[int, ...] = struct.unpack_from(f"<{raw[1]}I", raw, 4)
    if kind != _TEXT and (
        len(raw) - start != math.prod(shape) * _KINDS[kind].itemsize or _span_bytes(shape, kind) > MAX_VALUE_BYTES
    ):
        raise MessageError(f"column {column} has {len(raw) - start} bytes, which are no array of shape {shape}")
    return kind, shape, start


def _span_bytes(shape: Sequence[int], kind: int) -> int:
    """What an array would take if none of its dimensions were 0: numpy makes no empty one beyond 2^63."""
    return math.prod(max(1, size) for size in shape) * _KINDS[kind].itemsize


def _text(column: Column, raw: ColumnBytes) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise MessageError(f"column {column} is not text: {error}") from error
