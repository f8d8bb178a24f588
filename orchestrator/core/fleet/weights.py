"""Telling workers to load weights, and what they answer.

Owns: loads that are under way. Never: when a worker is ready for one (``fleet.py``). Invariant: a worker is believed to
serve a version only after it said so, and it never goes back to an older one.
"""

from __future__ import annotations

from orchestrator.core.model.outbox import LoadKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, age
from transport.contracts.messages import LoadWeights, WeightsFailed, WeightsLoaded
from transport.contracts.types import UpdateMode, WeightIdentity


class Weights:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    def pass_turn(self) -> None:
        """Where workers load one after another, decide who is next; before dispatch, which spares that one."""
        if self._p.settings.update is UpdateMode.STAGGERED:
            self._p.fleet.pass_turn()

    def load(self) -> None:
        """Tell every worker that is due to load the newest weights; after dispatch, which may keep it at its batch."""
        p = self._p
        if p.fleet.newest is None:
            return
        for worker in p.fleet.loads_due(p.settings.update):
            worker.loading = p.fleet.newest
            worker.load_deadline_s = p.now_s + p.settings.rollout_timeout_s
            command = LoadWeights(worker_id=worker.worker_id, weights=p.fleet.newest)
            p.outbox.emit_until(LoadKey(worker.worker_id), command)

    def loaded(self, event: WeightsLoaded) -> None:
        worker = self._p.fleet.workers.get(event.worker_id)
        if worker is not None:
            self.serve(worker, event.weights)

    def serve(self, worker: Worker, weights: WeightIdentity) -> None:
        """The worker serves ``weights``; older ones than it is known to serve are a repeated report."""
        if worker.loaded is None or age(weights) > age(worker.loaded):
            worker.loaded = weights
        if self._p.fleet.behind(worker):
            self._p.fleet.all_told = False  # else nobody has become due to load: a thousand reports cost no look at all
        if worker.loading is not None and age(worker.loaded) >= age(worker.loading):
            worker.loading = None
            worker.load_failures = 0
            self.forget(worker)

    def failed(self, event: WeightsFailed) -> None:
        worker = self._p.fleet.workers.get(event.worker_id)
        if worker is not None and worker.loading is not None and age(worker.loading) == age(event.weights):
            self._give_up(worker)

    def expire(self) -> None:
        """A load without an answer counts as failed."""
        for worker in self._p.fleet.workers.values():
            if worker.loading is not None and worker.load_deadline_s <= self._p.now_s:
                self._give_up(worker)

    def forget(self, worker: Worker) -> None:
        """Its load is answered, or it is gone."""
        self._p.outbox.confirm(LoadKey(worker.worker_id))

    def _give_up(self, worker: Worker) -> None:
        """It is told again, a few times; the turn to load passes to another worker meanwhile."""
        worker.loading = None
        worker.load_failures += 1
        self._p.fleet.all_told = False
        self.forget(worker)
