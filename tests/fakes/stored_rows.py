"""Rows, blocks of rows and storage units, as the tests of row stores want them."""

from __future__ import annotations

import numpy as np

from transport.broker import keys
from transport.broker.base import Append, Block, Commit, Entry, GroupWrite, RowWrite
from transport.contracts.types import Column, GroupId, RowId, group_id
from transport.rows.columns import RowStore, Values, decode_array, decode_value, encode_array, encode_values
from transport.rows.units import StorageUnit

GROUP = group_id(0, 0)
BOTH = (Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS)


def new_unit(units: list[StorageUnit], max_bytes: int = 1 << 20) -> str:
    """Start one more, which the fixture ``units`` closes. Returns its address."""
    units.append(StorageUnit(max_bytes=max_bytes))
    return units[-1].start()


def admit(*groups: GroupId, size: int = 2) -> Commit:
    prompt = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, [7, 8])}
    return Commit(groups=[GroupWrite(group_id=group, size=size, columns=prompt) for group in groups])


def response(row: RowId, ids: list[int], *, told: str = "") -> RowWrite:
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-0.5] * len(ids)),
    }
    told_to = [Append(stream=keys.EVENTS, entry=Entry(fields={"told": told}))] if told else []
    return RowWrite(row_id=row, columns=columns, on_insert=told_to)


async def ids_of(rows: RowStore, row: RowId) -> list[int] | None:
    (columns,) = await rows.read_rows([row], BOTH)
    return decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist() if columns else None


def ids_block(groups: list[GroupId], values: Values, size: int = 2) -> Block:
    return Block(group_ids=groups, size=size, columns={Column("x_ids"): encode_values(values)})


async def x_ids_of(rows: RowStore, row_ids: list[RowId]) -> list[list[int] | None]:
    column = Column("x_ids")
    found = await rows.read_views(row_ids, [column])
    return [np.asarray(decode_value(column, row[column])).tolist() if row else None for row in found]
