"""Who is alive: leases in the broker become WorkerLost events.

Owns: how long each worker has been silent. Never: what follows from it. Invariant: silence counts only while the broker
was reachable, so an outage of the broker never costs a worker its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from orchestrator.runtime.intake import Arrival, Inbox
from transport.broker.base import Broker
from transport.clock import Clock
from transport.errors import MessageError
from transport.messages import WorkerLost, WorkerStatus, worker_status_decoder
from transport.types import WorkerId

log = structlog.get_logger(__name__)

ExpectedWorkers = Callable[[], Iterable[WorkerId]]

POLL_S = 1.0
MAX_POLL_GAP_S = 3.0
"""A poll that comes later than this after the one before says that the broker (or this process) was away."""


class SilenceClock:
    """Seconds of observed silence per worker. Pure, so that its rule can be tested without a broker."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._silent_s: dict[WorkerId, float] = {}
        self._last_poll_s: float | None = None

    def poll(self, expected: Iterable[WorkerId], alive: Iterable[WorkerId], now_s: float) -> list[WorkerId]:
        """Workers whose observed silence has just passed the lease, in order of id.

        expected: workers that the core counts on.  alive: those whose lease is held at ``now_s``.
        """
        gap_s = 0.0 if self._last_poll_s is None else now_s - self._last_poll_s
        counted_s = gap_s if gap_s <= MAX_POLL_GAP_S else 0.0
        self._last_poll_s = now_s
        living = set(alive)
        silent = {worker: self._silent_s.get(worker, 0.0) + counted_s for worker in expected if worker not in living}
        lost = sorted(worker for worker, seconds in silent.items() if seconds > self._lease_s)
        self._silent_s = {worker: seconds for worker, seconds in silent.items() if worker not in lost}
        return lost


class Membership:
    """Polls the leases; keeps the last status of everyone for the status page."""

    def __init__(self, broker: Broker, lease_s: float, clock: Clock) -> None:
        self._broker = broker
        self._silence = SilenceClock(lease_s)
        self._clock = clock
        self.statuses: dict[WorkerId, WorkerStatus] = {}

    async def watch(self, inbox: Inbox, expected: ExpectedWorkers) -> None:
        """Put WorkerLost into the inbox for each expected worker that fell silent, forever."""
        while True:
            leases = await self._broker.leases()
            self.statuses = _decode(leases)
            for worker in self._silence.poll(expected(), leases, self._clock.now_s()):
                log.warning("worker lost", worker=worker)
                await inbox.put(Arrival(WorkerLost(worker_id=worker, reason="its lease ran out")))
            await asyncio.sleep(POLL_S)


def _decode(leases: dict[WorkerId, bytes]) -> dict[WorkerId, WorkerStatus]:
    statuses: dict[WorkerId, WorkerStatus] = {}
    for worker, raw in leases.items():
        try:
            statuses[worker] = worker_status_decoder.decode(raw)
        except MessageError as error:
            log.warning("unreadable lease", worker=worker, error=str(error))
    return statuses
