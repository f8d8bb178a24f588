"""One consumer's leases on the entries of one queue.

    waiting in the queue ──► held: claimed here, renewed while in work ──► acknowledged with its effect, or rejected
          ▲                          │
          └── the lease ran out: this process died, hung or was cut off; another consumer reclaims the entry

Owns: which entries are held, and their renewal. Never: what an entry means. Invariant: an entry is handed out once by
this object; one whose lease went to another consumer is reported as lost, once, and is not held any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

import structlog

from transport.broker.base import Ack, Append, Broker, Delivery
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

RENEWALS_PER_LEASE = 3
"""Two renewals may be lost before a lease is."""

OnLost = Callable[[Collection[str]], Awaitable[None]]
"""Stops the work on these entries: another consumer has them."""


class Leases:
    """Of ``consumer`` on ``queue``. Used from one event loop; ``keep`` runs beside the rest.

    lease_s: an entry that its holder did not renew for so long may be reclaimed.  max_deliveries: an entry that was
    delivered so often is moved to the dead letters instead; None: this consumer reclaims nothing.
    report: gets a line on what was lost or moved there; the log does by default.
    """

    def __init__(
        self,
        broker: Broker,
        queue: str,
        consumer: str,
        clock: Clock,
        *,
        lease_s: float,
        max_deliveries: int | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._consumer = consumer
        self._clock = clock
        self._lease_s = lease_s
        self._max_deliveries = max_deliveries
        self._report = report or log.warning
        self._held: dict[str, None] = {}  # an ordered set
        self._reclaim_due_s = self._renewed_s = clock.now_s()

    async def claim(self, count: int, *, wait_s: float) -> list[Delivery]:
        """Up to ``count`` entries that are held from now on: reclaimed ones, else new ones, for which it waits.

        Nothing is awaited between the broker's answer and the return, so a caller that lists what it holds misses none.
        """
        found = await self._reclaim(count) or await self._broker.claim(
            self._queue, self._consumer, count=count, wait_s=wait_s
        )
        fresh = [delivery for delivery in found if delivery.entry_id not in self._held]
        self._held.update(dict.fromkeys(delivery.entry_id for delivery in fresh))
        return fresh

    async def _reclaim(self, count: int) -> list[Delivery]:
        """Entries whose holder stopped renewing; looked for twice a lease."""
        if self._max_deliveries is None or self._clock.now_s() < self._reclaim_due_s:
            return []
        self._reclaim_due_s = self._clock.now_s() + self._lease_s / 2
        taken, dead = await self._broker.reclaim(
            self._queue, self._consumer, idle_s=self._lease_s, max_deliveries=self._max_deliveries, count=count
        )
        for letter in dead:
            self._report(f"{self._queue}: entry {letter.entry_id} is given up: {letter.reason}")
        return taken

    async def keep(self, on_lost: OnLost) -> None:
        """Renew what is held, forever."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            if lost := await self.renew():
                await on_lost(lost)

    async def renew(self) -> list[str]:
        """Renew what is held. Returns the entries that were lost; those acknowledged meanwhile are not among them."""
        renewed_s, asked = self._clock.now_s(), list(self._held)
        kept = set(await self._broker.renew(self._queue, self._consumer, asked)) if asked else set[str]()
        self._renewed_s = renewed_s
        lost = [entry_id for entry_id in asked if entry_id not in kept and entry_id in self._held]
        if lost:
            self._report(f"{self._queue}: the leases on {len(lost)} entries are lost")
            self.release(lost)
        return lost

    async def lost(self, entry_ids: Collection[str], *, ask: bool = False) -> list[str]:
        """Those that are not held any more. The broker is asked when this process may have slept through a lease."""
        if entry_ids and (ask or self._clock.now_s() - self._renewed_s > self._lease_s):
            await self.renew()
        return [entry_id for entry_id in entry_ids if entry_id not in self._held]

    def acks(self, entry_ids: Iterable[str]) -> list[Ack]:
        """For the commit of their effect, after which they are ``release``d."""
        return [Ack(queue=self._queue, entry_id=entry_id) for entry_id in entry_ids]

    async def reject(self, delivery: Delivery, reason: str, *, appends: Sequence[Append] = ()) -> None:
        """Move an entry to the dead letters, in one step with ``appends``."""
        await self._broker.reject(delivery, reason, appends=appends)
        self.release([delivery.entry_id])

    def release(self, entry_ids: Iterable[str]) -> None:
        """Renew these no longer: they are acknowledged, lost, or given back."""
        for entry_id in entry_ids:
            self._held.pop(entry_id, None)

    async def others_left(self) -> bool:
        """Whether the queue has an entry that is not held here: waiting, or held by another consumer."""
        return await self._broker.length(self._queue) > len(self._held)
