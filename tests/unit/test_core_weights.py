"""How workers take a version: at once, one after another, at their batch boundary; and what a failed load does."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings, ScalingSettings
from orchestrator.core.model.workers import MAX_LOAD_ATTEMPTS, MAX_PAUSE_S
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import LoadWeights, StepDone, Tick, WeightsLoaded
from transport.contracts.types import UpdateMode, WeightIdentity, WorkerId

W0, W1 = WorkerId("generate-0.1"), WorkerId("generate-1.1")


def world_at_first_step(update: UpdateMode, scaling: ScalingSettings | None = None) -> PipelineWorld:
    """Batch 0 is trained and version 1 published while both workers still hold groups of batch 1."""
    core = CoreSettings(
        num_batches=6,
        groups_per_batch=2,
        group_size=2,
        max_staleness=1,
        update=update,
        rollout_timeout_s=10.0,
        scaling=scaling,
    )
    world = PipelineWorld.ready(core, workers=2, capacity=2)
    for worker_id in (W0, W1):
        for group_id in [group_id for group_id in world.workers[worker_id].plans if group_id.startswith("0/")]:
            world.finish_sample(worker_id, group_id)
            world.finish_sample(worker_id, group_id)
            world.score()
    while world.trainer.version == 0:
        world.train()
    return world


def told_to_load(world: PipelineWorld) -> list[WorkerId]:
    return [worker_id for worker_id, worker in world.workers.items() if worker.to_load]


def batches_held(world: PipelineWorld, worker_id: WorkerId) -> list[int]:
    return [plan.batch for plan, _ in world.workers[worker_id].plans.values()]


def finish_all(world: PipelineWorld, worker_id: WorkerId) -> None:
    for group_id in list(world.workers[worker_id].plans):
        world.finish_sample(worker_id, group_id)
        world.finish_sample(worker_id, group_id)


def test_in_flight_tells_all_workers_at_once_with_their_samples_running():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    assert told_to_load(world) == [W0, W1]
    assert batches_held(world, W0) == [1]


def test_staggered_lets_one_worker_run_dry_while_the_other_goes_on():
    world = world_at_first_step(UpdateMode.STAGGERED)
    assert told_to_load(world) == [], "the first in turn still has a group"
    finish_all(world, W0)
    assert told_to_load(world) == [W0]
    finish_all(world, W1)
    assert told_to_load(world) == [W0], "the second waits for its turn"
    world.load(W0)
    assert told_to_load(world) == [W1]
    assert batches_held(world, W0) == [2, 2], "the loaded one takes the next batch; the one in turn takes none"
    assert batches_held(world, W1) == []


def test_a_failed_load_passes_the_turn_and_comes_back():
    world = world_at_first_step(UpdateMode.STAGGERED)
    finish_all(world, W0)
    finish_all(world, W1)
    world.load(W0, fails=True)
    assert told_to_load(world) == [W1]
    world.load(W1)
    assert told_to_load(world) == [W0]


def test_a_load_without_an_answer_passes_the_turn_at_its_deadline():
    world = world_at_first_step(UpdateMode.STAGGERED)
    finish_all(world, W0)
    finish_all(world, W1)
    world.now_s = 10.0
    world.tell(Tick())
    assert told_to_load(world) == [W0, W1]


def test_barrier_finishes_the_batch_before_it_loads():
    world = world_at_first_step(UpdateMode.BARRIER)
    assert told_to_load(world) == []
    finish_all(world, W0)
    assert told_to_load(world) == [W0]
    assert batches_held(world, W0) == [], "batch 2 waits for the new weights"
    world.load(W0)
    assert batches_held(world, W0) == [2, 2]


@pytest.mark.parametrize("update", list(UpdateMode))
def test_a_newcomer_loads_the_newest_weights_before_any_work(update):
    world = world_at_first_step(update)
    newcomer = world.join()
    assert world.workers[newcomer].to_load == WeightIdentity(epoch=1, version=1)
    assert not world.workers[newcomer].plans
    world.load(newcomer)
    assert world.workers[newcomer].plans


def test_only_the_newest_of_several_versions_is_loaded_next():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    for worker_id in (W0, W1):
        finish_all(world, worker_id)
    while world.unscored:
        world.score()
    while world.trainer.version < 2:
        world.train()
    assert world.workers[W0].to_load == WeightIdentity(epoch=1, version=1), "a load is under way"
    world.load(W0)
    assert world.workers[W0].to_load == WeightIdentity(epoch=1, version=2)


def test_loads_are_retried_a_few_times_and_again_with_the_next_version():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    for _ in range(MAX_LOAD_ATTEMPTS):
        world.load(W0, fails=True)
    assert W0 not in told_to_load(world)
    (unhealthy,) = [worker for worker in world.state.view().workers if not worker.healthy]
    assert unhealthy.worker_id == W0
    finish_all(world, W0)
    assert batches_held(world, W0) == [], "an unfit worker gets nothing"
    finish_all(world, W1)
    while world.unscored:
        world.score()
    while world.trainer.version < 2:
        world.train()
    assert W0 in told_to_load(world)


def asked_at(world: PipelineWorld, worker_id: WorkerId, until_s: float) -> list[float]:
    """Seconds from now at which the worker is asked to load, which fails each time, with a tick each half second."""
    asked, begun_s = list[float](), world.now_s
    while world.now_s < begun_s + until_s:
        if world.workers[worker_id].to_load is not None:
            asked.append(world.now_s - begun_s)
            world.load(worker_id, fails=True)
            continue
        world.now_s += 0.5
        world.tell(Tick())
    return asked


def test_a_worker_that_cannot_load_is_asked_for_ever_with_growing_pauses():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    assert asked_at(world, W0, 40.0) == [0, 0, 0, 1, 3, 7, 15, 23, 31, 39]
    assert len(asked_at(world, W0, 600.0)) >= 600 / MAX_PAUSE_S - 1, "nobody is given up for good"
    (aside,) = [worker for worker in world.state.view().workers if worker.worker_id == W0]
    assert (aside.worker_id, aside.healthy, aside.aside_s) == (W0, False, 640.0)
    assert aside.load_failures > MAX_LOAD_ATTEMPTS
    assert aside.load_problem
    world.state = PipelineState.restore(world.state.snapshot())
    while world.workers[W0].to_load is None:
        world.now_s += 0.5
        world.tell(Tick())
    world.load(W0)
    (back,) = [worker for worker in world.state.view().workers if worker.worker_id == W0]
    assert (back.healthy, back.aside_s, back.load_failures) == (True, None, 0)


def test_a_worker_that_stands_aside_is_asked_at_once_for_newer_weights_and_its_pauses_begin_anew():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    asked_at(world, W0, 30.0)
    assert W0 not in told_to_load(world), "it is in a pause"
    finish_all(world, W0)
    world.load(W1)
    finish_all(world, W1)
    while world.unscored:
        world.score()
    while world.trainer.version < 2:
        world.train()
    assert world.workers[W0].to_load == WeightIdentity(epoch=1, version=2)
    assert [worker.healthy for worker in world.state.view().workers if worker.worker_id == W0] == [False]
    assert asked_at(world, W0, 8.0) == [0, 2, 6]


def test_a_snapshot_of_before_there_were_pauses_gives_nobody_up():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    asked_at(world, W0, 0.5)
    fields = msgspec.msgpack.decode(world.state.snapshot())
    worker = fields["fleet"]["workers"][W0]
    for name in ("retry_at_s", "load_problem", "aside_s"):
        worker.pop(name, None)
    fields["fleet"]["loads_pending"] = False
    world.state = PipelineState.restore(msgspec.msgpack.encode(fields))
    world.now_s += 1.0
    world.tell(Tick())
    assert W0 in told_to_load(world)


@pytest.mark.parametrize("update", list(UpdateMode))
def test_a_run_whose_workers_all_stood_aside_goes_on_once_they_can_load(update):
    world = world_at_first_step(update)
    for worker_id in (W0, W1):
        finish_all(world, worker_id)
    for _ in range(4):
        for worker_id in (W0, W1):
            asked_at(world, worker_id, 30.0)
    world.run_to_end()


def test_a_load_that_ends_after_it_was_given_up_on_counts():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    for _ in range(MAX_LOAD_ATTEMPTS):
        world.now_s += world.settings.rollout_timeout_s
        world.tell(Tick())
    assert not any(worker.healthy for worker in world.state.view().workers)
    world.tell(WeightsLoaded(worker_id=W0, weights=WeightIdentity(epoch=1, version=1)))
    assert [worker.worker_id for worker in world.state.view().workers if worker.healthy] == [W0]


@pytest.mark.parametrize("max_workers", [2, 3])
def test_an_elastic_run_whose_loads_fail_everywhere_asks_for_another_worker_while_it_may(max_workers):
    world = world_at_first_step(UpdateMode.IN_FLIGHT, ScalingSettings(min_workers=1, max_workers=max_workers))
    for worker_id in (W0, W1):
        for _ in range(MAX_LOAD_ATTEMPTS):
            world.load(worker_id, fails=True)
    world.tell(Tick())
    assert world.spawn_total == max_workers - 2


def test_an_open_load_is_outstanding_until_it_is_answered():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    loads = [command.worker_id for _, command in world.state.outstanding() if isinstance(command, LoadWeights)]
    assert loads == [W0, W1]
    world.load(W0)
    loads = [command.worker_id for _, command in world.state.outstanding() if isinstance(command, LoadWeights)]
    assert loads == [W1]


def test_a_repeated_report_of_older_weights_changes_nothing():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    world.load(W0)
    world.tell(WeightsLoaded(worker_id=W0, weights=WeightIdentity(epoch=1, version=0)))
    assert world.state.view().workers[0].loaded == WeightIdentity(epoch=1, version=1)
    assert told_to_load(world) == [W1]


def test_steps_of_a_replaced_trainer_are_ignored():
    world = world_at_first_step(UpdateMode.IN_FLIGHT)
    stale = StepDone(batch=1, weights=WeightIdentity(epoch=0, version=2), num_rows=1, num_tokens=1)
    assert world.tell(stale) == []
    assert world.state.view().trained_version == 1
