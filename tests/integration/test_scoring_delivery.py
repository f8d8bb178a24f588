"""A unit of a scoring task whose worker dies, hangs or is overtaken: scored once, or given up by name."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.unscored_group import GROUP, admit, generate, next_event
from transport.broker import keys
from transport.broker.base import Broker, Commit, RowWrite
from transport.contracts.messages import ScoringFailed
from transport.contracts.types import (
    Column,
    RunName,
    WorkerId,
    row_id,
)
from transport.rows.columns import RowStore, decode_scalar, encode_array
from workers.leases.lifecycle import BusyMeter
from workers.scoring.tasks import Unit
from workers.scoring.worker import TaskConsumer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def broker(clock: ManualClock) -> Broker:
    return MemoryBroker(MemoryServer(clock), RunName("scoring"))


class HeldHandler:
    """Tells that it has a unit and keeps it until released."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.calls = 0

    async def __call__(self, unit: Unit) -> Commit:
        self.calls += 1
        value = float(self.calls)
        self.started.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        reward = {Column.REWARD: encode_array(Column.REWARD, [value])}
        return Commit(rows=[RowWrite(row_id=row_id(GROUP, 0), columns=reward)])


def consumer(
    broker: Broker, handle: HeldHandler, clock: ManualClock, *, index: int, lease_s: float = 0.3, attempts: int = 3
) -> TaskConsumer:
    return TaskConsumer(
        broker,
        RowStore(broker),
        "reward",
        WorkerId(f"score-{index}.1"),
        handle,
        clock=clock,
        meter=BusyMeter(clock),
        lease_s=lease_s,
        max_attempts=attempts,
        at_once=4,
    )


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_dead_workers_unit_goes_to_another(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    first, second = HeldHandler(), HeldHandler()
    dying = asyncio.create_task(consumer(broker, first, clock, index=0).run())
    await first.started.wait()
    await cancelled(dying)  # without acknowledging, as a kill would
    clock.advance(1.0)
    living = asyncio.create_task(consumer(broker, second, clock, index=1).run())
    await second.started.wait()
    (pending,) = await broker.pending(keys.tasks("reward"))
    assert (pending.consumer, pending.deliveries) == ("score-1.1", 2)
    second.release.set()
    assert await broker.claim(keys.tasks("advantages"), "test", count=1, wait_s=10.0)  # the reward was written
    await cancelled(living)
    assert await broker.length(keys.tasks("reward")) == 0
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD])
    assert decode_scalar(Column.REWARD, row[Column.REWARD]) == 1.0


async def test_work_on_a_unit_that_another_took_over_stops(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    slow = HeldHandler()
    running_slow = asyncio.create_task(consumer(broker, slow, clock, index=0).run())
    await slow.started.wait()
    clock.advance(1.0)
    taken, _ = await broker.reclaim(keys.tasks("reward"), "score-1.1", idle_s=0.3, max_deliveries=9, count=1)
    assert len(taken) == 1
    async with asyncio.timeout(60):
        await slow.cancelled.wait()
    assert not running_slow.done()
    await cancelled(running_slow)


async def test_a_unit_that_kills_its_workers_is_given_up(broker: Broker, clock: ManualClock) -> None:
    await admit(broker, {}, size=1)
    await generate(broker, [1])
    for index in range(2):
        handle = HeldHandler()
        dying = asyncio.create_task(consumer(broker, handle, clock, index=index, attempts=2).run())
        await handle.started.wait()
        await cancelled(dying)
        clock.advance(1.0)
    living = asyncio.create_task(consumer(broker, HeldHandler(), clock, index=2, attempts=2).run())
    _, event = await next_event(broker)
    await cancelled(living)
    assert isinstance(event, ScoringFailed)
    assert "given up after 2 deliveries" in event.reason
    assert len(await broker.dead_letters()) == 1


async def test_a_score_of_a_row_that_the_broker_lost_is_not_given_to_the_row_in_its_place(clock: ManualClock) -> None:
    server = MemoryServer(clock)
    broker = MemoryBroker(server, RunName("scoring"))
    await admit(broker, {}, size=1)
    on_disk = server.snapshot()
    await generate(broker, [1, 2])
    handler = HeldHandler()
    task = asyncio.create_task(consumer(broker, handler, clock, index=0, lease_s=60.0).run())
    await handler.started.wait()
    server.restore(on_disk)
    clock.advance(1.0)
    await generate(broker, [3, 4, 5])
    handler.started.clear()
    handler.release.set()
    async with asyncio.timeout(60):
        await handler.started.wait()  # the new row is scored for itself
        while not (found := await broker.read_rows([row_id(GROUP, 0)], [Column.REWARD]))[0]:  # noqa: ASYNC110 a row wakes nobody
            await asyncio.sleep(0)
    await cancelled(task)
    assert [decode_scalar(Column.REWARD, row[Column.REWARD]) for row in found] == [2.0]
