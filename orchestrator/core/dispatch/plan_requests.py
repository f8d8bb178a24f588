"""Asking for plans of dispatch, and using those that come.

Owns: when a batch is planned, and the second look at a plan. Never: the planning, which takes longer than an event may:
it is done outside, on the values that the command carries. Invariant: a batch waits for its plan once, until a
deadline; a plan that comes later, names what has changed meanwhile, or never comes, costs nothing but the plan.
"""

from __future__ import annotations

from orchestrator.core.dispatch.assignments import Assignments
from orchestrator.core.model.batches import Group, Stage
from orchestrator.core.model.outbox import BatchPlanKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from transport.contracts.messages import ComputePlan, PlanComputed, PlannedGroup, PlannedWorker, PlanShare
from transport.contracts.types import GroupId

HALFWAY = 0.5
"""Of what a running sample is expected to have: on average it is in the middle."""
FALLBACK = "even_longest_first"
"""In place of a policy that relies on predictions while these are not trusted, and of "scored" until they have been
compared with lengths: a bad ranker must not lose to none."""
WITHOUT_PREDICTIONS = ("even", "random")
"""Policies that look at none."""


class PlanRequests:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assignments) -> None:
        self._p = pipeline
        self._assignments = assignments

    def request(self) -> None:
        """Have batches planned that were admitted since, as soon as there is a worker for them.

        Once more where workers came or went before the plan did, as at the start of a run.
        """
        p = self._p
        if not p.settings.plans or (p.plans.next_batch >= p.next_batch and not p.plans.awaited):
            return
        workers = [worker for worker in p.fleet.workers.values() if worker.fit and worker.loaded is not None]
        if not workers:
            return
        for index in p.plans.awaited:
            asked = self._asked(index)
            if asked is not None and [one.worker_id for one in asked.workers] != [one.worker_id for one in workers]:
                self._request(index, workers)
        for index in range(max(p.plans.next_batch, p.training.batch), p.next_batch):
            p.plans.awaited[index] = p.now_s + p.settings.plan_wait_s
            self._request(index, workers)
        p.plans.next_batch = p.next_batch

    def _asked(self, batch: int) -> ComputePlan | None:
        """The open request for a plan of ``batch``."""
        found = self._p.outbox.open.get(BatchPlanKey(batch))
        command = found.issued.command if found is not None else None
        return command if isinstance(command, ComputePlan) else None

    def _request(self, batch: int, workers: list[Worker]) -> None:
        p = self._p
        groups = [p.groups[group_id] for group_id in p.batches[batch].group_ids]
        groups = [group for group in groups if group.stage is Stage.PENDING]
        if not groups:
            return
        command = ComputePlan(
            plan_id=p.outbox.next_id.entry,
            batch=batch,
            policy=self._policy(),
            groups=tuple(self._planned_group(group) for group in groups),
            workers=tuple(self._planned_worker(worker) for worker in workers),
            prompt_tokens=sum(group.prompt_tokens for group in groups) / len(groups),
        )
        p.outbox.emit_until(BatchPlanKey(batch), command)

    def _policy(self) -> str:
        """As configured, unless it would rely on predictions that are not (or no longer) trusted."""
        plans, wanted = self._p.plans, self._p.settings.dispatch
        if wanted in WITHOUT_PREDICTIONS:
            return wanted
        distrusted = plans.ranker is not None and not plans.ranker.trusted
        return FALLBACK if distrusted or (wanted == "scored" and not plans.calibration.known) else wanted

    def _planned_group(self, group: Group) -> PlannedGroup:
        tokens, sigma = self._p.plans.calibration.corrected(group.predicted_tokens, group.predicted_sigma)
        return PlannedGroup(
            group_id=group.group_id, predicted_tokens=tokens, predicted_sigma=sigma, num_samples=group.num_missing
        )

    def _planned_worker(self, worker: Worker) -> PlannedWorker:
        """With what it runs and what earlier plans still have for it."""
        p = self._p
        running = [(p.groups[group_id], HALFWAY) for group_id in worker.groups]
        waiting = [(p.groups[group_id], 1.0) for group_id, name in p.plans.planned.items() if name == worker.worker_id]
        left = [
            (group.num_missing, share * p.plans.calibration.corrected(group.predicted_tokens, 0.0)[0])
            for group, share in [*running, *waiting]
        ]
        return PlannedWorker(
            worker_id=worker.worker_id,
            capacity=worker.capacity,
            pace=p.plans.pace(worker.worker_id),
            in_hand=sum(samples for samples, _ in left),
            in_hand_tokens=sum((samples * tokens for samples, tokens in left), start=0.0),
            in_hand_longest=max((tokens for _, tokens in left), default=0.0),
        )

    def take(self, event: PlanComputed) -> None:
        """Use a plan that was asked for and is not too late; groups and workers it no longer fits go without."""
        p = self._p
        asked = self._asked(event.batch)
        if asked is None or asked.plan_id != event.plan_id:
            return
        in_time = p.plans.awaits(event.batch, p.now_s)
        self._settle(event.batch)
        if in_time:
            for share in event.shares:
                self._use(event.batch, share)

    def _use(self, batch: int, share: PlanShare) -> None:
        p = self._p
        worker = p.fleet.workers.get(share.worker_id)
        if worker is None or not worker.fit:
            return
        groups = [group for group_id in share.group_ids if (group := self._unplanned(batch, group_id)) is not None]
        groups = [group for group in groups if group.avoid != worker.worker_id]
        for rank, group in enumerate(groups):
            self._assignments.enqueue_for(worker.worker_id, group, rank)
        p.plans.limits[worker.worker_id] = min(worker.capacity, sum(group.num_missing for group in groups))

    def _unplanned(self, batch: int, group_id: GroupId) -> Group | None:
        group = self._p.live(group_id)
        if group is None or group.batch != batch or group.stage is not Stage.PENDING:
            return None
        return None if group_id in self._p.plans.planned else group

    def expire(self) -> None:
        """Plans that did not come in time are not waited for any longer."""
        p = self._p
        for batch in [batch for batch in p.plans.awaited if not p.plans.awaits(batch, p.now_s)]:
            self._settle(batch)

    def _settle(self, batch: int) -> None:
        self._p.plans.awaited.pop(batch, None)
        self._p.outbox.confirm(BatchPlanKey(batch))
