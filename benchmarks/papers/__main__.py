"""Figure ``papers``: the results of StreamRL and AsyncFlow beside ours, all simulated by the code that decides live.

    python -m benchmarks.papers [--quick] [--rows KEYS] [--kept FILE] [--out DIR]
        the table, and its last line is one JSON object

--rows fig8,asyncflow_linear: only rows whose keys begin so, without curves, timelines and Algorithm 1. --kept: every
simulation of the table and of moved constants is kept there as it ends; called again, the bench goes on.

With --out: table.txt  results.json  throughput  scaling  sensitivity  timeline-PIPELINE, pictures as .svg and .png.
Everything drawn is in results.json too. How to read it: docs/simulation.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from benchmarks.papers.comparison import Compared, as_data, compare, table, with_swings
from benchmarks.papers.experiments import Pipelined
from benchmarks.papers.pictures import Bar, Curve, Effect, draw_bars, draw_scaling, draw_tornado
from benchmarks.papers.rows import Row, rows
from benchmarks.papers.rules import against_algorithm_one
from benchmarks.papers.settings import SIZES, colocated, fully_async, in_flight, scaled, sync_stream
from benchmarks.papers.trials import Kept, ProgressLine, Trial, run_trials
from orchestrator.observability.report.drawing import write_timeline
from orchestrator.observability.report.spans import Timeline, build_timeline
from orchestrator.sim.costs import ASSUMED
from orchestrator.sim.llms import QWEN_72B

DRAWN = 4
"""Iterations of a drawn timeline."""
SCALED, SCALED_LARGE = 7, 5
"""Iterations of a point of the scaling curve, and of one of more than ``LARGE`` GPUs, whose batches vary less."""
LARGE = 512
TORNADO = "table3_best"
"""Row whose constants are drawn."""


class Options(argparse.Namespace):
    """What was asked for."""

    seed: int
    iterations: int
    quick: bool
    jobs: int
    out: Path | None
    rows: str
    kept: Path | None
    least: float


def main() -> None:
    """Simulate everything, print the table and one JSON object, write the pictures.

    What is known is written before the next part begins: an interrupted call leaves all the rest.
    """
    options = _options()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept.read(options.kept)
    compared = compare(
        chosen_rows(options.rows),
        seeds=(options.seed,),
        iterations=min(options.iterations, 9) if options.quick else options.iterations,
        jobs=options.jobs,
        progress=ProgressLine("simulated"),
        kept=kept,
    )
    curves: dict[str, Curve] = {}
    if options.out is not None:
        _write(options, options.out, compared, curves)
        if not options.rows:
            _write_timelines(options.out, options.seed)
            curves = _curves(options)
            _write(options, options.out, compared, curves)
    if not options.quick:
        compared = with_swings(
            compared,
            seed=options.seed,
            jobs=options.jobs,
            progress=ProgressLine("moved constants"),
            kept=kept,
            least=options.least,
        )
        if options.out is not None:
            _write(options, options.out, compared, curves)
    print(table(compared))
    data = _data(options, compared, curves)
    if not options.quick and not options.rows:
        lines, data["algorithm_one"] = against_algorithm_one(options.jobs)
        print("\n".join(lines))
    print(msgspec.json.encode(data).decode())


def chosen_rows(keys: str) -> list[Row]:
    """Those whose keys begin with one of ``keys``, which commas divide; all, where there is none.

    Raises SystemExit: no row begins so.
    """
    found = rows()
    wanted = tuple(filter(None, keys.split(",")))
    if unknown := [key for key in wanted if not any(row.key.startswith(key) for row in found)]:
        raise SystemExit(
            f"--rows: no key begins with {', '.join(unknown)}; there are {', '.join(r.key for r in found)}"
        )
    return [row for row in found if row.key.startswith(wanted)] if wanted else found


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer iterations, no moved constants: minutes")
    parser.add_argument("--seed", type=int, default=11, help="of lengths and of the ranker's errors")
    parser.add_argument("--iterations", type=int, default=26, help="the first 4 and the last 2 do not count")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, default=None, help="directory for table, results and pictures")
    parser.add_argument("--rows", default="", help="beginnings of keys of rows, divided by commas; all by default")
    parser.add_argument("--kept", type=Path, default=None, help="file in which simulations are kept")
    parser.add_argument("--least", type=float, default=0.05, help="share of a stage that a constant has to move")
    return parser.parse_args(namespace=Options())


def _curves(options: Options) -> dict[str, Curve]:
    """Samples a second over GPUs: ours, the colocated baseline, and ours at the smallest size times the size."""
    sizes = [size for size in SIZES if size <= LARGE] if options.quick else list(SIZES)
    trials = {
        (gpus, in_turn): Trial(scaled(gpus, colocated=in_turn), options.seed, SCALED if gpus <= LARGE else SCALED_LARGE)
        for gpus in reversed(sizes)  # the largest first: they take longest
        for in_turn in (False, True)
    }
    found = run_trials(trials.values(), jobs=options.jobs, progress=ProgressLine("scaled"))

    def points(in_turn: bool) -> list[tuple[float, float]]:
        rates: list[tuple[float, float]] = []
        for gpus in sizes:
            seconds = found[trials[gpus, in_turn]]
            if not isinstance(seconds, str):
                rates.append((float(gpus), scaled(gpus, colocated=in_turn).batch / seconds))
        return rates

    ours = points(False)
    linear = [(gpus, ours[0][1] * gpus / ours[0][0]) for gpus, _ in ours]
    return {"in flight, paced": ours, "colocated": points(True), "linear": linear}


def _data(options: Options, compared: Sequence[Compared], curves: Mapping[str, Curve]) -> dict[str, Any]:
    data: dict[str, Any] = {"seed": options.seed, "assumed": msgspec.to_builtins(ASSUMED), "rows": as_data(compared)}
    if curves:
        data["samples_per_s"] = {name: {f"{gpus:.0f}": rate for gpus, rate in of} for name, of in curves.items()}
    return data


def _write(options: Options, out: Path, compared: Sequence[Compared], curves: Mapping[str, Curve]) -> None:
    """Table, data and pictures of it."""
    data = _data(options, compared, curves)
    (out / "table.txt").write_text(table(compared), encoding="utf-8")
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(data)))
    _save(draw_bars("Throughput over the baseline: the papers' and ours", _bars(compared)), out / "throughput")
    if curves:
        _save(draw_scaling("Qwen2.5-32B, 8 samples a GPU: samples a second over H800", curves), out / "scaling")
    for one in compared:
        if one.row.key == TORNADO and one.moved is not None:
            title = f"{one.row.what}: {one.low:.2f}, and when one constant moves by 20%"
            _save(draw_tornado(title, one.low, _effects(one)), out / "sensitivity")


def _save(figure: Figure, path: Path) -> None:
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150)


def _write_timelines(out: Path, seed: int) -> None:
    for name, experiment in _shown().items():
        write_timeline(_timeline(experiment, seed), f"72B, 20K, 128 H800: {name}", out, f"timeline-{name}")


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


if __name__ == "__main__":
    main()
