"""One consumer's share of one queue: entries that it claimed, kept until they are acknowledged.

    waiting in the queue ──► ready (claimed, not handed out) ──► handed out ──► acknowledged
          ▲                        └──────────── leases renewed ────────┘
          └── the lease ran out (this process died or hung): the next consumer that looks reclaims it

Owns: leases and what became of them. Never: what an entry means. Invariant: an entry is handed out once by this object;
one whose lease was lost is neither handed out nor acknowledged here any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from transport.broker.base import Ack, Broker, Commit, Delivery
from transport.clock import Clock
from transport.types import is_evaluation
from workers.client.tasks import TaskOptions

log = logging.getLogger(__name__)  # not structlog: whose program this is decides where lines go

POLL_S = 0.25
"""How long one claim waits; also how late the end of a stream, or a lease that ran out, may be seen."""
RENEWALS_PER_LEASE = 3
"""Two renewals may be lost before a lease is."""


class Leases:
    """Claims entries of ``queue`` as ``consumer``. Used from one event loop; ``keep`` runs beside it."""

    def __init__(self, broker: Broker, queue: str, consumer: str, options: TaskOptions, clock: Clock) -> None:
        self._broker = broker
        self._queue = queue
        self._consumer = consumer
        self._options = options
        self._clock = clock
        self._ready: list[Delivery] = []
        self._held: set[str] = set()
        self._reclaim_due_s = self._renewed_s = clock.now_s()

    @property
    def num_ready(self) -> int:
        """Entries that can be handed out at once."""
        return len(self._ready)

    async def keep(self) -> None:
        """Renew every lease until cancelled."""
        while True:
            await asyncio.sleep(self._options.lease_s / RENEWALS_PER_LEASE)
            await self._renew()

    async def _renew(self) -> None:
        renewed_s, asked = self._clock.now_s(), list(self._held)
        kept = set(await self._broker.renew(self._queue, self._consumer, asked)) if asked else set[str]()
        self._renewed_s = renewed_s
        lost = (set(asked) - kept) & self._held  # without those that were acknowledged meanwhile
        if lost:
            log.warning("%s: the leases on %d entries are lost", self._queue, len(lost))
            self.forget(lost)

    async def fill(self, count: int, wait_s: float) -> bool:
        """Claim until ``count`` entries are ready. Returns whether they are; False when none came for ``wait_s``."""
        missing = count - len(self._ready)
        if missing <= 0:
            return True
        found = await self._reclaim(missing) or await self._broker.claim(
            self._queue, self._consumer, count=missing, wait_s=wait_s
        )
        fresh = await self._without_evaluations([one for one in found if one.entry_id not in self._held])
        self._held.update(delivery.entry_id for delivery in fresh)
        self._ready += fresh
        return len(self._ready) >= count

    async def _without_evaluations(self, found: Sequence[Delivery]) -> list[Delivery]:
        """Answers to held-out problems have the columns of any row, and whoever consumes rows may train on them."""
        answers = [delivery for delivery in found if is_evaluation(delivery.entry.fields.get("unit", ""))]
        if answers:
            await self._broker.commit(Commit(acks=self.acks(answers)))
        return [delivery for delivery in found if delivery not in answers]

    async def _reclaim(self, count: int) -> list[Delivery]:
        """Entries whose holder went silent, looked for twice a lease."""
        if self._clock.now_s() < self._reclaim_due_s:
            return []
        self._reclaim_due_s = self._clock.now_s() + self._options.lease_s / 2
        taken, dead = await self._broker.reclaim(
            self._queue,
            self._consumer,
            idle_s=self._options.lease_s,
            max_deliveries=self._options.max_deliveries,
            count=count,
        )
        for letter in dead:
            log.error("%s: entry %s is given up: %s", self._queue, letter.entry_id, letter.reason)
        return taken

    def take(self, count: int) -> list[Delivery]:
        """Hand out up to ``count`` of what is ready, oldest first."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    async def lost(self, deliveries: Sequence[Delivery], *, ask: bool = False) -> list[Delivery]:
        """Those that are not ours any more. The broker is asked when this process may have slept through a lease."""
        if deliveries and (ask or self._clock.now_s() - self._renewed_s > self._options.lease_s):
            await self._renew()
        return [delivery for delivery in deliveries if delivery.entry_id not in self._held]

    def acks(self, deliveries: Sequence[Delivery]) -> list[Ack]:
        """To be committed together with the effect; then ``forget`` them."""
        return [Ack(queue=self._queue, entry_id=delivery.entry_id) for delivery in deliveries]

    def forget(self, entry_ids: set[str]) -> None:
        """Renew these no longer: they are acknowledged, lost, or shall go to someone else."""
        self._held -= entry_ids
        self._ready = [delivery for delivery in self._ready if delivery.entry_id not in entry_ids]

    async def others_left(self) -> bool:
        """Whether the queue has an entry that is not ours: waiting, or held by another consumer."""
        return await self._broker.length(self._queue) > len(self._held)
