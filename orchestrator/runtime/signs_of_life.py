"""Local processes that live and do nothing: seen from outside, ended, and started again like any that died.

A stopped, deadlocked or never ending start cannot report itself, and the orchestrator, which everyone waits for, has
nobody above it but the supervisor. A sign of life is, of a worker, a lease that says more than "starting"; of the
orchestrator, a status that is not stale.

Owns: two deadlines of every child, ``liveness.startup_s`` to come and SILENCES leases once it came. Never: what follows
for the work it held (leases see to that).
Invariant: silence counts only while the broker answers and takes writes, and anew for every process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

import structlog

from orchestrator.runtime.membership import SilenceClock
from transport.broker import keys
from transport.broker.base import Broker
from transport.clock import Clock
from transport.errors import MessageError, TransientError
from transport.messages import STARTING, worker_status_decoder
from transport.types import WorkerId

log = structlog.get_logger(__name__)

LOOK_S = 1.0
SILENCES = 6
"""Leases in a row that may run out: its work went to others after one, and a machine can be very busy."""
ORCHESTRATOR = "orchestrator"


class Processes(Protocol):
    """The local children (provision.Children)."""

    def pids(self) -> Mapping[str, int]: ...

    def end(self, name: str) -> None: ...


class SignsOfLife:
    """Looks at ``processes`` through ``broker``; ends one that gives no sign of life.

    startup_s: to the first one of a process.  silence_s: since then.
    """

    def __init__(
        self, broker: Broker, processes: Processes, clock: Clock, *, startup_s: float, silence_s: float
    ) -> None:
        self._broker = broker
        self._processes = processes
        self._clock = clock
        self._starting = SilenceClock(startup_s)
        self._started = SilenceClock(silence_s)
        self._came: set[WorkerId] = set()

    async def watch(self, tell: Callable[[str], None]) -> None:
        """Look forever; ``tell`` hears of every process that is ended."""
        while True:
            with suppress(TransientError):
                for name in await self.look():
                    tell(f"{name} gave no sign of life for too long; starting it again")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> list[str]:
        """One look. Returns the names of the processes that were ended. Raises what the broker raises."""
        alive, now_s = await self._alive(), self._clock.now_s()
        pids = self._processes.pids()
        named = {WorkerId(f"{name} {pid}"): name for name, pid in pids.items()}
        living = {key for key, name in named.items() if pids[name] in alive}
        self._came = (self._came | living) & named.keys()
        silent = self._starting.poll(named.keys() - self._came, living, now_s)
        silent += self._started.poll(self._came, living, now_s)
        for key in silent:
            log.warning("no sign of life; ending it", process=named[key], came=key in self._came)
            self._processes.end(named[key])
        return [named[key] for key in silent]

    async def _alive(self) -> set[int]:
        """Process ids of this host's children that gave a sign of life."""
        await self._broker.put_meta(keys.TAKES_WRITES, b"")
        leases = await self._broker.leases()
        alive = {pid for pid in map(_pid_at_work, leases.values()) if pid is not None}
        orchestrator = self._processes.pids().get(ORCHESTRATOR)
        if orchestrator is not None and await self._broker.get_meta(keys.STATUS) is not None:
            alive.add(orchestrator)
        return alive


def _pid_at_work(lease: bytes) -> int | None:
    """The process behind a lease, if it is one of this host and past its start."""
    try:
        status = worker_status_decoder.decode(lease)
    except MessageError:
        return None
    return status.pid if status.host == socket.gethostname() and status.doing != STARTING else None
