"""What a client reads: rows of a task with the columns that it asked for, exactly as they were written; or as a PyTorch
DataLoader, without padding.

Source: AsyncFlow sec. 3.4 (Code 1: ``for batch_data, index in loader``) and 3.5: rows of different lengths are
concatenated, and restored from their lengths. Invariants: a batch holds only rows that have every column asked for;
``Ragged.split`` gives exactly the arrays that were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from transport.contracts.types import GROUP_COLUMNS, USER_PREFIX, Column, RowId, parse_row_id
from transport.rows.columns import (
    COLUMN_DTYPES,
    ColumnBytes,
    RowStore,
    Value,
    decode_array,
    decode_table,
    decode_value,
)
from workers.errors import ClientError

if TYPE_CHECKING:  # torch takes seconds to import, and who only puts rows needs none
    import torch
    from torch.utils.data import DataLoader

TEXTS = frozenset({Column.PROMPT_TEXT, Column.TASK_ENTRY, Column.REWARD_COMPONENTS})  # the run's columns that are text


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperienceBatch:
    """Rows that one consumer holds until it is done with them."""

    task: str
    index: list[RowId]  # [N], for write-backs
    columns: dict[str, list[Value]]  # name -> [N] values; arrays are read-only
    num_missing: int = 0  # rows handed out too, but gone or not whole: cleared, or trained and freed by the run
    ended: bool = False  # no more will come, all that came was consumed by someone, and this batch is empty
    waited_out: bool = False  # nothing came in time
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
    return whole, {
        str(column): (decode_table if column.startswith(USER_PREFIX) else _decode)(column, raws[column])
        for column in columns
    }


async def _read_whole(
    rows: RowStore, row_ids: Sequence[RowId], columns: Sequence[Column]
) -> tuple[list[RowId], dict[Column, list[ColumnBytes]]]:
    """The rows that have all ``columns``, in order, and their bytes by column."""
    shared = [column for column in columns if column in GROUP_COLUMNS]
    own = [column for column in columns if column not in GROUP_COLUMNS]
    of_row = await rows.read_views(row_ids, own) if own else [{} for _ in row_ids]
    if shared:  # a run's prompt: read once for each group
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


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, one after another. values: [sum(lengths), ...].  lengths: [N] int64, of each row."""

    values: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[torch.Tensor]:
        """[N] views of ``values``, one a row."""
        return list(self.values.split(self.lengths.tolist()))

    def padded(self, fill: float = 0.0, *, multiple_of: int = 1) -> torch.Tensor:
        """[N, T, ...], ``fill`` behind each row's end. T: the longest row, rounded up to ``multiple_of``."""
        import torch

        longest = int(self.lengths.max()) if len(self) else 0
        width = -(-longest // multiple_of) * multiple_of
        result = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        result[torch.arange(width) < self.lengths[:, None]] = self.values
        return result


Field: TypeAlias = "Ragged | torch.Tensor | list[str]"
TensorBatch: TypeAlias = "tuple[dict[str, Field], list[RowId]]"
"""batch_data: column -> Ragged; [N] of values without a dimension; texts.  index: [N] row ids for write-backs."""


def stream_loader(batches: Callable[[], Iterator[ExperienceBatch]]) -> DataLoader[TensorBatch]:
    """Batches come whole, so the loader neither collates nor needs worker processes, which have no connection."""
    from torch.utils.data import DataLoader, IterableDataset

    class StreamDataset(IterableDataset[TensorBatch]):
        def __iter__(self) -> Iterator[TensorBatch]:
            for batch in batches():
                yield {name: to_field(values) for name, values in batch.columns.items()}, batch.index

    return DataLoader(StreamDataset(), batch_size=None, num_workers=0, collate_fn=lambda batch: batch)


def to_field(values: Sequence[Value]) -> Field:
    """Values of one column as one field. Raises ValueError when their types or trailing dimensions differ."""
    import torch

    if not values:
        return Ragged(torch.empty(0), torch.empty(0, dtype=torch.int64))
    if isinstance(values[0], str):
        return [str(value) for value in values]
    arrays = cast("Sequence[NDArray[np.generic]]", values)
    if len({array.dtype for array in arrays}) > 1:
        raise ValueError(f"one column has values of types {sorted({str(array.dtype) for array in arrays})}")
    if arrays[0].ndim == 0:
        return torch.from_numpy(np.stack(arrays))
    lengths = torch.tensor([len(array) for array in arrays], dtype=torch.int64)
    return Ragged(torch.from_numpy(np.concatenate(arrays)), lengths)
