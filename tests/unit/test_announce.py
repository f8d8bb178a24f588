"""What was published stays announced: a broker that lost it hears it again, and nobody who was fenced off speaks."""

from __future__ import annotations

import pytest

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Ack, Entry
from transport.errors import FencedError
from transport.messages import WeightManifest, WeightsPublished, event_decoder, manifest_decoder
from transport.types import RunName, WeightIdentity
from workers.generation.announce import ROLE, Announcer


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
    await announcer.announce(manifest(1))
    before = server.snapshot()
    await announcer.announce(manifest(2))
    await announcer.announce(manifest(3))
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
    await announcer.announce(manifest(1), acks=[Ack(queue=keys.UPDATES, entry_id=delivery.entry_id)])
    assert not await broker.pending(keys.UPDATES)
    server.restore(server.snapshot())
    await announcer.catch_up()
    assert await announced(broker) == [1, 1]


async def test_who_is_fenced_off_falls_silent(server: MemoryServer, broker: MemoryBroker) -> None:
    announcer, other = Announcer(broker), Announcer(broker)
    await broker.acquire_epoch(ROLE)
    await announcer.announce(manifest(1))
    await broker.acquire_epoch(ROLE)
    await other.announce(manifest(1, epoch=2))
    server.restore(server.snapshot())
    await announcer.catch_up()
    assert await announced(broker) == [1, 1]
    with pytest.raises(FencedError):
        await announcer.announce(manifest(2))
