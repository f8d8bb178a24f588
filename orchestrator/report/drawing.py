"""Pictures as a list of rectangles, lines and words, and the two ways to write them down.

SVG is written by hand: it needs nothing and is sharp at every size. PNG is drawn with Pillow (extra ``plots``), because
it is one wheel with its own font and without a system library, which cairo and a browser are not.

Owns: shapes. Never: what they mean. Invariant: a word is escaped and loses its control characters here, in one place.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from orchestrator.errors import ConfigError
from orchestrator.printable import printable
from transport.files import replacing

FONT_SIZE = 12
PNG_SCALE = 2
"""Pixels of a PNG for each unit of a drawing: readable on a screen of today."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle; all rectangles of one colour become one path. hint: shown by a browser under the pointer."""

    x: float
    y: float
    width: float
    height: float
    color: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Polyline:
    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1.5


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; (x, y) is on its baseline."""

    x: float
    y: float
    text: str
    anchor: Anchor = "start"
    color: str = "#333"


@dataclass(slots=True)
class Drawing:
    """Shapes in order, on white, ``width`` x ``height`` units."""

    width: float
    height: float
    rects: list[Rect] = field(default_factory=list[Rect])
    lines: list[Polyline] = field(default_factory=list[Polyline])
    words: list[Words] = field(default_factory=list[Words])


def to_svg(drawing: Drawing) -> str:
    """The drawing as one ``<svg>`` element, to stand in a file of its own or in a page."""
    size = f'viewBox="0 0 {drawing.width:g} {drawing.height:g}" width="{drawing.width:g}" height="{drawing.height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{FONT_SIZE}">',
        f'<rect width="{drawing.width:g}" height="{drawing.height:g}" fill="#fff"/>',
    ]
    plain: dict[str, list[str]] = {}
    for rect in drawing.rects:
        if not rect.hint:
            path = f"M{rect.x:.6g} {rect.y:.6g}h{rect.width:.5g}v{rect.height:.5g}h{-rect.width:.5g}z"
            plain.setdefault(rect.color, []).append(path)
    parts += [f'<path fill="{color}" d="{"".join(paths)}"/>' for color, paths in plain.items()]
    parts += [_hinted(rect) for rect in drawing.rects if rect.hint]
    parts += [_polyline(line) for line in drawing.lines]
    parts += [
        f'<text x="{words.x:g}" y="{words.y:g}" fill="{words.color}" text-anchor="{words.anchor}">'
        f"{escaped(words.text)}</text>"
        for words in drawing.words
    ]
    return "\n".join([*parts, "</svg>\n"])


def _hinted(rect: Rect) -> str:
    where = f'x="{rect.x:.6g}" y="{rect.y:.6g}" width="{rect.width:.5g}" height="{rect.height:.5g}"'
    return f'<rect {where} fill="{rect.color}"><title>{escaped(rect.hint)}</title></rect>'


def _polyline(line: Polyline) -> str:
    points = " ".join(f"{x:.6g},{y:.6g}" for x, y in line.points)
    return f'<polyline points="{points}" fill="none" stroke="{line.color}" stroke-width="{line.width:g}"/>'


def escaped(text: str) -> str:
    """``text`` for HTML and SVG, also inside an attribute: markup is escaped, control characters are gone."""
    return html.escape(printable(text), quote=True)


def write_png(drawing: Drawing, path: Path) -> None:
    """Write the drawing as PNG. Raises ConfigError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ConfigError("a PNG needs Pillow: pip install 'streamrl[plots]', or use --svg") from error
    image = Image.new("RGB", (round(drawing.width * PNG_SCALE), round(drawing.height * PNG_SCALE)), "#fff")
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE * PNG_SCALE)
    for rect in drawing.rects:
        left, top = rect.x * PNG_SCALE, rect.y * PNG_SCALE
        right, bottom = left + rect.width * PNG_SCALE, top + rect.height * PNG_SCALE
        canvas.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=rect.color)
    for line in drawing.lines:
        points = [(x * PNG_SCALE, y * PNG_SCALE) for x, y in line.points]
        canvas.line(points, fill=line.color, width=max(1, round(line.width * PNG_SCALE)))
    places = {"start": "ls", "middle": "ms", "end": "rs"}
    for words in drawing.words:
        place = (words.x * PNG_SCALE, words.y * PNG_SCALE)
        canvas.text(place, printable(words.text), fill=words.color, font=font, anchor=places[words.anchor])
    with replacing(path) as file:
        image.save(file, "PNG")
