"""Columns of rows as bytes, checked at the edge; and the row store's one interface.

    a run's    a raw little-endian array whose type follows from its name, because a list of 4,096 numbers costs 90 us
               in MessagePack and 1 us as bytes; or a text, or a message
    a user's   (``x_...``) one array of any shape, as numpy.save writes it (version 1.0: C order, little-endian,
               elements from a multiple of 64 bytes on); or one text, its UTF-8, which never begins with the first byte
               of such a file. NaN and infinity are the user's business

What a row means is the business of its writer; that its parts fit together is checked here, before it is stored.

Owns: codecs, validation, ``RowStore`` over the broker's own hashes (``unit_rows.py`` has the one over storage units).
Invariants: what ``commit`` stored has arrays of the column's dtype, of one length within a row, and no NaN or infinity;
what ``decode_value`` returns has exactly the shape, type and elements that were encoded.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.lib import format as npy
from numpy.typing import ArrayLike, NDArray

from transport.broker.base import Broker, Commit, CommitResult, check_block
from transport.contracts.messages import RolloutInfo, rollout_info_decoder
from transport.contracts.types import MAX_DIMENSIONS, USER_PREFIX, Column, GroupId, RowId, Segment, SegmentKind
from transport.errors import MessageError

COLUMN_DTYPES: Mapping[Column, np.dtype[Any]] = {
    Column.PROMPT_IDS: np.dtype("<i4"),
    Column.RESPONSE_IDS: np.dtype("<i4"),
    Column.ROLLOUT_LOGPROBS: np.dtype("<f4"),
    Column.REFERENCE_LOGPROBS: np.dtype("<f4"),
    Column.LOSS_MASK: np.dtype("u1"),
    Column.BRANCH_ENDS: np.dtype("<i4"),
    Column.REWARD: np.dtype("<f4"),
    Column.ADVANTAGE: np.dtype("<f4"),
    Column.VALUES: np.dtype("<f4"),
    Column.VALUE_WEIGHTS: np.dtype("<i4"),
    Column.TOKEN_ADVANTAGES: np.dtype("<f4"),
    Column.RETURNS: np.dtype("<f4"),
}
"""The columns that are arrays (all of one dimension)."""
SCALARS = frozenset({Column.REWARD, Column.ADVANTAGE})  # arrays of exactly one element
PER_TOKEN = (
    *(Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.REFERENCE_LOGPROBS, Column.LOSS_MASK),
    *(Column.VALUES, Column.TOKEN_ADVANTAGES, Column.RETURNS),
)
"""Arrays of one length within a row."""
MAX_COLUMN_BYTES = 64 * 1024 * 1024  # of one value: 16 million tokens. More is a mistake, not a response
Value: TypeAlias = "NDArray[Any] | str"
Values: TypeAlias = "Sequence[object] | NDArray[Any]"  # values of many rows: one each, or the rows of one array
EncodedPieces: TypeAlias = tuple[bytes, bytes | memoryview]  # header and elements
ColumnBytes: TypeAlias = bytes | memoryview  # a value as it is read; views belong to their reader and are read-only
_DTYPES = tuple(np.dtype(name) for name in ("?", "u1", "i1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8"))
_MAGIC = npy.magic(1, 0)
_PREFIX_BYTES = len(_MAGIC) + 2  # the magic number, and the length of what follows of the header
_HEADER = re.compile(rb"\{'descr': '[<|][a-z][0-9]', 'fortran_order': False, 'shape': \([0-9, ]{0,120}\), \} {0,256}\n")
"""All that numpy writes for these types; numpy's reader would evaluate other text too, at other costs."""
_NUM_HEADERS = 4096  # headers that are kept: a column has few, or as many as its responses have lengths


def encode_array(column: Column, values: ArrayLike) -> bytes:
    """The bytes of an array column.

    Args:   values: [N], convertible to the column's dtype without changing kind (int64 -> int32 is fine, float -> int
            is not).
    Raises: ValueError: a column that is no array, another number of dimensions, or values that do not convert.
    """
    dtype = COLUMN_DTYPES.get(column)
    array = np.asarray(values)
    if dtype is None or array.ndim != 1 or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(f"column {column} is not made from an array of shape {array.shape}, {array.dtype}")
    return array.astype(dtype, copy=False).tobytes()


