"""What can be measured in simulation, as values that travel to other processes: pipelines, generation, transfers.

How a setting of an LLM, GPUs and lengths becomes one number of seconds: equal experiments, seeds and assumptions give
equal seconds, in any process.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Protocol

import msgspec

from benchmarks.papers.bounds import bound_s
from orchestrator.core.dispatch.compute import plan_dispatch
from orchestrator.core.dispatch.policies.problem import GroupLength, Instance, Problem
from orchestrator.core.model.autoscale import Change, Iteration, Scaling, estimate_of
from orchestrator.core.model.settings import CoreSettings, ScalingSettings
from orchestrator.sim.costs import (
    ASSUMED,
    H800,
    Algorithm,
    Assumptions,
    Gpu,
    TrainCost,
    decode_cost,
    train_cost,
    transfer_s,
)
from orchestrator.sim.engine import Scenario, SimulationLog, counted
from orchestrator.sim.lengths import RecordedLengths, long_tailed
from orchestrator.sim.llms import QWEN_72B
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, bound, scenario, shortened
from orchestrator.sim.simulate import simulate
from transport.contracts.continuous_batching import DecodeCost, finish_times
from transport.contracts.llms import Llm
from transport.contracts.types import GroupId, WorkerId

FULL_LENGTH = 20_000
FULL_MEDIAN = 4_500.0
QUESTION_TOKENS = 500
PAPER_RECALL = 0.87
"""Of StreamRL's 7B ranker for the longest 20% (Table 4)."""
MAX_RUNNING = 1024
"""Slots of an instance where generation is measured alone: memory is the limit."""

LARGE_BATCH = 2048
"""Samples; the mean length of so many lies within 2% of that of all."""
ENOUGH_LARGE = 7
"""Iterations of larger batches, three of which count (``counted``): they vary as six times as many small ones do."""
MANY = 1_000
"""Iterations: more are never asked for."""


