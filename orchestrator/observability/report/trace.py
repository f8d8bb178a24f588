"""The timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.

One process a generation worker (a thread for each slot, one for its loads of weights), one for scoring, one for the
trainer (work and waits), one for what happened to the run. Under each worker and the trainer a counter says how busy
it was, and idle for which cause. Source: "Trace Event Format", complete (X), instant (i), counter (C) and metadata (M)
events; times in microseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from orchestrator.observability.report.bubbles import Cause, Usage, presences_by_track, usage_by_window, usage_within
from orchestrator.observability.report.spans import ORCHESTRATOR, SCORING, TRAINER, Presence, Span, SpanKind, Timeline
from transport.process.files import replacing

TRACE = "trace.json"
MICROSECONDS = 1e6
NUM_COUNTS = 1000
"""Points of each counter over the run."""
WAITS = 1
"""Thread of a process on which its waits are drawn; its work follows."""
LOADS = 2
FIRST_LANE = 3
MAX_SPANS = 200_000
"""Of a longer run the newest are kept: a browser opens no more than some 50 MB."""
IN_ORDER = (ORCHESTRATOR, TRAINER, SCORING)
"""Processes with a fixed place; generation workers follow."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace, one event a line."""
    with replacing(path) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(timeline)):
            file.write(((",\n" if number else "") + json.dumps(event)).encode())
        file.write(b"\n]}\n")


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """All events of the trace, in no order: the format asks for none."""
    places = {track: place for place, track in enumerate([*IN_ORDER, *timeline.workers], 1)}
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
    return round(seconds * MICROSECONDS)


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
    named = {(track, thread): _thread_name(thread, kind) for track, thread, kind in sorted(threads)}
    named |= {(track, WAITS): "waits" for track in (*timeline.workers, TRAINER)}
    for (track, thread), name in named.items():
        yield {"ph": "M", "pid": places[track], "tid": thread, "name": "thread_name", "args": {"name": name}}


def _thread_name(thread: int, kind: SpanKind) -> str:
    if kind is SpanKind.LOAD:
        return "loads of weights"
    if kind is SpanKind.SAMPLE:
        return f"slot {thread - FIRST_LANE}"
    return f"group {thread - FIRST_LANE}" if kind is SpanKind.SCORING else "work"


def _counters(timeline: Timeline, places: dict[str, int]) -> Iterator[dict[str, Any]]:
    """How busy each track is, and idle for which cause: shares of one, stacked."""
    edges = [timeline.end_s * count / NUM_COUNTS for count in range(NUM_COUNTS + 1)] if timeline.end_s else [0.0]
    for track, usages in usage_by_window(timeline, edges).items():
        before: dict[str, float] = {}
        for edge, usage in zip(edges, usages, strict=False):
            shares = _shares(usage)
            if shares != before:
                yield {"ph": "C", "pid": places[track], "tid": 0, "ts": _us(edge), "name": "use", "args": shares}
            before = shares


def _shares(usage: Usage) -> dict[str, float]:
    whole = usage.present_s or 1.0
    shares = {"busy": round(max(0.0, usage.busy_s) / whole, 3)}
    return shares | {cause.value: round(usage.idle_s.get(cause, 0.0) / whole, 3) for cause in Cause}


# --- waits ------------------------------------------------------------------------------------------------------------


def waits(timeline: Timeline) -> list[Span]:
    """Times in which a generation worker ran nothing at all, or the trainer did nothing, named by their main cause."""
    busy = _busy_times(timeline)
    gaps = {track: _gaps(busy[track], presences) for track, presences in presences_by_track(timeline).items()}
    edges = {track: sorted({edge for gap in of_track for edge in gap}) for track, of_track in gaps.items()}
    usage = usage_within(timeline, edges)
    found: list[Span] = []
    for track, of_track in gaps.items():
        place = {edge: index for index, edge in enumerate(edges[track])}
        found += [_wait(track, start_s, end_s, usage[track][place[start_s]]) for start_s, end_s in of_track]
    return found


def _wait(track: str, start_s: float, end_s: float, usage: Usage) -> Span:
    cause = max(Cause, key=lambda cause: usage.idle_s.get(cause, 0.0))
    return Span(track=track, kind=SpanKind.WAIT, start_s=start_s, end_s=end_s, name=f"wait: {cause}")


def _busy_times(timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """Per track when anything ran on it, in order and without overlaps; loads run beside and do not count."""
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in sorted(timeline.spans, key=attrgetter("start_s")):
        if span.kind is SpanKind.LOAD:
            continue
        times = busy[span.track]
        if times and span.start_s <= times[-1][1]:
            times[-1] = (times[-1][0], max(times[-1][1], span.end_s))
        else:
            times.append((span.start_s, span.end_s))
    return busy


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
