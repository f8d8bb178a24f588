"""How one consumer of a task gets its next rows: whoever asks first, or balanced by tokens over the ranks.

    first_come       tasks:<task> ──► any consumer that asks
    token_balanced   tasks:<task> ──► rank 0 deals ──► tasks:<task>.<rank>, one part a deal for every rank ──► its rank

Rank 0 moves rows to the ranks' own queues in one atomic step with their acknowledgement, so a row is in exactly one
queue whenever rank 0 dies. Every deal gives each rank one part (the last may be empty), so that ranks that meet in a
collective after each batch make the same number of steps. Source: AsyncFlow sec. 3.3, "equitable distribution of
processed tokens across DP groups".

Owns: the order in which rows are handed out, the end of a stream. Never: reads what is in the rows, but for their
lengths when it deals.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from transport.broker import keys
from transport.broker.base import Append, Broker, Commit, Delivery, Entry
from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import Column, RowId, is_evaluation
from transport.process.clock import Clock
from transport.rows.columns import RowStore
from workers.client import tasks
from workers.client.batch import read_rows
from workers.client.tasks import TaskOptions
from workers.leases.leases import Leases

log = logging.getLogger(__name__)  # not structlog: the program that uses the client decides where lines go

POLL_S = 0.25
"""How long one claim waits; also how late the end of a stream, or a lease that ran out, may be seen."""
Policy: TypeAlias = Literal["first_come", "token_balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Rows handed out together. over: none are left and none will come."""

    row_ids: list[RowId] = field(default_factory=list[RowId])
    deliveries: list[Delivery] = field(default_factory=list[Delivery])
    over: bool = False


class Part(msgspec.Struct, frozen=True):
    """Payload of a rank's entry: its rows of one deal."""

    row_ids: tuple[RowId, ...]


_part_decoder = MessageDecoder(Part)


class TaskLeases(Leases):
    """Leases on entries of a user's task. Those that are claimed and not handed out yet are ready."""

    def __init__(self, broker: Broker, queue: str, consumer: str, options: TaskOptions, clock: Clock) -> None:
        super().__init__(
            broker,
            queue,
            consumer,
            clock,
            lease_s=options.lease_s,
            max_deliveries=options.max_deliveries,
            report=log.warning,
        )
        self._ready: list[Delivery] = []

    @property
    def num_ready(self) -> int:
        """Entries that can be handed out at once."""
        return len(self._ready)

    async def fill(self, count: int, wait_s: float) -> bool:
        """Claim until ``count`` entries are ready. Returns whether they are; False when none came for ``wait_s``."""
        missing = count - len(self._ready)
        if missing > 0:
            self._ready += await self._without_evaluations(await self.claim(missing, wait_s=wait_s))
        return len(self._ready) >= count

    async def _without_evaluations(self, found: Sequence[Delivery]) -> list[Delivery]:
        """Answers to held-out problems have the columns of any row, and consumers of rows may train on them."""
        answers = [one.entry_id for one in found if is_evaluation(one.entry.fields.get("unit", ""))]
        if answers:
            await self._broker.commit(Commit(acks=self.acks(answers)))
            self.release(answers)
        return [delivery for delivery in found if delivery.entry_id not in answers]

    def take(self, count: int) -> list[Delivery]:
        """Hand out up to ``count`` of what is ready, oldest first."""
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def release(self, entry_ids: Iterable[str]) -> None:
        """As Leases; what is released is not handed out either."""
        released = set(entry_ids)
        super().release(released)
        self._ready = [delivery for delivery in self._ready if delivery.entry_id not in released]


async def no_work_to_stop(entry_ids: Collection[str]) -> None:
    """What a lost lease means is found out when its batch is done (``Leases.lost``)."""


class FirstCome:
    """Rows in the order in which they became ready, for whoever asks."""

    def __init__(self, broker: Broker, task: str, consumer: str, options: TaskOptions, clock: Clock) -> None:
        self._broker = broker
        self._task = task
        self._clock = clock
        self.leases = TaskLeases(broker, keys.tasks(task), consumer, options, clock)

    async def keep(self) -> None:
        await self.leases.keep(no_work_to_stop)

    async def take(self, count: int, wait_s: float) -> Portion:
        """Up to ``count`` rows: all of them as soon as they are there, fewer when ``wait_s`` or the stream is over."""
        over = await wait_filled(self.leases, count, wait_s, self._clock, self._is_over)
        deliveries = self.leases.take(count)
        row_ids = [RowId(delivery.entry.fields["unit"]) for delivery in deliveries]
        return Portion(row_ids=row_ids, deliveries=deliveries, over=over and not deliveries)

    async def _is_over(self) -> bool:
        return await tasks.has_ended(self._broker, self._task) and not await self.leases.others_left()


