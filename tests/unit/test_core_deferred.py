"""Deferred tails: an over-sampled batch leaves its slowest groups to the next one, which trains each of them once."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.model.groups import Stage
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    BrokerUsage,
    PartialGroup,
    PartialSample,
    SettingChanged,
    StopRequested,
    TrainRound,
    WorkerReported,
)
from transport.contracts.types import GroupId, UpdateMode, WeightIdentity, WorkerId, batch_of

CORE = CoreSettings(
    num_batches=3,
    groups_per_batch=3,
    group_size=1,
    max_staleness=0,
    update=UpdateMode.BARRIER,
    oversampled_groups=1,
    oversampled_tail="defer",
)
V0 = WeightIdentity(epoch=1, version=0)


def world_of(**changes: object) -> PipelineWorld:
    return PipelineWorld.ready(msgspec.structs.replace(CORE, **changes))


def tail_left(world: PipelineWorld) -> PipelineWorld:
    """Batch 0 is full without 0/3."""
    world.make_ready("0/0", "0/1", "0/2")
    return world


def groups_in(world: PipelineWorld) -> dict[int, set[str]]:
    """Batch -> the groups that its rounds held."""
    sent: dict[int, set[str]] = {}
    for _, command in world.log:
        if isinstance(command, TrainRound):
            sent.setdefault(command.batch, set()).update(rows.group_id for rank in command.ranks for rows in rank)
    return sent


def test_the_next_batch_trains_what_was_left_to_it_and_takes_fewer_prompts():
    world = tail_left(world_of())
    group = world.state.pipeline.groups[GroupId("0/3")]
    assert (group.batch, group.first_batch, group.stage) == (1, 0, Stage.PENDING)
    world.run_to_end()
    trained = groups_in(world)
    assert [len(trained[batch]) for batch in range(3)] == [3, 3, 3]
    assert "0/3" in trained[1]
    assert sum(batch_of(name) == 2 for name in trained[2]) == 2, (
        "the last batch takes one prompt less: none is left over"
    )
    assert set(world.outcomes) == world.admitted
    assert {outcome.outcome for outcome in world.outcomes.values()} == {"trained"}


def test_it_goes_on_from_its_tokens_under_the_next_weights_and_first_in_line():
    world = world_of()
    worker_id = WorkerId("generate-0.1")
    kept = PartialSample(sample=0, oldest=V0, newest=V0)
    held = tuple(world.workers[worker_id].plans)
    partial = (PartialGroup(group_id=GroupId("0/3"), attempt=0, samples=(kept,)),)
    world.tell(WorkerReported(worker_id=worker_id, held=held, partial=partial))
    tail_left(world)
    assert not world.workers[worker_id].plans, "a synchronous run's workers make way for the new weights"
    while world.unread():
        world.train()
    world.load(worker_id)
    plans = list(world.workers[worker_id].plans.values())
    assert plans[0][0].group_id == "0/3"
    assert plans[0][0].partial == (kept,), "one version older than max_staleness, and no more"
    assert plans[0][0].priority > max(plan.priority for plan, _ in plans[1:])


def test_in_flight_it_stays_where_it_runs():
    world = world_of(update=UpdateMode.IN_FLIGHT)
    tail_left(world)
    assert world.state.pipeline.groups[GroupId("0/3")].stage is Stage.RUNNING
    assert "0/3" in world.workers[WorkerId("generate-0.1")].plans, "it was not told to stop"
    world.run_to_end()
    assert "0/3" in groups_in(world)[1]


def test_a_batch_waits_for_what_was_left_to_it_and_leaves_others():
    world = tail_left(world_of(update=UpdateMode.IN_FLIGHT))
    while world.unread():
        world.train()
    world.load(WorkerId("generate-0.1"))
    world.make_ready("1/1", "1/2")
    group = world.state.pipeline.groups[GroupId("1/3")]
    assert group.batch == 2, "two are ready and one is sure to be"
    assert world.state.pipeline.groups[GroupId("0/3")].batch == 1
    world.run_to_end()
    assert groups_in(world)[1] == {"0/3", "1/1", "1/2"}


@pytest.mark.parametrize("why", ["the last batch", "the byte budget"])
def test_where_no_batch_may_follow_it_waits_for_all_of_its_groups(why):
    world = world_of()
    if why == "the last batch":
        world.tell(SettingChanged(key="run.batches", value=1))
    else:
        world.tell(BrokerUsage(retained_bytes=CORE.max_retained_bytes + 1))
    tail_left(world)
    assert world.state.pipeline.groups[GroupId("0/3")].batch == 0
    world.make_ready("0/3")
    world.tell(BrokerUsage(retained_bytes=0))
    world.run_to_end()
    assert len(groups_in(world)[0]) == 4
    assert set(world.outcomes) == world.admitted
    assert all(close.short_by <= 0 for close in world.closes())


def test_its_workers_death_costs_nothing_but_the_place():
    world = tail_left(world_of(update=UpdateMode.IN_FLIGHT))
    world.lose_worker(WorkerId("generate-0.1"))
    group = world.state.pipeline.groups[GroupId("0/3")]
    assert (group.stage, group.batch, group.deferred) == (Stage.PENDING, 1, True)
    world.run_to_end()
    assert "0/3" in groups_in(world)[1]


def test_a_stopped_run_keeps_them_and_a_resumed_one_trains_them():
    world = world_of()
    world.make_ready("0/0")
    world.tell(StopRequested(reason="ctrl-c"))
    world.make_ready("0/1", "0/2")
    world.run_to_end()
    assert world.finished == "ctrl-c"
    assert set(groups_in(world)) == {0}
    assert "0/3" not in world.outcomes
    world.resume()
    world.run_to_end()
    assert "0/3" in groups_in(world)[1]
    assert set(world.outcomes) == world.admitted


def test_a_snapshot_of_before_the_setting_goes_on_and_names_no_group_twice():
    world = PipelineWorld.ready(msgspec.structs.replace(CORE, oversampled_groups=0))
    old = msgspec.msgpack.decode(world.state.snapshot())
    for settings in (old["settings"], old["configured"]):
        settings.pop("oversampled_tail", None)
    for batch in old["batches"].values():
        batch.pop("num_left", None)
        batch.pop("num_deferred", None)
    for group in old["groups"].values():
        group.pop("deferred", None)
    world.state, world.settings = PipelineState.restore(msgspec.msgpack.encode(old), settings=CORE), CORE
    world.run_to_end()
    assert set(world.outcomes) == world.admitted
    dispatched = [name for batch in groups_in(world).values() for name in batch]
    assert len(dispatched) == len(set(dispatched)) == 9


def test_without_the_setting_nothing_is_left_to_another_batch():
    world = world_of(oversampled_tail="drop")
    tail_left(world)
    assert world.outcomes[GroupId("0/3")].outcome == "filtered"
