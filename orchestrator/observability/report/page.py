"""One run as one HTML file, and a page that compares several: no script, no link, no file beside it.

Invariant: the templates escape every string of a run and remove its control characters, and the page's own policy
forbids scripts and requests, so that a model's output can do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from orchestrator.observability.report.bubbles import Cause, Usage
from orchestrator.observability.report.drawing import Series, draw_chart, series_of, to_svg
from orchestrator.observability.report.record import RunRecord
from orchestrator.observability.report.timeline_drawing import CAUSE_COLORS, draw_timeline
from orchestrator.terminal_text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_TROUBLES = 200
"""Lines of what failed; a run with more has a reason that shows in the first ones."""

Parts = Sequence[tuple[str, str]]
CHARTS: Sequence[tuple[str, Parts]] = (
    ("reward", (("mean", "reward"), ("with filtered", "reward_with_filtered"), ("standard deviation", "reward_std"))),
    ("share without use", (("groups without signal", "no_signal"), ("samples cut", "truncated"))),
    (
        "response length, tokens",
        (("P50", "response_tokens_p50"), ("P90", "response_tokens_p90"), ("max", "response_tokens_max")),
    ),
    ("loss", (("loss", "loss"),)),
    ("gradient norm", (("norm", "grad_norm"),)),
    ("entropy, all tokens", (("entropy", "entropy"),)),
    ("tokens of a batch", (("generated", "tokens_generated"), ("trained", "tokens_trained"))),
    ("KL to the reference", (("kl", "kl"),)),
    ("staleness, versions", (("mean", "staleness"), ("max", "staleness_max"))),
    (
        "|logprob of trainer - of generation|, computed tokens",
        (("mean", "logprob_mismatch"), ("max", "logprob_mismatch_max"), ("total variation", "mismatch_tv")),
    ),
    (
        "tail recall of predicted lengths",
        (("20%", "ranker_recall_20"), ("10%", "ranker_recall_10"), ("5%", "ranker_recall_5")),
    ),
    ("clipped share of computed tokens", (("low", "clip_fraction_low"), ("high", "clip_fraction_high"))),
    ("seconds a batch", (("seconds", "seconds"),)),
    ("tokens/s", (("tokens/s", "tokens_per_s"),)),
)
"""(title, [(line's name, key in metrics.jsonl)]); a chart without numbers is left out."""


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: a run starts without it

    def cleaned(value: object) -> object:
        return value if isinstance(value, Markup) else printable(str(value))

    loader = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=cleaned,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _drawn(charts: Iterable[tuple[str, Sequence[Series]]]) -> list[Markup]:
    """The charts that have numbers."""
    drawings = [draw_chart(title, series) for title, series in charts]
    return [Markup(to_svg(drawing, inline=True)) for drawing in drawings if drawing]


def _timeline(run: RunRecord, title: str) -> Markup:
    return Markup(to_svg(draw_timeline(run.timeline, title=title), inline=True))


# --- one run ----------------------------------------------------------------------------------------------------------


def render_report(run: RunRecord) -> str:
    """The page of one run."""
    charts = [(title, [series_of(name, run.lines, key) for name, key in parts]) for title, parts in CHARTS]
    charts.insert(1, ("reward components", [series_of(name, run.lines, name) for name in run.components]))
    means = [series_of(name, run.evaluations, f"eval_{name}", over="version") for name in ("reward", *run.components)]
    return (
        _templates()
        .get_template("report.html")
        .render(
            title=run.name,
            facts=_facts(run),
            curves=_drawn(charts),
            evaluation_curves=_drawn([("reward by version", means)]),
            evaluations=[_evaluation_row(line) for line in run.evaluations],
            timeline=_timeline(run, run.name),
            causes={cause.value: CAUSE_COLORS[cause] for cause in Cause},
            idle=_idle_rows(run),
            troubles=[[f"{mark.at_s:.1f} s", mark.track, mark.name] for mark in run.timeline.marks if mark.trouble],
            max_troubles=MAX_TROUBLES,
            samples=[_sample(sample) for sample in run.samples],
            config=run.config,
        )
    )


def _facts(run: RunRecord) -> list[str]:
    """The run in one line; nothing where no batch was trained."""
    lines = run.lines
    if not lines:
        return []
    samples, tokens = (sum(line.get(f"{what}_trained", 0) for line in lines) for what in ("samples", "tokens"))
    rewards = [f"{line['reward']:.3f}" if "reward" in line else "none" for line in (lines[0], lines[-1])]
    return [
        f"{len(lines)} batches in {run.timeline.end_s:.0f} s",
        f"reward {' → '.join(rewards)}",
        f"{samples} samples, {tokens} tokens trained",
        *([run.damage] if run.damage else []),
    ]


def _evaluation_row(line: Mapping[str, Any]) -> list[str]:
    return [
        f"{line['version']}",
        f"{line['eval_reward']:.3f}" if "eval_reward" in line else "",
        f"{line['eval_answered']} of {line['eval_problems']}",
        f"{line.get('eval_response_tokens', 0.0):.1f}",
        f"{line['eval_tokens']}",
        f"{line['eval_seconds']:.1f} s",
        f"{line['eval_share']:.1%}",
        f"{line['eval_short']}",
    ]


def _idle_rows(run: RunRecord) -> list[list[str]]:
    """Seconds and shares of each generation worker, of all together, and of the trainer."""
    rows = [_usage_row(track, run.usage[track]) for track in run.timeline.workers]
    if len(rows) > 1:
        rows.append(_usage_row("generation, all", run.usage_of("generation")))
    return [*rows, _usage_row("trainer", run.usage_of("trainer"))]


def _usage_row(name: str, usage: Usage) -> list[str]:
    seconds = [usage.busy_s, *(usage.idle_s.get(cause, 0.0) for cause in Cause)]
    whole = usage.present_s or 1.0
    return [name, f"{usage.present_s:.1f} s", *(f"{part:.1f} s  {part / whole:.0%}" for part in seconds)]


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    components = sample.get("components")
    parts = components.items() if isinstance(components, dict) else ()
    facts = [f"{sample.get('row', '')}", f"reward {sample.get('reward', '')}"]
    facts += [f"{name} {value}" for name, value in parts]
    facts += [f"{sample.get('tokens', '')} tokens", f"{sample.get('finish', '')}"]
    return {"facts": facts, "prompt": sample.get("prompt", ""), "response": sample.get("response", "")}


# --- several runs -----------------------------------------------------------------------------------------------------

LAST = 10
"""Batches at the end of a run over which its numbers are averaged: one batch is mostly noise."""
MEANS = {
    "reward": "{:.3f}",
    "response_tokens": "{:.1f}",
    "seconds": "{:.2f} s",
    "samples_per_s": "{:.1f}",
    "tokens_per_s": "{:.0f}",
    "staleness": "{:.2f}",
    "logprob_mismatch": "{:.4f}",
    "grad_norm": "{:.2f}",
}
NOT_COMPARED = ("run.name", "run.dir", "broker.url", "broker.password")


def render_comparison(runs: Sequence[RunRecord]) -> str:
    """Runs side by side, in the order given: results, settings that differ, the same curves over each other."""
    named = list(zip(labels(runs), runs, strict=True))
    charts = [(f"{title}: {line}" if len(parts) > 1 else title, key) for title, parts in CHARTS for line, key in parts]
    overlaid = [(title, [series_of(name, run.lines, key) for name, run in named]) for title, key in charts]
    held_out = [series_of(name, run.evaluations, "eval_reward", over="version") for name, run in named]
    return (
        _templates()
        .get_template("comparison.html")
        .render(
            title=" · ".join(name for name, _ in named),
            names=[name for name, _ in named],
            last=LAST,
            results=result_rows(runs),
            settings=differing_settings(runs),
            curves=_drawn([*overlaid, ("reward of held-out problems, by version", held_out)]),
            timelines=[_timeline(run, name) for name, run in named],
        )
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A name for each run; runs of one name are numbered."""
    names = [run.name for run in runs]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def result_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """One row a number, one column a run; empty where a run has no such number."""
    return [
        ["batches", *(str(len(run.lines)) for run in runs)],
        ["held-out reward, last", *(_last_evaluation(run) for run in runs)],
        ["run's seconds", *(f"{run.timeline.end_s:.0f}" for run in runs)],
        *([key.replace("_", " "), *(_mean(run, key) for run in runs)] for key in MEANS),
        *(
            [f"{stage} idle: {cause}", *(_idle_share(run, stage, cause) for run in runs)]
            for stage in ("generation", "trainer")
            for cause in Cause
        ),
        ["failed and retried", *(str(sum(mark.trouble for mark in run.timeline.marks)) for run in runs)],
    ]


def _mean(run: RunRecord, key: str) -> str:
    values = [line[key] for line in run.lines[-LAST:] if isinstance(line.get(key), int | float)]
    return MEANS[key].format(fmean(values)) if values else ""


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
