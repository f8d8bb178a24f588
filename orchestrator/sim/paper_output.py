"""What ``simulate --paper`` prints and writes: the table, results.json, pictures; with its progress meanwhile.

Owns: files and progress. Never: numbers, shapes. Invariant: everything drawn is in results.json too.

    table.txt  results.json  throughput.svg  scaling.svg  sensitivity.svg  timeline-<pipeline>.svg     and each as .png
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.core.hardware import ASSUMED
from orchestrator.core.llms import QWEN_72B
from orchestrator.errors import ConfigError
from orchestrator.report.curves import Series
from orchestrator.report.drawing import Drawing, to_svg, write_png
from orchestrator.report.simulation_drawing import Bar, Effect, draw_bars, draw_scaling, draw_tornado
from orchestrator.report.spans import Timeline, build_timeline
from orchestrator.report.timeline_drawing import draw_timeline
from orchestrator.sim.experiment import Pipelined
from orchestrator.sim.paper import Compared, compare, with_swings
from orchestrator.sim.paper_rows import rows
from orchestrator.sim.paper_settings import SIZES, colocated, fully_async, in_flight, scaled, sync_stream
from orchestrator.sim.paper_table import as_data, table
from orchestrator.sim.trials import Trial, run_trials

DRAWN = 4
"""Iterations of a drawn timeline."""
SCALED, SCALED_LARGE = 7, 5
"""Iterations of a point of the scaling curve, and of one of more than ``LARGE`` GPUs, whose batches vary less."""
LARGE = 512
TORNADO = "table3_best"
"""Row whose constants are drawn."""
EVERY_S = 5.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """What was asked for. jobs: processes.  out: directory for files, None: the table alone."""

    seed: int
    iterations: int
    quick: bool
    jobs: int
    out: Path | None


def print_paper(options: PaperOptions, *, as_json: bool) -> None:
    """Simulate everything, print the table or one JSON object, write the pictures.

    What is known is written before the next part begins: who interrupts it has all the rest.
    """
    if options.out is not None:
        _make(options.out)  # a directory that cannot be is no reason to wait for minutes
    compared = compare(
        rows(),
        seeds=(options.seed,),
        iterations=min(options.iterations, 9) if options.quick else options.iterations,
        jobs=options.jobs,
        progress=Progress("simulated"),
    )
    curve: list[Series] = []
    written: list[Path] = []
    if options.out is not None:
        written = _write(options, compared, curve) + _write_timelines(options.out, options.seed)
        curve = _curve(options)
        written += _write(options, compared, curve)
    if not options.quick:
        compared = with_swings(compared, seed=options.seed, jobs=options.jobs, progress=Progress("moved constants"))
        if options.out is not None:
            written += _write(options, compared, curve)
    data = _data(options, compared, curve)
    sys.stdout.write(msgspec.json.encode(data).decode() + "\n" if as_json else table(compared))
    for path in dict.fromkeys(written):
        print(path, file=sys.stderr)


class Progress:
    """How far it is, on standard error: a line that changes, or a line every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._began_s = self._said_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done < total and now_s - self._said_s < (0.2 if self._terminal else EVERY_S):
            return
        self._said_s = now_s
        end = "\r" if self._terminal and done < total else "\n"
        line = f"{self._what} {done} of {total}, {now_s - self._began_s:.0f} s"
        print(f"{line:<60}" if self._terminal else line, file=sys.stderr, end=end, flush=True)


def _curve(options: PaperOptions) -> list[Series]:
    """Samples a second over GPUs: ours, the colocated baseline, and ours at the smallest size times the size."""
    sizes = [size for size in SIZES if size <= LARGE] if options.quick else list(SIZES)
    trials = {
        (gpus, in_turn): Trial(scaled(gpus, colocated=in_turn), options.seed, SCALED if gpus <= LARGE else SCALED_LARGE)
        for gpus in reversed(sizes)  # the largest first: they take longest
        for in_turn in (False, True)
    }
    found = run_trials(trials.values(), jobs=options.jobs, progress=Progress("scaled"))

    def points(in_turn: bool) -> list[tuple[float, float]]:
        rates: list[tuple[float, float]] = []
        for gpus in sizes:
            seconds = found[trials[gpus, in_turn]]
            if not isinstance(seconds, str):
                rates.append((float(gpus), scaled(gpus, colocated=in_turn).batch / seconds))
        return rates

    ours = points(False)
    linear = [(gpus, ours[0][1] * gpus / ours[0][0]) for gpus, _ in ours]
    return [
        Series(name="in flight, paced", points=ours),
        Series(name="colocated", points=points(True)),
        Series(name="linear", points=linear),
    ]


