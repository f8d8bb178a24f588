"""What was published stays announced: a broker that lost it hears it again, and nobody who was fenced off speaks."""

from __future__ import annotations

import pytest

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Ack, Entry, Fence
from transport.contracts.messages import (
    CheckpointSaved,
    Event,
    RoundDone,
    StepDone,
    TrainerReady,
    WeightManifest,
    WeightsPublished,
    event_decoder,
    manifest_decoder,
)
from transport.contracts.types import RunName, WeightIdentity, WorkerId
from transport.errors import FencedError
from workers.leases.announce import ROLE, STEPS, Announcer, StepAnnouncer


def manifest(version: int, epoch: int = 1) -> WeightManifest:
    weights = WeightIdentity(epoch=epoch, version=version)
    return WeightManifest(weights=weights, tensors=(), total_bytes=0, sources=(), host="here")


async def announced(broker: MemoryBroker) -> list[int]:
    """Versions on the weights log; the events log has the same."""
    entries = await broker.read(keys.WEIGHTS, "0-0", count=100)
    versions = [manifest_decoder.decode(entry.entry.payload).weights.version for entry in entries]
    events = [event_decoder.decode(entry.entry.payload) for entry in await broker.read(keys.EVENTS, "0-0", count=100)]
    assert [event.weights.version for event in events if isinstance(event, WeightsPublished)] == versions
    return versions


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def broker(server: MemoryServer) -> MemoryBroker:
    return MemoryBroker(server, RunName("run"))


async def test_the_newest_version_is_announced_again_to_a_broker_that_lost_it(
    server: MemoryServer, broker: MemoryBroker
) -> None:
    announcer = Announcer(broker)
    await broker.acquire_epoch(ROLE)
    await announcer.catch_up()
    await announcer.announce_weights(manifest(1))
    before = server.snapshot()
    await announcer.announce_weights(manifest(2))
    await announcer.announce_weights(manifest(3))
    await announcer.catch_up()
    assert await announced(broker) == [1, 2, 3]
    server.restore(before)
    await announcer.catch_up()
    await announcer.catch_up()
    assert await announced(broker) == [1, 3], "the newest, once"


async def test_what_was_acknowledged_is_not_acknowledged_again(server: MemoryServer, broker: MemoryBroker) -> None:
    announcer = Announcer(broker)
    await broker.acquire_epoch(ROLE)
    await broker.enqueue(keys.UPDATES, Entry(fields={}, payload=b""))
    (delivery,) = await broker.claim(keys.UPDATES, "publisher", count=1)
    await announcer.announce_weights(manifest(1), acks=[Ack(queue=keys.UPDATES, entry_id=delivery.entry_id)])
    assert not await broker.pending(keys.UPDATES)
    server.restore(server.snapshot())
    await announcer.catch_up()
    assert await announced(broker) == [1, 1]


async def test_who_is_fenced_off_falls_silent(server: MemoryServer, broker: MemoryBroker) -> None:
    announcer, other = Announcer(broker), Announcer(broker)
    await broker.acquire_epoch(ROLE)
    await announcer.announce_weights(manifest(1))
    await broker.acquire_epoch(ROLE)
    await other.announce_weights(manifest(1, epoch=2))
    server.restore(server.snapshot())
    with pytest.raises(FencedError):
        await announcer.catch_up()
    await announcer.catch_up()
    assert await announced(broker) == [1, 1]
    with pytest.raises(FencedError):
        await announcer.announce_weights(manifest(2))


# --- a trainer's ------------------------------------------------------------------------------------------------------

TRAINER = WorkerId("train-0.1")


def weights(version: int) -> WeightIdentity:
    return WeightIdentity(epoch=1, version=version)


READY = TrainerReady(worker_id=TRAINER, weights=weights(0))


def trained(batch: int) -> list[Event]:
    return [
        RoundDone(round_id=f"{batch}.0", num_rows=1, num_tokens=1, busy_s=0.0),
        StepDone(batch=batch, weights=weights(batch + 1), num_rows=1, num_tokens=1),
        CheckpointSaved(weights=weights(batch + 1), cursor=f"{batch}-0", path="p", seconds=0.0),
    ]


class Trainer:
    """An announcer, and what stands on the broker of it."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.broker = MemoryBroker(self.server, RunName("run"))

    async def start(self) -> StepAnnouncer:
        fence = Fence(role="trainer", epoch=await self.broker.acquire_epoch("trainer"))
        return StepAnnouncer(self.broker, TRAINER, fence)

    async def events(self) -> list[Event]:
        entries = await self.broker.read(keys.EVENTS, "0-0", count=1000)
        return [event_decoder.decode(entry.entry.payload) for entry in entries]

    async def versions(self) -> list[int]:
        entries = await self.broker.read(keys.WEIGHTS, "0-0", count=1000)
        return [manifest_decoder.decode(entry.entry.payload).weights.version for entry in entries]


async def test_a_step_that_was_lost_while_the_next_one_was_trained_is_announced_before_it():
    trainer = Trainer()
    announcer = await trainer.start()
    await announcer.announce_event(READY)
    for event in trained(0):
        await announcer.announce_event(event)
    before = trainer.server.snapshot()
    for batch in (1, 2):
        for event in trained(batch):
            await announcer.announce_event(event)
    await announcer.announce_manifest(manifest(3))
    trainer.server.restore(before)
    new = trained(3)
    await announcer.announce_event(new[0])  # nobody had the time to notice
    again = (await trainer.events())[1 + len(trained(0)) :]
    steps = [trained(batch)[1] for batch in range(3)]
    assert again == [READY, steps[0], steps[1], trained(2)[0], steps[2], trained(2)[2], new[0]]
    assert await trainer.versions() == [3]
    await announcer.announce_event(new[1])
    assert (await trainer.events())[-1] == new[1], "announced again once"


async def test_memory_is_bounded():
    trainer = Trainer()
    announcer = await trainer.start()
    before = trainer.server.snapshot()
    for batch in range(STEPS + 2):
        for event in trained(batch):
            await announcer.announce_event(event)
    trainer.server.restore(before)
    await announcer.announce_event(READY)
    again = await trainer.events()
    assert [event.batch for event in again if isinstance(event, StepDone)] == list(range(2, STEPS + 2))
    assert len(again) == STEPS + 3
