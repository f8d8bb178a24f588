"""Announces a version of the weights, and again after a restart of the broker, which may have lost it.

Owns: the newest announcement of one publisher, a service run's or a client's. Never: its bytes. Invariant: a version is
announced under its publisher's fence, in one step with the acks that go with it; a publisher that was fenced off
announces nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import structlog

from transport.broker import keys
from transport.broker.base import Ack, Append, Broker, Commit, Entry, Fence
from transport.errors import BrokerUnavailableError, FencedError
from transport.messages import WeightManifest, WeightsPublished, encode
from workers.generation.publish import event_entry

log = structlog.get_logger(__name__)

ROLE = "trainer"
"""The trainer's role: the newest publisher of either kind holds it, so the weights of two never mix unnoticed."""
BROKER_POLL_S = 1.0


class Announcer:
    """Announces for one publisher. Readers skip a version that they know, so announcing it twice is harmless."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._announced: Commit | None = None
        self._boot_id = ""
        self._turn = asyncio.Lock()

    async def announce(
        self, manifest: WeightManifest, *, path: str = "", update: str = "", acks: Sequence[Ack] = ()
    ) -> None:
        """One step: the manifest on the weights log, the event, the acks.

        Its epoch is the fence.  path: of the checkpoint, "" where somebody else serves it.  update: that asked for it.
        Raises FencedError: somebody else took the role since.
        """
        weights = manifest.weights
        fields = {"weights": str(weights), "bytes": str(manifest.total_bytes), "host": manifest.host, "path": path}
        published = WeightsPublished(weights=weights, update=update)
        appends = [
            Append(stream=keys.WEIGHTS, entry=Entry(fields=fields, payload=encode(manifest))),
            Append(stream=keys.EVENTS, entry=event_entry(published, weights=str(weights), update=update)),
        ]
        announced = Commit(fence=Fence(role=ROLE, epoch=weights.epoch), appends=appends)
        async with self._turn:
            boot_id = (await self._broker.info()).boot_id  # read first: a restart from here on may lose it
            await self._broker.commit(replace(announced, acks=acks))
            self._announced, self._boot_id = announced, boot_id

    async def catch_up(self) -> None:
        """Announce once more if the broker was restarted since."""
        async with self._turn:
            boot_id = (await self._broker.info()).boot_id
            if self._announced is None or boot_id == self._boot_id:
                return
            log.warning("the broker was restarted; announcing the weights again")
            try:
                await self._broker.commit(self._announced)
            except FencedError:  # somebody else has published since
                self._announced = None
            self._boot_id = boot_id

    async def keep(self) -> None:
        """``catch_up`` every BROKER_POLL_S, forever; an outage of the broker is waited for."""
        while True:
            await asyncio.sleep(BROKER_POLL_S)
            try:
                await self.catch_up()
            except BrokerUnavailableError as error:
                log.warning("cannot check whether the weights are still announced", reason=str(error))
