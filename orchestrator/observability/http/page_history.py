"""What the live page shows of the past: lanes, curves and samples, gathered while the run goes on.

lanes        {cell_s, cells, until_s, states [name], lanes [{place, kind, doing, busy}], lanes_left_out}
             doing, busy: a character a cell, the newest last: the state's letter (a is states[0], a space: not there),
             and the share of the cell in which it computed, in ninths
curves       {name: [number or null]}, one list a number of metrics.jsonl, a point a batch (thinned)
bubbles      {batches [first, last], stages {generation, trainer: {"computing" or a cause: seconds}}}, {} at first
evaluations  the newest lines of evaluations in metrics.jsonl, oldest first
components   names of the reward's components among the curves
samples      newest first: [{row, reward, components, worker, tokens, finish, versions, engine_s, prompt, prompt_cut,
             response, response_cut}]; what a model wrote is there as it is: the page escapes it

Invariant: what is kept does not grow with the length of the run. After a restart lanes and events begin anew, curves
come from ``metrics.jsonl``.
"""

from __future__ import annotations

import asyncio
import heapq
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from orchestrator.loop.membership import Membership
from orchestrator.observability.metrics_file import NewLines
from orchestrator.observability.report.bubbles import stages, total, usage_by_window
from orchestrator.observability.report.spans import build_timeline
from orchestrator.observability.samples import RecentSamples
from transport.contracts.messages import (
    CheckpointSaved,
    Event,
    GroupScored,
    JournalRecord,
    RolloutFinished,
    RoundDone,
    StepDone,
    TrainerReady,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerStatus,
)
from transport.contracts.types import WorkerId, is_evaluation, natural_order
from transport.process.clock import Clock

LOOK_S = 0.5
"""A cell of a lane is looked at twice."""
LOOKS_A_BUBBLE = 4
"""A page asks every two seconds; curves and bubbles are as old at most."""
PATIENCE_S = 10.0
"""Bubbles are accounted for while a page asked not longer ago."""


