"""Contiguous slices, longest first: long samples in small batches whose steps are quick, short ones in large batches.

Deadline slicing ends one batch soonest, which is what counts where versions are waited for. Where batches overlap, no
instance is ever empty, and what counts is how fast one follows the other: that is steady slicing.

Owns: what samples cost an instance in closed form, and the slices for a deadline or a period. Never: which inflation is
right (``scored.py`` tries some). Invariant: sorted by prediction, every instance gets a contiguous slice; for the
lengths it plans with and instances of one speed, the last slice ends at most one sample's own work after the bound of
``benchmarks/papers/bounds.py``, which no placement beats.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Plan, Problem, by_instance, longest_first
from transport.contracts.continuous_batching import DecodeCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What samples cost one instance, as a sum. For samples that all run at once the price of a set is the exact end of
    its longest (exact ends in general: ``finish_times``).

        end of a set = steps * base + what each sample adds to the steps it is in + arithmetic that outgrows the weights
        steps        = the longest length, or more where slots run out

    base_s: of a step, whatever is in it.  sample_s: what a sample adds to a step.  token_s: what a context token adds.
    free: samples whose arithmetic hides behind the weights.  gemm_s: of each sample beyond those, a step.
    max_running: its own limit of samples.  cost: of memory, what it holds and what samples take of it.
    hand_s, hand_steps: what is in hand adds to every plan: work, and the steps that its longest sample still takes.
    """

    base_s: float
    sample_s: float
    token_s: float
    free: int
    gemm_s: float
    max_running: int
    cost: DecodeCost
    prompt_tokens: float
    hand_s: float = 0.0
    hand_steps: float = 0.0

    @property
    def rate(self) -> tuple[float, float]:
        """Instances of equal rate charge every sample the same work."""
        return self.sample_s, self.token_s

    def slots(self, samples: int, tokens: float, longest: float) -> float:
        """How many of these run at once, each with room for its whole context, or for that of the longest."""
        prompts, kv_tokens = samples * self.prompt_tokens, self.cost.kv_capacity_tokens
        held = self.cost.held_tokens(samples, prompts + tokens, self.prompt_tokens + longest)
        if held <= kv_tokens:
            return self.max_running
        return max(1.0, min(self.max_running, kv_tokens * samples / held))

    def work_s(self, length: float, squared: float) -> float:
        """What a sample adds over its life. length, squared: of its tokens, the mean of each."""
        return length * self.sample_s + self.token_s * (self.prompt_tokens * length + (squared - length) / 2)

    def held_s(self, mean_tokens: float, sigma: float) -> float:
        """Of an instance without room, what a sample takes: its own work, and its part of slots or memory for as
        long as it is there. sigma: of its log length."""
        squared = mean_tokens * mean_tokens * math.exp(sigma * sigma)
        context = self.prompt_tokens * mean_tokens + squared / 2
        part = max(mean_tokens / self.max_running, context / self.cost.kv_capacity_tokens)
        return self.work_s(mean_tokens, squared) + self.base_s * part

    def end_s(
        self, longest: float, work_s: float, samples: int, tokens: float, *, beyond: float = 0.0, last: float = 0.0
    ) -> float:
        """When a set is done, longest first.

        tokens: of all.  last: of the sample that starts last.
        beyond: tokens of all but the ``free`` longest, needed where there are more than those: at every step, the
        samples there beyond ``free`` are as many as there are such samples that long.
        More samples than slots is list scheduling: every slot is busy until the last one starts.
        """
        steps = longest
        slots = self.slots(samples, tokens, longest)
        if samples > slots:
            steps = max(longest, tokens / slots + last * (1 - 1 / slots))
            beyond = tokens * max(0.0, 1 - self.free / slots)
        return self.base_s * max(steps, self.hand_steps) + self.hand_s + work_s + self.gemm_s * beyond


def price(instance: Instance, prompt_tokens: float) -> Pricing:
    """Prices of ``instance``."""
    cost = instance.cost
    priced = Pricing(
        base_s=cost.fixed_s + cost.weights_s,
        sample_s=cost.sample_s,
        token_s=cost.kv_token_s,
        free=int(cost.weights_s / cost.gemm_sample_s) if cost.gemm_sample_s > 0 else instance.max_running,
        gemm_s=cost.gemm_sample_s,
        max_running=instance.max_running,
        cost=cost,
        prompt_tokens=prompt_tokens,
    )
    if not instance.in_hand:
        return priced
    hand_s = sum(priced.work_s(left, left * left) for left in instance.in_hand)
    return replace(priced, hand_s=hand_s, hand_steps=max(instance.in_hand))


def by_rate(prices: Iterable[Pricing]) -> dict[tuple[float, float], Pricing]:
    """One of the instances that charge the same, for each rate: a fleet has a few kinds."""
    return {pricing.rate: pricing for pricing in prices}


