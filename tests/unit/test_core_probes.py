"""One sample of a group before its others: which groups, what it shows, when the others follow, what may befall it."""

from __future__ import annotations

import math

import msgspec
import pytest

from orchestrator.core.model.groups import NO_PROBE, Group, Stage
from orchestrator.core.model.pipeline import Calibration
from orchestrator.core.model.settings import LEAST_LOADED, PULLED, CoreSettings
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    AbortRollouts,
    DispatchGroups,
    GroupPlan,
    PartialGroup,
    PartialSample,
    PromptRef,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    Tick,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, GroupId, PromptId, RowId, UpdateMode, WeightIdentity, WorkerId

CORE = CoreSettings(
    num_batches=1,
    groups_per_batch=6,
    group_size=4,
    max_staleness=0,
    update=UpdateMode.BARRIER,
    dispatch=PULLED,
    probes=True,
    rollout_timeout_s=30.0,
)
V0 = WeightIdentity(epoch=1, version=0)


def world_of(*, workers: int = 1, capacity: int = 4, **changes: object) -> PipelineWorld:
    return PipelineWorld.ready(msgspec.structs.replace(CORE, **changes), workers=workers, capacity=capacity)


def holder_of(world: PipelineWorld, group_id: str) -> WorkerId:
    return next(worker_id for worker_id, worker in world.workers.items() if group_id in worker.plans)


def samples_of(world: PipelineWorld) -> dict[str, tuple[int, ...]]:
    """Of every group at work, what was asked for."""
    return {name: plan.samples for worker in world.workers.values() for name, (plan, _) in worker.plans.items()}


def group_of(world: PipelineWorld, name: str) -> Group:
    return world.state.pipeline.groups[GroupId(name)]


def end(world: PipelineWorld, row: str, tokens: int) -> list[GroupPlan]:
    """A sample ends with so many tokens. Returns what is dispatched then."""
    name, _, sample = row.rpartition("/")
    worker_id = holder_of(world, name)
    plan, under = world.workers[worker_id].plans[GroupId(name)]
    left = tuple(one for one in plan.samples if one != int(sample))
    if left:
        world.workers[worker_id].plans[GroupId(name)] = (msgspec.structs.replace(plan, samples=left), under)
    else:
        del world.workers[worker_id].plans[GroupId(name)]
    world.rows[RowId(row)] = tokens
    event = RolloutFinished(
        row_id=RowId(row),
        worker_id=worker_id,
        response_tokens=tokens,
        finish_reason=FinishReason.STOP,
        oldest=V0,
        newest=V0,
    )
    return dispatched(world.tell(event))


def dispatched(commands: list[object]) -> list[GroupPlan]:
    return [plan for command in commands if isinstance(command, DispatchGroups) for plan in command.plans]


def keep(world: PipelineWorld, name: str, tokens: int, sample: int = 0, attempt: int = 0) -> list[GroupPlan]:
    """The holder of the group tells how far one of its samples is."""
    worker_id = holder_of(world, name)
    kept = PartialSample(sample=sample, oldest=V0, newest=V0, tokens=tokens)
    group = PartialGroup(group_id=GroupId(name), attempt=attempt, samples=(kept,))
    held = tuple(world.workers[worker_id].plans)
    return dispatched(world.tell(WorkerReported(worker_id=worker_id, held=held, partial=(group,))))


# -- which groups


def test_one_sample_of_each_group_starts_first_and_before_whole_groups_in_an_engine():
    world = world_of()
    assert samples_of(world) == {f"0/{slot}": (0,) for slot in range(6)}
    priorities = [plan.priority for plan, _ in world.workers[WorkerId("generate-0.1")].plans.values()]
    assert priorities == sorted(priorities, reverse=True), "longest predicted first among them"
    assert end(world, "0/0/0", 3)[0].priority < min(priorities)


@pytest.mark.parametrize(
    "changes",
    [{"probes": False}, {"capacity": 24}, {"group_size": 1, "capacity": 2}, {"dispatch": LEAST_LOADED, "capacity": 24}],
    ids=["off", "slots for all", "groups of one", "slots for all, least loaded"],
)
def test_where_nothing_is_to_be_learnt_groups_are_whole(changes):
    world = world_of(**changes)
    size = changes.get("group_size", 4)
    assert samples_of(world)
    assert {samples for samples in samples_of(world).values()} == {tuple(range(size))}
    assert world.state.pipeline.plans.probes.num_started == 0