class TokenBalanced:
    """One rank's parts of what rank 0 deals. Each batch is a part, whatever number of rows that is.

    balance_by: the column whose number of elements is a row's weight.
    """

    def __init__(
        self,
        broker: Broker,
        rows: RowStore,
        task: str,
        consumer: str,
        options: TaskOptions,
        clock: Clock,
        *,
        balance_by: Column,
        rank: int,
        world: int,
    ) -> None:
        self._broker = broker
        self._rows = rows
        self._task = task
        self._clock = clock
        self._balance_by = balance_by
        self._rank = rank
        self._world = world
        self._all = TaskLeases(broker, keys.tasks(task), consumer, options, clock)
        self.leases = TaskLeases(broker, self._queue(rank), consumer, options, clock)

    def _queue(self, rank: int) -> str:
        return keys.tasks(f"{self._task}.{rank}")

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._all.keep(no_work_to_stop), name=f"{self._task} leases")
            group.create_task(self.leases.keep(no_work_to_stop), name=f"{self._task} leases of rank {self._rank}")

    async def take(self, count: int, wait_s: float) -> Portion:
        """This rank's next part; rank 0 deals one when there is none. count: rows of each rank, on average."""
        if self._rank == 0 and not await self.leases.fill(1, 0.0):
            await self._deal(count, wait_s)
            wait_s = 0.0
        over = await wait_filled(self.leases, 1, wait_s, self._clock, self._is_over)
        deliveries = self.leases.take(1)
        row_ids = [row for one in deliveries for row in _part_decoder.decode(one.entry.payload).row_ids]
        return Portion(row_ids=row_ids, deliveries=deliveries, over=over and not deliveries)

    async def _deal(self, count: int, wait_s: float) -> None:
        """Give every rank its part of the next ``count * world`` rows, or of the last ones of the stream."""
        wanted = count * self._world
        over = await wait_filled(self._all, wanted, wait_s, self._clock, self._all_is_over)
        if not over and self._all.num_ready < wanted:
            return  # too few by now: they stay ready for the next call
        deliveries = self._all.take(wanted)
        if not deliveries:
            return
        row_ids = [RowId(delivery.entry.fields["unit"]) for delivery in deliveries]
        parts = balance(await self._weights(row_ids), self._world)
        appends = [self._append(rank, [row_ids[place] for place in part]) for rank, part in enumerate(parts)]
        # if_held: another incarnation of rank 0 may have dealt them meanwhile
        entry_ids = [delivery.entry_id for delivery in deliveries]
        await self._broker.commit(Commit(acks=self._all.acks(entry_ids), appends=appends, if_held=True))
        self._all.release(entry_ids)

    async def _weights(self, row_ids: Sequence[RowId]) -> list[int]:
        found, columns = await read_rows(self._rows, row_ids, [self._balance_by])
        lengths = dict(zip(found, map(np.size, columns[self._balance_by]), strict=True))
        return [lengths.get(row_id, 0) for row_id in row_ids]

    def _append(self, rank: int, row_ids: list[RowId]) -> Append:
        fields = {"task": self._task, "rank": str(rank), "rows": str(len(row_ids))}
        entry = Entry(fields=fields, payload=encode(Part(row_ids=tuple(row_ids))))
        return Append(stream=self._queue(rank), entry=entry)

    async def _all_is_over(self) -> bool:
        return await tasks.has_ended(self._broker, self._task) and not await self._all.others_left()

    async def _is_over(self) -> bool:
        """Everything was dealt, and this rank has nothing left. In this order, or a deal could slip between."""
        if not await tasks.has_ended(self._broker, self._task) or await self._broker.length(keys.tasks(self._task)):
            return False
        return not await self.leases.others_left()


async def wait_filled(
    leases: TaskLeases, count: int, wait_s: float, clock: Clock, is_over: Callable[[], Awaitable[bool]]
) -> bool:
    """Wait until ``count`` entries are ready, the stream is over, or ``wait_s`` has passed. Returns whether it is over:
    then what is ready is the last there is."""
    deadline_s = clock.now_s() + wait_s
    while True:
        left_s = deadline_s - clock.now_s()
        if await leases.fill(count, max(0.0, min(POLL_S, left_s))):
            return False
        if await is_over():
            return True
        if left_s <= 0:
            return False


def balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Places of ``weights`` in ``parts`` lists of nearly equal sums: heaviest first, each to the lightest list (LPT, at
    most 4/3 of the best largest sum; Graham 1969). Places ascend within a list."""
    result: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]  # sum, rows, part
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        total, num_rows, part = heap[0]
        result[part].append(place)
        heapq.heapreplace(heap, (total + weights[place], num_rows + 1, part))
    return [sorted(places) for places in result]