def _data(options: PaperOptions, compared: Sequence[Compared], curve: Sequence[Series]) -> dict[str, Any]:
    data: dict[str, Any] = {"seed": options.seed, "assumed": msgspec.to_builtins(ASSUMED), "rows": as_data(compared)}
    if curve:
        data["samples_per_s"] = {one.name: {f"{gpus:.0f}": value for gpus, value in one.points} for one in curve}
    return data


def _write(options: PaperOptions, compared: Sequence[Compared], curve: Sequence[Series]) -> list[Path]:
    """Table, data and drawings of it."""
    out = _make(options.out)
    data = _data(options, compared, curve)
    (out / "table.txt").write_text(table(compared), encoding="utf-8")
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(data)))
    drawings = {"throughput": draw_bars("Throughput over the baseline: the papers' and ours", _bars(compared))}
    if curve:
        title = "Qwen2.5-32B, 8 samples a GPU: samples a second over H800"
        drawings["scaling"] = draw_scaling(title, curve)
    for one in compared:
        if one.row.key == TORNADO and one.moved is not None:
            title = f"{one.row.what}: {one.low:.2f}, and when one constant moves by 20%"
            drawings["sensitivity"] = draw_tornado(title, one.low, _effects(one))
    written = [out / "table.txt", out / "results.json"]
    for name, drawing in drawings.items():
        written += write_drawing(drawing, out, name)
    return written


def _write_timelines(out: Path, seed: int) -> list[Path]:
    written: list[Path] = []
    for name, experiment in _shown().items():
        written += write_timeline(_timeline(experiment, seed), f"72B, 20K, 128 H800: {name}", out, name)
    return written


def _shown() -> dict[str, Pipelined]:
    """The pipelines whose timelines are drawn."""
    return {
        "colocated": colocated(QWEN_72B),
        "stream": sync_stream(QWEN_72B),
        "fully-async": fully_async(QWEN_72B),
        "in-flight": in_flight(),
    }


def _timeline(experiment: Pipelined, seed: int) -> Timeline:
    log = experiment.run(seed, DRAWN, ASSUMED, record=True)
    return build_timeline(record for record, _ in log.history)


def _bars(compared: Sequence[Compared]) -> list[Bar]:
    """Rows that are ratios."""
    return [
        Bar(
            title=f"{one.row.source}: {one.row.key.partition('_')[2].replace('_', ' ')}",
            ours=(one.low, one.high),
            paper=(one.row.low, one.row.high) if one.row.low is not None and one.row.high is not None else None,
        )
        for one in compared
        if one.row.unit == "x"
    ]


def _effects(one: Compared) -> list[Effect]:
    """Constant -> the row with it lower and higher; trials come in pairs, in this order."""
    ends: dict[str, dict[str, float]] = {}
    for name, changes in (one.moved or {}).items():
        constant, _, _ = name.partition(" ")
        ends.setdefault(constant, {})["lower" if name.endswith("x 0.8") else "higher"] = one.low * changes[0]
    missing = float("nan")
    return [
        Effect(constant=constant, lower=of.get("lower", missing), higher=of.get("higher", missing))
        for constant, of in ends.items()
    ]


def write_timeline(timeline: Timeline, title: str, out: Path, name: str = "") -> list[Path]:
    """A picture of what every instance and the trainer did, with its bubbles."""
    return write_drawing(draw_timeline(timeline, title=title), _make(out), f"timeline-{name}" if name else "timeline")


def write_drawing(drawing: Drawing, out: Path, name: str) -> list[Path]:
    """As SVG, and as PNG where Pillow is installed."""
    svg, png = out / f"{name}.svg", out / f"{name}.png"
    svg.write_text(to_svg(drawing), encoding="utf-8")
    try:
        write_png(drawing, png)
    except ConfigError:
        return [svg]
    return [svg, png]


def _make(out: Path | None) -> Path:
    assert out is not None
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be a directory: {error.strerror}", where="--out") from error
    return out
