"""The trainer: the stream of rounds that it is sent, from scored groups to versions, and what its reports change.

Owns: rounds, closes, the end of the run, which reports count, what a checkpoint frees. Never: which worker generated
what. Invariant: the rounds log holds every row of a trained batch once in each phase, and a batch is sent only after
the one before it is closed, so training starts with the first finished groups and its gradient is the whole batch's; a
report that is repeated, or of a trainer that was replaced, changes nothing, and a later one also stands for those
before it that were lost.

    RoundDone ──► StepDone ──► CheckpointSaved          TrainerReady: the first one, or again from its checkpoint
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

from orchestrator.core import fleet
from orchestrator.core.dispatch.handout import compare_lengths
from orchestrator.core.lanes.evaluation import EvaluationLane, awaits_last_evaluation, why_over
from orchestrator.core.model.groups import Batch, Group, Phase
from orchestrator.core.model.outbox import CommandId, FinishKey, parse_entry_id
from orchestrator.core.model.pipeline import Checkpoint, Pipeline, is_saved
from orchestrator.core.model.precision import METRIC
from orchestrator.core.model.settings import Release
from orchestrator.core.rollout.admission import TrainLane, outcome_of
from orchestrator.core.rollout.lifecycle import withdraw
from transport.contracts.messages import (
    BrokerUsage,
    CheckpointSaved,
    CloseMiniBatch,
    DropRows,
    FinishRun,
    FinishTraining,
    GroupRows,
    RoundDone,
    StepDone,
    TrainerReady,
    TrainRound,
    TrimRounds,
    damage_of,
)
from transport.contracts.types import GroupId, WeightIdentity, WorkerKind

MAX_ROUNDS_AHEAD = 2
"""Rounds at the trainer: one that it works on, one that waits. More would fix small rounds too early."""


def release(p: Pipeline, phases: Sequence[Phase]) -> None:
    """Send what can be sent of the oldest open batch, close what is complete, go on to the next."""
    while p.training.dp_size and not p.finished and p.training.finish_id is None:
        batch = p.batches.get(p.training.batch)
        if batch is None or not _advance(p, batch, phases):
            break
    reason = why_over(p)
    if reason and p.training.finish_id is None and not p.finished and not awaits_last_evaluation(p):
        p.training.finish_id = p.outbox.emit_round(FinishTraining(reason=reason))


def _advance(p: Pipeline, batch: Batch, phases: Sequence[Phase]) -> bool:
    """One step of the batch: a round, or the end of a phase. False when neither is due.

    A round is due when the trainer has little to do, and enough is there for every rank, or nothing more will come.
    """
    phase, settings, training = phases[batch.phase], p.settings, p.training
    whole = batch.whole()
    settled = whole if phase.mini_batch is None else not batch.unsettled[phase.mini_batch]
    if not batch.queue:
        if settled:
            _close(p, batch, phases)
        return settled
    if whole or (settled and settings.release != "batch"):
        batch.released = len(batch.queue)
    else:
        batch.released = num_released(settings.release, len(batch.queue), batch.released, settings.mini_batch_groups)
    if batch.released < (1 if settled else training.dp_size) or len(training.rounds) >= MAX_ROUNDS_AHEAD:
        return False
    least = min(settings.round_tokens, settings.micro_batch_tokens)
    if not settled and not fills_round(_released_tokens(p, batch), training.dp_size, least):
        return False
    _send_round(p, batch, phase)
    return True


def _released_tokens(p: Pipeline, batch: Batch) -> int:
    if batch.released == len(batch.queue):
        return batch.queue_tokens
    return sum(p.groups[group_id].num_tokens for group_id in islice(batch.queue, batch.released))


def _send_round(p: Pipeline, batch: Batch, phase: Phase) -> None:
    training, max_tokens = p.training, p.settings.micro_batch_tokens
    queue = [p.groups[group_id] for group_id in islice(batch.queue, batch.released)]
    if len(training.rank_tokens) != training.dp_size:
        training.rank_tokens = [0] * training.dp_size
    tokens = [group.num_tokens for group in queue]
    if p.settings.record_logprobs and phase.kind == "train":
        packed = pack_as_recorded(tokens, [group.rank for group in queue], training.dp_size, max_tokens)
    else:
        packed = pack_round(tokens, training.dp_size, max_tokens, training.rank_tokens)
    for number, rank in enumerate(packed):
        for group in (queue[index] for index in rank):
            group.sent, group.rank = True, number
            batch.dequeue(group)
            batch.released -= 1
            training.rank_tokens[number] += group.num_tokens
    round_id = f"{batch.index}.{batch.num_rounds}"
    batch.num_rounds += 1
    if not training.rounds:
        training.progress_s = p.now_s
    training.rounds[round_id] = batch.index
    p.outbox.emit_round(
        TrainRound(
            round_id=round_id,
            batch=batch.index,
            ranks=tuple(tuple(_rows_of(queue[index]) for index in rank) for rank in packed),
            kind=phase.kind,
            pass_index=phase.pass_index,
            mini_batch=phase.mini_batch or 0,
        )
    )


def _rows_of(group: Group) -> GroupRows:
    return GroupRows(group_id=group.group_id, samples=tuple(range(len(group.tokens))), num_tokens=group.num_tokens)


def _close(p: Pipeline, batch: Batch, phases: Sequence[Phase]) -> None:
    """Every group of the phase was sent: close the mini-batch, go on to the next phase or the next batch."""
    phase, training = phases[batch.phase], p.training
    batch.phase += 1
    finishes = batch.phase == len(phases)
    if finishes:
        training.batch += 1
        if batch.source_ordinal > training.source_ordinal:  # refills take prompts from behind a later batch's
            training.source_ordinal, training.source_position = batch.source_ordinal, batch.source_position
    if phase.mini_batch is not None:
        p.outbox.emit_round(_close_command(p, batch, phase, phase.mini_batch, finishes))
        training.rank_tokens = []
    if not finishes:
        batch.queue, batch.queue_tokens, batch.released = {}, 0, 0
        for group in members_of(p, batch, phases[batch.phase].mini_batch):
            batch.enqueue(group)


def _close_command(p: Pipeline, batch: Batch, phase: Phase, mini_batch: int, finishes: bool) -> CloseMiniBatch:
    members = list(members_of(p, batch, mini_batch))
    is_last = p.last_batch_admitted() and batch.index + 1 == p.next_batch
    every = p.settings.checkpoint_every
    return CloseMiniBatch(
        batch=batch.index,
        num_rows=sum(len(group.tokens) for group in members),
        num_tokens=sum(group.loss_tokens for group in members),
        pass_index=phase.pass_index,
        mini_batch=mini_batch,
        finishes_batch=finishes,
        source_position=p.training.source_position if finishes else "",
        checkpoint=finishes and p.retention.checkpoint_due(batch.index, every, is_last),
        short_by=p.settings.groups_per_batch - len(batch.members) if finishes else 0,
        num_moved=batch.num_moved if finishes else 0,
        moved_tokens=round(batch.moved_tokens) if finishes else 0,
        num_batches=0 if p.settings.lr_schedule == "constant" else max(p.settings.num_batches, p.next_batch),
    )


def members_of(p: Pipeline, batch: Batch, mini_batch: int | None) -> Iterable[Group]:
    groups = (p.groups[group_id] for group_id in batch.members)
    return (group for group in groups if mini_batch is None or group.mini_batch == mini_batch)


# -- after a resume, a restart, a lost report


def replay_from(p: Pipeline, cursor: CommandId) -> None:
    """A trainer reads the log again from its cursor: rounds after it are to be done (again)."""
    training = p.training
    ahead = [issued.command for issued in p.outbox.rounds if issued.id > cursor]
    training.rounds = {command.round_id: command.batch for command in ahead if isinstance(command, TrainRound)}
    training.progress_s = p.now_s
    if training.finish_id is not None and cursor >= training.finish_id and not p.finished:
        training.finish_id = None  # that end is behind it: the run was resumed


def reopen(p: Pipeline) -> None:
    """A resumed run goes on. If its end stands on the log, the trainer must first have read past it."""
    p.finish_reason = ""
    p.evaluations.last_until_s = None
    p.outbox.confirm(FinishKey())
    finish_id = p.training.finish_id
    if finish_id is not None and is_saved(p.retention.checkpoints, finish_id):
        p.training.finish_id = None


def expire_pacing(p: Pipeline) -> None:
    """A confirmation was lost, or takes very long: send on. Pacing decides round sizes, never correctness."""
    training = p.training
    if training.rounds and p.now_s - training.progress_s > p.settings.rollout_timeout_s:
        training.rounds.clear()


def finish_run(p: Pipeline, reason: str, *, failed: bool = False) -> None:
    """The run is over. failed: it cannot go on."""
    if not p.finished:
        p.finish_reason = reason
        p.outbox.emit_until(FinishKey(), FinishRun(reason=reason, failed=failed))


# -- packing: pure functions. A group stays whole on one rank, so that its prompt is computed once


def num_released(release: Release, num_queued: int, num_before: int, mini_batch_groups: int) -> int:
    """How many of the scored groups may go to the trainer while others of their batch are still to come.

    Args:    num_queued: scored and not sent.  num_before: of those, released already.
             mini_batch_groups: size of the mini-batches that "mini_batch" waits for, groups.
    Returns: a number in [num_before, num_queued]; the groups that were ready first are meant.
    Source:  StreamRL sec. 4.1: "stream" is its dynamic-batch pipelining, "mini_batch" its first strawman, "batch" the
             serial execution of sec. 2.4. The gradient is the same in all of them.
    """
    num_before = min(num_before, num_queued)  # one that was released may have been taken out again
    match release:
        case "stream":
            return num_queued
        case "mini_batch":
            return num_before + (num_queued - num_before) // mini_batch_groups * mini_batch_groups
        case "batch":
            return num_before


def fills_round(tokens: int, num_ranks: int, round_tokens: int) -> bool:
    """Whether released groups are enough for a round while more of their batch is to come.

    Args:    tokens: of all of them, their prompts once and their responses.  num_ranks: R >= 1.
             round_tokens: what a rank shall get, tokens; 0: a round may be as small as it comes.
    Source:  ours. Where a forward pass is a collective, a small round is not free: a sharded trainer gathers every
             layer in each, however few tokens it has. It decides when rounds go, never the gradient.
    """
    return tokens >= num_ranks * round_tokens


def pack_round(
    group_tokens: Iterable[int], num_ranks: int, max_tokens: int, given: Sequence[int] = ()
) -> list[list[int]]:
    """Choose groups for one round and spread them over the ranks, balanced by tokens.

    Args:    group_tokens: tokens of each ready group (prompt once + responses), in the order they became ready.
             num_ranks: R >= 1.  max_tokens: cap of one rank; a group above it goes alone.
             given: [R] tokens that each rank got since the ranks last met; empty: none.
    Returns: [R] lists of indices into group_tokens. Which groups are considered follows arrival; inside that window the
             longest is placed first, on the rank that got the least so far. The group that waited longest is always
             among them. With nothing given before, no rank is empty when there are at least R groups.
    Source:  ours; longest first, each to the rank with least, with a cap. Ranks wait for one another only where a
             mini-batch is closed, so what counts is the sum of their rounds: a small one need not be even.
    """
    window: list[int] = []  # the first groups that fill all ranks together, at least one for each rank
    room = num_ranks * max_tokens
    for tokens in group_tokens:
        room -= tokens
        if len(window) >= num_ranks and room < 0:
            break
        window.append(tokens)
    longest_order = sorted(range(len(window)), key=lambda index: (-window[index], index))
    loads = list(given) or [0] * num_ranks
    ranks = _place(window, longest_order, loads, max_tokens)
    if window and not any(0 in rank for rank in ranks):
        ranks = _place(window, [0, *(index for index in longest_order if index)], loads, max_tokens)
    return ranks


def pack_as_recorded(
    group_tokens: Sequence[int], group_ranks: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Choose groups for one round where each must go to the rank that recorded its old-policy logprobs.

    Args:    group_tokens, group_ranks: [G] of each group, in the order of waiting.  num_ranks: R >= 1.
             max_tokens: cap of one rank; a group above it goes alone.
    Returns: [R] lists of indices; a rank may be empty. The group that waited longest is always among them.
    Source:  ours. The logprobs stay in the process that computed them: sent elsewhere, they are not there.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    room = [max_tokens] * num_ranks
    for index, (tokens, recorded) in enumerate(zip(group_tokens, group_ranks, strict=True)):
        rank = recorded % num_ranks  # fewer ranks than before: they go back to a checkpoint, and record again
        if not ranks[rank] or tokens <= room[rank]:
            ranks[rank].append(index)
            room[rank] -= tokens
    return ranks


def _place(window: Sequence[int], order: Iterable[int], given: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each in turn to the rank that got the least, of those with room; without any it waits for the next round."""
    ranks: list[list[int]] = [[] for _ in given]
    room = [max_tokens] * len(given)
    lightest = [(load, rank) for rank, load in enumerate(given)]
    heapq.heapify(lightest)
    least = min(window, default=0)
    for index in order:
        full: list[tuple[int, int]] = []
        while lightest and ranks[lightest[0][1]] and window[index] > room[lightest[0][1]]:
            full.append(heapq.heappop(lightest))
        if lightest:
            load, rank = lightest[0]
            ranks[rank].append(index)
            room[rank] -= window[index]
            heapq.heapreplace(lightest, (load + window[index], rank))
        for entry in full:
            if room[entry[1]] >= least:
                heapq.heappush(lightest, entry)
    return ranks


