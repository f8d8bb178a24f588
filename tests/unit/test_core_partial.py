"""Who goes on with what of a sample that was taken back: decisions of the core."""

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    DispatchGroups,
    GroupPlan,
    PartialGroup,
    PartialSample,
    RolloutFailed,
    Tick,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import GroupId, WeightIdentity, WorkerId

CORE = CoreSettings(num_batches=4, groups_per_batch=1, group_size=2, max_staleness=1, rollout_timeout_s=30.0)
V0, V1 = WeightIdentity(epoch=1, version=0), WeightIdentity(epoch=1, version=1)


def world_of(**changes: object) -> PipelineWorld:
    return PipelineWorld.ready(msgspec.structs.replace(CORE, **changes), workers=2)


def holder_of(world: PipelineWorld, group_id: str) -> WorkerId:
    return next(worker_id for worker_id, worker in world.workers.items() if group_id in worker.plans)


def keep(world: PipelineWorld, worker_id: WorkerId, *samples: PartialSample, group_id="0/0", attempt=0):
    worker = world.workers.get(worker_id)
    group = PartialGroup(group_id=GroupId(group_id), attempt=attempt, samples=samples)
    held = tuple(worker.plans) if worker else ()
    world.tell(WorkerReported(worker_id=worker_id, held=held, partial=(group,)))


def partial(sample: int, oldest=V0, newest=V0) -> PartialSample:
    return PartialSample(sample=sample, oldest=oldest, newest=newest)


def lose(world: PipelineWorld, worker_id: WorkerId, group_id="0/0") -> GroupPlan:
    """The worker is killed. Returns the plan by which its group goes on."""
    del world.workers[worker_id]
    commands = world.tell(WorkerLost(worker_id=worker_id, reason="killed"))
    plans = [command.plans[0] for command in commands if isinstance(command, DispatchGroups)]
    return next(plan for plan in plans if plan.group_id == group_id)


def test_what_a_lost_worker_had_kept_goes_on_elsewhere():
    world = world_of()
    holder = holder_of(world, "0/0")
    keep(world, holder, partial(1))
    plan = lose(world, holder)
    assert (plan.attempt, plan.samples, plan.partial) == (1, (0, 1), (partial(1),))


def test_what_times_out_goes_on_elsewhere_and_is_taken_back_twice():
    world = world_of()
    first = holder_of(world, "0/0")
    keep(world, first, partial(0), partial(1))
    world.finish_sample(first, "0/0", 0)
    world.now_s += 31.0
    commands = world.tell(Tick())
    (plan,) = [c.plans[0] for c in commands if isinstance(c, DispatchGroups) and c.plans[0].group_id == "0/0"]
    assert (plan.samples, plan.partial) == ((1,), (partial(1),)), "the sample that ended has a row"
    second = holder_of(world, "0/0")
    assert second != first
    keep(world, second, partial(1, newest=V1), attempt=1)
    keep(world, first, partial(1), attempt=0)  # too late
    group = world.state.pipeline.groups[GroupId("0/0")]
    assert group.partial == {1: partial(1, newest=V1)}


def test_tokens_that_are_too_old_for_the_batch_or_of_lost_weights_start_over():
    world = world_of(max_staleness=0)
    holder = holder_of(world, "0/0")
    keep(world, holder, partial(0, oldest=WeightIdentity(epoch=0, version=5), newest=V0), partial(1))
    assert lose(world, holder).partial == (partial(1),)


@pytest.mark.parametrize(("goes_on", "oldest"), [(True, 0), (False, 1)])
def test_the_age_of_a_group_is_that_of_its_oldest_token(goes_on: bool, oldest: int):
    world = world_of()
    holder = holder_of(world, "1/0")
    other = next(worker_id for worker_id in world.workers if worker_id != holder)
    if goes_on:
        keep(world, holder, partial(0), group_id="1/0")
    world.tell(WorkerReported(worker_id=other, held=tuple(world.workers[other].plans), weights=V1))
    plan = lose(world, holder, "1/0")
    assert plan.partial == ((partial(0),) if goes_on else ())
    assert world.state.pipeline.groups[GroupId("1/0")].oldest_version == oldest


@pytest.mark.parametrize("wrong", ["sample", "attempt", "worker", "group"])
def test_a_report_that_means_nothing_changes_nothing(wrong: str):
    world = world_of()
    holder = holder_of(world, "0/0")
    other = next(worker_id for worker_id in world.workers if worker_id != holder)
    keep(
        world,
        other if wrong == "worker" else holder,
        partial(7 if wrong == "sample" else 1),
        group_id="9/9" if wrong == "group" else "0/0",
        attempt=3 if wrong == "attempt" else 0,
    )
    assert lose(world, holder).partial == ()


def test_samples_that_failed_start_over():
    world = world_of()
    holder = holder_of(world, "0/0")
    keep(world, holder, partial(0), partial(1))
    failed = RolloutFailed(group_id=GroupId("0/0"), worker_id=holder, samples=(1,), reason="not finite")
    commands = world.tell(failed)
    (plan,) = [c.plans[0] for c in commands if isinstance(c, DispatchGroups) and c.plans[0].group_id == "0/0"]
    assert plan.partial == (partial(0),)
