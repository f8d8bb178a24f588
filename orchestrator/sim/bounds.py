"""What no schedule can beat: the physical bound of an iteration, for a split of GPUs and for the best split.

Simulated iterations take at least as long, on average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from orchestrator.core.costs.analytic import decode_cost, train_cost
from orchestrator.core.costs.hardware import ASSUMED, Assumptions
from orchestrator.sim.scenarios import Layout, Workload
from transport.contracts.continuous_batching import DecodeCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of an iteration that each stage takes at the least, and of its longest sample alone on an instance.

    generation_s: all of its work, at the batch at which a token is cheapest, spread evenly over instances that are
    never empty.  training_s: all of its work spread evenly over the ranks, and one step of the optimizer.
    longest_s: bounds only pipelines in which a version waits for its batch; where batches overlap, it may take as many
    iterations as versions may be behind, and one more.
    """

    generation_s: float
    training_s: float
    longest_s: float

    def iteration_s(self, max_staleness: int) -> float:
        """max(work / capacity, longest sample alone) of the slower stage."""
        return max(self.generation_s, self.training_s, self.longest_s / (max_staleness + 1))


def bound(workload: Workload, layout: Layout, assumed: Assumptions = ASSUMED) -> Bound:
    """The bound of one split of the GPUs."""
    lengths = [float(length) for samples in workload.lengths.lengths for length in samples]
    prompt_tokens = fmean(workload.lengths.questions)
    per_batch = workload.batch * workload.group_size / len(lengths)
    decode = decode_cost(workload.llm, layout.generation_gpu, layout.tensor_parallel, assumed)
    train = train_cost(
        workload.llm, layout.training_gpu, layout.training_gpus, layout.ranks, workload.algorithm, assumed
    )
    question_tokens = prompt_tokens * len(lengths) / workload.group_size  # a group computes its prompt once
    tokens = sum(lengths) + question_tokens
    squares = sum((length + prompt_tokens) ** 2 for length in lengths)
    work_s = per_batch * (tokens * train.token_s + squares * train.squared_token_s) / layout.ranks
    return Bound(
        generation_s=per_batch
        * (_generation_s(decode, lengths, prompt_tokens, layout.slots) + question_tokens * decode.prefill_token_s)
        / layout.instances,
        training_s=work_s + train.step_s(),
        longest_s=decode.steps_s(1, prompt_tokens, max(lengths)),
    )


def _generation_s(cost: DecodeCost, lengths: list[float], prompt_tokens: float, slots: int) -> float:
    """Instance-seconds of all samples' decode steps at the largest batch that memory and slots allow."""
    tokens = sum(lengths)
    context = sum(length * prompt_tokens + length * length / 2 for length in lengths)
    batch = min(float(slots), cost.kv_capacity_tokens / (context / tokens))
    arithmetic_s = max(cost.weights_s / batch, cost.gemm_sample_s)
    return tokens * (cost.fixed_s / batch + arithmetic_s + cost.sample_s) + context * cost.kv_token_s


def best_bound(
    workload: Workload, layouts: list[Layout], max_staleness: int, assumed: Assumptions = ASSUMED
) -> tuple[float, Layout]:
    """The lowest bound of several splits, with slots that memory alone limits, and its split."""
    roomy = [replace(layout, slots=100_000) for layout in layouts]
    bounds = [bound(workload, layout, assumed).iteration_s(max_staleness) for layout in roomy]
    index = min(range(len(bounds)), key=bounds.__getitem__)
    return bounds[index], layouts[index]
