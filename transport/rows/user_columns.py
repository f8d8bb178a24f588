"""What a user's column holds: one array of any shape, or one text.

    an array   as numpy.save writes it, version 1.0: C order, little-endian, elements from a multiple of 64 bytes on
    a text     its UTF-8, which never begins with the first byte of such a file

The run's own columns need no header, because their type follows from their name; a user's name says nothing. NaN and
infinity are the user's business. Invariant: what ``decode_value`` returns has exactly the shape, type and elements that
were encoded.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from transport.contracts.types import MAX_DIMENSIONS, Column
from transport.errors import MessageError

Value: TypeAlias = "NDArray[Any] | str"
Values: TypeAlias = "Sequence[object] | NDArray[Any]"
"""Values of many rows: one each, or the rows of one array."""
EncodedPieces: TypeAlias = tuple[bytes, bytes | memoryview]
"""Header and elements."""
ColumnBytes: TypeAlias = bytes | memoryview
"""A value as it is read; views belong to their reader and are read-only."""

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""As for a run's column: more is a mistake, not a row."""

_DTYPES = tuple(np.dtype(name) for name in ("?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"))
_MAGIC = npy.magic(1, 0)
_PREFIX_BYTES = len(_MAGIC) + 2
"""The magic number, and the length of what follows of the header."""
_HEADER = re.compile(rb"\{'descr': '[<|][a-z][0-9]', 'fortran_order': False, 'shape': \([0-9, ]{0,120}\), \} {0,256}\n")
"""All that numpy writes for these types; numpy's reader would evaluate other text too, at other costs."""
_NUM_HEADERS = 4096
"""Headers that are kept: a column has few, or as many as its responses have lengths."""


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
        return _checked(b"", value.encode())
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DTYPES or array.ndim > MAX_DIMENSIONS or _span_bytes(array.shape, dtype) > MAX_VALUE_BYTES:
        known = ", ".join(map(str, _DTYPES))
        raise ValueError(f"no column holds {array.dtype} of shape {array.shape}; text and {known} can be stored")
    return _checked(_header_of(dtype, array.shape), _elements(array.astype(dtype, copy=False)))


@lru_cache(_NUM_HEADERS)
def _header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return file.getvalue()


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


def decode_value(column: Column, raw: ColumnBytes) -> Value:
    """The value: an array (read-only, a view of ``raw``) or a text. Raises MessageError for any other bytes."""
    if not _is_array(raw):
        return _text(column, raw)
    dtype, shape, start = _layout_of(column, raw)
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def decode_table(column: Column, raws: Sequence[ColumnBytes]) -> NDArray[Any] | list[Value]:
    """All values as one read-only array [N, ...] where they are arrays of one type and shape, else one by one.

    Values that lie in one buffer at equal distances are not copied.
    """
    layouts = {_layout_of(column, raw) if _is_array(raw) else None for raw in raws}
    layout = layouts.pop() if len(layouts) == 1 else None
    if layout is None:
        return [decode_value(column, raw) for raw in raws]
    elements = _as_table(raws)[:, layout.start : len(raws[0])].view(layout.dtype)
    return elements.reshape(len(raws), *layout.shape)


def _as_table(raws: Sequence[ColumnBytes]) -> NDArray[np.uint8]:
    """[N, bytes or more] of values of one size, which do not overlap and lie in their order where they share a buffer:
    then the ends show whether they are at equal distances."""
    rows = [np.frombuffer(raw, np.uint8) for raw in (raws[0], raws[-1])]
    first, last = (row.__array_interface__["data"][0] for row in rows)
    stride = len(raws[0]) + -len(raws[0]) % 8
    shared = {id(raw.obj) if isinstance(raw, memoryview) else id(raw) for raw in raws}
    if len(shared) == 1 and last - first == (len(raws) - 1) * stride:
        return np.lib.stride_tricks.as_strided(rows[0], (len(raws), len(raws[0])), (stride, 1), writeable=False)
    table = np.stack([np.frombuffer(raw, np.uint8) for raw in raws])
    table.flags.writeable = False
    return table


def check_value(column: Column, raw: bytes) -> None:
    """Raises MessageError unless ``raw`` is what ``encode_value`` gives."""
    if _is_array(raw):
        _layout_of(column, raw)
    else:
        _text(column, raw)


def check_values(column: Column, values: Iterable[Sequence[bytes | memoryview]]) -> None:
    """``check_value`` for values in pieces. Arrays with one header and one size are right or wrong together, so each
    such pair is looked at once."""
    seen: set[tuple[bytes, int]] = set()
    for value in values[:1] if isinstance(values, Table) else values:
        key = (bytes(value[0]), sum(map(len, value)))
        if key in seen:
            continue
        raw = b"".join(value)
        check_value(column, raw)
        if _is_array(raw) and len(value[0]) >= _start(raw):
            seen.add(key)


class _Layout(NamedTuple):
    """start: where the elements begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


def _is_array(raw: ColumnBytes) -> bool:
    return raw[: len(_MAGIC)] == _MAGIC


def _start(raw: ColumnBytes) -> int:
    return _PREFIX_BYTES + int.from_bytes(raw[len(_MAGIC) : _PREFIX_BYTES], "little")


def _layout_of(column: Column, raw: ColumnBytes) -> _Layout:
    """What the header of an array says, after it and the number of bytes behind it were checked."""
    try:
        return _read_header(bytes(raw[: _start(raw)]), len(raw))
    except ValueError as error:
        raise MessageError(f"column {column} has {len(raw)} bytes, which are no array of ours: {error}") from error


@lru_cache(_NUM_HEADERS)
def _read_header(header: bytes, nbytes: int) -> _Layout:
    """nbytes: of header and elements. Raises ValueError."""
    if not _HEADER.fullmatch(header, _PREFIX_BYTES):
        raise ValueError("its header is not as numpy writes it")
    shape, _, dtype = npy.read_array_header_1_0(io.BytesIO(header[len(_MAGIC) :]))
    if dtype not in _DTYPES or len(shape) > MAX_DIMENSIONS or _span_bytes(shape, dtype) > MAX_VALUE_BYTES:
        raise ValueError(f"no column holds {dtype} of shape {shape}")
    if len(header) + math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} has another size")
    return _Layout(dtype, shape, len(header))


def _span_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """What an array would take if none of its dimensions were 0: numpy makes no empty one beyond 2^63."""
    return math.prod(max(1, size) for size in shape) * dtype.itemsize


def _text(column: Column, raw: ColumnBytes) -> str:
    if len(raw) > MAX_VALUE_BYTES:
        raise MessageError(f"column {column} has {len(raw)} bytes: a text has {MAX_VALUE_BYTES} at most")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise MessageError(f"column {column} is neither an array as numpy saves it nor a text: {error}") from error
