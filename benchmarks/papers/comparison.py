"""The papers' results and ours beside each other, with what each of ours rests on.

Which trials the table needs, what is read off them, and the table as text and as data, which say the same. The swing of
a row is that of its ratio: both sides move together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.papers.experiments import Experiment, Pipelined
from benchmarks.papers.rows import Cell, Row
from benchmarks.papers.trials import MOVE, Kept, Progress, Results, Trial, each_result, moves, run_trials
from orchestrator.sim.costs import ASSUMED, Assumptions, DoesNotFitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """A row's numbers when one constant moves by 20%.

    worst, best: the lowest of the lowest cell and the highest of the highest, and which move does it.  most: the
    constant that changes the row most, by ``share`` of it.  refused: moves under which something does not fit.
    """

    worst: float
    worst_by: str
    best: float
    best_by: str
    most: str
    share: float
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row with ours.

    values: [cells] means over seeds.  over_bounds: [cells] seconds over what nothing can beat, 0 where there is no
    bound.  swing: None where it was not asked for.
    moved: move -> [extreme cells] their change, as a factor; for a drawing.
    """

    row: Row
    values: tuple[float, ...]
    over_bounds: tuple[float, ...]
    swing: Swing | None = None
    moved: dict[str, tuple[float, ...]] | None = None

    @property
    def low(self) -> float:
        """Not a number where nothing of ours is known."""
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values, default=math.nan)


def compare(
    rows: Sequence[Row],
    *,
    seeds: Sequence[int],
    iterations: int,
    jobs: int = 1,
    progress: Progress | None = None,
    kept: Kept | None = None,
) -> list[Compared]:
    """Run what the rows need."""
    wanted = [_whole(one, seed, iterations) for one in _experiments(rows) for seed in seeds]
    found = run_trials(wanted, jobs=jobs, progress=progress, kept=kept)
    return [_compared(row, found, seeds, iterations) for row in rows]


def with_swings(
    plain: Sequence[Compared],
    *,
    seed: int,
    jobs: int = 1,
    progress: Progress | None = None,
    kept: Kept | None = None,
    least: float = 0.0,
) -> list[Compared]:
    """The same with what the sensitivity of their extreme cells needs. Interrupted, the rows that are done have it.

    least: share of what a stage of a row takes by arithmetic that a constant must move, to be moved there.
    """
    extremes = [_extreme_cells(one) for one in plain]
    chosen = [mattering(cells, least) for cells in extremes]
    trials = [
        _short(side, seed, assumed)
        for cells, which in zip(extremes, chosen, strict=True)
        for cell in cells
        for side in _sides(cell)
        for assumed in (ASSUMED, *which.values())
    ]
    found: dict[Trial, float | str] = {}
    with suppress(KeyboardInterrupt):
        found.update(each_result(trials, jobs=jobs, progress=progress, kept=kept))
    return [
        _with_swing(one, cells, found, seed, which) if _all_there(cells, found, seed, which) else one
        for one, cells, which in zip(plain, extremes, chosen, strict=True)
    ]


def mattering(cells: Sequence[Cell], least: float) -> dict[str, Assumptions]:
    """The moves that change what a stage of a pipeline takes by ``least`` of it, or make it not fit; all, where what is
    compared is no pipeline: that costs little."""
    sides = [side for cell in cells for side in _sides(cell)]
    pipelines = [side for side in sides if isinstance(side, Pipelined)]
    if len(pipelines) < len(sides):
        return moves()
    changed = {name: max((_changed(side, one) for side in pipelines), default=0.0) for name, one in moves().items()}
    return {name: one for name, one in moves().items() if changed[name] >= least}


def _changed(side: Pipelined, assumed: Assumptions) -> float:
    """The largest share by which a stage takes longer, or less long."""
    try:
        after = side.stages_s(assumed)
    except DoesNotFitError:
        return math.inf
    return max(abs(one / other - 1) for one, other in zip(after, side.stages_s(), strict=True))


def _whole(experiment: Experiment, seed: int, iterations: int) -> Trial:
    """For the table: no longer than is of use."""
    return Trial(experiment, seed, min(iterations, experiment.enough))


def _short(experiment: Experiment, seed: int, assumed: Assumptions) -> Trial:
    """Both sides of a change are as short, with the same lengths, so that what they lack cancels."""
    return Trial(experiment, seed, experiment.short, assumed)


def _all_there(cells: Sequence[Cell], found: Results, seed: int, which: Mapping[str, Assumptions]) -> bool:
    needed = (ASSUMED, *which.values())
    return all(_short(side, seed, one) in found for cell in cells for side in _sides(cell) for one in needed)


def _experiments(rows: Iterable[Row]) -> list[Experiment]:
    return list(dict.fromkeys(side for row in rows for cell in row.cells for side in _sides(cell)))


def _sides(cell: Cell) -> list[Experiment]:
    return [cell.of] if cell.over is None else [cell.of, cell.over]


def _compared(row: Row, found: Results, seeds: Sequence[int], iterations: int) -> Compared:
    values: list[float] = []
    over_bounds: list[float] = []
    for cell in row.cells:
        results = [[found[_whole(side, seed, iterations)] for side in _sides(cell)] for seed in seeds]
        values.append(fmean(_must_fit(_value(cell, *of_seed)) for of_seed in results))
        least_s = cell.of.bound_s(seeds[0], iterations, ASSUMED)
        seconds = found[_whole(cell.of, seeds[0], iterations)]
        over_bounds.append(seconds / least_s if least_s and not isinstance(seconds, str) else 0.0)
    return Compared(row=row, values=tuple(values), over_bounds=tuple(over_bounds))


