"""The life of a group, the same in every lane, and what generation workers and scoring report of it.

Owns: arrival of rows, failures, losses, deadlines. Never: rounds. Invariant: only missing samples are ever generated
again; every rule holds for late, repeated and reordered reports.

``GroupLane`` is that life. A lane is one subclass, which says what differs there: which rows it can use, what a row and
a score mean, and how a group ends. ``Lifecycle`` takes an event to the lane of its group.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from enum import StrEnum

from orchestrator.core.model.deaths import deaths_in_a_row
from orchestrator.core.model.groups import MISSING, Group, Lane, Outcome, Stage
from orchestrator.core.model.outbox import parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker
from orchestrator.core.rollout.attempts import (
    announce,
    confirm_admission,
    forget_aborts,
    remove_worker,
    requeue,
    take_back,
)
from transport.contracts.messages import (
    GroupScored,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    ScoringFailed,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, RowId, parse_row_id

MIN_OBSOLETE_DEADLINES = 64
"""Fewer are not worth a look."""
MAX_DEATHS_FACTOR = 2
"""Deaths that are far apart mostly have causes of their own; but so many times max_deaths under one prompt have that
one."""
TIMED_OUT = "rollout timed out"
UNWANTED = "not wanted any more"


class Cause(StrEnum):
    """Why a row cannot be used; the value is for people."""

    ABORTED = "its tokens are partial"
    LOST_WEIGHTS = "sampled under weights that a restart of the trainer lost"
    TOO_OLD = "its oldest tokens are past max_staleness"
    OTHER_WEIGHTS = "not sampled under the pinned weights"


class GroupLane:
    """What every lane does with a group. Holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    # -- what a lane decides

    def why_unusable(self, group: Group, event: RolloutFinished) -> Cause | None:
        """Why this row is of no use, None if it is."""
        if event.finish_reason is FinishReason.ABORT:
            return Cause.ABORTED
        return None if self._p.lineage.contains_row(event.oldest, event.newest) else Cause.LOST_WEIGHTS

    def row_arrived(self, group: Group, event: RolloutFinished) -> None:
        """A row that was missing exists."""

    def row_vanished(self, group: Group, row: RowId) -> None:
        """A row that existed is missing again."""

    def scored(self, group: Group, event: GroupScored) -> None:
        """Scoring reports rewards of the group."""

    def end(self, group: Group, outcome: Outcome, reason: str, *, free: bool = False) -> None:
        """Nothing more is wanted of the group. free: its replacement does not count against a limit."""
        raise NotImplementedError

    def announce(self, groups: Sequence[Group]) -> None:
        """Have the prompt columns of these groups written."""
        announce(self._p, groups)

    # -- rows

    def finished(self, group: Group, sample: int, event: RolloutFinished) -> None:
        """A row exists that was missing. One that cannot be used ends the group."""
        confirm_admission(self._p, group)
        cause = self.why_unusable(group, event)
        if cause is not None:
            self.end(group, "stale", cause.value, free=cause is Cause.LOST_WEIGHTS)
            return
        self._record(group, sample, event)
        self.row_arrived(group, event)

    def _record(self, group: Group, sample: int, event: RolloutFinished) -> None:
        p, runs = self._p, group.stage is Stage.RUNNING
        if runs:
            p.fleet.workers[group.worker_id].finish_sample(group)
        group.tokens[sample] = event.response_tokens
        group.num_missing -= 1
        group.deaths = group.all_deaths = 0
        group.newest_version = max(group.newest_version, event.newest.version)
        if group.num_missing == 0:
            if runs:
                take_back(p, group)
            p.plans.remove(group)
            group.move(Stage.SCORING)

    def vanished(self, group: Group, sample: int, row: RowId) -> bool:
        """A row went missing with the broker's tail. Returns whether the group is to be generated again."""
        if group.stage is Stage.RUNNING:
            requeue(self._p, group, "rows of it went missing")  # its worker does not know of this sample
        group.tokens[sample] = MISSING
        group.num_missing += 1
        self.row_vanished(group, row)
        return True

    def generate_again(self, groups: Sequence[Group]) -> None:
        """Rows of these went missing, and perhaps their prompt columns, too."""
        for group in groups:
            if group.stage is Stage.READY and not group.sent:
                self._p.batches[group.batch].remove_member(group)
            requeue(self._p, group)
        self.announce(groups)

    # -- failures

    def failed(self, group: Group, event: RolloutFailed) -> None:
        """Samples will not come from the worker that runs the group."""
        if event.retryable or group.sent:
            self.retry(group, event.reason, exclude_worker=True, abort="another of its samples failed")
        else:
            self.end(group, "dead", event.reason)

    def retry(self, group: Group, reason: str, *, exclude_worker: bool = False, abort: str = "") -> None:
        """Generate again what is missing of ``group``, elsewhere if it should; it is dead after max_attempts.

        A group that is in a round is retried for ever: the trainer waits for its rows.
        """
        group.failures += 1
        if exclude_worker:
            group.excluded_worker = group.worker_id
        if group.failures >= self._p.settings.max_attempts and not group.sent:
            self.end(group, "dead", f"{reason}, attempt {group.failures}")
        else:
            requeue(self._p, group, abort)

    def worker_lost(self, group: Group, lost: WorkerLost) -> None:
        """What its worker had not finished goes to others; the group is dead after max_deaths of workers in a row.

        A worker may die of anything, so its death is not counted as an attempt of the group. But a group that kills
        every worker must be given up before the workers' restarts are used up. So deaths in a row are counted, and the
        count starts again once a sample of the group arrived or it ran for STABLE_S. A group that kills late is given
        up after MAX_DEATHS_FACTOR times as many.
        """
        p = self._p
        if lost.left:
            requeue(p, group)
            return
        group.deaths = deaths_in_a_row(group.deaths, p.now_s - group.started_s)
        group.all_deaths += 1
        max_deaths = p.settings.max_deaths
        kills = group.deaths >= max_deaths or group.all_deaths >= MAX_DEATHS_FACTOR * max_deaths
        if kills and not group.sent:
            reason = f"{lost.worker_id} lost: {lost.reason}, as were all {group.all_deaths} workers that ran it last"
            self.end(group, "dead", reason)
        else:
            requeue(p, group)

    def scoring_failed(self, group: Group, event: ScoringFailed) -> None:
        """The group will never be whole."""
        if group.stage in (Stage.PENDING, Stage.RUNNING, Stage.SCORING) and not group.sent:
            self.end(group, "dead", event.reason)


