"""What is written of a run: at its end a report and a trace; by commands also pictures, and a page comparing several.

A page is one HTML file: no script, no link, no file beside it. The templates escape every string of a run and remove
its control characters, and the page's own policy forbids scripts and requests, so that a model's output can do nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from orchestrator.config.run_directory import RunDir, journal_of
from orchestrator.errors import ConfigError, printable, writing_out
from orchestrator.observability.live import plain_console
from orchestrator.observability.metrics import Repeats, sets_of, warnings_of
from orchestrator.observability.report.bubbles import Cause, Usage
from orchestrator.observability.report.comparison import COLUMNS, LAST, Comparison, compare_runs, outcomes, tables
from orchestrator.observability.report.drawing import (
    CAUSE_COLORS,
    TRACE,
    Section,
    Series,
    draw_chart,
    draw_timeline,
    section,
    sections,
    series_of,
    to_svg,
    write_timeline,
    write_trace,
)
from orchestrator.observability.report.record import (
    RunRecord,
    busy_share,
    changed_settings,
    differing,
    duration,
    ends_of,
    facts,
    newest_records,
    of_all_groups,
    read_run,
    redone,
    verdict,
)
from orchestrator.observability.report.spans import Timeline, build_timeline
from orchestrator.observability.standing import REPORT
from transport.process.files import replace

if TYPE_CHECKING:
    from jinja2 import Environment


# --- pages ------------------------------------------------------------------------------------------------------------

MAX_TROUBLES = 200  # lines of what failed, and of warnings; a run with more has a reason that shows in the first ones

CHARTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "Reward": {
        "reward": {"mean": "reward", "with filtered": "reward_with_filtered", "standard deviation": "reward_std"},
        "share of groups without signal": {"no signal": "no_signal"},
    },
    "Optimizer": {
        "loss": {"loss": "loss"},
        "gradient norm": {"norm": "grad_norm"},
        "entropy, all tokens": {"entropy": "entropy"},
        "KL to the reference": {"kl": "kl"},
        "clipped share of computed tokens": {"low": "clip_fraction_low", "high": "clip_fraction_high"},
        "learning rate": {"lr": "lr"},
    },
    "Critic": {
        "loss of values": {"loss": "critic_value_loss"},
        "explained share of the returns' variance": {"explained": "critic_explained_variance"},
        "mean of values and returns": {"values": "critic_value_mean", "returns": "critic_return_mean"},
        "gradient norm of the critic": {"norm": "critic_grad_norm"},
    },
    "Response lengths": {
        "response length, tokens": {
            "P50": "response_tokens_p50",
            "P90": "response_tokens_p90",
            "max": "response_tokens_max",
        },
        "share of samples cut at the limit": {"cut": "truncated"},
        "tail recall of predicted lengths": {
            "20%": "ranker_recall_20",
            "10%": "ranker_recall_10",
            "5%": "ranker_recall_5",
        },
    },
    "Staleness": {
        "staleness, versions": {"mean": "staleness", "max": "staleness_max"},
        "|logprob of trainer - of generation|": {
            "mean": "logprob_mismatch",
            "max": "logprob_mismatch_max",
            "total variation": "mismatch_tv",
        },
    },
    "Throughput": {
        "seconds a batch": {"seconds": "seconds"},
        "tokens/s": {"tokens/s": "tokens_per_s"},
        "tokens of a batch": {"generated": "tokens_generated", "trained": "tokens_trained"},
    },
}
"""Heading -> title -> line's name -> key in metrics.jsonl; a chart without numbers is left out."""


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: a run starts without it

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _drawn(charts: Iterable[tuple[str, Sequence[Series]]], **size: float) -> list[Markup]:
    drawings = [draw_chart(title, series, **size) for title, series in charts]
    return [Markup(to_svg(drawing, inline=True)) for drawing in drawings if drawing]


# --- one run ----------------------------------------------------------------------------------------------------------


