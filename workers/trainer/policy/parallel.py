"""Data parallelism: every rank sums gradients of its own rows; one reduction when a mini-batch closes.

Owns: the process group, and how ranks become one: local ones over their meeting's file, others under torchrun. Never:
waits for data inside a collective. Collectives of one machine use its loopback interface only, and nothing listens for
ranks that are to come; gloo and NCCL know no proof of who connects, so ranks of several machines belong on a network of
their own (docs/security.md).

Each rank reads the rounds log itself and takes its
part of each round; a rank enters the reduction only when it has read that the mini-batch is closed, and then all others
have read so too. What a slower rank still computes, the others wait for under ``timeout_s``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from transport.broker.base import Broker
from transport.tensors.address import is_loopback
from workers.algorithms.loss import LossMetrics
from workers.errors import RanksError
from workers.trainer.meeting import Meeting


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


# --- how the ranks become one process group ---------------------------------------------------------------------------

InTorch = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


async def meet_ranks(
    broker: Broker,
    rank: int,
    world_size: int,
    in_torch: InTorch,
    *,
    directory: Path,
    device: torch.device,
    join_timeout_s: float,
    reduce_timeout_s: float,
) -> tuple[RankGroup, Meeting | None]:
    """Become one of ``world_size`` ranks, two or more. No meeting under torchrun, whose agent sees to the others.

    directory: where ranks of one machine meet.  join_timeout_s: for rank 0.  reduce_timeout_s: for all to connect, and
    later for a slower one.  Raises: RanksError: they did not come in time, or one was replaced meanwhile.
    """

    def group(store: Store | None) -> RankGroup:
        try:
            return RankGroup(rank, world_size, store, device=device, timeout_s=reduce_timeout_s)
        except (dist.DistError, RuntimeError) as error:
            raise RanksError(f"rank {rank} of {world_size} could not join the others: {error}") from error

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return await in_torch(lambda: group(None)), None
    meeting = Meeting(broker, rank, world_size, directory)
    await (meeting.open() if rank == 0 else meeting.join(limit_s=join_timeout_s))
    stay_on_loopback()
    joining = asyncio.ensure_future(in_torch(lambda: group(FileStore(str(meeting.store), world_size))))
    following = asyncio.create_task(meeting.follow(), name="follow ranks")
    try:
        await asyncio.wait({joining, following}, return_when=asyncio.FIRST_COMPLETED)
        return (joining.result() if joining.done() else following.result()), meeting
    finally:
        for task in (joining, following):
            task.cancel()
        await asyncio.gather(joining, following, return_exceptions=True)


def stay_on_loopback() -> None:
    """Have gloo and NCCL of this process use the loopback interface, unless its owner chose another.

    By themselves they listen on the address that the host's name resolves to, which is often one of the network's.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(is_loopback(address.address) for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
