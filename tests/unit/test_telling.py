"""What a trainer said is heard in its order, also when the broker forgot it; and ranks hear of another rank 0."""

from __future__ import annotations

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Fence
from transport.messages import (
    CheckpointSaved,
    Event,
    RoundDone,
    StepDone,
    TrainerReady,
    WeightManifest,
    event_decoder,
    manifest_decoder,
)
from transport.types import RunName, WeightIdentity, WorkerId
from workers.trainer.telling import STEPS, Teller

TRAINER = WorkerId("train-0.1")


def weights(version: int) -> WeightIdentity:
    return WeightIdentity(epoch=1, version=version)


READY = TrainerReady(worker_id=TRAINER, weights=weights(0))


def manifest(version: int) -> WeightManifest:
    return WeightManifest(weights=weights(version), tensors=(), total_bytes=0, sources=(), host="here")


def trained(batch: int) -> list[Event]:
    return [
        RoundDone(round_id=f"{batch}.0", num_rows=1, num_tokens=1, busy_s=0.0),
        StepDone(batch=batch, weights=weights(batch + 1), num_rows=1, num_tokens=1),
        CheckpointSaved(weights=weights(batch + 1), cursor=f"{batch}-0", path="p", seconds=0.0),
    ]


class Said:
    """A teller, and what stands on the broker of it."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.broker = MemoryBroker(self.server, RunName("run"))

    async def start(self) -> Teller:
        fence = Fence(role="trainer", epoch=await self.broker.acquire_epoch("trainer"))
        return Teller(self.broker, TRAINER, fence, (await self.broker.info()).boot_id)

    async def events(self) -> list[Event]:
        entries = await self.broker.read(keys.EVENTS, "0-0", count=1000)
        return [event_decoder.decode(entry.entry.payload) for entry in entries]

    async def versions(self) -> list[int]:
        entries = await self.broker.read(keys.WEIGHTS, "0-0", count=1000)
        return [manifest_decoder.decode(entry.entry.payload).weights.version for entry in entries]


async def test_a_step_that_was_lost_while_the_next_one_was_trained_is_told_before_it():
    said = Said()
    teller = await said.start()
    await teller.tell(READY)
    for event in trained(0):
        await teller.tell(event)
    before = said.server.snapshot()
    for batch in (1, 2):
        for event in trained(batch):
            await teller.tell(event)
    await teller.announce(manifest(3))
    said.server.restore(before)
    new = trained(3)
    await teller.tell(new[0])  # nobody had the time to notice
    again = (await said.events())[1 + len(trained(0)) :]
    steps = [trained(batch)[1] for batch in range(3)]
    assert again == [READY, steps[0], steps[1], trained(2)[0], steps[2], trained(2)[2], new[0]]
    assert await said.versions() == [3]
    await teller.tell(new[1])
    assert (await said.events())[-1] == new[1], "told again once"


async def test_memory_is_bounded():
    said = Said()
    teller = await said.start()
    before = said.server.snapshot()
    for batch in range(STEPS + 2):
        for event in trained(batch):
            await teller.tell(event)
    said.server.restore(before)
    await teller.tell(READY)
    told = await said.events()
    assert [event.batch for event in told if isinstance(event, StepDone)] == list(range(2, STEPS + 2))
    assert len(told) == STEPS + 3
