"""The life of a slot: admission, its one end, and its replacement.

Owns: what is in a batch. Never: who generates it, when it is trained. Invariant: membership is fixed at admission;
each slot ends once, as trained | filtered | stale | dead; the last three are replaced while refills remain, and then
the batch closes short.
"""

from __future__ import annotations

from orchestrator.core.dispatch.assignments import Assignments
from orchestrator.core.model.batches import MISSING, Batch, Group, Outcome, Stage
from orchestrator.core.model.batching import Phase, part_of_slot
from orchestrator.core.model.deaths import deaths_in_a_row
from orchestrator.core.model.outbox import AdmissionKey, PromptsKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.prompts import WaitingPrompt
from orchestrator.core.model.staleness import may_admit
from transport.contracts.messages import (
    AdmitGroups,
    DropRows,
    GroupAdmitted,
    PromptRef,
    PromptsArrived,
    RequestPrompts,
    SlotOutcome,
)
from transport.contracts.types import RowId, group_id

OVERSAMPLED = "over-sampled: its batch was full before it was ready"

FAR_APART = 2
"""Deaths that are far apart mostly have causes of their own; but so many under one prompt have that one."""


class Slots:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, assignments: Assignments, phases: tuple[Phase, ...]) -> None:
        self._p = pipeline
        self._assignments = assignments
        self._phases = phases

    # -- admission

    def prompts_arrived(self, event: PromptsArrived) -> None:
        """The prompt source answers."""
        if self._p.prompts.arrive(event):
            self._p.outbox.confirm(PromptsKey())

    def admit(self) -> None:
        """Bind waiting prompts to slots: first to replacements that are owed, then to the next batches; ask for more.

        A batch is admitted whole. At the end of the data the last one is admitted with what there is.
        """
        p = self._p
        debtors = self._batches_in_debt()
        admitted = self._pay_owed(debtors)
        while self._batch_may_open():
            admitted += self._open_batch(p.prompts.take(self._per_batch))
        self.announce(admitted)
        self._ask_ahead(debtors)

    def announce(self, groups: list[Group]) -> None:
        """Have the prompt columns of these groups written; outstanding until a row of each is seen."""
        if not groups:
            return
        outbox, size = self._p.outbox, self._p.settings.group_size
        key = AdmissionKey(outbox.next_id)
        for group in groups:
            self.confirm_admission(group)
            group.admission = key
        admitted = [GroupAdmitted(group_id=g.group_id, prompt_id=g.prompt_id, group_size=size) for g in groups]
        outbox.emit_until(key, AdmitGroups(groups=tuple(admitted)), holders=len(groups))

    def confirm_admission(self, group: Group) -> None:
        """Its columns exist, or no longer matter."""
        if group.admission is not None:
            self._p.outbox.confirm(group.admission)
            group.admission = None

    @property
    def _per_batch(self) -> int:
        """Groups that a batch is admitted with."""
        return self._p.settings.groups_per_batch + self._p.settings.oversampled_groups

    def _batch_may_open(self) -> bool:
        p = self._p
        settings, prompts = p.settings, p.prompts
        enough = len(prompts.waiting) >= self._per_batch or (prompts.exhausted and bool(prompts.waiting))
        return (
            enough
            and p.next_batch < settings.num_batches
            and p.lineage.epoch > 0
            and not p.stopping
            and may_admit(p.next_batch, p.training.trained_version, settings.max_staleness, settings.rollout_batches)
            and not self._closed_by_bytes()
        )

    def _closed_by_bytes(self) -> bool:
        """Over budget, admission waits for the batches in hand; with none in hand nothing else could free bytes."""
        return self._p.retention.over_budget and self._p.next_batch > self._p.training.trained_version

    def _open_batch(self, prompts: list[WaitingPrompt]) -> list[Group]:
        p = self._p
        parts = [part_of_slot(slot, len(prompts), p.settings.mini_batches) for slot in range(len(prompts))]
        unsettled = [parts.count(part) for part in range(p.settings.mini_batches)]
        batch = Batch(index=p.next_batch, refills_left=p.settings.max_refills, unsettled=unsettled)
        if p.settings.oversampled_groups:
            batch.num_wanted = min(p.settings.groups_per_batch, len(prompts))
        p.batches[batch.index] = batch
        p.next_batch += 1
        return [self._fill_new(batch, part, waiting) for part, waiting in zip(parts, prompts, strict=True)]

    def _fill_new(self, batch: Batch, part: int, waiting: WaitingPrompt) -> Group:
        batch.source_ordinal, batch.source_position = waiting.ordinal, waiting.source_position
        return self._fill(batch, part, waiting.prompt)

    def _fill(self, batch: Batch, part: int, prompt: PromptRef) -> Group:
        """Put a prompt into the next unused slot."""
        size = self._p.settings.group_size
        group = Group(
            group_id=group_id(batch.index, len(batch.group_ids)),
            batch=batch.index,
            part=part,
            prompt_id=prompt.prompt_id,
            prompt_tokens=prompt.prompt_tokens,
            predicted_tokens=prompt.predicted_tokens,
            predicted_sigma=prompt.predicted_sigma,
            tokens=[MISSING] * size,
            num_missing=size,
        )
        batch.group_ids.append(group.group_id)
        self._p.groups[group.group_id] = group
        self._assignments.enqueue(group)
        return group

    def _pay_owed(self, debtors: list[Batch]) -> list[Group]:
        """Give prompts to owed replacements; forgive the debt when no prompt will come."""
        p = self._p
        admitted: list[Group] = []
        for batch in debtors:
            if p.prompts.ended or p.stopping:
                self._forgive(batch)
                continue
            prompts = p.prompts.take(len(batch.owed))
            parts, batch.owed = batch.owed[: len(prompts)], batch.owed[len(prompts) :]
            admitted += [self._fill_new(batch, part, waiting) for part, waiting in zip(parts, prompts, strict=True)]
            if p.prompts.ended:
                self._forgive(batch)
        return admitted

    def _batches_in_debt(self) -> list[Batch]:
        """Open batches that wait for a prompt, oldest first. Frozen ones stay as they are."""
        p = self._p
        indices = range(p.training.batch, p.next_batch)
        return [p.batches[index] for index in indices if p.batches[index].owed and not p.frozen(index)]

    def _forgive(self, batch: Batch) -> None:
        for part in batch.owed:
            batch.unsettled[part] -= 1
        batch.owed.clear()

    def _ask_ahead(self, debtors: list[Batch]) -> None:
        """Keep one batch of prompts waiting beyond what could be admitted now, so that dispatch never starves."""
        p = self._p
        if p.prompts.requested or p.prompts.exhausted or p.stopping or p.finished:
            return
        per_batch = self._per_batch
        reachable = min(p.training.trained_version + p.settings.max_staleness + 2, p.settings.num_batches)
        owed = sum(len(batch.owed) for batch in debtors)
        count = max(0, reachable - p.next_batch) * per_batch + owed - len(p.prompts.waiting)
        if count > 0:
            p.prompts.requested = count
            p.outbox.emit_until(PromptsKey(), RequestPrompts(count=count))

    # -- rows

    def row_arrived(self, group: Group, row: RowId) -> None:
        """A row that was missing exists. Nobody waits for a single one: the trainer takes whole groups."""

    def row_vanished(self, group: Group, row: RowId) -> None:
        """A row that existed is missing again."""

    # -- the end of a slot

    def end(self, group: Group, outcome: Outcome, reason: str, *, free: bool = False) -> None:
        """The slot of ``group`` ends untrained. free: its replacement does not count against max_refills."""
        p = self._p
        batch = p.batches[group.batch]
        if group.stage is Stage.READY:
            batch.remove_member(group)
        if group.stage is Stage.RUNNING:
            self._assignments.take_back(group, reason)
        self.confirm_admission(group)
        self._p.plans.remove(group)
        group.stage, group.outcome = Stage.ENDED, outcome
        p.outbox.emit(self.outcome_of(group, reason))
        p.outbox.emit(DropRows(group_ids=(group.group_id,)))
        self._replace(batch, group, free)

    def close_full(self, batch: Batch) -> None:
        """Enough groups of an over-sampled batch are ready: the others end, and nobody takes their places.

        Those are the ones that take longest, so the batch holds shorter responses than its prompts would give.
        """
        for group in [self._p.groups[name] for name in batch.group_ids]:
            if group.stage in (Stage.PENDING, Stage.RUNNING, Stage.SCORING) and not group.sent:
                self._end_unused(batch, group)
        self._forgive(batch)

    def _end_unused(self, batch: Batch, group: Group) -> None:
        if group.stage is Stage.RUNNING:
            self._assignments.take_back(group, OVERSAMPLED)
        self.confirm_admission(group)
        self._p.plans.remove(group)
        group.stage, group.outcome = Stage.ENDED, "filtered"
        self._p.outbox.emit(self.outcome_of(group, OVERSAMPLED))
        self._p.outbox.emit(DropRows(group_ids=(group.group_id,)))
        batch.unsettled[group.part] -= 1

    def abandon(self, group: Group) -> None:
        """Rows of ``group`` are not wanted any more: a checkpoint contains it."""
        self._assignments.take_back(group, "a checkpoint contains its batch")

    def outcome_of(self, group: Group, reason: str = "") -> SlotOutcome:
        """How the slot ended, for the prompt source."""
        return SlotOutcome(
            group_id=group.group_id,
            prompt_id=group.prompt_id,
            outcome=group.outcome or "trained",
            rewards=group.rewards,
            response_tokens=tuple(tokens for tokens in group.tokens if tokens != MISSING),
            reason=reason,
        )

    def retry(self, group: Group, reason: str, *, avoid: bool = False, abort: str = "") -> None:
        """Generate again what is missing of ``group``, elsewhere if it should; its slot is dead after max_attempts.

        A group that is in a round is tried for ever: the trainer waits for its rows.
        """
        group.failures += 1
        if avoid:
            group.avoid = group.worker_id
        if group.failures >= self._p.settings.max_attempts and not group.sent:
            self.end(group, "dead", f"{reason}, attempt {group.failures}")
        else:
            self._assignments.requeue(group, abort)

    def retry_elsewhere(self, group: Group, reason: str) -> None:
        """Its worker died under it: generate again what is missing; its slot is dead after max_deaths in a row.

        A worker may die of anything, so its death is not counted as an attempt of the group. But a group that kills
        every worker must be given up before the workers' restarts are used up. So deaths in a row are counted, and the
        count starts again once a sample of the group arrived or it ran for STABLE_S. A group that kills late is given
        up after FAR_APART times as many.
        """
        p = self._p
        group.deaths = deaths_in_a_row(group.deaths, p.now_s - group.started_s)
        group.all_deaths += 1
        kills = group.deaths >= p.settings.max_deaths or group.all_deaths >= FAR_APART * p.settings.max_deaths
        if kills and not group.sent:
            self.end(group, "dead", f"{reason}, as were all {group.all_deaths} workers that ran it last")
        else:
            self._assignments.requeue(group)

    def _replace(self, batch: Batch, group: Group, free: bool) -> None:
        """Fill the mini-batch's place again, with the same prompt if only its rows were at fault."""
        p = self._p
        closing = p.stopping and not p.frozen(batch.index)
        if closing or not (free or batch.refills_left):
            batch.unsettled[group.part] -= 1
            return
        batch.refills_left -= 0 if free else 1
        self._refill(batch, group)

    def _refill(self, batch: Batch, group: Group) -> None:
        if group.outcome != "stale":
            batch.owed.append(group.part)
            return
        prompt = PromptRef(
            prompt_id=group.prompt_id,
            prompt_tokens=group.prompt_tokens,
            predicted_tokens=group.predicted_tokens,
            predicted_sigma=group.predicted_sigma,
        )
        self.announce([self._fill(batch, group.part, prompt)])
