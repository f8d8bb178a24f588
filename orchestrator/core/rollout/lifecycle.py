"""The life of a group, the same in every lane: it waits, a worker gets it, its rows come, or it is taken back.

Owns: the links between groups and workers, the queue of groups that wait for any of them; arrival of rows, failures,
losses, deadlines. Never: which worker gets which group (``dispatch/``), rounds. Invariant: a group is running if and
only if exactly one worker lists it, and then all of its missing samples are expected from that worker; only missing
samples are ever generated again, also after late, repeated and reordered reports.

``GroupLane`` is that life. A lane is one subclass, which says what differs there: which rows it can use, what a row and
a score mean, and how a group ends. ``Lifecycle`` takes an event to the lane of its group.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from enum import StrEnum

from orchestrator.core.model.groups import (
    EVAL,
    MISSING,
    NO_PROBE,
    NO_WORKER,
    SERVE,
    TRAIN,
    Exchangeable,
    Group,
    Lane,
    Outcome,
    PendingEntry,
    Stage,
    deaths_in_a_row,
)
from orchestrator.core.model.outbox import AbortKey, AdmissionKey, DispatchKey, parse_entry_id
from orchestrator.core.model.pipeline import Deadline, Pipeline
from orchestrator.core.model.staleness import may_dispatch, may_resume
from orchestrator.core.model.workers import Worker
from transport.contracts.messages import (
    EVALUATION,
    AbortRollouts,
    AdmitGroups,
    DispatchGroups,
    GroupAdmitted,
    GroupPlan,
    GroupScored,
    PartialSample,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    ScoringFailed,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, GroupId, RowId, WorkerId, parse_row_id

BATCH_PRIORITY_TOKENS = 10_000_000
"""Longer than any response: one batch earlier outranks any difference of predicted lengths."""
PROBE_PRIORITY_TOKENS = BATCH_PRIORITY_TOKENS // 2
"""Likewise: a probe runs before whole groups of its batch, or it would show nothing in time."""
EVALUATION_PRIORITY = 1e12
"""Above that of any group of any batch."""


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


def enqueue(p: Pipeline, group: Group) -> None:
    """The group waits for any worker: earlier batch first, then what began for an earlier one, then the longest
    prediction, then who came first.

    Longest first is list scheduling: each to the worker with least to do (``handout.least_loaded``), groups end on M
    equal workers within 4/3 - 1/(3M) of the best there is. Source: StreamRL sec. 5.3; the bound is Graham's (1969).
    """
    group.move(Stage.PENDING)
    p.plans.remove(group)
    heapq.heappush(p.pending, _entry(p, group, -_urgency(p, group)))


def enqueue_for(p: Pipeline, worker_id: WorkerId, group: Group, rank: int) -> None:
    """The pending group waits for this worker, as its ``rank``-th of the batch, or for one that is done sooner."""
    p.plans.put(worker_id, _entry(p, group, float(rank)), group.num_missing * group.predicted_tokens)


def _urgency(p: Pipeline, group: Group) -> float:
    """Tokens; a deferred group comes first, and those that may be probed come before all that are known better."""
    probes = PROBE_PRIORITY_TOKENS if may_probe(p, group) else 0
    return group.expected_tokens + probes + group.deferred * BATCH_PRIORITY_TOKENS


def _entry(p: Pipeline, group: Group, order_key: float) -> PendingEntry:
    p.num_enqueued += 1
    return PendingEntry(group.batch, order_key, p.num_enqueued - 1, group.group_id)


def head(p: Pipeline) -> Group | None:
    """The group that is next of those that wait for any worker, or None. Drops obsolete entries."""
    while p.pending:
        entry = p.pending[0]
        group = p.groups.get(entry.group_id)
        waits = group is not None and group.stage is Stage.PENDING and group.group_id not in p.plans.planned
        if group is not None and waits and group.batch == entry.batch:
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
    _set_deadline(p, group)


def _set_deadline(p: Pipeline, group: Group) -> None:
    deadline = Deadline(p.now_s + p.settings.rollout_timeout_s, group.group_id, group.attempt)
    heapq.heappush(p.deadlines, deadline)


def start(p: Pipeline, group: Group, worker: Worker) -> None:
    """Bind ``group`` to the worker and dispatch it: one command for each group, so that each is confirmed by itself."""
    if group.group_id in worker.aborting:
        _forget_abort(p, worker, group.group_id)
    worker.take(group)
    group.move(Stage.RUNNING)
    group.worker_id = worker.worker_id
    group.started_s = p.now_s
    version = worker.loaded.version if worker.loaded else 0
    fresh = group.num_missing == len(group.tokens)  # else rows that are there keep theirs
    partial = resumed(p, group)
    versions = (version, *(sample.oldest.version for sample in partial))
    group.oldest_version = min(versions) if fresh else min(group.oldest_version, *versions)
    _send(p, group, group.missing_samples() if group.probe == NO_PROBE else (group.probe,), partial)


def _send(p: Pipeline, group: Group, samples: tuple[int, ...], partial: tuple[PartialSample, ...] = ()) -> None:
    plan = GroupPlan(
        group_id=group.group_id,
        batch=EVALUATION if group.lane is EVAL else group.batch,
        prompt_id=group.prompt_id,
        samples=samples,
        group_size=len(group.tokens),
        predicted_tokens=group.expected_tokens,
        priority=plan_priority(group),
        attempt=group.attempt,
        sampling=group.sampling,
        partial=partial,
    )
    command = DispatchGroups(worker_id=group.worker_id, plans=(plan,))
    group.dispatched = p.outbox.emit_until(DispatchKey(group.group_id), command)


def resumed(p: Pipeline, group: Group) -> tuple[PartialSample, ...]:
    """Samples of ``group`` that go on from what earlier attempts left of them; the others start over.

    An answer of an evaluation is always started over: another attempt at it is another group.
    """
    if not group.partial or group.lane is EVAL:
        return ()
    trained = group.lane is TRAIN and not group.sent
    limit = p.settings.max_staleness if trained else None
    group.partial = {
        number: sample
        for number, sample in sorted(group.partial.items())
        if group.lacks(number) and may_resume(group.first_batch, sample.oldest, sample.newest, p.lineage, limit)
    }
    return tuple(group.partial.values())


def mark_exchangeable(p: Pipeline, group: Group) -> None:
    """The group runs: with rolling membership, one that is ready before it may take its place."""
    if p.settings.membership == "rolling" and group.lane is TRAIN and not group.sent:
        heapq.heappush(p.batches[group.batch].exchangeable, Exchangeable(-group.predicted_tokens, group.group_id))


def plan_priority(group: Group) -> float:
    """Priority inside an engine, higher first: evaluations, then the earlier batch, then the longest prediction."""
    if group.lane is EVAL:
        return EVALUATION_PRIORITY + group.predicted_tokens
    probes = PROBE_PRIORITY_TOKENS if group.probe != NO_PROBE else 0
    return group.expected_tokens + probes - group.first_batch * BATCH_PRIORITY_TOKENS


# -- one sample of a group before the others (which groups, and when the others follow: ``dispatch/probes.py``)


GOOD_RANKER = 0.5
"""Share of the variance of samples' log lengths that predictions explain, from which on a probe shows too little more.
Source: ours, docs/dispatch.md: with a recall of .87 they explain more, and probes change nothing.
"""


def may_probe(p: Pipeline, group: Group) -> bool:
    """Whether one of its samples may start alone: it was never tried, so whatever befalls a probe, the next attempt is
    at the whole group."""
    if not p.settings.probes:
        return False
    fresh = not group.attempt and group.num_missing == len(group.tokens) > 1
    return fresh and group.lane is TRAIN and not group.sent


def probe(p: Pipeline, group: Group, worker: Worker) -> None:
    """The worker generates the first sample of ``group``, which was next, alone."""
    group.probe = 0
    assign(p, group, worker)
    p.plans.probes.num_started += 1
    heapq.heappush(worker.probing, _entry(p, group, -group.expected_tokens))


def follow(p: Pipeline, group: Group) -> None:
    """The other samples of ``group`` go to where its probe runs, as an attempt beside it."""
    worker, alone = p.fleet.workers[group.worker_id], group.probe
    others = tuple(sample for sample in group.missing_samples() if sample != alone)
    group.attempt += 1
    group.probe, group.followed = NO_PROBE, True
    worker.add(group, len(others))
    _send(p, group, others)
    _set_deadline(p, group)
    p.plans.probes.num_followed += 1


def learn(p: Pipeline, group: Group, tokens: int, *, ended: bool) -> None:
    """One of its samples has got so many tokens: its others, and the queue that they wait in, go by it.

    An entry of before is out of date and stays: while a group waits it is only expected to be longer, so it comes last.
    """
    if not p.settings.probes or group.lane is not TRAIN:
        return
    expected = group.learn(tokens, ended=ended, trusts=p.plans.calibration.explained >= GOOD_RANKER)
    more = expected - group.expected_tokens
    if not more or (more < 0 and group.stage is Stage.PENDING):
        return
    group.learnt_tokens = expected
    if group.stage is Stage.RUNNING:
        worker = p.fleet.workers[group.worker_id]
        worker.predicted_load += group.num_asked * more
        if group.probe != NO_PROBE:
            heapq.heappush(worker.probing, _entry(p, group, -group.expected_tokens))
    elif group.stage is Stage.PENDING and group.group_id not in p.plans.planned:
        heapq.heappush(p.pending, _entry(p, group, -_urgency(p, group)))


# -- an attempt ends


def take_back(p: Pipeline, group: Group, reason: str = "") -> None:
    """Nothing more is expected of the worker that runs ``group``; with a reason it is asked to stop."""
    worker = p.fleet.workers[group.worker_id]
    worker.release(group)
    p.outbox.confirm(DispatchKey(group.group_id))
    if reason:  # named with its attempt: a later dispatch of the same group to this worker must survive the abort
        attempts = group.attempts()
        abort = AbortRollouts(
            worker_id=worker.worker_id,
            group_ids=(group.group_id,) * len(attempts),
            reason=reason,
            attempts=attempts,
        )
        p.outbox.emit_until(AbortKey(worker.worker_id, group.group_id), abort)
        worker.aborting[group.group_id] = None
    group.worker_id = NO_WORKER
    group.probe, group.followed = NO_PROBE, False
    if group.lane is EVAL:
        p.fleet.loads_pending = True


def withdraw(p: Pipeline, group: Group, reason: str) -> None:
    """Nothing of ``group`` is wanted any more, of a worker, a plan or the writer of its prompt columns."""
    if group.stage is Stage.RUNNING:
        take_back(p, group, reason)
    confirm_admission(p, group)
    p.plans.remove(group)


def requeue(p: Pipeline, group: Group, reason: str = "") -> None:
    if group.stage is Stage.RUNNING:
        take_back(p, group, reason)
    if group.stage is not Stage.PENDING:
        group.attempt += 1
    enqueue(p, group)


def _forget_abort(p: Pipeline, worker: Worker, group_id: GroupId) -> None:
    del worker.aborting[group_id]
    p.outbox.confirm(AbortKey(worker.worker_id, group_id))


def release_plan(p: Pipeline, worker_id: WorkerId) -> None:
    """The worker starts nothing any more: what was planned for it goes to any worker."""
    for group_id in p.plans.forget_worker(worker_id):
        group = p.groups.get(group_id)
        if group is not None and group.stage is Stage.PENDING:
            enqueue(p, group)


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
        announce(self._p, groups)

    # -- rows

    def finished(self, group: Group, sample: int, event: RolloutFinished) -> None:
        """A row exists that was missing. One that cannot be used ends the group."""
        confirm_admission(self._p, group)
        cause = self.why_unusable(group, event)
        if cause is not None:
            self.end(group, "stale", cause.value, free=cause is Cause.LOST_WEIGHTS)
            return
        p, runs, probed = self._p, group.stage is Stage.RUNNING, group.probe == sample
        if runs and group.asks_for(sample):
            p.fleet.workers[group.worker_id].subtract(group, 1)
        group.tokens[sample] = event.response_tokens
        group.partial.pop(sample, None)
        group.num_missing -= 1
        group.deaths = group.all_deaths = 0
        group.newest_version = max(group.newest_version, event.newest.version)
        learn(p, group, event.response_tokens, ended=True)
        if group.num_missing == 0:
            if runs:
                take_back(p, group)
            p.plans.remove(group)
            group.move(Stage.SCORING)
        elif probed:
            requeue(p, group)  # its others, by what it showed
        self.row_arrived(group, event)

    def vanished(self, group: Group, sample: int, row: RowId) -> bool:
        """A row went missing with the broker's tail. Returns whether the group is to be generated again.

        So are the samples that only its score spoke of: the score is void, and may have been one of before they were
        lost.
        """
        if group.stage is Stage.RUNNING:
            requeue(self._p, group, "rows of it went missing")  # its worker does not know of this sample
        for lost in {sample, *group.unreported}:
            if not group.lacks(lost):
                group.tokens[lost] = MISSING
                group.num_missing += 1
        group.unreported = ()
        self.row_vanished(group, row)
        return True

    # -- failures

    def failed(self, group: Group, event: RolloutFailed) -> None:
        for sample in event.samples:  # what it has so far may be why
            group.partial.pop(sample, None)
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
        count starts again once a sample of the group arrived or it ran for STABLE_S. Deaths that are far apart mostly
        have causes of their own, but twice max_deaths under one prompt have that one.
        """
        p = self._p
        if lost.left:
            requeue(p, group)
            return
        group.deaths = deaths_in_a_row(group.deaths, p.now_s - group.started_s)
        group.all_deaths += 1
        max_deaths = p.settings.max_deaths
        kills = group.deaths >= max_deaths or group.all_deaths >= 2 * max_deaths
        if kills and not group.sent:
            reason = f"{lost.worker_id} lost: {lost.reason}, as were all {group.all_deaths} workers that ran it last"
            self.end(group, "dead", reason)
        else:
            requeue(p, group)

    def scoring_failed(self, group: Group, event: ScoringFailed) -> None:
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
        p, again = self._p, dict[Lane, dict[GroupId, Group]]()
        for row in event.row_ids:
            group_id, sample = parse_row_id(row)
            group = p.live(group_id)
            exists = group is not None and sample < len(group.tokens) and not group.lacks(sample)
            if group is not None and exists and self._lanes[group.lane].vanished(group, sample, row):
                again.setdefault(group.lane, {})[group_id] = group
        for lane, groups in again.items():
            for group in groups.values():
                if group.stage is Stage.READY and not group.sent:
                    p.batches[group.batch].remove_member(group)
                requeue(p, group)
            self._lanes[lane].announce([*groups.values()])  # their prompt columns may be gone too

    def worker_lost(self, worker: Worker, lost: WorkerLost) -> None:
        """What the worker had not finished goes to others, problems of an evaluation first."""
        held = [self._p.groups[group_id] for group_id in worker.groups]
        for group in sorted(held, key=lambda group: group.lane is not Lane.EVAL):
            self._lanes[group.lane].worker_lost(group, lost)
        for group_id in list(worker.aborting):
            _forget_abort(self._p, worker, group_id)
        del self._p.fleet.workers[worker.worker_id]
        release_plan(self._p, worker.worker_id)

    def reconcile(self, worker: Worker, event: WorkerReported) -> None:
        """A group whose plan the worker claimed, which it does not hold and did not finish, was lost on the way."""
        held = frozenset(event.held)
        for group_id in [group_id for group_id in worker.aborting if group_id not in held]:
            _forget_abort(self._p, worker, group_id)  # the abort is done
        self._note_partial(worker, event)
        claimed = parse_entry_id(event.plans_cursor)
        for group in [self._p.groups[group_id] for group_id in worker.groups if group_id not in held]:
            if group.dispatched <= claimed:
                self._lanes[group.lane].retry(group, f"{worker.worker_id} lost it")

    def _note_partial(self, worker: Worker, event: WorkerReported) -> None:
        """Beginnings of samples are on their groups' logs. Those of an attempt that was taken back come too late."""
        for kept in event.partial:
            group = self._p.live(kept.group_id)
            if group is None or group.worker_id != worker.worker_id or kept.attempt not in group.attempts():
                continue
            for sample in kept.samples:
                if group.lacks(sample.sample):
                    group.partial[sample.sample] = sample
                    if sample.tokens:
                        learn(self._p, group, sample.tokens, ended=False)

    def expire(self) -> None:
        p = self._p
        running = sum(len(worker.groups) for worker in p.fleet.workers.values())
        if len(p.deadlines) > 2 * running + 64:  # keep as many as run, not as all that ever ran
            p.deadlines = [deadline for deadline in p.deadlines if p.awaited_by(deadline) is not None]
            heapq.heapify(p.deadlines)
        while p.deadlines and p.deadlines[0].at_s <= p.now_s:
            group = p.awaited_by(heapq.heappop(p.deadlines))
            if group is not None:
                reason = "rollout timed out"
                self._lanes[group.lane].retry(group, reason, exclude_worker=True, abort=reason)
