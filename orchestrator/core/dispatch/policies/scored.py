"""Candidates, each tried on the same sampled lengths; the best wins, and even shares are always one of them.

Owns: the choice among plans. Never: their making. Invariant: a plan other than even dispatch is returned only if it
ends sooner by ``MIN_GAIN`` on the mean of the draws; with predictions that are honest about their spread it is then
sooner in expectation, and a ranker that knows nothing, and says so, gets even dispatch, longest first.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist, fmean

from orchestrator.core.dispatch.policies.even import balanced, even_longest_first, two_class_max
from orchestrator.core.dispatch.policies.problem import GroupLength, Plan, Problem
from orchestrator.core.dispatch.policies.slicing import by_rate, price, slicing

DRAWS = 6
DRAWN = 50_000
"""At most so many outcomes of all lengths, and at least two; of fewer where that makes more numbers. All candidates see
the same, so what counts is their difference, whose noise is small, the more so in a large batch."""
MIN_GAIN = 0.01
"""Less is within what the closed forms leave out."""
INFLATIONS = (2.0, 2.5, 3.0)
"""What is right grows with the samples in a slice: the longest of a hundred is some 2.5 deviations out."""
LEADS = (0.3, 0.6)
"""For a trainer that takes samples as they come: the short slices are done so much earlier."""
SHARED = math.sqrt(0.5)
"""Half of a prediction's variance is taken as the prompt's, common to its samples. Ours; the core cannot know."""
SHOWN = 8
"""Moments, or a few more, at which an instance's progress is shown to the trainer. Towards the end they are closer,
down to single groups: what arrives last is trained last, and the longest groups are a large part of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One outcome. longest, mean: [groups] tokens of each group's longest and average sample."""

    longest: list[float]
    mean: list[float]


def scored(problem: Problem) -> Plan:
    """The candidate whose end is soonest in expectation: of training where it waits for this batch, else of generation.

    Source: ours, because every single rule of the paper and of ours loses somewhere.
    """
    baseline = even_longest_first(problem)
    if len(problem.instances) < 2 or not problem.groups:
        return baseline
    scorer = Scorer(problem)
    best = baseline = replace(baseline, end_s=scorer.end_s(baseline))
    for candidate in candidates(problem):
        end_s = scorer.end_s(candidate)
        if end_s < min(best.end_s, (1 - MIN_GAIN) * baseline.end_s):
            best = replace(candidate, end_s=end_s)
    return best


def candidates(problem: Problem) -> Iterator[Plan]:
    """All but even dispatch. With lengths that are certain there is nothing to inflate."""
    if waits(problem):
        yield balanced(problem)
    yield two_class_max(problem)
    inflations = INFLATIONS if any(group.sigma for group in problem.groups) else (0.0,)
    for inflation in inflations:
        yield slicing(problem, inflation)
    if problem.train_token_s > 0:
        for lead in LEADS:
            yield slicing(problem, inflations[-1], lead)


def waits(problem: Problem) -> bool:
    """Whether samples of an even share would wait for slots or memory somewhere."""
    parts = len(problem.instances)
    samples = math.ceil(sum(group.num_samples for group in problem.groups) / parts)
    tokens = sum(group.num_samples * group.mean_tokens for group in problem.groups) / parts
    longest = max((group.mean_tokens for group in problem.groups), default=0.0)
    prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
    return any(samples > pricing.slots(samples, tokens, longest) for pricing in prices)


