"""One attempt at a group: it waits, a worker gets it, it is taken back.

Owns: the links between groups and workers, and the queue of groups that wait for any of them. Never: which worker gets
which group (``dispatch/``), and whether a group ends (``lifecycle.py``). Invariant: a group is running if and only if
exactly one worker lists it, and then all of its missing samples are expected from that worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from orchestrator.core.model.groups import EVAL, NO_WORKER, SERVE, TRAIN, Exchangeable, Group, PendingEntry, Stage
from orchestrator.core.model.outbox import AbortKey, AdmissionKey, CommandId, DispatchKey
from orchestrator.core.model.pipeline import Deadline, Pipeline
from orchestrator.core.model.staleness import may_dispatch
from orchestrator.core.model.workers import Worker
from transport.contracts.messages import (
    EVALUATION,
    AbortRollouts,
    AdmitGroups,
    DispatchGroups,
    GroupAdmitted,
    GroupPlan,
)
from transport.contracts.types import GroupId, WorkerId

BATCH_PRIORITY_TOKENS = 10_000_000
"""Longer than any response: one batch earlier outranks any difference of predicted lengths."""
EVALUATION_PRIORITY = 1e12
"""Above that of any group of any batch."""


# -- prompt columns


def announce(p: Pipeline, groups: Sequence[Group]) -> None:
    """Have the prompt columns of these groups written; outstanding until a row of each is seen."""
    if not groups:
        return
    key = AdmissionKey(p.outbox.next_id)
    for group in groups:
        confirm_admission(p, group)
        group.admission = key
    admitted = [GroupAdmitted(group_id=g.group_id, prompt_id=g.prompt_id, group_size=len(g.tokens)) for g in groups]
    p.outbox.emit_until(key, AdmitGroups(groups=tuple(admitted)), holders=len(groups))


def confirm_admission(p: Pipeline, group: Group) -> None:
    """Its columns exist, or no longer matter."""
    if group.admission is not None:
        p.outbox.confirm(group.admission)
        group.admission = None


# -- the queue


def enqueue(p: Pipeline, group: Group) -> None:
    """The group waits for any worker: earlier batch first, then the longest prediction, then who came first.

    Longest first is list scheduling: each to the worker with least to do (``dispatch.least_loaded``), groups end on M
    equal workers within 4/3 - 1/(3M) of the best there is. Source: StreamRL sec. 5.3; the bound is Graham's (1969).
    """
    group.move(Stage.PENDING)
    p.plans.remove(group)
    heapq.heappush(p.pending, _entry(p, group, -group.predicted_tokens))


def enqueue_for(p: Pipeline, worker_id: WorkerId, group: Group, rank: int) -> None:
    """The pending group waits for this worker, as its ``rank``-th of the batch, or for one that is done sooner."""
    p.plans.put(worker_id, _entry(p, group, float(rank)), group.num_missing * group.predicted_tokens)


def _entry(p: Pipeline, group: Group, order_key: float) -> PendingEntry:
    p.num_enqueued += 1
    return PendingEntry(group.batch, order_key, p.num_enqueued - 1, group.group_id)


def head(p: Pipeline) -> Group | None:
    """The group that is next of those that wait for any worker, or None. Drops obsolete entries."""
    while p.pending:
        group = p.groups.get(p.pending[0].group_id)
        if group is not None and group.stage is Stage.PENDING and group.group_id not in p.plans.planned:
            return group
        heapq.heappop(p.pending)
    return None


# -- an attempt begins


def may_take(p: Pipeline, worker: Worker, group: Group) -> bool:
    """The gate, for a worker with room: fresh enough, healthy, not on its way to newer weights."""
    settings = p.settings
    return (
        worker.healthy
        and is_fresh(p, worker, group)
        and not p.fleet.holds_back(worker, group.batch, settings.update, settings.rollout_batches)
    )


def is_fresh(p: Pipeline, worker: Worker, group: Group) -> bool:
    """Whether what the worker serves is new enough for the group; a request is served with the newest weights."""
    if group.lane is SERVE:
        return worker.loaded is not None and worker.loaded.epoch == p.lineage.epoch and not p.fleet.behind(worker)
    return may_dispatch(group.batch, worker.loaded, p.lineage.epoch, p.settings.max_staleness)


def assign(p: Pipeline, group: Group, worker: Worker) -> None:
    """The worker generates what is missing of ``group``, which was next; it must be whole by a deadline."""
    p.plans.remove(group)
    start(p, group, worker)
    mark_exchangeable(p, group)
    deadline = Deadline(p.now_s + p.settings.rollout_timeout_s, group.group_id, group.attempt)
    heapq.heappush(p.deadlines, deadline)


def start(p: Pipeline, group: Group, worker: Worker) -> None:
    """Bind ``group`` to the worker and dispatch it."""
    if group.group_id in worker.aborting:
        _forget_abort(p, worker, group.group_id)
    worker.take(group)
    group.move(Stage.RUNNING)
    group.worker_id = worker.worker_id
    group.started_s = p.now_s
    group.note_start(worker.loaded.version if worker.loaded else 0)
    group.dispatched = _dispatch(p, group)


def mark_exchangeable(p: Pipeline, group: Group) -> None:
    """The group runs: with rolling membership, one that is ready before it may take its place."""
    if p.settings.membership == "rolling" and group.lane is TRAIN and not group.sent:
        heapq.heappush(p.batches[group.batch].exchangeable, Exchangeable(-group.predicted_tokens, group.group_id))


def _dispatch(p: Pipeline, group: Group) -> CommandId:
    """One command for each group, so that each is confirmed, and executed again, by itself."""
    plan = GroupPlan(
        group_id=group.group_id,
        batch=EVALUATION if group.lane is EVAL else group.batch,
        prompt_id=group.prompt_id,
        samples=group.missing_samples(),
        group_size=len(group.tokens),
        predicted_tokens=group.predicted_tokens,
        priority=plan_priority(group),
        attempt=group.attempt,
        sampling=group.sampling,
    )
    command = DispatchGroups(worker_id=group.worker_id, plans=(plan,))
    return p.outbox.emit_until(DispatchKey(group.group_id), command)


def plan_priority(group: Group) -> float:
    """Priority inside an engine, higher first: evaluations, then the earlier batch, then the longest prediction."""
    if group.lane is EVAL:
        return EVALUATION_PRIORITY + group.predicted_tokens
    return group.predicted_tokens - group.batch * BATCH_PRIORITY_TOKENS


# -- an attempt ends


def take_back(p: Pipeline, group: Group, reason: str = "") -> None:
    """Nothing more is expected of the worker that runs ``group``; with a reason it is asked to stop."""
    worker = p.fleet.workers[group.worker_id]
    worker.release(group)
    p.outbox.confirm(DispatchKey(group.group_id))
    if reason:
        _abort(p, worker, group, reason)
    group.worker_id = NO_WORKER
    if group.lane is EVAL:
        p.fleet.loads_pending = True


def requeue(p: Pipeline, group: Group, reason: str = "") -> None:
    """Another dispatch for what is missing of ``group``."""
    if group.stage is Stage.RUNNING:
        take_back(p, group, reason)
    if group.stage is not Stage.PENDING:
        group.attempt += 1
    enqueue(p, group)


def _abort(p: Pipeline, worker: Worker, group: Group, reason: str) -> None:
    """Named with its attempt: a later dispatch of the same group to this worker must survive the abort."""
    abort = AbortRollouts(
        worker_id=worker.worker_id, group_ids=(group.group_id,), reason=reason, attempts=(group.attempt,)
    )
    p.outbox.emit_until(AbortKey(worker.worker_id, group.group_id), abort)
    worker.aborting[group.group_id] = None


def _forget_abort(p: Pipeline, worker: Worker, group_id: GroupId) -> None:
    del worker.aborting[group_id]
    p.outbox.confirm(AbortKey(worker.worker_id, group_id))


# -- a worker


def forget_aborts(p: Pipeline, worker: Worker, held: frozenset[GroupId]) -> None:
    """The worker has reported what it still holds: aborts of anything else are done."""
    for group_id in [group_id for group_id in worker.aborting if group_id not in held]:
        _forget_abort(p, worker, group_id)


def remove_worker(p: Pipeline, worker: Worker) -> None:
    """The worker is gone, with what was addressed to it. Its groups were taken back before."""
    for group_id in list(worker.aborting):
        _forget_abort(p, worker, group_id)
    del p.fleet.workers[worker.worker_id]
    release_plan(p, worker.worker_id)


def release_plan(p: Pipeline, worker_id: WorkerId) -> None:
    """The worker starts nothing any more: what was planned for it goes to any worker."""
    for group_id in p.plans.forget_worker(worker_id):
        group = p.groups.get(group_id)
        if group is not None and group.stage is Stage.PENDING:
            enqueue(p, group)
