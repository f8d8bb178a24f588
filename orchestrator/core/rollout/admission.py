"""The train lane: slots of batches, from admission to their one end and their replacement.

Owns: what is in a batch. Never: which worker generates it, when it is trained. Invariant: a slot ends once, as trained,
filtered, stale or dead; the last three are replaced while refills remain, and then the batch closes short.

Membership is fixed at admission, or rolling: then a finished group takes the place of one that still runs in an
earlier batch. Every batch keeps as many places as it was admitted with, and no group is moved behind the staleness
bound: a long sample is moved on while its oldest tokens may be trained later, and then its batch waits for it.

    batch b    ██ ██ ░░ ██      ░░ runs since version v ──┐ exchanged, if a - v <= max_staleness
    batch a    ░░ ██ ░░ ░░      ██ is ready ──────────────┘ (a > b)

Source of rolling membership: ours; AReaL and PipelineRL train whatever is finished. Price: a batch is trained on
shorter responses than it was admitted with, and a later one on longer ones; the close of a batch says by how many
tokens.

An over-sampled batch takes the groups that are ready first. The others end unused (``oversampled_tail = "drop"``), or
are left to the next batch ("defer"), which takes so many prompts fewer:

    batch b    ██ ██ ██ ██ ░░ ░░      ░░ runs when b has all that it wants ──┐ rows, tokens and their versions are kept
    batch b+1  ▒▒ ▒▒ ░░ ░░            waits for ░░, and then has four, too ──┘ ▒▒ new prompts

A deferred group is trained once, in the batch after its own: that one waits for it, so none is deferred twice, and its
tokens are at most one version older than ``max_staleness`` lets others be. A batch that no other may follow (the last
one, or one over the byte budget) waits for all of its groups, so nothing that was started is left over.
Source of deferring: ours; RollPacker has launched more and queues what is late for a round of its own. Price: the age.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from orchestrator.core.model.groups import MISSING, Batch, Group, Outcome, Phase, Stage, mini_batch_of_slot
from orchestrator.core.model.outbox import PromptsKey
from orchestrator.core.model.pipeline import Pipeline, WaitingPrompt
from orchestrator.core.model.staleness import is_too_old, may_admit
from orchestrator.core.rollout.lifecycle import (
    Cause,
    GroupLane,
    announce,
    enqueue,
    mark_exchangeable,
    requeue,
    withdraw,
)
from transport.contracts.messages import (
    DropRows,
    GroupScored,
    PromptRef,
    RequestPrompts,
    RolloutFinished,
    SlotOutcome,
)
from transport.contracts.types import UpdateMode, group_id


class TrainLane(GroupLane):
    """A group is a slot of a batch. Holds no state of its own. phases: of every batch."""

    def __init__(self, pipeline: Pipeline, phases: Sequence[Phase]) -> None:
        super().__init__(pipeline)
        self._phases = phases

    # -- admission

    def admit(self) -> None:
        """Bind waiting prompts to slots: first to pending refills, then to the next batches; request more.

        A batch is admitted whole. At the end of the data the last one is admitted with what there is.
        """
        p = self._p
        short = [batch for batch in self._open_batches() if batch.pending_refills and not p.frozen(batch.index)]
        admitted, num_new = self._refill_pending(short), self._num_new()
        while self._batch_may_open(num_new):
            admitted += self._open_batch(p.prompts.take(num_new))
            num_new = self._num_new()
        announce(p, admitted)
        self._request_prompts(short, num_new)

    def _open_batches(self) -> list[Batch]:
        """Those that are not closed, in order."""
        return [self._p.batches[index] for index in range(self._p.training.batch, self._p.next_batch)]

    def _num_new(self) -> int:
        """Prompts that the next batch takes.

        What earlier batches will leave to it counts, so that no more than ``oversampled_groups`` are ever in hand
        beyond what is trained; the last batch, which has nobody to leave anything to, takes what it can train.
        """
        p, settings = self._p, self._p.settings
        if not settings.defers:
            return settings.groups_per_batch + settings.oversampled_groups
        spare = settings.oversampled_groups if p.next_batch + 1 < settings.num_batches else 0
        return max(1, settings.groups_per_batch + spare - self._num_coming(p.next_batch))

    def _num_coming(self, batch: int) -> int:
        """Groups that open batches before this one will leave to it, one to the next."""
        return max(0, sum(one.surplus for one in self._open_batches() if one.index < batch))

    def _batch_may_open(self, per_batch: int) -> bool:
        p = self._p
        settings, prompts = p.settings, p.prompts
        enough = len(prompts.waiting) >= per_batch or (prompts.exhausted and bool(prompts.waiting))
        return (
            enough
            and p.next_batch < settings.num_batches
            and p.lineage.epoch > 0
            and not p.stopping
            and may_admit(p.next_batch, p.training.trained_version, settings.max_staleness, settings.rollout_batches)
            # over budget it waits for the batches in hand; with none in hand nothing else could free bytes
            and not (p.retention.over_budget and p.next_batch > p.training.trained_version)
        )

    def _open_batch(self, prompts: list[WaitingPrompt]) -> list[Group]:
        p, num_mini_batches = self._p, self._p.settings.mini_batches
        mini_batches = [mini_batch_of_slot(slot, len(prompts), num_mini_batches) for slot in range(len(prompts))]
        num_coming = self._num_coming(p.next_batch) if p.settings.defers else 0
        batch = self._begin_batch(min(p.settings.groups_per_batch, len(prompts) + num_coming))
        batch.unsettled = [mini_batches.count(mini_batch) for mini_batch in range(num_mini_batches)]
        return self._fill_new(batch, mini_batches, prompts)

    def _begin_batch(self, num_wanted: int) -> Batch:
        p = self._p
        unsettled = [0] * p.settings.mini_batches
        batch = Batch(index=p.next_batch, refills_left=p.settings.max_refills, unsettled=unsettled)
        batch.num_wanted = num_wanted if p.settings.oversampled_groups else 0
        p.batches[batch.index] = batch
        p.next_batch += 1
        return batch

    def _fill_new(self, batch: Batch, mini_batches: list[int], prompts: list[WaitingPrompt]) -> list[Group]:
        if prompts:
            batch.source_ordinal, batch.source_position = prompts[-1].ordinal, prompts[-1].source_position
        slots = zip(mini_batches, prompts, strict=True)
        return [self._fill(batch, mini_batch, waiting.prompt) for mini_batch, waiting in slots]

    def _fill(self, batch: Batch, mini_batch: int, prompt: PromptRef) -> Group:
        name, size = group_id(batch.index, len(batch.group_ids) + batch.num_left), self._p.settings.group_size
        group = Group.of(prompt, name, batch.index, size, mini_batch=mini_batch)
        batch.group_ids.append(group.group_id)
        self._p.groups[group.group_id] = group
        enqueue(self._p, group)
        return group

    def _refill_pending(self, short: list[Batch]) -> list[Group]:
        """Give prompts to the pending refills of open batches; cancel them when no prompt will come."""
        p = self._p
        admitted: list[Group] = []
        for batch in short:
            if not p.stopping:
                prompts = p.prompts.take(len(batch.pending_refills))
                refilled = batch.pending_refills[: len(prompts)]
                del batch.pending_refills[: len(prompts)]
                admitted += self._fill_new(batch, refilled, prompts)
            if p.prompts.ended or p.stopping:
                self._cancel_refills(batch)
        return admitted

    def _cancel_refills(self, batch: Batch) -> None:
        for mini_batch in batch.pending_refills:
            batch.unsettled[mini_batch] -= 1
        batch.pending_refills.clear()

    def _request_prompts(self, short: list[Batch], per_batch: int) -> None:
        """Keep one batch of prompts waiting beyond what could be admitted now, so that dispatch never starves."""
        p = self._p
        if p.prompts.requested or p.prompts.exhausted or p.stopping or p.finished:
            return
        reachable = min(p.training.trained_version + p.settings.max_staleness + 2, p.settings.num_batches)
        refills = sum(len(batch.pending_refills) for batch in short)
        count = max(0, reachable - p.next_batch) * per_batch + refills - len(p.prompts.waiting)
        if count > 0:
            p.prompts.requested = count
            p.outbox.emit_until(PromptsKey(), RequestPrompts(count=count))

    # -- rows and scores

    def why_unusable(self, group: Group, event: RolloutFinished) -> Cause | None:
        """The trainer waits for rows of a sent group: any will do."""
        if group.sent:
            return None
        cause = super().why_unusable(group, event)
        if cause is None and is_too_old(group.first_batch, event.oldest.version, self._p.settings.max_staleness):
            return Cause.TOO_OLD
        return cause

    def scored(self, group: Group, event: GroupScored) -> None:
        """A whole group is scored: it is ready for the trainer, or filtered when it carries no gradient.

        Scores prove that the rows exist, so what the core still waits for was reported and lost, or was wrongly
        believed missing. Should this be an old report of rows that vanished since, the trainer finds them missing;
        should another row vanish first, these are not relied on any more.
        """
        p = self._p
        if group.stage is Stage.READY or not len(event.response_tokens) == len(event.rewards) == len(group.tokens):
            return
        if group.num_missing:
            withdraw(p, group, "its rows exist")
            group.unreported = group.missing_samples()
            group.tokens, group.num_missing = list(event.response_tokens), 0
        p.plans.remove(group)
        batch, tokens_before = p.batches[group.batch], group.num_tokens
        group.score(event.rewards, event.environment_tokens)
        if group.sent:
            if group.group_id in batch.queue:
                batch.queue_tokens += group.num_tokens - tokens_before
            return  # its rows were generated again for a round that is already on the log
        filtered = p.settings.drop_no_signal and not event.signal
        if not filtered:
            self._pull_forward(group)
        batch = p.batches[group.batch]  # another one, where it was pulled forward
        batch.unsettled[group.mini_batch] -= 1
        batch.members[group.group_id] = None
        if self._phases[batch.phase].mini_batch in (None, group.mini_batch):
            batch.enqueue(group)
        if filtered:
            self.end(group, "filtered", "all rewards are equal")
        else:
            self._close_if_full(batch)

    # -- the end of a slot

    def end(self, group: Group, outcome: Outcome, reason: str, *, free: bool = False) -> None:
        """The slot ends untrained and is replaced. free: its replacement does not count against max_refills."""
        batch = self._p.batches[group.batch]
        if group.stage is Stage.READY:
            batch.remove_member(group)
        self._end(group, outcome, reason)
        self._replace(batch, group, free)

    def _end(self, group: Group, outcome: Outcome, reason: str) -> None:
        p = self._p
        withdraw(p, group, reason)
        group.move(Stage.ENDED)
        group.outcome = outcome
        p.outbox.emit(outcome_of(group, reason))
        p.outbox.emit(DropRows(group_ids=(group.group_id,)))

    def _close_if_full(self, batch: Batch) -> None:
        """Enough groups of an over-sampled batch are ready, or sure to be: it does without the others.

        Those are the ones that take longest. Dropped, they end, and the policy learns from shorter responses than it
        gives. Deferred, they are trained in the next batch, which waits for them: so a group is deferred once.
        """
        p, defers = self._p, self._p.settings.defers
        num_coming = self._num_coming(batch.index) if defers else 0
        num_deferred = batch.num_deferred if defers else 0  # no fewer than those of them that are not ready
        if not batch.num_wanted or len(batch.members) + num_deferred + num_coming < batch.num_wanted:
            return
        left = [group for group in map(p.groups.__getitem__, batch.group_ids) if group.unsettled]
        if not defers:
            for group in left:
                self._end(group, "filtered", "over-sampled: its batch was full before it was ready")
                batch.unsettled[group.mini_batch] -= 1
            self._cancel_refills(batch)
            return
        slow = [group for group in left if not group.deferred]
        if len(batch.members) + len(left) - len(slow) + num_coming >= batch.num_wanted:
            self._leave(batch, slow)

    def _leave(self, batch: Batch, groups: Sequence[Group]) -> None:
        """``batch`` does without these groups, which go on in the next. Where none may follow, it waits for them."""
        p, index = self._p, batch.index + 1
        may_begin = index < p.settings.num_batches and not p.retention.over_budget
        if not groups:
            self._cancel_refills(batch)
        elif index in p.batches or may_begin:
            self._cancel_refills(batch)
            following = p.batches.get(index) or self._begin_with(groups)
            for group in groups:
                self._move_on(group, batch, following)
            self._close_if_full(following)

    def _begin_with(self, groups: Sequence[Group]) -> Batch:
        """The next batch begins early, with these groups to come, and places for new prompts.

        They are filled as soon as prompts are there, and are dispatched when the weights allow it, as always.
        """
        p, num_mini_batches = self._p, self._p.settings.mini_batches
        size = self._num_new() + len(groups)
        places = [mini_batch_of_slot(slot, size, num_mini_batches) for slot in range(size)]
        for group in groups:  # they keep their mini-batches: the others' places are what is left
            places.remove(group.mini_batch if group.mini_batch in places else places[-1])
        following = self._begin_batch(min(p.settings.groups_per_batch, size))
        following.pending_refills = places
        following.unsettled = [places.count(mini_batch) for mini_batch in range(num_mini_batches)]
        return following

    def _move_on(self, group: Group, batch: Batch, following: Batch) -> None:
        """It goes on where it runs, or makes way for newer weights and goes on elsewhere, with its tokens."""
        batch.group_ids.remove(group.group_id)
        batch.unsettled[group.mini_batch] -= 1
        batch.num_left += 1
        following.group_ids.append(group.group_id)
        following.unsettled[group.mini_batch] += 1
        following.num_deferred += 1
        group.batch, group.deferred = following.index, True
        if group.stage is Stage.PENDING or (group.stage is Stage.RUNNING and not self._may_run_on(group)):
            requeue(self._p, group, "deferred to the next batch")

    def _may_run_on(self, group: Group) -> bool:
        """Whether a deferred group may stay where it runs: no newer weights wait, or will wait, for it to end.

        Source: ours. Simulated where batches overlap and workers take weights at a boundary, means of five seeds: the
        run takes .83 to 1.00 of the time without deferring (.88 on average), .81 to .97 (.91) if all of them run on,
        .86 to .99 (.90) if none does.
        """
        p = self._p
        if p.frozen(group.batch):
            return False
        if p.settings.update is UpdateMode.IN_FLIGHT:
            return True
        return p.settings.max_staleness > 0 and not p.fleet.behind(p.fleet.workers[group.worker_id])

    def _replace(self, batch: Batch, group: Group, free: bool) -> None:
        """Fill the mini-batch's place again, with the same prompt if only its rows were at fault."""
        p = self._p
        closing = p.stopping and not p.frozen(batch.index)
        if closing or not (free or batch.refills_left):
            batch.unsettled[group.mini_batch] -= 1
            return
        batch.refills_left -= 0 if free else 1
        if group.outcome != "stale":
            batch.pending_refills.append(group.mini_batch)
            return
        prompt = PromptRef(
            prompt_id=group.prompt_id,
            prompt_tokens=group.prompt_tokens,
            predicted_tokens=group.predicted_tokens,
            predicted_sigma=group.predicted_sigma,
        )
        announce(p, [self._fill(batch, group.mini_batch, prompt)])

    # -- the trainer went back, the run stops

    def drop_lost_versions(self, version: int) -> None:
        """Versions above ``version`` are lost: restart what runs, and end unsent slots whose rows rest on them.

        What runs is restarted because a sample that goes on would carry a span of lost weights in its middle. Rows that
        are in a round stay: the trainer replays the log as it is, with the logprobs recorded at generation.
        """
        p = self._p
        for group in p.running_groups():
            requeue(p, group, Cause.LOST_WEIGHTS)
        for index in range(p.training.batch, p.next_batch):
            for name in list(p.batches[index].group_ids):
                group = p.live(name)
                if group is not None and not group.sent and group.newest_version > version:
                    self.end(group, "stale", Cause.LOST_WEIGHTS, free=True)

    def suspend(self) -> None:
        """The run stops: what runs for frozen batches is stopped and waits for a resumed run."""
        for group in self._p.running_groups():
            if self._p.frozen(group.batch):
                requeue(self._p, group, "the run stops")

    # -- rolling membership

    def _pull_forward(self, ready: Group) -> None:
        """``ready`` was scored just now: give it the place of a group that still runs for an earlier batch."""
        p = self._p
        if p.settings.membership != "rolling" or p.stopping:
            return
        for index in range(p.training.batch, ready.batch):
            runs = self._ends_last(p.batches[index], ready.batch)
            if runs is not None:
                self._exchange(runs, ready)
                return

    def _ends_last(self, batch: Batch, later: int) -> Group | None:
        """The running group of ``batch`` that is expected to end last, if it may be trained with ``later``."""
        max_staleness = self._p.settings.max_staleness
        while batch.exchangeable:
            group = self._p.live(batch.exchangeable[0].group_id)
            runs = group is not None and group.stage is Stage.RUNNING and group.batch == batch.index and not group.sent
            if group is not None and runs and not is_too_old(batch.index + 1, group.oldest_version, max_staleness):
                return None if is_too_old(later, group.oldest_version, max_staleness) else group
            heapq.heappop(batch.exchangeable)
        return None

    def _exchange(self, runs: Group, ready: Group) -> None:
        """Both batches keep the number of their places, and of those that are not settled."""
        earlier, later = self._p.batches[runs.batch], self._p.batches[ready.batch]
        earlier.group_ids[earlier.group_ids.index(runs.group_id)] = ready.group_id
        later.group_ids[later.group_ids.index(ready.group_id)] = runs.group_id
        runs.batch, ready.batch = later.index, earlier.index
        runs.mini_batch, ready.mini_batch = ready.mini_batch, runs.mini_batch
        gained = sum(ready.tokens) - runs.predicted_tokens * len(runs.tokens)
        earlier.num_moved += 1
        earlier.moved_tokens += gained
        later.moved_tokens -= gained
        mark_exchangeable(self._p, runs)


def outcome_of(group: Group, reason: str = "") -> SlotOutcome:
    return SlotOutcome(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        outcome=group.outcome or "trained",
        rewards=group.rewards,
        response_tokens=tuple(tokens for tokens in group.tokens if tokens != MISSING),
        reason=reason,
    )
