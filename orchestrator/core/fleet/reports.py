"""Workers that join, report what they hold, and go.

Invariant: a worker is in the fleet from the event of its joining to that of its loss, and then nothing is expected of
it.
"""

from __future__ import annotations

from orchestrator.core.fleet import elastic, weights
from orchestrator.core.model.outbox import LoadKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.lifecycle import Lifecycle
from transport.contracts.messages import WorkerJoined, WorkerLost, WorkerReported
from transport.contracts.types import WorkerKind


def joined(p: Pipeline, report: WorkerJoined) -> None:
    fleet = p.fleet
    if report.kind is not WorkerKind.GENERATE:
        fleet.others[report.worker_id] = report.kind
    elif report.worker_id not in fleet.workers:
        capacity = max(1, report.capacity)
        fleet.join(Worker(worker_id=report.worker_id, capacity=capacity, loaded=report.weights))
        elastic.join(p, report.worker_id)


def reported(p: Pipeline, life: Lifecycle, report: WorkerReported) -> None:
    worker = p.fleet.workers.get(report.worker_id)
    if worker is None:
        return
    if report.weights is not None:
        weights.serve(p, worker, report.weights)
    if report.capacity:
        worker.capacity = report.capacity
    life.reconcile(worker, report)


def lost(p: Pipeline, life: Lifecycle, report: WorkerLost) -> None:
    p.fleet.others.pop(report.worker_id, None)
    worker = p.fleet.workers.get(report.worker_id)
    if worker is not None:
        life.worker_lost(worker, report)
        p.outbox.confirm(LoadKey(worker.worker_id))
        elastic.forget(p, worker.worker_id)
