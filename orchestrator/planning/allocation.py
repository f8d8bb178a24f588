"""Which GPUs generate, which train, and how each stage is split: candidates, and the search among them.

How long an iteration takes is an argument, as a lower bound and as a simulation. Invariant: every candidate fits into
memory, and no candidate that was left out could have won, unless ``max_measured`` was reached.

    pools ──► splits ──► lowest bound first ──► simulate ──► stop when the next bound is no better than the best

Source: ours. StreamRL's Algorithm 1 (``benchmarks/papers/rules.py``) enumerates too, and scores by max(Tgen, Ttrain),
which is wrong for streams: what counts is the end of the pipeline, with its skew, its transfers and its dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, lcm
from typing import Literal, TypeAlias

from orchestrator.sim.costs import (
    ASSUMED,
    GPUS_PER_NODE,
    Assumptions,
    DoesNotFitError,
    Gpu,
    generation_degrees,
    state_bytes,
    training_bytes,
    training_layout,
    training_misfit,
)
from transport.contracts.llms import BF16, Fp8, Llm

Objective: TypeAlias = Literal["time", "cost"]

MAX_SIZES = 32
"""Of a stage in one pool: nodes up to 32 of them, then several nodes together."""
WHOLE_NODES_FROM_GPUS = 8 * GPUS_PER_NODE
"""A pool of so many GPUs or more is dealt out in whole nodes."""
TRIED_RANK_SIZES = 2
"""The smallest that fit: more ranks are as fast and balance worse, fewer hold whole groups more easily."""
TIE_SHARE = 0.01
"""Of a score. Plans this near are equally good, and the other objective decides: the model leaves out more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """GPUs of one type at one site. price: of one GPU, per unit of time, in any currency."""

    gpu: Gpu
    num_gpus: int
    price: float
    site: str = ""

    def __str__(self) -> str:
        return f"{self.num_gpus}x{self.place}"

    @property
    def place(self) -> str:
        """``H800`` or ``H800@east``."""
        return f"{self.gpu.name}@{self.site}" if self.site else self.gpu.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who does what.

    tensor_parallel: GPUs of one generation instance.  ranks: data-parallel ranks of the trainer, each of
    ``training_tensor_parallel`` x ``pipeline_parallel`` GPUs.
    """

    generation: Pool
    generation_gpus: int
    tensor_parallel: int
    training: Pool
    training_gpus: int
    ranks: int
    training_tensor_parallel: int
    pipeline_parallel: int

    @property
    def instances(self) -> int:
        return self.generation_gpus // self.tensor_parallel

    @property
    def price(self) -> float:
        """Of all its GPUs, per unit of time."""
        return self.generation_gpus * self.generation.price + self.training_gpus * self.training.price


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSplit:
    """A split and the seconds of an iteration, by simulation or as a bound."""

    split: Split
    iteration_s: float

    def score(self, minimise: Objective) -> float:
        """What is to be small: seconds of an iteration, or price times time; that by its samples is the cost of one."""
        return self.iteration_s if minimise == "time" else self.iteration_s * self.split.price


Progress: TypeAlias = Callable[[int, int, MeasuredSplit], None]
"""(measured, at most to measure, the best so far)."""


def silent(done: int, most: int, best: MeasuredSplit) -> None:
    """For callers who show nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search saw. measured: in that order.  num_cut: left out, though their bounds did not exclude them, because
    ``max_measured`` was reached."""

    measured: tuple[MeasuredSplit, ...]
    num_candidates: int
    num_cut: int


# -- candidates


def splits(
    llm: Llm,
    pools: Sequence[Pool],
    *,
    context_tokens: int,
    max_instances: int,
    max_ranks: int = 0,
    minimise: Objective = "time",
    assumed: Assumptions = ASSUMED,
    fp8: Fp8 = BF16,
) -> list[Split]:
    """Every choice of pools, sizes and degrees that fits.

    Args:    context_tokens: of the longest sample, which one instance and one micro-batch must hold.
             max_instances: samples of a batch: more instances would be idle.  max_ranks: groups of a batch, likewise;
             0: as many as instances.  fp8: what generation instances hold in it.
    Raises:  DoesNotFitError: nothing fits; the message says what would.
    """
    degrees = partial(generation_degrees, llm, context_tokens=context_tokens, assumed=assumed, fp8=fp8)
    found = [
        Split(
            generation=generation,
            generation_gpus=generation_gpus,
            tensor_parallel=degree,
            training=training,
            training_gpus=training_gpus,
            ranks=layout.data,
            training_tensor_parallel=layout.tensor,
            pipeline_parallel=layout.pipeline,
        )
        for generation, training in product(pools, repeat=2)
        for degree in degrees(generation.gpu)
        for generation_gpus in sizes(generation.num_gpus, degree)
        if generation_gpus <= max_instances * degree
        for left in [training.num_gpus - (generation_gpus if generation is training else 0)]
        for fastest in [generation is training and minimise == "time"]
        for training_gpus, per_rank in trainers(
            llm, training.gpu, left, context_tokens, max_ranks or max_instances, fastest, assumed
        )
        for layout in [training_layout(llm, training_gpus, training_gpus // per_rank, assumed.trainer)]
        if layout is not None
    ]
    if not found:
        raise DoesNotFitError(what_would_fit(llm, pools, context_tokens, degrees, assumed))
    return found


def sizes(num_gpus: int, degree: int, points: int = MAX_SIZES) -> list[int]:
    """Sizes of a stage, multiples of ``degree``: the least, and ``points`` at most; whole nodes in a large pool."""
    step = lcm(degree, GPUS_PER_NODE) if num_gpus >= WHOLE_NODES_FROM_GPUS else degree
    step *= max(1, ceil(num_gpus / step / points))
    least = [degree] if degree <= num_gpus and degree < step else []
    return [*least, *range(step, num_gpus + 1, step)]


def trainers(
    llm: Llm,
    gpu: Gpu,
    left: int,
    context_tokens: int,
    max_ranks: int,
    all_of_it: bool,
    assumed: Assumptions = ASSUMED,
) -> Iterator[tuple[int, int]]:
    """(GPUs, GPUs of a rank) of trainers that fit. all_of_it: only the largest, which is the fastest."""
    tried: Counter[int] = Counter()
    for per_rank in assumed.trainer.rank_sizes:
        whole = min(left // per_rank, max_ranks) * per_rank
        for training_gpus in (whole,) if all_of_it and whole else sizes(whole, per_rank):
            key = 0 if all_of_it else training_gpus
            ranks = training_gpus // per_rank
            misfit = training_misfit(llm, gpu, training_gpus, ranks, assumed, context_tokens)
            if tried[key] < TRIED_RANK_SIZES and not misfit:
                tried[key] += 1
                yield training_gpus, per_rank


def what_would_fit(
    llm: Llm,
    pools: Sequence[Pool],
    context_tokens: int,
    instance_degrees: Callable[[Gpu], list[int]],
    assumed: Assumptions = ASSUMED,
) -> str:
    """Why nothing fits into ``pools``: the memory that is missing, or the fewest GPUs of each type that would do.

    instance_degrees: tensor-parallel degrees of an instance that fits.
    """
    given = ", ".join(map(str, pools))
    needs: dict[str, str] = {}
    for pool in pools:
        degrees = instance_degrees(pool.gpu)
        training = least_training_gpus(llm, pool.gpu, context_tokens, assumed)
        instance = f"{degrees[0]} for an instance" if degrees else "no node is large enough for an instance"
        trainer = f"{training} for the trainer" if training else missing(llm, pool.gpu, context_tokens, assumed)
        needs[pool.gpu.name] = f"{pool.gpu.name}: {instance}, {trainer}"
        if degrees and training:
            needs[pool.gpu.name] += f", so {degrees[0] + training} for both"
    return (
        f"{llm.name} with samples of up to {context_tokens} tokens does not fit into {given}. What would: "
        + "; ".join(needs.values())
    )


def missing(llm: Llm, gpu: Gpu, context_tokens: int, assumed: Assumptions = ASSUMED) -> str:
    """Why no number of these GPUs trains it."""
    if gpu.measured is not None:
        return "its profile has no trainer"
    per_rank = max(size for size in assumed.trainer.rank_sizes if training_layout(llm, size, 1, assumed.trainer))
    needed = training_bytes(llm, per_rank, 1, context_tokens, context_tokens, assumed)
    usable = gpu.memory_bytes * assumed.usable_memory
    again = ", or --recompute whole" if assumed.trainer.recompute != "whole" else ""
    return (
        f"no number of them for the trainer: with the longest sample in a micro-batch, {per_rank} of them for one rank "
        f"need {needed / 1e9:.1f} GB each, {usable / 1e9:.1f} GB are usable; it takes shorter samples{again}"
    )


def least_training_gpus(llm: Llm, gpu: Gpu, context_tokens: int, assumed: Assumptions = ASSUMED) -> int:
    """The smallest trainer that holds it; 0 where none does. Of ours the states are shared by all ranks, too."""
    if gpu.measured is None and not assumed.trainer.predicted:
        return _least_of_papers(llm, gpu, context_tokens, assumed)
    least = [
        per_rank * ranks
        for per_rank in assumed.trainer.rank_sizes
        for ranks in range(1, assumed.trainer.rank_sizes[-1] + 1)
        if not training_misfit(llm, gpu, per_rank * ranks, ranks, assumed, context_tokens)
    ]
    return min(least, default=0)


def _least_of_papers(llm: Llm, gpu: Gpu, context_tokens: int, assumed: Assumptions) -> int:
    """One rank, or several of the largest size."""
    for per_rank in assumed.trainer.rank_sizes:
        if not training_misfit(llm, gpu, per_rank, 1, assumed, context_tokens):
            return per_rank
    room = gpu.memory_bytes * assumed.usable_memory - assumed.activation_bytes
    largest = assumed.trainer.rank_sizes[-1]
    return ceil(state_bytes(llm, 1, 1, assumed) / room / largest) * largest


# -- search


def search(
    candidates: Sequence[Split],
    bound_s: Callable[[Split], float],
    measure: Callable[[Sequence[Split]], Sequence[float]],
    *,
    minimise: Objective = "time",
    at_once: int = 1,
    max_measured: int = 48,
    progress: Progress = silent,
) -> Found:
    """Measure candidates in the order of their bounds, until the next bound is no better than the best result.

    Args:    bound_s: seconds of an iteration that no schedule beats.  measure: seconds of an iteration, of each.
             at_once: handed to ``measure`` together.
    """
    bounds = [MeasuredSplit(split=split, iteration_s=bound_s(split)) for split in candidates]
    waiting = sorted(bounds, key=lambda bound: (bound.score(minimise), bound.split.price))
    measured: list[MeasuredSplit] = []
    while waiting and len(measured) < max_measured:
        count = min(at_once, max_measured - len(measured))
        chosen = [bound.split for bound in waiting[:count]]
        measured += [
            MeasuredSplit(split=split, iteration_s=seconds)
            for split, seconds in zip(chosen, measure(chosen), strict=True)
        ]
        waiting = [bound for bound in waiting[count:] if _may_win(bound, measured, minimise)]
        progress(len(measured), min(max_measured, len(measured) + len(waiting)), ranked(measured, minimise)[0])
    return Found(measured=tuple(measured), num_candidates=len(candidates), num_cut=len(waiting))


def _other(minimise: Objective) -> Objective:
    return "cost" if minimise == "time" else "time"


def _may_win(bound: MeasuredSplit, measured: Iterable[MeasuredSplit], minimise: Objective) -> bool:
    """Whether it can be better than the best, or as good and better by the other objective."""
    score, other_score = bound.score(minimise), bound.score(_other(minimise))
    return not any(
        score > (1 + TIE_SHARE) * one.score(minimise)
        or (score >= one.score(minimise) and other_score >= one.score(_other(minimise)))
        for one in measured
    )


def ranked(measured: Iterable[MeasuredSplit], minimise: Objective) -> list[MeasuredSplit]:
    """Best first: of those within ``TIE_SHARE`` of the least the other objective decides, then by score."""
    ordered = sorted(measured, key=lambda one: one.score(minimise))
    limit = (1 + TIE_SHARE) * ordered[0].score(minimise) if ordered else 0.0
    tied = sum(one.score(minimise) <= limit for one in ordered)
    return [*sorted(ordered[:tied], key=lambda one: one.score(_other(minimise))), *ordered[tied:]]


def released(split: Split, pools: Iterable[Pool]) -> dict[str, int]:
    """GPUs that a plan leaves to others, by place (StreamRL sec. 4.2: surplus may go to other jobs)."""
    used = {pool.place: 0 for pool in pools}
    used[split.generation.place] += split.generation_gpus
    used[split.training.place] += split.training_gpus
    left = {pool.place: pool.num_gpus - used[pool.place] for pool in pools}
    return {place: count for place, count in left.items() if count}
