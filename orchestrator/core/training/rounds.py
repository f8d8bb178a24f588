"""What the trainer is sent, and what it answers: the stream from scored groups to versions.

Owns: rounds, closes, outcomes of trained slots, the end of the run. Never: who generated what. Invariant: the rounds
log holds every row of a trained batch once in each phase, and a batch is sent only after the one before it is closed;
so training starts with the first finished groups and its gradient is the whole batch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from orchestrator.core.model.batches import Batch, Group
from orchestrator.core.model.batching import Phase, num_released, pack_as_recorded, pack_round
from orchestrator.core.model.outbox import CommandId, FinishKey, parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.retention import Checkpoint
from orchestrator.core.rollout.admission import Slots
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    DropRows,
    FinishRun,
    FinishTraining,
    GroupRows,
    RoundDone,
    TrainRound,
    TrimRounds,
)
from transport.contracts.types import GroupId

MAX_ROUNDS_AHEAD = 2
"""Rounds at the trainer: one that it works on, one that waits. More would fix small rounds too early."""


class Rounds:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, slots: Slots, phases: tuple[Phase, ...]) -> None:
        self._p = pipeline
        self._slots = slots
        self._phases = phases

    # -- to the trainer

    def release(self) -> None:
        """Send what can be sent of the oldest open batch, close what is complete, go on to the next."""
        p = self._p
        while p.training.dp_size and not p.finished and p.training.finish_id is None:
            batch = p.batches.get(p.training.batch)
            if batch is None or not self._advance(batch):
                break
        self._finish_training()

    def _advance(self, batch: Batch) -> bool:
        """One step of the batch: a round, or the end of a phase. False when neither is due."""
        phase = self._phases[batch.phase]
        settled = batch.settled(phase)
        if batch.queue:
            batch.released = self._released(batch, settled)
            if not self._round_due(batch, settled):
                return False
            self._send_round(batch, phase)
            return True
        if settled:
            self._close(batch, phase)
        return settled

    def _released(self, batch: Batch, settled: bool) -> int:
        """Groups of the queue that the trainer may have; with nothing more to come all of them."""
        settings = self._p.settings
        if batch.whole() or (settled and settings.release != "batch"):
            return len(batch.queue)
        return num_released(settings.release, len(batch.queue), batch.released, settings.mini_batch_groups)

    def _round_due(self, batch: Batch, settled: bool) -> bool:
        """The trainer has little to do, and something is there for every rank (or nothing more will come)."""
        training = self._p.training
        enough = batch.released >= (1 if settled else training.dp_size)
        return enough and len(training.rounds) < MAX_ROUNDS_AHEAD

    def _send_round(self, batch: Batch, phase: Phase) -> None:
        p = self._p
        queue = list(islice(batch.queue, batch.released))
        if len(p.training.rank_tokens) != p.training.dp_size:
            p.training.rank_tokens = [0] * p.training.dp_size
        packed = self._pack([p.groups[group_id] for group_id in queue], phase)
        ranks = tuple(
            tuple(self._put(batch, queue[index], number) for index in rank) for number, rank in enumerate(packed)
        )
        for number, rank in enumerate(ranks):
            p.training.rank_tokens[number] += sum(rows.num_tokens for rows in rank)
        round_id = f"{batch.index}.{batch.num_rounds}"
        batch.num_rounds += 1
        if not p.training.rounds:
            p.training.progress_s = p.now_s
        p.training.rounds[round_id] = batch.index
        p.outbox.emit_round(
            TrainRound(
                round_id=round_id,
                batch=batch.index,
                ranks=ranks,
                kind=phase.kind,
                pass_index=phase.pass_index,
                mini_batch=phase.part or 0,
            )
        )

    def _pack(self, queue: list[Group], phase: Phase) -> list[list[int]]:
        """Which of the waiting groups make a round, for each rank."""
        p = self._p
        dp_size, max_tokens = p.training.dp_size, p.settings.micro_batch_tokens
        if p.settings.record_logprobs and phase.kind == "train":
            tokens, ranks = [group.num_tokens for group in queue], [group.rank for group in queue]
            return pack_as_recorded(tokens, ranks, dp_size, max_tokens)
        return pack_round((group.num_tokens for group in queue), dp_size, max_tokens, p.training.rank_tokens)

    def _put(self, batch: Batch, group_id: GroupId, rank: int) -> GroupRows:
        group = self._p.groups[group_id]
        group.sent, group.rank = True, rank
        del batch.queue[group_id]
        batch.released -= 1
        return GroupRows(group_id=group_id, samples=tuple(range(len(group.tokens))), num_tokens=group.num_tokens)

    def _close(self, batch: Batch, phase: Phase) -> None:
        """Every group of the phase was sent: close the mini-batch, go on to the next phase or the next batch."""
        p = self._p
        batch.phase += 1
        finishes = batch.phase == len(self._phases)
        if finishes:
            p.training.batch += 1
            self._pass_source(batch)
        if phase.part is not None:
            p.outbox.emit_round(self._close_command(batch, phase, phase.part, finishes))
            p.training.rank_tokens = []
        if not finishes:
            batch.queue = {group.group_id: None for group in self._members(batch, self._phases[batch.phase].part)}
            batch.released = 0

    def _close_command(self, batch: Batch, phase: Phase, part: int, finishes: bool) -> CloseMiniBatch:
        p = self._p
        members = list(self._members(batch, part))
        is_last = p.last_batch_admitted() and batch.index + 1 == p.next_batch
        every = p.settings.checkpoint_every
        return CloseMiniBatch(
            batch=batch.index,
            num_rows=sum(len(group.tokens) for group in members),
            num_tokens=sum(group.loss_tokens for group in members),
            pass_index=phase.pass_index,
            mini_batch=part,
            finishes_batch=finishes,
            source_position=p.training.source_position if finishes else "",
            checkpoint=finishes and p.retention.checkpoint_due(batch.index, every, is_last),
            short_by=p.settings.groups_per_batch - len(batch.members) if finishes else 0,
            num_moved=batch.num_moved if finishes else 0,
            moved_tokens=round(batch.moved_tokens) if finishes else 0,
        )

    def _members(self, batch: Batch, part: int | None) -> Iterable[Group]:
        groups = (self._p.groups[group_id] for group_id in batch.members)
        return (group for group in groups if part is None or group.part == part)

    def _pass_source(self, batch: Batch) -> None:
        """The furthest prompt of any closed batch: refills take prompts from behind a later batch's."""
        training = self._p.training
        if batch.source_ordinal > training.source_ordinal:
            training.source_ordinal, training.source_position = batch.source_ordinal, batch.source_position

    def _finish_training(self) -> None:
        """Tell the trainer that nothing more comes: the last batch is closed, or on a stop the one in training."""
        p = self._p
        reason = self._why_over()
        if reason and p.training.finish_id is None and not p.finished:
            p.training.finish_id = p.outbox.emit_round(FinishTraining(reason=reason))

    def _why_over(self) -> str:
        """Why nothing more will be sent to the trainer; "" while something will."""
        p = self._p
        if p.stopping:
            in_training = p.training.batch in p.batches and not p.frozen(p.training.batch)
            return "" if in_training else p.stop_reason
        if not p.last_batch_admitted() or p.training.batch < p.next_batch:
            return ""
        return "all batches are trained" if p.training.batch >= p.settings.num_batches else "the data ended"

    # -- from the trainer

    def round_done(self, event: RoundDone) -> None:
        """The trainer works in the log's order: rounds sent before this one are done too."""
        training = self._p.training
        if event.round_id not in training.rounds:
            return
        for round_id in list(training.rounds):
            del training.rounds[round_id]
            if round_id == event.round_id:
                break
        training.progress_s = self._p.now_s

    def expire_pacing(self) -> None:
        """A confirmation was lost, or takes very long: send on. Pacing decides round sizes, never correctness."""
        training = self._p.training
        if training.rounds and self._p.now_s - training.progress_s > self._p.settings.rollout_timeout_s:
            training.rounds.clear()

    def batch_trained(self, batch: int) -> None:
        """Batches up to ``batch`` are trained: the former ones too, should their report be lost."""
        p = self._p
        for index in range(p.training.trained_version, batch + 1):
            self._tell_outcomes(p.batches[index])
        p.training.trained_version = batch + 1
        p.training.rounds = {round_id: of for round_id, of in p.training.rounds.items() if of > batch}
        p.training.progress_s = p.now_s

    def _tell_outcomes(self, batch: Batch) -> None:
        """Once, also when a rolled-back trainer trains the batch again."""
        if batch.outcomes_told:
            return
        batch.outcomes_told = True
        for group in self._members(batch, None):
            group.outcome = "trained"
            self._p.outbox.emit(self._slots.outcome_of(group))

    def replay_from(self, cursor: CommandId) -> None:
        """A trainer reads the log again from its cursor: rounds after it are to be done (again)."""
        training = self._p.training
        ahead = [issued.command for issued in self._p.outbox.rounds if issued.id > cursor]
        training.rounds = {command.round_id: command.batch for command in ahead if isinstance(command, TrainRound)}
        training.progress_s = self._p.now_s
        if training.finish_id is not None and cursor >= training.finish_id and not self._p.finished:
            training.finish_id = None  # that end is behind it: the run was resumed

    def reopen(self) -> None:
        """A resumed run goes on. If its end stands on the log, the trainer must first have read past it."""
        p = self._p
        p.finish_reason = ""
        p.outbox.confirm(FinishKey())
        if p.training.finish_id is not None and p.retention.reaches(p.training.finish_id):
            p.training.finish_id = None

    # -- checkpoints, the end

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """Free what the checkpoint contains; end the run when it is the one after the last command."""
        p = self._p
        cursor = parse_entry_id(event.cursor)
        if p.retention.save(Checkpoint(event.weights.version, cursor), p.settings.keep_checkpoints):
            self._free()
        if p.training.finish_id is not None and cursor >= p.training.finish_id:
            self._end_training()

    def broker_used(self, retained_bytes: int) -> None:
        """A broker over budget is relieved of what was kept for a damaged checkpoint."""
        self._p.retention.use(retained_bytes, self._p.settings.max_retained_bytes)
        self._free()

    def finish_run(self, reason: str, *, failed: bool = False) -> None:
        """The run is over. failed: it cannot go on."""
        if not self._p.finished:
            self._p.finish_reason = reason
            self._p.outbox.emit_until(FinishKey(), FinishRun(reason=reason, failed=failed))

    def _end_training(self) -> None:
        """The trainer has read its last command: the run is over, unless it was resumed meanwhile."""
        reason = self._why_over()
        if reason:
            self.finish_run(reason)
        else:
            self._p.training.finish_id = None

    def _free(self) -> None:
        """Free rows and rounds that no trainer can come to need any more."""
        p = self._p
        oldest = p.retention.free(p.settings.keep_checkpoints)
        if oldest is None:
            return
        freed: list[GroupId] = []
        for index in [index for index in p.batches if index < oldest.version]:
            batch = p.batches.pop(index)
            freed += batch.members
            for group_id in batch.group_ids:
                self._free_group(group_id)
        if freed:
            p.outbox.emit(DropRows(group_ids=tuple(freed)))
        p.outbox.trim_rounds(oldest.cursor)
        p.outbox.emit(TrimRounds(cursor=oldest.cursor.entry))

    def _free_group(self, group_id: GroupId) -> None:
        """Nobody asks for it any more, not even a broker that loses its tail."""
        group = self._p.groups[group_id]
        if group.worker_id:
            self._slots.abandon(group)
        self._slots.confirm_admission(group)
        del self._p.groups[group_id]
