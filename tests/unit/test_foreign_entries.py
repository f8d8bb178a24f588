"""Streams of the orchestrator's own that somebody else wrote to are deleted, to be written again from the journal."""

from __future__ import annotations

import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.loop.decide import take_out_foreign
from orchestrator.loop.execute import stream_entry
from tests.fakes.explicit_ids import append_at
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.pipeline_world import PipelineWorld
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.types import RunName, WorkerId

CONTROL = keys.control(WorkerId("generate-0.1"))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("run"))


@pytest.fixture(scope="module")
def state() -> PipelineState:
    """With two rounds at the trainer."""
    world = PipelineWorld.ready(CoreSettings(num_batches=4, groups_per_batch=4, group_size=2, max_staleness=0))
    world.answer_requests()
    world.make_ready(*[f"0/{slot}" for slot in range(4)])
    return world.state


async def fill(broker: MemoryBroker, state: PipelineState) -> None:
    for command_id, command in state.outstanding():
        if (placed := stream_entry(command)) is not None:
            await append_at(broker, placed[0], placed[1], command_id.entry)


async def test_what_was_commanded_stays(broker: MemoryBroker, state: PipelineState):
    await fill(broker, state)
    before = await broker.streams()
    assert before[keys.ROUNDS]
    assert await take_out_foreign(broker, state) == []
    assert await broker.streams() == before


@pytest.mark.parametrize("stream", [keys.ROUNDS, CONTROL, keys.plans(WorkerId("generate-0.1"))])
async def test_a_stream_with_an_entry_beyond_the_journal_is_deleted(
    broker: MemoryBroker, state: PipelineState, stream: str
):
    await fill(broker, state)
    await append_at(broker, stream, Entry(payload=b"\xff"), "1795866718427-0")
    (line,) = await take_out_foreign(broker, state)
    assert line.startswith(f"stream {stream} held entry 1795866718427-0, which this run never wrote")
    assert stream not in await broker.streams()
    assert await take_out_foreign(broker, state) == []


async def test_a_round_that_was_copied_under_an_id_of_the_journal_is_foreign(
    broker: MemoryBroker, state: PipelineState
):
    await fill(broker, state)
    (*_, last) = await broker.read(keys.ROUNDS, "0-0", count=100)
    copy = f"{last.entry_id}9"
    await append_at(broker, keys.ROUNDS, last.entry, copy)
    (line,) = await take_out_foreign(broker, state)
    assert f"stream rounds held entry {copy}," in line