def _value(cell: Cell, of_s: float | str, over_s: float | str = 1.0) -> float | str:
    """The cell's number, or why one of its sides does not fit. of_s, over_s: what came of its sides."""
    if isinstance(of_s, str) or isinstance(over_s, str):
        return of_s if isinstance(of_s, str) else over_s
    return cell.factor * (of_s if cell.over is None else over_s / of_s)


def _must_fit(value: float | str) -> float:
    if isinstance(value, str):
        raise ValueError(f"a row of the table does not fit under its own assumptions: {value}")
    return value


def _extreme_cells(compared: Compared) -> tuple[Cell, ...]:
    """The cells with the lowest and the highest number, once where they are one."""
    if not compared.values:
        return ()
    by_value = sorted(zip(compared.values, range(len(compared.values)), strict=True))
    places = dict.fromkeys((by_value[0][1], by_value[-1][1]))
    return tuple(compared.row.cells[place] for place in places)


def _with_swing(
    plain: Compared, cells: Sequence[Cell], short: Results, seed: int, which: Mapping[str, Assumptions]
) -> Compared:
    """The changes of short trials, applied to the numbers of the long ones; of a row of its own there are none."""
    if not cells:
        return plain
    moved: dict[str, tuple[float, ...]] = {}
    refused: list[str] = []
    for name, assumed in which.items():
        changes = [_change(cell, short, seed, assumed) for cell in cells]
        if any(change is None for change in changes):
            refused.append(name)
        else:
            moved[name] = tuple(change for change in changes if change is not None)
    if not moved:
        return plain
    lows = [(plain.low * changes[0], name) for name, changes in moved.items()]
    highs = [(plain.high * changes[-1], name) for name, changes in moved.items()]
    share, most = max((max(abs(change - 1) for change in changes), name) for name, changes in moved.items())
    swing = Swing(
        worst=min(lows)[0],
        worst_by=min(lows)[1],
        best=max(highs)[0],
        best_by=max(highs)[1],
        most=most if share > 0 else "",
        share=share,
        refused=tuple(refused),
    )
    return Compared(row=plain.row, values=plain.values, over_bounds=plain.over_bounds, swing=swing, moved=moved)


def _change(cell: Cell, short: Results, seed: int, assumed: Assumptions) -> float | None:
    """By what factor the cell's number changes, None where something does not fit any more."""
    before, after = (
        _value(cell, *(short[_short(side, seed, one)] for side in _sides(cell))) for one in (ASSUMED, assumed)
    )
    if isinstance(before, str) or isinstance(after, str):
        return None
    return after / before if before else 1.0


# -- the table


HEADERS = ("paper", "ours", f"+-{MOVE:.0%}: worst - best", "moved most by", "over its bound")


def table(compared: Sequence[Compared]) -> str:
    """A paragraph for each source, a line for each row, its notes below it."""
    lines = [_line("", HEADERS)]
    source = ""
    for one in compared:
        if one.row.source != source:
            source = one.row.source
            lines += ["", source]
        lines.append(_line(one.row.what, _fields(one)))
        if one.row.note:
            lines.append(f"      {one.row.note}")
    return "\n".join(lines) + "\n"


def _line(what: str, fields: Sequence[str]) -> str:
    paper, ours, swing, most, over = fields
    return f"  {what:<68} {paper:>20}  {ours:>14}  {swing:>22}  {most:<32} {over}".rstrip()


def _fields(one: Compared) -> tuple[str, str, str, str, str]:
    unit = "" if one.row.unit == "x" else one.row.unit
    bounds = [over for over in one.over_bounds if over]
    return (
        f"{one.row.paper}{unit if one.row.low or one.row.high else ''}",
        _range(one.low, one.high) + (unit if one.values else ""),
        _range(one.swing.worst, one.swing.best) if one.swing else "",
        _most(one),
        _range(min(bounds), max(bounds)) if bounds else "",
    )


def _most(one: Compared) -> str:
    if one.swing is None or not one.swing.most:
        return ""
    return f"{one.swing.most} ({one.swing.share:.0%})"


def _range(low: float, high: float) -> str:
    if math.isnan(low):
        return "-"
    shown = [f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}" for value in (low, high)]
    return shown[0] if shown[0] == shown[1] else " - ".join(shown)


def as_data(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """One JSON object a row."""
    return [_row_data(one) for one in compared]


def _row_data(one: Compared) -> dict[str, Any]:
    row, swing = one.row, one.swing
    data: dict[str, Any] = {
        "key": row.key,
        "source": row.source,
        "what": row.what,
        "paper": row.paper,
        "paper_low": row.low,
        "paper_high": row.high,
        "ours": {cell.label: round(value, 4) for cell, value in zip(row.cells, one.values, strict=True)},
        "unit": row.unit.strip(),
        "over_bound": {cell.label: round(over, 4) for cell, over in zip(row.cells, one.over_bounds, strict=True)},
        "note": row.note,
    }
    if swing is not None:
        data["moved_by_20_percent"] = {
            "worst": round(swing.worst, 4),
            "worst_by": swing.worst_by,
            "best": round(swing.best, 4),
            "best_by": swing.best_by,
            "most": swing.most,
            "share": round(swing.share, 4),
            "does_not_fit": list(swing.refused),
        }
    return data
