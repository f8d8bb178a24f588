"""What the broker must hold of a run: written at the start, and made again after the broker was restarted.

A broker that comes back from its append-only file holds a prefix of what it held before. What the orchestrator had
written beyond that prefix is written again (``outstanding`` commands, whose entry ids make it harmless where nothing
was lost). What the workers had written beyond it they find out themselves: rows that were reported to the core and
that are gone become RowsMissing; everything else shows in the workers' next reports. Source: ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from orchestrator.config.run_directory import RunDir
from orchestrator.core.model.dataflow import grpo_tasks
from orchestrator.loop.intake import READ_COUNT, Arrival, Inbox
from transport.broker import keys
from transport.broker.base import Broker, Commit, Fence
from transport.contracts.ledger import checkpoint_dirs
from transport.contracts.messages import RowsMissing, RunResumed, TrialRows, encode
from transport.contracts.model_identity import ModelIdentity
from transport.contracts.settings import Settings, public
from transport.contracts.types import Column, RowId
from transport.errors import FencedError, RunExistsError

log = structlog.get_logger(__name__)

POLL_S = 1.0
CHECK_ROWS = 512


async def keep_reconciled(
    broker: Broker,
    inbox: Inbox,
    rows_reported: Callable[[], Sequence[RowId]],
    rows_scored: Callable[[], Sequence[RowId]],
    restore: Callable[[], Awaitable[None]],
) -> None:
    """Watch for a broker of another boot, forever; ``restore`` then writes what the orchestrator had written.

    Rows are looked for once at the start too: the broker may have lost them while no orchestrator ran.

    rows_reported, rows_scored: rows whose response, and whose advantage, was reported to the core, and that are not
    trained.
    """
    boot_id = (await broker.info()).boot_id
    await _report_missing(broker, inbox, rows_reported(), rows_scored())
    while True:
        await asyncio.sleep(POLL_S)
        current = (await broker.info()).boot_id
        if current == boot_id:
            continue
        boot_id = current
        log.warning("the broker was restarted; reconciling")
        await restore()
        await _report_missing(broker, inbox, rows_reported(), rows_scored())


async def _report_missing(broker: Broker, inbox: Inbox, reported: Sequence[RowId], scored: Sequence[RowId]) -> None:
    missing = {
        *await rows_without(broker, reported, Column.ROLLOUT_INFO),
        *await rows_without(broker, scored, Column.ADVANTAGE),
    }
    if missing:
        log.warning("the broker lost rows; they are generated again", rows=len(missing))
        await inbox.put(Arrival(RowsMissing(row_ids=tuple(sorted(missing)))))


async def rows_without(broker: Broker, rows: Sequence[RowId], column: Column) -> list[RowId]:
    """Those of ``rows`` that do not hold ``column``."""
    missing: list[RowId] = []
    for start in range(0, len(rows), CHECK_ROWS):
        some = rows[start : start + CHECK_ROWS]
        found = await broker.read_rows(some, (column,))
        missing += [row for row, columns in zip(some, found, strict=True) if column not in columns]
    return missing


async def check_new(broker: Broker, rundir: RunDir) -> None:
    """A run without a journal begins, so nothing of its name may be there yet. Raises RunExistsError."""
    if await broker.get_meta(keys.STATE) is not None:
        raise RunExistsError(
            f"the broker already holds a run named {broker.run!r}, and it is not the one in {rundir.path}: "
            "choose another --name"
        )
    if checkpoint_dirs(rundir.checkpoints):
        raise RunExistsError(
            f"{rundir.checkpoints} holds checkpoints, but {rundir.journal} nothing that says how they came to be: put "
            "the journal back, or start a run of another --name from a model directory (model.path)"
        )


async def publish_run_metadata(
    broker: Broker, settings: Settings, trainer_epoch: int, model: ModelIdentity, trial: TrialRows | None = None
) -> None:
    """Write what workers need in the broker beside entries and rows; again after it lost its tail, which may reach so
    far.

    trainer_epoch: the highest that was reported, so that no later trainer gets it once more.  model: what workers have.
    trial: what rewards are tried on; there before the settings, for which workers wait.
    """
    trains = settings.trainer.engine != "none"
    await broker.declare_tasks(grpo_tasks(with_reference=settings.algorithm.kl_coef > 0) if trains else ())
    with suppress(FencedError):  # the broker knows a newer one
        await broker.commit(Commit(fence=Fence(role="trainer", epoch=trainer_epoch)))
    await broker.put_meta(keys.MODEL, encode(model))
    if trial is not None:
        await broker.put_meta(keys.TRIAL, encode(trial))
    await broker.put_meta(keys.SETTINGS, encode(public(settings)))
    await broker.put_meta(keys.STATE, keys.STATE_RUNNING)


async def was_resumed(broker: Broker, cursor: str) -> bool:
    """Whether an event that was not read yet says that the run goes on: then its former end is no end any more."""
    while entries := await broker.read(keys.EVENTS, cursor, count=READ_COUNT):
        if any(entry.entry.fields.get("event") == RunResumed.__name__ for entry in entries):
            return True
        cursor = entries[-1].entry_id
    return False
