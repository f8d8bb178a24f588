"""Several runs side by side: settings that differ, and results with the direction in which they differ.

Runs of different length are compared where all of them were: at the last batch that each has trained, at the last
version that each evaluated, and after as many seconds as the quickest took. A difference from the first run counts as
better or worse only where it is larger than twice its standard error over those batches (of an evaluation: over its
problems, as far as rewards in [0, 1] can vary); it says nothing of what other seeds would have given.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from rich.table import Table
from rich.text import Text

from orchestrator.errors import printable
from orchestrator.observability.metrics import sets_of
from orchestrator.observability.report.bubbles import Cause
from orchestrator.observability.report.record import RunRecord, duration, verdict

LAST = 10  # batches over which a run's numbers are averaged: one batch is mostly noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A result of one run. error: standard error, None where it is not known, and nothing is said of a difference."""

    value: float
    error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result of all runs, the first of which the others are compared with.

    better: 1 where more is, -1 where less is, 0 where neither.  style: of the numbers, as ``format`` reads it.
    """

    name: str
    numbers: Sequence[Number | None]
    better: int = 0
    style: str = ".3f"

    def cells(self) -> list[tuple[str, str, str]]:
        """Of each run (value, difference from the first, "good" | "bad" | "same" | "")."""
        return [self._cell(number) for number in self.numbers]

    def _cell(self, number: Number | None) -> tuple[str, str, str]:
        first = self.numbers[0]
        if number is None:
            return "", "", ""
        text = format(number.value, self.style)
        if first is None or number is first:
            return text, "", ""
        change = number.value - first.value
        said = f"{100 * change:+.1f} pp" if self.style.endswith("%") else format(change, f"+{self.style}")
        if not self.better or first.error is None or number.error is None:
            return text, said, ""
        if abs(change) <= 2 * math.hypot(first.error, number.error):
            return text, f"{said} noise", "same"
        better = change * self.better > 0
        return text, f"{said} {'better' if better else 'worse'}", "good" if better else "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """at: the batch, from 1, at which the numbers of all runs are; 0 where one trained none.  results: by heading."""

    names: Sequence[str]
    runs: Sequence[RunRecord]
    at: int
    results: Mapping[str, Sequence[Row]] = field(default_factory=dict[str, Sequence[Row]])


def compare_runs(runs: Sequence[RunRecord]) -> Comparison:
    at = min((run.lines[-1]["batch"] + 1 if run.lines else 0) for run in runs)
    known = {heading: [row for row in rows if any(row.numbers)] for heading, rows in _results(runs, at)}
    results = {heading: rows for heading, rows in known.items() if rows}
    return Comparison(names=labels(runs), runs=runs, at=at, results=results)


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run; runs of one name are numbered."""
    names = [run.name for run in runs]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def outcomes(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of what each run was as a whole, in words."""
    return [
        ["outcome", *(verdict(run)[1] for run in runs)],
        ["batches", *(str(len(run.lines)) for run in runs)],
        ["duration", *(duration(run.seconds) for run in runs)],
        ["held-out reward", *map(_held_out_ends, runs)],
        ["failed and retried", *(str(len(run.troubles)) for run in runs)],
    ]


def _held_out_ends(run: RunRecord) -> str:
    found = [line for line in run.evaluations if "eval_reward" in line]
    if not found:
        return ""
    first = f"{found[0]['eval_reward']:.3f} → " if len(found) > 1 else ""
    return f"{first}{found[-1]['eval_reward']:.3f} at version {found[-1]['version']}"


# --- the numbers ------------------------------------------------------------------------------------------------------

Values = Mapping[str, tuple[int, str]]  # key -> (direction, style)
LEARNING: Values = {
    "no_signal": (-1, ".1%"),
    "truncated": (-1, ".1%"),
    "response_tokens": (0, ".1f"),
    "loss": (0, ".4f"),
    "entropy": (0, ".3f"),
    "kl": (0, ".4f"),
    "grad_norm": (0, ".3f"),
    "critic_value_loss": (-1, ".4f"),
    "critic_explained_variance": (1, ".3f"),
    "critic_grad_norm": (0, ".3f"),
    "logprob_mismatch": (-1, ".4f"),
    "staleness": (-1, ".2f"),
}
SPEED: Values = {"seconds": (-1, ".2f"), "samples_per_s": (1, ".1f"), "tokens_per_s": (1, ".0f")}


def _results(runs: Sequence[RunRecord], at: int) -> Iterator[tuple[str, list[Row]]]:
    def rows(values: Values) -> list[Row]:
        return [
            Row(name=key, numbers=[_mean(_last(run, at), key) for run in runs], better=better, style=style)
            for key, (better, style) in values.items()
        ]

    components = sorted({name for run in runs for name in run.components})
    elapsed_s = min((_elapsed(run.lines[-1], run) for run in runs if run.lines), default=0.0)
    quick = [[line for line in run.lines if _elapsed(line, run) <= elapsed_s][-LAST:] for run in runs]
    same_time = Row(
        name=f"reward after {duration(elapsed_s)}", numbers=[_mean(one, "reward") for one in quick], better=1
    )
    yield "held-out problems", list(_held_out(runs, components))
    yield "reward", [*rows({"reward": (1, ".3f")}), same_time, *rows({name: (0, ".3f") for name in components})]
    yield "learning", rows(LEARNING)
    yield "speed", rows(SPEED)
    yield (
        "bubbles: share of the time",
        [
            Row(name=f"{stage} {cause}", numbers=[_idle(run, at, stage, cause) for run in runs], better=-1, style=".1%")
            for stage in ("generation", "trainer")
            for cause in Cause
        ],
    )


def _last(run: RunRecord, at: int) -> list[Mapping[str, Any]]:
    """The batches up to number ``at`` that its numbers there are means over: at most LAST, and not the first half."""
    return [line for line in run.lines if at - min(LAST, -(-at // 2)) <= line["batch"] < at]


def _elapsed(line: Mapping[str, Any], run: RunRecord) -> float:
    """Seconds from when its first batch began: starting up is no merit of settings."""
    return line.get("time_s", 0.0) - run.lines[0].get("time_s", 0.0) + run.lines[0].get("seconds", 0.0)


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> Number | None:
    values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
    if not values:
        return None
    return Number(value=fmean(values), error=math.sqrt(variance(values) / len(values)) if len(values) > 1 else None)


def _held_out(runs: Sequence[RunRecord], components: Sequence[str]) -> Iterator[Row]:
    """At the last version that all runs evaluated; where that is the untrained one at most, of the last of each."""
    by_version = [{line["version"]: line for line in run.evaluations} for run in runs]
    common = max(set(by_version[0]).intersection(*by_version), default=0)
    lines = [each.get(common or max(each, default=0), {}) for each in by_version]
    at = f"at version {common}" if common else "of the last weights"
    for name in ("reward", *components):
        found = [_of_problems(line, f"eval_{name}") for line in lines]
        yield Row(name=f"{name} {at}" if name == "reward" else name, numbers=found, better=int(name == "reward"))
    for name, keys in sets_of(lines).items():
        for key in keys:
            if key == "reward" or key.startswith("pass@"):
                found = [_of_problems(line, f"eval/{name}/{key}", of=f"eval/{name}/problems") for line in lines]
                yield Row(name=f"{name}: {key}", numbers=found, better=1)


def _of_problems(line: Mapping[str, Any], key: str, of: str = "eval_answered") -> Number | None:
    """of: how many problems it is the mean of, each of which counts as one however often it was answered."""
    value, answered = line.get(key), line.get(of, 0)
    if not isinstance(value, int | float):
        return None
    known = answered and 0.0 <= value <= 1.0
    return Number(value=value, error=math.sqrt(value * (1 - value) / answered) if known else None)


def _idle(run: RunRecord, at: int, stage: str, cause: Cause) -> Number | None:
    """Of all batches up to ``at``; of waits that follow from one another there is no standard error."""
    lines = [line for line in run.lines if line["batch"] < at]
    present_s = sum(line.get(f"{stage}_present_s", 0.0) for line in lines)
    idle_s = sum(line.get(f"bubble_{stage}_{cause}_s", 0.0) for line in lines)
    return Number(value=idle_s / present_s, error=IDLE_ERROR) if present_s else None


IDLE_ERROR = 0.01  # ours: a difference of less than three points of a hundred is not called better or worse


# --- on a terminal ----------------------------------------------------------------------------------------------------

COLUMNS = 100
SIDE_BY_SIDE = 4  # runs in one table of COLUMNS; more are shown in further tables, each beside the first
SHORT = ("no_signal", "seconds", "tokens_per_s")  # beside reward and held-out problems, what a short table shows
NUM_BUBBLES = 3
COLORS = {"good": "green", "bad": "red", "same": "dim", "": ""}


def tables(comparison: Comparison, settings: Sequence[Sequence[str]]) -> Iterator[Table]:
    """The comparison in short, within COLUMNS. settings: rows (key, value in each run) that differ."""
    others = range(1, len(comparison.names))
    for begin in range(0, len(others), SIDE_BY_SIDE - 1):
        yield _table(comparison, settings, [0, *others[begin : begin + SIDE_BY_SIDE - 1]])


def _table(comparison: Comparison, settings: Sequence[Sequence[str]], chosen: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), width=COLUMNS, pad_edge=False)
    table.add_column("", no_wrap=True, ratio=5)
    for place in chosen:
        table.add_column(Text(printable(comparison.names[place])), no_wrap=True, ratio=5 if place else 3)
    worded = [("settings that differ", settings), ("runs", outcomes(comparison.runs))]
    for heading, rows in worded:
        table.add_row(Text(heading, style="bold"))
        for name, *values in rows or [["none", *[""] * len(comparison.names)]]:
            table.add_row(*(Text(printable(text)) for text in (f"  {name}", *(values[place] for place in chosen))))
    for heading, rows in _short(comparison.results):
        table.add_row(Text(heading, style="bold"))
        for row in rows:
            cells = [row.cells()[place] for place in chosen]
            said = [Text(f"{text:<7} ").append(change, style=COLORS[kind]) for text, change, kind in cells]
            table.add_row(Text(printable(f"  {row.name}")), *said)
    return table


def _short(results: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, Sequence[Row]]]:
    for heading, rows in results.items():
        if heading.startswith("bubbles"):
            largest = sorted(rows, key=lambda row: -max(number.value for number in row.numbers if number))
            yield heading, largest[:NUM_BUBBLES]
        elif chosen := [row for row in rows if heading in ("reward", "held-out problems") or row.name in SHORT]:
            yield heading, chosen
