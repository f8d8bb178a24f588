"""What the orchestrator does for a broker that lost its tail, or all it had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.loop.decide import restated
from orchestrator.loop.intake import check_new, keep_reconciled, new_inbox, publish_run_metadata, was_resumed
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Entry, Fence
from transport.contracts.messages import (
    CheckpointSaved,
    RowsMissing,
    RunResumed,
    SpawnWorkers,
    Tick,
    TrainerReady,
    TrimRounds,
    encode,
)
from transport.contracts.settings import Settings
from transport.contracts.types import RowId, RunName, WeightIdentity, WorkerId
from transport.contracts.user_files import ModelIdentity
from transport.errors import FencedError, RunExistsError


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker(MemoryServer(), RunName("run"))


async def test_rows_that_were_lost_while_nobody_orchestrated_are_found_at_the_start(broker: MemoryBroker):
    inbox = new_inbox()

    async def restore() -> None:
        raise AssertionError("the broker was not restarted")

    rows = [RowId("0/0/0"), RowId("0/0/1")]
    task = asyncio.create_task(keep_reconciled(broker, inbox, lambda: rows, lambda: [], restore))
    async with asyncio.timeout(30):
        arrival = await inbox.get()
    task.cancel()
    assert arrival.event == RowsMissing(row_ids=tuple(rows))


async def test_a_broker_that_lost_everything_gets_what_workers_need_of_it(broker: MemoryBroker):
    await publish_run_metadata(broker, Settings(), trainer_epoch=4, model=ModelIdentity())
    assert await broker.get_meta(keys.SETTINGS) is not None
    assert await broker.get_meta(keys.STATE) == keys.STATE_RUNNING
    assert {"tasks:reward", "tasks:advantages"} <= set(await broker.streams())
    assert await broker.acquire_epoch("trainer") == 5
    # one that knows better keeps what it knows
    await publish_run_metadata(broker, Settings(), trainer_epoch=4, model=ModelIdentity())
    with pytest.raises(FencedError):
        await broker.append("rounds", Entry(), fence=Fence(role="trainer", epoch=4))


async def test_a_run_that_was_resumed_is_not_over(broker: MemoryBroker):
    await broker.append(keys.EVENTS, Entry(fields={"event": "Tick"}, payload=encode(Tick())))
    assert not await was_resumed(broker, "0-0")
    cursor = await broker.append(keys.EVENTS, Entry(fields={"event": "RunResumed"}, payload=encode(RunResumed())))
    assert cursor is not None
    assert await was_resumed(broker, "0-0")
    assert not await was_resumed(broker, cursor)


async def test_checkpoints_without_a_journal_are_no_new_run(broker: MemoryBroker, tmp_path: Path):
    rundir = RunDir(tmp_path)
    await check_new(broker, rundir, Settings())
    (rundir.checkpoints / "step-3").mkdir(parents=True)
    with pytest.raises(RunExistsError, match="put the journal back"):
        await check_new(broker, rundir, Settings())


def test_a_broker_is_told_again_where_the_rounds_log_begins():
    """Entries that came back with an older file would otherwise stand before a gap, and the audit would find it."""
    state = PipelineState(CoreSettings(num_batches=4, groups_per_batch=2, group_size=2, keep_checkpoints=1))
    weights = WeightIdentity(epoch=1, version=0)
    state.handle(TrainerReady(worker_id=WorkerId("train-0.1"), weights=weights), 0.0)
    assert not [command for _, command in restated(state) if isinstance(command, TrimRounds)]
    state.handle(CheckpointSaved(weights=weights, cursor="7-0", path="x"), 1.0)
    assert (CommandId(2, 0), TrimRounds(cursor="7-0")) in restated(state)


def test_workers_that_were_asked_for_are_asked_for_again():
    """Else the next request, whose total counts them too, would start them beside the ones that it needs."""
    state = PipelineState(CoreSettings(num_batches=1, groups_per_batch=1, group_size=1))
    assert restated(state) == []
    state.pipeline.elastic.spawned = 2
    ((_, command),) = restated(state)
    assert isinstance(command, SpawnWorkers)
    assert command.total == 2
    state.handle(RunResumed(), 1.0)
    # A resumed run begins with the workers of its settings, and counts anew.
    assert not [command for _, command in restated(state) if isinstance(command, SpawnWorkers)]
