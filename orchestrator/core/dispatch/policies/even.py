"""Every instance the same share, whatever is predicted: what dispatch is without a ranker.

Owns: shares by speed alone. Never: lets a prediction say who gets a group. Invariant: on equal instances shares differ
by one group at most, as long as groups are of one size.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from orchestrator.core.dispatch.problem import GroupLength, Instance, Plan, Problem, longest_first


def even(problem: Problem) -> Plan:
    """The groups in order of admission, each to the instance that is least full for its speed.

    Source: StreamRL sec. 5.1, what it calls random dispatching. Differs: instances of unequal speed get unequal shares.
    """
    return Plan(shares=shares_by_speed(problem.groups, problem.instances, problem.num_samples), policy="even")


def even_longest_first(problem: Problem) -> Plan:
    """The same shares, each started longest first: that needs the order of predictions alone, and a wrong one costs no
    more than the order of admission does.

    Source: ours. Where samples wait for slots, `even` ends batches 5 to 20% later (docs/dispatch.md).
    """
    plan = even(problem)
    shares = tuple(tuple(longest_first(share)) for share in plan.shares)
    return Plan(shares=shares, policy="even_longest_first")


def shuffled(problem: Problem) -> Plan:
    """The same in an order drawn from the problem's seed, for sources that are sorted."""
    groups = list(problem.groups)
    random.Random(problem.seed).shuffle(groups)
    return Plan(shares=shares_by_speed(groups, problem.instances, problem.num_samples), policy="random")


def shares_by_speed(
    groups: Sequence[GroupLength], instances: Sequence[Instance], num_samples: int
) -> tuple[tuple[GroupLength, ...], ...]:
    """Deal groups out in their order; speed is that of a step at the average batch."""
    batch = max(1.0, num_samples / max(1, len(instances)))
    speeds = [_samples_per_s(instance, batch) for instance in instances]
    shares: list[list[GroupLength]] = [[] for _ in instances]
    fill = [
        (len(instance.in_hand) / speed, index)
        for index, (instance, speed) in enumerate(zip(instances, speeds, strict=True))
    ]
    heapq.heapify(fill)
    for group in groups:
        filled, index = fill[0]
        shares[index].append(group)
        heapq.heapreplace(fill, (filled + group.num_samples / speeds[index], index))
    return tuple(tuple(share) for share in shares)


def _samples_per_s(instance: Instance, batch: float) -> float:
    batch = min(batch, instance.max_running)
    return batch / instance.cost.step_s(batch, 0.0)
