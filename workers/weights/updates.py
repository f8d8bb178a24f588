"""New weights for an engine: bring them in while the old ones serve, load them when told to, report how it went.

    weights log ─► prefetch: pull the newest, and keep it ──┐   from whom: routes log
    LoadWeights ─────────────────────────► load: ◄──────────┘  or pull what is asked for

A version is on its way as soon as its manifest is there, whatever the worker generates meanwhile; a load waits for what
is still to come of it, and the switch itself is the engine's. The newest wins: it replaces what was brought in and not
loaded, and what is still on its way is given up for it, unless a load waits for just that: then something is loaded
also where versions are published faster than they come. Until it is loaded or replaced, a worker holds one version
beside the engine's.

What comes is compared at low priority, since tokens are generated on the same cores, by other workers, too, and all of
them take a version at once. A load that still waits for it after HURRY_S hurries it. Price: an idle worker waits longer
for a version on cores that others want, up to HURRY_S; where nobody generates, nobody wants them.

Owns: which weights the engine serves, as this worker knows it. Never: decides which to load (the core commands it).
Invariants: WeightsLoaded is reported only once the engine serves what was asked for; one pull at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec.structs import replace

from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, LogEntry
from transport.contracts.messages import (
    Addresses,
    WeightDelta,
    WeightManifest,
    WeightRoutes,
    WeightsFailed,
    WeightsLoaded,
    manifest_decoder,
    routes_decoder,
)
from transport.contracts.types import WeightIdentity, WorkerId
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.process import faults
from transport.process.clock import Clock
from transport.tensors.base import host_id
from transport.tensors.relay import relayed_changes
from workers.errors import WeightsMismatchError, WeightsSpoiledError

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

MANIFEST_WAIT_S = 30.0  # a load is commanded after its manifest; only a broker that lost its tail has none
MANIFESTS_LOOKED_AT = 64
READ_WAIT_S = 1.0
HURRY_S = 3.0  # twice what four workers of SmolLM2 need at low priority on two cores; nothing starves for longer
ROUTE_WAIT_S = 2.0  # the orchestrator looks each second who is there, and plans within milliseconds, where it lives

LOAD_FAILURES = (PeerUnavailableError, PeerRejectedError, ChecksumError, MessageError, WeightsMismatchError)
"""What leaves the old weights in service and is reported as WeightsFailed; anything else ends the worker."""


class Puller(Protocol):
    """Gives the tensors of a manifest, verified, for as long as the context is open (weights.WeightPuller).

    way: how the last ones came.
    """

    way: str

    def pull(
        self, manifest: WeightManifest, *, given_up: threading.Event | None = None, hurry: threading.Event | None = None
    ) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """given_up: once it is set, what still comes is not waited for: PeerUnavailableError.  hurry: until it is set,
        others of this machine come first.
        """
        ...


class TakesWeights(Protocol):
    """An engine, as far as new weights concern it (GenerationEngine)."""

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None: ...


@dataclass(slots=True)
class Pulled:
    """A version that is here. tensors: valid until ``close``; nobody else keeps them, or their memory stays mapped."""

    weights: WeightIdentity
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict[str, "torch.Tensor"])
    stack: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.tensors = {}
        self.stack.close()


class WeightUpdates:
    """Takes the engine of one worker from one version to the next."""

    def __init__(
        self,
        broker: Broker,
        engine: TakesWeights,
        puller: Puller,
        worker_id: WorkerId,
        clock: Clock,
        *,
        route_wait_s: float = 0.0,
    ) -> None:
        """route_wait_s: for so long it waits to be told whom to ask; 0: workers of this run pass nothing on."""
        self._broker = broker
        self._engine = engine
        self._puller = puller
        self._worker_id = worker_id
        self._clock = clock
        self._pulling = asyncio.Lock()
        self._ahead: Pulled | None = None
        self._route_wait_s = route_wait_s
        self._hurry = threading.Event()  # of the one pull there is
        self._newest: WeightManifest | None = None
        self._announced = asyncio.Event()
        self._coming: tuple[WeightIdentity, threading.Event] | None = None  # ahead, and what gives it up
        self._awaited: WeightIdentity | None = None  # what a load is to make the engine serve
        self.served: WeightIdentity | None = None
        self.loading = False
        self._said_way = ""
        self.stands_aside = False
        """Whether the orchestrator gives this worker no groups, since its loads failed."""

    def note_aside(self, aside_s: float | None) -> None:
        """aside_s: of the command that follows (LoadWeights)."""
        if aside_s is not None and not self.stands_aside:
            log.warning(
                "standing aside: no groups come until new weights are loaded", since_s=round(aside_s, 1), tried="again"
            )
        self.stands_aside = aside_s is not None

    @property
    def way(self) -> str:
        """How the last weights came: "inproc", "mapped", "tcp" or "ucx"."""
        return self._puller.way

    def _note_way(self) -> None:
        """Log how weights come, each time that this changes."""
        if self.way != self._said_way:
            log.info("weights come another way" if self._said_way else "weights come", way=self.way, was=self._said_way)
            self._said_way = self.way

    async def prefetch(self) -> None:
        """Bring in each newest version, forever. What fails here is reported when it is to be loaded."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_manifests(), name="manifests")
                group.create_task(self._bring_newest(), name="bring")
        finally:
            self._drop()

    async def _follow_manifests(self) -> None:
        cursor = ZERO_ID
        entries = await self._broker.tail(keys.WEIGHTS, count=MANIFESTS_LOOKED_AT)
        while True:
            cursor = entries[-1].entry_id if entries else cursor
            if manifests := [manifest for entry in entries if (manifest := read_manifest(entry))]:
                self._newest = manifests[-1]
                self._announced.set()
                self._give_up_unless(self._newest.weights, self._awaited)
            entries = await self._broker.read(keys.WEIGHTS, cursor, count=MANIFESTS_LOOKED_AT, wait_s=READ_WAIT_S)

    async def _bring_newest(self) -> None:
        while True:
            await self._announced.wait()
            self._announced.clear()
            if self._newest is not None:
                await self._bring(self._newest)

    def _give_up_unless(self, *wanted: WeightIdentity | None) -> None:
        """Let what is brought in ahead not come any further, where it is none of ``wanted``."""
        if self._coming is not None and self._coming[0] not in wanted:
            self._coming[1].set()

    async def _along(self, manifest: WeightManifest, given_up: threading.Event) -> WeightManifest:
        """``manifest`` with the sources of this worker's route first, if that is planned in time."""
        if manifest.host == host_id() or not self._route_wait_s:
            return manifest
        deadline_s = self._clock.now_s() + self._route_wait_s
        cursor, entries = ZERO_ID, await self._broker.tail(keys.ROUTES, count=MANIFESTS_LOOKED_AT)
        while not given_up.is_set():
            for entry in reversed(entries):
                if (planned := read_routes(entry)) is None:
                    continue
                if (
                    planned.weights == manifest.weights
                    and (routed := along(manifest, planned, self._worker_id)) is not None
                ):
                    return routed
                if planned.weights > manifest.weights:
                    return manifest
            if (left_s := deadline_s - self._clock.now_s()) <= 0:
                return manifest
            cursor = entries[-1].entry_id if entries else cursor
            wait_s = min(left_s, READ_WAIT_S)
            entries = await self._broker.read(keys.ROUTES, cursor, count=MANIFESTS_LOOKED_AT, wait_s=wait_s)
        return manifest

    async def _bring(self, manifest: WeightManifest) -> None:
        async with self._pulling:
            held = self._ahead.weights if self._ahead is not None else None
            if manifest.weights in (self.served, held):
                return
            self._drop()
            given_up = threading.Event()
            self._coming = manifest.weights, given_up
            try:
                self._ahead = await self._pull(manifest, given_up)
            except LOAD_FAILURES as error:
                reason = "others are wanted" if given_up.is_set() else str(error)
                log.info("weights not brought in ahead", weights=str(manifest.weights), reason=reason)
            finally:
                self._coming = None

    async def _pull(self, manifest: WeightManifest, given_up: threading.Event) -> Pulled:
        """A thread cannot be stopped: what one brings in after its task was is given back then."""
        manifest = await self._along(manifest, given_up)
        pulled, context = Pulled(manifest.weights), contextvars.copy_context()

        def enter() -> Mapping[str, torch.Tensor]:
            pull = self._puller.pull(manifest, given_up=given_up, hurry=self._hurry)
            return context.run(pulled.stack.enter_context, pull)

        entering = asyncio.get_running_loop().run_in_executor(None, enter)  # no task, which would be left over
        try:
            pulled.tensors = await asyncio.shield(entering)
        except asyncio.CancelledError:
            given_up.set()
            entering.add_done_callback(lambda done: done.cancelled() or done.exception() or pulled.close())
            raise
        return pulled

    def _drop(self) -> None:
        if (ahead := self._take(None)) is not None:
            ahead.close()

    def _take(self, weights: WeightIdentity | None) -> Pulled | None:
        """What was brought in, if it is ``weights``, None: whatever it is. It is the caller's now."""
        ahead = self._ahead
        if ahead is None or weights not in (None, ahead.weights):
            return None
        self._ahead = None
        return ahead

    async def load(self, weights: WeightIdentity) -> WeightsLoaded | WeightsFailed:
        """Make the engine serve ``weights``. Returns the event to report, also where it is served already."""
        started_s, self.loading = self._clock.now_s(), True
        self._awaited = weights
        if self._coming is not None and self._coming[0] < weights:
            self._give_up_unless(weights)
        hurrying = asyncio.get_running_loop().call_later(HURRY_S, self._hurry.set)
        try:
            async with self._pulling:
                if weights != self.served:
                    pulled = self._take(weights)
                    if pulled is None:
                        pulled = await self._pull(await self._manifest(weights), threading.Event())
                    try:
                        await self._engine.load_weights(weights, pulled.tensors)
                    finally:
                        pulled.close()
                    self.served = weights
                    self._note_way()
                    if self.stands_aside:
                        log.info("standing aside no more: weights are loaded", weights=str(weights))
                    self.stands_aside = False
                    faults.point("generate.weights_loaded")
        except LOAD_FAILURES as error:
            log.warning("weights not loaded", weights=str(weights), reason=str(error))
            permanent = isinstance(error, WeightsMismatchError) and not isinstance(error, WeightsSpoiledError)
            return WeightsFailed(worker_id=self._worker_id, weights=weights, reason=str(error), permanent=permanent)
        finally:
            self.loading, self._awaited = False, None
            hurrying.cancel()
            self._hurry.clear()
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


