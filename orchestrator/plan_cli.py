"""``streamrl-orchestrator plan``: which GPUs should generate, which should train, and what to expect of it.

Owns: arguments, and what is printed. Never: the search (``sim/advice.py``). How to read the answer: docs/planning.md.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, get_args

import msgspec
import typer

from orchestrator.core.allocation import Objective, Outcome, Pool, Split, released
from orchestrator.core.analytic import Algorithm, DoesNotFitError
from orchestrator.core.hardware import GPUS
from orchestrator.core.llms import LLMS, Llm, UnknownModelError, from_config
from orchestrator.errors import ConfigError
from orchestrator.sim.advice import Advice, advise
from orchestrator.sim.allocating import Job, Prediction
from orchestrator.sim.length_files import Group, read_lengths
from orchestrator.sim.scenarios import PIPELINES

POOL = re.compile(r"(?P<count>[0-9]+)x(?P<gpu>[A-Za-z0-9.-]+)(@(?P<site>[\w.-]+))?")
MAX_GPUS = 100_000
SECONDS_PER_HOUR = 3600.0
NEVER_IDLE = 0.02
"""Share of the time below which a stage counts as always busy: optimizer, loads and the first samples take as much."""
GBPS = 1e9 / 8
"""Bytes a second of one Gbit/s."""


def plan(
    gpus: Annotated[
        str,
        typer.Option(
            help=f"Pools of GPUs: COUNTxTYPE[@SITE], separated by commas, as 64xH20@west,32xH800@east. Types: "
            f"{', '.join(GPUS)}.",
            show_default=False,
        ),
    ],
    model: Annotated[str, typer.Option(help=f"{', '.join(LLMS)}; or a Hugging Face config.json.", show_default=False)],
    lengths: Annotated[
        Path,
        typer.Option(
            help='Response lengths to expect, tokens: one a line; or JSON lines with "prompt" and "output_tokens".',
            show_default=False,
        ),
    ],
    pipeline: Annotated[str, typer.Option(help=f"{', '.join(PIPELINES)} (docs/modes.md).")] = "in_flight",
    batch: Annotated[int, typer.Option(min=1, help="Prompts of a batch.")] = 1024,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of a prompt.")] = 1,
    algorithm: Annotated[str, typer.Option(help=f"{', '.join(get_args(Algorithm))}: what a token costs.")] = "grpo",
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prompt.")] = 500,
    recall: Annotated[
        float, typer.Option(min=0.2, max=1.0, help="Share of the longest 20% that the length ranker finds.")
    ] = 0.75,
    minimise: Annotated[str, typer.Option(help="time: seconds of an iteration; cost: price of a sample.")] = "time",
    prices: Annotated[
        str, typer.Option(help="Price of a GPU-hour: TYPE=PRICE, separated by commas. [relative: an H20 is 1.00]")
    ] = "",
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Link between two sites, Gbit/s.")] = 80.0,
    seed: Annotated[int, typer.Option(help="Of the order of prompts and of the ranker's errors.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Simulations at once. [0: one a core]")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    pools = parse_pools(gpus, parse_prices(prices))
    llm = parse_model(model)
    groups = read_lengths(lengths, group_size)
    job = Job(
        llm=llm,
        groups=tuple(groups),
        pipeline=one_of("--pipeline", pipeline, PIPELINES),
        batch=batch,
        group_size=group_size,
        algorithm=one_of("--algorithm", algorithm, get_args(Algorithm)),
        prompt_tokens=prompt_tokens,
        recall=recall if recall < 1.0 else None,
        link_bytes_per_s=link_gbps * GBPS,
        seed=seed,
    )
    goal: Objective = one_of("--minimise", minimise, get_args(Objective))
    started_s = time.monotonic()
    progress = Progress()
    try:
        advice = advise(job, pools, goal, processes=processes or os.cpu_count() or 1, progress=progress)
    except DoesNotFitError as error:
        raise ConfigError(str(error), where="--gpus") from error
    finally:
        progress.end()
    seconds = time.monotonic() - started_s
    if as_json:
        typer.echo(msgspec.json.encode(as_record(advice, job, pools, goal, seconds)).decode())
        return
    typer.echo(as_text(advice, job, pools, seconds))


# -- arguments


def parse_pools(text: str, prices: Mapping[str, float]) -> list[Pool]:
    """``64xH20@west,32xH800@east``. Raises ConfigError."""
    pools: dict[str, Pool] = {}
    for part in text.split(","):
        found = POOL.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{part.strip()!r} is not COUNTxTYPE[@SITE], as 128xH800", where="--gpus")
        gpu = GPUS.get(found["gpu"].upper())
        if gpu is None:
            raise ConfigError(f"no GPU {found['gpu']!r} is known; there are {', '.join(GPUS)}", where="--gpus")
        if not 1 <= int(found["count"]) <= MAX_GPUS:
            raise ConfigError(f"{part.strip()}: from 1 to {MAX_GPUS:,} GPUs", where="--gpus")
        price = prices.get(gpu.name, gpu.price)
        pool = Pool(gpu=gpu, num_gpus=int(found["count"]), price=price, site=found["site"] or "")
        if pool.place in pools:
            raise ConfigError(f"{pool.place} is named twice", where="--gpus")
        pools[pool.place] = pool
    unused = set(prices) - {pool.gpu.name for pool in pools.values()}
    if unused:
        raise ConfigError(f"there is no {', '.join(sorted(unused))} among the GPUs", where="--prices")
    return list(pools.values())


def parse_prices(text: str) -> dict[str, float]:
    """``H20=1.2,H800=3``. Raises ConfigError."""
    prices: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 < price < float("inf"):
            raise ConfigError(f"{part!r} is not TYPE=PRICE with a price above 0", where="--prices")
        prices[name.strip().upper()] = price
    return prices


def parse_model(text: str) -> Llm:
    """A known name, or a configuration file, or a directory with one. Raises ConfigError."""
    if text in LLMS:
        return LLMS[text]
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        known = ", ".join(LLMS)
        raise ConfigError(f"{text!r} is neither a known model ({known}) nor a config.json", where="--model")
    try:
        return from_config(path.parent.name or text, msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError, UnknownModelError) as error:
        raise ConfigError(str(error), where=str(path)) from error


def one_of(option: str, value: Any, known: Sequence[str] | Mapping[str, Any]) -> Any:
    """``value``, if it is known. Raises ConfigError, which lists what is."""
    if value not in known:
        raise ConfigError(f"{value!r} is not one of {', '.join(known)}", where=option)
    return value


class Progress:
    """What the search has found so far, on standard error: one line that changes, or a line for each better plan."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._best: Split | None = None

    def __call__(self, done: int, most: int, best: Outcome) -> None:
        line = f"simulated {done} of at most {most}; best so far {size(best.split)}: {best.iteration_s:.4g} s"
        if self._terminal:
            typer.echo(f"\r{line:<100}", err=True, nl=False)
        elif best.split != self._best:
            typer.echo(line, err=True)
        self._best = best.split

    def end(self) -> None:
        """Leave the line."""
        if self._terminal and self._best is not None:
            typer.echo("", err=True)


