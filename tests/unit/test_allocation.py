"""Candidates that fit, and a search that finds the best of them without measuring all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.costs.analytic import DoesNotFitError, check_training_fits, decode_cost
from orchestrator.core.costs.hardware import H20, H800
from orchestrator.core.costs.llms import LLMS, QWEN_7B, QWEN_72B
from orchestrator.planning.allocation import (
    Outcome,
    Pool,
    Split,
    least_training_gpus,
    ranked,
    released,
    score,
    search,
    sizes,
    splits,
)

CONTEXT = 21_000


def pool(count: int, gpu=H800, site: str = "") -> Pool:
    return Pool(gpu=gpu, num_gpus=count, price=gpu.price, site=site)


def candidates(llm, *pools: Pool, minimise="time") -> list[Split]:
    return splits(llm, pools, context_tokens=CONTEXT, max_instances=1024, minimise=minimise)


@pytest.mark.parametrize("minimise", ["time", "cost"])
@pytest.mark.parametrize("llm", [QWEN_7B, QWEN_72B])
def test_every_candidate_fits_and_stays_within_its_pools(llm, minimise):
    pools = (pool(64, H20, "west"), pool(128, H800, "east"))
    found = candidates(llm, *pools, minimise=minimise)
    assert {(s.generation.place, s.training.place) for s in found} >= {("H20@west", "H800@east"), ("H800@east",) * 2}
    for split in found:
        check_training_fits(llm, split.training.gpu, split.training_gpus, split.ranks)
        cost = decode_cost(llm, split.generation.gpu, split.tensor_parallel)
        assert cost.kv_capacity_tokens >= CONTEXT
        assert split.generation_gpus == split.instances * split.tensor_parallel
        assert split.training_gpus == split.ranks * split.training_tensor_parallel * split.pipeline_parallel
        assert min(released(split, pools).values(), default=0) >= 0
    assert len(found) == len(set(found))


def test_the_largest_trainer_is_enough_when_only_time_counts():
    def trainers(minimise: str) -> set[int]:
        return {s.training_gpus for s in candidates(QWEN_72B, pool(128), minimise=minimise) if s.generation_gpus == 40}

    assert trainers("time") == {88, 80}
    assert trainers("cost") == {32, 48, 64, 72, 80, 88}


def test_what_does_not_fit_says_what_would():
    with pytest.raises(DoesNotFitError) as refused:
        candidates(QWEN_72B, pool(16))
    assert str(refused.value) == (
        "Qwen2.5-72B with samples of up to 21000 tokens does not fit into 16xH800. What would: "
        "H800: 4 for an instance, 32 for the trainer, so 36 for both"
    )
    assert candidates(QWEN_72B, pool(36))


@pytest.mark.parametrize("llm", LLMS.values(), ids=LLMS)
@pytest.mark.parametrize("gpu", [H800, H20], ids=["H800", "H20"])
def test_the_least_that_is_said_to_fit_does(llm, gpu):
    least = least_training_gpus(llm, gpu)
    found = splits(llm, [pool(least, gpu, "a"), pool(8, gpu, "b")], context_tokens=4096, max_instances=64)
    assert any(split.training_gpus <= least for split in found)


def test_one_gpu_is_refused_and_two_may_do():
    with pytest.raises(DoesNotFitError, match="so 2 for both"):
        candidates(LLMS["SmolLM2-135M"], pool(1))
    (split,) = candidates(LLMS["SmolLM2-135M"], pool(2))
    assert (split.instances, split.ranks) == (1, 1)


def test_more_instances_than_samples_are_not_offered():
    found = splits(QWEN_7B, [pool(64)], context_tokens=CONTEXT, max_instances=3)
    assert max(split.instances for split in found) <= 3


@given(num_gpus=st.integers(1, 20_000), degree=st.sampled_from([1, 2, 4, 8]))
def test_sizes_are_few_and_whole(num_gpus, degree):
    found = sizes(num_gpus, degree)
    assert len(found) <= 33
    assert all(size % degree == 0 and 0 < size <= num_gpus for size in found)
    assert found or num_gpus < degree


ALL = candidates(QWEN_7B, pool(24))
SOME = ALL[:: len(ALL) // 24]


@given(data=st.data(), minimise=st.sampled_from(["time", "cost"]), at_once=st.integers(1, 3))
def test_the_search_finds_what_brute_force_finds(data, minimise, at_once):
    """Whatever the times are, as long as the bounds are bounds: the score is within the 1% that count as equal."""
    bounds = {split: data.draw(st.floats(1.0, 100.0)) for split in SOME}
    times = {split: bounds[split] * data.draw(st.floats(1.0, 2.0)) for split in SOME}
    measured: list[Split] = []

    def measure(chosen: Sequence[Split]) -> list[float]:
        measured.extend(chosen)
        return [times[split] for split in chosen]

    found = search(SOME, bounds.__getitem__, measure, minimise=minimise, at_once=at_once)
    assert len(measured) == len(set(measured)) == len(found.outcomes)
    assert found.num_cut == 0
    everything = [Outcome(split=split, bound_s=bounds[split], iteration_s=times[split]) for split in SOME]
    least = min(score(outcome, minimise) for outcome in everything)
    assert min(score(outcome, minimise) for outcome in found.outcomes) == least
    assert score(ranked(found.outcomes, minimise)[0], minimise) <= 1.01 * least


def test_good_bounds_spare_most_of_the_measuring():
    seconds = {split: 100.0 * (1 + index) for index, split in enumerate(SOME)}
    found = search(SOME, seconds.__getitem__, lambda chosen: [seconds[split] * 1.05 for split in chosen])
    assert len(found.outcomes) == 1


def test_a_search_that_is_cut_short_says_so():
    found = search(SOME, lambda split: 1.0, lambda chosen: [9.0] * len(chosen), max_measured=5)
    assert (len(found.outcomes), found.num_cut) == (5, len(SOME) - 5)


def test_of_equally_fast_plans_the_cheaper_one_wins_and_the_other_way_round():
    small, large = (next(s for s in ALL if s.generation_gpus == gpus) for gpus in (2, 8))
    few = Outcome(split=small, bound_s=1.0, iteration_s=100.9)
    many = Outcome(split=large, bound_s=1.0, iteration_s=100.0)
    cheaper, dearer = sorted((few, many), key=lambda outcome: outcome.cost)
    assert ranked([many, few], "time") == [cheaper, dearer]
    slow = Outcome(split=small, bound_s=1.0, iteration_s=150.0)
    assert ranked([slow, many], "time")[0] is many


def test_what_is_released_is_said_by_place():
    pools = (pool(64, H20, "west"), pool(32, H800, "east"))
    split = next(
        s
        for s in candidates(QWEN_7B, *pools, minimise="cost")
        if (s.generation.site, s.generation_gpus, s.training.site, s.training_gpus) == ("west", 40, "east", 32)
    )
    assert released(split, pools) == {"H20@west": 24}
    assert split.price == pytest.approx(40 * 1.0 + 32 * 2.85)
