"""The rows of a run, wherever its settings put them; and storage units of a run, which come and go.

    who     units hold leases, as all workers do, which say where they listen: a unit that joins gets rows at once
    full    what one has no room for goes to the others; where none has, the write waits for room: admission is closed
            before (``rows.unit_bytes``), and each checkpoint frees
    gone    a unit without a lease that does not answer is dead. What of its bytes is not in this host's memory is lost:
            whoever wants them withdraws their rows from the broker and reports them missing, in one step, so that they
            are made again

Owns: the choice, and what becomes of a dead unit's rows. Invariant: a row is withdrawn only where its own unit says
that the bytes are not there, or is dead; one that holds its lease and cannot be reached is waited for. Source:
AsyncFlow's TransferQueue has such units; ours, what is done when one dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from transport.broker.base import Broker, Commit, CommitResult, Withdrawal
from transport.broker.events import event_append, read_statuses
from transport.contracts.messages import RowsMissing, WorkerStatus
from transport.contracts.settings import Settings
from transport.contracts.types import Column, RowId, WorkerId, WorkerKind
from transport.errors import PeerUnavailableError
from transport.rows.columns import ColumnBytes, RowStore
from transport.rows.unit_rows import Place, UnitRows
from transport.tensors.base import Deadline
from transport.tensors.shm import SHARED_MEMORY

log = structlog.get_logger(__name__)

RETAINED = "retained_bytes"  # what a unit calls the bytes that it holds, among its counters
LOOK_S = 1.0  # between two looks at who the units are
RETRY_S = 0.25  # between two attempts at a write for which no unit has room


def open_rows(broker: Broker, settings: Settings, *, secret: bytes) -> RowStore:
    """Where the run keeps its rows. secret: shared with its storage units."""
    if settings.rows.store == "broker":
        return RowStore(broker)
    return RunRows(broker, secret=secret, wait_s=settings.broker.outage_s)


def units_of(leases: Mapping[WorkerId, bytes]) -> list[WorkerStatus]:
    """The storage units among those that hold leases, and have started."""
    return [status for status in read_statuses(leases).values() if status.kind is WorkerKind.STORE and status.unit]


class RunRows(UnitRows):
    """A RowStore over the units that have joined a run.

    wait_s: how long a write waits for room, or a read for a unit that lives and does not answer.
    """

    def __init__(self, broker: Broker, *, secret: bytes = b"", wait_s: float, directory: Path = SHARED_MEMORY) -> None:
        super().__init__(broker, (), secret=secret, directory=directory)
        self._wait_s = wait_s
        self._looked_s = float("-inf")

    async def commit(self, commit: Commit) -> CommitResult:
        """As RowStore. Raises PeerUnavailableError: no unit joined, or had room, within ``wait_s``."""
        deadline, waits = Deadline(self._wait_s), False
        while True:
            await self._look()
            try:
                return await super().commit(commit)
            except PeerUnavailableError as error:
                if not deadline.remaining_s():
                    raise
                if not waits:
                    log.warning("rows wait for a storage unit", reason=str(error), at_most_s=self._wait_s)
                waits = True
            self._looked_s = float("-inf")
            await asyncio.sleep(RETRY_S)

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        """As UnitRows; a row whose bytes are lost is withdrawn and reported as missing, and is {} from then on."""
        rows, lost = await self._read(row_ids, columns)
        if lost:
            await self._withdraw(lost)
        return rows

    async def _withdraw(self, lost: Sequence[Place]) -> None:
        by_row = {place.row_id: place for place in lost}
        withdrawals = [
            Withdrawal(
                row_id=row,
                column=place.column,
                value=place.locator,
                on_withdrawn=(event_append(RowsMissing(row_ids=(row,)), row=row, reason="its storage unit lost it"),),
            )
            for row, place in by_row.items()
        ]
        went = sum(await self._broker.withdraw_rows(withdrawals))
        log.warning("rows were lost with their storage unit; they are made again", rows=went, first=next(iter(by_row)))

    async def _fetch(self, unit: str, places: Sequence[Place]) -> list[Place]:
        deadline = Deadline(self._wait_s)
        while True:
            try:
                return await asyncio.to_thread(self._get, unit, places)
            except PeerUnavailableError:
                await self._look(now=True)
                if unit not in self._units:
                    return await asyncio.to_thread(self._map, places)
                if not deadline.remaining_s():
                    raise
            await asyncio.sleep(RETRY_S)

    async def _look(self, *, now: bool = False) -> None:
        """Who the units are, asked once in a while."""
        if not now and time.monotonic() - self._looked_s < LOOK_S:
            return
        self._units = sorted({status.unit for status in units_of(await self._broker.leases())})
        self._looked_s = time.monotonic()