class Scorer:
    """Draws of a problem's lengths, and what they cost.

    _totals: [draws][groups] tokens of all of a group's samples.  _works: the same of work, by the rate of the pricing.
    """

    def __init__(self, problem: Problem) -> None:
        prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
        certain = not any(group.sigma for group in problem.groups)
        draws = draw_lengths(problem, 1 if certain else max(2, min(DRAWS, DRAWN // len(problem.groups))))
        counts = [group.num_samples for group in problem.groups]
        self._problem, self._prices, self._draws = problem, prices, draws
        self._totals = [list(map(operator.mul, counts, draw.mean)) for draw in draws]
        self._works = {
            rate: [
                [count * pricing.work_s(mean, mean * mean) for count, mean in zip(counts, draw.mean, strict=True)]
                for draw in draws
            ]
            for rate, pricing in by_rate(prices).items()
        }
        self._places = {group.group_id: place for place, group in enumerate(problem.groups)}

    def end_s(self, plan: Plan) -> float:
        """The expected end of ``plan``."""
        shares = [[self._places[group.group_id] for group in share] for share in plan.shares]
        samples = [sum(group.num_samples for group in share) for share in plan.shares]
        return fmean(self._end_s(number, shares, samples) for number in range(len(self._draws)))

    def _end_s(self, number: int, shares: list[list[int]], samples: list[int]) -> float:
        ends_s = [self._share_s(number, index, share, samples[index]) for index, share in enumerate(shares)]
        if self._problem.train_token_s <= 0:
            return max(ends_s)
        return training_end_s(
            arrival
            for index, share in enumerate(shares)
            if share
            for arrival in self._shown(number, index, share, samples[index], ends_s[index])
        )

    def _share_s(self, number: int, index: int, share: list[int], samples: int) -> float:
        pricing, draw = self._prices[index], self._draws[number]
        if not share:
            return pricing.end_s(0.0, 0.0, 0, 0.0)
        longest = max(map(draw.longest.__getitem__, share))
        work_s = sum(map(self._works[pricing.rate][number].__getitem__, share))
        totals = self._totals[number]
        tokens = sum(map(totals.__getitem__, share))
        beyond = 0.0
        if samples > pricing.free:
            beyond = sum(sorted(map(totals.__getitem__, share))[: round(len(share) * (1 - pricing.free / samples))])
        return pricing.end_s(longest, work_s, samples, tokens, beyond=beyond, last=draw.mean[share[-1]])

    def _shown(
        self, number: int, index: int, share: list[int], samples: int, end_s: float
    ) -> Iterator[tuple[float, float]]:
        """At ``SHOWN`` moments of an instance: when, and the training of the groups that ended since the last one.

        Groups end in the order of their longest samples; those still there share every step until then. Where slots
        run out the last end is later than that: all moments are stretched to it.
        """
        draw, pricing = self._draws[number], self._prices[index]
        works = self._works[pricing.rate][number]
        places = sorted(share, key=draw.longest.__getitem__)
        done_s = list(accumulate(map(works.__getitem__, places)))
        tokens = list(accumulate(map(self._totals[number].__getitem__, places), initial=0.0))
        prompts = self._problem.prompt_tokens * samples / len(places)
        last_s = pricing.base_s * draw.longest[places[-1]] + done_s[-1]
        stride = max(1, math.ceil(len(places) / SHOWN))
        for first, last in _moments(len(places), stride):
            reached = draw.longest[places[last]]
            partly_s = (
                sum(works[place] * reached / draw.longest[place] for place in places[last + 1 :: stride]) * stride
            )
            at_s = (pricing.base_s * reached + done_s[last] + partly_s) * end_s / last_s
            trained = tokens[last + 1] - tokens[first] + prompts * (last + 1 - first)
            yield min(at_s, end_s), trained * self._problem.train_token_s


def _moments(count: int, stride: int) -> list[tuple[int, int]]:
    """(first, last) of each run of groups that are shown together, the latest runs first: 1, 1, 2, 4, ... stride."""
    runs: list[tuple[int, int]] = []
    last, size = count - 1, 1
    while last >= 0:
        first = max(0, last - size + 1)
        runs.append((first, last))
        last, size = first - 1, min(stride, max(1, count - first))
    return runs


def draw_lengths(problem: Problem, num_draws: int) -> list[Draw]:
    """Outcomes drawn from the predictions' own spread, the same for the same seed."""
    chance = random.Random(problem.seed)
    parts = [_parts(group) for group in problem.groups]
    draws = [Draw(longest=[], mean=[]) for _ in range(num_draws)]
    for draw in draws:
        for middle, spread, factor, certain in parts:
            tokens = middle * math.exp(spread * chance.gauss(0.0, 1.0)) if spread else certain
            draw.mean.append(min(tokens, problem.max_tokens))
            draw.longest.append(min(tokens * factor, problem.max_tokens))
    return draws


def _parts(group: GroupLength) -> tuple[float, float, float, float]:
    """(median of the group's mean sample, spread of that, factor to its longest, tokens without spread)."""
    if group.num_samples == 1:
        return group.inflated(0.0), group.sigma, 1.0, group.mean_tokens
    own = group.sigma * math.sqrt(1 - SHARED * SHARED)
    shared = group.sigma * SHARED
    middle = group.mean_tokens * math.exp(-shared * shared / 2)
    # the expected maximum of so many standard normal numbers, by Blom's formula: within 2% for every count
    maximum = NormalDist().inv_cdf((group.num_samples - 0.375) / (group.num_samples + 0.25))
    return middle, shared, math.exp(own * maximum - own * own / 2), group.mean_tokens


def training_end_s(arrivals: Iterable[tuple[float, float]]) -> float:
    """When a trainer that takes work as it arrives has done it all.

    Args:    arrivals: (second at which it is there, seconds of training it takes), in any order.
    Returns: the largest, over all arrivals, of its second plus the work that arrives then or later: a queue with one
             server is idle only before that arrival and never after.
    Source:  ours; StreamRL sec. 4.1 (stream generation), whose end this is.
    """
    end_s, behind_s = 0.0, 0.0
    for at_s, work_s in sorted(arrivals, reverse=True):
        behind_s += work_s
        end_s = max(end_s, at_s + behind_s)
    return end_s