def decode_array(column: Column, raw: ColumnBytes) -> NDArray[Any]:
    """The array of a column, read-only, in the column's dtype.

    Raises: MessageError: a column that is no array, bytes that are no whole number of elements, a scalar column of
            another length, a NaN or an infinity.
    """
    dtype = COLUMN_DTYPES.get(column)
    if dtype is None:
        raise MessageError(f"column {column} is not an array")
    if len(raw) % dtype.itemsize or len(raw) > MAX_COLUMN_BYTES:
        raise MessageError(f"column {column} has {len(raw)} bytes, which are no {dtype} array")
    array = np.frombuffer(raw, dtype)
    if column in SCALARS and len(array) != 1:
        raise MessageError(f"column {column} has {len(array)} elements instead of one")
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise MessageError(f"column {column} holds a value that is not finite")
    return array


def decode_scalar(column: Column, raw: bytes) -> float:
    """The value of a column of one element. Raises MessageError as ``decode_array`` does."""
    return float(decode_array(column, raw)[0])


# --- users' columns


def encode_value(value: object) -> bytes:
    """The bytes of one value.

    Args:   value: a text, or anything that numpy makes an array of bool, integers or floats of.
    Raises: ValueError: another type (bfloat16: view it as int16), or more than MAX_COLUMN_BYTES.
    """
    return b"".join(encode_pieces(value))


def encode_pieces(value: object) -> EncodedPieces:
    """As ``encode_value``, the header and the elements apart: those of an array are not copied, so it must not change
    until they are written."""
    if isinstance(value, str):
        head, elements = b"", value.encode()
    else:
        array = np.asarray(value)
        dtype = array.dtype.newbyteorder("<")
        if not _can_hold(dtype, array.shape):
            known = ", ".join(map(str, _DTYPES))
            raise ValueError(f"no column holds {array.dtype} of shape {array.shape}; text and {known} can be stored")
        head, elements = _header_of(dtype, array.shape), _elements(array)
    if (nbytes := len(head) + len(elements)) > MAX_COLUMN_BYTES:
        raise ValueError(f"a value of {nbytes} bytes is over the limit of {MAX_COLUMN_BYTES}")
    return head, elements


@lru_cache(_NUM_HEADERS)
def _header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Table(Sequence[EncodedPieces]):
    """Encoded values of one type and shape, so that what holds for one holds for all."""

    head: bytes  # of each
    elements: memoryview  # of all, one value after another
    of_each: int  # bytes of elements

    @property
    def nbytes(self) -> int:
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
    return Table(head, _elements(array), len(first))


