"""``streamrl-orchestrator rank``: train, evaluate and use a length ranker on a user's own log of prompts and lengths.

The package ranker is imported only when a command runs.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from orchestrator.errors import DataError, check_out, writing_out

if TYPE_CHECKING:
    from ranker.logs import PromptLengths
    from ranker.model import TextModel
    from ranker.quality import RankQuality

rank = typer.Typer(
    help="Rank prompts by how long their responses will be: train on a log of (prompt, length), evaluate, score.",
    no_args_is_help=True,
)

SCORED_AT_ONCE = 2_000

Log = Annotated[
    Path,
    typer.Argument(
        help='JSON lines (or .gz): {"prompt": ..., "output_tokens": N or [N, ...]}; "base_tokens" if known.',
    ),
]
Prompts = Annotated[
    Path | None, typer.Option(help='File with the texts, {"id": ..., "prompt": ...}; the log then names prompts by id.')
]
Model = Annotated[str | None, typer.Option(help='Only lines whose "model" is this one.')]
Ranker = Annotated[Path | None, typer.Option("--ranker", help="A ranker from `rank train`.")]


@contextmanager
def bad_input() -> Iterator[None]:
    """What a user can mend about a file is exit code 2."""
    from ranker.protocol import RankerError

    try:
        yield
    except RankerError as error:
        raise DataError(str(error)) from error


@rank.command(help="Train on a log, split 7:2:1 by prompt; print how good it is on the prompts that it never saw.")
def train(
    log: Log,
    out: Annotated[Path, typer.Option(help="File to write the ranker to.")] = Path("ranker.bin"),
    prompts: Prompts = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(help="Of the split and of the trees.")] = 0,
) -> None:
    from ranker.model import StoredRanker, write_ranker
    from ranker.model import train as fit

    check_out(out)
    with bad_input():
        trained = fit(_samples(log, prompts, model), seed)
        write_ranker(out, StoredRanker(model=trained.model.stored))
    typer.echo(f"{trained.model.stored.num_prompts} prompts trained on, {trained.quality.num_prompts} tested on")
    typer.echo(_table([("this split", trained.quality)]))
    typer.echo(
        f"CPU seconds for 1,000 prompts: {trained.train_cpu_s_per_1000:.2f} to train, "
        f"{trained.score_cpu_s_per_1000:.2f} to score"
    )
    typer.echo(f"written to {out}")
    if trained.quality.recall_20 <= CHANCE_20:
        typer.echo(
            "warning: it finds no more of the longest fifth than chance does: the log has too few prompts, or lengths "
            "that their texts say nothing about; a run without it orders as well",
            err=True,
        )


@rank.command(help="Measure on a log: a trained ranker on all of it; without --ranker, fresh ones over several splits.")
def evaluate(
    log: Log,
    ranker: Ranker = None,
    prompts: Prompts = None,
    model: Model = None,
    splits: Annotated[int, typer.Option(min=1, help="Splits to train on, seeds 0, 1, ...; without --ranker.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    from ranker.model import train as fit
    from ranker.quality import evaluate as measure

    with bad_input():
        samples = _samples(log, prompts, model)
        if ranker is None:
            results = [(f"split {seed}", fit(samples, seed).quality) for seed in range(splits)]
        else:
            texts, base_tokens = [one.text for one in samples], [one.base_tokens for one in samples]
            results = [(ranker.name, measure(_load(ranker).predict(texts, base_tokens), samples))]
    typer.echo(_table(results))
    if as_json:
        typer.echo(msgspec.json.encode(_means([quality for _, quality in results])).decode())


@rank.command(
    help="Score prompts with a trained ranker: JSON lines for a run's ranker.scores, the longest expected first."
)
def score(
    prompts: Annotated[Path, typer.Argument(help='JSON lines (or .gz): {"prompt": ..., "id": ...}.')],
    ranker: Annotated[Path, typer.Option("--ranker", help="A ranker from `rank train`.")],
    out: Annotated[Path | None, typer.Option(help="File to write, gzipped if named .gz. [standard output]")] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of a prompt, for the longest expected of them.")] = 8,
) -> None:
    from ranker.logs import read_prompts

    with bad_input():
        texts = read_prompts(prompts, say=_note)
        text_model = _load(ranker)
    lines: list[tuple[float, bytes]] = []
    for start in range(0, len(texts), SCORED_AT_ONCE):
        part = texts[start : start + SCORED_AT_ONCE]
        for (prompt_id, text), estimate in zip(part, text_model.predict([text for _, text in part]), strict=True):
            scored: dict[str, str | float] = {
                "id": prompt_id,
                **({"prompt": text} if text != prompt_id else {}),
                "mean_tokens": round(estimate.mean_tokens, 1),
                "level_sigma": round(estimate.level_sigma, 4),
                "sample_sigma": round(estimate.sample_sigma, 4),
                "log_sigma": round(estimate.log_sigma, 4),
                "p50_tokens": round(estimate.quantile(0.5), 1),
                "p90_tokens": round(estimate.quantile(0.9), 1),
                "longest_of_group": round(estimate.group(group_size).max_tokens, 1),
            }
            lines.append((-estimate.mean_tokens, msgspec.json.encode(scored)))
    lines.sort(key=lambda line: line[0])
    content = b"".join(line + b"\n" for _, line in lines)
    if out is None:
        sys.stdout.buffer.write(content)
        return
    with writing_out(out):
        out.write_bytes(gzip.compress(content) if out.suffix == ".gz" else content)


def _samples(log: Path, prompts: Path | None, model: str | None) -> list[PromptLengths]:
    from ranker.logs import check_rankable, read_log

    samples = read_log(log, prompts, model, say=_note)
    check_rankable(samples, str(log))
    return samples


def _note(sentence: str) -> None:
    typer.echo(f"note: {sentence}", err=True)


def _load(path: Path) -> TextModel:
    from ranker.model import TextModel, read_ranker
    from ranker.protocol import RankerFileError

    stored = read_ranker(path)
    if stored.model is None:
        raise RankerFileError(f"{path} holds a history without a text model: it knows nothing of new prompts")
    return TextModel(stored.model)


CHANCE_20 = 0.2
"""Recall at 20% of an order that knows nothing."""
FIGURES = ("recall_20", "recall_10", "recall_5", "kendall_tau", "coverage")


def _means(results: Sequence[RankQuality]) -> dict[str, float]:
    """Over splits: means, and the standard deviations between them."""
    values = {name: [getattr(quality, name) for quality in results] for name in FIGURES}
    means = {name: round(fmean(each), 4) for name, each in values.items()}
    return {**means, **{f"{name}_sd": round(pstdev(each), 4) for name, each in values.items()}}


def _table(results: Sequence[tuple[str, RankQuality]]) -> str:
    """One line a result, and their mean and spread where there are several."""
    head = f"{'':14}{'prompts':>8}{'recall 20%':>15}{'10%':>15}{'5%':>15}{'tau':>15}{'80% interval':>15}"
    lines = [head]
    for name, quality in results:
        values = "".join(f"{getattr(quality, figure):>15.3f}" for figure in FIGURES)
        lines.append(f"{name:14}{quality.num_prompts:>8}{values}")
    if len(results) > 1:
        means = _means([quality for _, quality in results])
        values = "".join(f"{means[figure]:.3f} ± {means[f'{figure}_sd']:.3f}".rjust(15) for figure in FIGURES)
        lines.append(f"{'mean ± sd':14}{results[0][1].num_prompts:>8}{values}")
    return "\n".join(lines)
