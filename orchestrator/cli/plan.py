"""``streamrl-orchestrator plan``: which GPUs should generate, which should train, and what to expect of it.

The search is in ``planning/plan_search.py``; how to read the answer: docs/planning.md.
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

from orchestrator.config.rules import broken_by_deferring, broken_by_probes
from orchestrator.config.schema import to_toml
from orchestrator.core.model.settings import CoreSettings
from orchestrator.errors import ConfigError, check_out, writing_out
from orchestrator.planning.allocation import MeasuredSplit, Objective, Pool, Split, released
from orchestrator.planning.plan_search import Advice, Job, Prediction, advise, planned, run_settings
from orchestrator.planning.profiles import (
    NAME,
    Profile,
    check_model,
    extrapolated,
    hardware,
    llm_of,
    read_profile,
    variant_of,
)
from orchestrator.sim.costs import GPUS, OUR_TRAINER, Algorithm, DoesNotFitError, Gpu, Recompute
from orchestrator.sim.lengths import read_lengths
from orchestrator.sim.llms import HUB, LLMS
from orchestrator.sim.scenarios import PIPELINES
from transport.contracts.llms import Fp8, Llm, UnknownModelError, from_config
from transport.contracts.settings import PipelineSettings, Settings
from transport.errors import InputFileError
from transport.process.files import read_json
from transport.process.words import closest, did_you_mean

POOL = re.compile(r"(?P<count>[0-9]+)x(?P<gpu>[A-Za-z0-9.-]+)(@(?P<site>[\w.-]+))?")
MAX_GPUS = 100_000
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        help=f"What `profile` wrote (.json): one `{NAME}` is one generation worker or one rank of the trainer, as fast "
        "as they were there.",
    ),
]
Pipeline = Annotated[str, typer.Option(help=f"{', '.join(PIPELINES)} (docs/modes.md).")]
Batch = Annotated[int, typer.Option(min=1, help="Prompts of a batch.")]
GroupSize = Annotated[int, typer.Option(min=1, help="Samples of a prompt.")]
PlannedGroupSize = Annotated[int, typer.Option(min=2, help="Samples of a prompt, as pipeline.group_size.")]
TokenCost = Annotated[str, typer.Option(help=f"{', '.join(get_args(Algorithm))}: what a token costs.")]
Recall = Annotated[float, typer.Option(min=0.2, max=1.0, help="Share of the longest 20% that the length ranker finds.")]
LinkGbps = Annotated[float, typer.Option(min=0.001, help="Link between two sites, Gbit/s.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Drafted = Annotated[
    float, typer.Option(min=0, max=1, help="Acceptance of a token that engines draft, e.g. .55. [0: none drafts]")
]
SmallCaches = Annotated[bool, typer.Option("--fp8-kv", help="Keys and values of engines in one byte, not two.")]
SmallWeights = Annotated[bool, typer.Option("--fp8-weights", help="Weights that generate in one byte, not two.")]
Probes = Annotated[
    bool, typer.Option("--probes", help="One sample of a group runs first where it pays: pipeline.probes.")
]
Deferred = Annotated[
    int,
    typer.Option(
        "--defer",
        min=0,
        help="Groups of a batch, its slowest, that the next one trains: pipeline.oversampled_groups (docs/modes.md).",
    ),
]
GBPS = 1e9 / 8
"""Bytes a second of one Gbit/s."""
NEVER_IDLE = 0.02
"""Share of the time below which a stage counts as always busy: optimizer, loads and the first samples take as much."""


def plan(
    gpus: Annotated[
        str,
        typer.Option(
            help=f"Pools of GPUs: COUNTxTYPE[@SITE], separated by commas, as 64xH20@west,32xH800@east. Types: "
            f"{', '.join(GPUS)}; with --profile also {NAME}.",
        ),
    ],
    lengths: Annotated[
        Path,
        typer.Option(
            help='Response lengths to expect, tokens: one a line; or JSON lines with "prompt" and "output_tokens".',
        ),
    ],
    model: Annotated[
        str, typer.Option(help=f"{', '.join(LLMS)}; or a Hugging Face config.json. [that of --profile]")
    ] = "",
    profile: ProfileFile = None,
    pipeline: Pipeline = "in_flight",
    batch: Batch = 128,
    group_size: PlannedGroupSize = 8,
    algorithm: Annotated[str, typer.Option(help=f"{', '.join(OUR_TRAINER.algorithms)}: what a token costs.")] = "grpo",
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a prompt.")] = 500,
    recompute: Annotated[
        str, typer.Option(help="none, selective, whole: as trainer.recompute; less memory, and whole takes longer.")
    ] = "none",
    recall: Recall = 0.75,
    minimise: Annotated[str, typer.Option(help="time: seconds of an iteration; cost: price of a sample.")] = "time",
    prices: Annotated[
        str, typer.Option(help="Price of a GPU-hour: TYPE=PRICE, separated by commas. [relative: an H20 is 1.00]")
    ] = "",
    drafts: Drafted = 0.0,
    fp8_kv: SmallCaches = False,
    fp8_weights: SmallWeights = False,
    probes: Probes = False,
    defer: Deferred = 0,
    link_gbps: LinkGbps = 80.0,
    seed: Annotated[int, typer.Option(help="Of the order of prompts and of the ranker's errors.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Simulations at once. [0: one a core]")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the plan as settings of a run (`run --config`).")] = None,
    as_json: AsJson = False,
) -> None:
    if out is not None:
        check_out(out)
    measured = None if profile is None else read_profile(profile)
    fp8 = Fp8(kv=fp8_kv, weights=fp8_weights)
    measured = with_aids(measured, drafts, fp8)
    pools = parse_pools(gpus, parse_prices(prices), hardware(measured))
    llm = chosen_model(model, measured)
    skipped: list[str] = []
    groups = read_lengths(lengths, group_size, skipped.append)
    job = Job(
        llm=llm,
        groups=tuple(groups),
        pipeline=one_of("--pipeline", pipeline, PIPELINES),
        batch=batch,
        group_size=group_size,
        algorithm=one_of("--algorithm", algorithm, OUR_TRAINER.algorithms),
        prompt_tokens=prompt_tokens,
        recall=recall if recall < 1.0 else None,
        link_bytes_per_s=link_gbps * GBPS,
        drafts=drafts,
        fp8=fp8,
        probes=probes,
        deferred=defer,
        seed=seed,
        assumed=planned(one_of("--recompute", recompute, get_args(Recompute))),
    )
    check_tail_aids(job.settings, batch=batch, group_size=group_size)
    goal: Objective = one_of("--minimise", minimise, get_args(Objective))
    started_s = time.monotonic()
    progress = Progress()
    try:
        advice = advise(job, pools, goal, processes=processes or os.cpu_count() or 1, progress=progress)
    except DoesNotFitError as error:
        raise ConfigError(f"nothing fits: {error}", where="--gpus") from error
    finally:
        progress.end()
    seconds = time.monotonic() - started_s
    longest = max(max(group) for group in job.groups) + job.prompt_tokens  # of a sample, its prompt included
    warnings = skipped if measured is None else [*skipped, *extrapolated(measured, context_tokens=longest)]
    path = model_path(model, llm) if model or measured is None else measured.model
    engine = advice.best.split.generation.gpu.measured and measured and measured.engine
    settings = run_settings(job, advice.best, engine or "sglang", path)
    if out is not None:
        with writing_out(out):
            out.write_text(as_toml(settings, advice.best.split), encoding="utf-8")
    if as_json:
        record = {**as_record(advice, job, pools, goal, seconds, warnings), "settings": settings}
        typer.echo(msgspec.json.encode(record).decode())
        return
    typer.echo(as_text(advice, job, pools, seconds, warnings))
    if out is not None:
        typer.echo(f"settings in {out}: streamrl-orchestrator run --config {out} --dry-run prints them")


# -- arguments


def with_aids(measured: Profile | None, drafts: float, fp8: Fp8) -> Profile | None:
    """The profile as its engine is with these aids. Raises ConfigError: it was not measured with them."""
    if measured is None:
        return None
    if drafts:
        raise ConfigError("a profile says nothing of drafts: what comes true of them, a run measures", where="--drafts")
    return variant_of(measured, fp8) if fp8 else measured


def check_tail_aids(pipeline: CoreSettings, *, batch: int, group_size: int, dispatch: str = "auto") -> None:
    """Raises ConfigError where a run could not have its probes and deferred groups so."""
    taken = ("update", "membership", "probes", "oversampled_groups", "oversampled_tail")
    asked: dict[str, Any] = {name: getattr(pipeline, name) for name in taken}
    asked |= {"groups_per_batch": batch, "group_size": group_size, "dispatch": dispatch}
    for option, broken in (("--probes", broken_by_probes), ("--defer", broken_by_deferring)):
        for keys, reason in broken(Settings(pipeline=PipelineSettings(**asked))):
            raise ConfigError(f"{keys.split()[0]} {reason}", where=option)


def parse_pools(text: str, prices: Mapping[str, float], known: Mapping[str, Gpu] = GPUS) -> list[Pool]:
    """``64xH20@west,32xH800@east``, of the hardware that is ``known``. Raises ConfigError."""
    pools: dict[str, Pool] = {}
    for part in text.split(","):
        found = POOL.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{part.strip()!r} is not COUNTxTYPE[@SITE], as 128xH800", where="--gpus")
        gpu = known.get(found["gpu"].upper())
        if gpu is None:
            names = ", ".join(one.name for one in known.values())
            if found["gpu"].lower() == NAME:
                raise ConfigError(f"{part.strip()} needs --profile FILE, which says how fast it is", where="--gpus")
            near = did_you_mean(closest(found["gpu"], [one.name for one in known.values()]))
            raise ConfigError(
                f"no GPU {found['gpu']!r} is known{near}; there are {names}. Of another one give what was measured: "
                f"--profile FILE, and {found['count']}x{NAME}",
                where="--gpus",
            )
        if not 1 <= int(found["count"]) <= MAX_GPUS:
            raise ConfigError(f"{part.strip()}: from 1 to {MAX_GPUS:,} GPUs", where="--gpus")
        price = prices.get(gpu.name.upper(), gpu.price)
        pool = Pool(gpu=gpu, num_gpus=int(found["count"]), price=price, site=found["site"] or "")
        if pool.place in pools:
            raise ConfigError(f"{pool.place} is named twice", where="--gpus")
        pools[pool.place] = pool
    unused = set(prices) - {pool.gpu.name.upper() for pool in pools.values()}
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
    """A known name, its name on the hub, a configuration file, or a directory with one. Raises ConfigError."""
    if text in LLMS:
        return LLMS[text]
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        names = {name.lower(): name for name in LLMS} | {path.lower(): name for name, path in HUB.items()}
        if text.lower() in names:
            return LLMS[names[text.lower()]]
        near = did_you_mean(closest(text.rpartition("/")[2], LLMS))
        raise ConfigError(
            f"{text!r} is neither a known model{near} nor a config.json; known are {', '.join(LLMS)}. Of another model "
            "give the config.json",
            where="--model",
        )
    try:
        return from_config(path.parent.name or text, read_json(path, dict[str, Any]))
    except InputFileError as error:
        raise ConfigError(error.problem, where=error.where) from error
    except UnknownModelError as error:
        raise ConfigError(str(error), where=str(path)) from error


def model_path(text: str, llm: Llm) -> str:
    """What setting ``model.path`` is for ``--model``."""
    path = Path(text)
    if not path.exists() and llm.name in HUB:
        return HUB[llm.name]
    return str(path if path.is_dir() else path.parent)


def chosen_model(text: str, profile: Profile | None) -> Llm:
    """What ``--model`` names; the profiled model where it names none. Raises ConfigError."""
    if not text:
        if profile is None:
            raise ConfigError("which model? Give --model, or --profile FILE of one", where="--model")
        return llm_of(profile)
    llm = parse_model(text)
    if profile is not None:
        check_model(profile, llm)
    return llm


def one_of(option: str, value: Any, known: Sequence[str] | Mapping[str, Any]) -> Any:
    """``value``, if it is known. Raises ConfigError, which lists what is."""
    if value not in known:
        near = did_you_mean(closest(str(value), [*known]))
        raise ConfigError(f"{value!r} is not one of {', '.join(known)}{near}", where=option)
    return value


class Progress:
    """What the search has found so far, on standard error: one line that changes, or a line for each better plan."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._best: Split | None = None

    def __call__(self, done: int, most: int, best: MeasuredSplit) -> None:
        line = f"simulated {done} of at most {most}; best so far {size(best.split)}: {best.iteration_s:.4g} s"
        if self._terminal:
            typer.echo(f"\r{line:<100}", err=True, nl=False)
        elif best.split != self._best:
            typer.echo(line, err=True)
        self._best = best.split

    def end(self) -> None:
        if self._terminal and self._best is not None:
            typer.echo("", err=True)


