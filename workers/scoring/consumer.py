"""One worker's share of one scoring task: each unit is handled, and committed with its ack or given up by name.

    claim / reclaim ──► up to ``at_once`` units in work, each in a task of its own ──► commit(rows, appends, ack)
                          │ fails: tried again here, until its attempts are used up ──► dead letter + ScoringFailed
                          └ its lease went to another worker: the work on it stops

Attempts are deliveries and local tries together, so that neither a reward that raises nor one that kills its worker is
tried for ever. Whatever the handler wants written happens in the same step as the ack, and only if the unit is still
pending: a broker that lost its tail has no such unit, and the row that is generated in its place has another score.

Owns: attempts, dead letters. Never: leases (workers/leases); what a unit means. Invariant: a unit ends as committed
once or as a dead letter with its reason; it is never acknowledged without either, unless its group is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

from transport.broker import keys
from transport.broker.base import Append, Broker, Commit, Delivery, RowWrite
from transport.contracts.messages import ScoringFailed
from transport.contracts.types import GroupId, WorkerId
from transport.errors import MessageError
from transport.process import faults
from transport.process.clock import Clock
from transport.rows.columns import RowStore
from workers.errors import RewardError, RewardTimeoutError
from workers.leases.events import event_append
from workers.leases.leases import Leases
from workers.leases.lifecycle import BusyMeter

log = structlog.get_logger(__name__)

CLAIM_WAIT_S = 1.0
"""How long one claim waits for work; also how late a reclaim may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One unit of the task. unit_id: a row id or a group id."""

    unit_id: str
    group_id: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is to be written for one unit. Empty when its group is gone: then the unit is only acknowledged."""

    rows: Sequence[RowWrite] = ()
    appends: Sequence[Append] = ()


Handle = Callable[[Unit], Awaitable[Outcome]]
"""Works on one unit. RewardError: try again; MessageError: what was stored is bad, no retry helps."""


class TaskConsumer:
    """Consumes one task until cancelled.

    lease_s: a unit that its holder did not renew for so long is taken over.  max_attempts: of one unit.
    at_once: units in work together.
    """

    def __init__(
        self,
        broker: Broker,
        rows: RowStore,
        task: str,
        consumer: WorkerId,
        handle: Handle,
        *,
        clock: Clock,
        meter: BusyMeter,
        lease_s: float,
        max_attempts: int,
        at_once: int,
    ) -> None:
        self._rows = rows
        self._task = task
        self._consumer = consumer
        self._handle = handle
        self._meter = meter
        # one delivery more than allowed, so that the last one is given up here, together with its event
        self._leases = Leases(
            broker, keys.tasks(task), consumer, clock, lease_s=lease_s, max_deliveries=max_attempts + 1
        )
        self._max_attempts = max_attempts
        self._at_once = at_once
        self._working: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self.done = 0
        self.given_up = 0

    async def run(self) -> None:
        """Forever. Raises what the broker raises when it stays away."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._leases.keep(self._stop), name=f"{self._task} leases")
            while True:
                await self._wait_for_room()
                for delivery in await self._leases.claim(self._at_once - len(self._working), wait_s=CLAIM_WAIT_S):
                    faults.point("score.claimed")
                    work = group.create_task(self._work(delivery), name=f"{self._task} {delivery.entry_id}")
                    self._working[delivery.entry_id] = work

    async def _wait_for_room(self) -> None:
        while len(self._working) >= self._at_once:
            self._room.clear()
            await self._room.wait()

    async def _stop(self, entry_ids: Collection[str]) -> None:
        """Stop working on what another worker has taken over."""
        for entry_id in entry_ids:
            if entry_id in self._working:
                self._working[entry_id].cancel()

    async def _work(self, delivery: Delivery) -> None:
        self._meter.begin()
        try:
            await self._finish(delivery)
        finally:
            self._meter.end()
            self._working.pop(delivery.entry_id, None)
            self._leases.release([delivery.entry_id])
            self._room.set()

    async def _finish(self, delivery: Delivery) -> None:
        """Commit the unit, or move it to the dead letters."""
        unit = Unit(
            unit_id=delivery.entry.fields.get("unit", ""), group_id=GroupId(delivery.entry.fields.get("group", ""))
        )
        try:
            outcome = await self._attempt(unit, delivery.deliveries)
        except (RewardError, MessageError) as error:
            await self._give_up(delivery, unit, str(error))
            return
        acks = self._leases.acks([delivery.entry_id])
        await self._rows.commit(Commit(rows=outcome.rows, appends=outcome.appends, acks=acks, if_held=True))
        faults.point("score.committed")
        self.done += 1

    async def _attempt(self, unit: Unit, deliveries: int) -> Outcome:
        """Try until the attempts are used up, or one took too long: it would again. Raises the last error."""
        if not unit.unit_id or not unit.group_id:
            raise MessageError("the notice names no unit or no group")
        failure = RewardError(f"given up after {deliveries - 1} deliveries: the workers that held it died")
        for attempt in range(deliveries, self._max_attempts + 1):
            try:
                return await self._handle(unit)
            except RewardError as error:
                log.warning("unit failed", task=self._task, unit=unit.unit_id, attempt=attempt, reason=str(error))
                failure = error
                if isinstance(error, RewardTimeoutError):
                    break
        raise failure

    async def _give_up(self, delivery: Delivery, unit: Unit, reason: str) -> None:
        """Dead-letter the unit and report it, in one step: its slot gets another group."""
        log.error("unit given up", task=self._task, unit=unit.unit_id, reason=reason)
        shown = f"{self._task} of {unit.unit_id or '(nothing)'}: {reason}"
        failed = ScoringFailed(group_id=unit.group_id, reason=shown)
        appends = [event_append(failed, group=unit.group_id, worker=self._consumer)] if unit.group_id else []
        await self._leases.reject(delivery, shown, appends=appends)
        self.given_up += 1