class Experiment(Protocol):
    """Something that takes seconds under assumptions; one iteration and no bound, where a class says nothing else."""

    @property
    def short(self) -> int:
        """Iterations that show what a change of the assumptions does."""
        return 1

    @property
    def enough(self) -> int:
        """Iterations beyond which its mean would not change any more by what matters."""
        return MANY

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """Raises DoesNotFitError where the assumptions leave no room."""
        ...

    def bound_s(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """What nothing can beat; 0 where there is no such bound."""
        return 0.0

    def key(self, assumed: Assumptions) -> Hashable:
        """Equal for assumptions that make no difference here."""
        ...


@lru_cache(maxsize=8)
def lengths_of(max_tokens: int, prompts: int, seed: int, recall: float | None) -> RecordedLengths:
    """StreamRL's data set of that maximum: the 20K one, scaled (sec. 7)."""
    return long_tailed(
        prompts,
        seed=seed,
        median_tokens=FULL_MEDIAN * max_tokens / FULL_LENGTH,
        max_tokens=max_tokens,
        question_tokens=QUESTION_TOKENS,
        recall=recall,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined(Experiment):
    """Seconds of an iteration of one pipeline on one split of the GPUs."""

    layout: Layout
    pipeline: str
    dispatch: str
    llm: Llm = QWEN_72B
    max_tokens: int = FULL_LENGTH
    recall: float | None = PAPER_RECALL
    batch: int = 1024
    algorithm: Algorithm = "ppo"
    layer_s: float | None = None
    """Of a decode step and layer, where engines are launched in another way than ``Assumptions`` says."""
    deferred: float = 0.0
    """Prompts in hand beyond those of a batch, over those of a batch: the slowest groups go on in the next one, with
    the tokens that they have."""

    @property
    def core(self) -> CoreSettings:
        """Its pipeline."""
        return shortened(PIPELINES[self.pipeline], deferred=round(self.batch * self.deferred))

    @property
    def short(self) -> int:
        """Two that count (``counted``); of large batches, which vary less, after one that fills the pipeline.

        Where batches overlap a late one delays those after it: over five iterations changes were off by up to 15%, over
        twelve by 2% (72B, in flight and rolling, beside twenty).
        """
        if self.batch > LARGE_BATCH:
            return 3
        return 12 if PIPELINES[self.pipeline].max_staleness else 5

    @property
    def enough(self) -> int:
        return ENOUGH_LARGE if self.batch > LARGE_BATCH else MANY

    def stages_s(self, assumed: Assumptions = ASSUMED) -> tuple[float, float, float]:
        """Of a batch by arithmetic: generation, the longest sample alone, training in rounds that are full. Raises
        DoesNotFitError."""
        workload, layout = self.workload(0, 1), self.laid_out(assumed)
        limit = bound(workload, replace(layout, slots=100_000), assumed)
        train = layout.train_cost(workload.llm, workload.algorithm, assumed)
        question = fmean(workload.lengths.questions)
        whole = [samples[0] + question for samples in workload.lengths.lengths]
        tokens, squares = sum(whole) / layout.ranks, sum(one * one for one in whole) / layout.ranks
        rounds = math.ceil(tokens / layout.micro_batch_tokens)
        training_s = rounds * train.micro_batch_s(tokens / rounds, squares / rounds) + train.step_s()
        return limit.generation_s, limit.longest_s, training_s

    def workload(self, seed: int, iterations: int) -> Workload:
        lengths = lengths_of(self.max_tokens, self.batch * iterations, seed, self.recall)
        return Workload(llm=self.llm, lengths=lengths, batch=self.batch, algorithm=self.algorithm)

    def scenario(self, seed: int, iterations: int, assumed: Assumptions, *, record: bool = False) -> Scenario:
        if self.layer_s is not None:
            assumed = msgspec.structs.replace(assumed, layer_s=self.layer_s)
        return scenario(
            self.workload(seed, iterations),
            self.laid_out(assumed),
            self.core,
            iterations=iterations,
            assumed=assumed,
            dispatch=self.dispatch,
            record=record,
        )

    def laid_out(self, assumed: Assumptions) -> Layout:
        """Its layout: where drafts come true more or less often than is assumed, so do those of its engines."""
        moved = assumed.draft_acceptance / ASSUMED.draft_acceptance
        return replace(self.layout, drafts=min(1.0, self.layout.drafts * moved))

    def run(self, seed: int, iterations: int, assumed: Assumptions, *, record: bool = False) -> SimulationLog:
        return simulate(self.scenario(seed, iterations, assumed, record=record))

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        return steady_s(self.run(seed, iterations, assumed))

    def bound_s(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """max(work / capacity, longest alone) of the slower stage; of both stages where they work in turn."""
        limit = bound(self.workload(seed, iterations), replace(self.laid_out(assumed), slots=100_000), assumed)
        return limit.iteration_s(self.core, in_turn=self.layout.colocated)

    def key(self, assumed: Assumptions) -> Hashable:
        prepared = self.scenario(0, 1, assumed)
        return prepared.decode[0], prepared.costs


def steady_s(log: SimulationLog) -> float:
    """Seconds of an iteration, without those that fill and empty the pipeline."""
    return log.iteration_s(*counted(len(log.published_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Experiment):
    """Seconds until the last sample of one batch ends, nothing else going on; samples stay where they start."""

    dispatch: str
    llm: Llm
    gpus: int
    tensor_parallel: int
    gpu: Gpu = H800
    recall: float | None = PAPER_RECALL
    batch: int = 1024
    max_tokens: int = FULL_LENGTH

    @property
    def short(self) -> int:
        return 5

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """Mean over ``iterations`` batches."""
        cost = decode_cost(self.llm, self.gpu, self.tensor_parallel, assumed)
        return fmean(self._batch_s(cost, 1000 * seed + batch) for batch in range(iterations))

    def _batch_s(self, cost: DecodeCost, seed: int) -> float:
        drawn = self._lengths(seed)
        actual = [float(samples[0]) for samples in drawn.lengths]
        groups = tuple(
            GroupLength(group_id=GroupId(f"0/{place}"), mean_tokens=tokens, sigma=drawn.sigma)
            for place, tokens in enumerate(drawn.predicted)
        )
        instances = tuple(
            Instance(worker_id=WorkerId(f"generate-{place}"), cost=cost, max_running=MAX_RUNNING)
            for place in range(self.gpus // self.tensor_parallel)
        )
        problem = Problem(
            groups=groups, instances=instances, prompt_tokens=QUESTION_TOKENS, max_tokens=self.max_tokens, seed=seed
        )
        by_group = dict(zip((group.group_id for group in groups), actual, strict=True))
        shares = plan_dispatch(self.dispatch, problem).shares
        return max(_end_s(cost, [by_group[group.group_id] for group in share]) for share in shares)

    def _lengths(self, seed: int) -> RecordedLengths:
        return lengths_of(self.max_tokens, self.batch, seed, self.recall)

    def bound_s(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """That no placement can beat, samples staying where they start (``forecast.bound_s``)."""
        cost = decode_cost(self.llm, self.gpu, self.tensor_parallel, assumed)
        batches = [self._lengths(1000 * seed + batch).lengths for batch in range(iterations)]
        count = self.gpus // self.tensor_parallel
        return fmean(
            bound_s(cost, [float(samples[0]) for samples in batch], count, prompt_tokens=QUESTION_TOKENS)
            for batch in batches
        )

    def key(self, assumed: Assumptions) -> Hashable:
        return decode_cost(self.llm, self.gpu, self.tensor_parallel, assumed)


def _end_s(cost: DecodeCost, lengths: list[float]) -> float:
    return max(finish_times(cost, lengths, prompt_tokens=QUESTION_TOKENS, max_running=MAX_RUNNING), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStage(Experiment):
    """Seconds of training one batch, all of whose samples are there: work spread evenly, and one step."""

    llm: Llm
    gpus: int
    ranks: int
    gpu: Gpu = H800
    batch: int = 1024
    max_tokens: int = FULL_LENGTH
    algorithm: Algorithm = "ppo"

    def _cost(self, assumed: Assumptions) -> TrainCost:
        return train_cost(self.llm, self.gpu, self.gpus, self.ranks, self.algorithm, assumed)

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """Mean over ``iterations`` batches."""
        cost = self._cost(assumed)
        return fmean(self._batch_s(cost, 1000 * seed + batch) for batch in range(iterations))

    def _batch_s(self, cost: TrainCost, seed: int) -> float:
        drawn = lengths_of(self.max_tokens, self.batch, seed, None).lengths
        whole = [float(samples[0]) + QUESTION_TOKENS for samples in drawn]
        rank_s = cost.micro_batch_s(sum(whole) / self.ranks, sum(one * one for one in whole) / self.ranks)
        return rank_s + cost.step_s()

    def key(self, assumed: Assumptions) -> Hashable:
        return self._cost(assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleShare(Experiment):
    """Of the seconds that known lengths save over random dispatch, the share that a ranker saves; no seconds at all."""

    ranked: Generation

    @property
    def short(self) -> int:
        return self.ranked.short

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        ways = replace(self.ranked, dispatch="random"), replace(self.ranked, recall=None), self.ranked
        random_s, oracle_s, ranked_s = (one.seconds(seed, iterations, assumed) for one in ways)
        return (random_s - ranked_s) / (random_s - oracle_s)

    def key(self, assumed: Assumptions) -> Hashable:
        return self.ranked.key(assumed)


@dataclass(frozen=True, slots=True)
class Known(Experiment):
    """A number that another bench measured on real machines: no constant of the simulator moves it."""

    value: float

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        return self.value

    def key(self, assumed: Assumptions) -> Hashable:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound(Experiment):
    """What nothing can beat, as if it were an experiment: under it, a ratio is a distance to the bound."""

    of: Generation

    @property
    def short(self) -> int:
        return self.of.short

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        return self.of.bound_s(seed, iterations, assumed)

    def bound_s(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        return self.seconds(seed, iterations, assumed)

    def key(self, assumed: Assumptions) -> Hashable:
        return self.of.key(assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Experiment):
    """Seconds of one version over a link, to one instance, which passes it on inside its datacenter."""

    bytes_per_s: float
    llm: Llm = QWEN_72B

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        return transfer_s(self.llm, self.bytes_per_s, 1, assumed)

    def bound_s(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        """The link at its rate."""
        return self.llm.weight_bytes / self.bytes_per_s

    def key(self, assumed: Assumptions) -> Hashable:
        return transfer_s(self.llm, self.bytes_per_s, 1, assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growing(Experiment):
    """The iteration after which instances are added for the ``nth`` time, as lengths grow linearly (StreamRL fig. 11).

    Lengths double over ``ramp`` iterations; a unit is a node of eight GPUs. 0: there is no such addition.
    Generation and training are the forecast's and the cost model's, the rule is the live one
    (``core/model/autoscale.py``).
    """

    nth: int
    llm: Llm
    layout: Layout
    ramp: int = 20
    batch: int = 1024

    def changes(self, seed: int, assumed: Assumptions) -> list[Change]:
        layout = self.layout
        decode = decode_cost(self.llm, layout.generation_gpu, layout.tensor_parallel, assumed)
        train = train_cost(self.llm, layout.training_gpu, layout.training_gpus, layout.ranks, "ppo", assumed)
        unit = 8 // layout.tensor_parallel
        settings = ScalingSettings(min_workers=layout.instances, max_workers=layout.instances + 4 * unit, unit=unit)
        scaling, workers, changes = Scaling(), layout.instances, list[Change]()
        for batch in range(self.ramp + 1):
            lengths = self._lengths(seed, batch)
            estimate = estimate_of(decode, lengths, prompt_tokens=QUESTION_TOKENS, max_running=MAX_RUNNING)
            whole = [length + QUESTION_TOKENS for length in lengths]
            rank_s = train.micro_batch_s(sum(whole) / layout.ranks, sum(one * one for one in whole) / layout.ranks)
            measured = Iteration(
                batch=batch, workers=workers, generation_s=estimate(workers), training_s=rank_s + train.step_s()
            )
            change = scaling.observe(settings, measured, estimate)
            if change is not None:
                changes.append(change)
                workers = change.to_workers
        return changes

    def _lengths(self, seed: int, batch: int) -> list[float]:
        max_tokens = round(FULL_LENGTH * (1 + batch / self.ramp) / 2)
        return [float(samples[0]) for samples in lengths_of(max_tokens, self.batch, 1000 * seed + batch, None).lengths]

    def seconds(self, seed: int, iterations: int, assumed: Assumptions) -> float:
        added = [change.batch for change in self.changes(seed, assumed) if change.to_workers > change.from_workers]
        return float(added[self.nth - 1]) if len(added) >= self.nth else 0.0

    def key(self, assumed: Assumptions) -> Hashable:
        layout = self.layout
        return (
            decode_cost(self.llm, layout.generation_gpu, layout.tensor_parallel, assumed),
            train_cost(self.llm, layout.training_gpu, layout.training_gpus, layout.ranks, "ppo", assumed),
        )