# -- the answer


def as_text(advice: Advice, job: Job, pools: Sequence[Pool], seconds: float, warnings: Sequence[str] = ()) -> str:
    """What people read; docs/planning.md explains each line. warnings: of the profile that was used."""
    best, split, found = advice.best, advice.best.split, advice.found
    left = "the others cannot be better by their bounds"
    if found.num_cut:
        left = f"those with the best bounds; {found.num_cut} more might be better"
    ordered = sorted(tokens for group in job.groups for tokens in group)
    rows = [("plan", best), *((title, other) for title, other in others(advice) if other is not None)]
    words = in_words(job.pipeline, job.probes, job.deferred)
    freed = ", ".join(f"{count}x{place}" for place, count in released(split, pools).items())
    lines = [
        f"{job.llm.name} on {', '.join(map(str, pools))}; {words}, {job.batch} prompts x {job.group_size}, "
        f"{job.algorithm}; {len(ordered)} lengths: mean {fmean(ordered):.0f}, P50 {ordered[len(ordered) // 2]}, "
        f"P99 {ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}, longest {ordered[-1]} tokens",
        *(f"note: {note}" for note in (*notes(job, advice.best.split), *warnings)),
        "",
        f"generate on {split.generation_gpus}x{split.generation.place}: {split.instances} instances of "
        f"{split.tensor_parallel} (tensor parallel)",
        f"train on    {split.training_gpus}x{split.training.place}: {split.ranks} data x "
        f"{split.training_tensor_parallel} tensor x {split.pipeline_parallel} pipeline",
        f"dispatch    {job.dispatch(split)}, the default of such a run",
        *([f"released    {freed}"] if freed else []),
        "",
        f"{'':14}{'generate + train':>18}{'s/iteration':>13}{'samples/s':>11}{'cost/1000':>11}"
        f"{'gen. idle':>11}{'thin':>7}{'train idle':>12}",
        *(row(title, prediction, job) for title, prediction in rows),
        "",
        bound_line(best, job),
        why(advice),
        f"{found.num_candidates} splits, {len(found.measured)} simulated, {left}; {seconds:.1f} s",
    ]
    return "\n".join(lines)


