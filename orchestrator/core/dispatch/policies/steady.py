"""Steady slicing (the policy "paced"): deadline slicing for pipelines that overlap, whose batches follow without a gap.

Owns: slices for a steady state, and the shortest time from batch to batch that they allow. Never: the ends of one batch
alone (``slicing.py``). Invariant: sorted by prediction, every instance gets a contiguous slice, whose longest sample is
done within its bound of versions while the instance is as busy as it will be with the slices of every batch.

    an instance gets the work ``a`` of its slice every T seconds (a: what the slice adds to the steps it is in)
    it decodes n = tokens * step / T samples at once (Little), so    step = base + a / T * step = base / (1 - a / T)
    the slice's longest sample is in time if                         longest * step <= REACH * min(2, staleness + 1) * T
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf

from orchestrator.core.dispatch.policies.slicing import (
    Cuts,
    greedy_cuts,
    longest_from,
    shares_of,
    tightest_cuts,
    token_sums,
)
from orchestrator.core.dispatch.problem import GroupLength, Instance, Plan, Problem, longest_first
from transport.contracts.continuous_batching import DecodeCost

INFLATION = 3.0
"""Standard deviations added to a prediction: one late sample holds up a batch, and the longest of some hundred is that
far out. Source: ours, tuned on simulated seeds that are not reported."""
REACH = 0.85
"""Of the time that the staleness bound leaves a sample: the rest is its place in the queue, scoring, and training."""
MOST_PERIODS = 2.5
"""Times from batch to batch that a sample may take where the bound allows more. With 2 generation is 3% slower. With 3,
a batch now and then is left with the long samples that earlier ones passed on, and waits; and tokens are twice as old.
Source: ours, tuned like ``INFLATION``."""
FILL = 0.9
"""Of slots and KV cache that the average may take: the number of running samples varies."""
GROWTH = 2.0
"""Of a time from batch to batch that is too short."""
HALVINGS = 12
"""Of the interval that is left then: the rest, 0.02%, is far below what predictions are worth."""


def steady_slicing(problem: Problem, inflation: float = INFLATION) -> Plan:
    """Slices for the shortest time from batch to batch in which every sample stays within ``max_staleness``.

    Source: ours. Two-class dispatch (StreamRL sec. 5.3) and deadline slicing end one batch soonest, which is what
    counts where versions are waited for; where batches overlap, no instance is ever empty, and what counts is how
    fast it follows.
    """
    if not problem.groups:
        return Plan(shares=((),) * len(problem.instances), policy="paced")
    state = _SteadyState.of(problem, inflation)
    cuts = tightest_cuts(state.cuts, 0.0, 1.0, growth=GROWTH, halvings=HALVINGS)
    return Plan(shares=shares_of(cuts, state.groups, state.order), policy="paced")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SteadyState:
    """A problem, sorted, with sums over its prefixes.

    groups: longest first.  longest: the longest sample from each on, inflated.  tokens, context: sums over prefixes, of
    response tokens and of the context that is read for them.  order: instances, the fastest first.
    """

    problem: Problem
    groups: list[GroupLength]
    longest: list[float]
    tokens: list[float]
    context: list[float]
    order: list[int]

    @classmethod
    def of(cls, problem: Problem, inflation: float) -> _SteadyState:
        groups = longest_first(problem.groups)
        costs = [instance.cost for instance in problem.instances]
        return cls(
            problem=problem,
            groups=groups,
            longest=longest_from(problem, groups, inflation),
            tokens=token_sums(groups),
            context=list(accumulate((_context(group, problem.prompt_tokens) for group in groups), initial=0.0)),
            order=sorted(range(len(costs)), key=lambda index: (costs[index].fixed_s + costs[index].weights_s, index)),
        )

    def cuts(self, period_s: float) -> Cuts | None:
        """The largest slices with which instances keep up, or None when batches cannot follow so closely."""
        instances = [self.problem.instances[index] for index in self.order]
        return greedy_cuts(
            len(instances),
            len(self.groups),
            lambda place, start, stop: self._in_time(instances[place], start, stop, period_s),
        )

    def _in_time(self, instance: Instance, start: int, stop: int, period_s: float) -> bool:
        """Whether the instance keeps up with the slice [start, stop) of every batch."""
        tokens, context = self.tokens[stop] - self.tokens[start], self.context[stop] - self.context[start]
        step_s = _steady_step_s(instance.cost, tokens / period_s, context / period_s)
        bound_s = REACH * min(MOST_PERIODS, self.problem.max_staleness + 1) * period_s
        return (
            self.longest[start] * step_s <= bound_s
            and tokens * step_s <= FILL * instance.max_running * period_s
            and context * step_s <= FILL * instance.cost.kv_capacity_tokens * period_s
        )


def _steady_step_s(cost: DecodeCost, tokens_per_s: float, context_per_s: float) -> float:
    """A step of an instance that gets so many response tokens, and context to read for them, every second.

    The larger fixed point of the two sides of the roof; infinite where it cannot keep up.
    """
    read = tokens_per_s * cost.sample_s + context_per_s * cost.kv_token_s
    computed = read + tokens_per_s * cost.gemm_sample_s
    if computed >= 1:
        return inf
    return max((cost.fixed_s + cost.weights_s) / (1 - read), cost.fixed_s / (1 - computed))


def _context(group: GroupLength, prompt_tokens: float) -> float:
    """Context tokens that are read for all responses of the group, in expectation."""
    square = group.mean_tokens**2 * (1.0 + min(group.sigma, 1.0) ** 2)
    return group.num_samples * (square / 2 + prompt_tokens * group.mean_tokens)
