"""A run as spans: what was done where, from when to when, rebuilt from its journal.

Invariant: the same journal gives the same timeline, also while the run goes on and after a crash; work that did not
finish (its worker died, or it still runs) has no span.

Times are the run's clock when the orchestrator applied the event, starts are those less the seconds that the event
reports. A span can therefore lie too late by the delay of its event, milliseconds as a rule, and by as long as the
orchestrator was away after its restart.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from transport.contracts.messages import (
    CheckpointSaved,
    GroupScored,
    JournalRecord,
    RolloutFailed,
    RolloutFinished,
    RoundDone,
    RowsMissing,
    RunResumed,
    ScoringFailed,
    StepDone,
    StopRequested,
    TrainerReady,
    WeightsFailed,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
)
from transport.contracts.types import (
    GroupId,
    WorkerId,
    WorkerKind,
    batch_of,
    is_evaluation,
    natural_order,
    parse_row_id,
)

TRAINER = "trainer"  # track of the trainer: rank 0 reports for all, and the ranks meet at every step
SCORING = "scoring"  # track of all scoring workers together
ORCHESTRATOR = "orchestrator"  # track of what happened to the run as a whole
RESUMED = "resumed"
NO_BATCH = -1


class SpanKind(StrEnum):
    SAMPLE = "sample"  # one completion in its slot, from admission to its end
    LOAD = "load"  # new weights, from the command to serving them; decoding may go on meanwhile
    SCORING = "scoring"  # a group, from its last sample to its advantages
    ROUND = "round"  # one micro-batch: forward and backward
    STEP = "step"  # one optimizer step
    PUBLISH = "publish"  # a version made readable to the generation workers
    CHECKPOINT = "checkpoint"
    WAIT = "wait"  # nothing; not in a Timeline, found by drawing.waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """``kind`` on ``track`` during [start_s, end_s)."""

    track: str
    kind: SpanKind
    start_s: float
    end_s: float
    name: str
    lane: int = 0  # row inside the track, so that spans of one row never overlap
    batch: int = NO_BATCH
    tokens: int = 0
    queued_s: float = 0.0  # of a sample, how long it waited in its worker before ``start_s``


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a moment. trouble: it cost the run something.

    back_s: after a loss, until another worker was in its place; after a resume, until the next batch; None if never.
    """

    track: str
    at_s: float
    name: str
    trouble: bool = False
    back_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """``track`` could work during [start_s, end_s). capacity: samples it runs at once, 1 for the trainer."""

    track: str
    start_s: float
    end_s: float
    capacity: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Batch ``batch`` ended at ``at_s`` under this incarnation of the trainer: the key of its line in metrics.jsonl."""

    incarnation: int
    batch: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run. presences: of generation workers, in order of joining, and of the trainer.  end_s: its last event."""

    spans: Sequence[Span]
    marks: Sequence[Mark]
    presences: Sequence[Presence]
    trained: Sequence[Trained]
    end_s: float
    start_s: float = 0.0  # 0, or where the reported part of a long run begins

    @property
    def num_again(self) -> int:
        """Samples that were generated again: lost with their worker, dropped, or too old. Each row has one id."""
        rows = [span.name.split()[0] for span in self.spans if span.kind is SpanKind.SAMPLE]
        return len(rows) - len(set(rows))

    @property
    def batches_again(self) -> list[int]:
        """Batches that were trained again after a loss of the trainer, from 0."""
        times = Counter(trained.batch for trained in self.trained)
        return sorted(batch for batch, count in times.items() if count > 1)

    @property
    def workers(self) -> list[str]:
        """Tracks of generation workers, in order of number."""
        return sorted({presence.track for presence in self.presences} - {TRAINER}, key=natural_order)


def build_timeline(records: Iterable[JournalRecord]) -> Timeline:
    builder = _Builder()
    for record in records:
        builder.apply(record)
    return builder.finish()


