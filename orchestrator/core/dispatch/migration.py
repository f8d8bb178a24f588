"""Migration of running work: taken back from a slow worker, for an idle one that ends it sooner though it starts over.

Owns: the forecast that says so. Never: work that waits (``handout.py``), losses and deadlines (``rollout/``).
Invariant: a group migrates once, to a worker that has nothing to do, while nothing waits for a worker.
"""

from __future__ import annotations

from orchestrator.core.model.groups import Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.attempts import head, may_take, requeue

MAX_TIME_SHARE = 0.5
"""Of the time it would still take where it is: starting over throws tokens away, and forecasts err."""
MIN_LEFT_SHARE = 0.25
"""Of the time it has been running: a group that took longer than predicted is not expected to end at once."""
REASON = "moved to an idle worker"


def migrate(p: Pipeline) -> None:
    """One group to each idle worker, those first that would take longest where they are."""
    if not p.settings.migrate_running or p.paused or p.stopping or p.plans.planned or head(p):
        return
    idle = [worker for worker in p.fleet.workers.values() if worker.healthy and not worker.in_flight]
    if not idle or not p.plans.slowdowns:
        return
    running = sorted(((_left_s(p, group, began_s), group) for group, began_s in _candidates(p)), key=_longest)
    idle.sort(key=lambda worker: p.plans.measured_slowdown(worker.worker_id))
    for worker, (left_s, group) in zip(idle, running, strict=False):
        again_s = group.predicted_tokens * _step_s(p, worker, group.num_missing)
        if again_s < MAX_TIME_SHARE * left_s and may_take(p, worker, group):
            group.excluded_worker = group.worker_id
            requeue(p, group, REASON)


def _candidates(p: Pipeline) -> list[tuple[Group, float]]:
    """Groups of first attempts and since when they run. One that failed or migrated before stays where it is."""
    found = [(p.live(one.group_id), one) for one in p.deadlines if not one.attempt]
    return [
        (group, one.at_s - p.settings.rollout_timeout_s)
        for group, one in found
        if group is not None and group.stage is Stage.RUNNING and not group.attempt
    ]


def _left_s(p: Pipeline, group: Group, began_s: float) -> float:
    """What the group still takes on its worker, as far as one can tell."""
    worker = p.fleet.workers[group.worker_id]
    ran_s = p.now_s - began_s
    return max(group.predicted_tokens * _step_s(p, worker, worker.in_flight) - ran_s, MIN_LEFT_SHARE * ran_s)


def _step_s(p: Pipeline, worker: Worker, samples: int) -> float:
    """Of this clock: what the cost model says, by what samples of the worker took instead."""
    slowdown = p.plans.measured_slowdown(worker.worker_id)
    return p.settings.decode_cost.step_s(min(samples, worker.capacity), 0.0) * slowdown


def _longest(running: tuple[float, Group]) -> tuple[float, str]:
    return -running[0], running[1].group_id
