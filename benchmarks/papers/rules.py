"""The papers' rules as printed, which our own replace: for comparison, and to show what is wrong with them.

    Algorithm 1     how many GPUs generate, and how many train; ours: orchestrator/planning/allocation.py
    Algorithm 2     who generates which prompts, by the sum of both classes; ours: orchestrator/core/dispatch

Flaws of Algorithm 1, each shown in ``tests/sim/test_papers_rules.py``:

    max(Tgen, Ttrain)    is the iteration only where batches overlap wholly; a synchronous stream ends with the training
                         of its last samples, and wants more generation than the balance says
    first minimum        of equal maxima it takes whichever comes first, also one that gives a stage GPUs for nothing
    |difference|         of the shrunk stage may be least where it has become the slower one: the iteration grows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from benchmarks.papers.experiments import FULL_LENGTH, lengths_of
from orchestrator.core.dispatch.compute import plan_dispatch
from orchestrator.core.dispatch.policies.even import two_class
from orchestrator.core.dispatch.policies.problem import Plan, Problem, repaired
from orchestrator.planning.allocation import Pool, Split, splits
from orchestrator.planning.plan_search import LONG, Bounds, Job, advise, predict
from orchestrator.sim.costs import ASSUMED, H800
from orchestrator.sim.llms import QWEN_72B

StageTime: TypeAlias = Callable[[int], float]
"""GPUs -> seconds of one batch."""

# -- Algorithm 1: GPUs of each stage. ``generation_s`` and ``training_s`` are the best time of a stage on so many GPUs,
# infinite where the model does not fit (sec. 4.2)


def single_datacenter(
    num_gpus: int, generation_s: StageTime, training_s: StageTime, sizes: Iterable[int] = ()
) -> tuple[int, int]:
    """(generation, training) GPUs with the least max of both times, x + y <= num_gpus.

    sizes: GPUs that a stage may have, ascending; empty: any number. Each stage is asked once for every size.
    Returns: (0, 0) where neither fits. Source: StreamRL Algorithm 1, first part.
    """
    allowed = [size for size in (sizes or range(1, num_gpus)) if 0 < size < num_gpus]
    generating = [(size, generation_s(size)) for size in allowed]
    training = [(size, training_s(size)) for size in allowed]
    least_s, best = float("inf"), (0, 0)
    for x, generating_s in generating:
        for y, trained_s in training:
            if x + y <= num_gpus and max(generating_s, trained_s) < least_s:
                least_s, best = max(generating_s, trained_s), (x, y)
    return best


def cross_datacenter(
    num_generation: int,
    num_training: int,
    generation_s: StageTime,
    training_s: StageTime,
    generation_sizes: Iterable[int] = (),
    training_sizes: Iterable[int] = (),
) -> tuple[int, int]:
    """Everything, less what the faster stage has too much: its size whose time is nearest to the slower stage's.

    Source: StreamRL Algorithm 1, second part. Ties, which the paper leaves open, go to fewer GPUs.
    """
    generating_s, trained_s = generation_s(num_generation), training_s(num_training)
    if generating_s < trained_s:
        sizes = generation_sizes or range(1, num_generation + 1)
        return min(sizes, key=lambda size: abs(generation_s(size) - trained_s)), num_training
    sizes = training_sizes or range(1, num_training + 1)
    return num_generation, min(sizes, key=lambda size: abs(training_s(size) - generating_s))


def algorithm_one(bounds: Bounds, candidates: Sequence[Split], chosen: Split) -> list[Split]:
    """The splits of the sizes that Algorithm 1 picks in the pools of ``chosen``, each stage with its best degrees."""
    among = [s for s in candidates if s.generation is chosen.generation and s.training is chosen.training]
    generating: dict[int, float] = {}
    training: dict[int, float] = {}
    for split in among:
        generation_s, training_s = bounds.stages_s(split)
        generating[split.generation_gpus] = min(generation_s, generating.get(split.generation_gpus, generation_s))
        training[split.training_gpus] = min(training_s, training.get(split.training_gpus, training_s))
    x_sizes, y_sizes = sorted(generating), sorted(training)
    x_s, y_s = partial(_time, generating), partial(_time, training)
    if chosen.generation is chosen.training:
        picked = single_datacenter(chosen.generation.num_gpus, x_s, y_s, sorted({*x_sizes, *y_sizes}))
    else:
        picked = cross_datacenter(x_sizes[-1], y_sizes[-1], x_s, y_s, x_sizes, y_sizes)
    return [split for split in among if (split.generation_gpus, split.training_gpus) == picked]


def _time(times: dict[int, float], size: int) -> float:
    """Of a stage; infinite for a size at which nothing fits."""
    return times.get(size, float("inf"))


def against_algorithm_one(processes: int) -> tuple[list[str], dict[str, Any]]:
    """What Algorithm 1 answers for the 72B on 128 H800, beside the plan of ``streamrl-orchestrator plan``."""
    groups = tuple((round(samples[0]),) for samples in lengths_of(FULL_LENGTH, 8 * 1024, 0, None).lengths)
    job = Job(llm=QWEN_72B, groups=groups, algorithm="ppo", assumed=ASSUMED)
    pool = Pool(gpu=H800, num_gpus=128, price=H800.price)
    plan = advise(job, [pool], processes=processes).best
    candidates = splits(QWEN_72B, [pool], context_tokens=job.context_tokens, max_instances=job.samples)
    bounds = Bounds(job, job.workload(1))
    rule = predict(job, LONG, bounds.quickest(algorithm_one(bounds, candidates, plan.split)) or plan.split)
    lines = [
        f"72B on 128 H800, {name}: {of.split.generation_gpus} + {of.split.training_gpus}, {of.iteration_s:.1f} s"
        for name, of in (("our plan", plan), ("Algorithm 1 as printed", rule))
    ]
    return lines, {
        "plan": [plan.split.generation_gpus, plan.split.training_gpus, round(plan.iteration_s, 2)],
        "algorithm_one": [rule.split.generation_gpus, rule.split.training_gpus, round(rule.iteration_s, 2)],
    }


# -- Algorithm 2


def two_class_sum(problem: Problem) -> Plan:
    """The split into a long tail and the rest with the least sum of both latencies, which gains next to nothing."""
    return two_class(problem, lambda long_s, rest_s: long_s + rest_s, "two_class_sum")


def plan_of(policy: str, problem: Problem) -> Plan:
    """``plan_dispatch``, which knows the policies of a run, and the one as printed."""
    return two_class_sum(repaired(problem)) if policy == "two_class_sum" else plan_dispatch(policy, problem)