# -- one deadline for all


INFLATION = 2.5
"""Standard deviations added to a prediction. Source: ours, StreamRL's 72B workload with its recall of 0.87: 1.3 end
where even dispatch does, 2.5 to 3 end 9% sooner, because it is the longest of a slice that must be within it."""
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
    prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
    order = sorted(range(len(prices)), key=lambda index: _places_longest(prices[index]))
    prices = [prices[index] for index in order]
    groups = longest_first(problem.groups)
    longest = _longest_from(problem, groups, inflation)
    num_before = list(accumulate((group.num_samples for group in groups), initial=0))
    tokens_before = _token_sums(groups)
    work_before = {rate: _work_sums(groups, pricing) for rate, pricing in by_rate(prices).items()}

    def end_s(place: int, start: int, stop: int) -> float:
        """When the instance at ``place`` has done the groups [start, stop)."""
        pricing = prices[place]
        work, before = work_before[pricing.rate], num_before[start]
        samples, tokens, beyond = num_before[stop] - before, tokens_before[stop] - tokens_before[start], 0.0
        if samples > pricing.free:
            beyond = tokens_before[stop] - tokens_before[bisect_left(num_before, before + pricing.free)]
        last = groups[stop - 1].mean_tokens
        return pricing.end_s(longest[start], work[stop] - work[start], samples, tokens, beyond=beyond, last=last)

    def fits_by(deadline_s: float) -> Fits:
        limits_s = [deadline_s * (1 - lead * place / max(1, len(prices) - 1)) for place in range(len(prices))]
        return lambda place, start, stop: end_s(place, start, stop) <= limits_s[place]

    soonest_s = min(end_s(place, 0, 1) for place in range(len(prices)))  # the longest group alone
    cuts = _tightest_cuts(fits_by, len(prices), len(groups), soonest_s, soonest_s, growth=1.5, halvings=HALVINGS)
    return Plan(shares=_shares_of(cuts, groups, order), policy="slicing")


def _places_longest(pricing: Pricing) -> tuple[float, float, float]:
    """Sort key of instances from the longest slice on: quick steps, then room for a group that would wait elsewhere."""
    return pricing.base_s, -pricing.max_running, -pricing.cost.kv_capacity_tokens


def _work_sums(groups: Sequence[GroupLength], pricing: Pricing) -> list[float]:
    """[groups + 1] work of the first 0, 1, 2, ... groups; the square of a lognormal length is larger than that of its
    mean by exp(sigma**2), here without its tail, which lengths are cut before."""
    works = (
        group.num_samples
        * pricing.work_s(group.mean_tokens, group.mean_tokens**2 * (1.0 + group.sigma**2 if group.sigma < 1 else 2.0))
        for group in groups
    )
    return list(accumulate(works, initial=0.0))


# -- batches that follow one another without a gap (the policy "paced")


STEADY_INFLATION = 3.0
"""Standard deviations added to a prediction: one late sample holds up a batch, and the longest of some hundred is that
far out. Source: ours, tuned on simulated seeds that are not reported."""
REACH = 0.85
"""Of the time that the staleness bound leaves a sample: the rest is its place in the queue, scoring, and training."""
MOST_PERIODS = 2.5
"""Times from batch to batch that a sample may take where the bound allows more. With 2 generation is 3% slower. With 3,
a batch now and then is left with the long samples that earlier ones passed on, and waits; and tokens are twice as old.
Source: ours, tuned like ``STEADY_INFLATION``."""
FILL = 0.9
"""Of slots and KV cache that the average may take: the number of running samples varies."""
STEADY_HALVINGS = 12
"""Of a doubled time from batch to batch: the rest, 0.02%, is far below what predictions are worth."""


