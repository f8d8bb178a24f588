"""Deadline slicing: long samples in small batches whose steps are quick, short ones in large batches, all done by one
deadline.

Owns: the slices for a deadline, and the deadline. Never: which inflation is right (``scored.py`` tries some).
Invariant: sorted by prediction, every instance gets a contiguous slice; for the lengths it plans with and instances of
one speed, the last slice ends at most one sample's own work after the bound of
``benchmarks/papers/bounds.py``, which no placement beats.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeAlias

from orchestrator.core.dispatch.policies.pricing import Pricing, price
from orchestrator.core.dispatch.problem import GroupLength, Plan, Problem, longest_first

INFLATION = 2.5
"""Standard deviations added to a prediction. Source: ours, StreamRL's 72B workload with its recall of 0.87: 1.3 end
where even dispatch does, 2.5 to 3 end 9% sooner, because it is the longest of a slice that must be within it."""
GROWTH = 1.5
"""Of a deadline that cannot be met."""
HALVINGS = 8
"""Of an interval of half the deadline: the rest, 0.2%, is far below what predictions are worth."""


def slicing(problem: Problem, inflation: float = INFLATION, lead: float = 0.0) -> Plan:
    """Slices for the earliest deadline that all can meet.

    Args: inflation: standard deviations of the log length that the longest of a slice may exceed its prediction by.
          lead: by how much earlier the shortest slice is to be done than the longest, as a share of the deadline: it
          feeds a trainer that would otherwise get everything at the end.
    Source: ours. For affine step times the greedy fill is optimal among contiguous slices, and contiguous slices are
    among all placements, because what counts is the sum over instances of their longest sample.
    """
    if not problem.groups:
        return Plan(shares=((),) * len(problem.instances), policy="slicing")
    slicer = Slicer.of(problem, inflation)
    soonest_s = slicer.soonest_s()
    cuts = tightest_cuts(partial(slicer.cuts, lead=lead), soonest_s, soonest_s, growth=GROWTH, halvings=HALVINGS)
    return Plan(shares=shares_of(cuts, slicer.groups, slicer.order), policy="slicing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicer:
    """A problem, sorted, with sums over its prefixes.

    groups: longest first.  longest: the longest sample from each on, inflated.  samples, tokens: sums over prefixes.
    work: the same of work, by the rate of the pricing.  order: instances, the fastest first.  prices: of those.
    """

    groups: list[GroupLength]
    longest: list[float]
    samples: list[int]
    tokens: list[float]
    work: dict[tuple[float, float], list[float]]
    order: list[int]
    prices: list[Pricing]

    @classmethod
    def of(cls, problem: Problem, inflation: float) -> Slicer:
        groups = longest_first(problem.groups)
        prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
        order = sorted(range(len(prices)), key=lambda index: (prices[index].base_s, index))
        sorted_prices = [prices[index] for index in order]
        return cls(
            groups=groups,
            longest=longest_from(problem, groups, inflation),
            samples=list(accumulate((group.num_samples for group in groups), initial=0)),
            tokens=token_sums(groups),
            work={rate: _work_sums(groups, pricing) for rate, pricing in by_rate(prices).items()},
            order=order,
            prices=sorted_prices,
        )

    def soonest_s(self) -> float:
        """No deadline before the longest group alone can be met."""
        return min(self.end_s(place, 0, 1) for place in range(len(self.prices)))

    def end_s(self, place: int, start: int, stop: int) -> float:
        """When the instance at ``place`` has done the groups [start, stop)."""
        pricing = self.prices[place]
        work, before = self.work[pricing.rate], self.samples[start]
        samples, tokens, beyond = self.samples[stop] - before, self.tokens[stop] - self.tokens[start], 0.0
        if samples > pricing.free:
            beyond = self.tokens[stop] - self.tokens[bisect_left(self.samples, before + pricing.free)]
        last = self.groups[stop - 1].mean_tokens
        return pricing.end_s(self.longest[start], work[stop] - work[start], samples, tokens, beyond=beyond, last=last)

    def cuts(self, deadline_s: float, lead: float = 0.0) -> Cuts | None:
        """The largest slices that are done in time, or None when the deadline cannot be met."""
        last = max(1, len(self.prices) - 1)
        limits_s = [deadline_s * (1 - lead * place / last) for place in range(len(self.prices))]
        return greedy_cuts(
            len(self.prices),
            len(self.groups),
            lambda place, start, stop: self.end_s(place, start, stop) <= limits_s[place],
        )


def by_rate(prices: Sequence[Pricing]) -> dict[tuple[float, float], Pricing]:
    """One of the instances that charge the same, for each rate: a fleet has a few kinds."""
    return {pricing.rate: pricing for pricing in prices}


def _work_sums(groups: Sequence[GroupLength], pricing: Pricing) -> list[float]:
    """Work of the first 0, 1, 2, ... groups; the square of a lognormal length is larger than that of its mean."""
    works = (
        group.num_samples * pricing.work_s(group.mean_tokens, group.mean_tokens**2 * _square_factor(group.sigma))
        for group in groups
    )
    return list(accumulate(works, initial=0.0))


def _square_factor(sigma: float) -> float:
    return 1.0 + sigma * sigma if sigma < 1 else 2.0  # exp(sigma**2) without its tail, which lengths are cut before


# -- contiguous slices, longest first: what deadline slicing and steady slicing have in common


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
