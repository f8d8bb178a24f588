"""How the ranks of a trainer become one process group: local ones over their meeting's file, others under torchrun.

Owns: the rendezvous. Invariant: collectives of one machine use its loopback interface only, and nothing listens for
ranks that are to come. Gloo and NCCL know no proof of who connects: ranks of several machines belong on a network of
their own (docs/security.md).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]

from transport.broker.base import Broker
from transport.tensors.address import is_loopback
from workers.errors import RanksError
from workers.trainer.meeting import Meeting
from workers.trainer.policy.parallel import RankGroup

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
