"""A storage unit of a run: keeps columns of rows for as long as their groups live.

The broker is the judge of what exists: the unit asks it now and then which of its groups were dropped, and frees those.
So a drop need not reach every unit, and nothing stays that an orchestrator forgot.
"""

from __future__ import annotations

import asyncio

from transport.broker.base import Broker
from transport.rows.run_rows import RETAINED
from transport.rows.units import StorageUnit
from transport.tensors.base import Endpoint
from workers.leases.lifecycle import Activity

SWEEP_S = 1.0


class StorageWorker:
    """Serves until cancelled; what it holds ends with it."""

    def __init__(self, broker: Broker, endpoint: Endpoint, *, max_bytes: int) -> None:
        self._broker = broker
        self._unit = StorageUnit(max_bytes=max_bytes, endpoint=endpoint)
        self._address = ""
        self._freed = 0

    async def run(self) -> None:
        """Raises ListenError; the broker's errors when it stays away."""
        try:
            self._address = await asyncio.to_thread(self._unit.start)
            while True:
                await self.sweep()
                await asyncio.sleep(SWEEP_S)
        finally:
            await asyncio.to_thread(self._unit.close)

    async def sweep(self) -> None:
        """Free what the broker dropped. A group is in the broker before any value of it is here."""
        held = self._unit.groups()
        exist = await self._broker.has_groups(held) if held else []
        if gone := [group_id for group_id, exists in zip(held, exist, strict=True) if not exists]:
            self._freed += await asyncio.to_thread(self._unit.drop_groups, gone)

    def activity(self) -> Activity:
        counters = {RETAINED: float(self._unit.retained_bytes), "freed_bytes": float(self._freed)}
        return Activity(doing="storing" if self._address else "starting", unit=self._address, counters=counters)