# -- the answer


def as_text(advice: Advice, job: Job, pools: Sequence[Pool], seconds: float) -> str:
    """What people read; docs/planning.md explains each line."""
    best = advice.best
    rows = [("plan", best), *((title, other) for title, other in others(advice) if other is not None)]
    freed = ", ".join(f"{count}x{place}" for place, count in released(best.split, pools).items())
    lines = [
        f"{job.llm.name} on {', '.join(map(str, pools))}; {job.pipeline}, {job.batch} prompts x {job.group_size}, "
        f"{job.algorithm}; {lengths_line(job.groups)}",
        *(f"note: {note}" for note in notes(job)),
        "",
        f"generate on {stage(best.split, generation=True)}",
        f"train on    {stage(best.split, generation=False)}",
        *([f"released    {freed}"] if freed else []),
        "",
        f"{'':14}{'generate + train':>18}{'s/iteration':>13}{'samples/s':>11}{'cost/1000':>11}"
        f"{'gen. idle':>11}{'thin':>7}{'train idle':>12}",
        *(row(title, prediction, job) for title, prediction in rows),
        "",
        bound_line(best, job),
        why(advice),
        f"{advice.found.num_candidates} splits, {len(advice.found.outcomes)} simulated, the others cannot be better by "
        f"their bounds; {seconds:.1f} s",
    ]
    if advice.found.num_cut:
        lines[-1] = (
            f"{advice.found.num_candidates} splits, the {len(advice.found.outcomes)} with the best bounds simulated; "
            f"{advice.found.num_cut} more were left out; {seconds:.1f} s"
        )
    return "\n".join(lines)


def others(advice: Advice) -> list[tuple[str, Prediction | None]]:
    """What the plan is compared with."""
    return [("runner-up", advice.runner_up), ("even split", advice.even), ("Algorithm 1", advice.algorithm_one)]


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
    advice: Advice, job: Job, pools: Sequence[Pool], minimise: Objective, seconds: float
) -> dict[str, object]:
    """The same for programs. Prices are per GPU-hour, cost is per sample."""
    return {
        "model": job.llm.name,
        "gpus": [str(pool) for pool in pools],
        "pipeline": job.pipeline,
        "minimise": minimise,
        "samples_per_iteration": job.samples,
        "notes": notes(job),
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
    degrees = {
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
