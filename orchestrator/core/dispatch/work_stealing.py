"""Work stealing: each worker starts its own planned groups in their order, and an idle one takes those of others.

Owns: the order among planned groups. Never: the gate; it asks for it. Invariant: no planned group waits for a worker
that is gone or unfit, nor while another has room, may take it and would be done with it sooner.

    own      the worker has room: the first of its queue
    stolen   the worker has nothing left of the batch and runs less than its plan meant it to: the first of the queue
             behind which most tokens wait, if the forecast says it ends sooner here
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.core.dispatch import with_room
from orchestrator.core.model.batches import Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from transport.contracts.types import WorkerId


class Assigns(Protocol):
    """What binds groups to workers."""

    def may_take(self, worker: Worker, group: Group) -> bool: ...
    def assign(self, group: Group, worker: Worker) -> None: ...
    def enqueue(self, group: Group) -> None: ...


class WorkStealing:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assigns) -> None:
        self._p = pipeline
        self._assignments = assignments

    def dispatch(self, batch: int) -> bool:
        """Hand out planned groups of ``batch``. Returns whether none of them is left."""
        plans, workers, size = self._p.plans, self._p.fleet.workers, self._p.settings.group_size
        for worker_id in [name for name in plans.queues if not workers[name].fit]:
            self.release(worker_id)
        for worker in with_room([workers[worker_id] for worker_id in plans.queues], 0, size):
            self._start_own(worker, batch)
        while self._steal(batch):
            pass
        return plans.earliest_batch() != batch

    def release(self, worker_id: WorkerId) -> None:
        """The worker takes nothing any more: what was planned for it goes to anyone."""
        for group_id in self._p.plans.forget_worker(worker_id):
            group = self._p.groups.get(group_id)
            if group is not None and group.stage is Stage.PENDING:
                self._assignments.enqueue(group)

    def _start_own(self, worker: Worker, batch: int) -> None:
        while (group_id := self._p.plans.next_for(worker.worker_id, batch)) is not None:
            group = self._p.groups[group_id]
            roomy = with_room([worker], group.num_missing, len(group.tokens))
            if not roomy or not self._assignments.may_take(worker, group):
                return
            self._assignments.assign(group, worker)

    def _steal(self, batch: int) -> bool:
        """One group starts elsewhere than planned. Returns whether there was one."""
        plans = self._p.plans
        idle = [worker for worker in self._below_limit() if plans.next_for(worker.worker_id, batch) is None]
        owners = [worker_id for worker_id in plans.queues if plans.next_for(worker_id, batch) is not None]
        if not idle or not owners:
            return False
        owner = max(owners, key=plans.backlog.__getitem__)
        group = self._p.groups[plans.queues[owner][0].group_id]
        takers = [
            worker for worker in idle if self._can_take(worker, group) and self._ends_sooner(group, owner, worker)
        ]
        if not takers:
            return False
        taker = min(takers, key=lambda worker: plans.pace(worker.worker_id) * (worker.predicted_load + 1.0))
        self._assignments.assign(group, taker)
        return True

    def _below_limit(self) -> list[Worker]:
        """Who runs less than its share meant it to, or nothing."""
        limits = self._p.plans.limits
        return [
            worker
            for worker in self._p.fleet.workers.values()
            if worker.in_flight < limits.get(worker.worker_id, worker.capacity) or not worker.in_flight
        ]

    def _can_take(self, worker: Worker, group: Group) -> bool:
        limit = self._p.plans.limits.get(worker.worker_id, worker.capacity)
        fits = worker.in_flight + group.num_missing <= max(limit, group.num_missing)
        return fits and self._assignments.may_take(worker, group)

    def _ends_sooner(self, group: Group, owner: WorkerId, taker: Worker) -> bool:
        """Whether the taker is done with it before its owner: the group is next there, but no slot is free yet.

        A slot becomes free once the owner has generated what it runs, shared among its slots. One whose pace is not
        known is as fast as the others.
        """
        plans, worker = self._p.plans, self._p.fleet.workers[owner]
        wait_tokens = worker.predicted_load / max(1, worker.capacity)
        here = plans.pace(taker.worker_id) * group.predicted_tokens
        return here <= plans.pace(owner) * (wait_tokens + group.predicted_tokens)
