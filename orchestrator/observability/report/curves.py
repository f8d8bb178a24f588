"""Small line charts of numbers over batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.observability.report.drawing import new_axes, style
from orchestrator.terminal_text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, PLOT_HEIGHT = 380.0, 140.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 30.0, 26.0
LEGEND_ROW, CHARACTER, KEY = 16.0, 6.0, 30.0
"""Pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart. points: (place, value), ascending.  over: what the places are, batches from 1."""

    name: str
    points: Sequence[tuple[float, float]]
    over: str = "batch"


def series_of(name: str, lines: Sequence[Mapping[str, Any]], key: str, *, over: str = "batch") -> Series:
    """The numbers under ``key``; a batch (or what ``over`` names) without one, or with NaN, has no point."""
    first = 1 if over == "batch" else 0  # people count batches from 1
    points = [(float(line[over] + first), float(line[key])) for line in lines if _is_finite(line.get(key))]
    return Series(name=name, points=points, over=over)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@style()
def draw_chart(title: str, series: Sequence[Series]) -> Figure | None:
    """One chart, None when there is nothing to draw."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    names = [printable(one.name) for one in drawn] if len(drawn) > 1 else []
    per_row = _names_in_a_row(names)
    top = TOP + LEGEND_ROW * math.ceil(len(names) / per_row)
    figure, axes = new_axes(
        WIDTH, top + PLOT_HEIGHT + BOTTOM, title=title, left=LEFT, right=RIGHT, top=top, bottom=BOTTOM
    )
    lines = [axes.plot(*zip(*one.points, strict=True), marker="." * (len(one.points) == 1))[0] for one in drawn]
    if names:
        axes.legend(lines, names, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=per_row)
    axes.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    axes.yaxis.set_major_formatter("{x:.4g}")
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xticks(ticks, labels=[f"{drawn[0].over} {ticks[0]:g}", *(f"{tick:g}" for tick in ticks[1:])])
    return figure


def _names_in_a_row(names: Sequence[str]) -> int:
    """All where they fit beside each other, else as many columns as the longest name leaves room for."""
    widths = [KEY + CHARACTER * len(name) for name in names]
    return max(1, len(names) if sum(widths) <= WIDTH - LEFT else int((WIDTH - LEFT) / max(widths)))