def sizes_of(values: Sequence[Sequence[bytes | memoryview]]) -> Sequence[int]:
    """Bytes of each value, which is in pieces; of one only where all have as many."""
    if isinstance(values, Table):
        return [values.nbytes]
    sizes = [sum(map(len, value)) for value in values]
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def _elements(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def decode_value(column: Column, raw: ColumnBytes) -> Value:
    """The value: an array (read-only, a view of ``raw``) or a text. Raises MessageError for any other bytes."""
    if layout := _layout_of(column, raw):
        return np.frombuffer(raw, layout.dtype, offset=layout.start).reshape(layout.shape)
    if len(raw) > MAX_COLUMN_BYTES:
        raise MessageError(f"column {column} has {len(raw)} bytes: a text has {MAX_COLUMN_BYTES} at most")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise MessageError(f"column {column} is neither an array as numpy saves it nor a text: {error}") from error


def decode_table(column: Column, raws: Sequence[ColumnBytes]) -> NDArray[Any] | list[Value]:
    """All values as one read-only array [N, ...] where they are arrays of one type and shape, else one by one."""
    layouts = {_layout_of(column, raw) for raw in raws}
    layout = layouts.pop() if len(layouts) == 1 else None
    if layout is None:
        return [decode_value(column, raw) for raw in raws]
    elements = _as_table(raws)[:, layout.start : len(raws[0])].view(layout.dtype)
    return elements.reshape(len(raws), *layout.shape)


def _as_table(raws: Sequence[ColumnBytes]) -> NDArray[np.uint8]:
    """[N, bytes or more] of values of one size, which do not overlap and lie in their order where they share a buffer:
    then the ends show whether they are at equal distances, and nothing is copied."""
    rows = [np.frombuffer(raw, np.uint8) for raw in (raws[0], raws[-1])]
    first, last = (row.__array_interface__["data"][0] for row in rows)
    stride = len(raws[0]) + -len(raws[0]) % 8
    shared = {id(raw.obj) if isinstance(raw, memoryview) else id(raw) for raw in raws}
    if len(shared) == 1 and last - first == (len(raws) - 1) * stride:
        return np.lib.stride_tricks.as_strided(rows[0], (len(raws), len(raws[0])), (stride, 1), writeable=False)
    table = np.stack([np.frombuffer(raw, np.uint8) for raw in raws])
    table.flags.writeable = False
    return table


def check_values(column: Column, values: Iterable[Sequence[bytes | memoryview]]) -> None:
    """Raises MessageError unless the values, in pieces, are what ``encode_pieces`` gives."""
    seen: set[tuple[bytes, int]] = set()
    for value in values[:1] if isinstance(values, Table) else values:
        key = (bytes(value[0]), sum(map(len, value)))
        if key in seen:  # arrays with one header and one size are right or wrong together
            continue
        raw = b"".join(value)
        layout = _layout_of(column, raw)
        if layout is None:
            decode_value(column, raw)
        elif len(value[0]) >= layout.start:
            seen.add(key)


class _Layout(NamedTuple):
    """start: where the elements begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


def _layout_of(column: Column, raw: ColumnBytes) -> _Layout | None:
    """What the header of an array says, after it and the number of bytes behind it were checked; None of a text."""
    if raw[: len(_MAGIC)] != _MAGIC:
        return None
    start = _PREFIX_BYTES + int.from_bytes(raw[len(_MAGIC) : _PREFIX_BYTES], "little")
    try:
        return _read_header(bytes(raw[:start]), len(raw))
    except ValueError as error:
        raise MessageError(f"column {column} has {len(raw)} bytes, which are no array of ours: {error}") from error


@lru_cache(_NUM_HEADERS)
def _read_header(header: bytes, nbytes: int) -> _Layout:
    """nbytes: of header and elements. Raises ValueError."""
    if not _HEADER.fullmatch(header, _PREFIX_BYTES):
        raise ValueError("its header is not as numpy writes it")
    shape, _, dtype = npy.read_array_header_1_0(io.BytesIO(header[len(_MAGIC) :]))
    if not _can_hold(dtype, shape):
        raise ValueError(f"no column holds {dtype} of shape {shape}")
    if len(header) + math.prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"an array of {dtype} and shape {shape} has another size")
    return _Layout(dtype, shape, len(header))


def _can_hold(dtype: np.dtype[Any], shape: Sequence[int]) -> bool:
    """Also an empty array is measured as if none of its dimensions were 0: numpy makes none beyond 2^63."""
    span_bytes = math.prod(max(1, size) for size in shape) * dtype.itemsize
    return dtype in _DTYPES and len(shape) <= MAX_DIMENSIONS and span_bytes <= MAX_COLUMN_BYTES


# --- what is written together, and where it is kept


def check_columns(columns: Mapping[Column, bytes]) -> None:
    """Check the columns that are written together. Raises MessageError naming the column that does not fit."""
    arrays = {column: decode_array(column, raw) for column, raw in columns.items() if column in COLUMN_DTYPES}
    lengths = {column: len(arrays[column]) for column in PER_TOKEN if column in arrays}
    if len(set(lengths.values())) > 1:
        parts = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise MessageError(f"columns of one row differ in length: {parts}")
    if lengths.get(Column.RESPONSE_IDS) == 0:
        raise MessageError("a response has no tokens")
    mask = arrays.get(Column.LOSS_MASK)
    if mask is not None and mask.max(initial=0) > 1:
        raise MessageError("a loss mask holds something else than 0 and 1")
    if Column.BRANCH_ENDS in arrays:
        _check_branches(arrays[Column.BRANCH_ENDS], mask, next(iter(lengths.values()), None))
    for column, raw in columns.items():
        if column.startswith(USER_PREFIX):
            decode_value(column, raw)
    if Column.ROLLOUT_INFO in columns:
        info = rollout_info_decoder.decode(columns[Column.ROLLOUT_INFO])
        _check_info(info, next(iter(lengths.values()), None))
        if info.segments and (mask is None or not np.array_equal(mask, loss_mask(info.segments))):
            raise MessageError("the loss mask of a row is not what its segments say")


def _check_branches(ends: NDArray[np.int32], mask: NDArray[np.uint8] | None, num_tokens: int | None) -> None:
    """Branches follow one another to the end of the response, and in each there is something to train."""
    lengths = np.diff(ends.astype(np.int64), prepend=0)  # of hostile 32-bit numbers, a difference may wrap around
    if not len(ends) or ends[-1] != num_tokens or (lengths <= 0).any():
        raise MessageError(f"branches of a row of {num_tokens} tokens end at {ends[:8].tolist()}")
    starts = np.concatenate([[0], ends[:-1]])
    if mask is None or not np.add.reduceat(mask, starts, dtype=np.int64).all():
        raise MessageError("a branch of a row has no token of the policy, or no loss mask says which are")


def loss_mask(segments: Sequence[Segment]) -> NDArray[np.uint8]:
    """[R] uint8 of a response of these segments: 1 where the policy chose the token."""
    starts = (0, *(segment.end for segment in segments))
    lengths = [segment.end - start for segment, start in zip(segments, starts, strict=False)]
    return np.repeat(np.array([one.kind is SegmentKind.POLICY for one in segments], np.uint8), lengths)


def _check_info(info: RolloutInfo, num_tokens: int | None) -> None:
    """Spans cover the response without gap or overlap, segments too, and it has as many tokens as it says."""
    end = 0
    for span in info.spans:
        if span.start != end or span.end <= span.start:
            raise MessageError(f"version spans of a row do not follow one another at token {end}")
        end = span.end
    if end != info.response_tokens or num_tokens not in (None, end):
        raise MessageError(f"a row of {num_tokens} tokens says {info.response_tokens} and has spans up to {end}")
    ends = [0, *(segment.end for segment in info.segments)]
    if len(ends) > 1 and (ends[-1] != end or any(b <= a for a, b in itertools.pairwise(ends))):
        raise MessageError(f"segments of a row of {end} tokens end at {ends[1:]}")


def check_commit(commit: Commit) -> None:
    """Check every column of a commit.

    Raises: MessageError naming row, group or column; ValueError: a run's column in a block, or one that is no block.
    """
    written = [(row.row_id, row.columns) for row in commit.rows]
    written += [(group.group_id, group.columns) for group in commit.groups]
    for unit_id, columns in written:
        try:
            check_columns(columns)
        except MessageError as error:
            raise MessageError(f"{unit_id}: {error}") from error
    for block in commit.blocks:
        check_block(block)
        for column, values in block.columns.items():
            if not column.startswith(USER_PREFIX):
                raise ValueError(f"column {column} of a run is not written in blocks: its rows are made one by one")
            check_values(column, values)


class RowStore:
    """Rows in the broker's hashes; ``UnitRows`` keeps bulky columns elsewhere. The broker decides what was inserted."""

    commit_bytes = 4 * 1024 * 1024  # of values in one commit, which blocks the server: some 10 ms, in which others wait

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def commit(self, commit: Commit) -> CommitResult:
        """The broker's atomic step, its columns checked first. Raises MessageError and writes nothing if one is bad."""
        check_commit(commit)
        return await self._broker.commit(commit)

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """Per row the columns that exist; {} for a row that does not."""
        return await self._broker.read_rows(row_ids, columns)

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        """As ``read_rows``, with views where that saves a copy of each value."""
        return [{**row} for row in await self._broker.read_rows(row_ids, columns)]

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._broker.read_groups(group_ids, columns)

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """Free the groups and their rows everywhere. Returns the bytes freed."""
        return await self._broker.drop_groups(group_ids)

    def close(self) -> None:
        """Disconnect from what is not the broker."""
