"""What a client writes: rows of its own, and further columns of rows that it was handed.

Owns: names of its groups, sizes of commits. Invariant: a client writes user columns only: a run's own columns, written
from outside, would be scored and trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice

from transport.broker.base import Block, Commit, RowWrite
from transport.contracts.types import USER_PREFIX, Column, GroupId, RowId, is_user_name, parse_row_id
from transport.rows.columns import RowStore, Values, encode_value, encode_values, sizes_of
from workers.errors import ClientError

COMMIT_ROWS = 128
BLOCK_ROWS = 512
"""A row of a block costs the server up to 5 us, in which others wait; and less would cost more round trips than overlap
with the next block's copying saves."""
COMMITS_AT_ONCE = 2  # one is encoded and sent while the server works on the other
GROUP_PREFIX = "client-"  # how group ids of clients begin. Those of a run begin with the number of their batch


class Writer:
    """name: of this client, unique in the run."""

    def __init__(self, rows: RowStore, name: str) -> None:
        self._rows = rows
        self._name = name
        self._numbers = count()

    def new_rows(self, data: Mapping[str, Values], group_size: int) -> Block:
        """Arguments and errors as Client.put_experience_data. Arrays are not copied (``encode_pieces``)."""
        num_rows = check_lengths(data, None)
        if group_size < 1 or num_rows % group_size:
            raise ValueError(f"{num_rows} rows make no whole groups of {group_size}")
        numbers = islice(self._numbers, num_rows // group_size)
        group_ids = [GroupId(f"{GROUP_PREFIX}{self._name}/{number}") for number in numbers]
        columns = {_own_column(name): encode_values(values) for name, values in data.items()}
        return Block(group_ids=group_ids, size=group_size, columns=columns)

    def further_columns(self, data: Mapping[str, Values], index: Sequence[RowId]) -> list[RowWrite]:
        """Of rows that exist. Arguments and errors as Client.put_experience_data."""
        check_lengths(data, index)
        columns = {_own_column(name): values for name, values in data.items()}
        return [
            RowWrite(row_id=row, columns={column: encode_value(values[place]) for column, values in columns.items()})
            for place, row in enumerate(index)
        ]

    async def write(self, commit: Commit) -> None:
        """Write rows in commits of bounded size; each of them is atomic. Raises as ``check_inserted``."""
        room = asyncio.Semaphore(COMMITS_AT_ONCE)

        async def write_one(part: Commit) -> None:
            async with room:
                check_inserted(part, (await self._rows.commit(part)).inserted)

        await asyncio.gather(*map(write_one, pieces(commit, self._rows.commit_bytes)))

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
    raise ClientError(
        f"{len(refused)} of {len(row_ids)} rows are not written: they have one of these columns already, "
        f"or were cleared: {', '.join(refused[:3])}"
    )


def pieces(commit: Commit, max_bytes: int) -> list[Commit]:
    """The rows in commits of bounded size; groups of a block stay whole."""
    nbytes = [sum(map(len, row.columns.values())) for row in commit.rows]
    result = [Commit(rows=commit.rows[part]) for part in _cut(nbytes, max_bytes, COMMIT_ROWS)]
    for block in commit.blocks:
        size, columns = block.size, block.columns
        groups = [slice(start, start + size) for start in range(0, len(block.group_ids) * size, size)]
        sizes = [sizes_of(values) for values in columns.values()]
        nbytes = [sum(size * each[0] if len(each) == 1 else sum(each[rows]) for each in sizes) for rows in groups]
        for part in _cut(nbytes, max_bytes, BLOCK_ROWS // size):
            rows = slice(part.start * size, part.stop * size)
            of_part = {column: values[rows] for column, values in columns.items()}
            result.append(Commit(blocks=[replace(block, group_ids=block.group_ids[part], columns=of_part)]))
    return result


def _cut(sizes: Sequence[int], max_bytes: int, max_items: int) -> list[slice]:
    """Items in order, in parts of bounded bytes and number; but each part has one item at least."""
    bounds, nbytes = [0], 0
    for place, size in enumerate(sizes):
        if place > bounds[-1] and (nbytes + size > max_bytes or place - bounds[-1] >= max_items):
            bounds.append(place)
            nbytes = 0
        nbytes += size
    return [slice(first, end) for first, end in zip(bounds, [*bounds[1:], len(sizes)], strict=True) if first < end]
