"""A task's stream as a PyTorch DataLoader, without padding.

Source: AsyncFlow sec. 3.4 (Code 1: ``for batch_data, index in loader``) and 3.5: rows of different lengths are
concatenated, and restored from their lengths.

Owns: the conversion to tensors. Invariant: ``Ragged.split`` gives exactly the arrays that were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from transport.contracts.types import RowId
from transport.rows.user_columns import Value
from workers.client.consumption import Stream


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, one after another.

    values: [sum(lengths), ...].  lengths: [N] int64, of each row.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> list[torch.Tensor]:
        """[N] views of ``values``, one a row."""
        return list(self.values.split(self.lengths.tolist()))

    def padded(self, fill: float = 0.0, *, multiple_of: int = 1) -> torch.Tensor:
        """[N, T, ...], ``fill`` behind each row's end. T: the longest row, rounded up to ``multiple_of``."""
        longest = int(self.lengths.max()) if len(self) else 0
        width = -(-longest // multiple_of) * multiple_of
        result = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        result[torch.arange(width) < self.lengths[:, None]] = self.values
        return result


Field: TypeAlias = "Ragged | torch.Tensor | list[str]"
TensorBatch: TypeAlias = "tuple[dict[str, Field], list[RowId]]"
"""batch_data: column -> Ragged; [N] of values without a dimension; texts.  index: [N] row ids for write-backs."""


class StreamDataset(IterableDataset[TensorBatch]):
    """One consumer's batches. Iterate it in the process that made it: worker processes have no connection."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[TensorBatch]:
        for batch in self._stream:
            yield {name: to_field(values) for name, values in batch.columns.items()}, batch.index


def stream_loader(stream: Stream) -> DataLoader[TensorBatch]:
    """Batches come whole, so the loader neither collates nor needs workers."""
    return DataLoader(StreamDataset(stream), batch_size=None, num_workers=0, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def to_field(values: Sequence[Value]) -> Field:
    """Values of one column as one field. Raises ValueError when their types or trailing dimensions differ."""
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
