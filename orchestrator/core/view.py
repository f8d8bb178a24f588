"""What people and metrics see of the pipeline's state, and what it waits for: at which stage, and who should act.

Never: decisions, nor the judgement that a wait takes too long (a healthy pipeline waits for something all the time).
Invariant: values, which share nothing with the state. They cost time linear in one batch's groups and the workers, or
in all groups, so they are made at ticks and for people, not at every event.

A wait is asked for from the end of the pipe: what does the trainer lack, and what does that lack?

    no trainer ─► rows of a sent round ─► the trainer itself ─► groups of the batch in training ─► its prompts
                                                                 scoring, generation, weights
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Literal

import msgspec

from orchestrator.core.dispatch.handout import gathers
from orchestrator.core.model.groups import MISSING, NO_PROBE, Group, Lane, Stage
from orchestrator.core.model.pipeline import Pipeline, Wait, WaitStage, is_saved
from orchestrator.core.model.settings import changeable
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.lifecycle import is_fresh
from transport.contracts.messages import RankerJudged
from transport.contracts.types import GroupId, RowId, WeightIdentity, WorkerId, WorkerKind, row_id


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that is not yet in a durable checkpoint. stages: slots by stage.  ended: ended slots by outcome."""

    batch: int
    stages: dict[str, int]
    ended: dict[str, int]
    sent: int
    pending_refills: int
    closed: bool
    trained: bool


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One generation worker. healthy: whether it can be expected to generate.

    aside_s: seconds for which it has stood aside, without groups, because its loads failed; None: it does not.
    load_failures: in a row.  load_problem: why the last of them failed.
    """

    worker_id: WorkerId
    capacity: int
    in_flight: int
    groups: int
    loaded: WeightIdentity | None
    loading: WeightIdentity | None
    healthy: bool
    aside_s: float | None = None
    load_failures: int = 0
    load_problem: str = ""


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation that is under way. waiting, running, scoring, answered: problems.  seconds: since its first one.

    held: newer weights wait for it.
    """

    number: int
    weights: WeightIdentity
    problems: int
    waiting: int
    running: int
    scoring: int
    answered: int
    seconds: float
    held: bool


class ScalingView(msgspec.Struct, frozen=True, kw_only=True):
    """How many generation workers there are to be. draining: workers that are to leave.

    changed: batch after which that changed last, -1 before the first change.  reason: why.
    judged: batch that was judged last, -1 before the first.  delta_s: by how much generation was the slower stage then.
    saved_s: by how much one unit of workers more would shorten generation (StreamRL's delta and delta').
    """

    min_workers: int
    max_workers: int
    draining: tuple[WorkerId, ...]
    changed: int = -1
    from_workers: int = 0
    to_workers: int = 0
    reason: str = ""
    judged: int = -1
    delta_s: float = 0.0
    saved_s: float = 0.0


