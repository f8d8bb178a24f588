"""How one consumer of a task gets its rows, a batch at a time, and is done with them.

    first_come       tasks:<task> ──► any consumer that asks
    token_balanced   tasks:<task> ──► rank 0 deals ──► tasks:<task>.<rank>, one part a deal for every rank ──► its rank

Rank 0 moves rows to the ranks' own queues in one atomic step with their acknowledgement, so a row is in exactly one
queue whenever rank 0 dies. Every deal gives each rank one part (the last may be empty), so that ranks that meet in a
collective after each batch make the same number of steps. Source: AsyncFlow sec. 3.3, "equitable distribution of
processed tokens across DP groups".

Owns: the order in which rows are handed out, the end of a stream, which batch is held, the task that renews its leases.
Invariant: the batch before is acknowledged, or given up by name, before the next one is handed out.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from transport.broker import keys
from transport.broker.base import Append, Broker, Commit, Delivery, Entry
from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import Column, RowId, is_evaluation
from transport.errors import first_error
from transport.process.clock import Clock
from transport.rows.columns import RowStore
from workers.client import tasks
from workers.client.batch import ExperienceBatch, read_rows
from workers.client.tasks import TaskOptions
from workers.client.writer import check_inserted
from workers.errors import LeaseLostError
from workers.leases.lifecycle import Leases

log = logging.getLogger(__name__)  # not structlog: the program that uses the client decides where lines go

POLL_S = 0.25  # how long one claim waits; also how late the end of a stream, or a lease that ran out, may be seen
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
    """Leases on entries of a user's task, or on those that were dealt to one ``rank`` of it."""

    def __init__(
        self, broker: Broker, task: str, consumer: str, options: TaskOptions, clock: Clock, *, rank: int | None = None
    ) -> None:
        super().__init__(
            broker,
            keys.tasks(task if rank is None else f"{task}.{rank}"),
            consumer,
            clock,
            lease_s=options.lease_s,
            max_deliveries=options.max_deliveries,
            report=log.warning,
        )
        self.task = task
        self.ready: list[Delivery] = []  # claimed, and not handed out yet

    async def fill(self, count: int, wait_s: float) -> bool:
        """Claim until ``count`` entries are ready. Returns whether they are; False when none came for ``wait_s``."""
        missing = count - len(self.ready)
        if missing > 0:
            found = await self.claim(missing, wait_s=wait_s)
            # Answers to held-out problems have the columns of any row, and consumers of rows may train on them.
            answers = [one.entry_id for one in found if is_evaluation(one.entry.fields.get("unit", ""))]
            if answers:
                await self._broker.commit(Commit(acks=self.acks(answers)))
                self.release(answers)
            self.ready += [delivery for delivery in found if delivery.entry_id not in answers]
        return len(self.ready) >= count

    async def wait_filled(self, count: int, wait_s: float) -> bool:
        """Wait until ``count`` entries are ready, the stream is over, or ``wait_s`` has passed. Returns whether it is
        over: then what is ready is the last there is."""
        deadline_s = self._clock.now_s() + wait_s
        while True:
            left_s = deadline_s - self._clock.now_s()
            if await self.fill(count, max(0.0, min(POLL_S, left_s))):
                return False
            if await self._is_over():
                return True
            if left_s <= 0:
                return False

    async def _is_over(self) -> bool:
        """Everything was dealt, and nothing is left here. In this order, or a deal could slip between."""
        if not await tasks.has_ended(self._broker, self.task):
            return False
        if self._queue != keys.tasks(self.task) and await self._broker.length(keys.tasks(self.task)):
            return False
        return not await self.others_left()

    def take(self, count: int) -> list[Delivery]:
        """Hand out up to ``count`` of what is ready, oldest first."""
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def release(self, entry_ids: Iterable[str]) -> None:
        """As Leases; what is released is not handed out either."""
        released = set(entry_ids)
        super().release(released)
        self.ready = [delivery for delivery in self.ready if delivery.entry_id not in released]


async def no_work_to_stop(entry_ids: Collection[str]) -> None:
    """What a lost lease means is found out when its batch is done (``Leases.lost``)."""


class FirstCome:
    """Rows in the order in which they became ready, for whoever asks. leases: of what ``take`` hands out."""

    def __init__(self, leases: TaskLeases) -> None:
        self.leases = leases

    async def keep(self) -> None:
        await self.leases.keep(no_work_to_stop)

    async def take(self, count: int, wait_s: float) -> Portion:
        """Up to ``count`` rows: all of them as soon as they are there, fewer when ``wait_s`` or the stream is over."""
        over = await self.leases.wait_filled(count, wait_s)
        deliveries = self.leases.take(count)
        row_ids = [RowId(delivery.entry.fields["unit"]) for delivery in deliveries]
        return Portion(row_ids=row_ids, deliveries=deliveries, over=over and not deliveries)


