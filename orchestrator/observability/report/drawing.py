"""A run as pictures: line charts, its timeline as SVG and PNG, and as a trace for Perfetto.

matplotlib is imported when the first picture is drawn, because a run starts without it. A picture of the same numbers
is the same file, byte for byte. Every text from a run passes ``printable``, and none of it is read as mathematics.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
import warnings
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, printable
from orchestrator.observability.report.bubbles import (
    Cause,
    Usage,
    presences_by_track,
    total,
    usage_by_window,
    usage_within,
)
from orchestrator.observability.report.spans import (
    ORCHESTRATOR,
    SCORING,
    TRAINER,
    Mark,
    Presence,
    Span,
    SpanKind,
    Timeline,
    Trained,
)
from transport.process.files import replace, replacing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PIXEL = 1 / 96  # inches: sizes here are in the pixels of a web page
PNG_SCALE = 2  # pixels of a PNG for each of a web page: readable on a screen of today
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
BOLD = 7.0  # pixels of a bold character at the font size above, on average
HINT = "hint: "  # begins the ``gid`` of an artist; a browser shows the rest while the pointer is over it


@contextmanager
def style() -> Generator[None]:
    """Whatever draws or writes is decorated with this."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # with a read-only home it warns of its list of fonts
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name may use any alphabet
        yield


def new_axes(
    width: float, height: float, *, title: str, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """A figure of ``width`` x ``height`` pixels with a title, and its axes inside margins of so many pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * PIXEL, height * PIXEL), dpi=1 / PIXEL)
    figure.text(8 / width, 1 - 18 / height, _one_line(title), weight="bold")
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    return figure, figure.add_axes(box)


def _one_line(name: str) -> str:
    """A user's own component of a reward, or a worker, may be called anything."""
    return " ".join(printable(name).split())


def _shortened(name: str, room: int) -> str:
    """At most ``room`` characters, so that the picture's edge does not cut the last one in two."""
    line = _one_line(name)
    return line if len(line) <= room else line[: room - 1] + "…"


@style()
def to_svg(figure: Figure, *, inline: bool = False) -> str:
    """The figure as one ``<svg>`` element: on white, as a file of its own; or ``inline``, in the colours of a page."""
    out = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", metadata=none, transparent=inline)
    svg = out.getvalue().partition("<svg")
    svg = svg[1] + svg[2]
    svg = re.sub(r'<path d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(rf"<g id=([\"']){HINT}(.*?)\1>", r"<g><title>\2</title>", svg)  # in ' where a name has a "
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # several pictures stand in one page
    return re.sub(f"(fill|stroke): {INK}", r"\1: currentColor", svg) if inline else svg


@style()
def write_png(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=PNG_SCALE / PIXEL, metadata={"Software": None})