def render_report(run: RunRecord) -> str:
    def charts(heading: str) -> list[tuple[str, list[Series]]]:
        drawn = CHARTS[heading].items()
        found = [(title, [series_of(name, run.lines, key) for name, key in parts.items()]) for title, parts in drawn]
        return [chart for chart in found if chart[0] != "learning rate" or len({y for _, y in chart[1][0].points}) > 1]

    (_, mean), *others = charts("Reward")
    held_out = series_of("held out", run.evaluations, "eval_reward", over="version", dots=True)
    parts = [series_of(name, run.evaluations, f"eval_{name}", over="version", dots=True) for name in run.components]
    others += [("reward components", [series_of(name, run.lines, name) for name in run.components])]
    others += [("components of held-out problems", parts)]
    for key, names in parts_of(run.lines).items():
        of_each = [series_of(name, run.lines, f"mix/{name}/{key}") for name in names]
        others.append((f"{key.replace('_', ' ')} by part of the data", of_each))
    sets = sets_of(run.evaluations)
    for name, keys in sets.items():
        drawn_keys = [key for key in keys if key == "reward" or key.startswith("pass@")]
        series = [
            series_of(key, run.evaluations, f"eval/{name}/{key}", over="version", dots=True) for key in drawn_keys
        ]
        others.append((f"held-out set {name}", series))
    curves = {"Reward": _drawn(others), **{heading: _drawn(charts(heading)) for heading in list(CHARTS)[1:]}}
    idle = [_usage_row(track, run.usage[track]) for track in run.timeline.workers]
    if len(idle) > 1:
        idle.append(_usage_row("generation, all", run.usage_of("generation")))
    against, changed = changed_settings(run)
    limit = run.settings.get("algorithm.mismatch_limit", 0.0)
    return (
        _templates()
        .get_template("report.html")
        .render(
            run=run,
            title=run.name,
            verdict=verdict(run),
            headlines=_headlines(run),
            facts=facts(run),
            gpus=[[str(gpu.number), str(gpu), gpu.use] for start in run.starts[-1:] for gpu in start.gpus],
            against=against,
            changed=changed,
            sets={name: _set_rows(run, name, keys) for name, keys in sets.items()},
            large=[_drawn([("reward", [*mean, held_out])], **size) for size in LARGE],
            curves=curves,
            timelines=[
                Markup(to_svg(draw_timeline(run.timeline, part=part), inline=True)) for part in sections(run.timeline)
            ],
            causes={cause.value: CAUSE_COLORS[cause] for cause in Cause},
            idle=[*idle, _usage_row("trainer", run.usage_of("trainer"))],
            warnings=[*_warnings(run, limit), *run.left_out],
            troubles=[
                [f"{mark.at_s:.1f} s", mark.track, mark.name, "" if mark.back_s is None else f"{mark.back_s:.1f} s"]
                for mark in run.timeline.marks
                if mark.trouble or mark.back_s is not None
            ],
            redone=redone(run.timeline),
            max_troubles=MAX_TROUBLES,
        )
    )


def parts_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What is known of parts of [data.mix] (reward, its components, response_tokens), and of which of them."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        for name, _, key in (one.removeprefix("mix/").rpartition("/") for one in line if one.startswith("mix/")):
            if key != "groups":
                found.setdefault(key, {})[name] = None
    return {key: list(names) for key, names in found.items()}


