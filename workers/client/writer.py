"""What a client writes: rows of its own, and further columns of rows that it was handed.

Owns: names of its groups, sizes of commits. Invariant: a client writes user columns only: a run's own columns, written
from outside, would be scored and trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from transport.broker.base import Block, Commit, GroupWrite, RowWrite
from transport.contracts.types import USER_PREFIX, Column, GroupId, RowId, is_user_name, parse_row_id, row_id
from transport.rows.columns import RowStore
from transport.rows.user_columns import Values, encode_value, encode_values, sizes_of
from workers.errors import ClientError

COMMIT_ROWS = 128
BLOCK_ROWS = 512
"""A row of a block costs the server up to 5 us, in which others wait; and less would cost more round trips than overlap
with the next block's copying saves."""
COMMITS_AT_ONCE = 2
"""One is encoded and sent while the server works on the other."""
GROUP_PREFIX = "client-"
"""How group ids of clients begin. Those of a run begin with the number of their batch."""


class Writer:
    """name: of this client, unique in the run."""

    def __init__(self, rows: RowStore, name: str) -> None:
        self._rows = rows
        self._name = name
        self._numbers = count()

    def block_of(self, data: Mapping[str, Values], group_size: int) -> Block:
        """New rows; arguments and errors as Client.put_experience_data. Arrays are not copied (``encode_pieces``)."""
        num_rows = check_lengths(data, None)
        groups = self._new_groups(num_rows, group_size)
        columns = {_own_column(name): encode_values(values) for name, values in data.items()}
        return Block(group_ids=[group.group_id for group in groups], size=group_size, columns=columns)

    def commit_of(self, data: Mapping[str, Values], index: Sequence[RowId] | None, group_size: int) -> Commit:
        """All rows as one commit. Arguments and errors as Client.put_experience_data."""
        num_rows = check_lengths(data, index)
        columns = {_own_column(name): values for name, values in data.items()}
        groups = [] if index is not None else self._new_groups(num_rows, group_size)
        row_ids = index if index is not None else [row_id(g.group_id, s) for g in groups for s in range(g.size)]
        rows = [
            RowWrite(row_id=row, columns={column: encode_value(values[place]) for column, values in columns.items()})
            for place, row in enumerate(row_ids)
        ]
        return Commit(groups=groups, rows=rows)

    def _new_groups(self, num_rows: int, size: int) -> list[GroupWrite]:
        if size < 1 or num_rows % size:
            raise ValueError(f"{num_rows} rows make no whole groups of {size}")
        ids = (GroupId(f"{GROUP_PREFIX}{self._name}/{next(self._numbers)}") for _ in range(num_rows // size))
        return [GroupWrite(group_id=group_id, size=size, columns={}) for group_id in ids]

    async def write(self, commit: Commit) -> None:
        """Write rows in commits of bounded size; each of them is atomic. Raises as ``check_inserted``."""
        await self._write_all(pieces(commit, self._rows.commit_bytes))

    async def write_block(self, block: Block) -> None:
        """As ``write``, for new rows: a group is never cut."""
        await self._write_all([Commit(blocks=[part]) for part in block_pieces(block, self._rows.commit_bytes)])

    async def _write_all(self, commits: Sequence[Commit]) -> None:
        room = asyncio.Semaphore(COMMITS_AT_ONCE)

        async def write_one(commit: Commit) -> None:
            async with room:
                check_inserted(commit, (await self._rows.commit(commit)).inserted)

        await asyncio.gather(*(write_one(commit) for commit in commits))

    async def clear(self, index: Sequence[RowId]) -> int:
        groups = list(dict.fromkeys(parse_row_id(row)[0] for row in index))
        foreign = [group for group in groups if not group.startswith(GROUP_PREFIX)]
        if foreign:
            raise ClientError(f"rows of group {foreign[0]} are the run's: it frees them itself")
        return await self._rows.drop_groups(groups)


def check_lengths(data: Mapping[str, Values], index: Sequence[RowId] | None) -> int:
    """The number of rows. Raises ValueError when columns, or columns and index, differ in it."""
    lengths = {name: len(values) for name, values in data.items()}
    if index is not None:
        lengths["index"] = len(index)
    if not data or len(set(lengths.values())) != 1:
        raise ValueError(f"columns of one number of rows are needed, these have {lengths}")
    return next(iter(lengths.values()))


def _own_column(name: str) -> Column:
    if not is_user_name(name):
        raise ClientError(f"column {name!r} is not a client's: its name begins with {USER_PREFIX!r}, then a-z, 0-9, _")
    return Column(name)


def check_inserted(commit: Commit, inserted: Sequence[bool]) -> None:
    """Raises ClientError for a row that has one of these columns already, or is not there any more."""
    if all(inserted):
        return
    row_ids = [row.row_id for row in commit.rows] + [row for block in commit.blocks for row in block.row_ids()]
    refused = [row for row, was_inserted in zip(row_ids, inserted, strict=True) if not was_inserted]
    if refused:
        raise ClientError(
            f"{len(refused)} of {len(row_ids)} rows are not written: they have one of these columns already, "
            f"or were cleared: {', '.join(refused[:3])}"
        )


def block_pieces(block: Block, max_bytes: int) -> list[Block]:
    """Whole groups in blocks of bounded size."""
    bounds, nbytes = [0], 0
    sizes = [sizes_of(values) for values in block.columns.values()]
    for place in range(len(block.group_ids)):
        rows = slice(place * block.size, (place + 1) * block.size)
        of_group = sum(block.size * each[0] if len(each) == 1 else sum(each[rows]) for each in sizes)
        num_rows = (place + 1 - bounds[-1]) * block.size
        if place > bounds[-1] and (nbytes + of_group > max_bytes or num_rows > BLOCK_ROWS):
            bounds.append(place)
            nbytes = 0
        nbytes += of_group
    cuts = zip(bounds, [*bounds[1:], len(block.group_ids)], strict=True)
    return [_cut(block, first, end) for first, end in cuts if first < end]


def _cut(block: Block, first: int, end: int) -> Block:
    rows = slice(first * block.size, end * block.size)
    columns = {column: values[rows] for column, values in block.columns.items()}
    return replace(block, group_ids=block.group_ids[first:end], columns=columns)


def pieces(commit: Commit, max_bytes: int) -> list[Commit]:
    """The rows in commits of bounded size, each behind its own groups."""
    groups = {group.group_id: group for group in commit.groups}
    result: list[list[RowWrite]] = [[]]
    size = 0
    for row in commit.rows:
        num_bytes = sum(map(len, row.columns.values()))
        if result[-1] and (size + num_bytes > max_bytes or len(result[-1]) == COMMIT_ROWS):
            result.append([])
            size = 0
        result[-1].append(row)
        size += num_bytes
    return [replace(commit, rows=rows, groups=_groups_of(rows, groups)) for rows in result]


def _groups_of(rows: Sequence[RowWrite], groups: Mapping[GroupId, GroupWrite]) -> list[GroupWrite]:
    named = dict.fromkeys(parse_row_id(row.row_id)[0] for row in rows)
    return [groups[group_id] for group_id in named if group_id in groups]
