"""Generation workers join, load weights, report what they hold, and go.

Owns: loads that are under way. Never: when a worker is ready for one (``model/workers.py``). Invariant: a worker is in
the fleet from the event of its joining to that of its loss, and then nothing is expected of it; it is believed to serve
a version only after it said so, and it never goes back to an older one.
"""

from __future__ import annotations

from orchestrator.core.fleet import elastic
from orchestrator.core.model.outbox import LoadKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, age
from orchestrator.core.rollout.lifecycle import Lifecycle
from transport.contracts.messages import (
    LoadWeights,
    WeightsFailed,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import UpdateMode, WeightIdentity, WorkerKind


def choose_next_to_load(p: Pipeline) -> None:
    """Where workers load one after another, decide which is next; before dispatch, which spares that one."""
    if p.settings.update is UpdateMode.STAGGERED:
        p.fleet.choose_next_to_load()


def load_newest(p: Pipeline) -> None:
    """Send every worker that is due to load the newest weights; after dispatch, which may keep it at its batch."""
    if p.fleet.newest is None:
        return
    for worker in p.fleet.loads_due(p.settings.update):
        worker.loading = p.fleet.newest
        worker.load_deadline_s = p.now_s + p.settings.rollout_timeout_s
        command = LoadWeights(worker_id=worker.worker_id, weights=p.fleet.newest)
        p.outbox.emit_until(LoadKey(worker.worker_id), command)


def weights_loaded(p: Pipeline, event: WeightsLoaded) -> None:
    worker = p.fleet.workers.get(event.worker_id)
    if worker is not None:
        _serve(p, worker, event.weights)


def _serve(p: Pipeline, worker: Worker, weights: WeightIdentity) -> None:
    """The worker serves ``weights``; older ones than it is known to serve are a repeated report."""
    if worker.loaded is None or age(weights) > age(worker.loaded):
        worker.loaded = weights
    if p.fleet.behind(worker):
        p.fleet.loads_pending = True  # else no worker has become due to load: a thousand reports cost no look at all
    if worker.loading is not None and age(worker.loaded) >= age(worker.loading):
        worker.loading = None
        worker.load_failures = 0
        p.outbox.confirm(LoadKey(worker.worker_id))


def weights_failed(p: Pipeline, event: WeightsFailed) -> None:
    worker = p.fleet.workers.get(event.worker_id)
    if worker is not None and worker.loading is not None and age(worker.loading) == age(event.weights):
        _give_up(p, worker)


def expire_loads(p: Pipeline) -> None:
    """A load without an answer counts as failed."""
    for worker in p.fleet.workers.values():
        if worker.loading is not None and worker.load_deadline_s <= p.now_s:
            _give_up(p, worker)


def _give_up(p: Pipeline, worker: Worker) -> None:
    """The load is retried a few times; another worker may be next to load meanwhile."""
    worker.loading = None
    worker.load_failures += 1
    p.fleet.loads_pending = True
    p.outbox.confirm(LoadKey(worker.worker_id))


# -- workers that join, report what they hold, and go


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
        _serve(p, worker, report.weights)
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
