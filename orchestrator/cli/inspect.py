"""``streamrl-orchestrator inspect``: what a run is doing, or did, read from its broker, journal and checkpoints.

Never changes anything, not even a delivery count; the broker of a run that is over is started while we read. Invariant:
whatever a worker or a model wrote is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.cli.audit import AuditReport, audit_run
from orchestrator.cli.run_broker import run_broker
from orchestrator.config.run_directory import RunDir, find_run
from orchestrator.loop.membership import read_statuses
from orchestrator.observability.live import batch_line, blocked_line, progress, ranker_line, scaling_line
from orchestrator.observability.metrics_file import read_file
from orchestrator.terminal_text import printable
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, DeadLetter, LogEntry, Pending, parse_entry_id
from transport.contracts.messages import WorkerStatus
from transport.contracts.settings import Settings
from transport.errors import BrokerUnavailableError

FOLLOW_S = 2.0
PIPE_COLUMNS = 200
"""Without a terminal nothing is gained by breaking lines, and grep loses."""
AWAY_S = 30.0
"""A run that is followed may be without an orchestrator for so long: it is started again when it dies."""


def main(run_dir: Path, *, audit: bool, follow: bool, broker_url: str | None = None) -> int:
    """Print the run, or audit it. Returns 0; 1 when the audit finds a problem."""
    rundir, settings = find_run(run_dir, broker_url)
    return asyncio.run(_main(rundir, settings, only_audit=audit, follow=follow))


async def _main(rundir: RunDir, settings: Settings, *, only_audit: bool, follow: bool) -> int:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_COLUMNS)
    async with run_broker(rundir, settings) as broker:
        if only_audit:
            report = await audit_run(rundir, settings, broker)
            return _print_audit(console, report)
        _print_run(console, rundir, await _survey(broker))
        if follow:
            await follow_run(console, broker)
        return 0


async def _survey(broker: Broker) -> BrokerSnapshot:
    return await take_snapshot(broker, now_ms=time.time_ns() // 1_000_000)


def _print_run(console: Console, rundir: RunDir, snapshot: BrokerSnapshot) -> None:
    console.print(f"run {snapshot.run}  {snapshot.state}  {rundir.path}", markup=False)
    file = read_file(rundir.metrics)
    if lines := [line for line in file.lines if "batch" in line]:
        console.print(batch_line(lines[-1]), markup=False)
    if file.damaged:
        console.print(file.say(), markup=False)
    console.print(snapshot_view(snapshot), soft_wrap=True)


async def follow_run(console: Console, broker: Broker, *, every_s: float = FOLLOW_S, away_s: float = AWAY_S) -> None:
    """Look again and again: a table that is redrawn on a terminal, else a line each time.

    Ends when the run is over, its broker is gone, or no orchestrator was alive for ``away_s`` (at once, if none was at
    the first look), and says which.
    """
    with Live(console=console, auto_refresh=False, transient=True) as live:
        why = await _follow(live, broker, every_s, away_s)
    console.print(why, markup=False)


async def _follow(live: Live, broker: Broker, every_s: float, away_s: float) -> str:
    """Returns why there is nothing more to see."""
    alive_s: float | None = None
    while True:
        try:
            snapshot = await _survey(broker)
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
            live.console.print(snapshot_line(snapshot), markup=False, soft_wrap=True)
        await asyncio.sleep(every_s)


def _print_audit(console: Console, report: AuditReport) -> int:
    for problem in report.problems:
        console.print(f"audit: {problem}", markup=False)
    clean = "clean: every row of every trained batch was trained exactly once"
    if report.live:
        clean = f"{clean}; the run goes on, checked up to batch {report.batches}"
    verdict = "FAILED" if report.problems else clean
    console.print(f"audit {verdict} ({report.batches} batches, {report.rows} rows)", markup=False)
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

    @property
    def is_queue(self) -> bool:
        return self.name.startswith(WORK_QUEUES)


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


async def take_snapshot(broker: Broker, *, now_ms: int) -> BrokerSnapshot:
    """Read everything once. now_ms: wall clock, to know ages by entry ids."""
    raw = await broker.get_meta(keys.STATUS)
    lengths = await broker.streams()
    return BrokerSnapshot(
        run=broker.run,
        state=(await broker.get_meta(keys.STATE) or b"unknown").decode(),
        status=json.loads(raw) if raw is not None else {},
        streams=[await _stream_snapshot(broker, name, lengths[name], now_ms) for name in sorted(lengths)],
        workers=[status for _, status in sorted(read_statuses(await broker.leases()).items())],
        letters=await broker.dead_letters(count=LETTERS),
        retained_bytes=await broker.retained_bytes(),
    )


async def _stream_snapshot(broker: Broker, name: str, length: int, now_ms: int) -> StreamSnapshot:
    if not name.startswith(WORK_QUEUES):
        return StreamSnapshot(name=name, length=length)
    leases = {held.entry_id: held for held in await broker.pending(name, count=PENDING)}
    entries = await broker.read(name, ZERO_ID, count=OLDEST)
    return StreamSnapshot(
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


# -- words


def snapshot_line(snapshot: BrokerSnapshot) -> str:
    """One line: where training is, what waits in which queue, what blocks."""
    status = snapshot.status
    parts = [f"{status['elapsed_s']:.0f} s  {progress(status)}"] if status else []
    parts += [
        f"{stream.name} {stream.length} ({stream.held} held{_oldest_age(stream)})"
        for stream in snapshot.streams
        if stream.is_queue and stream.length
    ]
    parts += [f"dead {snapshot.num_dead}"] if snapshot.num_dead else []
    if blocked := status.get("blocked"):
        parts.append(blocked_line(blocked))
    return printable("  ".join(parts) or snapshot.state)


def _oldest_age(stream: StreamSnapshot) -> str:
    age_s = stream.oldest[0].age_s if stream.oldest else None
    return "" if age_s is None else f", oldest {age_s:.1f} s"


def snapshot_view(snapshot: BrokerSnapshot) -> Group:
    """The whole of it: what blocks, streams, the oldest entries and who holds them, workers, dead letters."""
    blocked = snapshot.status.get("blocked")
    ranker = snapshot.status.get("ranker")
    scaling = snapshot.status.get("scaling")
    lines = [_weights_line(snapshot), *([ranker_line(ranker)] if ranker else [])]
    lines += [line] if scaling and (line := scaling_line(scaling)) else []
    lines += [blocked_line(blocked)] if blocked else []
    parts = [
        Text(printable("\n".join(lines))),
        _stream_table(snapshot),
        _entry_table(snapshot),
        _worker_table(snapshot),
    ]
    return Group(*parts, *map(_letter_text, snapshot.letters), *_more_letters(snapshot))


def _weights_line(snapshot: BrokerSnapshot) -> str:
    status = snapshot.status
    retained = f"{snapshot.retained_bytes / 1e6:.1f} MB of rows retained"
    if not status:
        return f"no orchestrator is alive  {retained}"
    newest = status.get("newest")
    weights = f"  newest weights e{newest['epoch']}v{newest['version']}" if newest else ""
    return f"{progress(status)}{weights}  {retained}"


def _stream_table(snapshot: BrokerSnapshot) -> Table:
    table = _table("stream", "entries", "held", "longest idle")
    for stream in snapshot.streams:
        idle = f"{stream.longest_idle_s:.1f} s" if stream.held else ""
        table.add_row(printable(stream.name), str(stream.length), str(stream.held or ""), idle)
    return table


def _entry_table(snapshot: BrokerSnapshot) -> Table:
    table = _table("oldest entries of", "id", "age", "what", "held by", "idle", "deliveries")
    for stream in snapshot.streams:
        for queued in stream.oldest:
            age = "" if queued.age_s is None else f"{queued.age_s:.1f} s"
            held = queued.lease
            lease = (held.consumer, f"{held.idle_s:.1f} s", str(held.deliveries)) if held else ("", "", "")
            what = queued.fields.get("unit") or queued.fields.get("group", "")
            table.add_row(*map(printable, (stream.name, queued.entry_id, age, what, *lease)))
    return table


def _worker_table(snapshot: BrokerSnapshot) -> Table:
    table = _table("worker", "doing", "for", "running", "waiting", "weights", "host", "pid")
    for status in snapshot.workers:
        cells = (status.worker_id, status.doing, f"{status.since_s:.0f} s", str(status.running), str(status.waiting))
        table.add_row(*map(printable, (*cells, str(status.weights or ""), status.host, str(status.pid))))
    return table


def _letter_text(letter: DeadLetter) -> Text:
    fields = " ".join(f"{name}={value}" for name, value in letter.entry.fields.items())
    return Text(printable(f"dead {letter.letter_id} from {letter.queue}: {letter.reason}  {fields}"))


def _more_letters(snapshot: BrokerSnapshot) -> list[Text]:
    more = snapshot.num_dead - len(snapshot.letters)
    return [Text(f"and {more} more dead letters")] if more > 0 else []


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