def round_done(p: Pipeline, event: RoundDone) -> None:
    """The trainer works in the log's order: rounds sent before this one are done too."""
    training = p.training
    if event.round_id in training.rounds:
        open_ids = list(training.rounds)
        for round_id in open_ids[: open_ids.index(event.round_id) + 1]:
            del training.rounds[round_id]
        training.progress_s = p.now_s


def step_done(p: Pipeline, report: StepDone) -> None:
    trained = p.training.trained_version
    if report.weights.epoch != p.lineage.epoch or not trained < report.weights.version <= p.training.batch:
        return  # repeated, or of a trainer that was replaced
    if report.weights.version == trained + 1:
        fleet.trained(p, p.batches[trained], report.stepped_s)
    if p.settings.fp8 is not None:
        p.precision.observe(p.settings.fp8, report.weights.version, report.metrics.get(METRIC))
    _train_up_to(p, report.weights)


def _train_up_to(p: Pipeline, weights: WeightIdentity) -> None:
    """Batches below this version are trained: the former ones too, should their report be lost."""
    training = p.training
    newly_trained = [p.batches[index] for index in range(training.trained_version, weights.version)]
    for batch in newly_trained:
        compare_lengths(p, batch)
    for batch in newly_trained:
        if not batch.outcomes_reported:  # once, also when a rolled-back trainer trains the batch again
            batch.outcomes_reported = True
            for group in members_of(p, batch, None):
                group.outcome = "trained"
                p.outbox.emit(outcome_of(group))
    training.trained_version = weights.version
    training.rounds = {round_id: of for round_id, of in training.rounds.items() if of >= weights.version}
    training.progress_s = p.now_s
    p.lineage.version = weights.version
    p.fleet.publish(weights)
    fleet.measure_anew(p)


