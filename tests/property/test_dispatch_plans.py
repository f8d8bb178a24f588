"""Forecasts against the loop over single steps, plans against every placement there is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bounds import bound_s
from orchestrator.core.dispatch.compute import PLANNERS, plan_dispatch
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Problem, repaired
from orchestrator.core.dispatch.policies.scored import Scorer, training_end_s
from orchestrator.core.dispatch.policies.slicing import price, slicing
from transport.contracts.continuous_batching import DecodeCost, finish_times
from transport.contracts.types import GroupId, WorkerId

COSTS = st.builds(
    DecodeCost,
    fixed_s=st.floats(0.001, 1.0),
    weights_s=st.floats(0.0, 1.0),
    gemm_sample_s=st.sampled_from([0.0, 0.1, 0.4]),
    sample_s=st.sampled_from([0.0, 0.01]),
    kv_token_s=st.sampled_from([0.0, 0.001]),
    kv_capacity_tokens=st.sampled_from([20.0, 60.0, math.inf]),
)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
PREDICTIONS = st.one_of(st.floats(1, 1e5), st.sampled_from([0.0, -3.0, math.nan, math.inf]))


def step_by_step(cost: DecodeCost, lengths: Sequence[int], prompt_tokens: int, max_running: int) -> list[float]:
    """One token of each running sample at a time; a full KV cache is tests/unit/test_continuous_batching.py."""
    ends, left, waiting, now_s = [0.0] * len(lengths), dict[int, int](), list(range(len(lengths))), 0.0
    while waiting or left:
        while waiting and len(left) < max_running:
            sample = waiting.pop(0)
            left[sample] = lengths[sample]
        context = sum(prompt_tokens + lengths[sample] - tokens for sample, tokens in left.items())
        now_s += cost.step_s(len(left), context)
        left = {sample: tokens - 1 for sample, tokens in left.items()}
        for sample in [sample for sample, tokens in left.items() if not tokens]:
            ends[sample] = now_s
            del left[sample]
    return ends


def problem_of(
    lengths: Sequence[float], instances: Sequence[Instance], sigma: float = 0.0, samples: int = 1
) -> Problem:
    groups = tuple(
        GroupLength(group_id=GroupId(str(place)), mean_tokens=length, sigma=sigma, num_samples=samples)
        for place, length in enumerate(lengths)
    )
    return Problem(groups=groups, instances=tuple(instances))


def instances_of(costs: Sequence[DecodeCost], max_running: int = 100) -> list[Instance]:
    return [
        Instance(worker_id=WorkerId(str(place)), cost=cost, max_running=max_running) for place, cost in enumerate(costs)
    ]


@given(cost=COSTS, lengths=LENGTHS, prompt_tokens=st.integers(0, 5), max_running=st.integers(1, 7))
def test_a_forecast_is_the_loop_over_single_steps(cost, lengths, prompt_tokens, max_running):
    cost = msgspec.structs.replace(cost, kv_capacity_tokens=math.inf)
    forecast = finish_times(cost, lengths, prompt_tokens=prompt_tokens, max_running=max_running)
    assert forecast == pytest.approx(step_by_step(cost, lengths, prompt_tokens, max_running), rel=1e-9)


@given(arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
def test_the_end_of_training_is_that_of_a_queue(arrivals):
    free_s = 0
    for at_s, work_s in sorted(arrivals):
        free_s = max(free_s, at_s) + work_s
    assert training_end_s(arrivals) == free_s


@given(cost=COSTS, lengths=LENGTHS, prompt_tokens=st.integers(0, 5))
def test_the_price_of_a_set_that_runs_at_once_is_its_exact_end(cost, lengths, prompt_tokens):
    cost = DecodeCost(
        fixed_s=cost.fixed_s,
        weights_s=2 * cost.gemm_sample_s,  # hides the arithmetic of exactly two samples
        gemm_sample_s=cost.gemm_sample_s,
        sample_s=cost.sample_s,
        kv_token_s=cost.kv_token_s,
    )
    pricing = price(instances_of([cost])[0], prompt_tokens)
    work_s = sum(pricing.work_s(length, length * length) for length in lengths)
    beyond = sum(sorted(lengths, reverse=True)[pricing.free :])
    end_s = pricing.end_s(max(lengths), work_s, len(lengths), sum(lengths), beyond=beyond)
    assert end_s == pytest.approx(max(finish_times(cost, lengths, prompt_tokens=prompt_tokens, max_running=100)))


@settings(max_examples=60)
@given(cost=COSTS, lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), slots=st.integers(1, 5))
def test_no_placement_in_any_order_beats_the_bound(cost, lengths, slots):
    bound = bound_s(cost, lengths, 2)
    for placement in product(range(2), repeat=len(lengths)):
        shares = [
            [length for length, place in zip(lengths, placement, strict=True) if place == one] for one in range(2)
        ]
        for order in (list, sorted, reversed):
            ends = [max(finish_times(cost, list(order(share)), max_running=slots), default=0.0) for share in shares]
            assert max(ends) >= bound * (1 - 1e-5)


@settings(max_examples=60)
@given(cost=COSTS, lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40), count=st.integers(1, 6))
def test_slices_of_known_lengths_are_within_one_sample_of_the_bound(cost, lengths, count):
    cost = DecodeCost(
        fixed_s=cost.fixed_s, weights_s=cost.weights_s, sample_s=cost.sample_s, kv_token_s=cost.kv_token_s
    )
    shares = slicing(problem_of(lengths, instances_of([cost] * count)), 0.0).shares
    ends = [finish_times(cost, [group.mean_tokens for group in share], max_running=100) for share in shares]
    pricing = price(instances_of([cost])[0], 0.0)
    one_sample_s = max(pricing.work_s(length, length * length) for length in lengths)
    assert max(max(end, default=0.0) for end in ends) <= (bound_s(cost, lengths, count) + one_sample_s) * 1.005


@given(
    policy=st.sampled_from(sorted(PLANNERS)),
    predictions=st.lists(PREDICTIONS, max_size=12),
    costs=st.lists(COSTS, max_size=4),
    sigma=st.sampled_from([0.0, 0.3, math.nan]),
    samples=st.integers(1, 4),
    train_token_s=st.sampled_from([0.0, 0.01]),
    in_hand=st.sampled_from([(), (5.0, 200.0)]),
)
def test_a_plan_names_every_group_once_whatever_was_predicted(
    policy, predictions, costs, sigma, samples, train_token_s, in_hand
):
    instances = [replace(instance, in_hand=in_hand) for instance in instances_of(costs, max_running=3)]
    problem = replace(
        problem_of(predictions, instances, sigma, samples), train_token_s=train_token_s, max_tokens=20_000
    )
    plan = plan_dispatch(policy, problem)
    named = sorted(group.group_id for share in plan.shares for group in share)
    assert len(plan.shares) == len(costs)
    assert named == (sorted(group.group_id for group in problem.groups) if costs else [])
    assert plan == plan_dispatch(policy, problem)


@settings(max_examples=50)
@given(
    predictions=st.lists(st.floats(1, 1e4), min_size=1, max_size=40),
    costs=st.lists(COSTS, min_size=2, max_size=4),
    sigma=st.sampled_from([0.0, 0.5]),
    train_token_s=st.sampled_from([0.0, 0.01]),
)
def test_the_best_candidate_is_never_later_than_even_dispatch(predictions, costs, sigma, train_token_s):
    problem = repaired(replace(problem_of(predictions, instances_of(costs), sigma), train_token_s=train_token_s))
    scorer = Scorer(problem)
    even_s, scored_s = (scorer.end_s(plan_dispatch(policy, problem)) for policy in ("even", "scored"))
    assert scored_s == pytest.approx(even_s) or scored_s < 0.99 * even_s
