"""What the trainer is sent: the stream from scored groups to versions.

Owns: rounds, closes, the end of the run. Never: which worker generated what; what follows from the trainer's answers
(``reports.py``). Invariant: the rounds log holds every row of a trained batch once in each phase, and a batch is sent
only after the one before it is closed; so training starts with the first finished groups and its gradient is the whole
batch's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

from orchestrator.core.model.groups import Batch, Group, Phase
from orchestrator.core.model.outbox import CommandId, FinishKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.settings import Release
from transport.contracts.messages import CloseMiniBatch, FinishRun, FinishTraining, GroupRows, TrainRound
from transport.contracts.types import GroupId

MAX_ROUNDS_AHEAD = 2
"""Rounds at the trainer: one that it works on, one that waits. More would fix small rounds too early."""


def release(p: Pipeline, phases: Sequence[Phase]) -> None:
    """Send what can be sent of the oldest open batch, close what is complete, go on to the next."""
    while p.training.dp_size and not p.finished and p.training.finish_id is None:
        batch = p.batches.get(p.training.batch)
        if batch is None or not _advance(p, batch, phases):
            break
    _finish_training(p)


def _advance(p: Pipeline, batch: Batch, phases: Sequence[Phase]) -> bool:
    """One step of the batch: a round, or the end of a phase. False when neither is due."""
    phase = phases[batch.phase]
    settled = batch.settled(phase)
    if batch.queue:
        batch.released = _released(p, batch, settled)
        if not _round_due(p, batch, settled):
            return False
        _send_round(p, batch, phase)
        return True
    if settled:
        _close(p, batch, phases)
    return settled


def _released(p: Pipeline, batch: Batch, settled: bool) -> int:
    """Groups of the queue that the trainer may have; with nothing more to come all of them."""
    settings = p.settings
    if batch.whole() or (settled and settings.release != "batch"):
        return len(batch.queue)
    return num_released(settings.release, len(batch.queue), batch.released, settings.mini_batch_groups)


def _round_due(p: Pipeline, batch: Batch, settled: bool) -> bool:
    """The trainer has little to do, and something is there for every rank (or nothing more will come)."""
    training = p.training
    enough = batch.released >= (1 if settled else training.dp_size)
    return enough and len(training.rounds) < MAX_ROUNDS_AHEAD


def _send_round(p: Pipeline, batch: Batch, phase: Phase) -> None:
    queue = list(islice(batch.queue, batch.released))
    if len(p.training.rank_tokens) != p.training.dp_size:
        p.training.rank_tokens = [0] * p.training.dp_size
    packed = _pack(p, [p.groups[group_id] for group_id in queue], phase)
    ranks = tuple(tuple(_put(p, batch, queue[index], number) for index in rank) for number, rank in enumerate(packed))
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
            mini_batch=phase.mini_batch or 0,
        )
    )


def _pack(p: Pipeline, queue: list[Group], phase: Phase) -> list[list[int]]:
    """Which of the waiting groups make a round, for each rank."""
    dp_size, max_tokens = p.training.dp_size, p.settings.micro_batch_tokens
    if p.settings.record_logprobs and phase.kind == "train":
        tokens, ranks = [group.num_tokens for group in queue], [group.rank for group in queue]
        return pack_as_recorded(tokens, ranks, dp_size, max_tokens)
    return pack_round((group.num_tokens for group in queue), dp_size, max_tokens, p.training.rank_tokens)


def _put(p: Pipeline, batch: Batch, group_id: GroupId, rank: int) -> GroupRows:
    group = p.groups[group_id]
    group.sent, group.rank = True, rank
    del batch.queue[group_id]
    batch.released -= 1
    return GroupRows(group_id=group_id, samples=tuple(range(len(group.tokens))), num_tokens=group.num_tokens)


def _close(p: Pipeline, batch: Batch, phases: Sequence[Phase]) -> None:
    """Every group of the phase was sent: close the mini-batch, go on to the next phase or the next batch."""
    phase = phases[batch.phase]
    batch.phase += 1
    finishes = batch.phase == len(phases)
    if finishes:
        p.training.batch += 1
        _pass_source(p, batch)
    if phase.mini_batch is not None:
        p.outbox.emit_round(_close_command(p, batch, phase, phase.mini_batch, finishes))
        p.training.rank_tokens = []
    if not finishes:
        batch.queue = {group.group_id: None for group in members_of(p, batch, phases[batch.phase].mini_batch)}
        batch.released = 0


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
    )


def members_of(p: Pipeline, batch: Batch, mini_batch: int | None) -> Iterable[Group]:
    groups = (p.groups[group_id] for group_id in batch.members)
    return (group for group in groups if mini_batch is None or group.mini_batch == mini_batch)


def _pass_source(p: Pipeline, batch: Batch) -> None:
    """The furthest prompt of any closed batch: refills take prompts from behind a later batch's."""
    training = p.training
    if batch.source_ordinal > training.source_ordinal:
        training.source_ordinal, training.source_position = batch.source_ordinal, batch.source_position


def _finish_training(p: Pipeline) -> None:
    """Let the trainer know that nothing more comes: the last batch is closed, or on a stop the one in training."""
    reason = why_over(p)
    if reason and p.training.finish_id is None and not p.finished:
        p.training.finish_id = p.outbox.emit_round(FinishTraining(reason=reason))


def why_over(p: Pipeline) -> str:
    """Why nothing more will be sent to the trainer; "" while something will."""
    if p.stopping:
        in_training = p.training.batch in p.batches and not p.frozen(p.training.batch)
        return "" if in_training else p.stop_reason
    if not p.last_batch_admitted() or p.training.batch < p.next_batch:
        return ""
    return "all batches are trained" if p.training.batch >= p.settings.num_batches else "the data ended"


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
    p.outbox.confirm(FinishKey())
    if p.training.finish_id is not None and p.retention.reaches(p.training.finish_id):
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
    window = _window(group_tokens, num_ranks, max_tokens)
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


def _window(group_tokens: Iterable[int], num_ranks: int, max_tokens: int) -> list[int]:
    """The first groups that fill all ranks together, at least one for each rank."""
    window: list[int] = []
    total = 0
    for tokens in group_tokens:
        if len(window) >= num_ranks and total + tokens > num_ranks * max_tokens:
            break
        window.append(tokens)
        total += tokens
    return window