def _set_rows(run: RunRecord, name: str, keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """A named set of held-out problems at each version: (what the columns are, rows)."""

    def shown(value: float | str) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    rows = [[line["version"], *(line.get(f"eval/{name}/{key}", "") for key in keys)] for line in run.evaluations]
    return ["version", *(key.replace("_", " ") for key in keys)], [list(map(shown, row)) for row in rows]


def _warnings(run: RunRecord, limit: float) -> list[str]:
    repeats = Repeats()
    for line in run.lines:
        for warning in warnings_of(line, limit):
            repeats.said(warning)
    return repeats.all()


LARGE = ({"width": 1160.0, "height": 220.0}, {"width": 380.0, "height": 180.0})  # on a screen, and on a phone
END_BATCHES = 10  # batches at each end of a run over which its reward is said: one batch is mostly noise


def _headlines(run: RunRecord) -> list[tuple[str, str, str]]:
    """What one wants to know first: (what, the number, what it is of)."""
    found: list[tuple[str, str, str]] = []
    lines = of_all_groups(run.lines)
    if ends := ends_of(lines, "reward", END_BATCHES):
        notes = [f"mean of the first and last {ends[2]} batches" if ends[2] > 1 else "first and last batch"]
        notes += ["filtered groups included"] if any("reward_with_filtered" in line for line in run.lines) else []
        parts = ((name, ends_of(lines, name, END_BATCHES)) for name in run.components)
        notes += [f"{name} {first:.2f} → {last:.2f}" for name, part in parts if part for first, last, _ in [part]]
        found.append(("reward", f"{ends[0]:.2f} → {ends[1]:.2f}", "; ".join(notes)))
    if held_out := ends_of(run.evaluations, "eval_reward"):
        first, last = run.evaluations[0], run.evaluations[-1]
        sets = sets_of(run.evaluations)
        asked = f"{last.get('eval_problems')} {'answers' if sets else 'problems'}"
        notes = [f"version {first['version']} → {last['version']}, {asked}"]
        parts = ((name, ends_of(run.evaluations, f"eval_{name}")) for name in run.components)
        notes += [f"{name} {before:.2f} → {after:.2f}" for name, part in parts if part for before, after, _ in [part]]
        firsts = {name: "pass@1" if "pass@1" in keys else "reward" for name, keys in sets.items()}
        of_sets = ((f"{name} {key}", ends_of(run.evaluations, f"eval/{name}/{key}")) for name, key in firsts.items())
        notes += [f"{name} {part[0]:.2f} → {part[1]:.2f}" for name, part in of_sets if part]
        change = f"{held_out[0]:.2f} → {held_out[1]:.2f}" if len(run.evaluations) > 1 else f"{held_out[1]:.2f}"
        found.insert(0, ("held-out reward", change, "; ".join(notes)))  # it is what a run is for
    batches = f"{len(run.lines)} / {run.settings['run.batches']}" if "run.batches" in run.settings else len(run.lines)
    seconds = ends_of(run.lines, "seconds", END_BATCHES)
    tokens = sum(line.get("tokens_trained", 0) for line in run.lines)
    note = f"{tokens:,} tokens trained" + (f"; {seconds[1]:.2f} s a batch in the end" if seconds else "")
    found.append(("batches", str(batches), note))
    begun = run.lines[0].get("time_s", 0.0) - run.lines[0].get("seconds", 0.0) if run.lines else 0.0
    begun += max(0.0, run.seconds - run.timeline.end_s)  # before its first event, mostly
    note = f"of them {duration(begun)} until the first batch began" if begun else "from the start to the last event"
    found.append(("time", duration(run.seconds), note))
    busy = [f"{share:.0%}" for stage in ("generation", "trainer") if (share := busy_share(run, stage)) is not None]
    if busy:
        found.append(("busy", " · ".join(busy), "generation · trainer; idle time by cause is below"))
    dead = sum(line.get("groups_dead", 0) for line in run.lines)
    given_up = f"{dead} groups given up" if dead else "nothing was given up"
    cost = "; ".join(filter(None, ("each retried", given_up, redone(run.timeline))))
    found.append(("failures", str(len(run.troubles)), cost if run.troubles else "nothing failed"))
    return found


def _usage_row(name: str, usage: Usage) -> list[str]:
    seconds = [usage.busy_s, *(usage.idle_s.get(cause, 0.0) for cause in Cause)]
    whole = usage.present_s or 1.0
    return [name, f"{usage.present_s:.1f} s", *(f"{part:.1f} s  {part / whole:.0%}" for part in seconds)]


# --- several runs -----------------------------------------------------------------------------------------------------


def render_comparison(comparison: Comparison) -> str:
    """Runs side by side, in the order given: settings that differ, results, the same curves over each other."""
    named = list(zip(comparison.names, comparison.runs, strict=True))

    def overlaid(heading: str) -> list[tuple[str, list[Series]]]:
        keys = [
            (f"{title}: {line}" if len(parts) > 1 else title, key)
            for title, parts in CHARTS[heading].items()
            for line, key in parts.items()
        ]
        if heading == "Reward":
            components = {name: None for _, run in named for name in run.components}
            keys += [(f"reward component: {name}", name) for name in components]
        return [(title, [series_of(name, run.lines, key) for name, run in named]) for title, key in keys]

    held_out = [series_of(name, run.evaluations, "eval_reward", over="version", dots=True) for name, run in named]
    charts = {heading: overlaid(heading) for heading in CHARTS}
    reward = charts["Reward"].pop(0)[1]
    charts["Reward"].insert(0, ("reward of held-out problems", held_out))
    return (
        _templates()
        .get_template("comparison.html")
        .render(
            title="Comparison of " + ", ".join(comparison.names),
            comparison=comparison,
            last=min(LAST, -(-comparison.at // 2)),
            outcomes=outcomes(comparison.runs),
            verdicts=[verdict(run)[0] for run in comparison.runs],
            settings=differing([run.settings for run in comparison.runs]),
            facts=_differing_facts(comparison.runs),
            large=[_drawn([("reward", reward)], **size) for size in LARGE],
            curves={heading: _drawn(drawn) for heading, drawn in charts.items()},
            timelines=[Markup(to_svg(draw_timeline(run.timeline, title=name), inline=True)) for name, run in named],
        )
    )


def _differing_facts(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Rows of when, where and with which versions the runs were, for those that are not equal in all."""
    of_runs = [dict(facts(run)) for run in runs]
    rows = [[name, *(one.get(name, "") for one in of_runs)] for name in ("started", "versions", "machine")]
    return [row for row in rows if len(set(row[1:])) > 1]


# --- at the end of a run ----------------------------------------------------------------------------------------------

LONG_RUN = 50_000  # spans from which on the user is shown what is being written: it takes longer than a few seconds


def finish_run(rundir: RunDir, note: Callable[[str], None] = lambda _: None) -> Path:
    """Write the report, the trace, and those keys of ``metrics.jsonl`` that only the journal knows.

    Those keys come at the end, because how long a sample ran is known when it ends: at a batch's step the samples of
    the next one that already run are still unknown, and full slots would look empty. The caller holds the run's lock:
    nothing else writes its metrics.

    Args: note: called with what comes next where that takes long (60 us a sample and file, on one core).
    Returns: the report's path.  Raises: ConfigError: it has no journal yet; JournalError; OSError.
    """
    run = read_run(rundir.path, over=True)
    if run.timeline.start_s:
        note(f"a long run: {REPORT} and {TRACE} show what came after its first {run.timeline.start_s:.0f} s")
    note_long = note if len(run.timeline.spans) > LONG_RUN else lambda _: None
    if run.damage:
        note(f"{run.damage}; the file stays as it is")  # a new one would be without them for good
    elif run.all_lines:
        replace(rundir.metrics, "".join(json.dumps(line) + "\n" for line in run.all_lines))
    note_long(f"writing {TRACE} of {len(run.timeline.spans)} spans")
    write_trace(run.timeline, rundir.path / TRACE)
    note_long(f"writing {REPORT}")
    path = rundir.path / REPORT
    replace(path, render_report(run))
    return path


# --- the commands: each returns its exit code -------------------------------------------------------------------------


def report(run_dir: Path, out: Path | None) -> int:
    page = render_report(read_run(run_dir))
    path = out or run_dir / REPORT
    _check_page(path)
    with writing_out(path):
        replace(path, page)
    print(path)
    return 0


def _check_page(out: Path) -> None:
    """Raises ConfigError for a name that says another kind of file."""
    if out.suffix not in ("", ".html", ".htm"):
        problem = f"{out} is written as HTML: name it {out.with_suffix('.html')}"
        raise ConfigError(f"{problem}; a browser prints it as PDF", where="--out")


def compare(run_dirs: Sequence[Path], out: Path) -> int:
    if len(run_dirs) < 2:
        raise ConfigError("a comparison needs two runs or more")
    places = [run_dir.resolve() for run_dir in run_dirs]
    if twice := next((given for given, place in zip(run_dirs, places, strict=True) if places.count(place) > 1), None):
        raise ConfigError(f"{twice} is named twice: compare it with another run")
    _check_page(out)
    comparison = compare_runs([read_run(run_dir) for run_dir in run_dirs])
    page = render_comparison(comparison)
    with writing_out(out):
        replace(out, page)
    console = plain_console()
    console.width = COLUMNS
    for table in tables(comparison, differing([run.settings for run in comparison.runs])):
        console.print(table)
    print(f"results at batch {comparison.at}, means of the batches before it; all of it: {out}")
    return 0


def timeline(run_dir: Path, *, svg: bool, png: bool, out: Path | None, batches: str = "") -> int:
    found = build_timeline(newest_records(journal_of(run_dir)))
    part, name = _chosen(found, batches)
    directory = out or run_dir
    written = [directory / TRACE]
    with writing_out(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_trace(found, directory / TRACE)
        if svg or png or batches:
            written += write_timeline(found, run_dir.name, directory, name, svg=svg or not png, png=png, part=part)
    for path in written:
        print(path)
    if part.per_column and (svg or png):
        print(f"a column is the mean of {part.per_column} batches; see some as they were: --batches 1-8")
    print("open trace.json in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _chosen(found: Timeline, batches: str) -> tuple[Section, str]:
    """What is drawn and the name of its file. batches: ``100-120`` or ``7``, "" for all. Raises ConfigError."""
    if not batches:
        return section(found), "timeline"
    first, _, last = batches.partition("-")
    numbers = [int(text) for text in (first, last or first) if text.isascii() and text.isdigit()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"{batches!r} is no batch and no range of batches, as 7 or 100-120", where="--batches")
    return section(found, *numbers), f"timeline-{batches}"
