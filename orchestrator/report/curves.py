"""Small line charts of numbers over batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.report.drawing import Drawing, Polyline, Rect, Words
from orchestrator.report.timeline_drawing import nice_step

WIDTH, HEIGHT = 380.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 44.0, 24.0
PALETTE = ("#22577a", "#e4572e", "#4c9f70", "#7b5ea7", "#f3a712", "#17a398", "#b23a48", "#6b6b6b")
GRID = "#e6e6e6"


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


def draw_chart(title: str, series: Sequence[Series]) -> Drawing | None:
    """One chart, None when there is nothing to draw."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    drawing = Drawing(WIDTH, HEIGHT, words=[Words(8, 16, title, color="#000")])
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low, high = (min(ys), max(ys)) if min(ys) < max(ys) else (min(ys) - 0.5, max(ys) + 0.5)
    leftmost = min(xs)
    across = (WIDTH - LEFT - RIGHT) / (max(xs) - leftmost or 1.0)
    up = (HEIGHT - TOP - BOTTOM) / (high - low)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - leftmost) * across, HEIGHT - BOTTOM - (y - low) * up

    _grid(drawing, low, high, [place(leftmost, y)[1] for y in _ticks(low, high)])
    drawing.words += [
        Words(LEFT, HEIGHT - 8, f"{drawn[0].over} {leftmost:g}"),
        Words(WIDTH - RIGHT, HEIGHT - 8, f"{max(xs):g}", anchor="end"),
    ]
    for number, one in enumerate(drawn):
        color = PALETTE[number % len(PALETTE)]
        points = [place(x, y) for x, y in one.points]
        drawing.lines.append(Polyline(points, color))
        if len(points) == 1:
            drawing.rects.append(Rect(points[0][0] - 2, points[0][1] - 2, 4, 4, color))
    if len(drawn) > 1:
        _legend(drawing, [one.name for one in drawn])
    return drawing


def _ticks(low: float, high: float) -> list[float]:
    step = nice_step(high - low, 5)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _grid(drawing: Drawing, low: float, high: float, heights: Sequence[float]) -> None:
    for value, y in zip(_ticks(low, high), heights, strict=True):
        drawing.lines.append(Polyline(((LEFT, y), (WIDTH - RIGHT, y)), GRID, 1))
        drawing.words.append(Words(LEFT - 6, y + 4, f"{value:.4g}", anchor="end"))


def _legend(drawing: Drawing, names: Sequence[str]) -> None:
    x = LEFT
    for number, name in enumerate(names):
        drawing.rects.append(Rect(x, 24, 10, 10, PALETTE[number % len(PALETTE)]))
        drawing.words.append(Words(x + 14, 33, name))
        x += 28 + 6.5 * len(name)
