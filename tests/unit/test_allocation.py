"""Candidates that fit, and a search that finds the best of them without measuring all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.plan import as_toml
from orchestrator.config.load import resolve
from orchestrator.core.model.settings import core_settings
from orchestrator.planning.allocation import (
    MeasuredSplit,
    Pool,
    Split,
    least_training_gpus,
    ranked,
    released,
    search,
    sizes,
    splits,
)
from orchestrator.planning.plan_search import (
    LONG,
    SHORT,
    Job,
    Prediction,
    bound_of,
    planned,
    run_settings,
    simulation_of,
)
from orchestrator.sim.costs import (
    GPUS,
    H20,
    H800,
    DoesNotFitError,
    decode_cost,
    training_misfit,
)
from orchestrator.sim.llms import HUB, LLMS, QWEN_7B, QWEN_72B
from orchestrator.sim.scenarios import PIPELINES
from transport.contracts.training_memory import USABLE_SHARE, Layout, check_layout, choose_layout, training_of

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
        assert training_misfit(llm, split.training.gpu, split.training_gpus, split.ranks) == ""
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
    least = least_training_gpus(llm, gpu, 4096)
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
    assert len(measured) == len(set(measured)) == len(found.measured)
    assert found.num_cut == 0
    everything = [MeasuredSplit(split=split, iteration_s=times[split]) for split in SOME]
    least = min(outcome.score(minimise) for outcome in everything)
    assert min(outcome.score(minimise) for outcome in found.measured) == least
    assert ranked(found.measured, minimise)[0].score(minimise) <= 1.01 * least


def test_good_bounds_spare_most_of_the_measuring():
    seconds = {split: 100.0 * (1 + index) for index, split in enumerate(SOME)}
    found = search(SOME, seconds.__getitem__, lambda chosen: [seconds[split] * 1.05 for split in chosen])
    assert len(found.measured) == 1


def test_a_search_that_is_cut_short_says_so():
    found = search(SOME, lambda split: 1.0, lambda chosen: [9.0] * len(chosen), max_measured=5)
    assert (len(found.measured), found.num_cut) == (5, len(SOME) - 5)


def test_of_equally_fast_plans_the_cheaper_one_wins_and_the_other_way_round():
    small, large = (next(s for s in ALL if s.generation_gpus == gpus) for gpus in (2, 8))
    few = MeasuredSplit(split=small, iteration_s=100.9)
    many = MeasuredSplit(split=large, iteration_s=100.0)
    cheaper, dearer = sorted((few, many), key=lambda outcome: outcome.score("cost"))
    assert ranked([many, few], "time") == [cheaper, dearer]
    slow = MeasuredSplit(split=small, iteration_s=150.0)
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


# -- what is advised can be run


def drawn(chance: random.Random, **fields) -> Job:
    """Lengths of any spread, groups of other sizes than they were read with, any pipeline."""
    size = chance.choice([2, 4])
    spread = chance.choice([0.0, 0.5, 1.2])
    groups = [
        tuple(1 + min(3000, round(200 * chance.lognormvariate(0, spread))) for _ in range(chance.choice([1, size, 7])))
        for _ in range(chance.choice([1, 5, 40]))
    ]
    random_fields = {
        "pipeline": chance.choice(list(PIPELINES)),
        "batch": chance.choice([1, 2, 7, 16]),
        "group_size": size,
        "prompt_tokens": chance.choice([0, 50, 1000]),
        "recall": chance.choice([None, 0.75]),
        "seed": chance.randrange(9),
    }
    job = Job(**{"groups": tuple(groups), **random_fields, **fields})
    can_defer = job.settings.membership == "fixed" and job.batch > 1
    return replace(
        job, probes=chance.random() < 0.3, deferred=chance.choice([0, 1, job.batch // 2]) if can_defer else 0
    )


def of_job(job: Job, *pools: Pool) -> list[Split]:
    return splits(
        job.llm,
        pools,
        context_tokens=job.context_tokens,
        max_instances=job.samples,
        max_ranks=job.batch,
        minimise="cost",
        assumed=job.assumed,
    )


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_no_schedule_beats_its_bound(seed):
    """As simulated, before a plan says the longer of both. What was generated before a window began is all that it may
    be short of: at most one batch for each version that samples may lag, and the one under way."""
    chance = random.Random(seed)
    job = drawn(chance, llm=LLMS[chance.choice(["SmolLM2-135M", "SmolLM2-1.7B"])])
    split = chance.choice(of_job(job, pool(chance.choice([2, 3, 8]), chance.choice(list(GPUS.values())))))
    window = chance.choice([SHORT, LONG])
    seconds = simulation_of(job, window, split, trace=False).iteration_s(window.warm_up, window.cool_down)
    least, lag = bound_of(job, job.workload(1), split), job.settings.max_staleness + job.settings.defers
    counted = window.iterations - window.warm_up - window.cool_down
    ahead = max(0.0, 1 - (lag + 1) / counted) if lag else 1.0
    assert seconds >= ahead * least.generation_s
    assert seconds >= ahead * least.longest_s / (lag + 1)
    if job.settings.membership == "fixed":
        assert seconds >= (1 - 1e-9) * least.training_s


@pytest.mark.parametrize("llm", LLMS.values(), ids=LLMS)
def test_every_plan_is_one_that_our_trainer_runs_and_its_settings_are_accepted(llm, tmp_path: Path):
    chance = random.Random(llm.name)
    accepted = 0
    for gpu in GPUS.values():
        for count in (2, 8, 24):
            job = drawn(chance, llm=llm)
            try:
                found = of_job(job, pool(count, gpu, "here"))
            except DoesNotFitError:
                continue
            for split in chance.sample(found, min(len(found), 4)):
                layout = Layout(
                    data=split.ranks, tensor=split.training_tensor_parallel, pipeline=split.pipeline_parallel
                )
                check_layout(llm, layout, ranks=split.training_gpus)
                path = tmp_path / "plan.toml"
                engine = chance.choice(["sglang", "vllm"])
                path.write_text(as_toml(run_settings(job, predicted(split), engine, HUB[llm.name]), split))
                read = resolve(None, [path], [], {}).settings
                assert (read.trainer.ranks, read.generation.workers) == (split.training_gpus, split.instances)
                training = training_of(read, compute_bytes=2, on_gpu=True)
                usable = gpu.memory_bytes * USABLE_SHARE
                assert choose_layout(llm, read.trainer.ranks, usable, training, read.trainer.parallel) == layout
                assert read.model.path == HUB[llm.name]
                core = core_settings(read)
                assert (core.defers, core.probes) == (job.deferred > 0, job.probes)
                assert core.oversampled_groups == job.deferred
                accepted += 1
    assert accepted


def predicted(split: Split) -> Prediction:
    return Prediction(
        split=split, iteration_s=400.0, bound=None, transfer_s=0, generation_idle=0, generation_thin=0, trainer_idle=0,
        mean_age=0, oldest_age=0
    )  # fmt: skip


def test_what_no_number_of_gpus_trains_says_which_memory_is_missing():
    small = msgspec.structs.replace(H800, name="small", memory_bytes=16e9)
    job = drawn(random.Random(0), llm=QWEN_7B, groups=((60_000,),), prompt_tokens=100, algorithm="grpo")
    with pytest.raises(DoesNotFitError) as refused:
        of_job(job, pool(64, small), pool(8))
    said = str(refused.value)
    assert "no number of them for the trainer: with the longest sample in a micro-batch, 64 of them for one" in said
    assert "14.4 GB are usable; it takes shorter samples, or --recompute whole" in said
    assert of_job(replace(job, assumed=planned("whole")), pool(64, small), pool(8))


def test_a_model_of_more_than_one_gpu_is_planned_as_the_trainer_shares_it():
    job = drawn(random.Random(0), llm=QWEN_72B, groups=((2000,),), prompt_tokens=100, batch=16)
    found = of_job(job, pool(64))
    assert min(split.training_gpus for split in found) * 72e9 > 16 * QWEN_72B.params
    assert all(split.ranks > 1 or split.training_tensor_parallel > 1 for split in found)
