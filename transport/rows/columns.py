"""Columns of rows as bytes, checked at the edge; and the row store's one interface.

Columns are raw little-endian arrays, because a list of 4,096 numbers costs 90 us in MessagePack and 1 us as bytes. What
a row means is the business of its writer; that its parts fit together is checked here, before it is stored.

Owns: codecs, validation, ``RowStore`` over the broker's own hashes (``unit_rows.py`` has the one over storage units).
Invariant: what ``commit`` stored has arrays of the column's dtype, of one length within a row, and no NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from transport.broker.base import Broker, Commit, CommitResult
from transport.broker.entries import check_block
from transport.contracts.messages import rollout_info_decoder
from transport.contracts.types import USER_PREFIX, Column, GroupId, RowId
from transport.errors import MessageError
from transport.rows.user_columns import ColumnBytes, check_value, check_values

COLUMN_DTYPES: Mapping[Column, np.dtype[Any]] = {
    Column.PROMPT_IDS: np.dtype("<i4"),
    Column.RESPONSE_IDS: np.dtype("<i4"),
    Column.ROLLOUT_LOGPROBS: np.dtype("<f4"),
    Column.REFERENCE_LOGPROBS: np.dtype("<f4"),
    Column.LOSS_MASK: np.dtype("u1"),
    Column.REWARD: np.dtype("<f4"),
    Column.ADVANTAGE: np.dtype("<f4"),
}
"""The columns that are arrays (all of one dimension)."""

SCALARS = frozenset({Column.REWARD, Column.ADVANTAGE})
"""Arrays of exactly one element."""

PER_TOKEN = (Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.REFERENCE_LOGPROBS, Column.LOSS_MASK)
"""Arrays of one length within a row."""

MAX_COLUMN_BYTES = 64 * 1024 * 1024
"""16 million tokens: a longer column is a mistake, not a response."""


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


def check_columns(columns: Mapping[Column, bytes]) -> None:
    """Check the columns that are written together. Raises MessageError naming the column that does not fit."""
    arrays = {column: decode_array(column, raw) for column, raw in columns.items() if column in COLUMN_DTYPES}
    lengths = {column: len(arrays[column]) for column in PER_TOKEN if column in arrays}
    if len(set(lengths.values())) > 1:
        parts = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise MessageError(f"columns of one row differ in length: {parts}")
    if lengths.get(Column.RESPONSE_IDS) == 0:
        raise MessageError("a response has no tokens")
    if Column.LOSS_MASK in arrays and arrays[Column.LOSS_MASK].max(initial=0) > 1:
        raise MessageError("a loss mask holds something else than 0 and 1")
    for column, raw in columns.items():
        if column.startswith(USER_PREFIX):
            check_value(column, raw)
    if Column.ROLLOUT_INFO in columns:
        _check_info(columns[Column.ROLLOUT_INFO], lengths.get(Column.RESPONSE_IDS))


def _check_info(raw: bytes, num_tokens: int | None) -> None:
    """Spans cover the response without gap or overlap, and it has as many tokens as it says."""
    info = rollout_info_decoder.decode(raw)
    end = 0
    for span in info.spans:
        if span.start != end or span.end <= span.start:
            raise MessageError(f"version spans of a row do not follow one another at token {end}")
        end = span.end
    if end != info.response_tokens or num_tokens not in (None, end):
        raise MessageError(f"a row of {num_tokens} tokens says {info.response_tokens} and has spans up to {end}")


class RowStore(Protocol):
    """Where rows live. The broker decides what was inserted; a store may keep the bytes elsewhere."""

    @property
    def commit_bytes(self) -> int:
        """How many bytes of values one commit should carry at most."""
        ...

    async def commit(self, commit: Commit) -> CommitResult:
        """The broker's atomic step, its columns checked first. Raises MessageError and writes nothing if one is bad."""
        ...

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """Per row the columns that exist; {} for a row that does not."""
        ...

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        """As ``read_rows``, with views where that saves a copy of each value."""
        ...

    async def read_groups(
        self, group_ids: Sequence[GroupId], columns: Sequence[Column]
    ) -> list[dict[Column, bytes]]: ...

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """Free the groups and their rows everywhere. Returns the bytes freed."""
        ...


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


class BrokerRows:
    """Rows in the broker's hashes."""

    commit_bytes = 4 * 1024 * 1024
    """A commit blocks the server: 4 MiB for some 10 ms, in which others wait."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        return await self._broker.commit(commit)

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._broker.read_rows(row_ids, columns)

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        return [{**row} for row in await self._broker.read_rows(row_ids, columns)]

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._broker.read_groups(group_ids, columns)

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        return await self._broker.drop_groups(group_ids)