@dataclass(slots=True)
class _Builder:
    now_s: float = 0.0
    start_s: float | None = None
    spans: list[Span] = field(default_factory=list[Span])
    marks: list[Mark] = field(default_factory=list[Mark])
    presences: list[Presence] = field(default_factory=list[Presence])
    trained: list[Trained] = field(default_factory=list[Trained])
    present: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    last_sample_s: dict[GroupId, float] = field(default_factory=dict[GroupId, float])
    trainer_ids: set[WorkerId] = field(default_factory=set[WorkerId])
    trainer_spans: list[Span] = field(default_factory=list[Span])
    known: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])
    awaited: dict[str, int] = field(default_factory=dict[str, int])  # place, or RESUMED -> index of its mark
    newest: dict[str, str] = field(default_factory=dict[str, str])  # place -> the worker that joined there last
    resumed_s: float = float("-inf")
    heard_s: dict[str, float] = field(default_factory=dict[str, float])  # track -> its last span

    def finish(self) -> Timeline:
        for track in list(self.present):
            self._leave(track)
        return Timeline(
            spans=in_lanes([*self.spans, *one_after_another(self.trainer_spans)]),
            marks=self.marks,
            presences=sorted(self.presences, key=lambda presence: presence.start_s),
            trained=self.trained,
            end_s=self.now_s,
            start_s=self.start_s or 0.0,
        )

    def apply(self, record: JournalRecord) -> None:
        now_s = self.now_s = record.now_s
        if self.start_s is None:
            self.start_s = now_s if record.seq > 1 else 0.0
        match record.event:
            case RolloutFinished() as event:
                group_id, _ = parse_row_id(event.row_id)
                self.last_sample_s[group_id] = now_s
                self._span(
                    event.worker_id,
                    SpanKind.SAMPLE,
                    event.engine_s,
                    f"{event.row_id} {event.finish_reason.value}",
                    batch=_batch(event.row_id),
                    tokens=event.response_tokens,
                    queued_s=event.queued_s,
                )
            case GroupScored() as event:
                since_s = self.last_sample_s.pop(event.group_id, None)
                if since_s is not None:  # reported again after a restart of the broker: scored once
                    name, batch = f"score {event.group_id}", _batch(event.group_id)
                    self._span(SCORING, SpanKind.SCORING, now_s - since_s, name, batch=batch)
            case WeightsLoaded() as event:
                self._span(event.worker_id, SpanKind.LOAD, event.seconds, f"load {event.weights}")
            case RoundDone() as event:
                if self._is_new(*self.trainer_ids, event.round_id):  # a trainer of another incarnation does them anew
                    batch = int(event.round_id.partition(".")[0])
                    self._busy(SpanKind.STEP, event.stepped_s, "step", batch, before_s=event.busy_s)
                    self._busy(SpanKind.ROUND, event.busy_s, f"round {event.round_id}", batch, tokens=event.num_tokens)
            case StepDone() as event:
                if self._is_new(event.weights.epoch, event.batch):
                    publish_s = event.metrics.get("publish_s", 0.0)
                    name = f"step {event.batch + 1}"
                    self._busy(SpanKind.STEP, event.stepped_s, name, event.batch, before_s=publish_s)
                    self._busy(SpanKind.PUBLISH, publish_s, f"publish {event.weights}", event.batch)
                    self._is_back(RESUMED)
                    self.trained.append(Trained(incarnation=event.weights.epoch, batch=event.batch, at_s=now_s))
            case CheckpointSaved() as event:
                if self._is_new(event.cursor):
                    self._busy(SpanKind.CHECKPOINT, event.seconds, f"checkpoint {event.weights}", NO_BATCH)
            case WorkerJoined() as event:
                self._mark(ORCHESTRATOR, f"{event.worker_id} joined")
                self.newest[place_of(event.worker_id)] = event.worker_id
                if event.kind is not WorkerKind.TRAIN:  # it still has to read its checkpoint
                    self._is_back(place_of(event.worker_id))
                if event.kind is WorkerKind.GENERATE:
                    self.present.setdefault(event.worker_id, (now_s, max(1, event.capacity)))
            case WorkerLost() as event:
                verb = "left" if event.left else "lost"
                self._mark(ORCHESTRATOR, f"{event.worker_id} {verb}: {event.reason}", trouble=not event.left)
                if not event.left and self.newest.get(place_of(event.worker_id)) == event.worker_id:
                    self.awaited[place_of(event.worker_id)] = len(self.marks) - 1
                self._leave(TRAINER if event.worker_id in self.trainer_ids else event.worker_id)
            case TrainerReady() as event:
                self.trainer_ids = {event.worker_id}
                self._is_back(place_of(event.worker_id))
                self._mark(TRAINER, f"ready at {event.weights}")
                self.present.setdefault(TRAINER, (now_s, 1))
            case RolloutFailed() as event:
                self._mark(event.worker_id, f"{event.group_id} failed: {event.reason}", trouble=True)
            case ScoringFailed() as event:
                self._mark(SCORING, f"{event.group_id} not scored: {event.reason}", trouble=True)
            case RowsMissing() as event:
                self._mark(ORCHESTRATOR, f"{len(event.row_ids)} rows lost by the broker", trouble=True)
            case WeightsFailed() as event:
                self._mark(event.worker_id, f"{event.weights} not loaded: {event.reason}", trouble=True)
            case RunResumed():
                self._mark(ORCHESTRATOR, "run resumed")
                self.awaited[RESUMED], self.resumed_s = len(self.marks) - 1, now_s
            case StopRequested() as event:
                self._mark(ORCHESTRATOR, f"stop requested: {event.reason}")
            case _:
                pass

    def _is_new(self, *key: object) -> bool:
        """Whether this of the trainer was not heard of before: after a restart of the broker some is reported again."""
        if key in self.known:
            return False
        self.known.add(key)
        return True

    def _busy(
        self, kind: SpanKind, seconds: float, name: str, batch: int, *, before_s: float = 0.0, tokens: int = 0
    ) -> None:
        """A span of the trainer that ended ``before_s`` ago."""
        if seconds > 0:
            end_s, self.heard_s[TRAINER] = self.now_s - before_s, self.now_s
            about = {"track": TRAINER, "kind": kind, "name": name, "batch": batch, "tokens": tokens}
            self.trainer_spans.append(Span(start_s=end_s - seconds, end_s=end_s, **about))

    def _leave(self, track: str) -> None:
        if track in self.present:
            start_s, capacity = self.present.pop(track)
            silent = max(start_s, self.heard_s.get(track, start_s)) < self.resumed_s
            end_s = self.resumed_s if silent else self.now_s  # it ended with the run, before that was resumed
            self.presences.append(Presence(track=track, start_s=start_s, end_s=end_s, capacity=capacity))

    def _is_back(self, what: str) -> None:
        """``what`` was waited for since the mark at ``awaited``, if it was."""
        if (index := self.awaited.pop(what, None)) is not None:
            self.marks[index] = replace(self.marks[index], back_s=self.now_s - self.marks[index].at_s)

    def _mark(self, track: str, name: str, *, trouble: bool = False) -> None:
        self.marks.append(Mark(track=track, at_s=self.now_s, name=name, trouble=trouble))

    def _span(self, track: str, kind: SpanKind, seconds: float, name: str, **about: Any) -> None:
        """A span that ended now."""
        start_s, self.heard_s[track] = max(0.0, self.now_s - seconds), self.now_s
        self.spans.append(Span(track=track, kind=kind, start_s=start_s, end_s=self.now_s, name=name, **about))


