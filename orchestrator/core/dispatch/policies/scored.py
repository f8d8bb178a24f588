"""Candidates, each tried on the same sampled lengths; the best wins, and even shares are always one of them.

Owns: the choice among plans. Never: their making. Invariant: a plan other than even dispatch is returned only if it
ends sooner by ``MIN_GAIN`` on the mean of the draws; with predictions that are honest about their spread it is then
sooner in expectation, and a ranker that knows nothing, and says so, gets even dispatch, longest first.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist, fmean

from orchestrator.core.dispatch.policies.even import even_longest_first
from orchestrator.core.dispatch.policies.pricing import Pricing, price
from orchestrator.core.dispatch.policies.slicing import by_rate, slicing
from orchestrator.core.dispatch.policies.two_class import two_class_max
from orchestrator.core.dispatch.problem import GroupLength, Plan, Problem
from transport.contracts.types import GroupId

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
    scorer = Scorer.of(problem)
    best = baseline = replace(baseline, end_s=scorer.end_s(baseline))
    for candidate in candidates(problem):
        end_s = scorer.end_s(candidate)
        if end_s < min(best.end_s, (1 - MIN_GAIN) * baseline.end_s):
            best = replace(candidate, end_s=end_s)
    return best


def candidates(problem: Problem) -> Iterator[Plan]:
    """All but even dispatch. With lengths that are certain there is nothing to inflate."""
    yield two_class_max(problem)
    inflations = INFLATIONS if any(group.sigma for group in problem.groups) else (0.0,)
    for inflation in inflations:
        yield slicing(problem, inflation)
    if problem.train_token_s > 0:
        for lead in LEADS:
            yield slicing(problem, inflations[-1], lead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """Draws of a problem's lengths, and what they cost.

    totals: [draws][groups] tokens of all of a group's samples.  works: the same of work, by the rate of the pricing.
    """

    problem: Problem
    prices: list[Pricing]
    draws: list[Draw]
    totals: list[list[float]]
    works: dict[tuple[float, float], list[list[float]]]
    places: dict[GroupId, int]

    @classmethod
    def of(cls, problem: Problem) -> Scorer:
        prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
        certain = not any(group.sigma for group in problem.groups)
        several = max(2, min(DRAWS, DRAWN // len(problem.groups)))
        draws = draw_lengths(problem, 1 if certain else several)
        kinds = by_rate(prices).items()
        works = {rate: [_works(problem.groups, pricing, draw) for draw in draws] for rate, pricing in kinds}
        counts = [group.num_samples for group in problem.groups]
        totals = [list(map(operator.mul, counts, draw.mean)) for draw in draws]
        places = {group.group_id: place for place, group in enumerate(problem.groups)}
        return cls(problem=problem, prices=prices, draws=draws, totals=totals, works=works, places=places)

    def end_s(self, plan: Plan) -> float:
        """The expected end of ``plan``."""
        shares = [[self.places[group.group_id] for group in share] for share in plan.shares]
        samples = [sum(group.num_samples for group in share) for share in plan.shares]
        return fmean(self._end_s(number, shares, samples) for number in range(len(self.draws)))

    def _end_s(self, number: int, shares: list[list[int]], samples: list[int]) -> float:
        if self.problem.train_token_s > 0:
            return training_end_s(self._arrivals(number, shares, samples))
        return max(
            self._share_s(number, index, share, count)
            for index, (share, count) in enumerate(zip(shares, samples, strict=True))
        )

    def _share_s(self, number: int, index: int, share: list[int], samples: int) -> float:
        pricing, draw = self.prices[index], self.draws[number]
        if not share:
            return pricing.end_s(0.0, 0.0, 0, 0.0)
        longest = max(map(draw.longest.__getitem__, share))
        work_s = sum(map(self.works[pricing.rate][number].__getitem__, share))
        totals = self.totals[number]
        tokens = sum(map(totals.__getitem__, share))
        beyond = 0.0
        if samples > pricing.free:
            beyond = sum(sorted(map(totals.__getitem__, share))[: round(len(share) * (1 - pricing.free / samples))])
        return pricing.end_s(longest, work_s, samples, tokens, beyond=beyond, last=draw.mean[share[-1]])

    def _arrivals(self, number: int, shares: list[list[int]], samples: list[int]) -> list[tuple[float, float]]:
        """At ``SHOWN`` moments of each instance: when, and the training of the groups that ended since the last one."""
        arrivals: list[tuple[float, float]] = []
        for index, (share, count) in enumerate(zip(shares, samples, strict=True)):
            if share:
                end_s = self._share_s(number, index, share, count)
                arrivals += self._shown(number, index, share, count, end_s)
        return arrivals

    def _shown(
        self, number: int, index: int, share: list[int], samples: int, end_s: float
    ) -> Iterator[tuple[float, float]]:
        """Groups end in the order of their longest samples; those still there share every step until then.

        Where slots run out the last end is later than that: all moments are stretched to it.
        """
        draw, pricing = self.draws[number], self.prices[index]
        works = self.works[pricing.rate][number]
        places = sorted(share, key=draw.longest.__getitem__)
        done_s = list(accumulate(map(works.__getitem__, places)))
        tokens = list(accumulate(map(self.totals[number].__getitem__, places), initial=0.0))
        prompts = self.problem.prompt_tokens * samples / len(places)
        last_s = pricing.base_s * draw.longest[places[-1]] + done_s[-1]
        stride = max(1, math.ceil(len(places) / SHOWN))
        for first, last in _moments(len(places), stride):
            reached = draw.longest[places[last]]
            partly_s = (
                sum(works[place] * reached / draw.longest[place] for place in places[last + 1 :: stride]) * stride
            )
            at_s = (pricing.base_s * reached + done_s[last] + partly_s) * end_s / last_s
            trained = tokens[last + 1] - tokens[first] + prompts * (last + 1 - first)
            yield min(at_s, end_s), trained * self.problem.train_token_s


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
    return [_draw(chance, parts, problem.max_tokens) for _ in range(num_draws)]


def _parts(group: GroupLength) -> tuple[float, float, float, float]:
    """(median of the group's mean sample, spread of that, factor to its longest, tokens without spread)."""
    if group.num_samples == 1:
        return group.inflated(0.0), group.sigma, 1.0, group.mean_tokens
    own = group.sigma * math.sqrt(1 - SHARED * SHARED)
    shared = group.sigma * SHARED
    middle = group.mean_tokens * math.exp(-shared * shared / 2)
    return middle, shared, math.exp(own * _expected_maximum(group.num_samples) - own * own / 2), group.mean_tokens


def _expected_maximum(count: int) -> float:
    """Of ``count`` standard normal numbers, by Blom's formula: within 2% for every count."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _draw(chance: random.Random, parts: Sequence[tuple[float, float, float, float]], max_tokens: float) -> Draw:
    longest: list[float] = []
    mean: list[float] = []
    for middle, spread, factor, certain in parts:
        tokens = middle * math.exp(spread * chance.gauss(0.0, 1.0)) if spread else certain
        mean.append(min(tokens, max_tokens))
        longest.append(min(tokens * factor, max_tokens))
    return Draw(longest=longest, mean=mean)


def _works(groups: Sequence[GroupLength], pricing: Pricing, draw: Draw) -> list[float]:
    return [
        group.num_samples * pricing.work_s(tokens, tokens * tokens)
        for group, tokens in zip(groups, draw.mean, strict=True)
    ]


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