def read_routes(entry: LogEntry) -> WeightRoutes | None:
    """What an entry of the routes log says; None for one that cannot be read: then the trainer is asked."""
    try:
        return routes_decoder.decode(entry.entry.payload)
    except MessageError as error:
        log.error("unreadable routes", entry=entry.entry_id, reason=str(error))
        return None


def along(manifest: WeightManifest, planned: WeightRoutes, worker: WorkerId) -> WeightManifest | None:
    """``manifest`` with those first whom ``worker`` is to ask; None where nothing is said of it."""
    whole, ways = planned.routes.get(worker), planned.parts.get(worker)
    if whole is None and (ways is None or len(ways) != len(manifest.parts)):
        return None
    ways = ways or (whole or (),) * len(manifest.parts)

    def changes(delta: WeightDelta | None, way: Addresses, part: int | None = None) -> WeightDelta | None:
        ahead = (relayed_changes(address, manifest.weights, part) for address in way)
        return replace(delta, sources=(*ahead, *delta.sources)) if delta is not None else None

    parts = tuple(
        replace(part, sources=part.sources if whole else (*way, *part.sources), delta=changes(part.delta, way, number))
        for number, (part, way) in enumerate(zip(manifest.parts, ways, strict=True))
    )
    sources = (*(whole or ()), *manifest.sources)
    return replace(manifest, sources=sources, parts=parts, delta=changes(manifest.delta, whole or ()))


async def newest_manifest(broker: Broker) -> tuple[LogEntry, WeightManifest] | None:
    """The newest entry of the weights log that can be read."""
    for count in (1, MANIFESTS_LOOKED_AT):  # nearly always the last one
        for entry in reversed(await broker.tail(keys.WEIGHTS, count=count)):
            if manifest := read_manifest(entry):
                return entry, manifest
    return None
