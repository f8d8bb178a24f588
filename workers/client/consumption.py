"""One consumer's batches, one at a time: take rows, read their columns, hold them, be done with them.

Owns: which batch is held, the task that renews its leases. Invariant: the batch before is acknowledged, or given up by
name, before the next one is handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from transport.broker.base import Broker, Commit
from transport.contracts.types import Column
from transport.errors import first_error
from transport.rows.columns import RowStore
from workers.client import engines
from workers.client.batch import ExperienceBatch, read_rows
from workers.client.consumer import Portion, TaskLeases
from workers.client.loop_thread import LoopThread
from workers.client.writer import check_inserted
from workers.errors import ClientTimeoutError, LeaseLostError


class Source(Protocol):
    """A policy: see consumer.py. leases: of what ``take`` hands out."""

    leases: TaskLeases

    async def take(self, count: int, wait_s: float) -> Portion: ...

    async def keep(self) -> None: ...


class Consumption:
    """Used from the loop's thread, but for its name. key: what a batch is known by."""

    def __init__(self, broker: Broker, rows: RowStore, task: str, key: str, source: Source) -> None:
        self._broker = broker
        self._rows = rows
        self._task = task
        self._key = key
        self._source = source
        self._held = Portion()
        self._keeper: asyncio.Task[None] | None = None

    async def next(self, columns: Sequence[Column], count: int, wait_s: float) -> ExperienceBatch:
        """As Client.get_experience_data."""
        self._check_keeper()
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

    def _check_keeper(self) -> None:
        """Leases are renewed from the first call on: the task is owned here, because callers come and go between."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._source.keep(), name=f"{self._task} keeper")
        elif self._keeper.done():
            self._keeper, ended = None, self._keeper
            try:
                ended.result()
            except BaseExceptionGroup as group:
                raise first_error(group) from None

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

    async def describe_wait(self) -> str:
        return await engines.describe_wait(self._broker, self._task)

    def _give_back(self) -> None:
        """Renew nothing that was handed out any more."""
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


class Stream:
    """A consumption as a plain iterator; leaving it early hands the last batch back.

    in_step: empty batches are handed out too, because other ranks make a step with theirs.
    """

    def __init__(
        self,
        loop: LoopThread,
        consumption: Consumption,
        columns: Sequence[Column],
        count: int,
        timeout_s: float,
        *,
        in_step: bool,
    ) -> None:
        self._loop = loop
        self._consumption = consumption
        self._columns = columns
        self._count = count
        self._timeout_s = timeout_s
        self._in_step = in_step

    def __iter__(self) -> Iterator[ExperienceBatch]:
        try:
            while not (batch := self._next()).ended:
                if batch.index or self._in_step:
                    yield batch
        finally:
            if not self._loop.is_closed():
                self._loop.call(self._consumption.close(), what="leaving a stream")

    def _next(self) -> ExperienceBatch:
        work = self._consumption.next(self._columns, self._count, self._timeout_s)
        batch = self._loop.call(work, what="the next batch", wait_s=self._timeout_s)
        if batch.waited_out:
            why = self._loop.call(self._consumption.describe_wait(), what="looking at the queue")
            raise ClientTimeoutError(f"task {batch.task}: no batch for {self._timeout_s:.1f} s: {why}")
        return batch
