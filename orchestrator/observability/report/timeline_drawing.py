"""A run on one page: a band a generation worker, one of groups being scored, one of the trainer, over time.

The height of a generation worker's band is its slots: busy from below, then idle by cause, so that the area of a
colour is a share of what the worker could have done. Thin bars under it are loads of weights. Where the trainer is
idle its band has the colour of the cause. Vertical lines are where batches ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.observability.report.bubbles import Cause, Usage, usage_by_window
from orchestrator.observability.report.drawing import INK, hint, new_axes, style, to_svg, write_png
from orchestrator.observability.report.spans import SCORING, TRAINER, Span, SpanKind, Timeline
from orchestrator.terminal_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200.0, 130.0, 16.0, 52.0, 34.0
BAND, GAP, THIN = 44.0, 8.0, 10.0
THINNEST = 0.3
"""No span is drawn narrower: it could not be seen."""
NUM_COLUMNS = 600
"""Columns of a band: two pixels each, and a drawing of any run stays under a few hundred kB."""
MAX_WORKERS = 32
"""More bands than that cannot be read; the others are left out and counted."""

BUSY = "#4c9f70"
CAUSE_COLORS: Mapping[Cause, str] = {
    Cause.PIPELINE: "#e4572e",
    Cause.SKEW: "#f3a712",
    Cause.WEIGHTS: "#8f6fc4",
    Cause.SCORING: "#4f8fc0",
    Cause.OTHER: "#8a93a060",
}
KIND_COLORS: Mapping[SpanKind, str] = {
    SpanKind.ROUND: BUSY,
    SpanKind.STEP: "#12717f",
    SpanKind.PUBLISH: CAUSE_COLORS[Cause.WEIGHTS],
    SpanKind.CHECKPOINT: "#8a8a8a",
    SpanKind.LOAD: CAUSE_COLORS[Cause.WEIGHTS],
    SpanKind.SCORING: CAUSE_COLORS[Cause.SCORING],
}
LEGEND = {
    "busy": BUSY,
    "optimizer step": KIND_COLORS[SpanKind.STEP],
    "checkpoint": KIND_COLORS[SpanKind.CHECKPOINT],
    "pipeline bubble": CAUSE_COLORS[Cause.PIPELINE],
    "skew bubble": CAUSE_COLORS[Cause.SKEW],
    "weights": CAUSE_COLORS[Cause.WEIGHTS],
    "scoring": CAUSE_COLORS[Cause.SCORING],
    "other idle": CAUSE_COLORS[Cause.OTHER],
}


@style()
def draw_timeline(timeline: Timeline, *, title: str = "") -> Figure:
    """The whole run on one page, from when a worker could first work: starting up is not drawn."""
    from matplotlib.patches import Patch

    workers = timeline.workers[:MAX_WORKERS]
    begin_s = min((presence.start_s for presence in timeline.presences), default=0.0)
    width_s = max(timeline.end_s - begin_s, 1e-6) / NUM_COLUMNS
    columns = [begin_s + width_s * column for column in range(NUM_COLUMNS + 1)]
    usage = usage_by_window(timeline, columns)
    tops = {worker: place * (BAND + THIN + 2 * GAP) for place, worker in enumerate(workers)}
    tops[SCORING] = len(workers) * (BAND + THIN + 2 * GAP)
    tops[TRAINER] = tops[SCORING] + BAND + GAP
    height = tops[TRAINER] + BAND

    figure, axes = new_axes(WIDTH, TOP + height + BOTTOM, title=title, left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM)
    axes.set(xlim=(columns[0], columns[-1]), ylim=(height, 0))
    axes.set_yticks([top + BAND / 2 for top in tops.values()], labels=[printable(track) for track in tops])
    axes.locator_params(axis="x", nbins=12, steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.grid(visible=False)
    axes.tick_params(axis="x", bottom=True)
    patches = [Patch(color=color, label=text) for text, color in LEGEND.items()]
    box = (LEFT / WIDTH, 1 - 26 / (TOP + height + BOTTOM))
    figure.legend(handles=patches, loc="upper left", bbox_to_anchor=box, ncols=len(LEGEND), handleheight=1.0)

    boxes = _Boxes()
    for worker in workers:
        boxes.add_usage(columns, usage[worker], tops[worker], busy=BUSY)
    boxes.add_usage(columns, usage[TRAINER], tops[TRAINER], busy="")
    boxes.add_backlog(columns, _backlog(timeline, columns), tops[SCORING])
    boxes.draw(axes)
    thinnest_s = THINNEST * width_s * NUM_COLUMNS / (WIDTH - LEFT - RIGHT)
    drawn = (
        span for span in timeline.spans if span.track in tops and (span.track == TRAINER or span.kind is SpanKind.LOAD)
    )
    for span in _seen_apart(drawn, thinnest_s):
        top, thickness = (tops[TRAINER], BAND) if span.track == TRAINER else (tops[span.track] + BAND + 2, THIN)
        _draw_span(axes, span, top, thickness, thinnest_s)
    axes.vlines(
        [trained.at_s for trained in timeline.trained], -4, height, INK, linewidth=0.4, alpha=0.4, clip_on=False
    )
    if left_out := len(timeline.workers) - len(workers):
        figure.text(8 / WIDTH, 8 / (TOP + height + BOTTOM), f"{left_out} more workers")
    return figure


def write_timeline(timeline: Timeline, title: str, out: Path, name: str = "") -> list[Path]:
    """``timeline[-NAME].svg`` and ``.png`` in ``out``. Returns their paths."""
    figure, path = draw_timeline(timeline, title=title), out / (f"timeline-{name}.svg" if name else "timeline.svg")
    path.write_text(to_svg(figure), encoding="utf-8")
    write_png(figure, path.with_suffix(".png"))
    return [path, path.with_suffix(".png")]


class _Boxes:
    """Rectangles (left, right in seconds; top, bottom in pixels), one path a colour."""

    def __init__(self) -> None:
        self._of_color: defaultdict[str, list[tuple[float, float, float, float]]] = defaultdict(list)

    def _add(self, color: str, left: float, right: float, top: float, bottom: float) -> None:
        """A box that goes on where the last one of its colour ended makes that one longer."""
        boxes = self._of_color[color]
        if boxes and boxes[-1][1:] == (left, top, bottom):
            left = boxes.pop()[0]
        boxes.append((left, right, top, bottom))

    def add_usage(self, columns: Sequence[float], usage: Sequence[Usage], top: float, *, busy: str) -> None:
        """One column a window, from below: busy, then the causes. busy "": spans are drawn there."""
        for (left, right), used in zip(pairwise(columns), usage, strict=True):
            bottom = top + BAND
            parts = [(busy, used.busy_s), *((CAUSE_COLORS[cause], used.idle_s.get(cause, 0.0)) for cause in Cause)]
            for color, seconds in parts:
                height = BAND * max(0.0, seconds) / (used.present_s or 1.0)
                bottom -= height
                if color and height > 0.05:
                    self._add(color, left, right, bottom, bottom + height)

    def add_backlog(self, columns: Sequence[float], waiting: Sequence[float], top: float) -> None:
        """Groups that wait, as the height of the band; its top is the most there ever were."""
        most = max(waiting, default=0.0)
        for (left, right), groups in zip(pairwise(columns), waiting, strict=True):
            if groups:
                color = KIND_COLORS[SpanKind.SCORING]
                self._add(color, left, right, top + BAND * (1 - groups / most), top + BAND)

    def draw(self, axes: Axes) -> None:
        import numpy as np
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        for color, boxes in self._of_color.items():
            corners = np.array([[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in boxes])
            path = Outline.make_compound_path_from_polys(corners)
            axes.add_patch(PathPatch(path, facecolor=color, linewidth=0, clip_on=False))


def _seen_apart(spans: Iterable[Span], thinnest_s: float) -> list[Span]:
    """Of spans that are too short to be seen apart, one for each track, kind and place."""
    shown: list[Span] = []
    places: set[tuple[str, SpanKind, int]] = set()
    for span in spans:
        place = (span.track, span.kind, round(span.start_s / thinnest_s))
        if span.end_s - span.start_s > thinnest_s or place not in places:
            places.add(place)
            shown.append(span)
    return shown


def _draw_span(axes: Axes, span: Span, top: float, height: float, thinnest_s: float) -> None:
    from matplotlib.patches import Rectangle

    seconds = span.end_s - span.start_s
    text = f"{span.name}: {seconds:.3f} s at {span.start_s:.2f} s"
    color = KIND_COLORS[span.kind]
    axes.add_patch(
        Rectangle(
            (span.start_s, top),
            max(seconds, thinnest_s),
            height,
            facecolor=color,
            linewidth=0,
            clip_on=False,
            gid=hint(text),
        )
    )


def _backlog(timeline: Timeline, columns: Sequence[float]) -> list[float]:
    """Per column the mean number of groups that wait for their advantages."""
    waiting = [0.0] * (len(columns) - 1)
    column_s = columns[1] - columns[0]
    for span in timeline.spans:
        if span.kind is not SpanKind.SCORING:
            continue
        first, last = (
            min(int((end_s - columns[0]) / column_s), len(waiting) - 1) for end_s in (span.start_s, span.end_s)
        )
        for column in range(first, last + 1):
            begin_s, end_s = max(span.start_s, columns[column]), min(span.end_s, columns[column + 1])
            waiting[column] += max(0.0, end_s - begin_s) / column_s
    return waiting
