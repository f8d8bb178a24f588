"""Running work that is moved: taken back from a slow worker, for an idle one that ends it sooner though it starts over.

Owns: the forecast that says so. Never: work that waits (``work_stealing.py``), losses and deadlines (``lifecycle.py``).
Invariant: a group is moved once, to a worker that has nothing to do, while nothing waits for a worker.
"""

from __future__ import annotations

from statistics import median

from orchestrator.core.dispatch.assignments import Assignments
from orchestrator.core.model.batches import Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker

SURELY = 0.5
"""Of the time it would still take where it is: starting over throws tokens away, and forecasts err."""
AT_LEAST = 0.25
"""Of the time it has been running: a group that took longer than predicted is not expected to end at once."""
REASON = "moved to an idle worker"


class Moving:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assignments) -> None:
        self._p = pipeline
        self._assignments = assignments

    def consider(self) -> None:
        """Move one group for each idle worker, those first that would take longest where they are."""
        p = self._p
        if not p.settings.migrate_running or p.paused or p.stopping or p.plans.planned or self._assignments.head():
            return
        idle = [worker for worker in p.fleet.workers.values() if worker.fit and not worker.in_flight]
        if not idle or not p.plans.paces:
            return
        running = sorted(((self._left_s(group, began_s), group) for group, began_s in self._movable()), key=_longest)
        for worker, (left_s, group) in zip(sorted(idle, key=self._pace), running, strict=False):
            again_s = group.predicted_tokens * self._step_s(worker, group.num_missing)
            if again_s < SURELY * left_s and self._assignments.may_take(worker, group):
                group.avoid = group.worker_id
                self._assignments.requeue(group, REASON)

    def _movable(self) -> list[tuple[Group, float]]:
        """Groups of first attempts and since when they run. One that failed before, or was moved, stays where it is."""
        p = self._p
        found = [(p.live(one.group_id), one) for one in p.deadlines if not one.attempt]
        return [
            (group, one.at_s - p.settings.rollout_timeout_s)
            for group, one in found
            if group is not None and group.stage is Stage.RUNNING and not group.attempt
        ]

    def _left_s(self, group: Group, began_s: float) -> float:
        """What the group still takes on its worker, as far as one can tell."""
        worker = self._p.fleet.workers[group.worker_id]
        ran_s = self._p.now_s - began_s
        return max(group.predicted_tokens * self._step_s(worker, worker.in_flight) - ran_s, AT_LEAST * ran_s)

    def _step_s(self, worker: Worker, samples: int) -> float:
        """Of this clock: what the cost model says, by what samples of the worker took instead."""
        return self._p.settings.decode_cost.step_s(min(samples, worker.capacity), 0.0) * self._pace(worker)

    def _pace(self, worker: Worker) -> float:
        paces = self._p.plans.paces
        return paces.get(worker.worker_id) or median(paces.values())


def _longest(running: tuple[float, Group]) -> tuple[float, str]:
    return -running[0], running[1].group_id
