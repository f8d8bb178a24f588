"""Pictures of ``simulate``: bars of throughput, how it scales, and what a result rests on.

Owns: what is drawn where. Never: numbers, shapes (``drawing.py``), the timeline (``timeline_drawing.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.report.curves import GRID, PALETTE, Series
from orchestrator.report.drawing import Drawing, Polyline, Rect, Words
from orchestrator.report.timeline_drawing import nice_step

WIDTH = 900.0
LEFT, RIGHT, TOP, BOTTOM = 360.0, 60.0, 64.0, 34.0
ROW = 38.0
PAPER, OURS = "#9aa5b1", "#4c9f70"
LOWER, HIGHER = "#e4572e", "#22577a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One result: the paper's and ours, each from low to high; None where there is none."""

    title: str
    ours: tuple[float, float]
    paper: tuple[float, float] | None = None


def draw_bars(title: str, bars: Sequence[Bar]) -> Drawing:
    """Two bars for each result, from 0; a range ends in a thinner bar from its low to its high."""
    drawing = Drawing(WIDTH, TOP + BOTTOM + ROW * len(bars), words=[Words(8, 20, title, color="#000")])
    most = max(max(bar.ours[1], bar.paper[1] if bar.paper else 0.0) for bar in bars)
    across = (WIDTH - LEFT - RIGHT) / most
    _legend(drawing, (("paper", PAPER), ("ours", OURS)))
    _grid(drawing, [(tick, LEFT + tick * across) for tick in _ticks(0.0, most)])
    for place, bar in enumerate(bars):
        top = TOP + place * ROW
        drawing.words.append(Words(LEFT - 8, top + 20, bar.title, anchor="end"))
        for offset, color, values in ((4, PAPER, bar.paper), (18, OURS, bar.ours)):
            if values is not None:
                _bar(drawing, top + offset, values, across, color)
    return drawing


def _bar(drawing: Drawing, top: float, values: tuple[float, float], across: float, color: str) -> None:
    low, high = values
    drawing.rects.append(Rect(LEFT, top, low * across, 12, color))
    drawing.rects.append(Rect(LEFT + low * across, top + 4, (high - low) * across, 4, color))
    text = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} - {high:.2f}"
    drawing.words.append(Words(LEFT + high * across + 5, top + 10, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A result when one constant is lower, and when it is higher; NaN where something does not fit then."""

    constant: str
    lower: float
    higher: float


def draw_tornado(title: str, value: float, effects: Sequence[Effect], most: int = 12) -> Drawing:
    """The constants that move a result furthest, the strongest on top."""
    ordered = sorted(effects, key=lambda effect: -_reach(effect, value))[:most]
    drawing = Drawing(WIDTH, TOP + BOTTOM + ROW * 0.7 * len(ordered), words=[Words(8, 20, title, color="#000")])
    ends = [end for effect in ordered for end in (effect.lower, effect.higher) if math.isfinite(end)]
    low, high = min([*ends, value]), max([*ends, value])
    across = (WIDTH - LEFT - RIGHT) / (high - low or 1.0)
    _legend(drawing, (("20% lower", LOWER), ("20% higher", HIGHER)))
    _grid(drawing, [(tick, LEFT + (tick - low) * across) for tick in _ticks(low, high)])
    middle = LEFT + (value - low) * across
    for place, effect in enumerate(ordered):
        top = TOP + place * ROW * 0.7
        drawing.words.append(Words(LEFT - 8, top + 14, effect.constant, anchor="end"))
        for offset, color, end in ((2, LOWER, effect.lower), (12, HIGHER, effect.higher)):
            if math.isfinite(end):
                x = LEFT + (end - low) * across
                drawing.rects.append(Rect(min(x, middle), top + offset, max(1.0, abs(x - middle)), 9, color))
    drawing.lines.append(Polyline(((middle, TOP - 6), (middle, drawing.height - BOTTOM)), "#333", 1))
    return drawing


def _reach(effect: Effect, value: float) -> float:
    return max((abs(end - value) for end in (effect.lower, effect.higher) if math.isfinite(end)), default=0.0)


CHART_HEIGHT = 420.0
CHART_LEFT = 80.0


def draw_scaling(title: str, series: Sequence[Series]) -> Drawing:
    """Lines over GPUs, both axes logarithmic; points of a series are (GPUs, samples a second)."""
    drawing = Drawing(WIDTH, CHART_HEIGHT, words=[Words(8, 20, title, color="#000")])
    xs = [math.log(x) for one in series for x, _ in one.points]
    ys = [math.log(y) for one in series for _, y in one.points]
    across = (WIDTH - CHART_LEFT - RIGHT) / (max(xs) - min(xs) or 1.0)
    up = (CHART_HEIGHT - TOP - BOTTOM) / (max(ys) - min(ys) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        left = CHART_LEFT + (math.log(x) - min(xs)) * across
        return left, CHART_HEIGHT - BOTTOM - (math.log(y) - min(ys)) * up

    for gpus in sorted({x for one in series for x, _ in one.points}):
        x, _ = place(gpus, math.exp(min(ys)))
        drawing.lines.append(Polyline(((x, TOP), (x, CHART_HEIGHT - BOTTOM)), GRID, 1))
        drawing.words.append(Words(x, CHART_HEIGHT - 12, f"{gpus:g}", anchor="middle"))
    for tick in _decades(math.exp(min(ys)), math.exp(max(ys))):
        _, y = place(math.exp(min(xs)), tick)
        drawing.lines.append(Polyline(((CHART_LEFT, y), (WIDTH - RIGHT, y)), GRID, 1))
        drawing.words.append(Words(CHART_LEFT - 6, y + 4, f"{tick:g}/s", anchor="end"))
    for number, one in enumerate(series):
        drawing.lines.append(Polyline([place(x, y) for x, y in one.points], PALETTE[number % len(PALETTE)], 2))
    _legend(drawing, [(one.name, PALETTE[number % len(PALETTE)]) for number, one in enumerate(series)])
    return drawing


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _ticks(low: float, high: float) -> list[float]:
    step = nice_step(high - low, 8)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)] if step else [low]


def _grid(drawing: Drawing, ticks: Sequence[tuple[float, float]]) -> None:
    for value, x in ticks:
        drawing.lines.append(Polyline(((x, TOP - 6), (x, drawing.height - BOTTOM)), GRID, 1))
        drawing.words.append(Words(x, drawing.height - BOTTOM + 18, f"{value:.4g}", anchor="middle"))


def _legend(drawing: Drawing, entries: Sequence[tuple[str, str]]) -> None:
    x = LEFT if len(entries) == 2 else CHART_LEFT
    for text, color in entries:
        drawing.rects.append(Rect(x, 34, 12, 12, color))
        drawing.words.append(Words(x + 16, 44, text))
        x += 40 + 7 * len(text)