# --- small line charts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart. points: (place, value), ascending.  over: what the places are, batches from 1.

    dots: each point is marked, because they are few and far apart.
    """

    name: str
    points: Sequence[tuple[float, float]]
    over: str = "batch"
    dots: bool = False


def series_of(
    name: str, lines: Sequence[Mapping[str, Any]], key: str, *, over: str = "batch", dots: bool = False
) -> Series:
    """The numbers under ``key``; a batch (or what ``over`` names) without one, or with NaN, has no point."""
    first = 1 if over == "batch" else 0  # people count batches from 1
    numbers = [line for line in lines if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    points = [(float(line[over] + first), float(line[key])) for line in numbers]
    return Series(name=name, points=points, over=over, dots=dots)


NEIGHBOURS = 60  # one on each side for so many points: of each, the mean over them is drawn over a thin line


@style()
def draw_chart(title: str, series: Sequence[Series], *, width: float = 380.0, height: float = 140.0) -> Figure | None:
    """width, of the whole, and height, of the axes: pixels. None where no series has a point."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return None
    left, top, legend_row, character, key = 52.0, 30.0, 16.0, 6.0, 30.0  # pixels
    names = [_one_line(one.name) for one in drawn] if len(drawn) > 1 else []
    widths, room = [key + character * len(name) for name in names], width - left
    per_row = max(1, len(names) if sum(widths) <= room else int(room / max(widths)))
    top += legend_row * math.ceil(len(names) / per_row)
    fitting = _shortened(title, int((width - 16) / BOLD))
    figure, axes = new_axes(width, top + height + 26, title=fitting, left=left, right=12, top=top, bottom=26)
    lines: list[Artist] = []
    around = max(len(one.points) for one in drawn) // NEIGHBOURS  # the same for all: they are compared
    for one, color in zip(drawn, cycle(PALETTE), strict=False):
        marker = "o" if one.dots else "." * (len(one.points) == 1)
        if around:
            axes.plot(*zip(*one.points, strict=True), color=color, alpha=0.35, linewidth=0.6)
        lines += axes.plot(
            *zip(*smooth(one.points, 0 if one.dots else around), strict=True),
            color=color,
            marker=marker,
            markersize=4,
            clip_on=not one.dots,
        )
    if names:
        axes.legend(lines, names, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=per_row)
    axes.locator_params(axis="y", nbins=5, steps=[1, 2, 5, 10])
    axes.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    axes.yaxis.set_major_formatter("{x:.4g}")
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    axes.set_xticks(ticks, labels=[f"{drawn[0].over} {ticks[0]:g}", *(f"{tick:g}" for tick in ticks[1:])])
    return figure


def smooth(points: Sequence[tuple[float, float]], around: int) -> list[tuple[float, float]]:
    """Each value as the mean over ``around`` points on both sides of it, of fewer where the line begins or ends."""
    sums = [0.0, *accumulate(value for _, value in points)]
    ends = [(max(0, place - around), min(len(points), place + around + 1)) for place in range(len(points))]
    return [
        (place, (sums[last] - sums[first]) / (last - first))
        for (place, _), (first, last) in zip(points, ends, strict=True)
    ]


# --- the timeline -----------------------------------------------------------------------------------------------------
# A band a generation worker, one of groups being scored, one of the trainer, over time. The height of a generation
# worker's band is its slots: busy from below, then idle by cause, so that the area of a colour is a share of what the
# worker could have done. Thin bars under it are loads of weights. Where the trainer is idle its band has the colour of
# the cause. Vertical lines are where batches ended.

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1200.0, 130.0, 70.0, 62.0, 34.0
BAND, GAP, THIN = 44.0, 8.0, 10.0
THINNEST = 0.3  # no span is drawn narrower: it could not be seen
LABEL = 26.0  # from one batch's number to the next at least: four digits, and some room
NUM_COLUMNS = 600  # columns of a band: two pixels each, and a drawing of any run stays under a few hundred kB
MAX_WORKERS = 32  # more bands than that cannot be read; the others are left out and counted

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


