"""``streamrl-orchestrator inspect``: what a run is doing, or did, read from its broker, journal and checkpoints.

Never changes anything, not even a delivery count; the broker of a run that is over is started while we read, on a copy
of its data where their disk is full or read-only. Invariant:
whatever a worker or a model wrote is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cli.audit import AuditReport, audit_run
from orchestrator.cli.control import open_run
from orchestrator.errors import printable
from orchestrator.http import page_links
from orchestrator.observability.http.status import read_status
from orchestrator.observability.live import (
    aside_lines,
    batch_line,
    blocked_line,
    plain_console,
    progress,
    ranker_line,
    scaling_line,
)
from orchestrator.observability.metrics import read_file
from orchestrator.observability.standing import Standing, State, read_standing
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, DeadLetter, Pending, parse_entry_id
from transport.broker.events import read_statuses
from transport.contracts.messages import WorkerStatus
from transport.errors import BrokerUnavailableError

FOLLOW_S = 2.0
PIPE_COLUMNS = 200
"""Without a terminal nothing is gained by breaking lines, and grep loses."""
AWAY_S = 30.0
"""A run that is followed may be without an orchestrator for so long: it is started again when it dies."""


def main(run_dir: Path, *, audit: bool, follow: bool, broker_url: str | None = None) -> int:
    """Print the run, or audit it. Returns 0; 1 when the audit finds a problem."""
    return asyncio.run(_main(run_dir, broker_url, only_audit=audit, follow=follow))


async def _main(run_dir: Path, broker_url: str | None, *, only_audit: bool, follow: bool) -> int:
    console = plain_console(pipe_columns=PIPE_COLUMNS)
    async with open_run(run_dir, broker_url, reads=True) as (rundir, settings, broker):
        if only_audit:
            return _print_audit(console, await audit_run(rundir, settings, broker))
        standing, snapshot = read_standing(rundir.path), await take_snapshot(broker)
        if not _may_be_live(standing):
            snapshot = replace(snapshot, status={}, workers=())  # they outlast their writers by their time to live
        files = rundir.api_address, rundir.api_secret
        for link in page_links(*files, keyed=console.is_terminal) if snapshot.status else ():
            console.print(f"live page {link}", soft_wrap=True)
        said = State.LIVE if snapshot.status else standing
        console.print(f"run {snapshot.run}  {rundir.path}  {said}", soft_wrap=True)
        if standing.go_on and not snapshot.status and standing.go_on not in standing.why:
            console.print(f"go on with: {standing.go_on}", soft_wrap=True)
        file = read_file(rundir.metrics)
        if lines := [line for line in file.lines if "batch" in line]:
            console.print(batch_line(lines[-1]))
        if file.damaged:
            console.print(file.say())
        console.print(snapshot_view(snapshot), soft_wrap=True)
        if follow:
            await follow_run(console, broker)
        return 0


def _may_be_live(standing: Standing) -> bool:
    """It is, or it left no word of its end and is live on another host, whose locks are not seen here."""
    unknown = standing.state in (State.CRASHED, State.NEW) and standing.settings.broker.url
    return standing.state is State.LIVE or bool(unknown)


async def follow_run(console: Console, broker: Broker, *, every_s: float = FOLLOW_S, away_s: float = AWAY_S) -> None:
    """Look again and again: a table that is redrawn on a terminal, else a line each time.

    Ends when the run is over, its broker is gone, or no orchestrator was alive for ``away_s`` (at once, if none was at
    the first look), and says which.
    """
    with Live(console=console, auto_refresh=False, transient=True) as live:
        why = await _follow(live, broker, every_s, away_s)
    console.print(why)


async def _follow(live: Live, broker: Broker, every_s: float, away_s: float) -> str:
    """Returns why there is nothing more to see."""
    alive_s: float | None = None
    while True:
        try:
            snapshot = await take_snapshot(broker)
        except BrokerUnavailableError:  # a run's embedded broker ends with it
            return "the broker is gone: the run is over, or was stopped"
        if snapshot.state == keys.STATE_FINISHED.decode():
            return "the run is over"
        alive_s = time.monotonic() if snapshot.status else alive_s
        if alive_s is None or time.monotonic() - alive_s > away_s:
            return "no orchestrator is alive"
        if live.console.is_terminal:
            live.update(snapshot_view(snapshot), refresh=True)
        else:
            live.console.print(snapshot_line(snapshot), soft_wrap=True)
        await asyncio.sleep(every_s)


def _print_audit(console: Console, report: AuditReport) -> int:
    for problem in report.problems:
        console.print(f"audit: {problem}")
    for note in report.notes:
        console.print(f"note: {note}")
    live = f"; the run goes on, checked up to batch {report.batches}" if report.live else ""
    clean = f"clean: every row of every trained batch was trained exactly once{live}"
    if report.requests:  # a service
        clean = "clean: every sample is one that a request asked for"
        verdict = "FAILED" if report.problems else clean
        console.print(f"audit {verdict} ({report.requests})")
        return 1 if report.problems else 0
    verdict = "FAILED" if report.problems else clean
    console.print(f"audit {verdict} ({report.batches} batches, {report.rows} rows)")
    return 1 if report.problems else 0


# -- what a broker holds

WORK_QUEUES = ("plans:", "tasks:")
OLDEST = 5
"""Entries of one queue that are shown: those that have waited longest are the ones that matter."""
PENDING = 1000
LETTERS = 20
FIRST_TIME_MS = 10**12
"""Ids below it were chosen by a writer and hold no time (the year 2001 in milliseconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedEntry:
    """One of the oldest entries of a work queue.

    age_s: None where its id holds no time.  lease: None while it is not claimed.
    """

    entry_id: str
    fields: Mapping[str, str]
    age_s: float | None
    lease: Pending | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSnapshot:
    """A stream. held: entries of a work queue that somebody holds.  oldest: a few of its oldest, if it is one."""

    name: str
    length: int
    held: int = 0
    longest_idle_s: float = 0.0
    oldest: Sequence[QueuedEntry] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """state: of the run as a whole.  status: the orchestrator's, {} when none is alive.  letters: some dead letters."""

    run: str
    state: str
    status: Mapping[str, Any]
    streams: Sequence[StreamSnapshot]
    workers: Sequence[WorkerStatus]
    letters: Sequence[DeadLetter]
    retained_bytes: int

    @property
    def num_dead(self) -> int:
        return next((stream.length for stream in self.streams if stream.name == keys.DEAD), 0)


async def take_snapshot(broker: Broker, *, now_ms: int | None = None) -> BrokerSnapshot:
    """Read everything once. now_ms: wall clock, to know ages by entry ids."""
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    status = await read_status(broker)
    lengths = await broker.streams()
    return BrokerSnapshot(
        run=broker.run,
        state=(await broker.get_meta(keys.STATE) or b"unknown").decode(),
        status=status or {},
        streams=[
            await _stream_snapshot(broker, name, lengths[name], now_ms)
            for name in sorted(lengths)
            if not keys.is_of_group(name)
        ],
        workers=[status for _, status in sorted(read_statuses(await broker.leases()).items())],
        letters=await broker.dead_letters(count=LETTERS),
        retained_bytes=await broker.retained_bytes(),
    )


async def _stream_snapshot(broker: Broker, name: str, length: int, now_ms: int) -> StreamSnapshot:
    if not name.startswith(WORK_QUEUES):
        return StreamSnapshot(name=name, length=length)
    leases = {held.entry_id: held for held in await broker.pending(name, count=PENDING)}
    oldest: list[QueuedEntry] = []
    for entry in await broker.read(name, ZERO_ID, count=OLDEST):
        added_ms = parse_entry_id(entry.entry_id)[0]
        age_s = max(0.0, (now_ms - added_ms) / 1000) if added_ms > FIRST_TIME_MS else None
        lease = leases.get(entry.entry_id)
        oldest.append(QueuedEntry(entry_id=entry.entry_id, fields=entry.entry.fields, age_s=age_s, lease=lease))
    idle_s = max((held.idle_s for held in leases.values()), default=0.0)
    return StreamSnapshot(name=name, length=length, held=len(leases), longest_idle_s=idle_s, oldest=oldest)


# -- words


def snapshot_line(snapshot: BrokerSnapshot) -> str:
    """One line: where training is, what waits in which queue, what blocks."""
    status = snapshot.status
    parts = [f"{status['elapsed_s']:.0f} s  {progress(status)}"] if status else []
    for stream in snapshot.streams:
        if stream.name.startswith(WORK_QUEUES) and stream.length:
            age_s = stream.oldest[0].age_s if stream.oldest else None
            oldest = "" if age_s is None else f", oldest {age_s:.1f} s"
            parts.append(f"{stream.name} {stream.length} ({stream.held} held{oldest})")
    parts += [f"dead {snapshot.num_dead}"] if snapshot.num_dead else []
    if blocked := status.get("blocked"):
        parts.append(blocked_line(blocked))
    return printable("  ".join(parts) or snapshot.state)


def snapshot_view(snapshot: BrokerSnapshot) -> Group:
    """The whole of it: what blocks, streams, the oldest entries and who holds them, workers, dead letters."""
    status = snapshot.status
    weights = f"  newest weights e{newest['epoch']}v{newest['version']}" if (newest := status.get("newest")) else ""
    where = f"{progress(status)}{weights}  " if status else ""
    lines = [f"{where}{snapshot.retained_bytes / 1e6:.1f} MB of rows retained"]
    shown = {"ranker": ranker_line, "scaling": scaling_line, "blocked": blocked_line}
    lines += aside_lines(status)
    lines += [line for name, say in shown.items() if (part := status.get(name)) and (line := say(part))]
    letters: list[str] = []
    for letter in snapshot.letters:
        fields = " ".join(f"{name}={value}" for name, value in letter.entry.fields.items())
        letters.append(f"dead {letter.letter_id} from {letter.queue}: {letter.reason}  {fields}")
    if (more := snapshot.num_dead - len(snapshot.letters)) > 0:
        letters.append(f"and {more} more dead letters")
    workers = [
        (w.worker_id, w.doing, f"{w.since_s:.0f} s", w.running, w.waiting, w.weights or "", w.way, place_of(w), w.pid)
        for w in snapshot.workers
    ]
    titles = ("worker", "doing", "for", "running", "waiting", "weights", "came by", "host", "pid")
    tables = (*_stream_tables(snapshot), _table(*titles, rows=workers))
    tables = [table for table in tables if table.row_count]
    return Group(Text(printable("\n".join(lines))), *tables, *(Text(printable(letter)) for letter in letters))


def place_of(worker: WorkerStatus) -> str:
    return f"{worker.host} in {worker.site}" if worker.site else worker.host


def _stream_tables(snapshot: BrokerSnapshot) -> tuple[Table, Table]:
    streams: list[Sequence[object]] = []
    entries: list[Sequence[object]] = []
    for stream in snapshot.streams:
        idle = f"{stream.longest_idle_s:.1f} s" if stream.held else ""
        streams.append((stream.name, stream.length, stream.held or "", idle))
        for queued in stream.oldest:
            age = "" if queued.age_s is None else f"{queued.age_s:.1f} s"
            held = queued.lease
            lease = (held.consumer, f"{held.idle_s:.1f} s", held.deliveries) if held else ("", "", "")
            what = queued.fields.get("unit") or queued.fields.get("group", "")
            entries.append((stream.name, queued.entry_id, age, what, *lease))
    titles = ("oldest entries of", "id", "age", "what", "held by", "idle", "deliveries")
    return _table("stream", "entries", "held", "longest idle", rows=streams), _table(*titles, rows=entries)


def _table(*columns: str, rows: Iterable[Sequence[object]]) -> Table:
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
    return table