def steady_slicing(problem: Problem, inflation: float = STEADY_INFLATION) -> Plan:
    """Slices for the shortest time from batch to batch in which every sample stays within ``max_staleness``.

        an instance gets the work ``a`` of its slice every T seconds (a: what the slice adds to the steps it is in)
        it decodes n = tokens * step / T samples at once (Little), so  step = base + a / T * step = base / (1 - a / T)
        the slice's longest sample is in time if                longest * step <= REACH * min(2.5, staleness + 1) * T

    Source: ours. Two-class dispatch (StreamRL sec. 5.3) and deadline slicing end one batch soonest.
    """
    if not problem.groups:
        return Plan(shares=((),) * len(problem.instances), policy="paced")
    costs = [instance.cost for instance in problem.instances]
    order = sorted(range(len(costs)), key=lambda index: (costs[index].fixed_s + costs[index].weights_s, index))
    instances = [problem.instances[index] for index in order]
    groups = longest_first(problem.groups)
    longest = _longest_from(problem, groups, inflation)
    tokens_before = _token_sums(groups)
    context_before = list(accumulate((_context(group, problem.prompt_tokens) for group in groups), initial=0.0))

    def fits_in(period_s: float) -> Fits:
        bound_s = REACH * min(MOST_PERIODS, problem.max_staleness + 1) * period_s

        def keeps_up(place: int, start: int, stop: int) -> bool:
            """Whether the instance at ``place`` keeps up with the slice [start, stop) of every batch."""
            instance = instances[place]
            tokens, context = tokens_before[stop] - tokens_before[start], context_before[stop] - context_before[start]
            step_s = instance.cost.steady_step_s(tokens / period_s, context / period_s)
            held = instance.cost.held_tokens(tokens, context, problem.prompt_tokens + longest[start])
            return (
                longest[start] * step_s <= bound_s
                and tokens * step_s <= FILL * instance.max_running * period_s
                and held * step_s <= FILL * instance.cost.kv_capacity_tokens * period_s
            )

        return keeps_up

    cuts = _tightest_cuts(fits_in, len(instances), len(groups), 0.0, 1.0, growth=2.0, halvings=STEADY_HALVINGS)
    return Plan(shares=_shares_of(cuts, groups, order), policy="paced")


def _context(group: GroupLength, prompt_tokens: float) -> float:
    """Context tokens that are read for all responses of the group, in expectation."""
    square = group.mean_tokens**2 * (1.0 + min(group.sigma, 1.0) ** 2)
    return group.num_samples * (square / 2 + prompt_tokens * group.mean_tokens)


# -- slices


Cuts: TypeAlias = list[int]
"""Where each instance's slice ends, in the order in which instances are filled."""
Fits: TypeAlias = Callable[[int, int, int], bool]
"""(place of the instance, start, stop) -> whether it may have the groups [start, stop).

One more never helps, but where slots or memory run out: more short samples then make the average context shorter, so
that more of them run at once, and the last to start shorter.
"""
PROBES = 6
"""Doubled strides beyond a stop that does not fit at which another is looked for. Source: ours: of random problems in
which slots or memory run out, 3% ended more than 5% later than the best contiguous slices without, see
``tests/unit/test_dispatch_policies.py`` for what is left."""


def _tightest_cuts(
    within: Callable[[float], Fits],
    num_instances: int,
    num_groups: int,
    low: float,
    high: float,
    *,
    growth: float,
    halvings: int,
) -> Cuts:
    """Cuts for about the smallest limit that there are some for: each instance gets as many of the next groups as fit.

    Args: low: no smaller limit can be kept.  high: tried first, and ``growth`` times as much until it can be kept.
          halvings: of the interval that is left then.
    """

    def cuts_within(limit: float) -> Cuts | None:
        """None when some groups are left over."""
        fits, start, cuts = within(limit), 0, Cuts()
        for place in range(num_instances):
            start = _farthest(lambda stop, place=place, start=start: fits(place, start, stop), start, num_groups)
            cuts.append(start)
        return cuts if start == num_groups else None

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


def _farthest(fits: Callable[[int], bool], start: int, num_groups: int) -> int:
    """About the largest stop in [start, num_groups] that fits; ``start`` always does."""

    def upto(low: int, high: int) -> int:
        """The last that fits, were those in [low, high) one after another and ``low`` fits."""
        return low + bisect_left(range(low + 1, high), True, key=lambda stop: not fits(stop))

    if start == num_groups or fits(num_groups):
        return num_groups
    found = upto(start, num_groups)
    stride, beyond = 1, found + 2
    while beyond < num_groups and stride <= 1 << PROBES:
        if fits(beyond):
            found = upto(beyond, num_groups)
            stride, beyond = 1, found + 1
        stride, beyond = 2 * stride, beyond + stride
    return found


def _shares_of(cuts: Cuts, groups: Sequence[GroupLength], order: Sequence[int]) -> tuple[tuple[GroupLength, ...], ...]:
    """The slices of ``groups`` by instance. order: index of the instance that each cut is of."""
    return by_instance([tuple(groups[start:stop]) for start, stop in pairwise([0, *cuts])], order)


def _longest_from(problem: Problem, groups: Sequence[GroupLength], inflation: float) -> list[float]:
    """[groups] the longest sample from each group on, ``inflation`` deviations above its prediction: never rising."""
    inflated = [min(problem.max_tokens, group.inflated(inflation)) for group in groups]
    return list(accumulate(reversed(inflated), max))[::-1]


def _token_sums(groups: Sequence[GroupLength]) -> list[float]:
    """[groups + 1] expected tokens of the first 0, 1, 2, ... groups."""
    return list(accumulate((group.num_samples * group.mean_tokens for group in groups), initial=0.0))
