"""``streamrl-orchestrator plan``: which GPUs should generate, which should train, and what to expect of it.

Owns: arguments and progress. Never: the search (``planning/plan_search.py``), the words of the answer (``report.py``).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer

from orchestrator.core.costs.analytic import Algorithm, DoesNotFitError
from orchestrator.core.costs.hardware import GPUS, Gpu
from orchestrator.core.costs.llms import LLMS, Llm, UnknownModelError, from_config
from orchestrator.errors import ConfigError
from orchestrator.planning.allocation import Objective, Outcome, Pool, Split
from orchestrator.planning.length_files import read_lengths
from orchestrator.planning.plan_search import advise
from orchestrator.planning.profiles import NAME, Profile, check_model, extrapolated, hardware, llm_of, read_profile
from orchestrator.planning.report import as_record, as_text, size
from orchestrator.planning.split_search import Job
from orchestrator.sim.scenarios import PIPELINES
from transport.errors import InputFileError
from transport.process.json_files import read_json

POOL = re.compile(r"(?P<count>[0-9]+)x(?P<gpu>[A-Za-z0-9.-]+)(@(?P<site>[\w.-]+))?")
MAX_GPUS = 100_000
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        help=f"What `profile` wrote (.json): one `{NAME}` is one generation worker or one rank of the trainer, as fast "
        "as they were there.",
        show_default=False,
    ),
]
GBPS = 1e9 / 8
"""Bytes a second of one Gbit/s."""


def plan(
    gpus: Annotated[
        str,
        typer.Option(
            help=f"Pools of GPUs: COUNTxTYPE[@SITE], separated by commas, as 64xH20@west,32xH800@east. Types: "
            f"{', '.join(GPUS)}; with --profile also {NAME}.",
            show_default=False,
        ),
    ],
    lengths: Annotated[
        Path,
        typer.Option(
            help='Response lengths to expect, tokens: one a line; or JSON lines with "prompt" and "output_tokens".',
            show_default=False,
        ),
    ],
    model: Annotated[
        str, typer.Option(help=f"{', '.join(LLMS)}; or a Hugging Face config.json. [that of --profile]")
    ] = "",
    profile: ProfileFile = None,
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
    measured = None if profile is None else read_profile(profile)
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
    warnings = skipped if measured is None else [*skipped, *extrapolated(measured, context_tokens=longest_tokens(job))]
    if as_json:
        typer.echo(msgspec.json.encode(as_record(advice, job, pools, goal, seconds, warnings)).decode())
        return
    typer.echo(as_text(advice, job, pools, seconds, warnings))


def longest_tokens(job: Job) -> int:
    """Of a sample, its prompt included."""
    return max(max(group) for group in job.groups) + job.prompt_tokens


# -- arguments


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
            raise ConfigError(f"no GPU {found['gpu']!r} is known; there are {names}", where="--gpus")
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
    """A known name, or a configuration file, or a directory with one. Raises ConfigError."""
    if text in LLMS:
        return LLMS[text]
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        known = ", ".join(LLMS)
        raise ConfigError(f"{text!r} is neither a known model ({known}) nor a config.json", where="--model")
    try:
        return from_config(path.parent.name or text, read_json(path, dict[str, Any]))
    except InputFileError as error:
        raise ConfigError(error.problem, where=error.where) from error
    except UnknownModelError as error:
        raise ConfigError(str(error), where=str(path)) from error


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
