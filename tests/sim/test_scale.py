"""The papers' scale: the bound that nothing beats, what the pipelines gain over one another, and its cost."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from benchmarks.sim import best_bound
from orchestrator.sim.costs import ASSUMED, DoesNotFitError
from orchestrator.sim.engine import SimulationLog
from orchestrator.sim.lengths import error_of_recall, long_tailed, tail_recall
from orchestrator.sim.llms import QWEN_7B
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, bound, scenario
from orchestrator.sim.simulate import simulate
from transport.contracts.messages import TrainRound

BATCHES = 5
WORKLOAD = Workload(lengths=long_tailed(256 * BATCHES, seed=1, recall=0.87), batch=256)
SPLIT = Layout(generation_gpus=16, training_gpus=32, ranks=1, micro_batch_tokens=200_000)


def run(pipeline: str, layout: Layout = SPLIT, dispatch: str = "scored", **options) -> SimulationLog:
    return simulate(scenario(WORKLOAD, layout, PIPELINES[pipeline], iterations=BATCHES, dispatch=dispatch, **options))


@pytest.mark.parametrize("name", PIPELINES)
def test_no_pipeline_beats_the_physical_bound_or_its_staleness(name):
    log = run(name)
    settings = PIPELINES[name]
    assert log.oldest_age <= settings.max_staleness
    limit = bound(WORKLOAD, replace(SPLIT, slots=100_000))
    assert log.published_s[-1] >= BATCHES * max(limit.generation_s, limit.training_s)
    assert sum(log.token_ages.values()) == log.tokens == sum(samples[0] for samples in WORKLOAD.lengths.lengths)


def test_the_papers_order_of_pipelines_holds():
    """StreamRL Table 3 and fig. 5: each step overlaps more than the one before."""
    ends = {name: run(name).end_s for name in ("serial", "mini_batch", "stream", "fully_async", "in_flight")}
    assert ends["serial"] > ends["mini_batch"] > ends["stream"] > ends["fully_async"] > ends["in_flight"]


def test_colocated_gpus_pay_for_switching_and_work_in_turn():
    layout = Layout(generation_gpus=32, training_gpus=32, colocated=True, ranks=1)
    free = msgspec.structs.replace(ASSUMED, switch_s=0.0, host_efficiency=1e9)
    paid, unpaid = (run("serial", layout, trace=True, assumed=assumed) for assumed in (ASSUMED, free))
    costs, free_costs = (
        scenario(WORKLOAD, layout, PIPELINES["serial"], iterations=1, assumed=assumed).costs
        for assumed in (ASSUMED, free)
    )
    leaving_s = costs.publish_s + costs.checkpoint_s - free_costs.publish_s - free_costs.checkpoint_s
    assert paid.published_s[-1] - unpaid.published_s[-1] == pytest.approx(
        BATCHES * (2 * costs.switch_s + leaving_s), rel=0.01
    )
    rounds = [(begin_s, seconds) for begin_s, seconds, command in paid.training if isinstance(command, TrainRound)]
    decoding = [at_s for at_s, _, num_running in paid.batches if num_running]
    assert not any(begin_s < at_s < begin_s + seconds for begin_s, seconds in rounds for at_s in decoding)


def test_recording_and_tracing_change_nothing():
    plain, recorded = run("in_flight"), run("in_flight", record=True, trace=True)
    assert plain.published_s == recorded.published_s
    assert plain.num_events == recorded.num_events == len(recorded.history)
    assert (plain.history, plain.batches, plain.training) == ([], [], [])
    assert recorded.batches
    assert recorded.training


def test_the_best_split_has_the_lowest_bound():
    layouts = [Layout(generation_gpus=gpus, training_gpus=48 - gpus, ranks=1) for gpus in (8, 16)]
    best_s, best = best_bound(WORKLOAD, layouts, PIPELINES["in_flight"])
    assert best in layouts
    assert best_s == min(
        bound(WORKLOAD, replace(one, slots=100_000)).iteration_s(PIPELINES["in_flight"]) for one in layouts
    )


def test_a_split_without_room_for_the_model_is_refused_by_name():
    with pytest.raises(DoesNotFitError, match=r"training Qwen2.5-72B on 8 H800"):
        scenario(WORKLOAD, Layout(generation_gpus=24, training_gpus=8, ranks=1), PIPELINES["stream"], iterations=1)
    small = replace(WORKLOAD, llm=QWEN_7B)
    layout = Layout(generation_gpus=4, training_gpus=8, tensor_parallel=4, ranks=2)
    assert simulate(scenario(small, layout, PIPELINES["stream"], iterations=1)).finish_reason


@pytest.mark.parametrize("recall", [0.6, 0.87, 0.95])
def test_a_ranker_has_the_recall_that_was_asked_for(recall):
    drawn = long_tailed(20_000, seed=5, recall=recall, max_tokens=10**9)
    lengths = [float(samples[0]) for samples in drawn.lengths]
    assert tail_recall(lengths, drawn.predicted, 0.2) == pytest.approx(recall, abs=0.015)
    assert sum(drawn.predicted) == pytest.approx(sum(lengths), rel=0.02), "what it says is what to expect"
    assert error_of_recall(recall) > 0