def test_a_ranker_that_knows_makes_probes_needless():
    calibration = Calibration()
    assert calibration.explained == 0.0
    for place in range(100):
        calibration.add(100.0 * 1.05**place, 0.0, round(100.0 * 1.05**place))
    assert calibration.explained == pytest.approx(1.0, abs=1e-3)
    world = PipelineWorld(CORE)
    world.state.pipeline.plans.calibration = calibration
    world.start_trainer()
    world.load(world.join(4))
    world.answer_requests()
    assert {len(samples) for samples in samples_of(world).values()} == {4}


def test_predictions_that_say_nothing_or_the_opposite_explain_nothing():
    constant, opposite = Calibration(), Calibration()
    for place in range(100):
        constant.add(500.0, 0.0, 100 + place)
        opposite.add(1000.0 - place, 0.0, 100 + place)
    assert (constant.explained, opposite.explained) == (0.0, 0.0)


# -- what a probe shows


def test_a_probe_that_ended_says_how_long_the_others_are():
    world = world_of()
    (first,) = end(world, "0/0/0", 100)
    assert (first.group_id, first.samples, first.attempt, first.predicted_tokens) == ("0/0", (1, 2, 3), 1, 100)
    assert end(world, "0/1/0", 200) == end(world, "0/2/0", 400) == []
    (longest,) = end(world, "0/3/0", 300)
    assert (longest.group_id, longest.predicted_tokens) == ("0/2", 400), "of those that wait"
    assert group_of(world, "0/1").stage is group_of(world, "0/3").stage is Stage.PENDING


def test_a_short_sample_lowers_what_a_ranker_without_knowledge_said_and_not_what_a_good_one_said():
    prompt = PromptRef(prompt_id=PromptId("p"), prompt_tokens=3, predicted_tokens=500.0)
    group = Group.of(prompt, GroupId("0/0"), 0, 4)
    assert group.learn(80, ended=True, trusts=False) == 80
    assert group.learn(80, ended=True, trusts=True) == 500
    assert group.learn(900, ended=True, trusts=True) == 900
    assert group.learn(0, ended=True, trusts=False) == 1, "of nothing no order would follow"
    group.tokens[2] = 700
    assert group.learn(80, ended=True, trusts=False) == 700, "the longest of those that ended"


def test_a_sample_that_runs_is_no_shorter_than_it_is():
    prompt = PromptRef(prompt_id=PromptId("p"), prompt_tokens=3, predicted_tokens=500.0)
    group = Group.of(prompt, GroupId("0/0"), 0, 4)
    assert group.learn(80, ended=False, trusts=False) == 500
    assert group.learn(800, ended=False, trusts=False) == 800


def test_how_far_a_probe_is_decides_whose_others_follow_first():
    world = world_of(capacity=3)
    behind = keep(world, "0/0", 900)
    assert not behind, "no slot is free"
    plans = end(world, "0/5/0", 4)
    assert not plans
    plans = end(world, "0/4/0", 4)
    assert [(plan.group_id, plan.samples, plan.attempt) for plan in plans] == [("0/0", (1, 2, 3), 1)]
    assert plans[0].predicted_tokens == 900
    assert group_of(world, "0/0").followed


def test_what_another_group_or_another_worker_says_is_not_learnt():
    world = world_of(workers=2, capacity=2)
    before = {name: group.expected_tokens for name, group in world.state.pipeline.groups.items()}
    holder = holder_of(world, "0/0")
    other = next(worker_id for worker_id in world.workers if worker_id != holder)
    kept = PartialSample(sample=0, oldest=V0, newest=V0, tokens=10_000)
    unknown = PartialSample(sample=9, oldest=V0, newest=V0, tokens=10_000)
    for worker_id, group_id, attempt, sample in [
        (other, "0/0", 0, kept),
        (holder, "0/0", 3, kept),
        (holder, "0/0", 0, unknown),
        (holder, "7/0", 0, kept),
    ]:
        group = PartialGroup(group_id=GroupId(group_id), attempt=attempt, samples=(sample,))
        held = tuple(world.workers[worker_id].plans)
        world.tell(WorkerReported(worker_id=worker_id, held=held, partial=(group,)))
    assert {name: group.expected_tokens for name, group in world.state.pipeline.groups.items()} == before
    end(world, "0/1/0", 5_000)
    del before["0/1"]
    assert before.items() <= {name: one.expected_tokens for name, one in world.state.pipeline.groups.items()}.items()


