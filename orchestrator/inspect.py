"""``streamrl-orchestrator inspect``: what a run is doing, or did, read from its broker, journal and checkpoints.

Owns: reading and printing. Never: changes anything; the broker of a run that is over is started while we read.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.audit import AuditReport, CheckpointRecord, RoundsLog, audit
from orchestrator.config import resolve
from orchestrator.core.outbox import entry_id
from orchestrator.errors import ConfigError
from orchestrator.runtime.live import batch_line, blocked_line, printable
from orchestrator.runtime.metrics import read_metrics
from orchestrator.runtime.reconcile import rows_without
from orchestrator.runtime.rundir import RunDir
from orchestrator.sim.replay import recorded_commands
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker
from transport.broker.connect import connect
from transport.broker.embedded import EmbeddedServer
from transport.errors import RunExistsError
from transport.ledger import read_ledger
from transport.messages import (
    CloseMiniBatch,
    FinishTraining,
    StepDone,
    TrainRound,
    trainer_command_decoder,
    worker_status_decoder,
)
from transport.settings import Settings
from transport.types import Column, RowId, RunName, row_id

READ_COUNT = 1000
LOOK_OUTAGE_S = 3.0
"""A look is not worth waiting longer for a broker."""


def main(run_dir: Path, *, audit: bool) -> int:
    """Print the run, or audit it. Returns 0; 1 when the audit finds a problem."""
    rundir = RunDir(run_dir)
    if not rundir.exists():
        raise ConfigError(f"{run_dir} holds no run (no config.toml); give the directory <dir>/<name>")
    settings = resolve(None, [rundir.config], [], os.environ).settings
    return asyncio.run(_main(rundir, settings, only_audit=audit))


async def _main(rundir: RunDir, settings: Settings, *, only_audit: bool) -> int:
    console = Console(highlight=False)
    async with open_run_broker(rundir, settings) as broker:
        if only_audit:
            report = await audit_run(rundir, settings, broker)
            return _print_audit(console, report)
        await _print_run(console, rundir, broker)
        return 0


@asynccontextmanager
async def open_run_broker(rundir: RunDir, settings: Settings) -> AsyncIterator[Broker]:
    """The run's broker: the one it names, its live embedded one, or that one started for as long as we look."""
    name = RunName(settings.run.name)
    if settings.broker.url:
        broker = await connect(settings.broker, name, outage_s=LOOK_OUTAGE_S)
        try:
            yield broker
        finally:
            await broker.close()
        return
    server = EmbeddedServer(rundir.broker, appendfsync=settings.broker.appendfsync)
    try:
        await server.start()
    except RunExistsError:
        server.attach()
    try:
        broker = await connect(settings.broker, name, url=server.url, password=server.password, outage_s=LOOK_OUTAGE_S)
        try:
            yield broker
        finally:
            await broker.close()
    finally:
        await server.stop()


async def audit_run(rundir: RunDir, settings: Settings, broker: Broker) -> AuditReport:
    """Read the three records of ``rundir`` and compare them (orchestrator/audit.py)."""
    commanded, steps = _from_journal(rundir)
    held = await _rounds_held(broker)
    ledger = read_ledger(rundir.checkpoints)
    checkpoint = None
    if ledger is not None:
        checkpoint = CheckpointRecord(version=ledger.version, cursor=ledger.cursor, rows=ledger.rows())
    trained_version = max((step.weights.version for step in steps), default=0)
    beyond = [row for row, batch in _sent_rows(commanded) if (ledger.version if ledger else 0) <= batch]
    missing = await rows_without(broker, beyond, Column.ADVANTAGE)
    return audit(
        commanded,
        held,
        checkpoint,
        trained_version=trained_version,
        passes=settings.trainer.epochs,
        missing=missing,
    )


def _from_journal(rundir: RunDir) -> tuple[RoundsLog, list[StepDone]]:
    """The rounds that the core commanded, and the steps of the last trainer's lineage."""
    commanded: RoundsLog = []
    steps: list[StepDone] = []
    for record, commands in recorded_commands(rundir.journal):
        commanded += [
            (entry_id(record.seq, index), command)
            for index, command in enumerate(commands)
            if isinstance(command, TrainRound | CloseMiniBatch | FinishTraining)
        ]
        if isinstance(record.event, StepDone):
            steps.append(record.event)
    return commanded, steps


async def _rounds_held(broker: Broker) -> RoundsLog:
    held: RoundsLog = []
    cursor = ZERO_ID
    while entries := await broker.read(keys.ROUNDS, cursor, count=READ_COUNT):
        held += [(entry.entry_id, trainer_command_decoder.decode(entry.entry.payload)) for entry in entries]
        cursor = entries[-1].entry_id
    return held


def _sent_rows(commanded: RoundsLog) -> list[tuple[RowId, int]]:
    return [
        (row_id(rows.group_id, sample), command.batch)
        for _, command in commanded
        if isinstance(command, TrainRound)
        for rank in command.ranks
        for rows in rank
        for sample in rows.samples
    ]


def _print_audit(console: Console, report: AuditReport) -> int:
    for problem in report.problems:
        console.print(f"audit: {problem}", markup=False)
    verdict = "FAILED" if report.problems else "clean: every row of every trained batch was trained exactly once"
    console.print(f"audit {verdict} ({report.batches} batches, {report.rows} rows)", markup=False)
    return 1 if report.problems else 0


async def _print_run(console: Console, rundir: RunDir, broker: Broker) -> None:
    state = await broker.get_meta(keys.STATE)
    console.print(f"run {broker.run}  {(state or b'unknown').decode()}  {rundir.path}", markup=False)
    lines = read_metrics(rundir.metrics)
    if lines:
        console.print(batch_line(lines[-1]), markup=False)
    raw = await broker.get_meta(keys.STATUS)
    if raw is not None and (blocked := json.loads(raw).get("blocked")):
        console.print(printable(blocked_line(blocked)), markup=False)
    console.print(await _stream_table(broker))
    console.print(await _worker_table(broker))
    await _print_dead_letters(console, broker)


async def _stream_table(broker: Broker) -> Table:
    table = _table("stream", "entries", "pending", "oldest idle")
    for stream, length in sorted((await broker.streams()).items()):
        pending = await broker.pending(stream) if stream.startswith(("plans:", "tasks:")) else []
        idle = f"{max(entry.idle_s for entry in pending):.1f} s" if pending else ""
        table.add_row(stream, str(length), str(len(pending) or ""), idle)
    return table


async def _worker_table(broker: Broker) -> Table:
    table = _table("worker", "doing", "for", "running", "waiting", "weights", "host", "pid")
    for worker_id, raw in sorted((await broker.leases()).items()):
        status = worker_status_decoder.decode(raw)
        weights = str(status.weights or "")
        cells = (status.doing, f"{status.since_s:.0f} s", str(status.running), str(status.waiting), weights)
        table.add_row(worker_id, *(printable(cell) for cell in cells), printable(status.host), str(status.pid))
    return table


async def _print_dead_letters(console: Console, broker: Broker) -> None:
    for letter in await broker.dead_letters():
        fields = " ".join(f"{name}={value}" for name, value in letter.entry.fields.items())
        console.print(printable(f"dead {letter.entry_id} from {letter.queue}: {letter.reason}  {fields}"), markup=False)


def _table(*columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(str(column))
    return table
