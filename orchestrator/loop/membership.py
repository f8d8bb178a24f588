"""Who is alive: leases in the broker become WorkerJoined and WorkerLost events.

Owns: how long each worker has been silent. Never: what follows from it. Invariant: silence counts only while the broker
was reachable and took writes, so that neither its outage nor its being full ever costs a worker its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import structlog

from orchestrator.loop.intake import Arrival, Inbox
from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import STARTING, WorkerJoined, WorkerLost, WorkerStatus, worker_status_decoder
from transport.contracts.types import PROTOCOL_VERSION, WorkerId
from transport.errors import MessageError
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

ExpectedWorkers = Callable[[], Iterable[WorkerId]]
"""Workers that the core counts on."""

POLL_S = 0.5
RETURN_POLLS = 4
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


class Newcomers:
    """Which leases are workers that the core does not count on yet. Pure, like SilenceClock."""

    def __init__(self) -> None:
        self._known: set[WorkerId] = set()
        self._polls: dict[WorkerId, int] = {}

    def poll(self, expected: Iterable[WorkerId], alive: Mapping[WorkerId, WorkerStatus]) -> list[WorkerStatus]:
        """Statuses of workers to be joined now, in order of id.

        A worker that the core once counted on and gave up must be seen RETURN_POLLS times in a row: the lease of one
        that has just died may still be in the answer.
        """
        counted = set(expected)
        self._known |= counted
        unknown = [worker for worker in sorted(alive) if worker not in counted and alive[worker].doing != STARTING]
        self._polls = {worker: self._polls.get(worker, 0) + 1 for worker in unknown}
        return [
            alive[worker] for worker in unknown if self._polls[worker] >= (RETURN_POLLS if worker in self._known else 1)
        ]


class Membership:
    """Polls the leases; keeps the last status of everyone for the status page."""

    def __init__(self, broker: Broker, lease_s: float, clock: Clock) -> None:
        self._broker = broker
        self._silence = SilenceClock(lease_s)
        self._newcomers = Newcomers()
        self._clock = clock
        self._decoded: dict[WorkerId, tuple[bytes, WorkerStatus | None]] = {}
        self.statuses: dict[WorkerId, WorkerStatus] = {}

    async def watch(self, inbox: Inbox, expected: ExpectedWorkers) -> None:
        """Put WorkerJoined and WorkerLost into the inbox as leases come and go, forever."""
        while True:
            await self._broker.put_meta(keys.TAKES_WRITES, b"")
            self.statuses = self._decode(await self._broker.leases())
            counted = set(expected())
            for status in self._newcomers.poll(counted, self.statuses):
                log.info("worker joined", worker=status.worker_id, capacity=status.capacity)
                joined = WorkerJoined(
                    worker_id=status.worker_id, kind=status.kind, capacity=status.capacity, weights=status.weights
                )
                await inbox.put(Arrival(joined))
            for worker in self._silence.poll(counted, self.statuses, self._clock.now_s()):
                log.warning("worker lost", worker=worker)
                await inbox.put(Arrival(WorkerLost(worker_id=worker, reason="its lease ran out")))
            await asyncio.sleep(POLL_S)

    def _decode(self, leases: Mapping[WorkerId, bytes]) -> dict[WorkerId, WorkerStatus]:
        """Statuses of those that speak our protocol. One is decoded when it changes: every few seconds, of many."""
        for worker, raw in leases.items():
            if self._decoded.get(worker, (b"",))[0] != raw:
                self._decoded[worker] = (raw, _decoded(worker, raw))
        self._decoded = {worker: self._decoded[worker] for worker in leases}
        return {worker: status for worker, (_, status) in self._decoded.items() if status is not None}


def read_statuses(leases: Mapping[WorkerId, bytes]) -> dict[WorkerId, WorkerStatus]:
    """What live workers report of themselves; the orchestrator's log names leases that cannot be read."""
    statuses: dict[WorkerId, WorkerStatus] = {}
    for worker, raw in leases.items():
        with suppress(MessageError):
            statuses[worker] = worker_status_decoder.decode(raw)
    return statuses


def _decoded(worker: WorkerId, raw: bytes) -> WorkerStatus | None:
    """None for one that is not of ours: named in the log, and never joined."""
    try:
        status = worker_status_decoder.decode(raw)
    except MessageError as error:
        log.warning("unreadable lease", worker=worker, error=str(error))
        return None
    if PROTOCOL_VERSION - 1 <= status.protocol <= PROTOCOL_VERSION:
        return status
    log.warning("worker of another protocol version", worker=worker, protocol=status.protocol)
    return None
