"""What is announced again when the broker was restarted.

A broker that comes back may have lost its tail, and with it what had not been read. So after every restart what was
announced last goes onto the streams once more, in the same order; readers skip what they know. Source: ours.

Invariant: nothing new is announced before what a restart may have cost is announced again, so that reports of batches
come in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import structlog

from transport.broker import keys
from transport.broker.base import Ack, Append, Broker, Commit, Entry, Fence
from transport.broker.events import event_append
from transport.contracts.messages import Event, StepDone, WeightManifest, WeightsPublished, encode
from transport.contracts.types import WorkerId
from transport.errors import FencedError

log = structlog.get_logger(__name__)

ROLE = "trainer"
"""The role of all that publish weights: the newest of them holds it, so the weights of two never mix unnoticed."""
BROKER_POLL_S = 1.0
STEPS = 64
"""Batches that may end before the orchestrator has read of the first: far more than one loss of a tail takes back."""
"""A broker that comes back, an orchestrator that is started again: both take some seconds."""


class Announcer:
    """Announces for one process. The newest commit under each key is kept."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._kept: dict[Hashable, Commit] = {}
        self._boot_id = ""
        self._turn = asyncio.Lock()

    async def announce(self, key: Hashable, commit: Commit, *, acks: Sequence[Ack] = ()) -> None:
        """``commit`` and ``acks`` in one step. Raises FencedError: another process took the role since."""
        async with self._turn:
            await self._catch_up(commit.fence)
            await self._broker.commit(replace(commit, acks=acks))
            self._kept.pop(key, None)
            self._kept[key] = commit

    async def announce_weights(
        self, manifest: WeightManifest, *, path: str = "", update: str = "", acks: Sequence[Ack] = ()
    ) -> None:
        """The manifest on the weights log and the event of a publisher that is no trainer. Its epoch is the fence.

        path: of the checkpoint, "" where another process serves it.  update: the request that asked for it.
        """
        weights = manifest.weights
        published = WeightsPublished(weights=weights, update=update)
        appends = [_manifest_append(manifest, path=path), event_append(published, weights=str(weights), update=update)]
        await self.announce("weights", Commit(fence=Fence(role=ROLE, epoch=weights.epoch), appends=appends), acks=acks)

    async def catch_up(self) -> None:
        """Announce again what is kept, if the broker was restarted since.

        Raises FencedError, after which nothing is kept: another process has announced since.
        """
        async with self._turn:
            await self._catch_up()

    async def keep(self) -> None:
        """``catch_up`` every BROKER_POLL_S, forever."""
        while True:
            await asyncio.sleep(BROKER_POLL_S)
            await self.catch_up()

    async def _catch_up(self, fence: Fence | None = None) -> None:
        """fence: under which something new follows; what was announced under an older one would be refused."""
        boot_id = (await self._broker.info()).boot_id
        if boot_id == self._boot_id:
            return
        self._boot_id = boot_id  # first: a restart while we announce again is another one
        again = [commit for commit in self._kept.values() if fence in (None, commit.fence)]
        if again:
            log.warning("the broker was restarted; announcing again", entries=len(again))
        try:
            for commit in again:
                await self._broker.commit(commit)
        except FencedError:
            self._kept.clear()
            raise


class StepAnnouncer(Announcer):
    """Announces for one trainer, under its fence.

    TrainerReady, RoundDone, CheckpointSaved and the manifest: the last of each is kept, which stands for those before
    it. StepDone: the last STEPS, each of which is a line of metrics.
    """

    def __init__(self, broker: Broker, worker_id: WorkerId, fence: Fence) -> None:
        super().__init__(broker)
        self._worker_id = worker_id
        self._fence = fence
        self._steps: dict[int, StepDone] = {}

    async def announce_manifest(self, manifest: WeightManifest) -> None:
        await self.announce(WeightManifest, Commit(fence=self._fence, appends=[_manifest_append(manifest)]))

    async def announce_event(self, event: Event, **fields: str | int) -> None:
        key: Hashable = type(event)
        if isinstance(event, StepDone):
            place = event.batch % STEPS
            self._steps.pop(place, None)
            self._steps[place] = event
            key = StepDone, place
        append = event_append(self._told(event), worker=self._worker_id, **fields)
        await self.announce(key, Commit(fence=self._fence, appends=[append]))

    def _told(self, event: Event) -> Event:
        return event

    @property
    def steps(self) -> tuple[StepDone, ...]:
        """The last ones, for the checkpoint that contains them."""
        return tuple(self._steps.values())

    async def announce_steps(self, steps: Iterable[StepDone]) -> None:
        """The steps that a checkpoint contains: the trainer that saved it may have died together with the broker and
        all that had not been read. Each has the epoch of the trainer that did it."""
        for step in steps:
            await self.announce_event(step, batch=step.batch, version=step.weights.version)


def _manifest_append(manifest: WeightManifest, **fields: str) -> Append:
    weights = manifest.weights
    shown = {"weights": str(weights), "bytes": str(manifest.total_bytes), "host": manifest.host, **fields}
    return Append(stream=keys.WEIGHTS, entry=Entry(fields=shown, payload=encode(manifest)))
