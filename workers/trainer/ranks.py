"""How the ranks of a local trainer find one another: over the broker, which all of them reach already.

Owns: the rendezvous. Invariant: a rank that was started again meets the present rank 0, never the address of an earlier
one, because joining an address that nobody serves fails and is tried again with what the broker says by then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from transport.broker.base import Broker
from workers.errors import RanksError
from workers.trainer.parallel import GradientReducer, RankGroup, SingleRank, join_store, open_store
from workers.trainer.parting import META, POLL_S

JOIN_S = 2.0
"""One attempt to reach a store; then the broker is asked again."""

InTorch = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


async def meet_ranks(
    broker: Broker,
    rank: int,
    world_size: int,
    in_torch: InTorch,
    *,
    device: torch.device,
    join_timeout_s: float,
    reduce_timeout_s: float,
) -> GradientReducer:
    """Become one of ``world_size`` ranks.

    Under torchrun its environment says who is where; otherwise rank 0 opens a store and tells its port by the broker.
    reduce_timeout_s: how long a rank waits for a slower one.
    Raises: RanksError: the others did not come within ``join_timeout_s``.
    """
    if world_size == 1:
        return SingleRank()

    def group(store: Store | None) -> RankGroup:
        try:
            return RankGroup(rank, world_size, store, device=device, timeout_s=reduce_timeout_s)
        except (dist.DistError, RuntimeError) as error:
            raise RanksError(f"rank {rank} of {world_size} could not join the others: {error}") from error

    if "TORCHELASTIC_RUN_ID" in os.environ:
        return await in_torch(lambda: group(None))
    if rank == 0:
        store: Store = await in_torch(lambda: open_store(world_size, join_timeout_s))
        await broker.put_meta(META, str(store.port).encode())  # type: ignore[attr-defined]
    else:
        store = await _find_store(broker, world_size, in_torch, rank, join_timeout_s)
    return await in_torch(lambda: group(store))


async def _find_store(broker: Broker, world_size: int, in_torch: InTorch, rank: int, timeout_s: float) -> Store:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                port = await broker.get_meta(META)
                if port is not None:
                    try:
                        return await in_torch(lambda port=port: join_store(int(port), world_size, JOIN_S))
                    except dist.DistError:
                        pass  # of a rank 0 that is gone; the next one will say where it is
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RanksError(f"rank {rank} found no rank 0 within {timeout_s:.0f} s") from None