def trainer_ready(p: Pipeline, report: TrainerReady, train: TrainLane, evaluation: EvaluationLane) -> None:
    """A trainer of a higher epoch goes on from its checkpoint; one of the same epoch repeats where it is.

    It does so after a broker came back that may have lost its reports.
    """
    weights = report.weights
    fleet.note_other(p, report.worker_id, WorkerKind.TRAIN)
    if weights.epoch > p.lineage.epoch:
        _restart(p, report, train, evaluation)
    elif weights.epoch == p.lineage.epoch and p.training.trained_version < weights.version <= p.training.batch:
        _train_up_to(p, weights)


def _restart(p: Pipeline, report: TrainerReady, train: TrainLane, evaluation: EvaluationLane) -> None:
    """It replays the rounds log by itself.

    Rounds on the log keep the ranks they were packed for; a trainer of another ``dp_size`` spreads them itself, and
    rounds released from now on are packed for it.
    """
    version, freed = report.weights.version, p.retention.freed.version
    begins = not p.batches and not p.lineage.epoch  # a state without batches can begin anywhere
    oldest = max(freed, min(p.batches, default=p.training.batch))
    if not begins and not oldest <= version <= p.training.batch:
        reach = f"rows before {oldest} are freed and batches from {p.training.batch} on were never sent"
        why = f"the trainer came back with version {version}: {reach}{damage_of(report.damaged)}"
        finish_run(p, why, failed=True)
        return
    if not p.batches:
        p.next_batch = p.training.batch = max(p.next_batch, version)
    evaluation.give_up("the trainer started again")  # its weights are gone: evaluate again from this version on
    p.evaluations.reached = min(p.evaluations.reached, version)
    p.retention.checkpoints = [one for one in p.retention.checkpoints if one.version <= version]  # others are damaged
    p.training.dp_size, p.training.damaged = report.dp_size, report.damaged
    p.training.trained_version = p.training.went_back_to = version
    lost = p.lineage.restart(report.weights)
    if lost:
        train.drop_lost_versions(version)
    p.fleet.publish(report.weights)
    replay_from(p, parse_entry_id(report.cursor))


