"""Workers come and go while a run goes on: the rule of ``model/autoscale.py``, fed with what is reported.

Owns: the seconds of both stages from one version to the next, and which workers are to leave. Never: the rule, nor
processes: a supervisor starts them, a worker that is asked to leave ends itself. Invariant: a worker is asked to leave
only when it holds nothing and nothing more will come to it, so draining costs no sample.

    pass_time ──► seconds of stages ──trained──► Scaling.observe ──► Change ─┬► SpawnWorkers
                                                worker.draining ◄────────────┘
                                                   └── it holds nothing ──────► DrainWorker

Source: StreamRL sec. 4.2; what is measured, and draining, is ours.
"""

from __future__ import annotations

from orchestrator.core.model.autoscale import Iteration, estimate_of
from orchestrator.core.model.groups import MISSING, Batch
from orchestrator.core.model.outbox import DrainKey
from orchestrator.core.model.pipeline import Pipeline
from transport.contracts.messages import DrainWorker, RolloutFinished, RoundDone, SpawnWorkers
from transport.contracts.types import WorkerId, is_evaluation

RETURN_S = 60.0
"""A dead worker that is not back by then is not started again: a supervisor waits at most 8 s between two starts."""
START_S = 300.0
"""A worker that was asked for and has not joined by then is not coming (the default of ``liveness.startup_s``)."""


# -- what is measured


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
    """A version is trained: judge the seconds since the one before, and begin anew."""
    elastic = p.elastic
    if p.settings.scaling is None:
        return
    if elastic.since_s is not None:
        _judge(p, batch, _iteration(p, batch, elastic.since_s, elastic.training_s + stepped_s))
    elastic.since_s, elastic.training_s = p.now_s, 0.0
    elastic.idle_s = elastic.present_s = 0.0
    elastic.begun_s = elastic.ended_s = None


def _iteration(p: Pipeline, batch: Batch, since_s: float, training_s: float) -> Iteration:
    """Where batches overlap, an idle worker waits for the trainer; where they do not, for its fellows."""
    elastic = p.elastic
    if p.settings.max_staleness == 0:
        begun_s = elastic.begun_s if elastic.begun_s is not None else since_s
        ended_s = elastic.ended_s if elastic.ended_s is not None else p.now_s
        generation_s, exposed_s = max(0.0, ended_s - begun_s), p.now_s - ended_s
    else:
        idle_share = elastic.idle_s / elastic.present_s if elastic.present_s > 0 else 0.0
        generation_s, exposed_s = (p.now_s - since_s) * (1 - idle_share), 0.0
    return Iteration(
        batch=batch.index,
        workers=max(1, len(p.fleet.serving())),
        generation_s=generation_s,
        training_s=training_s,
        exposed_s=exposed_s,
    )


# -- what follows


def _judge(p: Pipeline, batch: Batch, iteration: Iteration) -> None:
    settings = p.settings.scaling
    groups = [p.groups[group_id] for group_id in batch.members]
    lengths = [float(tokens) for group in groups for tokens in group.tokens if tokens != MISSING and tokens > 0]
    if settings is None or not lengths or p.stopping or p.paused:
        return
    estimate = estimate_of(
        p.settings.decode_cost,
        lengths,
        prompt_tokens=sum(group.prompt_tokens for group in groups) / len(groups),
        max_running=max((worker.capacity for worker in p.fleet.serving()), default=1),
    )
    change = p.elastic.scaling.observe(settings, iteration, estimate)
    if change is None:
        return
    more = change.to_workers - change.from_workers
    if more > 0:
        if _spawn(p, more, change.reason):
            p.elastic.last = change
        return
    p.elastic.last = change
    for worker in p.fleet.serving()[more:]:  # who joined last: the first ones are those that a resumed run starts
        worker.draining = True
        p.elastic.draining.append(worker.worker_id)


def keep_minimum(p: Pipeline) -> None:
    """Ask for workers where fewer than the minimum are left and none is expected to come back.

    A drained worker may have been the last one alive while the deaths of the others were not known yet, e.g. after
    a resume; without workers no batch ends, and nothing else would ask for any.
    """
    settings = p.settings.scaling
    if settings is None or p.elastic.since_s is None or p.stopping or p.finished:
        return
    num_left = sum(not worker.draining for worker in p.fleet.workers.values())
    if num_left < settings.min_workers:
        missing = settings.min_workers - num_left - _num_coming(p)
        _spawn(p, missing, f"{num_left} generation workers are left, the minimum is {settings.min_workers}")


def _spawn(p: Pipeline, more: int, reason: str) -> bool:
    """Ask for workers, no more than would be too many if all that may still come did. Returns whether it asked."""
    elastic = p.elastic
    limit = p.settings.scaling.max_workers if p.settings.scaling is not None else 0
    more = min(more, limit - len(p.fleet.workers) - _num_coming(p))
    if more <= 0:
        return False
    elastic.spawned += more
    elastic.asked_s += [p.now_s] * more
    p.outbox.emit(SpawnWorkers(total=elastic.spawned, reason=reason))
    return True


def _num_coming(p: Pipeline) -> int:
    """Workers that were asked for, or that died and may be started again, as long as they may still come."""
    elastic = p.elastic
    elastic.asked_s = [at_s for at_s in elastic.asked_s if p.now_s < at_s + START_S]
    elastic.lost_s = {name: at_s for name, at_s in elastic.lost_s.items() if p.now_s < at_s + RETURN_S}
    return len(elastic.asked_s) + len(elastic.lost_s)


def release_drained(p: Pipeline) -> None:
    """Ask those that hold nothing any more to leave."""
    for worker_id in p.elastic.draining:
        if not p.fleet.workers[worker_id].groups and DrainKey(worker_id) not in p.outbox.open:
            reason = p.elastic.last.reason if p.elastic.last is not None else ""
            p.outbox.emit_until(DrainKey(worker_id), DrainWorker(worker_id=worker_id, reason=reason))


# -- workers that come and go


def join(p: Pipeline, worker_id: WorkerId) -> None:
    """A worker came: back, or because it was asked for, or by itself."""
    if p.elastic.lost_s.pop(_name(worker_id), None) is None and p.elastic.asked_s:
        p.elastic.asked_s.pop(0)


def forget(p: Pipeline, worker_id: WorkerId) -> None:
    """The worker is gone, in whatever way."""
    if worker_id in p.elastic.draining:
        p.elastic.draining.remove(worker_id)
        p.outbox.confirm(DrainKey(worker_id))
    elif p.settings.scaling is not None:
        p.elastic.lost_s[_name(worker_id)] = p.now_s


def _name(worker_id: WorkerId) -> str:
    """Without the incarnation: a worker that is started again has the same."""
    return worker_id.rpartition(".")[0]
