"""Data parallelism: every rank sums gradients of its own rows; one reduction when a mini-batch closes.

Owns: the process group. Never: waits for data inside a collective. Each rank reads the rounds log itself and takes its
part of each round; a rank enters the reduction only when it has read that the mini-batch is closed, and then all others
have been told so too. What a slower rank still computes, the others wait for under ``timeout_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from workers.algorithms.loss import LossMetrics
from workers.errors import RanksError


class GradientReducer(Protocol):
    """What a step needs of the other ranks. Raises RanksError when one of them went away."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        """Sum ``gradient`` over ranks in place and return the metrics of all."""
        ...

    def agree(self, value: int) -> int:
        """Rank 0's value."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """There are no others."""

    rank: int = 0
    world_size: int = 1

    def reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        return metrics

    def agree(self, value: int) -> int:
        return value

    def close(self) -> None:
        pass


class RankGroup:
    """Ranks of one torch.distributed process group (gloo on CPU, nccl on GPUs), met over ``store``."""

    def __init__(
        self, rank: int, world_size: int, store: Store | None, *, device: torch.device, timeout_s: float
    ) -> None:
        """store: None for torchrun's own, which its environment names."""
        self.rank = rank
        self.world_size = world_size
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        try:
            return self._reduce(gradient, metrics)
        except RuntimeError as error:
            raise RanksError(f"rank {self.rank} lost the others while it summed gradients: {error}") from error

    def _reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        dist.all_reduce(gradient)
        sums, largest = metrics.to_vectors()
        total = torch.tensor(sums, dtype=torch.float64, device=self._device)
        maximum = torch.tensor(largest, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return LossMetrics.from_vectors(total.tolist(), maximum.tolist())

    def agree(self, value: int) -> int:
        chosen = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.broadcast(chosen, src=0)
        return int(chosen.item())

    def close(self) -> None:
        dist.destroy_process_group()
