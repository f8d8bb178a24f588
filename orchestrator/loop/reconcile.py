"""After the broker was restarted: find out what it lost and have it made again.

A broker that comes back from its append-only file holds a prefix of what it held before. What the orchestrator had
written beyond that prefix is written again (``outstanding`` commands, whose entry ids make it harmless where nothing
was lost). What the workers had written beyond it they find out themselves: rows that the core was told of and that are
gone become RowsMissing; everything else shows in the workers' next reports. Source: ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from orchestrator.loop.intake import Arrival, Inbox
from transport.broker.base import Broker
from transport.contracts.messages import RowsMissing
from transport.contracts.types import Column, RowId

log = structlog.get_logger(__name__)

POLL_S = 1.0
CHECK_ROWS = 512


async def keep_reconciled(
    broker: Broker,
    inbox: Inbox,
    rows_told: Callable[[], Sequence[RowId]],
    rows_scored: Callable[[], Sequence[RowId]],
    restore: Callable[[], Awaitable[None]],
) -> None:
    """Watch for a broker of another boot, forever; ``restore`` then writes what the orchestrator had written.

    Rows are looked for once at the start too: the broker may have lost them while nobody orchestrated.

    rows_told, rows_scored: rows whose response, and whose advantage, the core was told of, and that are not trained.
    """
    boot_id = (await broker.info()).boot_id
    await _tell_missing(broker, inbox, rows_told(), rows_scored())
    while True:
        await asyncio.sleep(POLL_S)
        current = (await broker.info()).boot_id
        if current == boot_id:
            continue
        boot_id = current
        log.warning("the broker was restarted; reconciling")
        await restore()
        await _tell_missing(broker, inbox, rows_told(), rows_scored())


async def _tell_missing(broker: Broker, inbox: Inbox, told: Sequence[RowId], scored: Sequence[RowId]) -> None:
    missing = {
        *await rows_without(broker, told, Column.ROLLOUT_INFO),
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
