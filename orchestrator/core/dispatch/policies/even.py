"""Shares by speed: the same for every instance whatever is predicted, or within two classes of predicted lengths.

Owns: what dispatch is without a ranker, and StreamRL's rule with one. Invariants: on equal instances even shares differ
by one group at most, as long as groups are of one size; the split into classes is the best of all by the paper's own
estimate, as a brute-force test checks.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence

from orchestrator.core.dispatch.policies.problem import (
    GroupLength,
    Instance,
    Plan,
    Problem,
    Shares,
    by_instance,
    length_quantiles,
    longest_first,
)
from orchestrator.core.dispatch.policies.slicing import price


def even(problem: Problem) -> Plan:
    """The groups in order of admission, each to the instance that is least full for its speed.

    Source: StreamRL sec. 5.1, what it calls random dispatching. Differs: instances of unequal speed get unequal shares.
    """
    return Plan(shares=shares_by_speed(problem.groups, problem.instances), policy="even")


def even_longest_first(problem: Problem) -> Plan:
    """The same shares, each started longest first: that needs the order of predictions alone, and a wrong one costs no
    more than the order of admission does.

    Source: ours. Where samples wait for slots, `even` ends batches 5 to 20% later (docs/dispatch.md).
    """
    return Plan(
        shares=tuple(tuple(longest_first(share)) for share in even(problem).shares), policy="even_longest_first"
    )


def shuffled(problem: Problem) -> Plan:
    """The same in an order drawn from the problem's seed, for sources that are sorted."""
    groups = list(problem.groups)
    random.Random(problem.seed).shuffle(groups)
    return Plan(shares=shares_by_speed(groups, problem.instances), policy="random")


def shares_by_speed(groups: Sequence[GroupLength], instances: Sequence[Instance]) -> Shares:
    """Deal groups out in their order; speed is that of a step at the average batch."""
    average = max(1.0, sum(group.num_samples for group in groups) / max(1, len(instances)))
    batches = [min(average, instance.max_running) for instance in instances]
    speeds = [batch / one.cost.step_s(batch, 0.0) for one, batch in zip(instances, batches, strict=True)]
    shares: list[list[GroupLength]] = [[] for _ in instances]
    fill = [(len(one.in_hand) / speed, index) for index, (one, speed) in enumerate(zip(instances, speeds, strict=True))]
    heapq.heapify(fill)
    for group in groups:
        filled, index = fill[0]
        shares[index].append(group)
        heapq.heapreplace(fill, (filled + group.num_samples / speeds[index], index))
    return tuple(map(tuple, shares))


# -- where samples wait for slots or memory: the same time of them for every instance


def balanced(problem: Problem) -> Plan:
    """Longest first, each group to the instance that has least to do, by what its samples hold slots and memory for.

    Where samples wait for room, an instance ends when it has worked through all of them, however long each is; even
    shares differ in it by as much as groups differ in their squares. Source: ours (LPT, Graham 1969).
    """
    prices = [price(instance, problem.prompt_tokens) for instance in problem.instances]
    kinds = {pricing: index for index, pricing in enumerate(prices)}
    held_s = {
        pricing: [pricing.held_s(group.mean_tokens, group.sigma) * group.num_samples for group in problem.groups]
        for pricing in kinds
    }
    fill = [(pricing.hand_s, index) for index, pricing in enumerate(prices)]
    heapq.heapify(fill)
    shares: list[list[GroupLength]] = [[] for _ in prices]
    places = sorted(range(len(problem.groups)), key=lambda place: -problem.groups[place].mean_tokens)
    for place in places:
        filled, index = fill[0]
        shares[index].append(problem.groups[place])
        heapq.heapreplace(fill, (filled + held_s[prices[index]][place], index))
    return Plan(shares=tuple(map(tuple, shares)), policy="balanced")


# -- StreamRL's Algorithm 2: few instances for the predicted long tail, the others for the rest


def two_class_max(problem: Problem) -> Plan:
    """Both classes run at the same time, so the later one ends the batch; the paper prints the sum of both
    (``benchmarks/papers/rules.py``)."""
    return two_class(problem, max, "two_class_max")


def two_class(problem: Problem, objective: Callable[[float, float], float], name: str) -> Plan:
    """The fastest instances for the tail, groups evenly within each class; with one instance there are no classes."""
    if len(problem.instances) < 2 or len(problem.groups) < 2:
        return Plan(shares=even(problem).shares, policy=name)
    by_speed = sorted(range(len(problem.instances)), key=lambda index: problem.instances[index].cost.step_s(1, 0.0))
    instances = [problem.instances[index] for index in by_speed]
    num_long, tail = split(problem, objective, instances)
    groups = longest_first(problem.groups)
    dealt = (
        *shares_by_speed(groups[:tail], instances[:num_long]),
        *shares_by_speed(groups[tail:], instances[num_long:]),
    )
    return Plan(shares=by_instance(dealt, by_speed), policy=name)


def split(
    problem: Problem, objective: Callable[[float, float], float], instances: Sequence[Instance]
) -> tuple[int, int]:
    """(instances for the tail, groups in the tail), both at least 1 and less than all.

    Source: StreamRL Algorithm 2 and Eq. 2; the median of the lengths to expect stands for the mean of the rest, and for
    that of the tail the quantile in its middle: P90 for a tail of 20%.
    """
    count = len(problem.groups)
    tail = min(count - 1, max(1, round(problem.tail_share * count)))
    per_group = sum(group.num_samples for group in problem.groups) / count
    long_tokens, rest_tokens = length_quantiles(problem, (1 - problem.tail_share / 2, 0.5))
    prompt_tokens = problem.prompt_tokens

    def latency(num_long: int) -> float:
        num_rest = len(instances) - num_long
        long_s = instance_latency_s(instances[0], tail * per_group / num_long, long_tokens, prompt_tokens)
        rest_s = instance_latency_s(instances[-1], (count - tail) * per_group / num_rest, rest_tokens, prompt_tokens)
        return objective(long_s, rest_s)

    return min(range(1, len(instances)), key=latency), tail


def instance_latency_s(instance: Instance, samples: float, mean_tokens: float, prompt_tokens: float = 0.0) -> float:
    """Eq. 2: per-token latency at the batch that fits, times the length, times the number of rounds.

    Ours: a sample's context is its prompt and half of its response, and its memory that of both.
    """
    fits = min(instance.max_running, max(1.0, instance.cost.kv_capacity_tokens / (prompt_tokens + mean_tokens)))
    batch = min(samples, fits)
    step_s = instance.cost.step_s(batch, batch * (prompt_tokens + mean_tokens / 2))
    return step_s * mean_tokens * math.ceil(samples / batch - 1e-9)
