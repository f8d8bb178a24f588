"""``streamrl-orchestrator inspect``: what a run is doing, or did, read from its broker, journal and checkpoints.

Owns: finding the run, and the loop of ``--follow``. Never: changes anything; the broker of a run that is over is
started while we read. What is shown is in survey.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live

from orchestrator.audit import (
    AuditReport,
    CheckpointRecord,
    RoundsLog,
    audit,
    check_metrics,
    check_steps,
    closed_batches,
    up_to,
)
from orchestrator.core.outbox import entry_id
from orchestrator.runtime.journal import is_written
from orchestrator.runtime.live import batch_line
from orchestrator.runtime.metrics import read_file
from orchestrator.runtime.reconcile import rows_without
from orchestrator.runtime.rundir import RunDir, find_run
from orchestrator.sim.replay import recorded_commands
from orchestrator.survey import Survey, survey_line, survey_view, take_survey
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, parse_entry_id
from transport.broker.connect import connect
from transport.broker.embedded import EmbeddedServer
from transport.errors import BrokerUnavailableError, RunExistsError
from transport.ledger import newest_checkpoint
from transport.messages import (
    CloseMiniBatch,
    FinishTraining,
    StepDone,
    TrainRound,
    trainer_command_decoder,
)
from transport.settings import Settings
from transport.tensors.manifest import file_checksum
from transport.types import Column, RowId, RunName, row_id

READ_COUNT = 1000
LOOK_OUTAGE_S = 3.0
"""A look is not worth waiting longer for a broker."""


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
    async with open_run_broker(rundir, settings) as broker:
        if only_audit:
            report = await audit_run(rundir, settings, broker)
            return _print_audit(console, report)
        _print_run(console, rundir, await _survey(broker))
        if follow:
            await follow_run(console, broker)
        return 0


async def _survey(broker: Broker) -> Survey:
    return await take_survey(broker, now_ms=time.time_ns() // 1_000_000)


def _print_run(console: Console, rundir: RunDir, survey: Survey) -> None:
    console.print(f"run {survey.run}  {survey.state}  {rundir.path}", markup=False)
    file = read_file(rundir.metrics)
    if lines := [line for line in file.lines if "batch" in line]:
        console.print(batch_line(lines[-1]), markup=False)
    if file.damaged:
        console.print(file.say(), markup=False)
    console.print(survey_view(survey), soft_wrap=True)


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
            survey = await _survey(broker)
        except BrokerUnavailableError:  # a run's embedded broker ends with it
            return "the broker is gone: the run is over, or was stopped"
        if survey.state == keys.STATE_FINISHED.decode():
            return "the run is over"
        alive_s = time.monotonic() if survey.status else alive_s
        if alive_s is None or time.monotonic() - alive_s > away_s:
            return "no orchestrator is alive"
        if live.console.is_terminal:
            live.update(survey_view(survey), refresh=True)
        else:
            live.console.print(survey_line(survey), markup=False, soft_wrap=True)
        await asyncio.sleep(every_s)


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
    """Read the records of ``rundir`` and compare them (orchestrator/audit.py, which says why in this order)."""
    finished = await broker.get_meta(keys.STATE) == keys.STATE_FINISHED
    live = not finished and (is_written(rundir.journal) or is_written(rundir.path))  # between two orchestrators, too
    checkpoint = _newest_checkpoint(rundir)
    cut = max(await broker.last_id(keys.ROUNDS), checkpoint.cursor if checkpoint else ZERO_ID, key=parse_entry_id)
    held = up_to(await _rounds_held(broker), cut)
    commanded, steps = _from_journal(rundir)
    metrics = read_file(rundir.metrics)
    trained_version = max((step.weights.version for step in steps), default=0)
    missing: list[RowId] = []
    if live:  # rows that a broker lost are being made again, and others are freed behind a newer checkpoint
        commanded = up_to(commanded, cut)
        trained_version = min(trained_version, closed_batches(commanded))
    else:
        beyond = [row for row, batch in _sent_rows(commanded) if (checkpoint.version if checkpoint else 0) <= batch]
        missing = await rows_without(broker, beyond, Column.ADVANTAGE)
    report = audit(
        commanded,
        held,
        checkpoint,
        trained_version=trained_version,
        passes=settings.trainer.epochs,
        missing=missing,
        live=live,
    )
    more = check_steps(steps, checkpoint, finished=finished) + check_metrics(steps, metrics.lines, metrics.damaged)
    return replace(report, problems=(*report.problems, *more))


def _newest_checkpoint(rundir: RunDir) -> CheckpointRecord | None:
    """What the newest checkpoint says; once more where a trainer at work has replaced it meanwhile."""
    while (found := newest_checkpoint(rundir.checkpoints)) is not None:
        path, ledger = found
        files, weights = (ledger.seal.files, ledger.seal.weights) if ledger.seal is not None else ({}, None)
        changed = [name for name, was in files.items() if _checksum(path / name) != was]
        newest = newest_checkpoint(rundir.checkpoints)
        if not changed or (newest is not None and newest[0] == path):
            return CheckpointRecord(
                version=ledger.version,
                cursor=ledger.cursor,
                rows=ledger.rows(),
                name=path.name,
                weights=weights,
                changed=changed,
            )
    return None


def _checksum(path: Path) -> str:
    """Of a file; "" for one that cannot be read."""
    try:
        return file_checksum(path)
    except OSError:
        return ""


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
    clean = "clean: every row of every trained batch was trained exactly once"
    if report.live:
        clean = f"{clean}; the run goes on, checked up to batch {report.batches}"
    verdict = "FAILED" if report.problems else clean
    console.print(f"audit {verdict} ({report.batches} batches, {report.rows} rows)", markup=False)
    return 1 if report.problems else 0
