"""Carrying out plans of dispatch: each worker its own groups in their order, and whose work is taken by others.

Owns: the order among planned groups. Never: the gate; it asks for it. Invariant: no planned group waits for a worker
that is gone or unfit, nor while another has room, may take it and would be done with it sooner.

    own      the worker has room: the first of its queue
    taken    the worker has nothing left of the batch and runs less than its plan meant it to: the first of the queue
             behind which most tokens wait, if the forecast says it ends sooner here
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.core.batches import Group, Stage
from orchestrator.core.dispatch import with_room
from orchestrator.core.fleet import Worker
from orchestrator.core.pipeline import Pipeline
from transport.types import WorkerId


class Assigns(Protocol):
    """What binds groups to workers."""

    def may_take(self, worker: Worker, group: Group) -> bool: ...
    def assign(self, group: Group, worker: Worker) -> None: ...
    def enqueue(self, group: Group) -> None: ...


class PlannedDispatch:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assigns) -> None:
        self._p = pipeline
        self._assignments = assignments

    def earliest_batch(self) -> int | None:
        """The batch of the planned group that is next, None when nothing is planned."""
        heads = [self._head(worker_id) for worker_id in list(self._p.plans.queues)]
        return min((group.batch for group in heads if group is not None), default=None)

    def dispatch(self, batch: int) -> bool:
        """Hand out planned groups of ``batch``. Returns whether none of them is left."""
        workers = self._p.fleet.workers
        for worker_id in [name for name in self._p.plans.queues if name not in workers or not workers[name].fit]:
            self.release(worker_id)
        for worker_id in list(self._p.plans.queues):
            self._start_own(workers[worker_id], batch)
        while self._take_over(batch):
            pass
        return not any(self._head_of(worker_id, batch) for worker_id in list(self._p.plans.queues))

    def release(self, worker_id: WorkerId) -> None:
        """The worker takes nothing any more: what was planned for it goes to anyone."""
        for group_id in self._p.plans.forget_worker(worker_id):
            group = self._p.groups.get(group_id)
            if group is not None and group.stage is Stage.PENDING:
                self._assignments.enqueue(group)

    def _head(self, worker_id: WorkerId) -> Group | None:
        """What the worker is to start next. Drops groups that came to an end otherwise."""
        plans = self._p.plans
        while (entry := plans.head(worker_id)) is not None:
            group = self._p.groups.get(entry.group_id)
            if group is not None and group.stage is Stage.PENDING:
                return group
            del plans.planned[entry.group_id]
        return None

    def _head_of(self, worker_id: WorkerId, batch: int) -> Group | None:
        group = self._head(worker_id)
        return group if group is not None and group.batch == batch else None

    def _start_own(self, worker: Worker, batch: int) -> None:
        while (group := self._head_of(worker.worker_id, batch)) is not None:
            roomy = with_room([worker], group.num_missing, len(group.tokens))
            if not roomy or not self._assignments.may_take(worker, group):
                return
            self._assignments.assign(group, worker)

    def _take_over(self, batch: int) -> bool:
        """One group starts elsewhere than planned. Returns whether there was one."""
        plans = self._p.plans
        waiting = [(worker_id, self._head_of(worker_id, batch)) for worker_id in list(plans.queues)]
        heads = {worker_id: group for worker_id, group in waiting if group is not None}
        if not heads:
            return False
        longest = max(heads, key=lambda worker_id: plans.backlog.get(worker_id, 0.0))
        group = heads[longest]
        takers = [worker for worker in self._idle(group) if worker.worker_id not in heads]
        takers = [worker for worker in takers if self._ends_sooner(group, longest, worker)]
        if not takers:
            return False
        taker = min(takers, key=lambda worker: plans.pace(worker.worker_id) * (worker.predicted_load + 1.0))
        self._assignments.assign(group, taker)
        return True

    def _idle(self, group: Group) -> list[Worker]:
        """Who may take ``group`` and has room within what its plan meant it to run at once; an idle one always has."""
        limits = self._p.plans.limits
        return [
            worker
            for worker in with_room(self._p.fleet.workers.values(), group.num_missing, len(group.tokens))
            if worker.in_flight + group.num_missing
            <= max(limits.get(worker.worker_id, worker.capacity), group.num_missing)
            and self._assignments.may_take(worker, group)
        ]

    def _ends_sooner(self, group: Group, owner: WorkerId, taker: Worker) -> bool:
        """Whether the taker is done with it before its owner: the group is next there, but no slot is free yet.

        A slot becomes free once the owner has generated what it runs, shared among its slots. One whose pace is not
        known is as fast as the others.
        """
        plans, worker = self._p.plans, self._p.fleet.workers[owner]
        wait_tokens = worker.predicted_load / max(1, worker.capacity)
        here = plans.pace(taker.worker_id) * group.predicted_tokens
        return here <= plans.pace(owner) * (wait_tokens + group.predicted_tokens)
