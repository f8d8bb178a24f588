"""Several runs side by side: what was set differently, what came out, and the same curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from orchestrator.report.bubbles import Cause
from orchestrator.report.curves import Series, series_of
from orchestrator.report.drawing import to_svg
from orchestrator.report.page import CHARTS, drawn, html_page, section, table
from orchestrator.report.record import RunRecord
from orchestrator.report.timeline_drawing import draw_timeline

LAST = 10
"""Batches at the end of a run over which its numbers are averaged: one batch is mostly noise."""
MEANS = (
    ("reward", "{:.3f}"),
    ("response_tokens", "{:.1f}"),
    ("seconds", "{:.2f} s"),
    ("samples_per_s", "{:.1f}"),
    ("tokens_per_s", "{:.0f}"),
    ("staleness", "{:.2f}"),
    ("logprob_mismatch", "{:.4f}"),
    ("grad_norm", "{:.2f}"),
)
NOT_COMPARED = ("run.name", "run.dir", "broker.url", "broker.password")


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """The whole page, runs in the order given."""
    names = labels(runs)
    different = differing_settings(runs)
    charts = [(f"{title}: {line}" if len(parts) > 1 else title, key) for title, parts in CHARTS for line, key in parts]
    overlaid = [
        (title, [series_of(name, run.lines, key) for name, run in zip(names, runs, strict=True)])
        for title, key in charts
    ]
    timelines = [to_svg(draw_timeline(run.timeline, title=name)) for name, run in zip(names, runs, strict=True)]
    sections = [
        section(f"Results, means over the last {LAST} batches", table(["", *names], result_rows(runs))),
        section("Settings that differ", table(["", *names], different)),
        section("Curves", drawn([*overlaid, _held_out(names, runs)])),
        section("Timelines", "".join(f'<div class="scroll">{svg}</div>' for svg in timelines)),
    ]
    return html_page(" · ".join(names), sections)


def _held_out(names: Sequence[str], runs: Sequence[RunRecord]) -> tuple[str, list[Series]]:
    series = [
        series_of(name, run.evaluations, "eval_reward", over="version") for name, run in zip(names, runs, strict=True)
    ]
    return "reward of held-out problems, by version", series


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run; runs of one name are numbered."""
    names = [run.name for run in runs]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def result_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """One row a number, one column a run; empty where a run has no such number."""
    rows = [["batches", *(str(len(run.lines)) for run in runs)]]
    rows.append(["held-out reward, last", *(_last_evaluation(run) for run in runs)])
    rows.append(["run's seconds", *(f"{run.timeline.end_s:.0f}" for run in runs)])
    for key, text in MEANS:
        rows.append([key.replace("_", " "), *(_mean(run, key, text) for run in runs)])
    rows += [
        [f"{stage} idle: {cause}", *(_idle_share(run, stage, cause) for run in runs)]
        for stage in ("generation", "trainer")
        for cause in Cause
    ]
    rows.append(["failed and retried", *(str(sum(mark.trouble for mark in run.timeline.marks)) for run in runs)])
    return rows


def _mean(run: RunRecord, key: str, text: str) -> str:
    values = [line[key] for line in run.lines[-LAST:] if isinstance(line.get(key), int | float)]
    return text.format(fmean(values)) if values else ""


def _last_evaluation(run: RunRecord) -> str:
    """Of the newest version with an answer."""
    values = [(line["eval_reward"], line["version"]) for line in run.evaluations if "eval_reward" in line]
    return f"{values[-1][0]:.3f} at version {values[-1][1]}" if values else ""


def _idle_share(run: RunRecord, stage: str, cause: Cause) -> str:
    usage = run.usage_of(stage)
    return f"{usage.idle_s.get(cause, 0.0) / usage.present_s:.1%}" if usage.present_s else ""


def differing_settings(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of (key, value in each run) for the keys whose values are not all equal."""
    settings = [run.settings() for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one if key not in NOT_COMPARED))
    rows = [[key, *(str(one.get(key, "")) for one in settings)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
