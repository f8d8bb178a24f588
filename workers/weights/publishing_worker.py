"""The publisher: in a run without a trainer, it makes a checkpoint's weights a version that generation workers load.

    start ──► version 0 from the run's model (or the newest one again, when a publisher went away)
    updates ─► claim ─► read the checkpoint ─► segment ─► one commit: manifest, WeightsPublished, ack

Owns: the trainer's role, in the sense of who may publish. Never: decides who loads (the core does). Invariant: a path
is read only below the directory that this machine's own command line names; a version is announced after its bytes can
be read, and once more by a broker that was restarted and may have lost it; what cannot be published is answered by
UpdateFailed and leaves what is served as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from transport.broker import keys
from transport.broker.base import Ack, Broker, Commit, Delivery
from transport.contracts.messages import (
    UpdateFailed,
    UpdateRequest,
    WeightManifest,
    update_decoder,
)
from transport.contracts.types import Struct, WeightIdentity, WorkerId
from transport.errors import FatalError, FencedError, MessageError, SegmentSpaceError, TailLostError, TransientError
from transport.process.clock import Clock
from transport.tensors.address import parse_address
from transport.tensors.manifest import check_manifest
from workers.errors import CheckpointRefusedError, ModelError
from workers.leases.announce import ROLE, Announcer
from workers.leases.events import event_append
from workers.leases.leases import Leases
from workers.leases.lifecycle import Activity
from workers.weights.updates import newest_manifest

if TYPE_CHECKING:
    import torch

    from workers.weights.publish import WeightPublisher

log = structlog.get_logger(__name__)

WAIT_S = 1.0
RECLAIM_S = 60.0
"""An update that a publisher claimed and did not answer for so long goes to the one that took its place."""
MAX_DELIVERIES = 3
MAX_REASON_CHARACTERS = 1000
"""Of the report of a refused update: a path in it may be as long as its sender likes."""

Tensors = Mapping[str, "torch.Tensor"]
ReadTensors = Callable[[Path], Tensors]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory or one safetensors file, mapped; nothing that could run code is opened.

    Raises CheckpointRefusedError: there are none, or they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointRefusedError(f"{path} has no *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointRefusedError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors


class _Newest(Struct, frozen=True, kw_only=True):
    """The newest version that was announced. path: of its checkpoint, "" where another process serves it."""

    weights: WeightIdentity
    path: str


class PublishingWorker:
    """Publishes until cancelled. read_tensors: all tensors of a checkpoint. weights_dir: None allows no paths."""

    def __init__(
        self,
        broker: Broker,
        worker_id: WorkerId,
        publisher: WeightPublisher,
        dtype: torch.dtype,
        read_tensors: ReadTensors,
        clock: Clock,
        *,
        model_dir: Path,
        weights_dir: Path | None,
    ) -> None:
        self._broker = broker
        self._worker_id = worker_id
        self._publisher = publisher
        self._dtype = dtype
        self._read = read_tensors
        self._model_dir = model_dir
        self._weights_dir = weights_dir.resolve() if weights_dir is not None else None
        self._epoch = 0
        self._serving: WeightIdentity | None = None
        self._announcer = Announcer(broker)
        self._leases = Leases(broker, keys.UPDATES, worker_id, clock, lease_s=RECLAIM_S, max_deliveries=MAX_DELIVERIES)
        self._doing = "waiting"

    def activity(self) -> Activity:
        return Activity(doing=self._doing, weights=self._serving)

    async def run(self) -> None:
        """Publish what there is, then what is asked for, forever."""
        try:
            await self._begin()
            while True:
                with suppress(FencedError):  # another publisher has announced since
                    await self._announcer.catch_up()
                for delivery in await self._leases.claim(1, wait_s=WAIT_S):
                    await self._answer(delivery)
        finally:
            await asyncio.to_thread(self._publisher.close)  # also while a thread of ours still reads or writes

    async def _begin(self) -> None:
        """The bytes of a publisher that went away went with it: serve its newest version again.

        Weights that another process published, also meanwhile, stay.
        """
        newest = await self._newest()
        if newest is not None and not newest.path:
            return
        await self._take_role()
        if await self._newest() != newest:
            return
        path, version = (Path(newest.path), newest.weights.version) if newest is not None else (self._model_dir, 0)
        try:
            await self._publish_path(path, version=version)
        except CheckpointRefusedError as error:
            log.warning("not published", path=str(path), reason=str(error))

    async def _newest(self) -> _Newest | None:
        newest = await newest_manifest(self._broker)
        if newest is None:
            return None
        entry, manifest = newest
        return _Newest(weights=manifest.weights, path=entry.entry.fields.get("path", ""))

    async def _answer(self, delivery: Delivery) -> None:
        """Publish what one entry asks for, or say why not; acknowledged in the same step."""
        try:
            update = update_decoder.decode(delivery.entry.payload)
        except MessageError as error:
            await self._leases.reject(delivery, str(error))
            return
        (ack,) = self._leases.acks([delivery.entry_id])
        try:
            newest = await self._newest()
            version = newest.weights.version + 1 if newest is not None else 0
            await self._publish(update, version, ack)
        except (CheckpointRefusedError, MessageError, ModelError, SegmentSpaceError) as error:
            await self._refuse(update, str(error), ack)
        except (TransientError, FatalError, TailLostError):
            raise  # of the broker, not of what was asked
        except Exception as error:  # the guard of one delivery: whatever is asked, the next one is heard
            log.exception("update failed", update=update.update, path=update.path)
            await self._refuse(update, f"{type(error).__name__}: {error}", ack)
        self._leases.release([delivery.entry_id])

    async def _refuse(self, update: UpdateRequest, reason: str, ack: Ack) -> None:
        reason = reason[:MAX_REASON_CHARACTERS]
        log.warning("update refused", update=update.update, path=update.path[:MAX_REASON_CHARACTERS], reason=reason)
        failed = UpdateFailed(update=update.update, reason=reason)
        await self._broker.commit(
            Commit(appends=[event_append(failed, update=update.update, reason=reason)], acks=[ack])
        )

    async def _publish(self, update: UpdateRequest, version: int, ack: Ack) -> None:
        if update.manifest is not None:
            check_manifest(update.manifest)
            for source in update.manifest.sources:
                parse_address(source)  # one that is none would end every worker that begins with these weights
            await self._take_role()
            await self._announce(update.manifest, version, path="", update=update.update, acks=[ack])
            return
        path = self._allowed(update.path)
        await self._take_role()
        await self._publish_path(path, version=version, update=update.update, acks=[ack])

    def _allowed(self, path: str) -> Path:
        """Raises CheckpointRefusedError: a path that this machine's own command line does not allow."""
        if self._weights_dir is None:
            raise CheckpointRefusedError("this publisher takes no paths: start it with --weights-dir DIR")
        try:
            wanted = (self._weights_dir / path).resolve()
            exists = wanted.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links, a closed directory
            raise CheckpointRefusedError(f"{path[:80]!r} is no path of a checkpoint: {error}") from error
        if not wanted.is_relative_to(self._weights_dir):
            raise CheckpointRefusedError(f"{path} is not below the directory that the publisher's --weights-dir names")
        if not exists:
            raise CheckpointRefusedError(f"there is no {path} below the publisher's --weights-dir")
        return wanted

    async def _publish_path(self, path: Path, *, version: int, update: str = "", acks: list[Ack] | None = None) -> None:
        self._doing = "publishing"
        try:
            tensors = await asyncio.to_thread(self._read, path)
            manifest = await asyncio.to_thread(self._publisher.publish, self._epoch, version, tensors, self._dtype)
            await self._announce(manifest, version, path=str(path), update=update, acks=acks or [])
        finally:
            self._doing = "waiting"

    async def _take_role(self) -> None:
        """Each version under an epoch of its own: a name is never used twice, whatever was published in between."""
        newest = await self._newest()
        self._epoch = await self._broker.acquire_epoch(ROLE, at_least=newest.weights.epoch if newest else 0)

    async def _announce(
        self, manifest: WeightManifest, version: int, *, path: str, update: str, acks: list[Ack]
    ) -> None:
        """One step: the manifest on the weights log, the event, the ack.

        Raises CheckpointRefusedError: another publisher took the role since.
        """
        weights = WeightIdentity(epoch=self._epoch, version=version, digest=manifest.weights.digest)
        ours = msgspec.structs.replace(manifest, weights=weights)
        try:
            await self._announcer.announce_weights(ours, path=path, update=update, acks=acks)
        except FencedError as error:
            raise CheckpointRefusedError(f"another publisher published meanwhile ({error}): ask again") from error
        self._serving = weights
        log.info("published", weights=str(weights), path=path)
