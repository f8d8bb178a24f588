"""Pictures with matplotlib: how all of them look, and how they are written as SVG and PNG.

matplotlib is imported when the first picture is drawn, because a run starts without it. A picture of the same numbers
is the same file, byte for byte. Every text from a run passes ``printable``, and none of it is read as mathematics.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
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
