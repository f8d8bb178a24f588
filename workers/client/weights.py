"""Weights between programs that are not ours: published by one, awaited by the others.

Owns: the publisher of this client and its right to publish. Invariant: a version is announced after its bytes can be
read, and only by the newest publisher; and once more to a broker that was restarted and may have lost it.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import WeightManifest
from transport.contracts.types import WorkerKind
from transport.errors import BrokerUnavailableError, FencedError
from transport.process.clock import Clock
from transport.tensors.base import Endpoint
from workers.client.tasks import started_workers
from workers.errors import ClientError
from workers.leases.announce import ROLE, Announcer
from workers.weights.publish import WeightPublisher
from workers.weights.updates import newest_manifest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)  # not structlog: the program that uses the client decides where lines go

POLL_S = 0.5


class WeightChannel:
    """The weights log of one run, for a client. endpoint: where other hosts pull what it publishes."""

    def __init__(self, broker: Broker, clock: Clock, endpoint: Endpoint) -> None:
        self._broker = broker
        self._endpoint = endpoint
        self._clock = clock
        self._publisher: WeightPublisher | None = None
        self._announcer = Announcer(broker)
        self._keeper: asyncio.Task[None] | None = None
        self._spill: tempfile.TemporaryDirectory[str] | None = None
        self._epoch = 0

    async def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> WeightManifest:
        if any(status.kind is WorkerKind.TRAIN for status in await started_workers(self._broker)):
            raise ClientError(f"run {self._broker.run!r} has a trainer: weights are published by it alone")
        if self._publisher is None:
            self._spill = tempfile.TemporaryDirectory(prefix="streamrl-client-")  # when /dev/shm is too small
            self._publisher = WeightPublisher(self._broker.run, Path(self._spill.name), endpoint=self._endpoint)
            self._epoch = await self._broker.acquire_epoch(ROLE)
        publisher, dtype = self._publisher, _dtype_of(tensors)
        manifest = await asyncio.to_thread(publisher.publish, self._epoch, version, tensors, dtype)
        await self._announcer.announce_weights(manifest)
        if self._keeper is None or self._keeper.done():  # it ends where another program has published
            self._keeper = asyncio.create_task(self._keep_announced(), name="weights announced")
        return manifest

    async def _keep_announced(self) -> None:
        """Sit out outages of the broker, until another program has published."""
        while True:
            try:
                await self._announcer.keep()
            except BrokerUnavailableError as error:
                log.warning("cannot check whether the weights are still announced: %s", error)
            except FencedError:
                return

    async def wait(self, newer_than: int, timeout_s: float) -> WeightManifest | None:
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            newest = await newest_manifest(self._broker)
            if newest and newest[1].weights.version > newer_than:
                return newest[1]
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                return None
            last = await self._broker.last_id(keys.WEIGHTS)
            await self._broker.read(keys.WEIGHTS, last, count=1, wait_s=min(POLL_S, left_s))

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        if self._spill is not None:
            self._spill.cleanup()


def _dtype_of(tensors: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The dtype of all floating-point tensors: they are published as they are. Raises ValueError when they differ."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) > 1:
        raise ValueError(f"tensors of one floating-point dtype are needed, these have {sorted(map(str, dtypes))}")
    import torch  # here, because it takes seconds, and who only puts rows needs none

    return next(iter(dtypes), torch.float32)
