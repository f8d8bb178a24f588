"""What generation workers and scoring tell of groups, and what follows from it.

Owns: arrival of rows, failures, losses, deadlines of groups. Never: rounds. Invariant: only missing samples are ever
generated again; every rule holds for late, repeated and reordered reports.
"""

from __future__ import annotations

import heapq

from orchestrator.core.dispatch.assignments import Assignments
from orchestrator.core.model.batches import MISSING, Group, Stage
from orchestrator.core.model.batching import Phase
from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.staleness import is_too_old
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.admission import Slots
from orchestrator.core.rollout.rolling import Rolling
from transport.contracts.messages import (
    GroupScored,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    ScoringFailed,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, parse_row_id

FEW = 64
"""Obsolete deadlines that are not worth a look."""


class Rollouts:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assignments, slots: Slots, phases: tuple[Phase, ...]) -> None:
        self._p = pipeline
        self._assignments = assignments
        self._slots = slots
        self._phases = phases
        self._rolling = Rolling(pipeline)

    # -- rows

    def finished(self, event: RolloutFinished) -> None:
        """A row exists. It counts once, whoever made it; a row that may not be trained ends its slot as stale."""
        group_id, sample = parse_row_id(event.row_id)
        group = self._p.live(group_id)
        if group is None or sample >= len(group.tokens) or group.tokens[sample] != MISSING:
            return
        self._slots.confirm_admission(group)
        unusable = self._why_unusable(group, event)
        if unusable:
            self._slots.end(group, "stale", unusable, free=unusable == LOST_WEIGHTS)
        else:
            self._record(group, sample, event)
            self._slots.row_arrived(group, event.row_id)

    def _record(self, group: Group, sample: int, event: RolloutFinished) -> None:
        if group.stage is Stage.RUNNING:
            self._p.fleet.workers[group.worker_id].finish_sample(group)
        group.tokens[sample] = event.response_tokens
        group.num_missing -= 1
        group.deaths = group.all_deaths = 0
        group.newest_version = max(group.newest_version, event.newest.version)
        if group.num_missing == 0:
            if group.stage is Stage.RUNNING:
                self._assignments.take_back(group)
            self._p.plans.remove(group)
            group.stage = Stage.SCORING

    def _why_unusable(self, group: Group, event: RolloutFinished) -> str:
        """Why a row may not be trained, "" if it may. The trainer waits for rows of a sent group: any will do."""
        if group.sent:
            return ""
        if event.finish_reason is FinishReason.ABORT:
            return ABORTED
        if not self._p.lineage.contains_row(event.oldest, event.newest):
            return LOST_WEIGHTS
        if is_too_old(group.batch, event.oldest.version, self._p.settings.max_staleness):
            return TOO_OLD
        return ""

    def missing(self, event: RowsMissing) -> None:
        """Rows vanished with the broker's tail: what is missing is generated and scored again, in the same slot."""
        touched: dict[str, Group] = {}
        for row in event.row_ids:
            group_id, sample = parse_row_id(row)
            group = self._p.live(group_id)
            if group is None or sample >= len(group.tokens) or group.tokens[sample] == MISSING:
                continue
            if group.stage is Stage.RUNNING:
                self._assignments.requeue(group, "rows of it went missing")  # its worker does not know of this sample
            group.tokens[sample] = MISSING
            group.num_missing += 1
            self._slots.row_vanished(group, row)
            touched[group_id] = group
        for group in touched.values():
            self._generate_again(group)
        self._slots.announce(list(touched.values()))  # the prompt columns may be gone too

    def _generate_again(self, group: Group) -> None:
        if group.stage is Stage.READY and not group.sent:
            self._p.batches[group.batch].remove_member(group)
        self._assignments.requeue(group)

    # -- failures

    def failed(self, event: RolloutFailed) -> None:
        """Samples will not come from this worker. Ignored unless it is the one that the group waits for."""
        group = self._p.live(event.group_id)
        if group is None or group.stage is not Stage.RUNNING or group.worker_id != event.worker_id:
            return
        if not any(sample < len(group.tokens) and group.tokens[sample] == MISSING for sample in event.samples):
            return
        if event.retryable or group.sent:
            self._slots.retry(group, event.reason, avoid=True, abort="another of its samples failed")
        else:
            self._slots.end(group, "dead", event.reason)

    def worker_lost(self, worker: Worker, lost: WorkerLost) -> None:
        """What the worker had not finished goes to others."""
        for group in [self._p.groups[group_id] for group_id in worker.groups]:
            if lost.left:
                self._assignments.requeue(group)
            else:
                self._slots.retry_elsewhere(group, f"{worker.worker_id} lost: {lost.reason}")
        self._assignments.remove_worker(worker)

    def reconcile(self, worker: Worker, event: WorkerReported) -> None:
        """A group whose plan the worker claimed, which it does not hold and did not finish, was lost on the way."""
        held = frozenset(event.held)
        self._assignments.forget_aborts(worker, held)
        claimed = parse_entry_id(event.plans_cursor)
        for group_id in [group_id for group_id in worker.groups if group_id not in held]:
            group = self._p.groups[group_id]
            if group.dispatched <= claimed:
                self._slots.retry(group, f"{worker.worker_id} lost it")

    def expire(self) -> None:
        """Take back groups whose deadline passed."""
        p = self._p
        self._forget_deadlines()
        while p.deadlines and p.deadlines[0].at_s <= p.now_s:
            group = p.awaited_by(heapq.heappop(p.deadlines))
            if group is not None:
                self._slots.retry(group, "rollout timed out", avoid=True, abort="rollout timed out")

    def _forget_deadlines(self) -> None:
        """Once most deadlines are of groups that are whole, keep the others: so many as run, not of all that ran."""
        p = self._p
        running = sum(len(worker.groups) for worker in p.fleet.workers.values())
        if len(p.deadlines) > 2 * running + FEW:
            p.deadlines = [deadline for deadline in p.deadlines if p.awaited_by(deadline) is not None]
            heapq.heapify(p.deadlines)

    # -- scores

    def scored(self, event: GroupScored) -> None:
        """A whole group is scored: it is ready for the trainer, or filtered when it carries no gradient.

        Scores prove that the rows exist, so what the core still waits for was told and lost, or was wrongly believed
        missing. Should this be an old report of rows that vanished since, the trainer finds them missing again.
        """
        group = self._p.live(event.group_id)
        if group is None or group.stage is Stage.READY or self._p.settings.service:
            return  # nothing is scored for a service
        if not len(event.response_tokens) == len(event.rewards) == len(group.tokens):
            return
        if group.num_missing:
            self._adopt(group, event)
        self._p.plans.remove(group)
        group.score(event.rewards)
        if group.sent:
            return  # its rows were generated again for a round that is already on the log
        filtered = self._p.settings.drop_no_signal and not event.signal
        if not filtered:
            self._rolling.pull_forward(group)
        batch = self._p.batches[group.batch]
        batch.add_member(group, self._phases[batch.phase])
        if filtered:
            self._slots.end(group, "filtered", "all rewards are equal")
        elif batch.num_wanted and len(batch.members) >= batch.num_wanted:
            self._slots.close_full(batch)

    def _adopt(self, group: Group, event: GroupScored) -> None:
        if group.stage is Stage.RUNNING:
            self._assignments.take_back(group, "its rows exist")
        self._slots.confirm_admission(group)
        group.tokens, group.num_missing = list(event.response_tokens), 0

    def scoring_failed(self, event: ScoringFailed) -> None:
        """The group will never be whole."""
        group = self._p.live(event.group_id)
        if group is not None and group.stage in (Stage.PENDING, Stage.RUNNING, Stage.SCORING) and not group.sent:
            self._slots.end(group, "dead", event.reason)

    # -- the trainer went back

    def drop_lost_versions(self, version: int) -> None:
        """Versions above ``version`` are lost: restart what runs, and end unsent slots whose rows rest on them.

        What runs is restarted because a sample that goes on would carry a span of lost weights in its middle. Rows that
        are in a round stay: the trainer replays the log as it is, with the logprobs recorded at generation.
        """
        p = self._p
        for group_id in [group_id for worker in p.fleet.workers.values() for group_id in worker.groups]:
            self._assignments.requeue(p.groups[group_id], LOST_WEIGHTS)
        for index in range(p.training.batch, p.next_batch):
            for group_id in list(p.batches[index].group_ids):
                group = p.live(group_id)
                if group is not None and not group.sent and group.newest_version > version:
                    self._slots.end(group, "stale", LOST_WEIGHTS, free=True)

    def suspend(self) -> None:
        """The run stops: what runs for frozen batches is stopped and waits for a resumed run."""
        p = self._p
        for group_id in [group_id for worker in p.fleet.workers.values() for group_id in worker.groups]:
            if p.frozen(p.groups[group_id].batch):
                self._assignments.requeue(p.groups[group_id], "the run stops")


ABORTED = "its tokens are partial"
LOST_WEIGHTS = "sampled under weights that a restart of the trainer lost"
TOO_OLD = "its oldest tokens are past max_staleness"
