"""Workers that come, tell what they hold, and go.

Owns: who is told of it. Never: what each makes of it. Invariant: a worker is in the fleet from the event of its joining
to that of its loss, and then nothing is expected of it.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from orchestrator.core.fleet.elastic_fleet import ElasticFleet
from orchestrator.core.fleet.weights import Weights
from orchestrator.core.lanes.evaluation_attempts import EvaluationTries
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.lifecycle import Rollouts
from transport.contracts.messages import WorkerJoined, WorkerLost, WorkerReported
from transport.contracts.types import WorkerKind

WorkerReport: TypeAlias = WorkerJoined | WorkerReported | WorkerLost


class WorkerReports:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        rollouts: Rollouts,
        weights: Weights,
        tries: EvaluationTries,
        elastic: ElasticFleet,
    ) -> None:
        self._p = pipeline
        self._rollouts = rollouts
        self._weights = weights
        self._tries = tries
        self._elastic = elastic

    def take(self, report: WorkerReport) -> None:
        match report:
            case WorkerReported():
                self._reported(report)
            case WorkerJoined():
                self._joined(report)
            case WorkerLost():
                self._lost(report)
            case _:
                assert_never(report)

    def _reported(self, report: WorkerReported) -> None:
        worker = self._p.fleet.workers.get(report.worker_id)
        if worker is None:
            return
        if report.weights is not None:
            self._weights.serve(worker, report.weights)
        if report.capacity:
            worker.capacity = report.capacity
        self._rollouts.reconcile(worker, report)
        self._tries.reconcile(worker, report)

    def _joined(self, report: WorkerJoined) -> None:
        fleet = self._p.fleet
        if report.kind is not WorkerKind.GENERATE:
            fleet.others[report.worker_id] = report.kind
        elif report.worker_id not in fleet.workers:
            capacity = max(1, report.capacity)
            fleet.join(Worker(worker_id=report.worker_id, capacity=capacity, loaded=report.weights))
            self._elastic.join(report.worker_id)

    def _lost(self, report: WorkerLost) -> None:
        fleet = self._p.fleet
        fleet.others.pop(report.worker_id, None)
        worker = fleet.workers.get(report.worker_id)
        if worker is not None:
            self._tries.worker_lost(worker, report)
            self._rollouts.worker_lost(worker, report)
            self._weights.forget(worker)
            self._elastic.forget(worker.worker_id)
