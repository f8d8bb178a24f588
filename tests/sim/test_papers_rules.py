"""The papers' rules as printed: what they say, and what is wrong with them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.rules import cross_datacenter, plan_of, single_datacenter
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Problem
from orchestrator.core.model.autoscale import Iteration, Scaling
from orchestrator.core.model.settings import ScalingSettings
from transport.contracts.continuous_batching import DecodeCost, finish_times
from transport.contracts.types import GroupId, WorkerId


def work(seconds: float, fits: int = 1):
    return lambda gpus: seconds / gpus if gpus >= fits else math.inf


@given(
    num_gpus=st.integers(2, 24),
    generation=st.floats(1.0, 100.0),
    training=st.floats(1.0, 100.0),
    floor=st.floats(0.0, 10.0),
)
def test_single_datacenter_equals_brute_force(num_gpus, generation, training, floor):
    def generation_s(gpus: int) -> float:
        return floor + generation / gpus

    x, y = single_datacenter(num_gpus, generation_s, work(training))
    least = min(
        max(generation_s(a), training / b) for a in range(1, num_gpus) for b in range(1, num_gpus) if a + b <= num_gpus
    )
    assert x + y <= num_gpus
    assert max(generation_s(x), training / y) == least


def test_sizes_and_memory_are_respected():
    assert single_datacenter(32, work(100.0), work(300.0), sizes=[8, 16, 24]) == (8, 24)
    assert single_datacenter(8, work(10.0), work(10.0, fits=8)) == (0, 0)


def test_the_faster_stage_of_two_datacenters_is_shrunk():
    assert cross_datacenter(32, 16, work(160.0), work(160.0)) == (16, 16)
    assert cross_datacenter(16, 32, work(160.0), work(160.0)) == (16, 16)


def test_flaw_the_nearest_time_may_be_the_slower_one():
    """Both stages were given 10 s; 11 GPUs generate in 9.5 s, 10 in 10.45 s, which is nearer and slows everything."""
    x, y = cross_datacenter(16, 10, work(104.5), work(100.0), generation_sizes=[8, 10, 11, 16])
    assert (x, y) == (10, 10)
    assert 104.5 / x > 100.0 / y


def test_flaw_the_first_of_equal_maxima_may_hold_more_than_it_uses():
    """Generation is bound by its longest sample: every x ties, and nothing asks for the fewest training GPUs."""
    x, y = single_datacenter(16, lambda gpus: 10.0, lambda gpus: 5.0 + 1.0 / gpus)
    assert (x, y) == (1, 1)
    x, y = single_datacenter(16, lambda gpus: 10.0 + 0.001 / gpus, lambda gpus: 5.0)
    assert (x, y) == (15, 1), "fourteen GPUs for a ten-thousandth"


def test_flaw_balance_is_not_the_best_of_a_synchronous_stream():
    """After the last sample the trainer still has its share of it to do: generation has to end earlier than balance."""
    generation_s, training_s, late = work(100.0), work(100.0), 0.4

    def stream_s(x: int, y: int) -> float:
        return max(generation_s(x) + late * training_s(y), training_s(y))

    x, y = single_datacenter(20, generation_s, training_s)
    best = min(stream_s(a, 20 - a) for a in range(1, 20))
    assert (x, y) == (10, 10)
    assert stream_s(x, y) > best * 1.02


def test_a_gap_that_workers_do_not_close_is_fed_forever():
    """The longest sample is the end of generation: the printed delta' is 0, and delta >= 0 fires for ever."""
    settings, workers = ScalingSettings(rule="gap", max_workers=8), [4]
    for batch in range(6):
        stuck = Iteration(batch=batch, workers=workers[-1], generation_s=10.0, training_s=5.0)
        change = Scaling().observe(settings, stuck, lambda workers: 10.0 + 1e-9 / workers)
        if change is not None:
            workers.append(change.to_workers)
    assert workers == [4, 5, 6, 7, 8]


def test_the_sum_of_both_classes_is_the_wrong_objective():
    """As printed, Algorithm 2 may end later than with the maximum, never the other way round by its estimate."""
    chance = random.Random(0)
    groups = tuple(
        GroupLength(group_id=GroupId(f"0/{place}"), mean_tokens=min(20_000.0, 50 * chance.paretovariate(0.6)))
        for place in range(400)
    )
    cost = DecodeCost(fixed_s=0.01, weights_s=0.01, sample_s=0.0005)
    instances = tuple(
        Instance(worker_id=WorkerId(f"generate-{place}"), cost=cost, max_running=400) for place in range(8)
    )
    problem = Problem(groups=groups, instances=instances)

    def end_s(policy: str) -> float:
        shares = [[group.mean_tokens for group in share] for share in plan_of(policy, problem).shares]
        return max(max(finish_times(cost, share, max_running=400)) for share in shares if share)

    assert end_s("two_class_max") < end_s("two_class_sum")


@pytest.mark.parametrize("sizes", [[], [1]])
def test_one_gpu_cannot_be_split(sizes):
    assert single_datacenter(1, work(1.0), work(1.0), sizes) == (0, 0)