class Lifecycle:
    """Takes what is reported to the groups that it is about, each in its lane."""

    def __init__(self, pipeline: Pipeline, lanes: Mapping[Lane, GroupLane]) -> None:
        self._p = pipeline
        self._lanes = lanes

    def finished(self, event: RolloutFinished) -> None:
        """A row exists. It counts once, whichever worker made it."""
        group_id, sample = parse_row_id(event.row_id)
        group = self._p.live(group_id)
        if group is not None and group.lacks(sample):
            self._lanes[group.lane].finished(group, sample, event)

    def failed(self, event: RolloutFailed) -> None:
        """Ignored unless it comes from the worker that the group waits for."""
        group = self._p.live(event.group_id)
        if group is None or group.stage is not Stage.RUNNING or group.worker_id != event.worker_id:
            return
        if any(map(group.lacks, event.samples)):
            self._lanes[group.lane].failed(group, event)

    def scored(self, event: GroupScored) -> None:
        group = self._p.live(event.group_id)
        if group is not None:
            self._lanes[group.lane].scored(group, event)

    def scoring_failed(self, event: ScoringFailed) -> None:
        group = self._p.live(event.group_id)
        if group is not None:
            self._lanes[group.lane].scoring_failed(group, event)

    def missing(self, event: RowsMissing) -> None:
        """Rows vanished with the broker's tail: what is missing is generated and scored again, in the same place."""
        again: dict[str, Group] = {}
        for row in event.row_ids:
            group_id, sample = parse_row_id(row)
            group = self._p.live(group_id)
            exists = group is not None and sample < len(group.tokens) and not group.lacks(sample)
            if group is not None and exists and self._lanes[group.lane].vanished(group, sample, row):
                again[group_id] = group
        for lane in {group.lane: None for group in again.values()}:
            self._lanes[lane].generate_again([group for group in again.values() if group.lane is lane])

    def worker_lost(self, worker: Worker, lost: WorkerLost) -> None:
        """What the worker had not finished goes to others, problems of an evaluation first."""
        held = [self._p.groups[group_id] for group_id in worker.groups]
        for group in sorted(held, key=lambda group: group.lane is not Lane.EVAL):
            self._lanes[group.lane].worker_lost(group, lost)
        remove_worker(self._p, worker)

    def reconcile(self, worker: Worker, event: WorkerReported) -> None:
        """A group whose plan the worker claimed, which it does not hold and did not finish, was lost on the way."""
        held = frozenset(event.held)
        forget_aborts(self._p, worker, held)
        claimed = parse_entry_id(event.plans_cursor)
        for group in [self._p.groups[group_id] for group_id in worker.groups if group_id not in held]:
            if group.dispatched <= claimed:
                self._lanes[group.lane].retry(group, f"{worker.worker_id} lost it")

    def expire(self) -> None:
        """Take back groups whose deadline passed."""
        p = self._p
        self._forget_deadlines()
        while p.deadlines and p.deadlines[0].at_s <= p.now_s:
            group = p.awaited_by(heapq.heappop(p.deadlines))
            if group is not None:
                self._lanes[group.lane].retry(group, TIMED_OUT, exclude_worker=True, abort=TIMED_OUT)

    def _forget_deadlines(self) -> None:
        """Once most deadlines are of groups that are whole, keep the others: so many as run, not of all that ran."""
        p = self._p
        running = sum(len(worker.groups) for worker in p.fleet.workers.values())
        if len(p.deadlines) > 2 * running + MIN_OBSOLETE_DEADLINES:
            p.deadlines = [deadline for deadline in p.deadlines if p.awaited_by(deadline) is not None]
            heapq.heapify(p.deadlines)
