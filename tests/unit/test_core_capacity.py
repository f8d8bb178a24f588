"""A worker whose memory is shorter than its slots says so, and gets no more than fits."""

from __future__ import annotations

from orchestrator.core.model.settings import CoreSettings
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import WorkerReported
from transport.contracts.types import WorkerId

W0 = WorkerId("generate-0.1")


def running_world(capacity: int) -> PipelineWorld:
    settings = CoreSettings(num_batches=4, groups_per_batch=12, group_size=2, max_staleness=1)
    return PipelineWorld.ready(settings, capacity=capacity)


def report(world: PipelineWorld, capacity: int) -> None:
    worker = world.workers[W0]
    event = WorkerReported(worker_id=W0, held=tuple(worker.plans), plans_cursor=worker.cursor, capacity=capacity)
    world.tell(event)


def held_after(world: PipelineWorld, groups: int) -> int:
    """Groups that the worker holds once it has finished so many more."""
    for _ in range(groups):
        group_id = next(iter(world.workers[W0].plans))
        while group_id in world.workers[W0].plans:
            world.finish_sample(W0, group_id)
    return len(world.workers[W0].plans)


def test_what_is_dispatched_follows_what_fits_now():
    small, large = running_world(2), running_world(8)
    few, many = len(small.workers[W0].plans), len(large.workers[W0].plans)
    assert few < many
    report(large, 2)
    assert held_after(large, many - few) == few
    assert held_after(large, 2) == few
    report(large, 8)
    assert held_after(large, 1) == many


def test_a_report_without_a_capacity_changes_nothing():
    world = running_world(8)
    before = len(world.workers[W0].plans)
    report(world, 0)
    assert held_after(world, 3) == before
