"""Workers that start from one command line give themselves different numbers."""

from __future__ import annotations

import asyncio

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.contracts.types import RunName, WorkerId, WorkerKind
from workers.leases.lifecycle import free_index


async def test_each_who_asks_gets_another_number_and_none_that_is_in_use():
    broker = MemoryBroker(MemoryServer(), RunName("scaled"))
    await broker.beat(WorkerId("generate-1.4"), b"", ttl_s=60)
    await broker.beat(WorkerId("score-2.1"), b"", ttl_s=60)
    numbers = await asyncio.gather(*(free_index(broker, WorkerKind.GENERATE) for _ in range(4)))
    assert sorted(numbers) == [0, 2, 3, 4]
    assert await free_index(broker, WorkerKind.SCORE) == 0
