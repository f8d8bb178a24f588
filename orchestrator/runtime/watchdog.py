"""No progress is an event too: it is named, and in the end it stops the run with its own exit code.

Owns: when something last progressed. Never: what to do about a slow worker (the core has deadlines for that).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from orchestrator.errors import StalledError
from transport.clock import Clock
from transport.messages import BrokerUsage, Event, RolloutFailed, Tick, WeightsFailed, WorkerLost, WorkerReported

log = structlog.get_logger(__name__)

CHECK_S = 1.0
NO_PROGRESS = (Tick, BrokerUsage, WorkerReported, RolloutFailed, WeightsFailed, WorkerLost)
"""Events that may repeat forever while nothing gets done."""


class Watchdog:
    """Counts seconds since the last event that means progress."""

    def __init__(self, stall_s: float, clock: Clock) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._progress_s = clock.now_s()
        self._warned = False

    def observe(self, event: Event) -> None:
        if not isinstance(event, NO_PROGRESS):
            self._progress_s = self._clock.now_s()
            self._warned = False

    def check(self, describe: Callable[[], str]) -> None:
        """Warn at half the limit, with what ``describe`` says is blocked. Raises StalledError at the limit."""
        still_s = self._clock.now_s() - self._progress_s
        if still_s >= self._stall_s:
            raise StalledError(f"no progress for {still_s:.0f} s: {describe()}; everything is kept for --resume")
        if still_s >= self._stall_s / 2 and not self._warned:
            self._warned = True
            log.warning("no progress", seconds=round(still_s), blocked=describe())

    async def watch(self, describe: Callable[[], str]) -> None:
        """Check forever."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.check(describe)
