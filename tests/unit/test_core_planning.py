"""Plans of dispatch inside the core: asked for, waited for, used, taken back, and learnt from."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.settings import CoreSettings
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    BrokerUsage,
    ComputePlan,
    PlanComputed,
    PlanShare,
    RankerJudged,
    SettingChanged,
    Tick,
    WorkerLost,
)
from transport.contracts.types import GroupId, WorkerId

CORE = CoreSettings(
    num_batches=2, groups_per_batch=4, group_size=2, max_staleness=0, dispatch="slicing", plan_wait_s=5.0
)
FIRST, SECOND = WorkerId("generate-0.1"), WorkerId("generate-1.1")


def world_with(*capacities: int, **changes: object) -> PipelineWorld:
    """Workers that serve the first version, and a batch that waits for its plan."""
    world = PipelineWorld(msgspec.structs.replace(CORE, **changes))
    world.start_trainer()
    for capacity in capacities:
        world.load(world.join(capacity))
    world.answer_prompts(world.requests[0].count)
    return world


def held(world: PipelineWorld) -> dict[str, list[str]]:
    return {
        name.split(".")[0]: [group.split("/")[1] for group in worker.plans] for name, worker in world.workers.items()
    }


def plan(world: PipelineWorld, **shares: list[int]) -> None:
    """Answer the newest request with the plan of the test's choice: worker -> groups of batch 0."""
    asked = world.plan_requests.pop()
    computed = tuple(
        PlanShare(worker_id=WorkerId(f"{name}.1"), group_ids=tuple(GroupId(f"0/{slot}") for slot in slots))
        for name, slots in ((name.replace("_", "-"), slots) for name, slots in shares.items())
    )
    world.tell(PlanComputed(plan_id=asked.plan_id, batch=asked.batch, shares=computed))


def test_a_batch_waits_for_its_plan_and_then_follows_it_in_order():
    world = world_with(8, 8)
    assert held(world) == {"generate-0": [], "generate-1": []}
    assert "deciding waits for the plan of batch 1" in world.state.describe_wait()
    plan(world, generate_0=[3], generate_1=[2, 0, 1])
    assert held(world) == {"generate-0": ["3"], "generate-1": ["2", "0", "1"]}


def test_without_a_plan_in_time_groups_go_one_after_another():
    world = world_with(8, 8)
    late = world.plan_requests[0]
    world.now_s += 5.0
    world.tell(Tick())
    assert sum(len(groups) for groups in held(world).values()) == 4
    before = held(world)
    world.tell(compute_plan(late, CORE))
    assert held(world) == before


def test_a_setting_of_no_wait_never_holds_a_group():
    world = world_with(8, 8, plan_wait_s=0.0)
    assert sum(len(groups) for groups in held(world).values()) == 4


def test_one_group_after_another_needs_no_plan():
    assert not world_with(8, dispatch="least_loaded").plan_requests


@pytest.mark.parametrize(
    ("policy", "trusted", "asked"),
    [
        ("slicing", False, "even_longest_first"),
        ("slicing", True, "slicing"),
        ("paced", False, "even_longest_first"),
        ("random", False, "random"),
    ],
)
def test_a_ranker_that_is_judged_not_trusted_gets_even_dispatch(policy: str, trusted: bool, asked: str):
    world = PipelineWorld(msgspec.structs.replace(CORE, dispatch=policy))
    world.tell(RankerJudged(trusted=not trusted, num_groups=300))
    world.tell(RankerJudged(trusted=trusted, num_groups=400, recall_20=0.5))
    world.start_trainer()
    world.load(world.join(8))
    world.answer_prompts(world.requests[0].count)
    assert [command.policy for command in world.plan_requests] == [asked]
    view = world.state.view()
    assert view.ranker is not None
    assert view.ranker.recall_20 == 0.5


def test_a_plan_is_asked_for_again_when_workers_change_before_it_comes():
    world = world_with(8, 8)
    del world.workers[FIRST]
    world.tell(WorkerLost(worker_id=FIRST, reason="killed"))
    obsolete, asked = world.plan_requests
    assert [worker.worker_id for worker in asked.workers] == [SECOND]
    world.tell(compute_plan(obsolete, CORE))
    assert held(world) == {"generate-1": []}
    plan(world, generate_0=[0, 1], generate_1=[3, 2])
    assert sorted(held(world)["generate-1"]) == ["0", "1", "2", "3"]


