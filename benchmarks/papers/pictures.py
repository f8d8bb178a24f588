"""Pictures of the papers beside ours: bars of throughput, how it scales, and what a result rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

PAPER, OURS = "#9aa5b1", "#4c9f70"
LOWER, HIGHER = "#e4572e", "#22577a"
MAX_CONSTANTS = 12
"""Drawn in a tornado: the rest hardly moves a result."""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One result: the paper's and ours, each from low to high; None where there is none."""

    title: str
    ours: tuple[float, float]
    paper: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A result when one constant is lower, and when it is higher; NaN where something does not fit then."""

    constant: str
    lower: float
    higher: float


def draw_bars(title: str, bars: Sequence[Bar]) -> Figure:
    """Two bars for each result, from 0; a range ends in a thinner bar from its low to its high."""
    figure = Figure(figsize=(9.5, 1.2 + 0.42 * len(bars)), layout="constrained")
    axes = figure.add_subplot(title=title, yticks=range(len(bars)), yticklabels=[bar.title for bar in bars])
    for name, color, offset in (("paper", PAPER, -0.2), ("ours", OURS, 0.2)):
        for place, bar in enumerate(bars):
            values = bar.paper if name == "paper" else bar.ours
            if values is None:
                continue
            low, high = values
            y = place + offset
            axes.barh(y, low, height=0.34, color=color, label=name if place == 0 else None)
            axes.barh(y, high - low, left=low, height=0.12, color=color)
            axes.annotate(
                f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} - {high:.2f}",
                (high, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_xlim(0.0, 1.15 * max(high for bar in bars for _, high in (bar.ours, bar.paper or bar.ours)))
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    return figure


def draw_tornado(title: str, value: float, effects: Sequence[Effect]) -> Figure:
    """The constants that move a result furthest, the strongest on top."""
    strongest = sorted(effects, key=lambda effect: -_reach(effect, value))[:MAX_CONSTANTS]
    figure = Figure(figsize=(9.5, 1.2 + 0.34 * len(strongest)), layout="constrained")
    names = [effect.constant for effect in strongest]
    axes = figure.add_subplot(title=title, yticks=range(len(names)), yticklabels=names)
    for name, color, offset, ends in (
        ("20% lower", LOWER, -0.18, [effect.lower for effect in strongest]),
        ("20% higher", HIGHER, 0.18, [effect.higher for effect in strongest]),
    ):
        widths = [end - value if math.isfinite(end) else 0.0 for end in ends]
        axes.barh(
            [place + offset for place in range(len(ends))], widths, left=value, height=0.3, color=color, label=name
        )
    axes.axvline(value, color="#333", linewidth=1)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    return figure


def _reach(effect: Effect, value: float) -> float:
    return max((abs(end - value) for end in (effect.lower, effect.higher) if math.isfinite(end)), default=0.0)


def draw_scaling(title: str, curves: Mapping[str, Curve]) -> Figure:
    """Lines over GPUs, both axes logarithmic; points of a curve are (GPUs, samples a second)."""
    figure = Figure(figsize=(9.5, 5.0), layout="constrained")
    axes = figure.add_subplot(title=title, xscale="log", yscale="log", xlabel="GPUs", ylabel="samples a second")
    for name, points in curves.items():
        axes.plot([gpus for gpus, _ in points], [rate for _, rate in points], marker="o", markersize=3, label=name)
    sizes = sorted({gpus for points in curves.values() for gpus, _ in points})
    axes.set_xticks(sizes, [f"{gpus:g}" for gpus in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
