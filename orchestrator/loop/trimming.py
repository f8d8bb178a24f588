"""What nobody will read again leaves the broker, so that it does not grow with the length of a run.

    events             up to the snapshot before the last: the journal has them, on the disk
    weights, control   all but the newest: only the newest version is ever loaded, and a load replaces those before it
    plans, control     of workers that were gone at the last two snapshots: their groups went to others long ago

Rounds are trimmed by the core's own command, below the oldest checkpoint.

Owns: what is kept. Never: decides anything of the run. Invariant: what a restart of any process reads is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.types import WorkerId

KEPT_ENTRIES = 256
"""Of a log whose newest entries count: more than anybody looks back, few enough to read in ``redis-cli``."""
_OF_WORKER = (keys.plans(WorkerId("")), keys.control(WorkerId("")))
"""What the names of a worker's own streams begin with."""


class Trimmer:
    """One run's. Frees at most what was superfluous at the snapshot before, so whoever reads slowly still finds it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._safe = ""
        self._gone: set[str] = set()

    async def trim(self, cursor: str, workers: Collection[WorkerId]) -> None:
        """After a snapshot. cursor: last entry of the events log that is in the journal.  workers: that count now."""
        if self._safe:
            await self._broker.trim(keys.EVENTS, self._safe)
        self._safe = cursor
        own = {f"{prefix}{worker}" for prefix in _OF_WORKER for worker in workers}
        streams = await self._broker.streams()
        gone = {stream for stream in streams if stream.startswith(_OF_WORKER) and stream not in own}
        for stream in sorted(gone & self._gone):
            await self._broker.delete_stream(stream)
        self._gone = gone
        control = [keys.control(worker) for worker in workers]
        for log in (keys.WEIGHTS, *control):
            if streams.get(log, 0) > 2 * KEPT_ENTRIES:
                await self._keep_newest(log)

    async def _keep_newest(self, log: str) -> None:
        newest = await self._broker.tail(log, count=KEPT_ENTRIES + 1)
        await self._broker.trim(log, newest[0].entry_id)
