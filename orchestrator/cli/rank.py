"""``streamrl-orchestrator rank``: train, evaluate and use a length ranker on a user's own log of prompts and lengths.

The package ranker is imported only when a command runs.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from orchestrator.errors import DataError
from orchestrator.run_outputs import writing_out

if TYPE_CHECKING:
    from ranker.logs import PromptLengths
    from ranker.model import TextModel, Trained
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
        show_default=False,
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
    from ranker.errors import RankerError

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
    from ranker import store
    from ranker.model import train as fit

    with bad_input():
        trained = fit(_samples(log, prompts, model), seed)
        store.write(out, store.StoredRanker(model=trained.model.stored))
    typer.echo(f"{trained.model.stored.num_prompts} prompts trained on, {trained.quality.num_prompts} tested on")
    typer.echo(_table([("this split", trained.quality)]))
    typer.echo(_cost(trained))
    typer.echo(f"written to {out}")


@rank.command(help="Measure on a log: a trained ranker on all of it; without --ranker, fresh ones over several splits.")
def evaluate(
    log: Log,
    ranker: Ranker = None,
    prompts: Prompts = None,
    model: Model = None,
    splits: Annotated[int, typer.Option(min=1, help="Splits to train on, seeds 0, 1, ...; without --ranker.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    with bad_input():
        samples = _samples(log, prompts, model)
        results = _of_stored(ranker, samples) if ranker is not None else _of_splits(samples, splits)
    typer.echo(_table(results))
    if as_json:
        typer.echo(msgspec.json.encode(_means([quality for _, quality in results])).decode())


@rank.command(help="Score a set of prompts with a trained ranker: JSON lines, the longest expected response first.")
def score(
    prompts: Annotated[
        Path, typer.Argument(help='JSON lines (or .gz): {"prompt": ..., "id": ...}.', show_default=False)
    ],
    ranker: Annotated[Path, typer.Option("--ranker", help="A ranker from `rank train`.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="File to write, gzipped if named .gz. [standard output]")] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Samples of a prompt, for the longest expected of them.")] = 8,
) -> None:
    from ranker.logs import read_prompts

    with bad_input():
        texts = list(read_prompts(prompts))
        text_model = _load(ranker)
    lines: list[tuple[float, bytes]] = []
    for start in range(0, len(texts), SCORED_AT_ONCE):
        part = texts[start : start + SCORED_AT_ONCE]
        for (prompt_id, _), estimate in zip(part, text_model.predict([text for _, text in part]), strict=True):
            scored = {
                "id": prompt_id,
                "mean_tokens": round(estimate.mean_tokens, 1),
                "log_sigma": round(estimate.log_sigma, 4),
                "p50_tokens": round(estimate.quantile(0.5), 1),
                "p90_tokens": round(estimate.quantile(0.9), 1),
                "longest_of_group": round(estimate.group(group_size).max_tokens, 1),
            }
            lines.append((-estimate.mean_tokens, msgspec.json.encode(scored)))
    lines.sort(key=lambda line: line[0])
    _write(b"".join(line + b"\n" for _, line in lines), out)


def _write(content: bytes, path: Path | None) -> None:
    if path is None:
        sys.stdout.buffer.write(content)
        return
    with writing_out(path):
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def _samples(log: Path, prompts: Path | None, model: str | None) -> list[PromptLengths]:
    from ranker.logs import check_rankable, read_log

    samples = read_log(log, prompts, model, say=lambda sentence: typer.echo(f"note: {sentence}", err=True))
    check_rankable(samples, str(log))
    return samples


def _load(path: Path) -> TextModel:
    from ranker import store
    from ranker.errors import RankerFileError
    from ranker.model import TextModel

    stored = store.read(path)
    if stored.model is None:
        raise RankerFileError(f"{path} holds a history without a text model: it knows nothing of new prompts")
    return TextModel(stored.model)


def _of_stored(path: Path, samples: Sequence[PromptLengths]) -> list[tuple[str, RankQuality]]:
    from ranker.quality import evaluate as measure

    estimates = _load(path).predict([sample.text for sample in samples], [sample.base_tokens for sample in samples])
    return [(path.name, measure(estimates, samples))]


def _of_splits(samples: Sequence[PromptLengths], splits: int) -> list[tuple[str, RankQuality]]:
    from ranker.model import train as fit

    return [(f"split {seed}", fit(samples, seed).quality) for seed in range(splits)]


FIGURES = ("recall_20", "recall_10", "recall_5", "kendall_tau", "coverage")


def _means(results: Sequence[RankQuality]) -> dict[str, float]:
    from ranker.model import spread

    means = {name: spread(results, lambda quality, name=name: getattr(quality, name)) for name in FIGURES}
    figures = {name: round(value.mean, 4) for name, value in means.items()}
    return {**figures, **{f"{name}_sd": round(value.deviation, 4) for name, value in means.items()}}


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


def _cost(trained: Trained) -> str:
    return (
        f"CPU seconds for 1,000 prompts: {trained.train_cpu_s_per_1000:.2f} to train, "
        f"{trained.score_cpu_s_per_1000:.2f} to score"
    )