def as_toml(settings: Mapping[str, Mapping[str, object]], split: Split) -> str:
    """The file for ``run --config``."""
    lines = [
        f"# {split.generation_gpus}x{split.generation.place} generate, {split.training_gpus}x{split.training.place} "
        "train; `run --dry-run` ends with who gets which (docs/planning.md)",
    ]
    for section, values in settings.items():
        lines += ["", f"[{section}]", *(f"{name} = {to_toml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def others(advice: Advice) -> list[tuple[str, Prediction | None]]:
    return [("runner-up", advice.runner_up), ("even split", advice.even)]


def size(split: Split) -> str:
    """``40 + 88``."""
    return f"{split.generation_gpus} + {split.training_gpus}"


def row(title: str, prediction: Prediction, job: Job) -> str:
    seconds = prediction.iteration_s
    return (
        f"{title:14}{size(prediction.split):>18}{seconds:>13.4g}{job.samples / seconds:>11.4g}"
        f"{cost_per_1000(prediction, job):>11.4g}{prediction.generation_idle:>11.1%}{prediction.generation_thin:>7.1%}"
        f"{prediction.trainer_idle:>12.1%}"
    )


def cost_per_1000(prediction: Prediction, job: Job) -> float:
    """Of samples, in the currency of prices per GPU-hour."""
    return prediction.split.price * prediction.iteration_s / 3600.0 / job.samples * 1000


def bound_line(best: Prediction, job: Job) -> str:
    least = best.bound
    limit_s = least.iteration_s(job.settings)
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

    def compared(share: float, more: str, less: str) -> str:
        return f"{abs(share):.1%} {more if share >= 0 else less}"

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


def in_words(pipeline: str, probes: bool, deferred: int) -> str:
    """A pipeline and the aids of its tail."""
    return ", ".join([pipeline, *(["probes"] if probes else []), *([f"{deferred} deferred"] if deferred else [])])


def notes(job: Job, split: Split) -> list[str]:
    """What about the input makes the answer worth less, and what the engines must be told for it to hold."""
    depth = job.layout(split, job.workload(1)).draft_depth
    on = [*([f"drafts ({depth} at every step)"] if depth else []), *(f"fp8 {name}" for name in job.fp8.names)]
    aids = [f"reckoned with {' and '.join(on)}, which the settings turn on for SGLang and vLLM"] if on else []
    if job.drafts and not depth:
        aids.append("SGLang and vLLM draft at every step, which loses at this batch: drafts stay off")
    if len(job.groups) == 1:
        return [*aids, "the file has one prompt: every batch is made of it, and a plan for other lengths will differ"]
    if len({tokens for group in job.groups for tokens in group}) == 1:
        return [*aids, "all lengths are equal (cut by a limit?): there is no tail, and a ranker has nothing to order"]
    return aids


def as_record(
    advice: Advice, job: Job, pools: Sequence[Pool], minimise: Objective, seconds: float, warnings: Sequence[str] = ()
) -> dict[str, object]:
    """The same for programs. Prices are per GPU-hour, cost is per sample."""
    return {
        "model": job.llm.name,
        "gpus": [str(pool) for pool in pools],
        "pipeline": job.pipeline,
        "probes": job.probes,
        "deferred": job.deferred,
        "minimise": minimise,
        "samples_per_iteration": job.samples,
        "notes": [*notes(job, advice.best.split), *warnings],
        "plan": record(advice.best, job),
        **{re.sub("[ -]", "_", title): other and record(other, job) for title, other in others(advice)},
        "released": released(advice.best.split, pools),
        "why": why(advice),
        "splits": advice.found.num_candidates,
        "simulated": len(advice.found.measured),
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
