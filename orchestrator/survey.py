"""What a run's broker holds at one moment, as a value, and how it looks on a terminal.

Owns: reading and words. Never: changes anything, not even a delivery count. Invariant: whatever a worker or a model
wrote is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from orchestrator.printable import printable
from orchestrator.runtime.live import blocked_line, progress, ranker_line, scaling_line
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, DeadLetter, LogEntry, Pending, parse_entry_id
from transport.errors import MessageError
from transport.messages import WorkerStatus, worker_status_decoder

WORK_QUEUES = ("plans:", "tasks:")
OLDEST = 5
"""Entries of one queue that are shown: those that have waited longest are the ones that matter."""
PENDING = 1000
LETTERS = 20
FIRST_TIME_MS = 10**12
"""Ids below it were chosen by a writer and tell no time (the year 2001 in milliseconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedEntry:
    """One of the oldest entries of a work queue.

    age_s: None where its id tells no time.  lease: None while nobody holds it.
    """

    entry_id: str
    fields: Mapping[str, str]
    age_s: float | None
    lease: Pending | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSurvey:
    """A stream. held: entries of a work queue that somebody holds.  oldest: a few of its oldest, if it is one."""

    name: str
    length: int
    held: int = 0
    longest_idle_s: float = 0.0
    oldest: Sequence[QueuedEntry] = ()

    @property
    def is_queue(self) -> bool:
        return self.name.startswith(WORK_QUEUES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """state: of the run as a whole.  status: the orchestrator's, {} when none is alive.  letters: some dead letters."""

    run: str
    state: str
    status: Mapping[str, Any]
    streams: Sequence[StreamSurvey]
    workers: Sequence[WorkerStatus]
    letters: Sequence[DeadLetter]
    retained_bytes: int

    @property
    def num_dead(self) -> int:
        return next((stream.length for stream in self.streams if stream.name == keys.DEAD), 0)


async def take_survey(broker: Broker, *, now_ms: int) -> Survey:
    """Read everything once. now_ms: wall clock, to tell ages from entry ids."""
    raw = await broker.get_meta(keys.STATUS)
    lengths = await broker.streams()
    return Survey(
        run=broker.run,
        state=(await broker.get_meta(keys.STATE) or b"unknown").decode(),
        status=json.loads(raw) if raw is not None else {},
        streams=[await _survey_stream(broker, name, lengths[name], now_ms) for name in sorted(lengths)],
        workers=_readable((await broker.leases()).values()),
        letters=await broker.dead_letters(count=LETTERS),
        retained_bytes=await broker.retained_bytes(),
    )


async def _survey_stream(broker: Broker, name: str, length: int, now_ms: int) -> StreamSurvey:
    if not name.startswith(WORK_QUEUES):
        return StreamSurvey(name=name, length=length)
    leases = {held.entry_id: held for held in await broker.pending(name, count=PENDING)}
    entries = await broker.read(name, ZERO_ID, count=OLDEST)
    return StreamSurvey(
        name=name,
        length=length,
        held=len(leases),
        longest_idle_s=max((held.idle_s for held in leases.values()), default=0.0),
        oldest=[_queued(entry, leases.get(entry.entry_id), now_ms) for entry in entries],
    )


def _queued(entry: LogEntry, lease: Pending | None, now_ms: int) -> QueuedEntry:
    added_ms = parse_entry_id(entry.entry_id)[0]
    age_s = max(0.0, (now_ms - added_ms) / 1000) if added_ms > FIRST_TIME_MS else None
    return QueuedEntry(entry_id=entry.entry_id, fields=entry.entry.fields, age_s=age_s, lease=lease)


def _readable(leases: Iterable[bytes]) -> list[WorkerStatus]:
    """Statuses of workers that speak our protocol, by name; the orchestrator's log names the others."""
    statuses: list[WorkerStatus] = []
    for raw in leases:
        try:
            statuses.append(worker_status_decoder.decode(raw))
        except MessageError:
            continue
    return sorted(statuses, key=lambda status: status.worker_id)


# -- words


def survey_line(survey: Survey) -> str:
    """One line: where training is, what waits in which queue, what blocks."""
    status = survey.status
    parts = [f"{status['elapsed_s']:.0f} s  {progress(status)}"] if status else []
    parts += [
        f"{stream.name} {stream.length} ({stream.held} held{_oldest_age(stream)})"
        for stream in survey.streams
        if stream.is_queue and stream.length
    ]
    parts += [f"dead {survey.num_dead}"] if survey.num_dead else []
    if blocked := status.get("blocked"):
        parts.append(blocked_line(blocked))
    return printable("  ".join(parts) or survey.state)


def _oldest_age(stream: StreamSurvey) -> str:
    age_s = stream.oldest[0].age_s if stream.oldest else None
    return "" if age_s is None else f", oldest {age_s:.1f} s"


def survey_view(survey: Survey) -> Group:
    """The whole of it: what blocks, streams, the oldest entries and who holds them, workers, dead letters."""
    blocked = survey.status.get("blocked")
    ranker = survey.status.get("ranker")
    scaling = survey.status.get("scaling")
    lines = [_weights_line(survey), *([ranker_line(ranker)] if ranker else [])]
    lines += [line] if scaling and (line := scaling_line(scaling)) else []
    lines += [blocked_line(blocked)] if blocked else []
    parts = [Text(printable("\n".join(lines))), _stream_table(survey), _entry_table(survey), _worker_table(survey)]
    return Group(*parts, *map(_letter_text, survey.letters), *_more_letters(survey))


def _weights_line(survey: Survey) -> str:
    status = survey.status
    retained = f"{survey.retained_bytes / 1e6:.1f} MB of rows retained"
    if not status:
        return f"no orchestrator is alive  {retained}"
    newest = status.get("newest")
    weights = f"  newest weights e{newest['epoch']}v{newest['version']}" if newest else ""
    return f"{progress(status)}{weights}  {retained}"


def _stream_table(survey: Survey) -> Table:
    table = _table("stream", "entries", "held", "longest idle")
    for stream in survey.streams:
        idle = f"{stream.longest_idle_s:.1f} s" if stream.held else ""
        table.add_row(printable(stream.name), str(stream.length), str(stream.held or ""), idle)
    return table


def _entry_table(survey: Survey) -> Table:
    table = _table("oldest entries of", "id", "age", "what", "held by", "idle", "deliveries")
    for stream in survey.streams:
        for queued in stream.oldest:
            age = "" if queued.age_s is None else f"{queued.age_s:.1f} s"
            held = queued.lease
            lease = (held.consumer, f"{held.idle_s:.1f} s", str(held.deliveries)) if held else ("", "", "")
            what = queued.fields.get("unit") or queued.fields.get("group", "")
            table.add_row(*map(printable, (stream.name, queued.entry_id, age, what, *lease)))
    return table


def _worker_table(survey: Survey) -> Table:
    table = _table("worker", "doing", "for", "running", "waiting", "weights", "host", "pid")
    for status in survey.workers:
        cells = (status.worker_id, status.doing, f"{status.since_s:.0f} s", str(status.running), str(status.waiting))
        table.add_row(*map(printable, (*cells, str(status.weights or ""), status.host, str(status.pid))))
    return table


def _letter_text(letter: DeadLetter) -> Text:
    fields = " ".join(f"{name}={value}" for name, value in letter.entry.fields.items())
    return Text(printable(f"dead {letter.letter_id} from {letter.queue}: {letter.reason}  {fields}"))


def _more_letters(survey: Survey) -> list[Text]:
    more = survey.num_dead - len(survey.letters)
    return [Text(f"and {more} more dead letters")] if more > 0 else []


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
