"""What people and metrics see of the pipeline's state.

Owns: the summary. Never: decisions. Invariant: a value; it shares nothing with the state it was made from.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Literal, TypeAlias

import msgspec

from orchestrator.core.model.groups import MISSING, Group, Lane, Outcome, Stage
from orchestrator.core.model.pipeline import Deadline, Pipeline, Wait
from orchestrator.core.model.settings import changeable
from orchestrator.core.observe.wait_reasons import current_wait
from transport.contracts.messages import RankerJudged
from transport.contracts.types import GroupId, RowId, WeightIdentity, WorkerId, row_id


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
    """One generation worker. healthy: whether it can be expected to generate."""

    worker_id: WorkerId
    capacity: int
    in_flight: int
    groups: int
    loaded: WeightIdentity | None
    loading: WeightIdentity | None
    healthy: bool


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
    """

    min_workers: int
    max_workers: int
    draining: tuple[WorkerId, ...]
    changed: int = -1
    from_workers: int = 0
    to_workers: int = 0
    reason: str = ""


RankerState: TypeAlias = Literal["not_yet_measured", "trusted", "not_trusted"]
"""Whether dispatch relies on the order of predicted lengths; plans are even where it does not."""


class RankerView(RankerJudged, frozen=True, kw_only=True, tag=False, omit_defaults=False):
    """How right predictions of lengths were, and whether dispatch relies on them."""

    state: RankerState


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
    damaged_checkpoints: that the trainer could not use when it started last, and why.
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


def view(pipeline: Pipeline) -> PipelineView:
    """Summarise ``pipeline``. Costs time linear in groups not yet checkpointed."""
    p = pipeline
    batches = tuple(_batch_view(p, index) for index in p.batches)
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
        batches=batches,
        workers=tuple(_worker_views(p)),
        evaluation=_evaluation_view(p),
        ranker=_ranker_view(p.plans.ranker),
        scaling=_scaling_view(p),
        num_requests=p.last_request if p.settings.service else None,
        damaged_checkpoints=p.training.damaged,
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
        ended={outcome: count for outcome, count in _outcomes(groups).items() if outcome},
        sent=sum(map(_SENT, groups)),
        pending_refills=len(batch.pending_refills),
        closed=index < p.training.batch,
        trained=index < p.training.trained_version,
    )


# Thousands of groups are counted twice a second: by functions that do not call back into Python for each.
_STAGE, _OUTCOME, _SENT = attrgetter("stage"), attrgetter("outcome"), attrgetter("sent")


def _stages(groups: Iterable[Group]) -> Counter[Stage]:
    return Counter(map(_STAGE, groups))


def _outcomes(groups: Iterable[Group]) -> Counter[Outcome | None]:
    return Counter(map(_OUTCOME, groups))


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


def _ranker_view(judged: RankerJudged | None) -> RankerView | None:
    if judged is None:
        return None
    state: RankerState = "trusted" if judged.trusted else "not_trusted" if judged.measured else "not_yet_measured"
    return RankerView(state=state, **msgspec.structs.asdict(judged))


def _scaling_view(p: Pipeline) -> ScalingView | None:
    settings, last = p.settings.scaling, p.elastic.last
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
    )


def _worker_views(p: Pipeline) -> list[WorkerView]:
    return [
        WorkerView(
            worker_id=worker.worker_id,
            capacity=worker.capacity,
            in_flight=worker.in_flight,
            groups=len(worker.groups),
            loaded=worker.loaded,
            loading=worker.loading,
            healthy=worker.healthy,
        )
        for worker in p.fleet.workers.values()
    ]


# -- what has been generated for the longest, read from the deadlines that the state keeps anyway


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
    running = (deadline for deadline in pipeline.deadlines if pipeline.awaited_by(deadline) is not None)
    return tuple(_running_view(pipeline, deadline) for deadline in heapq.nsmallest(MAX_SHOWN, running))


def _running_view(pipeline: Pipeline, deadline: Deadline) -> RunningView:
    group = pipeline.groups[deadline.group_id]
    dispatched_s = deadline.at_s - pipeline.settings.rollout_timeout_s
    return RunningView(
        group_id=group.group_id,
        worker_id=group.worker_id,
        running_s=max(0.0, pipeline.now_s - dispatched_s),
        missing=group.missing_samples(),
        group_size=len(group.tokens),
        predicted_tokens=group.predicted_tokens,
        attempt=group.attempt,
    )
