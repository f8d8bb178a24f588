"""Workers load weights: which is sent to, what it answers, what it serves.

Owns: loads that are under way. Never: when a worker is ready for one (``model/workers.py``). Invariant: a worker is
believed to serve a version only after it said so, and it never goes back to an older one.
"""

from __future__ import annotations

from orchestrator.core.model.outbox import LoadKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, age
from transport.contracts.messages import LoadWeights, WeightsFailed, WeightsLoaded
from transport.contracts.types import UpdateMode, WeightIdentity


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


def loaded(p: Pipeline, event: WeightsLoaded) -> None:
    worker = p.fleet.workers.get(event.worker_id)
    if worker is not None:
        serve(p, worker, event.weights)


def serve(p: Pipeline, worker: Worker, weights: WeightIdentity) -> None:
    """The worker serves ``weights``; older ones than it is known to serve are a repeated report."""
    if worker.loaded is None or age(weights) > age(worker.loaded):
        worker.loaded = weights
    if p.fleet.behind(worker):
        p.fleet.loads_pending = True  # else no worker has become due to load: a thousand reports cost no look at all
    if worker.loading is not None and age(worker.loaded) >= age(worker.loading):
        worker.loading = None
        worker.load_failures = 0
        p.outbox.confirm(LoadKey(worker.worker_id))


def failed(p: Pipeline, event: WeightsFailed) -> None:
    worker = p.fleet.workers.get(event.worker_id)
    if worker is not None and worker.loading is not None and age(worker.loading) == age(event.weights):
        _give_up(p, worker)


def expire(p: Pipeline) -> None:
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
