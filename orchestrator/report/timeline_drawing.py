"""The timeline as a picture: a band a generation worker, the scoring backlog, the trainer; bubbles in colour.

A band is cut into columns of equal time. A column of a worker is filled from below by the share of its slots that were
busy, the rest by the causes of idleness; of the trainer it is filled by what it did. Owns: what is drawn where. Never:
the accounting (bubbles.py), the shapes (drawing.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.report.bubbles import Cause, Usage, usage_by_window
from orchestrator.report.drawing import Drawing, Polyline, Rect, Words, to_svg, write_png
from orchestrator.report.spans import SCORING, TRAINER, Span, SpanKind, Timeline

WIDTH = 1200.0
LEFT = 130.0
RIGHT = 16.0
TOP = 56.0
BAND = 44.0
GAP = 8.0
THIN = 10.0
THINNEST = 0.3
"""No rectangle is narrower: it could not be seen."""
NUM_COLUMNS = 600
"""Columns of a band: two units each, and a drawing of any run stays under a few hundred kB."""
MAX_WORKERS = 32
"""More bands than that cannot be read; the others are left out and counted."""

BUSY = "#4c9f70"
CAUSE_COLORS: Mapping[Cause, str] = {
    Cause.PIPELINE: "#e4572e",
    Cause.SKEW: "#f3a712",
    Cause.WEIGHTS: "#7b5ea7",
    Cause.SCORING: "#4f8fc0",
    Cause.OTHER: "#d5d5d5",
}
KIND_COLORS: Mapping[SpanKind, str] = {
    SpanKind.ROUND: BUSY,
    SpanKind.STEP: "#22577a",
    SpanKind.PUBLISH: CAUSE_COLORS[Cause.WEIGHTS],
    SpanKind.CHECKPOINT: "#8a8a8a",
    SpanKind.LOAD: CAUSE_COLORS[Cause.WEIGHTS],
    SpanKind.SCORING: CAUSE_COLORS[Cause.SCORING],
}
LEGEND = (
    ("busy", BUSY),
    ("optimizer step", KIND_COLORS[SpanKind.STEP]),
    ("checkpoint", KIND_COLORS[SpanKind.CHECKPOINT]),
    ("pipeline bubble", CAUSE_COLORS[Cause.PIPELINE]),
    ("skew bubble", CAUSE_COLORS[Cause.SKEW]),
    ("weights", CAUSE_COLORS[Cause.WEIGHTS]),
    ("scoring", CAUSE_COLORS[Cause.SCORING]),
    ("other idle", CAUSE_COLORS[Cause.OTHER]),
)


def draw_timeline(timeline: Timeline, *, title: str = "") -> Drawing:
    """The whole run on one page."""
    shown = timeline.workers[:MAX_WORKERS]
    height = TOP + len(shown) * (BAND + THIN + 2 * GAP) + 2 * (BAND + GAP) + 40
    drawing = Drawing(WIDTH, height)
    time = _TimeAxis.of(timeline)
    columns = time.columns()
    usage = usage_by_window(timeline, columns)
    loads: defaultdict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.LOAD:
            loads[span.track].append(span)
    _legend(drawing, title)
    top = TOP
    for worker in shown:
        _band_title(drawing, worker, top)
        _fill_band(drawing, usage[worker], top, busy=BUSY)
        _draw_spans(drawing, loads[worker], top + BAND + 2, THIN, time)
        top += BAND + THIN + 2 * GAP
    _band_title(drawing, SCORING, top)
    _draw_backlog(drawing, timeline, columns, top)
    top += BAND + GAP
    _band_title(drawing, TRAINER, top)
    _fill_band(drawing, usage[TRAINER], top, busy="")
    _draw_spans(drawing, [span for span in timeline.spans if span.track == TRAINER], top, BAND, time)
    _axis(drawing, timeline, top + BAND, time, left_out=len(timeline.workers) - len(shown))
    return drawing


def write_timeline(timeline: Timeline, title: str, out: Path, name: str = "") -> list[Path]:
    """``timeline[-NAME].svg`` in ``out``, and a PNG where Pillow is installed. Returns what was written."""
    drawing, path = draw_timeline(timeline, title=title), out / (f"timeline-{name}.svg" if name else "timeline.svg")
    path.write_text(to_svg(drawing), encoding="utf-8")
    try:
        write_png(drawing, path.with_suffix(".png"))
    except ConfigError:
        return [path]
    return [path, path.with_suffix(".png")]


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """From the first moment at which somebody could work to the last event: starting up is not drawn."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, timeline: Timeline) -> _TimeAxis:
        start_s = min((presence.start_s for presence in timeline.presences), default=0.0)
        return cls(start_s, max(timeline.end_s, start_s + 1e-6))

    def x(self, second: float) -> float:
        return LEFT + (second - self.start_s) * (WIDTH - LEFT - RIGHT) / (self.end_s - self.start_s)

    def columns(self) -> list[float]:
        """[NUM_COLUMNS + 1] edges of the columns, seconds."""
        width_s = (self.end_s - self.start_s) / NUM_COLUMNS
        return [self.start_s + width_s * column for column in range(NUM_COLUMNS + 1)]

    def ticks(self) -> list[float]:
        step = nice_step(self.end_s - self.start_s, 12)
        return [tick * step for tick in range(math.ceil(self.start_s / step), math.floor(self.end_s / step) + 1)]