class PageHistory:
    """Gathers; ``latest`` puts the answer to a page together, about 1 ms for a long run. One ``watch`` at a time."""

    def __init__(self, metrics: Path, membership: Membership, samples: RecentSamples, clock: Clock) -> None:
        """metrics: metrics.jsonl."""
        self._metrics = NewLines(metrics)
        self._membership = membership
        self._samples = samples
        self._clock = clock
        self._lanes = LaneHistory()
        self._curves = Curves()
        self._events = RecentEvents()
        self._evaluations: deque[Mapping[str, Any]] = deque(maxlen=MAX_POINTS)
        self._components: set[str] = set()
        self._bubbles: dict[str, Any] = {}
        self._asked_s = -PATIENCE_S

    def observe(self, event: Event, now_s: float) -> None:
        """Note what happened."""
        self._events.add(event, now_s)
        if isinstance(event, GroupScored) and not is_evaluation(event.group_id):
            self._components |= event.components.keys()

    async def watch(self) -> None:
        """Note what the workers do, and account for bubbles while a page asks, forever."""
        while True:
            self._note_lines(await asyncio.to_thread(self._metrics.read))
            for _ in range(LOOKS_A_BUBBLE):
                self._lanes.note(self._membership.statuses, self._clock.now_s())
                await asyncio.sleep(LOOK_S)
            if self._clock.now_s() - self._asked_s < PATIENCE_S:
                self._bubbles = await asyncio.to_thread(recent_bubbles, self._events.records())

    def _note_lines(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if "batch" in line:
                self._curves.add(line)
            else:
                self._evaluations.append(line)

    def latest(self) -> dict[str, Any]:
        """The answer, as at the top of this file."""
        self._asked_s = self._clock.now_s()
        return {
            "lanes": self._lanes.as_dict(),
            "curves": self._curves.as_dict(),
            "bubbles": self._bubbles,
            "evaluations": list(self._evaluations),
            "components": sorted(self._components),
            "samples": self._samples.newest_first,
        }


# --- lanes ------------------------------------------------------------------------------------------------------------

CELL_S = 1.0
"""One cell of a lane: a heartbeat says what its worker does about once a second."""
CELLS = 300
"""Five minutes: two or three batches of a small model on two cores, and no more than a screen is wide."""
MAX_LANES = 64
"""A page of more lanes cannot be read; the rest is only counted."""
ABSENT = " "
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUMBER = re.compile(r"[0-9]{1,18}")
"""In the name that a worker gave itself: ``int`` refuses some of the characters that ``isdigit`` accepts."""


class LaneHistory:
    """What each place in the fleet did, a cell a second: a letter for its state and a digit for its busy share.

    A place is a worker without its incarnation, so that a process that was replaced goes on in its predecessor's lane.
    """

    def __init__(self) -> None:
        self._states: list[str] = []
        self._lanes: dict[str, _Lane] = {}
        self._cell = -1

    def note(self, statuses: Mapping[WorkerId, WorkerStatus], now_s: float) -> None:
        """Mark the cell of ``now_s`` with what the leases say. Call it about twice a cell."""
        cell = int(now_s / CELL_S)
        for lane in self._lanes.values():
            lane.advance(min(CELLS, cell - self._cell))
        self._cell = max(cell, self._cell)
        for status in sorted(statuses.values(), key=lambda status: _incarnation(status.worker_id)):
            place = status.worker_id.rpartition(".")[0]
            lane = self._lanes.setdefault(place, _Lane(status.kind.value))
            lane.mark(self._letter(status.doing), status)
        self._lanes = {place: lane for place, lane in self._lanes.items() if lane.seen()}

    def _letter(self, doing: str) -> str:
        """The state's letter; states beyond the alphabet share the last one, since no worker has so many."""
        if doing not in self._states and len(self._states) < len(LETTERS):
            self._states.append(doing)
        return LETTERS[self._states.index(doing)] if doing in self._states else LETTERS[-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; see page_history.py."""
        places = sorted(self._lanes, key=natural_order)
        return {
            "cell_s": CELL_S,
            "cells": CELLS,
            "until_s": (self._cell + 1) * CELL_S,
            "states": self._states,
            "lanes": [{"place": place, **self._lanes[place].as_dict()} for place in places[:MAX_LANES]],
            "lanes_left_out": max(0, len(places) - MAX_LANES),
        }


class _Lane:
    """The cells of one place."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._doing = deque([ABSENT] * CELLS, maxlen=CELLS)
        self._busy = deque(["0"] * CELLS, maxlen=CELLS)
        self._last: WorkerStatus | None = None
        self._share = "0"
        self._silent_cells = 0

    def advance(self, num_cells: int) -> None:
        self._silent_cells += num_cells
        for _ in range(num_cells):
            self._doing.append(ABSENT)
            self._busy.append("0")

    def mark(self, letter: str, status: WorkerStatus) -> None:
        last = self._last
        if last is None or last.worker_id != status.worker_id:
            self._share = "0"
        elif status.elapsed_s > last.elapsed_s:
            share = (status.busy_s - last.busy_s) / (status.elapsed_s - last.elapsed_s)
            self._share = str(round(9 * min(1.0, max(0.0, share))))
        self._last = status
        self._silent_cells = 0
        self._doing[-1], self._busy[-1] = letter, self._share

    def seen(self) -> bool:
        """Whether any cell has something in it."""
        return self._silent_cells < CELLS

    def as_dict(self) -> dict[str, str]:
        return {"kind": self._kind, "doing": "".join(self._doing), "busy": "".join(self._busy)}


def _incarnation(worker_id: str) -> int:
    number = worker_id.rpartition(".")[2]
    return int(number) if _NUMBER.fullmatch(number) else 0


# --- bubbles ----------------------------------------------------------------------------------------------------------

MAX_EVENTS = 4000
"""Ten batches of a small run; accounting for so many takes about 40 ms."""
WORK = (RolloutFinished, GroupScored, RoundDone, StepDone, CheckpointSaved, WeightsLoaded)
PRESENCE = (WorkerJoined, WorkerLost, TrainerReady)
BATCHES = 10
"""Enough to even out one odd batch."""
UNSETTLED = 2
"""The newest batches are left out: samples that still run are not in any event yet, and would look idle."""


class RecentEvents:
    """The newest events of work, and of workers that joined and left."""

    def __init__(self) -> None:
        self._work: deque[tuple[float, Event]] = deque(maxlen=MAX_EVENTS)
        self._presence: deque[tuple[float, Event]] = deque(maxlen=MAX_EVENTS)

    def add(self, event: Event, now_s: float) -> None:
        if isinstance(event, PRESENCE):
            self._presence.append((now_s, event))
        elif isinstance(event, WORK):
            self._work.append((now_s, event))

    def records(self) -> list[JournalRecord]:
        """In order of time; positions are not those of the journal."""
        events = heapq.merge(self._presence, self._work, key=itemgetter(0))
        return [JournalRecord(seq=seq, now_s=now_s, event=event) for seq, (now_s, event) in enumerate(events, 1)]


def recent_bubbles(records: Sequence[JournalRecord]) -> dict[str, Any]:
    """Seconds by cause over the last whole batches in ``records``, {} before there are any.

    Returns: {batches: [first, last], stages: {stage: {"computing": s, cause: s, ...}}}; generation is summed over its
    workers. About 10 us an event.
    """
    timeline = build_timeline(records)
    settled = timeline.trained[: len(timeline.trained) - UNSETTLED][-BATCHES - 1 :]
    if len(settled) < 2:
        return {}
    before, last = settled[0], settled[-1]
    usage = usage_by_window(timeline, [before.at_s, last.at_s])
    by_stage: dict[str, dict[str, float]] = {}
    for stage, tracks in stages(timeline).items():
        of_stage = total([usage[track][0] for track in tracks])
        idle = {cause.value: round(seconds, 3) for cause, seconds in of_stage.idle_s.items()}
        by_stage[stage] = {"computing": round(of_stage.busy_s, 3), **idle}
    return {"batches": [before.batch + 1, last.batch], "stages": by_stage}


# --- curves -----------------------------------------------------------------------------------------------------------

MAX_POINTS = 240
"""Of a curve: about one a pixel where it is drawn small."""


class Curves:
    """One point a trained batch; of a long run every second, fourth, ... and always the newest.

    A batch that is trained again after a restart removes what came after it; the late line of an earlier batch is left
    out.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._stride = 1
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """A batch was trained."""
        if self._lines and _key(line) < _key(self._lines[-1]):
            return
        kept = [known for known in self._lines if known["batch"] < line["batch"]]
        if kept and kept[-1]["batch"] % self._stride:
            kept.pop()  # it was there only as the newest
        self._lines = [*kept, line]
        if len(self._lines) > MAX_POINTS:
            self._stride *= 2
            self._lines = [known for known in kept if not known["batch"] % self._stride] + [line]

    def as_dict(self) -> dict[str, list[float | None]]:
        """Numbers by name, one list a name, all of one length; None where a batch has no such number."""
        names = sorted({name for line in self._lines for name, value in line.items() if _is_number(value)})
        return {name: [_short(line.get(name)) for line in self._lines] for name in names}


def _key(line: Mapping[str, Any]) -> tuple[int, int]:
    """Of a batch's line: the trainer's incarnation, and the batch."""
    return line.get("incarnation", 0), line["batch"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _short(value: float | None) -> float | None:
    """Five digits: more cannot be seen. What JSON has no number for is no point."""
    if isinstance(value, int):
        return value
    return float(f"{value:.5g}") if value is not None and abs(value) < float("inf") else None
