"""Pictures with matplotlib: how all of them look, how they are written as SVG and PNG, and the line charts of pages.

matplotlib is imported when the first picture is drawn, because a run starts without it. A picture of the same numbers
is the same file, byte for byte. Every text from a run passes ``printable``, and none of it is read as mathematics.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.terminal_text import printable
from transport.process.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXEL = 1 / 96
"""Inches: sizes here are in the pixels of a web page."""
PNG_SCALE = 2
"""Pixels of a PNG for each of a web page: readable on a screen of today."""
INK, GRID = "#333333", "#8a8a8a40"
PALETTE = ("#3b82c4", "#e4572e", "#4c9f70", "#8f6fc4", "#e0a010", "#17a398", "#c9506a", "#808080")
"""Readable on white and on the dark page of a report."""
STYLE: dict[Any, Any] = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.prop_cycle": f"cycler('color', {list(PALETTE)})",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.0,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "grid.color": GRID,
    "legend.borderaxespad": 0.0,
    "legend.columnspacing": 1.2,
    "legend.frameon": False,
    "legend.handlelength": 1.1,
    "legend.handletextpad": 0.4,
    "savefig.facecolor": "auto",
    "svg.fonttype": "none",
    "svg.hashsalt": "streamrl",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.bottom": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.left": False,
}
HINT = "hint: "


@contextmanager
def style() -> Generator[None]:
    """Whatever draws or writes is decorated with this."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # that it builds its list of fonts is of no interest
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name may use any alphabet
        yield


def new_axes(
    width: float, height: float, *, title: str, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` pixels with a title, and its axes inside margins of so many pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * PIXEL, height * PIXEL), dpi=1 / PIXEL)
    figure.text(8 / width, 1 - 18 / height, printable(title))
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure, figure.add_axes(box)


def hint(text: str) -> str:
    """``gid`` of an artist that a browser explains with ``text`` while the pointer is over it."""
    return HINT + printable(text)


@style()
def to_svg(figure: Figure, *, inline: bool = False) -> str:
    """The figure as one ``<svg>`` element: on white, as a file of its own; or ``inline``, in the colours of a page."""
    out = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=none, transparent=inline)
    svg = out.getvalue().partition("<svg")
    svg = svg[1] + svg[2]
    svg = re.sub(r'<path d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(rf'<g id="{HINT}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # several pictures stand in one page
    return re.sub(f"(fill|stroke): {INK}", r"\1: currentColor", svg) if inline else svg


@style()
def write_png(figure: Figure, path: Path) -> None:
    """Write the figure as PNG."""
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=PNG_SCALE / PIXEL, metadata={"Software": None})


# --- small line charts ------------------------------------------------------------------------------------------------

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