def test_who_is_done_takes_what_waits_longest_elsewhere():
    """The first worker has a slot for one group and one of lookahead; the second, idle, takes one group at a time."""
    world = world_with(2, 8)
    plan(world, generate_0=[0, 1, 2, 3], generate_1=[])
    assert held(world) == {"generate-0": ["0", "1"], "generate-1": ["2"]}
    for sample in range(2):
        world.finish_sample(SECOND, GroupId("0/2"), sample)
    assert held(world)["generate-1"] == ["3"]


def test_a_slow_worker_takes_nothing_that_a_fast_one_would_end_sooner():
    world = world_with(2, 8)
    world.state.pipeline.plans.slowdowns.update({FIRST: 1.0, SECOND: 50.0})
    plan(world, generate_0=[0, 1, 2, 3], generate_1=[])
    assert held(world) == {"generate-0": ["0", "1"], "generate-1": []}


def test_an_unfit_workers_share_goes_to_whoever_can():
    world = world_with(2, 8)
    plan(world, generate_0=[0, 1, 2, 3], generate_1=[])
    world.state.pipeline.fleet.workers[FIRST].load_failures = 3
    world.tell(Tick())
    assert sorted(held(world)["generate-0"] + held(world)["generate-1"]) == ["0", "1", "2", "3"]


def running_on_a_slow_worker(**changes: object) -> PipelineWorld:
    """Two groups run where they take ten times as long as on the other worker, which is idle."""
    world = world_with(4, 4, groups_per_batch=2, rollout_timeout_s=1000.0, **changes)
    plan(world, generate_0=[0, 1], generate_1=[])
    world.state.pipeline.plans.slowdowns.update({FIRST: 100.0, SECOND: 10.0})
    world.now_s += 1.0
    return world


def test_running_work_moves_to_an_idle_worker_that_ends_it_much_sooner():
    world = running_on_a_slow_worker(migrate_running=True)
    world.tell(Tick())
    moved = held(world)
    assert sorted(moved["generate-0"] + moved["generate-1"]) == ["0", "1"]
    assert len(moved["generate-1"]) == 1
    world.now_s += 1.0
    world.tell(Tick())
    assert held(world) == moved, "the other worker is not idle any more"


def test_a_timeout_that_is_changed_does_not_change_how_long_work_has_run():
    world = running_on_a_slow_worker(migrate_running=True)
    world.state.pipeline.plans.slowdowns.update({FIRST: 15.0, SECOND: 10.0})  # too little to gain
    world.tell(SettingChanged(key="pipeline.rollout_timeout_s", value=20_000.0))
    world.tell(Tick())
    assert held(world)["generate-1"] == []


def test_running_work_stays_by_default_and_where_starting_over_gains_little():
    world = running_on_a_slow_worker()
    world.tell(Tick())
    assert held(world)["generate-1"] == []
    world = running_on_a_slow_worker(migrate_running=True)
    world.state.pipeline.plans.slowdowns.update({FIRST: 15.0, SECOND: 10.0})
    world.tell(Tick())
    assert held(world)["generate-1"] == []


def test_the_best_of_all_is_even_dispatch_until_predictions_were_compared():
    world = world_with(8, 8, dispatch="scored", groups_per_batch=40)
    assert [asked.policy for asked in world.plan_requests] == ["even_longest_first"]
    asked: list[ComputePlan] = []
    while not world.finished:
        asked += world.plan_requests
        world.turn()
    assert [one.policy for one in asked] == ["even_longest_first", "scored"]
    corrected = {group.predicted_tokens for group in asked[1].groups}
    assert max(corrected) - min(corrected) < 1.0, "lengths that do not follow predictions are expected to be equal"


def test_a_batch_that_was_trained_and_freed_before_its_plan_came_is_not_planned_again():
    world = world_with(8, plan_wait_s=0.0, eval_every=0, checkpoint_every=1, keep_checkpoints=1)
    groups = [f"0/{slot}" for slot in range(4)]
    world.make_ready(*groups)
    while world.unread():
        world.train()
    world.tell(BrokerUsage(retained_bytes=10**10))
    assert 0 not in {batch.batch for batch in world.state.view().batches}, "it is freed"
    world.load(world.join(8))
    assert 0 not in {command.batch for command in world.plan_requests[1:]}
