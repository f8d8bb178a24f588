"""How a batch is cut into rounds for the trainer, balanced over data-parallel ranks.

Pure functions. Invariant: a group stays whole on one rank, so that its prompt is computed once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from orchestrator.core.model.settings import Release


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
