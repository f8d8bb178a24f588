"""What the live page draws beyond this moment: what every worker did in the last minutes, and the run's curves.

Owns: bounded memories, rebuilt after a restart (lanes and events from now on, curves from ``metrics.jsonl``). Never:
decisions, or how it looks. Invariant: their size does not grow with the length of the run; thinned curves still reach
from its first batch to its last.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

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
from transport.contracts.types import WorkerId

CELL_S = 1.0
"""One cell of a lane: a heartbeat says what its worker does about once a second."""
CELLS = 300
"""Five minutes: two or three batches of a small model on two cores, and no more than a screen is wide."""
_NUMBER = re.compile(r"[0-9]{1,18}")
"""In the name that a worker gave itself: ``int`` refuses some of the characters that ``isdigit`` accepts."""
MAX_LANES = 64
"""A page of more lanes cannot be read; the rest is only counted."""
ABSENT = " "
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_EVENTS = 4000
"""Ten batches of a small run; accounting for so many takes about 40 ms."""
WORK = (RolloutFinished, GroupScored, RoundDone, StepDone, CheckpointSaved, WeightsLoaded)
PRESENCE = (WorkerJoined, WorkerLost, TrainerReady)
MAX_POINTS = 240
"""Of a curve: about one a pixel where it is drawn small."""


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


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key of workers and their places: ``generate-2.1`` before ``generate-10.1``."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if _NUMBER.fullmatch(part) else (0, part) for part in parts]


class RecentEvents:
    """The newest events that tell of work, and all that tell who was there."""

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
        events = heapq.merge(self._presence, self._work, key=lambda told: told[0])
        return [JournalRecord(seq=seq, now_s=now_s, event=event) for seq, (now_s, event) in enumerate(events, 1)]


class Curves:
    """One point a trained batch; of a long run every second, fourth, ... and always the newest."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._lines: list[Mapping[str, Any]] = []
        self._stride = 1
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """A batch was trained. One that is trained again after a restart takes back what came after it."""
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _short(value: float | None) -> float | None:
    """Five digits: more cannot be seen. What JSON has no number for is no point."""
    if isinstance(value, int):
        return value
    return float(f"{value:.5g}") if value is not None and abs(value) < float("inf") else None