MANY_BATCHES = 40  # more in one picture are drawn as means over several: each would be a few pixels wide
MEANS = 100  # columns of such a picture
CLOSE = 8  # batches of a close-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a timeline that is one picture. edges: of its columns, seconds.  trained: batches that ended in it.

    per_column: batches whose means a column shows; 0 where everything is drawn where it was.
    """

    name: str
    edges: Sequence[float]
    trained: Sequence[Trained]
    per_column: int = 0


def section(timeline: Timeline, first: int = 1, last: int = 0) -> Section:
    """Batches ``first`` to ``last``, from 1; the whole run, from when a worker could first work, without ``last``.

    Raises ConfigError: the run trained none of them.
    """
    begin_s = min((presence.start_s for presence in timeline.presences), default=0.0)
    trained, end_s, name = timeline.trained, timeline.end_s, ""
    if last:
        places = [place for place, one in enumerate(trained) if first <= one.batch + 1 <= last]
        if not places:
            there = (
                f"it trained batches {trained[0].batch + 1} to {trained[-1].batch + 1}"
                if trained
                else "it trained none"
            )
            raise ConfigError(f"no batch from {first} to {last} was trained: {there}", where="--batches")
        begin_s = trained[places[0] - 1].at_s if places[0] else begin_s
        trained, name = trained[places[0] : places[-1] + 1], f"batches {first} to {last}"
        end_s = trained[-1].at_s
    per_column = -(-len(trained) // MEANS) if len(trained) > MANY_BATCHES else 0
    if per_column:
        name = f"{name or 'all batches'}: a column is the mean of {per_column}" if per_column > 1 else name
        ends = [one.at_s for one in trained[per_column - 1 :: per_column]]
        edges = sorted({begin_s, *(end for end in ends if begin_s < end < end_s), end_s})
    else:
        width_s = max(end_s - begin_s, 1e-6) / NUM_COLUMNS
        edges = [begin_s + width_s * column for column in range(NUM_COLUMNS + 1)]
    return Section(name=name, edges=edges, trained=trained, per_column=per_column)


def sections(timeline: Timeline) -> list[Section]:
    """The whole run; of one with many batches also its first ones, those around the slowest, and its last ones."""
    found = [section(timeline)]
    if found[0].per_column:
        batches = [one.batch + 1 for one in timeline.trained]
        seconds = [after.at_s - before.at_s for before, after in pairwise(timeline.trained)]
        slowest = batches[1 + max(range(len(seconds)), key=seconds.__getitem__)]
        first, last, around = min(batches), max(batches) - CLOSE + 1, slowest - CLOSE // 2
        begins = [first, *([around] if first + CLOSE <= around <= last - CLOSE else []), last]  # each batch once
        found += [section(timeline, begin, begin + CLOSE - 1) for begin in begins]
    return found


@style()
def draw_timeline(timeline: Timeline, *, title: str = "", part: Section | None = None) -> Figure:
    """part: the whole run without one."""
    import numpy as np
    from matplotlib.patches import Patch, PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    part = part or section(timeline)
    edges, workers = part.edges, timeline.workers[:MAX_WORKERS]
    thin = 0.0 if part.per_column else THIN + GAP
    tops = {worker: place * (BAND + thin + GAP) for place, worker in enumerate(workers)}
    tops[SCORING] = len(workers) * (BAND + thin + GAP)
    tops[TRAINER] = tops[SCORING] + BAND + GAP
    height = tops[TRAINER] + BAND

    named = " · ".join(filter(None, (title, part.name)))
    figure, axes = new_axes(WIDTH, TOP + height + BOTTOM, title=named, left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM)
    axes.set(xlim=(edges[0], edges[-1]), ylim=(height, 0))
    axes.set_yticks([top + BAND / 2 for top in tops.values()], labels=[_one_line(track) for track in tops])
    axes.locator_params(axis="x", nbins=12, steps=[1, 2, 5, 10])
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.grid(visible=False)
    axes.tick_params(axis="x", bottom=True)
    kinds = [text for text in LEGEND if not part.per_column or text not in ("optimizer step", "checkpoint")]
    patches = [Patch(color=LEGEND[text], label=text) for text in kinds]
    box = (LEFT / WIDTH, 1 - 26 / (TOP + height + BOTTOM))
    figure.legend(handles=patches, loc="upper left", bbox_to_anchor=box, ncols=len(patches), handleheight=1.0)

    usage = usage_by_window(timeline, edges)
    for color, boxes in _boxes(timeline, usage, part, tops).items():
        corners = np.array([[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in boxes])
        path = Outline.make_compound_path_from_polys(corners)
        axes.add_patch(PathPatch(path, facecolor=color, linewidth=0, clip_on=False))
    thinnest_s = THINNEST * (edges[-1] - edges[0]) / (WIDTH - LEFT - RIGHT)
    inside = [span for span in timeline.spans if span.end_s > edges[0] and span.start_s < edges[-1]]
    for span in () if part.per_column else _seen_apart(inside, tops, thinnest_s):
        top, thickness = (tops[TRAINER], BAND) if span.track == TRAINER else (tops[span.track] + BAND + 2, THIN)
        about = f"{HINT}{_one_line(span.name)}: {span.end_s - span.start_s:.3f} s at {span.start_s:.2f} s"
        start_s, end_s = max(span.start_s, edges[0]), min(span.end_s, edges[-1])
        box, color = ((start_s, top), max(end_s - start_s, thinnest_s), thickness), KIND_COLORS[span.kind]
        axes.add_patch(Rectangle(*box, facecolor=color, linewidth=0, clip_on=False, gid=about))
    for track in (track for track in tops if track != SCORING):
        used = total(usage[track])
        busy = f"{used.busy_s / used.present_s:.0%} busy" if used.present_s else ""
        axes.annotate(busy, (edges[-1], tops[track] + BAND / 2), (6, 0), textcoords="offset points", va="center")
    _draw_batches(axes, part, height)
    for mark in _troubles(timeline, edges):
        about = f"{HINT}{_one_line(mark.name)} at {mark.at_s:.2f} s"
        axes.plot([mark.at_s], [height + 6], marker="^", color=CAUSE_COLORS[Cause.PIPELINE], clip_on=False, gid=about)
    if left_out := len(timeline.workers) - len(workers):
        figure.text(8 / WIDTH, 8 / (TOP + height + BOTTOM), f"{left_out} more workers")
    return figure


def _draw_batches(axes: Axes, part: Section, height: float) -> None:
    """A line where each batch ended, and above some of them its number."""
    ends_s = [trained.at_s for trained in part.trained]
    if not part.per_column:
        axes.vlines(ends_s, -4, height, INK, linewidth=0.4, alpha=0.4, clip_on=False)
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if len(ends_s) <= step * 20)
    least_s = LABEL * (part.edges[-1] - part.edges[0]) / (WIDTH - LEFT - RIGHT)
    last_s: float | None = None
    for one in part.trained:
        if (one.batch + 1) % every == 0 and (last_s is None or one.at_s - last_s >= least_s):
            first = "batch " if last_s is None else ""
            axes.text(one.at_s, -5, f"{first}{one.batch + 1}", ha="right", va="bottom", fontsize=8)
            last_s = one.at_s


def _troubles(timeline: Timeline, edges: Sequence[float]) -> Iterator[Mark]:
    """What failed, of those too close to be seen apart one."""
    places: set[int] = set()
    for mark in timeline.marks:
        if mark.trouble and edges[0] <= mark.at_s <= edges[-1]:
            place = round((mark.at_s - edges[0]) / (edges[-1] - edges[0]) * NUM_COLUMNS / 4)
            if place not in places:
                places.add(place)
                yield mark


def write_timeline(
    timeline: Timeline,
    title: str,
    out: Path,
    name: str = "timeline",
    *,
    svg: bool = True,
    png: bool = True,
    part: Section | None = None,
) -> list[Path]:
    """``NAME.svg`` and ``NAME.png`` in ``out``. Returns their paths."""
    figure, written = draw_timeline(timeline, title=title, part=part), []
    if svg:
        written.append(out / f"{name}.svg")
        replace(written[-1], to_svg(figure))
    if png:
        written.append(out / f"{name}.png")
        write_png(figure, written[-1])
    return written


_Box = tuple[float, float, float, float]  # left and right in seconds, top and bottom in pixels


def _boxes(
    timeline: Timeline, usage: Mapping[str, Sequence[Usage]], part: Section, tops: Mapping[str, float]
) -> dict[str, list[_Box]]:
    """Colour -> boxes of the bands. One column a window, from below: busy (for the trainer spans are drawn there), then
    the causes, and nothing for the share of it in which the worker was not there; of scoring, groups that wait, of the
    most that ever did. Windows that look the same are one box."""
    found: defaultdict[str, list[_Box]] = defaultdict(list)

    def add(color: str, left: float, right: float, top: float, bottom: float) -> None:
        boxes = found[color]
        if boxes and boxes[-1][1:] == (left, top, bottom):
            left = boxes.pop()[0]
        boxes.append((left, right, top, bottom))

    columns = part.edges
    for track in [track for track in tops if track != SCORING]:
        busy = "" if track == TRAINER and not part.per_column else BUSY
        for (left, right), used in zip(pairwise(columns), usage[track], strict=True):
            bottom = tops[track] + BAND
            parts = [(busy, used.busy_s), *((CAUSE_COLORS[cause], used.idle_s.get(cause, 0.0)) for cause in Cause)]
            for color, seconds in parts:
                height = BAND * max(0.0, seconds) / (right - left)
                bottom -= height
                if color and height > 0.05:
                    add(color, left, right, bottom, bottom + height)
    waiting = _backlog(timeline, columns)
    most = max(waiting, default=0.0)
    for (left, right), groups in zip(pairwise(columns), waiting, strict=True):
        if groups:
            top, bottom = tops[SCORING] + BAND * (1 - groups / most), tops[SCORING] + BAND
            add(KIND_COLORS[SpanKind.SCORING], left, right, top, bottom)
    return found


def _seen_apart(spans: Iterable[Span], tops: Mapping[str, float], thinnest_s: float) -> Iterator[Span]:
    """What the trainer did, and loads; of those too short to be seen apart one for each track, kind and place."""
    places: set[tuple[str, SpanKind, int]] = set()
    for span in spans:
        if span.track in tops and (span.track == TRAINER or span.kind is SpanKind.LOAD):
            place = (span.track, span.kind, round(span.start_s / thinnest_s))
            if span.end_s - span.start_s > thinnest_s or place not in places:
                places.add(place)
                yield span


def _backlog(timeline: Timeline, columns: Sequence[float]) -> list[float]:
    """Per column the mean number of groups that wait for their advantages."""
    waiting = [0.0] * (len(columns) - 1)
    for span in timeline.spans:
        if span.kind is not SpanKind.SCORING:
            continue
        first, last = (bisect_right(columns, end_s) - 1 for end_s in (span.start_s, span.end_s))
        for column in range(max(first, 0), min(last + 1, len(waiting))):
            begin_s, end_s = max(span.start_s, columns[column]), min(span.end_s, columns[column + 1])
            waiting[column] += max(0.0, end_s - begin_s) / (columns[column + 1] - columns[column])
    return waiting


# --- the trace, in the Chrome trace event format, which Perfetto and chrome://tracing open ----------------------------
# One process a generation worker (a thread for each slot, one for its loads of weights), one for scoring, one for the
# trainer (work and waits), one for what happened to the run. Under each worker and the trainer a counter says how busy
# it was, and idle for which cause. Source: "Trace Event Format", complete (X), instant (i), counter (C) and metadata
# (M) events; times in microseconds.

TRACE = "trace.json"
NUM_COUNTS = 1000  # points of each counter over the run
WAITS = 1  # thread of a process on which its waits are drawn; its work follows
LOADS = 2
FIRST_LANE = 3
MAX_SPANS = 200_000  # of a longer run the newest are kept: a browser opens no more than some 50 MB


def write_trace(timeline: Timeline, path: Path) -> None:
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write(((",\n" if number else "") + json.dumps(event)).encode())
        file.write(b"\n]}\n")


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """In no order: the format asks for none."""
    tracks = [ORCHESTRATOR, TRAINER, SCORING, *timeline.workers]
    places = {track: place for place, track in enumerate(tracks, 1)}
    yield from _names(timeline, places)
    for span in timeline.spans[-MAX_SPANS:]:
        yield _complete(span, places[span.track])
    for mark in timeline.marks:
        place = places.get(mark.track, places[ORCHESTRATOR])
        about = {"pid": place, "tid": 0, "ts": _us(mark.at_s), "cat": "trouble" if mark.trouble else "mark"}
        yield {"ph": "i", "s": "p", "name": mark.name, **about}
    for wait in waits(timeline):
        yield _complete(wait, places[wait.track])
    yield from _counters(timeline, places)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _thread(span: Span) -> int:
    return {SpanKind.WAIT: WAITS, SpanKind.LOAD: LOADS}.get(span.kind, FIRST_LANE + span.lane)


def _complete(span: Span, process: int) -> dict[str, Any]:
    about = {"batch": span.batch, "tokens": span.tokens, "queued_s": round(span.queued_s, 6)}
    return {
        "ph": "X",
        "pid": process,
        "tid": _thread(span),
        "ts": _us(span.start_s),
        "dur": _us(span.end_s) - _us(span.start_s),
        "name": span.name,
        "cat": span.kind.value,
        "args": {name: value for name, value in about.items() if value not in (0, -1)},
    }


def _names(timeline: Timeline, places: dict[str, int]) -> Iterator[dict[str, Any]]:
    for track, place in places.items():
        yield {"ph": "M", "pid": place, "tid": 0, "name": "process_name", "args": {"name": track}}
        yield {"ph": "M", "pid": place, "tid": 0, "name": "process_sort_index", "args": {"sort_index": place}}
    threads = {(span.track, _thread(span), span.kind) for span in timeline.spans}
    kinds = {SpanKind.LOAD: "loads of weights", SpanKind.SAMPLE: "slot {}", SpanKind.SCORING: "group {}"}
    named = {
        (track, thread): kinds.get(kind, "work").format(thread - FIRST_LANE) for track, thread, kind in sorted(threads)
    }
    named |= {(track, WAITS): "waits" for track in (*timeline.workers, TRAINER)}
    for (track, thread), name in named.items():
        yield {"ph": "M", "pid": places[track], "tid": thread, "name": "thread_name", "args": {"name": name}}


def _counters(timeline: Timeline, places: dict[str, int]) -> Iterator[dict[str, Any]]:
    """How busy each track is, and idle for which cause: shares of one, stacked."""
    edges = [timeline.end_s * count / NUM_COUNTS for count in range(NUM_COUNTS + 1)] if timeline.end_s else [0.0]
    for track, usages in usage_by_window(timeline, edges).items():
        before: dict[str, float] = {}
        for edge, usage in zip(edges, usages, strict=False):
            whole = usage.present_s or 1.0
            shares = {"busy": round(max(0.0, usage.busy_s) / whole, 3)}
            shares |= {cause.value: round(usage.idle_s.get(cause, 0.0) / whole, 3) for cause in Cause}
            if shares != before:
                yield {"ph": "C", "pid": places[track], "tid": 0, "ts": _us(edge), "name": "use", "args": shares}
            before = shares


def waits(timeline: Timeline) -> list[Span]:
    """Times in which a generation worker ran nothing at all, or the trainer did nothing, named by their main cause."""
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)  # in order, without overlaps
    for span in sorted(timeline.spans, key=attrgetter("start_s")):
        times = busy[span.track]
        if span.kind is SpanKind.LOAD:
            continue  # it runs beside and does not count
        if times and span.start_s <= times[-1][1]:
            times[-1] = (times[-1][0], max(times[-1][1], span.end_s))
        else:
            times.append((span.start_s, span.end_s))
    gaps = {track: _gaps(busy[track], presences) for track, presences in presences_by_track(timeline).items()}
    edges = {track: sorted({edge for gap in of_track for edge in gap}) for track, of_track in gaps.items()}
    usage = usage_within(timeline, edges)
    found: list[Span] = []
    for track, of_track in gaps.items():
        place = {edge: index for index, edge in enumerate(edges[track])}
        for start_s, end_s in of_track:
            idle_s = usage[track][place[start_s]].idle_s
            seconds = {cause: idle_s.get(cause, 0.0) for cause in Cause}
            name = f"wait: {max(seconds, key=seconds.__getitem__)}"
            found.append(Span(track=track, kind=SpanKind.WAIT, start_s=start_s, end_s=end_s, name=name))
    return found


def _gaps(busy: Sequence[tuple[float, float]], presences: Iterable[Presence]) -> list[tuple[float, float]]:
    """Times in which a track was present and nothing ran on it. busy: in order, without overlaps."""
    found: list[tuple[float, float]] = []
    for presence in presences:
        free_s = presence.start_s
        for start_s, end_s in busy[bisect_right(busy, free_s, key=itemgetter(1)) :]:
            if start_s >= presence.end_s:
                break
            if start_s > free_s:
                found.append((free_s, start_s))
            free_s = end_s
        if free_s < presence.end_s:
            found.append((free_s, presence.end_s))
    return found