def _legend(drawing: Drawing, title: str) -> None:
    drawing.words.append(Words(8, 18, title, color="#000"))
    x = LEFT
    for text, color in LEGEND:
        drawing.rects.append(Rect(x, 30, 12, 12, color))
        drawing.words.append(Words(x + 16, 40, text))
        x += 34 + 7 * len(text)


def _band_title(drawing: Drawing, track: str, top: float) -> None:
    drawing.words.append(Words(LEFT - 8, top + BAND / 2 + 4, track, anchor="end"))


def _fill_band(drawing: Drawing, usage: Sequence[Usage], top: float, *, busy: str) -> None:
    """One column a window, from below: busy, then the causes. busy "" leaves the busy part to what is drawn over it."""
    width = (WIDTH - LEFT - RIGHT) / len(usage)
    for column, used in enumerate(usage):
        if not used.present_s:
            continue
        bottom = top + BAND
        parts = [(busy, used.busy_s), *((CAUSE_COLORS[cause], used.idle_s.get(cause, 0.0)) for cause in Cause)]
        for color, seconds in parts:
            height = BAND * max(0.0, seconds) / used.present_s
            bottom -= height
            if color and height > 0.05:
                drawing.rects.append(Rect(LEFT + column * width, bottom, width, height, color))


def _draw_spans(drawing: Drawing, spans: Sequence[Span], top: float, height: float, time: _TimeAxis) -> None:
    """One rectangle a span; of those that are too short to be seen apart, one for each kind and place."""
    shown: set[tuple[SpanKind, int]] = set()
    for span in spans:
        width = max(THINNEST, time.x(span.end_s) - time.x(span.start_s))
        place = (span.kind, round(time.x(span.start_s) / THINNEST))
        if width == THINNEST and place in shown:
            continue
        shown.add(place)
        hint = f"{span.name}: {span.end_s - span.start_s:.3f} s at {span.start_s:.2f} s"
        drawing.rects.append(Rect(time.x(span.start_s), top, width, height, KIND_COLORS[span.kind], hint))


def _draw_backlog(drawing: Drawing, timeline: Timeline, columns: Sequence[float], top: float) -> None:
    """Groups that wait for their advantages, as the height of the band; its top is the most there ever were."""
    spans = [span for span in timeline.spans if span.kind is SpanKind.SCORING]
    waiting = [0.0] * (len(columns) - 1)
    column_s = columns[1] - columns[0]
    for span in spans:
        first = min(int((span.start_s - columns[0]) / column_s), len(waiting) - 1)
        last = min(int((span.end_s - columns[0]) / column_s), len(waiting) - 1)
        for column in range(first, last + 1):
            begin_s, end_s = max(span.start_s, columns[column]), min(span.end_s, columns[column + 1])
            waiting[column] += max(0.0, end_s - begin_s) / column_s
    most = max(waiting, default=0.0)
    width = (WIDTH - LEFT - RIGHT) / len(waiting)
    for column, groups in enumerate(waiting):
        if groups:
            height = BAND * groups / most
            x = LEFT + column * width
            drawing.rects.append(Rect(x, top + BAND - height, width, height, KIND_COLORS[SpanKind.SCORING]))


def _axis(drawing: Drawing, timeline: Timeline, bottom: float, time: _TimeAxis, *, left_out: int) -> None:
    """Seconds below, and a line through all bands at the end of each batch."""
    for trained in timeline.trained:
        x = time.x(trained.at_s)
        drawing.lines.append(Polyline(((x, TOP - 6), (x, bottom)), "#00000055", 0.5))
    for second in time.ticks():
        x = time.x(second)
        drawing.lines.append(Polyline(((x, bottom), (x, bottom + 5)), "#333", 1))
        drawing.words.append(Words(x, bottom + 20, f"{second:g} s", anchor="middle"))
    if left_out:
        drawing.words.append(Words(8, bottom + 20, f"{left_out} more workers"))


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 x 10^n that divides ``span`` into at most ``most`` parts; 0 for an empty span."""
    if span <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(digit * power for digit in (1, 2, 5, 10) if span / (digit * power) <= most)