class TokenBalanced:
    """One rank's parts of what rank 0 deals. Each batch is a part, whatever number of rows that is."""

    def __init__(
        self, undealt: TaskLeases, leases: TaskLeases, rows: RowStore, *, balance_by: Column, rank: int, world: int
    ) -> None:
        self._undealt = undealt  # of the whole task
        self.leases = leases  # of this rank
        self._rows = rows
        self._balance_by = balance_by  # a row weighs as much as its value here has elements
        self._rank = rank
        self._world = world

    async def keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            task = self.leases.task
            group.create_task(self._undealt.keep(no_work_to_stop), name=f"{task} leases")
            group.create_task(self.leases.keep(no_work_to_stop), name=f"{task} leases of rank {self._rank}")

    async def take(self, count: int, wait_s: float) -> Portion:
        """This rank's next part; rank 0 deals one when there is none. count: rows of each rank, on average."""
        if self._rank == 0 and not await self.leases.fill(1, 0.0):
            await self._deal(count * self._world, wait_s)
            wait_s = 0.0
        over = await self.leases.wait_filled(1, wait_s)
        deliveries = self.leases.take(1)
        row_ids = [row for one in deliveries for row in _part_decoder.decode(one.entry.payload).row_ids]
        return Portion(row_ids=row_ids, deliveries=deliveries, over=over and not deliveries)

    async def _deal(self, count: int, wait_s: float) -> None:
        """Give every rank its part of the next ``count`` rows, or of the last ones of the stream."""
        over = await self._undealt.wait_filled(count, wait_s)
        if not over and len(self._undealt.ready) < count:
            return  # too few by now: they stay ready for the next call
        deliveries = self._undealt.take(count)
        if not deliveries:
            return
        row_ids = [RowId(delivery.entry.fields["unit"]) for delivery in deliveries]
        found, columns = await read_rows(self._rows, row_ids, [self._balance_by])
        lengths = dict(zip(found, map(np.size, columns[self._balance_by]), strict=True))
        parts = balance([lengths.get(row_id, 0) for row_id in row_ids], self._world)
        task, appends = self.leases.task, list[Append]()
        for rank, places in enumerate(parts):
            fields = {"task": task, "rank": str(rank), "rows": str(len(places))}
            part = encode(Part(row_ids=tuple(row_ids[place] for place in places)))
            appends.append(Append(stream=keys.tasks(f"{task}.{rank}"), entry=Entry(fields=fields, payload=part)))
        # if_held: another incarnation of rank 0 may have dealt them meanwhile
        entry_ids = [delivery.entry_id for delivery in deliveries]
        await self._rows.commit(Commit(acks=self._undealt.acks(entry_ids), appends=appends, if_held=True))
        self._undealt.release(entry_ids)


Source: TypeAlias = FirstCome | TokenBalanced


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


class Consumption:
    """One consumer's batches, one at a time. Used from the loop's thread. key: what a batch is known by."""

    def __init__(self, rows: RowStore, key: str, source: Source) -> None:
        self._rows = rows
        self._key = key
        self._source = source
        self._task = source.leases.task
        self._held = Portion()
        self._keeper: asyncio.Task[None] | None = None

    async def next(self, columns: Sequence[Column], count: int, wait_s: float) -> ExperienceBatch:
        """As Client.get_experience_data."""
        if self._keeper is None:  # owned here, because callers come and go between two calls
            self._keeper = asyncio.create_task(self._source.keep(), name=f"{self._task} keeper")
        elif self._keeper.done():
            self._keeper, ended = None, self._keeper
            try:
                ended.result()
            except BaseExceptionGroup as group:
                raise first_error(group) from None
        await self.done()
        self._held = portion = await self._source.take(count, wait_s)
        index, values = await read_rows(self._rows, portion.row_ids, columns)
        return ExperienceBatch(
            task=self._task,
            index=index,
            columns=values,
            num_missing=len(portion.row_ids) - len(index),
            ended=portion.over,
            waited_out=not portion.over and not portion.deliveries,
            consumer=self._key,
        )

    async def done(self, effect: Commit | None = None) -> None:
        """Acknowledge what is held, in one step with ``effect``. Raises LeaseLostError, with nothing written, when some
        of it is not ours any more; the rest of it is then given back."""
        held = [delivery.entry_id for delivery in self._held.deliveries]
        leases, commit = self._source.leases, effect or Commit()
        if await leases.lost(held):
            raise self._lose()
        if held or effect:
            result = await self._rows.commit(replace(commit, acks=leases.acks(held), if_held=True))
            if not all(result.inserted):
                if await leases.lost(held, ask=True):
                    raise self._lose()
                check_inserted(commit, result.inserted)
        self._give_back()

    def _lose(self) -> LeaseLostError:
        """Give back what is held, and say that some of it went to another consumer."""
        rows = self._held.row_ids
        self._give_back()
        return LeaseLostError(self._task, rows)

    def _give_back(self) -> None:
        self._source.leases.release([delivery.entry_id for delivery in self._held.deliveries])
        self._held = Portion()

    async def close(self) -> None:
        """Stop renewing: what is held goes to others when its lease runs out."""
        self._give_back()
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
