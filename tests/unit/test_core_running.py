"""Which groups have been generated for the longest."""

from __future__ import annotations

import msgspec

from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.view import MAX_SHOWN, longest_running
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import Tick
from transport.contracts.types import GroupId, WorkerId

W0 = WorkerId("generate-0.1")
TIMEOUT_S = 100.0


def running_world(*, groups: int = 3, capacity: int = 64) -> PipelineWorld:
    settings = CoreSettings(
        num_batches=2, groups_per_batch=groups, group_size=2, max_staleness=0, rollout_timeout_s=TIMEOUT_S
    )
    return PipelineWorld.ready(settings, capacity=capacity)


def pass_time(world: PipelineWorld, seconds: float) -> None:
    world.now_s += seconds
    world.tell(Tick())


def test_a_group_tells_since_when_it_runs_and_what_is_to_come():
    world = running_world()
    pass_time(world, 7.0)
    world.finish_sample(W0, GroupId("0/1"), 0)
    first, second, _ = longest_running(world.state.pipeline)
    assert (first.group_id, first.worker_id, first.running_s, first.missing) == ("0/0", W0, 7.0, (0, 1))
    assert (second.group_id, second.missing, second.group_size) == ("0/1", (1,), 2)


def test_the_one_that_began_first_comes_first_and_finished_ones_go():
    world = running_world(capacity=2)
    pass_time(world, 5.0)
    before = [group.group_id for group in longest_running(world.state.pipeline)]
    while world.workers[W0].plans:
        group_id = next(iter(world.workers[W0].plans))
        pass_time(world, 1.0)
        world.finish_sample(W0, group_id)
        running = longest_running(world.state.pipeline)
        assert [group.running_s for group in running] == sorted((group.running_s for group in running), reverse=True)
        assert {group.group_id for group in running} == set(world.workers[W0].plans)
    assert before
    assert longest_running(world.state.pipeline) == ()


def test_another_attempt_begins_anew():
    world = running_world(groups=1)
    pass_time(world, TIMEOUT_S + 1.0)
    (group,) = longest_running(world.state.pipeline)
    assert (group.attempt, group.running_s) == (1, 0.0)


def test_only_a_few_are_shown():
    world = running_world(groups=MAX_SHOWN + 3)
    assert len(longest_running(world.state.pipeline)) == MAX_SHOWN


def test_deadlines_of_whole_groups_are_forgotten_long_before_they_are_due():
    world = running_world(groups=200, capacity=400)
    before = stored_deadlines(world)
    for group_id in list(world.workers[W0].plans)[1:]:
        world.finish_sample(W0, group_id)
        world.finish_sample(W0, group_id)
    pass_time(world, 1.0)
    assert before == 200
    assert stored_deadlines(world) == 1
    assert len(longest_running(world.state.pipeline)) == 1
    pass_time(world, TIMEOUT_S)
    (group,) = longest_running(world.state.pipeline)
    assert group.attempt == 1, "the one that was left is taken back in time"


def stored_deadlines(world: PipelineWorld) -> int:
    return len(msgspec.msgpack.decode(world.state.snapshot(), type=Pipeline).deadlines)
