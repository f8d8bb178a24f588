"""Named pipelines, and workloads at the papers' scale: scenarios from an LLM, GPUs and a split of them, and what no
schedule of one can beat.

Pipelines differ in settings of the core only, so each runs live as it runs here (``docs/modes.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import msgspec

from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.costs import (
    ASSUMED,
    GPUS_PER_NODE,
    H800,
    Algorithm,
    Assumptions,
    Gpu,
    TrainCost,
    crossing_s,
    decode_cost,
    gather_s,
    save_s,
    switch_s,
    train_cost,
    transfer_s,
)
from orchestrator.sim.engine import CostModel, Scenario
from orchestrator.sim.lengths import RecordedLengths
from orchestrator.sim.llms import QWEN_72B
from transport.contracts.continuous_batching import DecodeCost, Drafts, cheapest
from transport.contracts.llms import BF16, Fp8, Llm
from transport.contracts.types import UpdateMode

HEARTBEAT_S = 60.0
"""Of simulated workers and ticks at this scale: nothing is lost here, so no decision waits for one."""
SCORING_S = 0.05
"""Of a group on a machine that was profiled, which says nothing of rewards: those of the quickstarts."""
NO_TIMEOUT_S = 1e9
PARTIAL_S = 5.0
"""Between two times that tokens of running samples are kept, of pipelines that defer tails or have probes. A run's
default is 1 s, which loses less and simulates more events."""
MINI_BATCHES = 4
"""Of a batch, where the trainer waits for mini-batches: StreamRL sec. 4.1 leaves the constant to the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained. batch: prompts, with ``group_size`` samples each."""

    llm: Llm = QWEN_72B
    lengths: RecordedLengths
    batch: int = 1024
    group_size: int = 1
    algorithm: Algorithm = "ppo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which GPUs do what. colocated: the same GPUs do both in turn, and ``training_gpus`` are those of generation.

    tensor_parallel: GPUs of one generation instance.  ranks: data-parallel ranks of the trainer.
    slots: samples that an instance decodes at once, at most.  micro_batch_tokens: of one rank and round, at most.
    round_tokens: of one rank, that a round waits for while more of its batch is to come; None: what saturates a rank.
    drafts: acceptance of a drafted token on every instance; 0: nothing is drafted.
    draft_depth: tokens that are drafted at every step, as SGLang and vLLM do; 0: as many as take least, as ours does.
    fp8: what every instance holds in it.
    link_bytes_per_s: between the sites of training and generation; 0: there is but one.
    """

    generation_gpus: int
    training_gpus: int
    tensor_parallel: int = 8
    ranks: int = 4
    generation_gpu: Gpu = H800
    training_gpu: Gpu = H800
    colocated: bool = False
    slots: int = 256
    micro_batch_tokens: int = 65_536
    round_tokens: int | None = None
    drafts: float = 0.0
    draft_depth: int = 0
    fp8: Fp8 = BF16
    link_bytes_per_s: float = 0.0

    @property
    def instances(self) -> int:
        return self.generation_gpus // self.tensor_parallel

    def decode_cost(self, llm: Llm, assumed: Assumptions = ASSUMED) -> DecodeCost:
        """Of an instance without drafts."""
        return decode_cost(llm, self.generation_gpu, self.tensor_parallel, assumed, fp8=self.fp8)

    def train_cost(self, llm: Llm, algorithm: Algorithm, assumed: Assumptions = ASSUMED) -> TrainCost:
        """Of a rank of the trainer."""
        return train_cost(llm, self.training_gpu, self.training_gpus, self.ranks, algorithm, assumed)

    def drafting(self, assumed: Assumptions = ASSUMED) -> Drafts | None:
        """How instances draft; None where they do not."""
        if not self.drafts:
            return None
        return Drafts(
            acceptance=self.drafts,
            max_tokens=self.draft_depth or round(assumed.draft_tokens),
            draft_s=assumed.draft_s,
            every_step=self.draft_depth > 0,
        )

    @property
    def generation_hosts(self) -> int:
        return -(-self.generation_gpus // GPUS_PER_NODE)

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.generation_gpus + (0 if self.colocated else self.training_gpus)

    def transfer_s(self, llm: Llm, assumed: Assumptions = ASSUMED) -> float:
        """Until a version of the trainer's weights is at every instance."""
        slower = min(self.training_gpu.network_bytes_per_s, self.generation_gpu.network_bytes_per_s)
        node = GPUS_PER_NODE * slower
        if self.link_bytes_per_s:
            return crossing_s(llm, node, self.link_bytes_per_s, self.generation_hosts, assumed)
        return transfer_s(llm, node, self.instances, assumed)


_pipeline = partial(CoreSettings, num_batches=1, groups_per_batch=1, group_size=1, rollout_timeout_s=NO_TIMEOUT_S)

PIPELINES: dict[str, CoreSettings] = {
    "serial": _pipeline(max_staleness=0, release="batch", update=UpdateMode.BARRIER),
    "mini_batch": _pipeline(max_staleness=0, release="mini_batch", update=UpdateMode.BARRIER),
    "stream": _pipeline(max_staleness=0, release="stream", update=UpdateMode.BARRIER),
    "one_step_batch": _pipeline(max_staleness=1, release="batch", update=UpdateMode.TOGETHER),
    "fully_async": _pipeline(max_staleness=1, release="stream", update=UpdateMode.BARRIER),
    "enlarged": _pipeline(max_staleness=1, rollout_batches=2, update=UpdateMode.BARRIER),
    "sub_step": _pipeline(max_staleness=1, release="stream", update=UpdateMode.STAGGERED),
    "in_flight": _pipeline(max_staleness=1, release="stream", update=UpdateMode.IN_FLIGHT),
    "rolling": _pipeline(max_staleness=1, update=UpdateMode.IN_FLIGHT, membership="rolling"),
    "rolling_staggered": _pipeline(max_staleness=1, update=UpdateMode.STAGGERED, membership="rolling"),
    "rolling_2": _pipeline(max_staleness=2, update=UpdateMode.IN_FLIGHT, membership="rolling"),
    "in_flight_2": _pipeline(max_staleness=2, release="stream", update=UpdateMode.IN_FLIGHT),
}
"""Name -> settings of the core. AsyncFlow's delayed parameter update is "fully_async" (``docs/modes.md``); StreamRL's
colocated baseline is "serial" on a colocated layout."""


def takes_turns(pipeline: CoreSettings) -> bool:
    """Whether nothing is generated while the trainer works, so that the same GPUs can do both."""
    return pipeline.max_staleness == 0 and pipeline.release == "batch" and pipeline.update is UpdateMode.BARRIER


def shortened(pipeline: CoreSettings, *, probes: bool = False, deferred: int = 0) -> CoreSettings:
    """``pipeline`` with what shortens its tail: a probe of each group, so many groups deferred to the next batch."""
    tail = "defer" if deferred else pipeline.oversampled_tail
    return msgspec.structs.replace(pipeline, probes=probes, oversampled_groups=deferred, oversampled_tail=tail)


def scenario(
    workload: Workload,
    layout: Layout,
    pipeline: CoreSettings,
    *,
    iterations: int,
    assumed: Assumptions = ASSUMED,
    dispatch: str = "scored",
    record: bool = False,
    trace: bool = False,
) -> Scenario:
    """One run of ``pipeline``. dispatch: as the setting. Raises DoesNotFitError when the LLM does not fit."""
    decode = layout.decode_cost(workload.llm, assumed)
    costs = _costs(workload, layout, assumed)
    if pipeline.defers or pipeline.probes:
        costs = replace(costs, partial_s=PARTIAL_S)
    core = msgspec.structs.replace(
        pipeline,
        num_batches=iterations,
        groups_per_batch=workload.batch,
        group_size=workload.group_size,
        mini_batch_groups=max(1, workload.batch // MINI_BATCHES),
        micro_batch_tokens=layout.micro_batch_tokens,
        round_tokens=layout.round_tokens if layout.round_tokens is not None else costs.train.saturating_tokens(),
        dispatch=dispatch,
        decode_cost=planned_cost(workload, layout, assumed),
        train_token_s=costs.train.token_s / layout.ranks,
        max_response_tokens=max(max(samples) for samples in workload.lengths.lengths),
        checkpoint_every=1,
        max_retained_bytes=1 << 62,
    )
    return Scenario(
        core=core,
        workers=layout.instances,
        capacity=layout.slots,
        dp_size=layout.ranks,
        lengths=workload.lengths,
        costs=costs,
        decode=(decode,) * layout.instances,
        max_s=1e9,
        record=record,
        trace=trace,
    )


def planned_cost(workload: Workload, layout: Layout, assumed: Assumptions = ASSUMED) -> DecodeCost:
    """What plans of dispatch reckon with: one depth of drafts, the cheapest for half of the batch that fits."""
    costs = _drafted_costs(workload, layout, assumed)
    return costs[_cheapest_depth(costs, workload, layout, share=0.5)]


def drafting_always(
    workload: Workload, layout: Layout, assumed: Assumptions = ASSUMED, *, drains: bool = False
) -> Layout:
    """Of engines that draft equally many tokens at every step: as many as is cheapest for half of the batch that fits,
    and none where drafts lose there.

    drains: instances run empty before the next batch begins; then for a quarter, as the long ones are left alone.
    """
    costs = _drafted_costs(workload, layout, assumed)
    depth = _cheapest_depth(costs, workload, layout, share=0.25 if drains else 0.5)
    return replace(layout, draft_depth=depth) if depth else replace(layout, drafts=0.0)


def _drafted_costs(workload: Workload, layout: Layout, assumed: Assumptions) -> tuple[DecodeCost, ...]:
    """By the tokens that are drafted a step, of which the layout leaves a choice."""
    decode, drafts = layout.decode_cost(workload.llm, assumed), layout.drafting(assumed)
    return (decode,) if drafts is None else drafts.costs(decode)


def _cheapest_depth(costs: Sequence[DecodeCost], workload: Workload, layout: Layout, share: float) -> int:
    """Which of them is the cheapest for this share of the batch that fits."""
    if len(costs) == 1:
        return 0
    mean = fmean(length for samples in workload.lengths.lengths for length in samples)
    context = fmean(workload.lengths.questions) + mean / 2
    batch = share * min(layout.slots, costs[0].kv_capacity_tokens / context)
    return costs.index(cheapest(costs, batch, batch * context))


def _costs(workload: Workload, layout: Layout, assumed: Assumptions) -> CostModel:
    llm, gpu = workload.llm, layout.training_gpu
    trainer, engine = gpu.measured, layout.generation_gpu.measured
    costs = CostModel(
        train=layout.train_cost(llm, workload.algorithm, assumed),
        publish_s=gather_s(llm, gpu, layout.training_gpus, layout.ranks, assumed),
        transfer_s=layout.transfer_s(llm, assumed),
        load_s=engine.load_s if engine is not None else assumed.load_s,
        checkpoint_s=save_s(llm, gpu, layout.training_gpus, workload.algorithm, assumed),
        scoring_s=SCORING_S if trainer is not None else assumed.scoring_s,
        drafts=layout.drafting(assumed),
        noise=0.0 if trainer is not None else assumed.noise,
        heartbeat_s=HEARTBEAT_S,
    )
    if trainer is not None and trainer == engine:  # one machine, as it was profiled
        share = trainer.sharing.train_share * layout.training_gpus
        costs = replace(costs, sharing=msgspec.structs.replace(trainer.sharing, train_share=share))
    if not layout.colocated:
        return costs
    return replace(costs, switch_s=switch_s(llm, gpu, layout.training_gpus, workload.algorithm, assumed))


# -- the physical bound of an iteration: simulated ones take at least as long, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds of an iteration that each stage takes at the least, and of its longest sample alone on an instance.

    generation_s: all of its work, at the batch at which a token is cheapest, spread evenly over instances that are
    never empty.  training_s: all of its work spread evenly over the ranks, and one step of the optimizer.
    longest_s: bounds only pipelines in which a version waits for its batch; where batches overlap, it may take as many
    iterations as versions may be behind, and one more; where tails are deferred, another one.
    """

    generation_s: float
    training_s: float
    longest_s: float

    def iteration_s(self, pipeline: CoreSettings, *, in_turn: bool = False) -> float:
        """max(work / capacity, longest sample alone) of the slower stage; of both where they have the same GPUs."""
        generation_s = max(self.generation_s, self.longest_s / (pipeline.max_staleness + 1 + pipeline.defers))
        return generation_s + self.training_s if in_turn else max(generation_s, self.training_s)


def bound(workload: Workload, layout: Layout, assumed: Assumptions = ASSUMED) -> Bound:
    """The bound of one split of the GPUs."""
    lengths = [float(length) for samples in workload.lengths.lengths for length in samples]
    prompt_tokens = fmean(workload.lengths.questions)
    per_batch = workload.batch * workload.group_size / len(lengths)
    decode = layout.decode_cost(workload.llm, assumed)
    train = layout.train_cost(workload.llm, workload.algorithm, assumed)
    question_tokens = prompt_tokens * len(lengths) / workload.group_size  # a group computes its prompt once
    response_tokens, tokens = sum(lengths), sum(lengths) + question_tokens
    squares = sum((length + prompt_tokens) ** 2 for length in lengths)
    work_s = per_batch * (tokens * train.token_s + squares * train.squared_token_s) / layout.ranks
    # instance-seconds of all samples' decode steps at the largest batch that memory and slots allow
    context = sum(length * prompt_tokens + length * length / 2 for length in lengths)
    batch = min(float(layout.slots), decode.kv_capacity_tokens / (context / response_tokens))
    depths = _drafted_costs(workload, layout, assumed)

    def work_at(cost: DecodeCost) -> float:
        token_s = cost.fixed_s / batch + max(cost.weights_s / batch, cost.gemm_sample_s) + cost.sample_s
        return response_tokens * token_s + context * cost.kv_token_s

    decode_s = min(map(work_at, depths))
    return Bound(
        generation_s=per_batch * (decode_s + question_tokens * decode.prefill_token_s) / layout.instances,
        training_s=work_s + train.step_s(),
        longest_s=min(cost.steps_s(1, prompt_tokens, max(lengths)) for cost in depths),
    )