# -- no slot is empty for a probe


def test_the_others_follow_a_probe_at_once_where_slots_are_left():
    world = world_of(capacity=20)
    taken = samples_of(world)
    assert sum(map(len, taken.values())) >= 20
    assert (0, 1, 2, 3) in taken.values()
    followed = [name for name in taken if group_of(world, name).followed]
    assert followed
    for name in followed:
        assert (len(taken[name]), group_of(world, name).attempts()) == (4, (1, 0))
    assert world.state.pipeline.plans.probes.num_followed == len(followed)


def test_a_probe_that_never_ends_holds_up_nothing():
    world = world_of(rollout_timeout_s=math.inf)
    while any(row not in world.rows for slot in range(1, 6) for row in [f"0/{slot}/{sample}" for sample in range(4)]):
        name = next(name for name in samples_of(world) if name != "0/0")
        end(world, f"{name}/{samples_of(world)[name][0]}", 5)
    assert samples_of(world) == {"0/0": (0, 1, 2, 3)}, "its own others, too"


# -- what may befall a probe


def test_a_lost_worker_s_probes_are_tried_again_as_whole_groups_that_go_on_from_what_was_kept():
    world = world_of(workers=2)
    holder = holder_of(world, "0/0")
    keep(world, "0/0", 7)
    del world.workers[holder]
    world.tell(WorkerLost(worker_id=holder, reason="killed"))
    while (name := next((name for name in samples_of(world) if name != "0/0"), None)) is not None:
        end(world, f"{name}/{samples_of(world)[name][0]}", 5)
    ((_, (plan, _)),) = world.workers[holder_of(world, "0/0")].plans.items()
    assert (plan.samples, plan.attempt, [one.sample for one in plan.partial]) == ((0, 1, 2, 3), 1, [0])


def test_a_probe_that_fails_is_tried_again_as_a_whole_group():
    world = world_of(workers=2)
    name = next(name for name, samples in samples_of(world).items() if samples == (0,))
    holder = holder_of(world, name)
    del world.workers[holder].plans[GroupId(name)]
    world.tell(RolloutFailed(group_id=GroupId(name), worker_id=holder, samples=(0,), reason="out of memory"))
    group = group_of(world, name)
    assert (group.attempt, group.failures, group.probe) == (1, 1, NO_PROBE)
    assert group.num_asked == 4


def test_a_time_out_stops_both_attempts():
    world = world_of(workers=2)
    name = next(name for name in samples_of(world) if group_of(world, name).followed)
    world.now_s += 31.0
    aborts = [command for command in world.tell(Tick()) if isinstance(command, AbortRollouts)]
    (abort,) = [one for one in aborts if name in one.group_ids]
    assert (abort.group_ids, abort.attempts) == ((name, name), (1, 0))
    assert not group_of(world, name).followed


def test_a_row_of_a_probe_that_vanishes_is_generated_again_with_the_others():
    world = world_of()
    end(world, "0/0/0", 5)
    del world.rows[RowId("0/0/0")]
    world.tell(RowsMissing(row_ids=(RowId("0/0/0"),)))
    group = group_of(world, "0/0")
    assert (group.num_missing, group.num_asked, group.probe) == (4, 4, NO_PROBE)


# -- a batch that is pulled begins everywhere at once


def test_a_pulled_batch_begins_once_all_workers_can_take_it():
    world = PipelineWorld(msgspec.structs.replace(CORE, probes=False, plan_wait_s=5.0))
    world.start_trainer()
    first, second = world.join(8), world.join(8)
    world.load(first)
    world.answer_requests()
    assert not samples_of(world)
    assert f"all workers to begin batch 1 together; to act: {second}" in world.state.describe_wait()
    world.load(second)
    assert {len(worker.plans) for worker in world.workers.values()} == {3}


@pytest.mark.parametrize("wait_s", [0.0, 5.0])
def test_it_waits_for_the_last_of_them_for_so_long_and_once(wait_s):
    world = PipelineWorld(msgspec.structs.replace(CORE, probes=False, plan_wait_s=wait_s))
    world.start_trainer()
    first, _ = world.join(8), world.join(8)
    world.now_s = 1.0
    world.load(first)
    world.answer_requests()
    assert bool(samples_of(world)) == (wait_s == 0.0)
    world.now_s += wait_s
    world.tell(Tick())
    assert world.workers[first].plans
