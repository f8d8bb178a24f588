"""Paced slicing: slices for batches that follow one another without a gap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.dispatch.compute import plan_dispatch
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Plan, Problem
from orchestrator.core.dispatch.policies.slicing import steady_slicing
from orchestrator.sim.costs import H800, decode_cost
from orchestrator.sim.llms import QWEN_72B
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.types import GroupId, WorkerId

COST = decode_cost(QWEN_72B, H800, 8)


def problem(lengths: list[float], *, costs: list[DecodeCost], sigma: float = 0.0, max_staleness: int = 1) -> Problem:
    groups = [
        GroupLength(group_id=GroupId(f"0/{place}"), mean_tokens=tokens, sigma=sigma)
        for place, tokens in enumerate(lengths)
    ]
    instances = [
        Instance(worker_id=WorkerId(f"w{place}"), cost=cost, max_running=256) for place, cost in enumerate(costs)
    ]
    return Problem(groups=tuple(groups), instances=tuple(instances), prompt_tokens=500, max_staleness=max_staleness)


def tokens_of(plan: Plan) -> list[list[float]]:
    return [[group.mean_tokens for group in share] for share in plan.shares]


def long_tail() -> list[float]:
    return [20_000.0] * 40 + [12_000.0] * 80 + [5_000.0] * 400 + [2_000.0] * 500


@settings(max_examples=40)
@given(st.lists(st.floats(1, 20_000), min_size=0, max_size=60), st.integers(1, 5), st.integers(0, 3))
def test_every_group_is_planned_once_in_contiguous_slices(lengths, num_instances, max_staleness):
    plan = steady_slicing(problem(lengths, costs=[COST] * num_instances, max_staleness=max_staleness, sigma=0.3))
    assert sorted(tokens for share in tokens_of(plan) for tokens in share) == sorted(lengths)
    assert len(plan.shares) == num_instances
    slices = [share for share in tokens_of(plan) if share]
    assert all(min(earlier) >= max(later) for earlier, later in pairwise(slices))


def test_long_samples_get_small_batches():
    """The work of a slice grows as its samples get shorter: their instance may be slower."""
    shares = tokens_of(steady_slicing(problem(long_tail(), costs=[COST] * 4)))
    counts = [len(share) for share in shares]
    assert counts == sorted(counts)
    assert counts[0] < 60
    assert max(shares[-1]) <= 5_000


def test_a_looser_bound_evens_the_slices_out():
    tight, loose = (tokens_of(steady_slicing(problem(long_tail(), costs=[COST] * 4, max_staleness=s))) for s in (0, 1))
    assert len(loose[0]) > len(tight[0])


def test_the_fastest_instance_gets_the_longest_samples():
    slow = DecodeCost(fixed_s=2 * COST.fixed_s, weights_s=2 * COST.weights_s, kv_token_s=COST.kv_token_s)
    shares = tokens_of(steady_slicing(problem(long_tail(), costs=[slow, COST])))
    assert min(shares[1]) >= max(shares[0])


@pytest.mark.parametrize("lengths", [[], [0.0], [float("nan"), 100.0], [-5.0, 10.0, float("inf")], [100.0] * 9])
def test_bad_predictions_are_planned_all_the_same(lengths):
    plan = plan_dispatch("paced", problem(lengths, costs=[COST] * 2))
    assert sum(len(share) for share in plan.shares) == len(lengths)
    assert plan_dispatch("paced", problem(lengths, costs=[])).shares == ()