def place_of(worker_id: str) -> str:
    """``generate-0`` of ``generate-0.2``: what its replacement is called, too."""
    return worker_id.rpartition(".")[0]


def _batch(group_or_row: str) -> int:
    return NO_BATCH if is_evaluation(group_or_row) else batch_of(group_or_row)


def one_after_another(spans: Sequence[Span]) -> list[Span]:
    """Spans of one thread, in order: those of late events move back to where the next one leaves room."""
    moved: list[Span] = []
    limit_s = float("inf")
    for span in reversed(spans):
        end_s = max(0.0, min(span.end_s, limit_s))
        limit_s = max(0.0, end_s - (span.end_s - span.start_s))
        moved.append(replace(span, start_s=limit_s, end_s=end_s))
    return moved[::-1]


def in_lanes(spans: Iterable[Span]) -> list[Span]:
    """The spans by start, each in the lowest lane of its track that is free; loads apart: decoding goes on beside."""
    running: dict[tuple[str, bool], list[tuple[float, int]]] = {}
    free: dict[tuple[str, bool], list[int]] = {}
    placed: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        place = (span.track, span.kind is SpanKind.LOAD)
        busy, idle = running.setdefault(place, []), free.setdefault(place, [])
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(idle, heapq.heappop(busy)[1])
        lane = heapq.heappop(idle) if idle else len(busy)
        heapq.heappush(busy, (span.end_s, lane))
        placed.append(replace(span, lane=lane))
    return placed
