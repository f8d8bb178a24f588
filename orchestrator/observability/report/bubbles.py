"""Where a run's idle seconds went: every instant of every stage is busy, or idle for one cause.

A generation worker with C slots that runs r samples is idle by the share ``1 - r / C``: half-empty slots are half an
idle worker. C is the most that it ever ran at once, at most its capacity: slots that the run's settings can never fill
are no bubble. The first that holds names the cause:

    weights    it is loading new weights, whatever runs beside that
    other      samples that it has claimed wait for a slot (admission, prompts being computed)
    skew       samples still run somewhere in the stage: it has none left while the long ones of all finish
    weights    nothing runs: the trainer publishes, or another worker loads
    pipeline   nothing runs and the trainer works: the stage waits for the other one
    scoring    nothing runs, the trainer waits too, and finished groups have no advantages yet
    other      none of these: broker, orchestrator, data, starting up

The trainer is idle whenever it neither accumulates nor steps:

    weights    it publishes a version
    other      it saves a checkpoint
    pipeline, skew   it waits while samples run on a share f of all slots: f of the wait is the pipeline's, since full
               slots would have taken that long too, and 1 - f is the tail's
    scoring    nothing runs, and finished groups have no advantages yet
    weights    nothing runs, and a generation worker loads
    other      none of these

A worker counts from joining to its loss or the end, the trainer from its first TrainerReady. Source: the two kinds of
bubble are StreamRL's (section 3); the split of the rest is ours, because "idle" alone does not say what to change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from operator import iadd, itemgetter

from orchestrator.observability.report.spans import TRAINER, Presence, SpanKind, Timeline


class Cause(StrEnum):
    PIPELINE = "pipeline"
    SKEW = "skew"
    WEIGHTS = "weights"
    SCORING = "scoring"
    OTHER = "other"


@dataclass(slots=True)
class Usage:
    """Seconds of one track in one window. present_s: it could have worked; what is not idle was busy."""

    present_s: float = 0.0
    idle_s: dict[Cause, float] = field(default_factory=dict[Cause, float])

    @property
    def busy_s(self) -> float:
        return self.present_s - sum(self.idle_s.values())

    def add(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self.idle_s[cause] = self.idle_s.get(cause, 0.0) + seconds

    def __iadd__(self, other: Usage) -> Usage:
        self.present_s += other.present_s
        for cause, seconds in other.idle_s.items():
            self.add(cause, seconds)
        return self


NOTHING = Usage()  # of a window in which a track was not there; never changed


def usage_by_window(timeline: Timeline, edges: Sequence[float]) -> dict[str, list[Usage]]:
    """Per track (generation workers, the trainer) its usage in each window [edges[i], edges[i + 1]), seconds."""
    num_windows = len(edges) - 1
    shown: dict[str, tuple[int, int]] = {}
    for track, presences in presences_by_track(timeline).items():  # other windows need not be looked at
        first = end = 0
        if presences:
            first = bisect_right(edges, min(presence.start_s for presence in presences)) - 1
            end = bisect_left(edges, max(presence.end_s for presence in presences))
        shown[track] = min(max(first, 0), num_windows), min(end, num_windows)
    found = usage_within(timeline, {track: edges[first : end + 1] for track, (first, end) in shown.items()})
    return {
        track: [*[NOTHING] * first, *found[track], *[NOTHING] * (num_windows - first - len(found[track]))]
        for track, (first, _) in shown.items()
    }


def usage_within(timeline: Timeline, edges: Mapping[str, Sequence[float]]) -> dict[str, list[Usage]]:
    """Per track its usage in windows of its own, [edges[track][i], edges[track][i + 1]), ascending.

    The cost grows with spans and edges (it sorts them), not with their product: a run of hours has 10^5 of both.
    """
    sweep = _Sweep(timeline, edges)
    for change in sorted(_unordered_changes(timeline, edges), key=itemgetter(0)):
        sweep.apply(change)
    return sweep.usage


def presences_by_track(timeline: Timeline) -> dict[str, list[Presence]]:
    """Per track, workers by name (one a process) and the trainer last, when it was there; the trainer in any case."""
    by_track: dict[str, list[Presence]] = {track: [] for track in (*timeline.workers, TRAINER)}
    for presence in timeline.presences:
        by_track[presence.track].append(presence)
    return by_track


def total(usages: Sequence[Usage]) -> Usage:
    return reduce(iadd, usages, Usage())


def stages(timeline: Timeline) -> Mapping[str, list[str]]:
    return {"generation": timeline.workers, TRAINER: [TRAINER]}


def bubbles_by_batch(timeline: Timeline) -> dict[tuple[int, int], dict[str, float]]:
    """What ``metrics.jsonl`` says of each (incarnation of the trainer, batch), since the batch trained before it.

    ``bubble_<stage>_<cause>_s``: idle seconds, of generation summed over its workers (two idle workers for one second
    are two).  ``<stage>_present_s``: what they are part of.  A batch that began before the reported part has none.
    """
    edges = [0.0, *(trained.at_s for trained in timeline.trained)]
    usage = usage_by_window(timeline, edges)
    by_stage = stages(timeline)
    lines: dict[tuple[int, int], dict[str, float]] = {}
    for window, trained in enumerate(timeline.trained):
        line: dict[str, float] = {}
        for stage, tracks in by_stage.items():
            of_stage = total([used for track in tracks if (used := usage[track][window]) is not NOTHING])
            line |= {f"bubble_{stage}_{cause}_s": round(of_stage.idle_s.get(cause, 0.0), 4) for cause in Cause}
            line[f"{stage}_present_s"] = round(of_stage.present_s, 4)
        if window or not timeline.start_s:
            lines[trained.incarnation, trained.batch] = line
    return lines


# --- the sweep --------------------------------------------------------------------------------------------------------

_Change = tuple[float, str, str, int]
"""(when, what, track, by how much); "edge": a window of the track ends and the next begins."""


def _unordered_changes(timeline: Timeline, edges: Mapping[str, Sequence[float]]) -> Iterator[_Change]:
    for track, of_track in edges.items():
        for edge in of_track:
            yield edge, "edge", track, 1
    for presence in timeline.presences:
        yield presence.start_s, "present", presence.track, presence.capacity
        yield presence.end_s, "present", presence.track, -presence.capacity
    for span in timeline.spans:
        yield span.start_s, span.kind.value, span.track, 1
        yield span.end_s, span.kind.value, span.track, -1
        if span.queued_s > 0:
            yield span.start_s - span.queued_s, "queued", span.track, 1
            yield span.start_s, "queued", span.track, -1


@dataclass(slots=True)
class _Worker:
    """A generation worker at one instant of the sweep. settled_s, settled: up to where it is accounted for."""

    most: int = 1  # samples that it ever runs at once: their lanes are the lowest free ones
    capacity: int = 0  # slots that count now, 0 while it is not there
    running: int = 0
    queued: int = 0
    loading: int = 0
    settled_s: float = 0.0
    settled: dict[Cause, float] = field(default_factory=lambda: dict.fromkeys(Cause, 0.0))


class _Sweep:
    """Goes through all changes in order of time, once.

    The cause that lies in the stage is the same for all its workers, so its seconds are kept as running sums, and a
    worker is looked at only when something of its own changes: the cost does not grow with workers times samples.
    """

    def __init__(self, timeline: Timeline, edges: Mapping[str, Sequence[float]]) -> None:
        self.usage = {track: [Usage() for _ in of_track[1:]] for track, of_track in edges.items()}
        self._window = dict.fromkeys(edges, -1)
        self._workers = {track: _Worker() for track in timeline.workers}
        for span in timeline.spans:
            if span.kind is SpanKind.SAMPLE and span.track in self._workers:
                worker = self._workers[span.track]
                worker.most = max(worker.most, span.lane + 1)
        self._now_s = 0.0
        self._stage_s = dict.fromkeys(Cause, 0.0)
        self._capacity = 0
        self._active: dict[str, int] = dict.fromkeys((*SpanKind, "queued", "present"), 0)

    def apply(self, change: _Change) -> None:
        at_s, what, track, by = change
        self._advance(at_s)
        worker = self._workers.get(track)
        if worker is not None:
            self._settle(track, worker)
        if what == "edge":
            self._window[track] += by
        elif worker is None:
            self._active[what] += by
        elif what == "present":
            slots = min(abs(by), worker.most) * (1 if by > 0 else -1)
            worker.capacity += slots
            self._capacity += slots
        elif what == "queued":
            worker.queued += by
        else:
            self._active[what] += by
            if what == SpanKind.LOAD:
                worker.loading += by
            else:
                worker.running += by

    def _advance(self, at_s: float) -> None:
        seconds = at_s - self._now_s
        if seconds <= 0:
            return
        self._stage_s[self._cause_in_stage()] += seconds
        usage = self._usage_now(TRAINER)
        if usage is not None and self._active["present"]:
            usage.present_s += seconds
            for cause, share in self._trainer_causes():
                usage.add(cause, seconds * share)
        self._now_s = at_s

    def _usage_now(self, track: str) -> Usage | None:
        """Where the time that passes on ``track`` is noted: nowhere before its first window and after its last."""
        window = self._window.get(track, -1)
        usages = self.usage.get(track, ())
        return usages[window] if 0 <= window < len(usages) else None

    def _settle(self, track: str, worker: _Worker) -> None:
        seconds = self._now_s - worker.settled_s
        if seconds <= 0:
            return
        usage = self._usage_now(track)
        if worker.capacity and usage is not None:
            usage.present_s += seconds
            share = 1.0 - min(worker.running, worker.capacity) / worker.capacity
            if worker.loading or worker.queued:
                usage.add(Cause.WEIGHTS if worker.loading else Cause.OTHER, share * seconds)
            elif share > 0:
                for cause, until_now in self._stage_s.items():
                    usage.add(cause, share * (until_now - worker.settled[cause]))
        worker.settled_s = self._now_s
        worker.settled = dict(self._stage_s)

    def _cause_in_stage(self) -> Cause:
        active = self._active
        if active[SpanKind.SAMPLE]:
            return Cause.SKEW
        if active[SpanKind.PUBLISH] or active[SpanKind.LOAD]:
            return Cause.WEIGHTS
        if active[SpanKind.ROUND] or active[SpanKind.STEP] or active[SpanKind.CHECKPOINT]:
            return Cause.PIPELINE
        return Cause.SCORING if active[SpanKind.SCORING] else Cause.OTHER

    def _trainer_causes(self) -> list[tuple[Cause, float]]:
        """(cause, share) of the trainer's idleness at this instant; [] while it is busy."""
        active = self._active
        if active[SpanKind.ROUND] or active[SpanKind.STEP]:
            return []
        if active[SpanKind.PUBLISH]:
            return [(Cause.WEIGHTS, 1.0)]
        if active[SpanKind.CHECKPOINT]:
            return [(Cause.OTHER, 1.0)]
        if active[SpanKind.SAMPLE]:
            full = min(1.0, active[SpanKind.SAMPLE] / self._capacity) if self._capacity else 1.0
            return [(Cause.PIPELINE, full), (Cause.SKEW, 1.0 - full)]
        if active[SpanKind.SCORING]:
            return [(Cause.SCORING, 1.0)]
        return [(Cause.WEIGHTS if active[SpanKind.LOAD] else Cause.OTHER, 1.0)]
