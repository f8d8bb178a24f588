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
from math import ceil, lcm
from typing import Literal, TypeAlias

from orchestrator.core.costs.analytic import (
    GPUS_PER_NODE,
    OPTIMIZER_BYTES,
    RESIDENT_BYTES,
    DoesNotFitError,
    check_training_fits,
    smallest_tensor_degree,
    tensor_degrees,
)
from orchestrator.core.costs.hardware import ASSUMED, Assumptions, Gpu
from orchestrator.core.costs.llms import Llm

Objective: TypeAlias = Literal["time", "cost"]

MAX_SIZES = 32
"""Of a stage in one pool: nodes up to 32 of them, then several nodes together."""
WHOLE_NODES_FROM_GPUS = 8 * GPUS_PER_NODE
"""A pool of so many GPUs or more is dealt out in whole nodes."""
RANK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""GPUs of a data-parallel rank."""
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
class Outcome:
    """A candidate that was measured. bound_s: what no schedule beats.  iteration_s: by simulation."""

    split: Split
    bound_s: float
    iteration_s: float

    @property
    def cost(self) -> float:
        """Of an iteration: price times time. Divided by its samples it is the cost of a sample."""
        return self.split.price * self.iteration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search saw. outcomes: in the order measured.  num_cut: left out, though their bounds did not exclude them,
    because ``max_measured`` was reached."""

    outcomes: tuple[Outcome, ...]
    num_candidates: int
    num_cut: int


# -- candidates


def splits(
    llm: Llm,
    pools: Sequence[Pool],
    *,
    context_tokens: int,
    max_instances: int,
    minimise: Objective = "time",
    assumed: Assumptions = ASSUMED,
) -> list[Split]:
    """Every choice of pools, sizes and degrees that fits.

    Args:    context_tokens: of the longest sample, which one instance must hold.  max_instances: samples of a batch:
             more instances would be idle.
    Raises:  DoesNotFitError: nothing fits; the message says what would.
    """
    found = [
        split
        for generation in pools
        for training in pools
        for split in _between(llm, generation, training, context_tokens, max_instances, minimise, assumed)
    ]
    if not found:
        raise DoesNotFitError(what_would_fit(llm, pools, context_tokens, assumed))
    return found


def _between(
    llm: Llm,
    generation: Pool,
    training: Pool,
    context_tokens: int,
    max_instances: int,
    minimise: Objective,
    assumed: Assumptions,
) -> Iterator[Split]:
    for degree in generation_degrees(llm, generation.gpu, context_tokens, assumed):
        for generation_gpus in sizes(generation.num_gpus, degree):
            if generation_gpus // degree > max_instances:
                break
            shared = generation is training
            left = training.num_gpus - generation_gpus if shared else training.num_gpus
            for training_gpus, per_rank in trainers(llm, training.gpu, left, shared and minimise == "time", assumed):
                tensor = max(part for part in tensor_degrees(llm, training.gpu) if per_rank % part == 0)
                yield Split(
                    generation=generation,
                    generation_gpus=generation_gpus,
                    tensor_parallel=degree,
                    training=training,
                    training_gpus=training_gpus,
                    ranks=training_gpus // per_rank,
                    training_tensor_parallel=tensor,
                    pipeline_parallel=per_rank // tensor,
                )


def generation_degrees(llm: Llm, gpu: Gpu, context_tokens: int, assumed: Assumptions = ASSUMED) -> list[int]:
    """Tensor-parallel degrees that hold the weights and the longest sample; none where a whole node does not."""
    try:
        smallest = smallest_tensor_degree(llm, gpu, assumed, context_tokens=context_tokens)
    except DoesNotFitError:
        return []
    return [degree for degree in tensor_degrees(llm, gpu) if degree >= smallest]


def sizes(num_gpus: int, degree: int, points: int = MAX_SIZES) -> list[int]:
    """Sizes of a stage, multiples of ``degree``: the least, and ``points`` at most; whole nodes in a large pool."""
    step = lcm(degree, GPUS_PER_NODE) if num_gpus >= WHOLE_NODES_FROM_GPUS else degree
    step *= max(1, ceil(num_gpus / step / points))
    least = [degree] if degree <= num_gpus and degree < step else []
    return [*least, *range(step, num_gpus + 1, step)]


def trainers(
    llm: Llm, gpu: Gpu, left: int, all_of_it: bool, assumed: Assumptions = ASSUMED
) -> Iterator[tuple[int, int]]:
    """(GPUs, GPUs of a rank) of trainers that fit. all_of_it: only the largest, which is the fastest."""
    tried: Counter[int] = Counter()
    for per_rank in RANK_SIZES:
        whole = left // per_rank * per_rank
        for training_gpus in (whole,) if all_of_it and whole else sizes(left, per_rank):
            key = 0 if all_of_it else training_gpus
            if tried[key] < TRIED_RANK_SIZES and _trains(llm, gpu, training_gpus, per_rank, assumed):
                tried[key] += 1
                yield training_gpus, per_rank


