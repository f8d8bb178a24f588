"""What ``streamrl-orchestrator plan`` answers, for people and for programs. How to read it: docs/planning.md.

Owns: words and numbers of the answer. Never: a choice. Invariant: text and record say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

from orchestrator.planning.allocation import Objective, Pool, Split, released
from orchestrator.planning.length_files import Group
from orchestrator.planning.plan_search import Advice
from orchestrator.planning.split_search import Job, Prediction

SECONDS_PER_HOUR = 3600.0
NEVER_IDLE = 0.02
"""Share of the time below which a stage counts as always busy: optimizer, loads and the first samples take as much."""


def as_text(advice: Advice, job: Job, pools: Sequence[Pool], seconds: float, warnings: Sequence[str] = ()) -> str:
    """What people read; docs/planning.md explains each line. warnings: of the profile that was used."""
    best = advice.best
    rows = [("plan", best), *((title, other) for title, other in others(advice) if other is not None)]
    freed = ", ".join(f"{count}x{place}" for place, count in released(best.split, pools).items())
    lines = [
        f"{job.llm.name} on {', '.join(map(str, pools))}; {job.pipeline}, {job.batch} prompts x {job.group_size}, "
        f"{job.algorithm}; {lengths_line(job.groups)}",
        *(f"note: {note}" for note in (*notes(job), *warnings)),
        "",
        f"generate on {stage(best.split, generation=True)}",
        f"train on    {stage(best.split, generation=False)}",
        f"dispatch    {job.dispatch(best.split)}, the default of such a run",
        *([f"released    {freed}"] if freed else []),
        "",
        f"{'':14}{'generate + train':>18}{'s/iteration':>13}{'samples/s':>11}{'cost/1000':>11}"
        f"{'gen. idle':>11}{'thin':>7}{'train idle':>12}",
        *(row(title, prediction, job) for title, prediction in rows),
        "",
        bound_line(best, job),
        why(advice),
        searched(advice, seconds),
    ]
    return "\n".join(lines)


def searched(advice: Advice, seconds: float) -> str:
    """How far the search went, and whether it was cut short."""
    found = advice.found
    counts = f"{found.num_candidates} splits, {len(found.outcomes)} simulated"
    if found.num_cut:
        return f"{counts}, those with the best bounds; {found.num_cut} more might be better; {seconds:.1f} s"
    return f"{counts}, the others cannot be better by their bounds; {seconds:.1f} s"


def others(advice: Advice) -> list[tuple[str, Prediction | None]]:
    """What the plan is compared with."""
    return [("runner-up", advice.runner_up), ("even split", advice.even)]


def size(split: Split) -> str:
    """``40 + 88``."""
    return f"{split.generation_gpus} + {split.training_gpus}"


def stage(split: Split, *, generation: bool) -> str:
    if generation:
        return (
            f"{split.generation_gpus}x{split.generation.place}: {split.instances} instances of "
            f"{split.tensor_parallel} (tensor parallel)"
        )
    return (
        f"{split.training_gpus}x{split.training.place}: {split.ranks} data-parallel ranks of "
        f"{split.training_tensor_parallel} (tensor) x {split.pipeline_parallel} (pipeline)"
    )


def row(title: str, prediction: Prediction, job: Job) -> str:
    seconds = prediction.iteration_s
    return (
        f"{title:14}{size(prediction.split):>18}{seconds:>13.4g}{job.samples / seconds:>11.4g}"
        f"{cost_per_1000(prediction, job):>11.4g}{prediction.generation_idle:>11.1%}{prediction.generation_thin:>7.1%}"
        f"{prediction.trainer_idle:>12.1%}"
    )


def cost_per_1000(prediction: Prediction, job: Job) -> float:
    """Of samples, in the currency of prices per GPU-hour."""
    return prediction.split.price * prediction.iteration_s / SECONDS_PER_HOUR / job.samples * 1000


def bound_line(best: Prediction, job: Job) -> str:
    least = best.bound
    limit_s = least.iteration_s(job.settings.max_staleness)
    return (
        f"no schedule of this split beats {limit_s:.4g} s (generation {least.generation_s:.4g} s, training "
        f"{least.training_s:.4g} s, longest sample alone {least.longest_s:.4g} s): the plan takes "
        f"{best.iteration_s / limit_s:.2f} times that; weights are {best.transfer_s:.2g} s on their way; "
        f"trained tokens are {best.mean_age:.2f} versions old on average, {best.oldest_age} at most"
    )


def why(advice: Advice) -> str:
    """What is wrong with the runner-up."""
    best, other = advice.best, advice.runner_up
    if other is None:
        return "there is no other split that fits"
    slower = other.iteration_s / best.iteration_s - 1
    dearer = other.split.price * other.iteration_s / (best.split.price * best.iteration_s) - 1
    return (
        f"the runner-up, {size(other.split)}, is {compared(slower, 'slower', 'faster')} and its samples are "
        f"{compared(dearer, 'dearer', 'cheaper')}: {limit(other)}"
    )


def limit(prediction: Prediction) -> str:
    """Which stage an iteration waits for."""
    if prediction.trainer_idle < NEVER_IDLE:
        return f"its trainer is always busy, {prediction.bound.training_s:.4g} s an iteration at the least"
    waits = f"its trainer waits {prediction.trainer_idle:.1%} of the time"
    if prediction.generation_idle < NEVER_IDLE:
        return f"{waits} for generation, which never does"
    return f"{waits}, its generation {prediction.generation_idle:.1%}"


def compared(share: float, more: str, less: str) -> str:
    """``3.1% slower``."""
    return f"{abs(share):.1%} {more if share >= 0 else less}"


def lengths_line(groups: Sequence[Group]) -> str:
    ordered = sorted(tokens for group in groups for tokens in group)
    tail = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"{len(ordered)} lengths: mean {fmean(ordered):.0f}, P50 {ordered[len(ordered) // 2]}, P99 {tail}, "
        f"longest {ordered[-1]} tokens"
    )


def notes(job: Job) -> list[str]:
    """What about the input makes the answer worth less."""
    found: list[str] = []
    if len(job.groups) == 1:
        found.append("the file has one prompt: every batch is made of it, and a plan for other lengths will differ")
    elif len({tokens for group in job.groups for tokens in group}) == 1:
        found.append("all lengths are equal (cut by a limit?): there is no tail, and a ranker has nothing to order")
    return found


def as_record(
    advice: Advice,
    job: Job,
    pools: Sequence[Pool],
    minimise: Objective,
    seconds: float,
    warnings: Sequence[str] = (),
) -> dict[str, object]:
    """The same for programs. Prices are per GPU-hour, cost is per sample."""
    return {
        "model": job.llm.name,
        "gpus": [str(pool) for pool in pools],
        "pipeline": job.pipeline,
        "minimise": minimise,
        "samples_per_iteration": job.samples,
        "notes": [*notes(job), *warnings],
        "plan": record(advice.best, job),
        **{
            title.replace(" ", "_").replace("-", "_").lower(): record(other, job) if other is not None else None
            for title, other in others(advice)
        },
        "released": released(advice.best.split, pools),
        "why": why(advice),
        "splits": advice.found.num_candidates,
        "simulated": len(advice.found.outcomes),
        "left_out": advice.found.num_cut,
        "seconds": round(seconds, 3),
    }


def record(prediction: Prediction, job: Job) -> dict[str, object]:
    split = prediction.split
    degrees: dict[str, object] = {
        "dispatch": job.dispatch(split),
        "generation_gpus": split.generation_gpus,
        "generation_on": split.generation.place,
        "instances": split.instances,
        "tensor_parallel": split.tensor_parallel,
        "training_gpus": split.training_gpus,
        "training_on": split.training.place,
        "ranks": split.ranks,
        "training_tensor_parallel": split.training_tensor_parallel,
        "pipeline_parallel": split.pipeline_parallel,
    }
    figures = {
        "iteration_s": prediction.iteration_s,
        "samples_per_s": job.samples / prediction.iteration_s,
        "cost_per_sample": cost_per_1000(prediction, job) / 1000,
        "generation_idle": prediction.generation_idle,
        "generation_thin": prediction.generation_thin,
        "trainer_idle": prediction.trainer_idle,
        "transfer_s": prediction.transfer_s,
        "mean_age": prediction.mean_age,
        "oldest_age": prediction.oldest_age,
    }
    bounds = {f"bound_{name}": seconds for name, seconds in asdict(prediction.bound).items()}
    return {**degrees, **{name: round(value, 6) for name, value in {**figures, **bounds}.items()}}
