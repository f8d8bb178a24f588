"""What the trainer tells on the broker, and tells again when the broker was restarted.

A broker that comes back may have lost its tail, and with it what nobody had read yet. So after every restart the newest
manifest goes onto the log of weights once more, and the last events onto theirs, in the order in which they happened;
whoever heard them before passes over them. Source: ours.

Owns: those memories. Never: when something happens. Invariant: nothing new is told before what a restart may have cost
is told again, so that reports of batches come in their order.

    TrainerReady, RoundDone, CheckpointSaved   the last one of each: it stands for those before it
    StepDone                                   the last STEPS: each one is a line of metrics

A trainer that starts from a checkpoint tells the steps that it contains again as well: whoever saved it may have died
with the broker and all that nobody had read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from transport.broker import keys
from transport.broker.base import Broker, Entry, Fence
from transport.messages import Event, StepDone, WeightManifest, encode
from transport.types import WorkerId
from workers.generation.publish import event_entry

log = structlog.get_logger(__name__)

STEPS = 64
"""Batches that may end before the orchestrator has read of the first: far more than one loss of a tail takes back."""
BROKER_POLL_S = 1.0
HEARD_S, HEARD_POLL_S = 60.0, 0.1
"""A broker that comes back, an orchestrator that is started again: both take some seconds."""


@dataclass(frozen=True, slots=True)
class _Told:
    """The number-th event that was told."""

    number: int
    event: Event
    fields: dict[str, str | int]


class Teller:
    """Speaks for one trainer, under its fence. boot_id: of the broker, from before anything was told."""

    def __init__(self, broker: Broker, worker_id: WorkerId, fence: Fence, boot_id: str) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._fence = fence
        self._boot_id = boot_id
        self._manifest: WeightManifest | None = None
        self._last: dict[type[Event], _Told] = {}
        self._steps: deque[_Told] = deque(maxlen=STEPS)
        self._count = 0
        self._turn = asyncio.Lock()

    async def announce(self, manifest: WeightManifest) -> None:
        """Say where a version's bytes are."""
        async with self._turn:
            await self._catch_up()
            self._manifest = manifest
            await self._append_manifest(manifest)

    async def tell(self, event: Event, **fields: str | int) -> None:
        async with self._turn:
            await self._catch_up()
            self._count += 1
            told = _Told(self._count, event, fields)
            if isinstance(event, StepDone):
                self._steps.append(told)
            else:
                self._last[type(event)] = told
            await self._append(told)

    @property
    def steps(self) -> tuple[StepDone, ...]:
        """The last ones, for the checkpoint that contains them."""
        return tuple(told.event for told in self._steps if isinstance(told.event, StepDone))

    async def tell_steps(self, steps: Iterable[StepDone]) -> None:
        """Tell the steps of a checkpoint; each has the epoch of the trainer that did it."""
        for step in steps:
            await self.tell(step, batch=step.batch, version=step.weights.version)

    async def until_heard(self) -> None:
        """After the last word, stay (``keep_told`` goes on) until the orchestrator has ended the run because of it.

        A broker that loses its tail now would lose that word, and with it the line of the last batch. Where nobody
        orchestrates there is nobody to wait for, and after HEARD_S it is left to a resumed run, which is told it again.
        """
        if await self._broker.get_meta(keys.STATE) != keys.STATE_RUNNING:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while await self._broker.get_meta(keys.STATE) != keys.STATE_FINISHED:  # noqa: ASYNC110 nobody is woken
                    await asyncio.sleep(HEARD_POLL_S)

    async def keep_told(self) -> None:
        """Notice a restart of the broker also while there is nothing to tell, forever."""
        while True:
            await asyncio.sleep(BROKER_POLL_S)
            async with self._turn:
                await self._catch_up()

    async def _catch_up(self) -> None:
        boot_id = (await self._broker.info()).boot_id
        if boot_id == self._boot_id:
            return
        self._boot_id = boot_id  # first: a restart while we tell again is another one
        log.warning("the broker was restarted; telling again", events=len(self._last) + len(self._steps))
        if self._manifest is not None:
            await self._append_manifest(self._manifest)
        for told in sorted((*self._last.values(), *self._steps), key=lambda told: told.number):
            await self._append(told)

    async def _append(self, told: _Told) -> None:
        entry = event_entry(told.event, worker=self._worker_id, **told.fields)
        await self._broker.append(keys.EVENTS, entry, fence=self._fence)

    async def _append_manifest(self, manifest: WeightManifest) -> None:
        weights = manifest.weights
        fields = {
            "version": str(weights.version),
            "epoch": str(weights.epoch),
            "digest": weights.digest,
            "bytes": str(manifest.total_bytes),
        }
        await self._broker.append(keys.WEIGHTS, Entry(fields=fields, payload=encode(manifest)), fence=self._fence)
