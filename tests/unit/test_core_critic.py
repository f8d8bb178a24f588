"""A critic reads the rounds log too: what it has not saved is kept, and the run ends when it has saved everything."""

from __future__ import annotations

from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.settings import CoreSettings, core_settings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    CheckpointSaved,
    CriticReported,
    DropRows,
    RowsMissing,
    RunResumed,
    StepDone,
    TrainerReady,
    TrimRounds,
    WorkerJoined,
)
from transport.contracts.settings import AlgorithmSettings, Settings, TrainerSettings
from transport.contracts.types import RowId, WeightIdentity, WorkerId, WorkerKind

CRITIC = WorkerId("critic-0.1")


def core(**changes) -> CoreSettings:
    defaults = {"num_batches": 3, "groups_per_batch": 2, "group_size": 2, "max_staleness": 0, "checkpoint_every": 1}
    return CoreSettings(**(defaults | {"critic": True} | changes))


def ready(world: PipelineWorld, version: int = 0, *, epoch: int = 1):
    weights = WeightIdentity(epoch=epoch, version=version)
    return world.tell(CriticReported(worker_id=CRITIC, report=TrainerReady(worker_id=CRITIC, weights=weights)))


def saved(world: PipelineWorld, version: int, cursor: str, *, epoch: int = 1):
    weights = WeightIdentity(epoch=epoch, version=version)
    report = CheckpointSaved(weights=weights, cursor=cursor, path="somewhere")
    world.critic_checkpoints.append((version, parse_entry_id(cursor)))
    return world.tell(CriticReported(worker_id=CRITIC, report=report))


def stepped(world: PipelineWorld, version: int, *, epoch: int = 1):
    weights = WeightIdentity(epoch=epoch, version=version)
    report = StepDone(batch=version - 1, weights=weights, num_rows=1, num_tokens=1)
    return world.tell(CriticReported(worker_id=CRITIC, report=report))


def load(world: PipelineWorld) -> None:
    """Workers load what they were told to."""
    for worker_id, worker in world.workers.items():
        if worker.to_load is not None:
            world.load(worker_id)


def train_batch(world: PipelineWorld, batch: int) -> str:
    """Valued in time, trained and saved by the trainer. Returns its checkpoint's cursor."""
    world.critic.version = batch
    load(world)
    world.answer_requests()
    world.make_ready(*[f"{batch}/{slot}" for slot in range(world.settings.groups_per_batch)])
    while world.unread():
        world.train()
    return world.saved[1].entry


def freed(world: PipelineWorld) -> set[str]:
    """Groups whose rows were dropped because a checkpoint contains them."""
    return {group for group in world.dropped if group.split("/")[0].isdigit()}


def test_rows_and_rounds_are_freed_when_both_hold_them():
    world = PipelineWorld.ready(core(keep_checkpoints=1))
    ready(world)
    first = train_batch(world, 0)
    second = train_batch(world, 1)
    assert not freed(world)
    commands = saved(world, 1, first)
    assert [one.group_ids for one in commands if isinstance(one, DropRows)] == [("0/0", "0/1")]
    assert [one.cursor for one in commands if isinstance(one, TrimRounds)] == [first]
    saved(world, 1, first)  # repeated
    assert freed(world) == {"0/0", "0/1"}
    saved(world, 2, second)
    assert freed(world) == {"0/0", "0/1", "1/0", "1/1"}


def test_without_a_critic_its_reports_mean_nothing():
    world = PipelineWorld.ready(core(keep_checkpoints=1, critic=False))
    train_batch(world, 0)
    assert freed(world) == {"0/0", "0/1"}
    before = world.state.snapshot()
    ready(world, 7)
    assert world.state.pipeline.critic == PipelineState.restore(before).pipeline.critic


def test_a_critic_that_was_replaced_frees_nothing():
    world = PipelineWorld.ready(core(keep_checkpoints=1))
    ready(world)
    first = train_batch(world, 0)
    ready(world, 0, epoch=2)
    saved(world, 1, first, epoch=1)
    assert not freed(world)
    saved(world, 1, first, epoch=2)
    assert freed(world) == {"0/0", "0/1"}


def test_the_run_ends_when_the_critic_has_saved_past_its_last_command():
    world = PipelineWorld.ready(core())
    ready(world)
    for batch in range(3):
        train_batch(world, batch)
    assert not world.finished
    last = world.saved[1].entry
    assert str(world.state.wait()) == "training waits for the last checkpoint of the critic; to act: critic-0.1"
    saved(world, 3, last)
    assert world.finished == "all batches are trained"


def test_a_run_that_is_resumed_between_the_two_last_checkpoints_ends():
    world = PipelineWorld.ready(core())
    ready(world)
    for batch in range(3):
        train_batch(world, batch)
    world.tell(RunResumed())
    world.start_trainer()
    while world.unread():
        world.train()
    assert not world.finished
    ready(world, 3, epoch=2)
    saved(world, 3, world.saved[1].entry, epoch=2)
    assert world.finished


def test_a_critic_that_goes_back_behind_what_was_freed_ends_the_run_by_name():
    world = PipelineWorld.ready(core(keep_checkpoints=1))
    ready(world)
    saved(world, 1, train_batch(world, 0))
    ready(world, 0, epoch=2)
    assert world.failed
    assert world.finished.startswith("the critic came back with version 0: rows before 1 are freed")


def test_rows_that_only_the_critic_still_needs_are_made_again():
    world = PipelineWorld.ready(core())
    ready(world)
    train_batch(world, 0)
    del world.rows[RowId("0/0/1")]
    world.tell(RowsMissing(row_ids=(RowId("0/0/1"),)))
    world.make_ready("0/0")
    assert RowId("0/0/1") in world.rows


def test_a_wait_for_values_names_the_critic():
    world = PipelineWorld.ready(core())
    world.generate("0/0")
    world.generate("0/1")
    assert str(world.state.wait()) == "scoring waits for a critic to join; to act: critic"
    world.tell(WorkerJoined(worker_id=CRITIC, kind=WorkerKind.CRITIC))
    assert str(world.state.wait()) == "scoring waits for the critic to be ready; to act: critic-0.1"
    ready(world)
    assert "the scores of 2 groups" in str(world.state.wait())
    world.score()
    world.score()
    while world.unread():
        world.train()
    load(world)
    world.answer_requests()
    world.generate("1/0")
    world.generate("1/1")
    waits = "the critic to train batch 1, before it values batch 2"
    assert str(world.state.wait()) == f"scoring waits for {waits}; to act: critic-0.1"
    stepped(world, 1)
    assert "the scores of 2 groups" in str(world.state.wait())


def test_a_critic_comes_with_its_advantages_and_not_into_a_service():
    gae = AlgorithmSettings(advantage="gae")
    assert core_settings(Settings(algorithm=gae)).critic
    assert not core_settings(Settings()).critic
    assert not core_settings(Settings(algorithm=gae, trainer=TrainerSettings(engine="none"))).critic
