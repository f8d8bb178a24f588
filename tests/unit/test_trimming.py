"""What leaves the broker after a snapshot, and what stays."""

from __future__ import annotations

from orchestrator.loop.decide import KEPT_ENTRIES, Trimmer
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.types import RunName, WorkerId

HERE, GONE = WorkerId("generate-0.1"), WorkerId("generate-1.1")


def new_broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("trimmed"))


async def fill(broker: MemoryBroker, log: str, count: int) -> list[str]:
    """Append entries. Returns their ids."""
    ids = [await broker.append(log, Entry(fields={"number": str(number)})) for number in range(count)]
    return [entry_id for entry_id in ids if entry_id]


async def test_events_stay_until_two_snapshots_hold_them() -> None:
    broker, ids = new_broker(), []
    trimmer = Trimmer(broker)
    ids += await fill(broker, keys.EVENTS, 3)
    await trimmer.trim(ids[-1], [])
    assert await broker.length(keys.EVENTS) == 3
    ids += await fill(broker, keys.EVENTS, 2)
    await trimmer.trim(ids[-1], [])
    left = await broker.read(keys.EVENTS, "0-0", count=10)
    assert [entry.entry_id for entry in left] == ids[3:]
    assert await broker.last_id(keys.EVENTS) == ids[-1]


async def test_streams_of_a_worker_go_once_it_was_gone_twice() -> None:
    broker = new_broker()
    for worker in (HERE, GONE):
        await broker.enqueue(keys.plans(worker), Entry(fields={"group": "0/0"}))
        await broker.append(keys.control(worker), Entry(fields={"command": "LoadWeights"}))
    trimmer = Trimmer(broker)
    await trimmer.trim("0-0", [HERE])
    assert keys.plans(GONE) in await broker.streams()
    await trimmer.trim("0-0", [HERE, GONE])  # it came back
    await trimmer.trim("0-0", [HERE])
    assert keys.plans(GONE) in await broker.streams()
    await trimmer.trim("0-0", [HERE])
    assert sorted(await broker.streams()) == sorted([keys.plans(HERE), keys.control(HERE)])


async def test_the_newest_weights_and_commands_stay() -> None:
    broker = new_broker()
    written = {
        log: await fill(broker, log, 2 * KEPT_ENTRIES + 1) for log in (keys.WEIGHTS, keys.ROUTES, keys.control(HERE))
    }
    await Trimmer(broker).trim("0-0", [HERE])
    for log, ids in written.items():
        assert [entry.entry_id for entry in await broker.read(log, "0-0", count=1000)] == ids[-KEPT_ENTRIES:]


async def test_an_orchestrator_that_was_started_again_trims_at_its_first_snapshot() -> None:
    broker = new_broker()
    ids = await fill(broker, keys.EVENTS, 5)
    await Trimmer(broker, ids[2]).trim(ids[-1], [])
    left = await broker.read(keys.EVENTS, "0-0", count=10)
    assert [entry.entry_id for entry in left] == ids[3:]
