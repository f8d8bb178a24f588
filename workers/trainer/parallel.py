"""Data parallelism: every rank sums gradients of its own rows; one reduction when a mini-batch closes.

Owns: the process group. Never: waits for data inside a collective. Each rank reads the rounds log itself and takes its
part of each round; a rank enters the reduction only when it has read that the mini-batch is closed, and then all others
have been told so too. What a slower rank still computes, the others wait for under ``timeout_s``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from workers.algorithms.loss import LossMetrics


class GradientReducer(Protocol):
    """What a step needs of the other ranks."""

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


@dataclass(frozen=True, slots=True)
class SingleRank:
    """There are no others."""

    rank: int = 0
    world_size: int = 1

    def reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        return metrics

    def agree(self, value: int) -> int:
        return value


class RankGroup:
    """Ranks of one torch.distributed process group (gloo on CPU, nccl on GPUs).

    init_method: ``tcp://host:port`` or ``file:///path``, the same for all; default: torchrun's environment.
    """

    def __init__(
        self, rank: int, world_size: int, *, device: torch.device, timeout_s: float, init_method: str = "env://"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def reduce(self, gradient: Tensor, metrics: LossMetrics) -> LossMetrics:
        dist.all_reduce(gradient)
        sums, largest = metrics.to_vectors()
        packed = torch.tensor(sums, dtype=torch.float64, device=self._device)
        maximum = torch.tensor(largest, dtype=torch.float64, device=self._device)
        dist.all_reduce(packed)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return LossMetrics.from_vectors(packed.tolist(), maximum.tolist())

    def agree(self, value: int) -> int:
        chosen = torch.tensor(value, dtype=torch.int64, device=self._device)
        dist.broadcast(chosen, src=0)
        return int(chosen.item())

    def close(self) -> None:
        dist.destroy_process_group()


def join_ranks(world_size: int, *, device: torch.device, timeout_s: float) -> GradientReducer:
    """The ranks of this job: torchrun's RANK says which one this process is. Raises KeyError without it."""
    if world_size == 1:
        return SingleRank()
    return RankGroup(int(os.environ["RANK"]), world_size, device=device, timeout_s=timeout_s)
