"""What a dispatch plan is made of, and what it says.

Owns: the nouns of planning and the repair of bad input. Never: a choice. Invariant: lengths in a ``Problem`` are finite
and positive, whatever was predicted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import NormalDist, fmean, median
from typing import TypeAlias

from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.types import GroupId, WorkerId

UNKNOWN_SIGMA = 1.0
"""Log-length spread of a prompt of which nothing is known: that of whole workloads (StreamRL fig. 7: about 0.8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLength:
    """One prompt group to be placed.

    mean_tokens: expected response length of one sample; not finite or <= 0 where it is not known.
    sigma: standard deviation of a sample's log length around it, 0 for a prediction that is taken as certain.
    """

    group_id: GroupId
    mean_tokens: float
    sigma: float = 0.0
    num_samples: int = 1

    @property
    def known(self) -> bool:
        return 0 < self.mean_tokens < math.inf

    def inflated(self, deviations: float) -> float:
        """The length ``deviations`` standard deviations above the median."""
        return self.mean_tokens * math.exp(deviations * self.sigma - self.sigma * self.sigma / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One generation instance.

    max_running: samples it decodes at once.  in_hand: expected tokens still to come of each sample it has.
    """

    worker_id: WorkerId
    cost: DecodeCost
    max_running: int
    in_hand: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One batch to be placed.

    groups: as admitted.  instances: in order of joining.  prompt_tokens: of an average prompt.
    max_tokens: no response is longer.  train_token_s: trainer's seconds a token where it trains each sample as it
    comes and the next batch waits for it (synchronous), else 0.
    max_staleness: versions that a sample may be behind; batches overlap where it is above 0.
    tail_share: of the groups, that two-class dispatch counts as long; in (0, 1).
    seed: of the draws of lengths.
    """

    groups: tuple[GroupLength, ...]
    instances: tuple[Instance, ...]
    prompt_tokens: float = 0.0
    max_tokens: float = math.inf
    train_token_s: float = 0.0
    max_staleness: int = 0
    tail_share: float = 0.2
    seed: int = 0


Shares: TypeAlias = tuple[tuple[GroupLength, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who starts what, in which order.

    shares: [instances] of the problem, groups in the order of starting; together every group once.
    policy: what made it.  end_s: forecast on sampled lengths, 0 where none was made.
    """

    shares: Shares
    policy: str
    end_s: float = 0.0


def longest_first(groups: Sequence[GroupLength]) -> list[GroupLength]:
    """Longest predicted first; ties stay in the order of admission."""
    return sorted(groups, key=lambda group: -group.mean_tokens)


QUINTILES = tuple(NormalDist().inv_cdf(share) for share in (0.1, 0.3, 0.5, 0.7, 0.9))
"""Deviations in the middle of each fifth of a group's outcomes."""


def length_quantiles(problem: Problem, shares: Sequence[float]) -> list[float]:
    """Of all samples' lengths to expect, tokens: of each share in [0, 1] the length that so many do not exceed.

    Source: ours. Predictions alone are nearer to their mean than lengths are: what a ranker cannot know is put back.
    """
    outcomes = sorted(
        (min(problem.max_tokens, group.inflated(deviations)), group.num_samples)
        for group in problem.groups
        for deviations in (QUINTILES if group.sigma else (0.0,) * len(QUINTILES))
    )
    upto = list(accumulate(count for _, count in outcomes))
    places = (min(len(outcomes) - 1, bisect_left(upto, share * upto[-1])) for share in shares)
    return [outcomes[place][0] for place in places]


def by_instance(shares: Sequence[tuple[GroupLength, ...]], order: Sequence[int]) -> Shares:
    """``shares``, of the instances ``order``, in the order of the instances."""
    share_of = dict(zip(order, shares, strict=True))
    return tuple(share_of[index] for index in range(len(order)))


def repaired(problem: Problem) -> Problem:
    """The same with every length finite, positive and at most ``max_tokens``.

    A group without a prediction is expected to be like the median of the others, with their spread around it.
    """
    known = [min(group.mean_tokens, problem.max_tokens) for group in problem.groups if group.known]
    middle, spread = median(known) if known else 1.0, UNKNOWN_SIGMA
    if len(known) > 1:
        logs = [math.log(length) for length in known]
        mean = fmean(logs)
        spread = math.sqrt(fmean((log - mean) ** 2 for log in logs))
    groups: list[GroupLength] = []
    for group in problem.groups:
        sigma = group.sigma if 0 <= group.sigma < math.inf else UNKNOWN_SIGMA
        if not group.known:
            group = replace(group, mean_tokens=middle, sigma=max(spread, sigma))
        elif group.mean_tokens > problem.max_tokens or sigma != group.sigma:
            group = replace(group, mean_tokens=min(group.mean_tokens, problem.max_tokens), sigma=sigma)
        groups.append(group)
    return replace(problem, groups=tuple(groups))
