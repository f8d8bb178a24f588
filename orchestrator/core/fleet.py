"""Generation workers join, load weights, report what they hold, and go; and how many there should be.

Owns: loads that are under way, the seconds of both stages from one version to the next, which workers are to leave.
Never: the rules (``model/workers.py``, ``model/autoscale.py``), nor processes. Invariant: a worker is in the fleet from
the event of its joining to that of its loss, and then nothing is expected of it; it is believed to serve a version only
after it said so, and never goes back to an older one; it is asked to leave only when it holds nothing and nothing more
will come, so draining costs no sample.

    pass_time ──► seconds of stages ──trained──► Scaling.observe ──► Change ─┬► SpawnWorkers
                                                worker.draining ◄────────────┘
                                                   └── it holds nothing ──────► DrainWorker

Source: StreamRL sec. 4.2; what is measured, and draining, is ours.
"""

from __future__ import annotations

from orchestrator.core.model.autoscale import Iteration, estimate_of, pace_of
from orchestrator.core.model.groups import MISSING, Batch, Stage
from orchestrator.core.model.outbox import DrainKey, LoadKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.settings import ScalingSettings
from orchestrator.core.model.workers import Worker, age
from orchestrator.core.rollout.lifecycle import Lifecycle
from transport.contracts.messages import (
    DrainWorker,
    LoadWeights,
    RolloutFinished,
    RoundDone,
    SpawnWorkers,
    WeightsFailed,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import WeightIdentity, WorkerId, WorkerKind, is_evaluation

REFUSED_S = 10.0
"""Seconds from the last worker's refusal of weights to the end of the run; workers of one run join within seconds."""


def load_newest(p: Pipeline) -> None:
    """Send every worker that is due to load the newest weights; after dispatch, which may keep it at its batch."""
    if p.fleet.newest is None:
        return
    for worker in p.fleet.loads_due(p.settings.update):
        worker.loading = p.fleet.newest
        worker.load_deadline_s = p.now_s + p.settings.rollout_timeout_s
        command = LoadWeights(
            worker_id=worker.worker_id,
            weights=p.fleet.newest,
            full_precision=p.precision.reason,
            aside_s=p.now_s - worker.aside_s if worker.aside_s is not None else None,
        )
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
    else:
        worker.may_load_again()  # also after a load that was given up on and ended after all
    if worker.loading is not None and age(worker.loaded) >= age(worker.loading):
        worker.loading = None
        worker.may_load_again()
        p.outbox.confirm(LoadKey(worker.worker_id))


def weights_failed(p: Pipeline, event: WeightsFailed) -> None:
    worker = p.fleet.workers.get(event.worker_id)
    if worker is not None and worker.loading is not None and age(worker.loading) == age(event.weights):
        worker.refused_s = p.now_s if event.permanent else None
        _give_up(p, worker, event.reason)


def expire_loads(p: Pipeline) -> None:
    """Give up loads without an answer, and end the pauses of workers that stand aside."""
    for worker in p.fleet.workers.values():
        if worker.loading is not None and worker.load_deadline_s <= p.now_s:
            worker.refused_s = None
            _give_up(p, worker, f"no answer for {p.settings.rollout_timeout_s:g} s")
    p.fleet.end_pauses(p.now_s)


def refused_everywhere(p: Pipeline) -> str:
    """Why no worker will ever take the newest weights, while groups wait for one; "" where one may.

    A worker that joins within REFUSED_S of the last refusal is waited for: it may be another kind of engine. A service
    waits for weights that do fit.
    """
    if p.settings.service:
        return ""
    workers = [worker for worker in p.fleet.workers.values() if not worker.draining]
    refused_s = [worker.refused_s for worker in workers if worker.refused_s is not None and not worker.healthy]
    if not workers or len(refused_s) < len(workers) or p.now_s < max(refused_s) + REFUSED_S:
        return ""
    if not any(group.stage is Stage.PENDING for group in p.groups.values()):
        return ""
    names = ", ".join(worker.worker_id for worker in workers[:3]) + (", ..." if len(workers) > 3 else "")
    return f"no generation worker can load weights {p.fleet.newest} ({names}): {workers[0].load_problem}"


def _give_up(p: Pipeline, worker: Worker, problem: str) -> None:
    """The load failed. It is retried: a few times at once, then with growing pauses while the worker stands aside.

    Another worker may be next to load meanwhile.
    """
    worker.load_failed(problem, p.now_s)
    p.fleet.loads_pending = True
    p.outbox.confirm(LoadKey(worker.worker_id))


# -- workers that join, report what they hold, and go


def joined(p: Pipeline, report: WorkerJoined) -> None:
    fleet = p.fleet
    if report.kind is not WorkerKind.GENERATE:
        note_other(p, report.worker_id, report.kind)
    elif report.worker_id not in fleet.workers:
        capacity = max(1, report.capacity)
        fleet.workers[report.worker_id] = Worker(worker_id=report.worker_id, capacity=capacity, loaded=report.weights)
        fleet.loads_pending = True
        if p.elastic.lost_s.pop(_name(report.worker_id), None) is None and p.elastic.asked_s:
            p.elastic.asked_s.pop(0)


def note_other(p: Pipeline, worker_id: WorkerId, kind: WorkerKind) -> None:
    """A worker that does not generate is there, and no one of its name is missing."""
    fleet = p.fleet
    fleet.others[worker_id] = kind
    fleet.missing = {one: of for one, of in fleet.missing.items() if _name(one) != _name(worker_id)}


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
    kind = p.fleet.others.pop(report.worker_id, None)
    if kind is not None and not report.left:
        p.fleet.missing[report.worker_id] = kind
    worker = p.fleet.workers.get(report.worker_id)
    if worker is None:
        return
    life.worker_lost(worker, report)
    p.outbox.confirm(LoadKey(worker.worker_id))
    if worker.draining:
        p.elastic.draining.remove(worker.worker_id)
        p.outbox.confirm(DrainKey(worker.worker_id))
    elif p.settings.scaling is not None:
        p.elastic.lost_s[_name(worker.worker_id)] = p.now_s


def _name(worker_id: WorkerId) -> str:
    """Without the incarnation: a worker that is started again has the same."""
    return worker_id.rpartition(".")[0]


# -- how many there should be: what is measured


def pass_time(p: Pipeline, now_s: float) -> None:
    """Count the seconds since the last event, during which nothing changed."""
    if p.settings.scaling is None or now_s <= p.now_s:
        return
    workers, elastic, seconds = p.fleet.serving(), p.elastic, now_s - p.now_s
    idle = sum(1 for worker in workers if not worker.in_flight)
    elastic.present_s += len(workers) * seconds
    elastic.idle_s += idle * seconds
    if idle < len(workers) and elastic.begun_s is None:
        elastic.begun_s = p.now_s


def note_sample(p: Pipeline, event: RolloutFinished) -> None:
    if p.settings.scaling is not None and not is_evaluation(event.row_id):
        p.elastic.ended_s = p.now_s


def note_round(p: Pipeline, event: RoundDone) -> None:
    """Before the event is applied: a repeated one is still known as such."""
    if p.settings.scaling is not None and event.round_id in p.training.rounds:
        p.elastic.training_s += event.busy_s + event.stepped_s


def trained(p: Pipeline, batch: Batch, stepped_s: float) -> None:
    """A version is trained: judge the seconds since the one before.

    Where batches overlap, an idle worker waits for the trainer; where they do not, for its fellows.
    """
    elastic, num_workers = p.elastic, len(p.fleet.serving())
    if p.settings.scaling is None:
        return
    if elastic.since_s is not None:
        if p.settings.max_staleness == 0:
            begun_s = elastic.begun_s if elastic.begun_s is not None else elastic.since_s
            ended_s = elastic.ended_s if elastic.ended_s is not None else p.now_s
            generation_s, exposed_s = max(0.0, ended_s - begun_s), p.now_s - ended_s
        else:
            idle_share = elastic.idle_s / elastic.present_s if elastic.present_s > 0 else 0.0
            generation_s, exposed_s = (p.now_s - elastic.since_s) * (1 - idle_share), 0.0
        iteration = Iteration(
            batch=batch.index,
            workers=max(1, num_workers),
            generation_s=generation_s,
            training_s=elastic.training_s + stepped_s,
            exposed_s=exposed_s,
        )
        _judge(p, batch, iteration, p.settings.scaling)


def measure_anew(p: Pipeline) -> None:
    """From a version on that is trained, whether or not its report came."""
    elastic = p.elastic
    if p.settings.scaling is None:
        return
    elastic.since_s, elastic.training_s = p.now_s, 0.0
    elastic.idle_s = elastic.present_s = 0.0
    elastic.begun_s = elastic.ended_s = None


def _judge(p: Pipeline, batch: Batch, iteration: Iteration, settings: ScalingSettings) -> None:
    serving, elastic = p.fleet.serving(), p.elastic
    groups = [p.groups[group_id] for group_id in batch.members]
    lengths = [float(tokens) for group in groups for tokens in group.tokens if tokens != MISSING and tokens > 0]
    if not lengths or p.stopping or p.paused:
        return
    cost, staleness = p.settings.decode_cost, p.settings.max_staleness
    prompt_tokens = sum(group.prompt_tokens for group in groups) / len(groups)
    slots = max((worker.capacity for worker in serving), default=1)
    if staleness:
        estimate = pace_of(cost, lengths, prompt_tokens=prompt_tokens, max_running=slots, max_staleness=staleness)
    else:
        estimate = estimate_of(cost, lengths, prompt_tokens=prompt_tokens, max_running=slots)
    elastic.judged, elastic.saved_s = iteration, iteration.saved_s(settings.unit, estimate)
    if settings.rule == "gap" and _num_coming(p):
        return  # the next iteration with who comes is judged, or how long a start takes would say how many come
    change = elastic.scaling.observe(settings, iteration, estimate)
    if change is None:
        return
    more = change.to_workers - change.from_workers
    all_begun = p.next_batch >= p.settings.num_batches  # who comes now would find nothing to begin
    if more > 0 and (all_begun or not _spawn(p, more, change.reason, settings)):
        return
    elastic.last = change
    if more < 0:
        for worker in serving[more:]:  # who joined last: the first ones are those that a resumed run starts
            worker.draining = True
            elastic.draining.append(worker.worker_id)


def keep_minimum(p: Pipeline) -> None:
    """Ask for workers where fewer than the minimum can generate and none is expected to come back.

    A drained worker may have been the last one alive while the deaths of the others were not known yet, e.g. after
    a resume, or the newest weights cannot be loaded by who is there; without workers no batch ends, and nothing else
    would ask for any.
    """
    settings = p.settings.scaling
    if settings is None or p.elastic.since_s is None or p.finished:
        return
    if p.stopping and not any(group.stage is Stage.PENDING for group in p.groups.values()):
        return  # what the trainer has begun may need rows again, and nothing else
    num_left = sum(worker.healthy for worker in p.fleet.workers.values())
    if num_left < settings.min_workers:
        missing = settings.min_workers - num_left - _num_coming(p)
        _spawn(p, missing, f"{num_left} generation workers are left, the minimum is {settings.min_workers}", settings)


def _spawn(p: Pipeline, more: int, reason: str, settings: ScalingSettings) -> bool:
    """Ask for workers, no more than would be too many if all that may still come did. Returns whether it asked."""
    elastic = p.elastic
    more = min(more, settings.max_workers - len(p.fleet.workers) - _num_coming(p))
    if more <= 0:
        return False
    elastic.spawned += more
    elastic.asked_s += [p.now_s] * more
    p.outbox.emit(SpawnWorkers(total=elastic.spawned, reason=reason))
    return True


def _num_coming(p: Pipeline) -> int:
    """Workers that were asked for, or that died and may be started again, as long as they may still come.

    One that was asked for joins within the default of ``liveness.startup_s``. For one that died a supervisor waits 8 s
    at most between two starts, so one that is not back after 60 s is not coming.
    """
    elastic = p.elastic
    elastic.asked_s = [at_s for at_s in elastic.asked_s if p.now_s < at_s + 300]
    elastic.lost_s = {name: at_s for name, at_s in elastic.lost_s.items() if p.now_s < at_s + 60}
    return len(elastic.asked_s) + len(elastic.lost_s)


def release_drained(p: Pipeline) -> None:
    """Ask those that hold nothing any more to leave."""
    for worker_id in p.elastic.draining:
        if not p.fleet.workers[worker_id].groups and DrainKey(worker_id) not in p.outbox.open:
            reason = p.elastic.last.reason if p.elastic.last is not None else ""
            p.outbox.emit_until(DrainKey(worker_id), DrainWorker(worker_id=worker_id, reason=reason))
