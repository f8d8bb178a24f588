"""What a client reads: rows of a task with the columns that it asked for, exactly as they were written.

Owns: the batch, and how each column is read. Invariant: a batch holds only rows that have every column asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from transport.contracts.types import GROUP_COLUMNS, USER_PREFIX, Column, RowId, parse_row_id
from transport.rows.columns import COLUMN_DTYPES, RowStore, decode_array
from transport.rows.user_columns import ColumnBytes, Value, decode_table, decode_value
from workers.errors import ClientError

TEXTS = frozenset({Column.PROMPT_TEXT, Column.TASK_ENTRY, Column.REWARD_COMPONENTS})
"""The run's columns that are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceBatch:
    """Rows that one consumer holds until it is done with them.

    index: [N] row ids, for write-backs.  columns: name -> [N] values; arrays are read-only.  num_missing: rows that
    were handed out too and are not there any more, or not whole (they were cleared, or the run trained and freed them).
    ended: the stream has ended, everything that came was consumed by someone, and this batch is empty.
    waited_out: nothing came in time.
    """

    task: str
    index: list[RowId]
    columns: dict[str, list[Value]]
    num_missing: int = 0
    ended: bool = False
    waited_out: bool = False
    consumer: str = field(default="", repr=False)

    def __len__(self) -> int:
        return len(self.index)


def known_columns(names: Sequence[str]) -> list[Column]:
    """Raises ClientError for a column that does not exist, or that is neither array nor text."""
    columns: list[Column] = []
    for name in names:
        try:
            column = Column(name)
        except ValueError:
            raise ClientError(f"there is no column {name!r}; a user's own begin with {USER_PREFIX!r}") from None
        if column not in TEXTS and column not in COLUMN_DTYPES and not column.startswith(USER_PREFIX):
            raise ClientError(f"column {name!r} is neither an array nor a text")
        columns.append(column)
    return columns


async def read_rows(
    rows: RowStore, row_ids: Sequence[RowId], columns: Sequence[Column]
) -> tuple[list[RowId], dict[str, list[Value]]]:
    """The rows that have all ``columns``, in order, and their values by column. Raises MessageError: damaged bytes."""
    whole, raws = await _read_whole(rows, row_ids, columns)
    return whole, {str(column): _decode(column, raws[column]) for column in columns}


async def read_tables(
    rows: RowStore, row_ids: Sequence[RowId], columns: Sequence[Column]
) -> tuple[list[RowId], dict[str, NDArray[Any] | list[Value]]]:
    """As ``read_rows``; users' columns as ``decode_table`` gives them."""
    whole, raws = await _read_whole(rows, row_ids, columns)
    tables = {
        str(column): decode_table(column, raws[column])
        if column.startswith(USER_PREFIX)
        else _decode(column, raws[column])
        for column in columns
    }
    return whole, tables


async def _read_whole(
    rows: RowStore, row_ids: Sequence[RowId], columns: Sequence[Column]
) -> tuple[list[RowId], dict[Column, list[ColumnBytes]]]:
    """The rows that have all ``columns``, in order, and their bytes by column.

    Columns of the group (a run's prompt) are read once for each group.
    """
    shared = [column for column in columns if column in GROUP_COLUMNS]
    own = [column for column in columns if column not in GROUP_COLUMNS]
    of_row = await rows.read_views(row_ids, own) if own else [{} for _ in row_ids]
    if shared:
        group_of = [parse_row_id(row_id)[0] for row_id in row_ids]
        groups = list(dict.fromkeys(group_of))
        of_group = dict(zip(groups, await rows.read_groups(groups, shared), strict=True))
        of_row = [{**of_group[group], **values} for group, values in zip(group_of, of_row, strict=True)]
    found = zip(row_ids, of_row, strict=True)
    whole = [(row_id, values) for row_id, values in found if len(values) == len(columns)]
    return [row_id for row_id, _ in whole], {column: [values[column] for _, values in whole] for column in columns}


def _decode(column: Column, raws: Sequence[ColumnBytes]) -> list[Value]:
    if column.startswith(USER_PREFIX):
        return [decode_value(column, raw) for raw in raws]
    return [str(raw, "utf-8", "replace") if column in TEXTS else decode_array(column, raw) for raw in raws]
