"""Contiguous slices of the groups, longest first: what deadline slicing and paced slicing have in common.

Owns: filling instances greedily, the search for the tightest limit, and the shares that cuts make. Never: whether a
slice is within its limit (``slicing.py``, ``steady.py``). Invariant: every group is in one slice, and every instance
has one, which may be empty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from orchestrator.core.dispatch.problem import GroupLength, Problem

Cuts: TypeAlias = list[int]
"""Where each instance's slice ends, in the order in which instances are filled."""
Fits: TypeAlias = Callable[[int, int, int], bool]
"""(place of the instance, start, stop) -> whether it may have the groups [start, stop). One more never helps."""
Shares: TypeAlias = tuple[tuple[GroupLength, ...], ...]


def greedy_cuts(num_instances: int, num_groups: int, fits: Fits) -> Cuts | None:
    """Give each instance as many of the next groups as fit; None when some are left over."""
    start, cuts = 0, Cuts()
    for place in range(num_instances):
        stops = range(start + 1, num_groups + 1)
        start += bisect_left(stops, True, key=lambda stop: not fits(place, start, stop))
        cuts.append(start)
    return cuts if start == num_groups else None


def tightest_cuts(
    cuts_within: Callable[[float], Cuts | None], low: float, high: float, *, growth: float, halvings: int
) -> Cuts:
    """Cuts for about the smallest limit that there are some for.

    Args: low: no smaller limit can be kept.  high: tried first, and ``growth`` times as much until it can be kept.
          halvings: of the interval that is left then.
    """
    while (cuts := cuts_within(high)) is None:
        low, high = high, growth * high
    for _ in range(halvings):
        middle = (low + high) / 2
        found = cuts_within(middle)
        if found is None:
            low = middle
        else:
            cuts, high = found, middle
    return cuts


def shares_of(cuts: Cuts, groups: Sequence[GroupLength], order: Sequence[int]) -> Shares:
    """The slices of ``groups`` by instance. order: index of the instance that each cut is of."""
    return by_instance([tuple(groups[start:stop]) for start, stop in pairwise([0, *cuts])], order)


def by_instance(shares: Sequence[tuple[GroupLength, ...]], order: Sequence[int]) -> Shares:
    """``shares``, of the instances ``order``, in the order of the instances."""
    share_of = dict(zip(order, shares, strict=True))
    return tuple(share_of[index] for index in range(len(order)))


def longest_from(problem: Problem, groups: Sequence[GroupLength], inflation: float) -> list[float]:
    """[groups] the longest sample from each group on, ``inflation`` deviations above its prediction: never rising."""
    inflated = [min(problem.max_tokens, group.inflated(inflation)) for group in groups]
    return list(accumulate(reversed(inflated), max))[::-1]


def token_sums(groups: Sequence[GroupLength]) -> list[float]:
    """[groups + 1] expected tokens of the first 0, 1, 2, ... groups."""
    return list(accumulate((group.num_samples * group.mean_tokens for group in groups), initial=0.0))