class ProbesView(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that started before the others of their group, since the run began. num_followed: by the others, before
    they had ended.  num_running: without the others.
    """

    num_started: int
    num_followed: int
    num_running: int


class RankerView(RankerJudged, frozen=True, kw_only=True, tag=False, omit_defaults=False):
    """How right predictions of lengths were, and whether dispatch relies on their order; plans are even where not."""

    state: Literal["not_yet_measured", "trusted", "not_trusted"]


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline at one event.

    num_admitted: batches that were begun, trained ones too.  waiting_prompts: read and not admitted.
    pending, running, scoring, ready: groups (ready: and not in a round).
    rounds_outstanding: at the trainer, not confirmed.  outstanding: commands whose effect is not certain.
    settings: those that may change while the run goes on, as they are now.
    wait: what is waited for now; a healthy pipeline waits for something too. None once the run is over.
    ranker: what it was judged last, None where there is none.
    scaling: None where the number of generation workers is fixed.
    num_requests: that came so far, None where the run trains.
    probes: None where no sample of a group runs before the others.
    damaged_checkpoints: that the trainer could not use when it started last, and why, and from which version it went
    on instead.
    full_precision: why engines hold nothing in fp8 any more, "" while they hold what is set.
    """

    seq: int
    now_s: float
    trained_version: int
    num_admitted: int
    num_batches: int
    newest: WeightIdentity | None
    waiting_prompts: int
    prompts_requested: int
    exhausted: bool
    pending: int
    running: int
    scoring: int
    ready: int
    in_flight_samples: int
    rounds_outstanding: int
    outstanding: int
    retained_bytes: int
    over_budget: bool
    paused: bool
    checkpoint_requested: bool
    settings: dict[str, int | float | str]
    stop_reason: str
    finish_reason: str
    wait: Wait | None
    batches: tuple[BatchView, ...]
    workers: tuple[WorkerView, ...]
    evaluation: EvaluationView | None = None
    ranker: RankerView | None = None
    scaling: ScalingView | None = None
    num_requests: int | None = None
    damaged_checkpoints: tuple[str, ...] = ()
    went_back_to: int = 0
    probes: ProbesView | None = None
    full_precision: str = ""


def view(pipeline: Pipeline) -> PipelineView:
    """Summarise ``pipeline``. Costs time linear in groups not yet checkpointed."""
    p = pipeline
    groups = [group for group in p.groups.values() if group.lane is not Lane.EVAL]
    stages, ready = _stages(groups), Stage.READY
    return PipelineView(
        seq=p.outbox.seq,
        now_s=p.now_s,
        trained_version=p.training.trained_version,
        num_admitted=p.next_batch,
        num_batches=p.settings.num_batches,
        newest=p.fleet.newest,
        waiting_prompts=len(p.prompts.waiting),
        prompts_requested=p.prompts.requested,
        exhausted=p.prompts.exhausted,
        pending=stages[Stage.PENDING],
        running=stages[Stage.RUNNING],
        scoring=stages[Stage.SCORING],
        ready=sum([group.stage is ready and not group.sent for group in groups]),
        in_flight_samples=sum(worker.in_flight for worker in p.fleet.workers.values()),
        rounds_outstanding=len(p.training.rounds),
        outstanding=len(p.outbox.open) + len(p.outbox.rounds),
        retained_bytes=p.retention.retained_bytes,
        over_budget=p.retention.over_budget,
        paused=p.paused,
        checkpoint_requested=p.retention.requested,
        settings=changeable(p.settings),
        stop_reason=p.stop_reason,
        finish_reason=p.finish_reason,
        wait=current_wait(p),
        batches=tuple(_batch_view(p, index) for index in p.batches),
        workers=tuple(
            WorkerView(
                worker_id=worker.worker_id,
                capacity=worker.capacity,
                in_flight=worker.in_flight,
                groups=len(worker.groups),
                loaded=worker.loaded,
                loading=worker.loading,
                healthy=worker.healthy,
                aside_s=round(p.now_s - worker.aside_s, 1) if worker.aside_s is not None else None,
                load_failures=worker.load_failures,
                load_problem=worker.load_problem,
            )
            for worker in p.fleet.workers.values()
        ),
        evaluation=_evaluation_view(p),
        ranker=_ranker_view(p),
        scaling=_scaling_view(p),
        num_requests=p.last_request if p.settings.service else None,
        damaged_checkpoints=p.training.damaged,
        went_back_to=p.training.went_back_to,
        probes=_probes_view(p),
        full_precision=p.precision.reason,
    )


def describe_wait(pipeline: Pipeline) -> str:
    """What holds the run up and since when, and where the groups of the batch in training are."""
    p = pipeline
    wait = current_wait(p)
    blocked = f"{wait}; unchanged for {p.now_s - wait.since_s:.0f} s" if wait else ""
    where = ""
    if p.training.batch in p.batches:
        one = _batch_view(p, p.training.batch)
        where = f"batch {one.batch + 1}: " + ", ".join(f"{count} {stage}" for stage, count in one.stages.items())
    holders = [f"{worker.worker_id} holds {len(worker.groups)}" for worker in p.fleet.workers.values() if worker.groups]
    rounds = f"{len(p.training.rounds)} rounds at the trainer" if p.training.rounds else ""
    untrained = p.training.batch - p.training.trained_version
    steps = f"{untrained} closed batches wait for the trainer's step" if untrained else ""
    return "; ".join(text for text in (blocked, where, *holders, rounds, steps) if text)


def rows_reported(pipeline: Pipeline, *stages: Stage) -> list[RowId]:
    """Rows of groups in one of ``stages``, of every group that has not ended where none is named."""
    return [
        row_id(group.group_id, sample)
        for group in pipeline.groups.values()
        if (group.stage in stages if stages else group.stage is not Stage.ENDED)
        for sample, tokens in enumerate(group.tokens)
        if tokens != MISSING
    ]


def _batch_view(p: Pipeline, index: int) -> BatchView:
    batch = p.batches[index]
    groups = list(map(p.groups.__getitem__, batch.group_ids))
    return BatchView(
        batch=index,
        stages={stage.value: count for stage, count in _stages(groups).items()},
        ended={outcome: count for outcome, count in Counter(map(_OUTCOME, groups)).items() if outcome},
        sent=sum(map(_SENT, groups)),
        pending_refills=len(batch.pending_refills),
        closed=index < p.training.batch,
        trained=index < p.training.trained_version,
    )


# Thousands of groups are counted twice a second: by functions that do not call back into Python for each.
_STAGE, _OUTCOME, _SENT = attrgetter("stage"), attrgetter("outcome"), attrgetter("sent")


def _stages(groups: Iterable[Group]) -> Counter[Stage]:
    return Counter(map(_STAGE, groups))


def _evaluation_view(p: Pipeline) -> EvaluationView | None:
    current = p.evaluations.current
    if current is None:
        return None
    running = sum(1 for group_id in current.attempts if p.groups[group_id].stage is Stage.RUNNING)
    return EvaluationView(
        number=current.number,
        weights=current.weights,
        problems=current.num_problems,
        waiting=len(current.waiting),
        running=running,
        scoring=len(current.attempts) - running,
        answered=current.answered,
        seconds=p.now_s - current.opened_s if current.opened_s is not None else 0.0,
        held=current.newer_s is not None,
    )


def _ranker_view(p: Pipeline) -> RankerView | None:
    judged = p.plans.ranker
    if judged is None:
        return None
    state = "trusted" if judged.trusted else "not_trusted" if judged.measured else "not_yet_measured"
    return RankerView(state=state, **msgspec.structs.asdict(judged))


def _probes_view(p: Pipeline) -> ProbesView | None:
    if not p.settings.probes:
        return None
    running = sum(group.probe != NO_PROBE for group in p.running_groups())
    return ProbesView(num_running=running, **msgspec.structs.asdict(p.plans.probes))


def _scaling_view(p: Pipeline) -> ScalingView | None:
    settings, last, judged = p.settings.scaling, p.elastic.last, p.elastic.judged
    if settings is None:
        return None
    return ScalingView(
        min_workers=settings.min_workers,
        max_workers=settings.max_workers,
        draining=tuple(p.elastic.draining),
        changed=last.batch if last else -1,
        from_workers=last.from_workers if last else 0,
        to_workers=last.to_workers if last else 0,
        reason=last.reason if last else "",
        judged=judged.batch if judged else -1,
        delta_s=judged.delta_s if judged else 0.0,
        saved_s=p.elastic.saved_s if judged else 0.0,
    )


MAX_SHOWN = 8


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    """A group that a worker generates. running_s: since it was dispatched.  missing: samples that have not come yet."""

    group_id: GroupId
    worker_id: WorkerId
    running_s: float
    missing: tuple[int, ...]
    group_size: int
    predicted_tokens: float
    attempt: int


def longest_running(pipeline: Pipeline) -> tuple[RunningView, ...]:
    """At most MAX_SHOWN groups, the one that was dispatched first at the head. Linear in dispatched groups."""
    p = pipeline
    running = [(deadline, group) for deadline in p.deadlines if (group := p.awaited_by(deadline)) is not None]
    return tuple(
        RunningView(
            group_id=group.group_id,
            worker_id=group.worker_id,
            running_s=max(0.0, p.now_s - (deadline.at_s - p.settings.rollout_timeout_s)),
            missing=group.missing_samples(),
            group_size=len(group.tokens),
            predicted_tokens=group.expected_tokens,
            attempt=group.attempt,
        )
        for deadline, group in heapq.nsmallest(MAX_SHOWN, running, key=itemgetter(0))
    )


# -- what the pipeline waits for


NAMED = 4
"""Workers named in one sentence."""


def current_wait(p: Pipeline) -> Wait | None:
    """What the pipeline waits for now, since when nothing of it has changed. None once the run is over."""
    if p.finished:
        return None
    found = (
        _service(p)
        if p.settings.service
        else _last_of_critic(p)
        or _trainer_to_come(p)
        or _groups(p, _sent_and_unready(p))
        or _trainer(p)
        or _batch_in_training(p)
        or _last_evaluation(p)
        or _wait(p, "deciding", "something unknown: this is a bug", "orchestrator")
    )
    if found is not None and p.wait is not None and found.is_same(p.wait):
        return msgspec.structs.replace(found, since_s=p.wait.since_s)
    return found


def _last_evaluation(p: Pipeline) -> Wait | None:
    current = p.evaluations.current
    if current is None or p.evaluations.last_until_s is None:
        return None
    left = current.num_problems - current.answered
    owners = _names(worker.worker_id for worker in p.fleet.workers.values() if worker.evaluating)
    return _wait(p, "generation", f"{left} answers of the last evaluation", owners or WorkerKind.GENERATE.value)


def _wait(p: Pipeline, stage: WaitStage, waits_for: str, owner: str) -> Wait:
    """Whatever else is waited for, a full broker is worth knowing."""
    full = "; nothing new is admitted, the rows that are kept are over their limit" if p.retention.over_budget else ""
    return Wait(stage=stage, waits_for=waits_for + full, owner=owner, since_s=p.now_s)


def _service(p: Pipeline) -> Wait | None:
    """None while it waits for nothing: every request that there is waits for its reader, or there is none."""
    if p.fleet.newest is None:
        return _wait(p, "weights", "a first version of the weights", WorkerKind.PUBLISH.value) if p.requests else None
    return _groups(p, [group for group in p.groups.values() if group.stage in (Stage.PENDING, Stage.RUNNING)])


def _trainer_to_come(p: Pipeline) -> Wait | None:
    trainers = _others(p, WorkerKind.TRAIN)
    if not trainers:
        return _wait(p, "training", "a trainer to join", WorkerKind.TRAIN.value)
    if not p.training.dp_size:
        return _wait(p, "training", "the trainer to be ready", _names(trainers))
    return None


def _trainer(p: Pipeline) -> Wait | None:
    training = p.training
    lost = [f"{one}, which is lost" for one, kind in p.fleet.missing.items() if kind is WorkerKind.TRAIN]
    owner = _names(lost or _others(p, WorkerKind.TRAIN))  # the ranks that are there wait for that one
    if training.rounds:
        first, more = next(iter(training.rounds)), len(training.rounds) - 1
        behind = f" and {more} more" if more else ""
        return _wait(p, "training", f"round {first}{behind} to be trained", owner)
    if training.batch > training.trained_version:
        return _wait(p, "training", f"the step of {_place(p, training.trained_version)}", owner)
    if training.finish_id is not None:
        return _wait(p, "training", "the last checkpoint and the final model", owner)
    return None


def _last_of_critic(p: Pipeline) -> Wait | None:
    """Where the trainer is through with the run, and may have left."""
    finish_id = p.training.finish_id
    if not p.settings.critic or finish_id is None or not is_saved(p.retention.checkpoints, finish_id):
        return None
    owner = _names(_others(p, WorkerKind.CRITIC)) or WorkerKind.CRITIC.value
    return _wait(p, "training", "the last checkpoint of the critic", owner)


def _sent_and_unready(p: Pipeline) -> list[Group]:
    """Groups of a round whose rows went missing: the trainer cannot go on before they are made again."""
    batches = (p.batches[index] for index in p.batches if p.training.trained_version <= index <= p.training.batch)
    ready = Stage.READY  # ten thousand groups are looked at, a few times a second
    return [
        group
        for batch in batches
        for group in map(p.groups.__getitem__, batch.group_ids)
        if group.sent and group.stage is not ready
    ]


def _batch_in_training(p: Pipeline) -> Wait | None:
    batch, requested = p.batches.get(p.training.batch), p.prompts.requested
    if batch is not None and not batch.pending_refills:
        return _groups(p, [p.groups[group_id] for group_id in batch.group_ids])
    return _wait(p, "prompts", _plural(requested, "prompt"), "the prompt source") if requested else None


def _groups(p: Pipeline, groups: Iterable[Group]) -> Wait | None:
    """The stage nearest to the trainer that still has some of ``groups``."""
    by_stage: dict[Stage, list[Group]] = {stage: [] for stage in Stage}
    for group in groups:
        by_stage[group.stage].append(group)
    if scoring := by_stage[Stage.SCORING]:
        if (wait := _critic(p, scoring)) is not None:
            return wait
        scorers = _others(p, WorkerKind.SCORE)
        owner = _names(scorers) if scorers else f"{WorkerKind.SCORE.value} (none has joined)"
        return _wait(p, "scoring", f"the scores of {_count(p, scoring)}", owner)
    if running := by_stage[Stage.RUNNING]:
        samples = sum(group.num_missing for group in running)
        owner = _names(sorted({group.worker_id for group in running}))
        return _wait(p, "generation", f"{_plural(samples, 'sample')} of {_count(p, running)}", owner)
    pending = by_stage[Stage.PENDING]
    return _dispatch(p, pending) if pending else None


def _critic(p: Pipeline, scoring: Sequence[Group]) -> Wait | None:
    """Where their values are what is missing: the critic is not there, or is behind what they may be valued with."""
    if not p.settings.critic or scoring[0].lane is Lane.EVAL:
        return None
    critics = _others(p, WorkerKind.CRITIC)
    if not critics:
        return _wait(p, "scoring", "a critic to join", WorkerKind.CRITIC.value)
    if not p.critic.epoch:
        return _wait(p, "scoring", "the critic to be ready", _names(critics))
    if p.critic.version < scoring[0].batch - p.settings.max_staleness:
        behind = f"the critic to train {_place(p, p.critic.version)}, before it values {_place(p, scoring[0].batch)}"
        return _wait(p, "scoring", behind, _names(critics))
    return None


def _dispatch(p: Pipeline, pending: Sequence[Group]) -> Wait:
    """Why no worker has taken the next group."""
    if p.paused:
        return _wait(
            p, "generation", f"the end of the pause, to dispatch {_count(p, pending)}", "the person who paused it"
        )
    fleet = p.fleet
    workers = list(fleet.workers.values())
    if not workers:
        return _wait(p, "generation", "a generation worker to join", WorkerKind.GENERATE.value)
    healthy = [worker for worker in workers if worker.healthy]
    if not healthy:
        return _aside(p, [worker for worker in workers if not worker.draining])
    batch = pending[0].batch
    if p.plans.awaits(batch, p.now_s):
        return _wait(p, "deciding", f"the plan of {_place(p, batch)}", "orchestrator")
    fresh = [worker for worker in healthy if is_fresh(p, worker, pending[0])]
    if fresh and gathers(p, pending[0]):
        others = _names(worker.worker_id for worker in healthy if worker not in fresh)
        return _wait(p, "generation", f"all workers to begin {_place(p, batch)} together", others)
    if fresh:
        return _wait(p, "generation", f"room for {_count(p, pending)}", _names(worker.worker_id for worker in fresh))
    kept = [worker for worker in healthy if fleet.keeps(worker)]
    if kept:
        pinned = f"the evaluation of {fleet.pin}, before newer weights are loaded"
        return _wait(p, "weights", pinned, _names(worker.worker_id for worker in kept))
    loading = [worker for worker in healthy if worker.loading is not None] or healthy
    wait = _wait(p, "weights", f"weights {fleet.newest} to be loaded", _names(worker.worker_id for worker in loading))
    return msgspec.structs.replace(wait, why=next((one.load_problem for one in loading if one.load_problem), ""))


def _aside(p: Pipeline, workers: Sequence[Worker]) -> Wait:
    """No worker can take a group: those that stay stand aside, and are asked to load again and again."""
    if not workers:
        return _wait(p, "generation", "a generation worker to join, since all leave", WorkerKind.GENERATE.value)
    names = _names(worker.worker_id for worker in workers)
    failed = f"weights {p.fleet.newest} to be loaded, which failed everywhere and is tried again"
    why = next((worker.load_problem for worker in workers if worker.load_problem), "")
    return msgspec.structs.replace(_wait(p, "weights", failed, names), why=why, retried=True)


def _count(p: Pipeline, groups: Sequence[Group]) -> str:
    return f"{_plural(len(groups), 'group')} of {_place(p, groups[0].batch)}"


def _place(p: Pipeline, batch: int) -> str:
    """A batch as people count it: from 1, as requests always are."""
    return f"request {batch}" if p.settings.service else f"batch {batch + 1}"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _others(p: Pipeline, kind: WorkerKind) -> list[str]:
    return [worker_id for worker_id, of in p.fleet.others.items() if of is kind]


def _names(workers: Iterable[str]) -> str:
    names = list(workers)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