def _trains(llm: Llm, gpu: Gpu, num_gpus: int, per_rank: int, assumed: Assumptions) -> bool:
    try:
        check_training_fits(llm, gpu, num_gpus, num_gpus // per_rank, assumed)
    except DoesNotFitError:
        return False
    return True


def what_would_fit(llm: Llm, pools: Sequence[Pool], context_tokens: int, assumed: Assumptions = ASSUMED) -> str:
    """Why nothing fits into ``pools``, and the fewest GPUs of each type that would do."""
    given = ", ".join(map(str, pools))
    needs: dict[str, str] = {}
    for pool in pools:
        degrees = generation_degrees(llm, pool.gpu, context_tokens, assumed)
        training = least_training_gpus(llm, pool.gpu, assumed)
        instance = f"{degrees[0]} for an instance" if degrees else "no node is large enough for an instance"
        needs[pool.gpu.name] = f"{pool.gpu.name}: {instance}, {training} for the trainer"
        if degrees:
            needs[pool.gpu.name] += f", so {degrees[0] + training} for both"
    return (
        f"{llm.name} with samples of up to {context_tokens} tokens does not fit into {given}. What would: "
        + "; ".join(needs.values())
    )


def least_training_gpus(llm: Llm, gpu: Gpu, assumed: Assumptions = ASSUMED) -> int:
    """The smallest trainer that holds the states: one rank, or several of the largest size."""
    room = gpu.memory_bytes * assumed.usable_memory - assumed.activation_bytes
    needed = llm.params * (RESIDENT_BYTES + OPTIMIZER_BYTES) / room
    for per_rank in RANK_SIZES:
        if per_rank >= needed:
            return per_rank
    return ceil(needed / RANK_SIZES[-1]) * RANK_SIZES[-1]


# -- search


def search(
    candidates: Sequence[Split],
    bound_s: Callable[[Split], float],
    measure: Callable[[Sequence[Split]], Sequence[float]],
    *,
    minimise: Objective = "time",
    at_once: int = 1,
    max_measured: int = 48,
    progress: Callable[[int, int, Outcome], None] = lambda done, most, best: None,
) -> Found:
    """Measure candidates in the order of their bounds, until the next bound is no better than the best result.

    Args:    bound_s: seconds of an iteration that no schedule beats.  measure: seconds of an iteration, of each.
             at_once: handed to ``measure`` together.  progress: (measured, at most to measure, the best so far).
    """
    bounds = {split: bound_s(split) for split in candidates}
    waiting: list[Split] = sorted(candidates, key=lambda split: (_score(split, bounds[split], minimise), split.price))
    outcomes: list[Outcome] = []
    while waiting and len(outcomes) < max_measured:
        chosen = waiting[: min(at_once, max_measured - len(outcomes))]
        outcomes += [
            Outcome(split=split, bound_s=bounds[split], iteration_s=seconds)
            for split, seconds in zip(chosen, measure(chosen), strict=True)
        ]
        rest = waiting[len(chosen) :]
        waiting = [split for split in rest if _may_win(split, bounds[split], outcomes, minimise)]
        leader = best(outcomes, minimise)
        progress(len(outcomes), min(max_measured, len(outcomes) + len(waiting)), leader)
    return Found(outcomes=tuple(outcomes), num_candidates=len(candidates), num_cut=len(waiting))


def _may_win(split: Split, bound_s: float, outcomes: Sequence[Outcome], minimise: Objective) -> bool:
    """Whether it can be better than the best, or as good and better by the other objective."""
    could = Outcome(split=split, bound_s=bound_s, iteration_s=bound_s)
    other: Objective = "cost" if minimise == "time" else "time"
    for outcome in outcomes:
        if score(could, minimise) > (1 + TIE_SHARE) * score(outcome, minimise):
            return False
        if score(could, minimise) >= score(outcome, minimise) and score(could, other) >= score(outcome, other):
            return False
    return True


def _score(split: Split, seconds: float, minimise: Objective) -> float:
    return seconds if minimise == "time" else seconds * split.price


def score(outcome: Outcome, minimise: Objective) -> float:
    """What is to be small: seconds of an iteration, or its cost."""
    return _score(outcome.split, outcome.iteration_s, minimise)


def ranked(outcomes: Iterable[Outcome], minimise: Objective) -> list[Outcome]:
    """Best first: of those within ``TIE_SHARE`` of the least the other objective decides, then by score."""
    ordered = sorted(outcomes, key=lambda outcome: score(outcome, minimise))
    other: Objective = "cost" if minimise == "time" else "time"
    limit = (1 + TIE_SHARE) * score(ordered[0], minimise) if ordered else 0.0
    first = sorted((o for o in ordered if score(o, minimise) <= limit), key=lambda outcome: score(outcome, other))
    return [*first, *ordered[len(first) :]]


def best(outcomes: Iterable[Outcome], minimise: Objective) -> Outcome:
    """The first of ``ranked``."""
    return ranked(outcomes, minimise)[0]


def released(split: Split, pools: Iterable[Pool]) -> dict[str, int]:
    """GPUs that a plan leaves to others, by place (StreamRL sec. 4.2: surplus may go to other jobs)."""
    used = {pool.place: 0 for pool in pools}
    used[split.generation.place] += split.generation_gpus
    used[split.training.place] += split.training_gpus
    left = {pool.place: pool.num_gpus - used[pool.place] for pool in pools}
    return {place: count for place, count in left.items() if count}
