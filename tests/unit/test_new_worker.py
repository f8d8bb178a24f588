"""Workers that start from one command line give themselves different numbers."""

from __future__ import annotations

import asyncio

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.contracts.types import RunName, WorkerId, WorkerKind
from workers.leases.lifecycle import new_worker


async def test_each_who_asks_gets_a_number_that_no_other_has_or_had():
    broker = MemoryBroker(MemoryServer(), RunName("scaled"))
    await broker.beat(WorkerId("generate-1.4"), b"", ttl_s=60)
    await broker.beat(WorkerId("score-2.1"), b"", ttl_s=60)
    await broker.next_incarnation("generate-2")  # started with its number, and not yet with a lease
    workers = await asyncio.gather(*(new_worker(broker, WorkerKind.GENERATE) for _ in range(4)))
    assert sorted(workers) == ["generate-0.1", "generate-3.1", "generate-4.1", "generate-5.1"]
    assert await new_worker(broker, WorkerKind.SCORE) == "score-0.1"