def checkpoint_saved(p: Pipeline, report: CheckpointSaved) -> None:
    """Free what the checkpoint contains; end the run when it is the one after the last command.

    A checkpoint contains its batches, so it also stands for a StepDone that was lost.
    """
    training, weights = p.training, report.weights
    if weights.epoch != p.lineage.epoch or weights.version > training.batch:
        return  # of a trainer that was replaced
    if weights.version > training.trained_version:
        _train_up_to(p, weights)
    cursor = parse_entry_id(report.cursor)
    if p.retention.save(Checkpoint(weights.version, cursor), p.settings.keep_checkpoints):
        free_saved(p)
    end_if_saved(p)


def end_if_saved(p: Pipeline) -> None:
    """End the run when the trainer, and the critic where there is one, saved past the last command."""
    finish_id = p.training.finish_id
    if finish_id is None or not is_saved(p.retention.checkpoints, finish_id):
        return
    reason = why_over(p)
    if not reason:
        p.training.finish_id = None  # it was resumed meanwhile
    elif not p.settings.critic or is_saved(p.critic.checkpoints, finish_id):
        finish_run(p, reason)


def rows_retained(p: Pipeline, usage: BrokerUsage) -> None:
    """At a limit a checkpoint is forced; above it admission closes, and what was kept for a damaged one is freed."""
    over = max(usage.retained_bytes - p.settings.max_retained_bytes, usage.unit_bytes - p.settings.max_unit_bytes)
    p.retention.retained_bytes = usage.retained_bytes + usage.unit_bytes
    p.retention.force_checkpoint = over >= 0
    p.retention.over_budget = over > 0
    free_saved(p)


def free_saved(p: Pipeline) -> None:
    """Free rows and rounds that no trainer, and no critic, can come to need any more."""
    oldest = p.retention.free(p.settings.keep_checkpoints, p.critic if p.settings.critic else None)
    if oldest is None:
        return
    freed: list[GroupId] = []
    for index in [index for index in p.batches if index < oldest.version]:
        batch = p.batches.pop(index)
        freed += batch.members
        for group_id in batch.group_ids:
            withdraw(p, p.groups.pop(group_id), "a checkpoint contains its batch")
    if freed:
        p.outbox.emit(DropRows(group_ids=tuple(freed)))
    p.outbox.rounds = [issued for issued in p.outbox.rounds if issued.id > oldest.cursor]
    p.outbox.emit(TrimRounds(cursor=oldest.cursor.entry))
