"""An emulated link for weights: a version sets out when it is published and is there ``transfer_s`` later.

Generation goes on meanwhile, as in the papers (StreamRL sec. 4.1, AsyncFlow sec. 4.2.2): when a worker is told to load,
it waits for what is still on its way, and for nothing if the version has arrived.

Owns: when each version arrives here. Never: when to load. Invariant: what was not seen on the log sets out when it is
asked for, so a load is never early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker
from transport.contracts.messages import WeightManifest, manifest_decoder
from transport.contracts.types import WeightIdentity
from transport.errors import MessageError, first_error
from transport.process.clock import Clock
from workers.generation.worker import GenerationWorker
from workers.leases.lifecycle import Activity
from workers.weights.pull import WeightPuller

if TYPE_CHECKING:
    import torch

READ_WAIT_S = 1.0
READ_COUNT = 64
KEPT = 64
"""Versions whose arrival is remembered; a worker loads one of the newest."""


class SlowLink:
    """A Puller (updates.py). transfer_s: our seconds from a version's manifest to its arrival.  secret: as there."""

    def __init__(self, transfer_s: float, clock: Clock, *, secret: bytes = b"") -> None:
        self._transfer_s = transfer_s
        self._clock = clock
        self._puller = WeightPuller(secret=secret)
        self._arrives_s: dict[WeightIdentity, float] = {}

    async def watch(self, broker: Broker) -> None:
        """Let every version that is published set out, forever."""
        cursor = ZERO_ID
        while True:
            for entry in await broker.read(keys.WEIGHTS, cursor, count=READ_COUNT, wait_s=READ_WAIT_S):
                cursor = entry.entry_id
                try:
                    self._arrival_s(manifest_decoder.decode(entry.entry.payload).weights)
                except MessageError:
                    continue  # whoever loads it says so (updates.py)

    def _arrival_s(self, weights: WeightIdentity) -> float:
        arrives_s = self._arrives_s.setdefault(weights, self._clock.now_s() + self._transfer_s)
        while len(self._arrives_s) > KEPT:
            del self._arrives_s[next(iter(self._arrives_s))]
        return arrives_s

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        """Wait for the version, check its bytes, and give nothing: nobody here computes with them."""
        time.sleep(max(0.0, self._arrival_s(manifest.weights) - self._clock.now_s()))
        with self._puller.opened(manifest):
            yield {}


class LinkedWorker:
    """A generation worker behind a slow link."""

    def __init__(self, worker: GenerationWorker, link: SlowLink, broker: Broker) -> None:
        self._worker = worker
        self._link = link
        self._broker = broker

    async def run(self) -> None:
        """Generate until cancelled, or until the worker is drained."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._link.watch(self._broker), name="link")
                await self._worker.run()
                watching.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    def activity(self) -> Activity:
        return self._worker.activity()
