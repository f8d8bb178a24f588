"""Which worker holds which group: the queue of groups that wait, dispatch, and taking a group back.

Owns: the links between groups and workers. Never: whether a slot ends (``slots.py``). Invariant: a group is running if
and only if exactly one worker lists it, and then all of its missing samples are expected from that worker.
"""

from __future__ import annotations

import heapq

from orchestrator.core.dispatch import Order, Placement, plan_priority, with_room
from orchestrator.core.dispatch.work_stealing import WorkStealing
from orchestrator.core.model.batches import NOBODY, Group, PendingEntry, Stage
from orchestrator.core.model.outbox import AbortKey, CommandId, DispatchKey
from orchestrator.core.model.pipeline import Deadline, Pipeline
from orchestrator.core.model.staleness import may_dispatch
from orchestrator.core.model.workers import Worker
from transport.contracts.messages import AbortRollouts, DispatchGroups, GroupPlan
from transport.contracts.types import GroupId, WorkerId


class Assignments:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, order: Order, place: Placement) -> None:
        self._p = pipeline
        self._order = order
        self._place = place
        self._stealing = WorkStealing(pipeline, self)

    def enqueue(self, group: Group) -> None:
        """The group waits for any worker: earlier batch first, then the policy's order, then who came first."""
        p = self._p
        group.stage = Stage.PENDING
        p.plans.remove(group)
        heapq.heappush(p.pending, self._entry(group, self._order(group.predicted_tokens)))

    def enqueue_for(self, worker_id: WorkerId, group: Group, rank: int) -> None:
        """The pending group waits for this worker, as its ``rank``-th of the batch, or for one that is done sooner."""
        tokens = group.num_missing * group.predicted_tokens
        self._p.plans.put(worker_id, self._entry(group, float(rank)), tokens)

    def _entry(self, group: Group, order_key: float) -> PendingEntry:
        p = self._p
        p.num_enqueued += 1
        return PendingEntry(group.batch, order_key, p.num_enqueued - 1, group.group_id)

    def head(self) -> Group | None:
        """The group that is next of those that wait for any worker, or None. Drops obsolete entries."""
        p = self._p
        while p.pending:
            group = p.groups.get(p.pending[0].group_id)
            if group is not None and group.stage is Stage.PENDING and group.group_id not in p.plans.planned:
                return group
            heapq.heappop(p.pending)
        return None

    def dispatch(self) -> None:
        """Hand out groups while some worker may take the next one.

        The next group is of the earliest batch, and every rule is at least as strict for later batches: when nobody may
        take it, nobody may take any other. Of one batch, groups without a plan go first: they are late.
        """
        p = self._p
        while not p.paused:
            group = self.head()
            planned = p.plans.earliest_batch()
            if group is not None and (planned is None or group.batch <= planned):
                if p.frozen(group.batch) or p.plans.awaits(group.batch, p.now_s) or not self._dispatch_to_any(group):
                    return
            elif planned is None or p.frozen(planned) or not self._stealing.dispatch(planned):
                return

    def _dispatch_to_any(self, group: Group) -> bool:
        """Hand out the head. Returns whether somebody could take it."""
        p = self._p
        roomy = with_room(p.fleet.workers.values(), group.num_missing, len(group.tokens))
        takers = [worker for worker in roomy if self.may_take(worker, group)]
        if takers:
            heapq.heappop(p.pending)
            self.assign(group, p.fleet.workers[self._place(takers, group.avoid)])
        return bool(takers)

    def may_take(self, worker: Worker, group: Group) -> bool:
        """The gate, for a worker with room: fresh enough, of this epoch, fit, and not on its way to newer weights."""
        p = self._p
        settings = p.settings
        return (
            may_dispatch(group.batch, worker.loaded, p.lineage.epoch, settings.max_staleness)
            and worker.fit
            and not (settings.service and p.fleet.behind(worker))
            and not p.fleet.holds_back(worker, group.batch, settings.update, settings.rollout_batches)
        )

    def take_back(self, group: Group, reason: str = "") -> None:
        """Nothing more is expected of the worker that runs ``group``; with a reason it is told to stop."""
        p = self._p
        worker = p.fleet.workers[group.worker_id]
        worker.release(group)
        p.outbox.confirm(DispatchKey(group.group_id))
        if reason:
            self._abort(worker, group, reason)
        group.worker_id = NOBODY

    def requeue(self, group: Group, reason: str = "") -> None:
        """Another dispatch for what is missing of ``group``."""
        if group.stage is Stage.RUNNING:
            self.take_back(group, reason)
        if group.stage is not Stage.PENDING:
            group.attempt += 1
        self.enqueue(group)

    def forget_aborts(self, worker: Worker, held: frozenset[GroupId]) -> None:
        """The worker has told what it still holds: aborts of anything else are done."""
        for group_id in [group_id for group_id in worker.aborting if group_id not in held]:
            self._forget_abort(worker, group_id)

    def remove_worker(self, worker: Worker) -> None:
        """The worker is gone, with what was addressed to it. Its groups were taken back before."""
        for group_id in list(worker.aborting):
            self._forget_abort(worker, group_id)
        del self._p.fleet.workers[worker.worker_id]
        self._stealing.release(worker.worker_id)

    def _forget_abort(self, worker: Worker, group_id: GroupId) -> None:
        del worker.aborting[group_id]
        self._p.outbox.confirm(AbortKey(worker.worker_id, group_id))

    def _abort(self, worker: Worker, group: Group, reason: str) -> None:
        """Named with its attempt: a later dispatch of the same group to this worker must survive the abort."""
        abort = AbortRollouts(
            worker_id=worker.worker_id, group_ids=(group.group_id,), reason=reason, attempts=(group.attempt,)
        )
        self._p.outbox.emit_until(AbortKey(worker.worker_id, group.group_id), abort)
        worker.aborting[group.group_id] = None

    def assign(self, group: Group, worker: Worker) -> None:
        """The worker generates what is missing of ``group``, which was next."""
        p = self._p
        p.plans.remove(group)
        if group.group_id in worker.aborting:
            self._forget_abort(worker, group.group_id)
        worker.take(group)
        group.stage, group.worker_id = Stage.RUNNING, worker.worker_id
        group.started_s = p.now_s
        group.note_start(worker.loaded.version if worker.loaded else 0)
        if p.settings.membership == "rolling" and not group.sent:
            p.batches[group.batch].may_exchange(group)
        group.dispatched = self._emit_plan(group)
        deadline = Deadline(p.now_s + p.settings.rollout_timeout_s, group.group_id, group.attempt)
        heapq.heappush(p.deadlines, deadline)

    def _emit_plan(self, group: Group) -> CommandId:
        """One command for each group, so that each is confirmed, and executed again, by itself."""
        plan = GroupPlan(
            group_id=group.group_id,
            batch=group.batch,
            prompt_id=group.prompt_id,
            samples=group.missing_samples(),
            group_size=len(group.tokens),
            predicted_tokens=group.predicted_tokens,
            priority=plan_priority(group.batch, group.predicted_tokens),
            attempt=group.attempt,
            sampling=group.sampling,
        )
        command = DispatchGroups(worker_id=group.worker_id, plans=(plan,))
        return self._p.outbox.emit_until(DispatchKey(group.group_id), command)
