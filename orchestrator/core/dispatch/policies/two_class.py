"""StreamRL's Algorithm 2: few instances for the predicted long tail, the others for the rest.

Owns: the paper's rule, with its objective corrected (as printed: ``benchmarks/papers/rules.py``). Never: a prediction's
spread; the paper has none.
Invariant: the chosen split is the best of all by the paper's own estimate, as a brute-force test checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from orchestrator.core.dispatch.policies.even import even, shares_by_speed
from orchestrator.core.dispatch.policies.slicing import by_instance
from orchestrator.core.dispatch.problem import GroupLength, Instance, Plan, Problem, longest_first

TAIL = 0.2
"""Share of samples that count as long. Source: StreamRL sec. 5.3, alpha = 20."""


def two_class_max(problem: Problem) -> Plan:
    """Both classes run at the same time, so the later one ends the batch; the paper prints the sum of both."""
    return two_class(problem, max, "two_class_max")


def split(
    problem: Problem, objective: Callable[[float, float], float], instances: Sequence[Instance]
) -> tuple[int, int]:
    """(instances for the tail, groups in the tail), both at least 1 and less than all.

    Source: StreamRL Algorithm 2 and Eq. 2; P90 and P50 of the lengths stand for the means of the classes.
    """
    lengths = sorted(group.mean_tokens for group in problem.groups)
    tail = min(len(lengths) - 1, max(1, round(TAIL * len(lengths))))
    per_group = problem.num_samples / len(lengths)
    long_tokens, rest_tokens = _percentile(lengths, 0.9), _percentile(lengths, 0.5)

    def latency(num_long: int) -> float:
        num_rest = len(instances) - num_long
        long_s = instance_latency_s(instances[0], tail * per_group / num_long, long_tokens)
        rest_s = instance_latency_s(instances[-1], (len(lengths) - tail) * per_group / num_rest, rest_tokens)
        return objective(long_s, rest_s)

    return min(range(1, len(instances)), key=latency), tail


def instance_latency_s(instance: Instance, samples: float, mean_tokens: float) -> float:
    """Eq. 2: per-token latency at the batch that fits, times the length, times the number of rounds."""
    fits = min(instance.max_running, max(1.0, instance.cost.kv_capacity_tokens / mean_tokens))
    batch = min(samples, fits)
    return instance.cost.step_s(batch, batch * mean_tokens / 2) * mean_tokens * math.ceil(samples / batch - 1e-9)


def two_class(problem: Problem, objective: Callable[[float, float], float], name: str) -> Plan:
    """The fastest instances for the tail, groups evenly within each class; with one instance there are no classes."""
    if len(problem.instances) < 2 or len(problem.groups) < 2:
        return Plan(shares=even(problem).shares, policy=name)
    by_speed = sorted(range(len(problem.instances)), key=lambda index: problem.instances[index].cost.step_s(1, 0.0))
    instances = [problem.instances[index] for index in by_speed]
    num_long, tail = split(problem, objective, instances)
    groups = longest_first(problem.groups)
    dealt = (*_deal(groups[:tail], instances[:num_long]), *_deal(groups[tail:], instances[num_long:]))
    return Plan(shares=by_instance(dealt, by_speed), policy=name)


def _deal(groups: Sequence[GroupLength], instances: Sequence[Instance]) -> tuple[tuple[GroupLength, ...], ...]:
    return shares_by_speed(groups, instances, sum(group.num_samples for group in groups))


def _percentile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
