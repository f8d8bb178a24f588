"""The plan desk: computes plans of dispatch beside the loop that decides.

Owns: the plans to compute. Never: a rule; it calls the core's, on the values that a command carries.
Invariant: one plan at a time, in the order asked for, in a thread: pure Python lets the loop in every few milliseconds,
and a plan that comes too late is not waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import structlog

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.settings import CoreSettings
from orchestrator.loop.intake import Arrival, Inbox
from transport.contracts.messages import ComputePlan

log = structlog.get_logger(__name__)


class Planner:
    """``request`` never waits; ``run`` computes."""

    def __init__(self, settings: Callable[[], CoreSettings]) -> None:
        """settings: the core's, at the moment of planning."""
        self._settings = settings
        self._requests: dict[int, ComputePlan] = {}
        self._work = asyncio.Event()

    def request(self, command: ComputePlan) -> None:
        """Ask for a plan; it comes as PlanComputed. Of several for one batch, the last is the one that counts."""
        self._requests[command.batch] = command
        self._work.set()

    async def run(self, inbox: Inbox) -> None:
        """Answer requests in order, forever."""
        while True:
            await self._work.wait()
            command = self._requests.pop(next(iter(self._requests)))
            if not self._requests:
                self._work.clear()
            started_s = time.perf_counter()
            computed = await asyncio.to_thread(compute_plan, command, self._settings())
            seconds = time.perf_counter() - started_s
            log.info("planned", batch=command.batch, policy=computed.policy, ms=round(1e3 * seconds, 1))
            await inbox.put(Arrival(msgspec.structs.replace(computed, compute_s=seconds)))
