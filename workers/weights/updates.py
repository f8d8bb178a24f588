"""New weights for an engine: find their manifest, pull the bytes, load them, and report how it went.

Owns: which weights the engine serves, as this worker knows it. Never: decides which to load (the core commands it).
Invariant: WeightsLoaded is reported only once the engine serves what was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Protocol

import structlog

from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, LogEntry
from transport.contracts.messages import WeightManifest, WeightsFailed, WeightsLoaded, manifest_decoder
from transport.contracts.types import WeightIdentity, WorkerId
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.process import faults
from transport.process.clock import Clock
from workers.errors import WeightsMismatchError

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

MANIFEST_WAIT_S = 30.0  # a load is commanded after its manifest; only a broker that lost its tail has none
MANIFESTS_LOOKED_AT = 64
READ_WAIT_S = 1.0

LOAD_FAILURES = (PeerUnavailableError, PeerRejectedError, ChecksumError, MessageError, WeightsMismatchError)
"""What leaves the old weights in service and is reported as WeightsFailed; anything else ends the worker."""


class Puller(Protocol):
    """Gives the tensors of a manifest, verified, for as long as the context is open (weights.WeightPuller)."""

    def pull(self, manifest: WeightManifest) -> AbstractContextManager[Mapping[str, torch.Tensor]]: ...


class TakesWeights(Protocol):
    """An engine, as far as new weights concern it (GenerationEngine)."""

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None: ...


class WeightUpdates:
    """Takes the engine of one worker from one version to the next."""

    def __init__(self, broker: Broker, engine: TakesWeights, puller: Puller, worker_id: WorkerId, clock: Clock) -> None:
        self._broker = broker
        self._engine = engine
        self._puller = puller
        self._worker_id = worker_id
        self._clock = clock
        self.served: WeightIdentity | None = None
        self.loading = False

    async def load(self, weights: WeightIdentity) -> WeightsLoaded | WeightsFailed:
        """Make the engine serve ``weights``. Returns the event to report, also where it is served already."""
        started_s, self.loading = self._clock.now_s(), True
        try:
            if weights != self.served:
                manifest = await self._manifest(weights)
                with ExitStack() as stack:
                    # No name here for the views: one that outlived the context would keep their memory mapped.
                    await self._engine.load_weights(
                        weights, await asyncio.to_thread(stack.enter_context, self._puller.pull(manifest))
                    )
                self.served = weights
                faults.point("generate.weights_loaded")
        except LOAD_FAILURES as error:
            log.warning("weights not loaded", weights=str(weights), reason=str(error))
            return WeightsFailed(worker_id=self._worker_id, weights=weights, reason=str(error))
        finally:
            self.loading = False
        return WeightsLoaded(worker_id=self._worker_id, weights=weights, seconds=self._clock.now_s() - started_s)

    async def _manifest(self, weights: WeightIdentity) -> WeightManifest:
        """The manifest of ``weights`` from the weights log.

        Raises: MessageError: it does not come, or newer weights were announced and these are not there: a broker lost
        them, and trainers announce only their newest again.
        """
        deadline_s = self._clock.now_s() + MANIFEST_WAIT_S
        entries = await self._broker.tail(keys.WEIGHTS, count=MANIFESTS_LOOKED_AT)
        cursor = ZERO_ID
        while True:
            announced = [manifest for entry in entries if (manifest := read_manifest(entry))]
            if found := [manifest for manifest in announced if manifest.weights == weights]:
                return found[-1]
            is_overtaken = any(manifest.weights > weights for manifest in announced)
            if is_overtaken or self._clock.now_s() >= deadline_s:
                newer = ", only of newer ones" if is_overtaken else ""
                raise MessageError(f"the weights log has no manifest of {weights}{newer}")
            cursor = entries[-1].entry_id if entries else cursor
            entries = await self._broker.read(keys.WEIGHTS, cursor, count=MANIFESTS_LOOKED_AT, wait_s=READ_WAIT_S)


def read_manifest(entry: LogEntry) -> WeightManifest | None:
    """What an entry of the weights log says; None for one that cannot be read, which is passed over."""
    try:
        return manifest_decoder.decode(entry.entry.payload)
    except MessageError as error:
        log.error("unreadable manifest", entry=entry.entry_id, reason=str(error))
        return None


async def newest_manifest(broker: Broker) -> tuple[LogEntry, WeightManifest] | None:
    """The newest entry of the weights log that can be read."""
    for count in (1, MANIFESTS_LOOKED_AT):  # nearly always the last one
        for entry in reversed(await broker.tail(keys.WEIGHTS, count=count)):
            if manifest := read_manifest(entry):
                return entry, manifest
    return None
