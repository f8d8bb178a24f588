"""Weights out: each version becomes a segment that generation workers map or pull, and a manifest that names it.

    WeightPublisher    writes a version, cast to the generation dtype on the way, and keeps the last few readable. Its
                       digest depends on nothing but names, shapes, dtypes and bytes. 270 MB of bf16 from fp32 take
                       .14 s on one core, checksums included. Of several ranks each writes a part (parts.py)
    PublishingWorker   the publisher of a run without a trainer: a checkpoint's weights become a version
        start ──► version 0 from the run's model (or the newest one again, when a publisher went away)
        updates ─► claim ─► read the checkpoint ─► segment ─► one commit: manifest, WeightsPublished, ack

Never: decides who loads (the core does); a trainer appends to the ``weights`` log itself. Invariants: a path is read
only below the directory that this machine's own command line names; a version is announced after its bytes can be read,
and once more to a broker that was restarted and may have lost it; what cannot be published is answered by UpdateFailed
and leaves what is served as it is.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from transport.broker import keys
from transport.broker.base import Ack, Broker, Commit, Delivery
from transport.broker.events import event_append
from transport.contracts.messages import (
    Piece,
    TensorSpec,
    UpdateFailed,
    UpdateRequest,
    WeightDelta,
    WeightManifest,
    encode,
    update_decoder,
)
from transport.contracts.types import WeightIdentity, WorkerId
from transport.errors import FatalError, FencedError, MessageError, SegmentSpaceError, TailLostError, TransientError
from transport.process.clock import Clock
from transport.tensors import delta
from transport.tensors.base import Endpoint, host_id, parse_address
from transport.tensors.manifest import (
    ITEM_BYTES,
    aligned,
    check_manifest,
    delta_bytes,
    digest_layout,
    digest_tensors,
    layout_bytes,
    part_bytes,
    piece_bytes,
    plan_layout,
    plan_patches,
    single_part,
    with_checksums,
)
from transport.tensors.pieces import box_checksum
from transport.tensors.shm import SealedFile, ShmWriter, segment_directories
from transport.tensors.tcp import ServedStore
from workers.errors import CheckpointRefusedError, ModelError
from workers.leases.announce import ROLE, Announcer
from workers.leases.lifecycle import Activity, Leases
from workers.weights.parts import (
    Holding,
    NotWritten,
    Shard,
    TalkingRanks,
    Written,
    holding_decoder,
    holding_of,
    plan_parts,
    shard_of,
    written_decoder,
)
from workers.weights.updates import newest_manifest

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

DELTA = "-delta"
"""Ends the name of the segment of what changed."""
CHUNK_ELEMENTS = 1024 * 1024  # cast at once: 2 MB of bf16 stay in the cache until they are checksummed and written
WAIT_S = 1.0
RECLAIM_S = 60.0  # an update that was claimed and not answered for so long goes to the publisher that took over
MAX_DELIVERIES = 3
MAX_REASON_CHARACTERS = 1000  # of the report of a refused update: a path in it may be as long as its sender likes


class WeightPublisher:
    """Publishes versions of one trainer, or of one of its ranks; keeps the newest ``keep`` readable.

    run: name of the run.  run_dir: where segments go when /dev/shm is too small.  keep: versions, >= 1; readers of an
    older one keep what they have mapped.  endpoint: where other hosts pull from.  delta_share: where what changed since
    the version before is at most this share of the bytes that this rank writes, it is offered beside them; 0: never,
    and so with keep 1.  Starts nothing until the first ``publish``, which raises ListenError where nothing can be
    listened on. Any thread may close it, at any moment.
    """

    def __init__(
        self, run: str, run_dir: Path, *, keep: int = 3, endpoint: Endpoint | None = None, delta_share: float = 0.0
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the newest version has to be readable")
        self._keep = keep
        self._delta_share = delta_share
        self._before: _Base | None = None
        self._published: deque[str] = deque()
        self._store = ServedStore(run, segment_directories(run_dir), endpoint or Endpoint())
        self._starting = threading.Lock()
        self._started = self._closed = False

    def publish(
        self,
        epoch: int,
        version: int,
        tensors: Mapping[str, torch.Tensor | Shard],
        cast: torch.dtype,
        ranks: TalkingRanks | None = None,
        *,
        content: Callable[[str, Shard], torch.Tensor] | None = None,
    ) -> WeightManifest:
        """Write a version and make it readable.

        Args:    tensors: by name, on any device; floating-point ones are cast to ``cast``, others keep their dtype. Of
                 a DTensor or Shard only what is held here is written.
                 ranks: those that publish the version together, all of them at once, each what it holds.
                 content: what is to be written of what is held of a tensor, of the same shape; None: just that.
        Returns: the manifest, with the digest in ``weights``, under rank 0's epoch; the same on all ranks. Sources:
                 shm:// and tcp://.
        Raises:  SegmentSpaceError: neither shared memory nor the run's directory of some rank has room.
                 ValueError: this epoch and version is published already, it was closed, or the ranks do not hold every
                 tensor whole.
        """
        shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
        dtypes = {name: cast if one.local.is_floating_point() else one.local.dtype for name, one in shards.items()}
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}

        def write(writer: ShmWriter, name: str, offset: int) -> str:
            shard = shards[name]
            held = shard if content is None else Shard(content(name, shard), shard.start, shard.shape)
            return _write(writer, offset, held, dtypes[name])

        if ranks is not None:
            return self._publish_part(ranks, holding_of(epoch, version, shards, names), write)
        if partial := [name for name, shard in shards.items() if not shard.is_whole]:
            raise ValueError(f"tensor {partial[0]!r} is only in part here, and there are no other ranks")
        layout = plan_layout((name, shard.shape, names[name]) for name, shard in shards.items())
        return self.publish_layout(epoch, version, layout, lambda to, spec: write(to, spec.name, spec.offset))

    def publish_layout(
        self, epoch: int, version: int, layout: Sequence[TensorSpec], write: Callable[[ShmWriter, TensorSpec], str]
    ) -> WeightManifest:
        """``publish`` for a caller that has bytes: ``write`` puts one tensor in its place and returns its checksum."""
        checksums, sources = self._fill(
            _name(WeightIdentity(epoch=epoch, version=version)),
            layout_bytes(layout),
            lambda writer: [write(writer, spec) for spec in layout],
        )
        specs = with_checksums(layout, checksums)
        manifest = WeightManifest(
            weights=WeightIdentity(epoch=epoch, version=version, digest=digest_tensors(specs)),
            tensors=specs,
            total_bytes=layout_bytes(specs),
            sources=sources,
            host=host_id(),
        )
        part = single_part(manifest)
        changed = self._delta(_name(manifest.weights), specs, part.pieces)
        self._before = _Base(manifest.weights, _name(manifest.weights), _places(specs, part.pieces))
        return replace(manifest, delta=changed)

    def _delta(self, name: str, specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> WeightDelta | None:
        """What changed in ``pieces``, those of segment ``name``, in a segment of its own; None where it is too long,
        cannot be written, or has no base.

        Until it is written, the process holds its bytes.
        """
        base = self._before
        if base is None or not self._delta_share or base.places != _places(specs, pieces):
            return None
        try:
            patches = self._patches(base.name, name, specs, pieces)
            if patches is None:
                return None
            placed = plan_patches(patches)
            writer = self._store.create(name + DELTA, delta_bytes(placed))
            for patch, (_, data) in zip(placed, patches, strict=True):
                writer.write(patch.offset, memoryview(data))
        except (SegmentSpaceError, OSError) as error:  # the version itself is there
            self._store.drop(name + DELTA)
            log.info("what changed is not offered", segment=name, reason=str(error))
            return None
        return WeightDelta(base=base.weights, patches=placed, total_bytes=delta_bytes(placed), sources=writer.seal())

    def _patches(
        self, before: str, name: str, specs: Sequence[TensorSpec], pieces: Sequence[Piece]
    ) -> list[tuple[int, bytes]] | None:
        """(index, patch) of each piece that changed between two segments; None where the first is no more, or they are
        too long.
        """
        patches: list[tuple[int, bytes]] = []
        left = int(self._delta_share * part_bytes(specs, pieces))
        with ExitStack() as stack:
            base, new = (_mapped(self._store.sealed(one), stack) for one in (before, name))
            if base is None or new is None:
                return None
            for index, piece in enumerate(pieces):
                place = slice(piece.offset, piece.offset + piece_bytes(specs, piece))
                if patch := delta.encode(base[place], new[place], ITEM_BYTES[specs[piece.tensor].dtype]):
                    patches.append((index, patch))
                    left -= aligned(len(patch))
                if left < 0:
                    return None
        return patches

    def _publish_part(
        self, ranks: TalkingRanks, holding: Holding, write: Callable[[ShmWriter, str, int], str]
    ) -> WeightManifest:
        """A rank without room says so before it raises: the others wait for what it wrote."""
        plan = plan_parts([holding_decoder.decode(said) for said in ranks.gather(encode(holding))])
        pieces = plan.pieces[ranks.rank]
        name = f"e{plan.epoch}v{holding.version}r{ranks.rank}"
        said: Written | NotWritten
        try:
            checksums, sources = self._fill(
                name,
                plan.nbytes(ranks.rank),
                lambda writer: [write(writer, plan.tensors[piece.tensor].name, piece.offset) for piece in pieces],
            )
            changed = self._delta(name, plan.tensors, pieces)
            said = Written(checksums=tuple(checksums), sources=sources, host=host_id(), delta=changed)
        except SegmentSpaceError as error:
            said = NotWritten(nbytes=error.nbytes, reason=error.tried)
        answers = [written_decoder.decode(answer) for answer in ranks.gather(encode(said))]
        written = [answer for answer in answers if isinstance(answer, Written)]
        for rank, answer in enumerate(answers):
            if isinstance(answer, NotWritten):
                raise SegmentSpaceError(answer.nbytes, f"on rank {rank}: {answer.reason}")
        manifest = plan.manifest(holding.version, written)
        self._before = _Base(manifest.weights, name, _places(plan.tensors, pieces))
        return manifest

    def _fill(
        self, name: str, nbytes: int, fill: Callable[[ShmWriter], list[str]]
    ) -> tuple[list[str], tuple[str, ...]]:
        """A segment with what ``fill`` writes, the oldest dropped for it. Returns (checksums, sources)."""
        with self._starting:
            if not (self._started or self._closed):
                self._store.start()
                self._started = True
        while len(self._published) >= self._keep:
            oldest = self._published.popleft()
            self._store.drop(oldest)
            self._store.drop(oldest + DELTA)
        writer = self._store.create(name, nbytes)
        try:
            checksums = fill(writer)
            sources = writer.seal()
        except BaseException:
            writer.abort()
            raise
        self._published.append(name)
        return checksums, sources

    def close(self) -> None:
        """Unlink every segment and stop serving, for good; what another thread publishes now fails."""
        with self._starting:
            self._closed = True
        self._store.close()


@dataclass(frozen=True, slots=True)
class _Base:
    """What this rank published last, in the segment ``name``. places: what lies where in it."""

    weights: WeightIdentity
    name: str
    places: str


def _places(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> str:
    return repr((digest_layout(specs), [(piece.tensor, piece.start, piece.shape, piece.offset) for piece in pieces]))


def _name(weights: WeightIdentity) -> str:
    """Of its segment."""
    return f"e{weights.epoch}v{weights.version}"


def _mapped(file: SealedFile | None, stack: ExitStack) -> memoryview | None:
    """The file's bytes, until ``stack`` closes; mapped in one go, because all of them are looked at."""
    if file is None:
        return None
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    mapping = stack.enter_context(mmap.mmap(file.fd, file.nbytes, flags=flags, prot=mmap.PROT_READ))
    return stack.enter_context(memoryview(mapping))


def _write(writer: ShmWriter, offset: int, shard: Shard, dtype: torch.dtype) -> str:
    """Write what is held of one tensor in row-major order, cast a chunk at a time. Returns its checksum."""
    import torch  # here, because an emulated trainer has none

    flat = shard.local.reshape(-1)
    # A GPU writes to pinned memory at once; into other memory the driver copies a second time.
    scratch = torch.empty(min(CHUNK_ELEMENTS, flat.numel()), dtype=dtype, pin_memory=flat.is_cuda)

    def written() -> Iterator[memoryview]:
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            piece = flat[start : start + CHUNK_ELEMENTS]
            chunk = scratch[: piece.numel()].copy_(piece).view(torch.uint8).numpy().data
            writer.write(offset + start * dtype.itemsize, chunk)
            yield chunk

    return box_checksum(written(), shard.box, shard.shape, dtype.itemsize)


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


class PublishingWorker:
    """Publishes until cancelled. read_tensors: all tensors of a checkpoint. weights_dir: None allows no paths."""

    def __init__(
        self,
        broker: Broker,
        worker_id: WorkerId,
        publisher: WeightPublisher,
        dtype: torch.dtype,
        read_tensors: Callable[[Path], Mapping[str, torch.Tensor]],
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
        """Serve the newest version of a publisher that went, with its bytes, again; weights of other processes stay."""
        newest = await self._newest()
        if newest is not None and not newest[1]:
            return
        await self._take_role()
        if await self._newest() != newest:
            return
        path, version = (Path(newest[1]), newest[0].version) if newest is not None else (self._model_dir, 0)
        try:
            await self._publish_path(path, version=version)
        except CheckpointRefusedError as error:
            log.warning("not published", path=str(path), reason=str(error))

    async def _newest(self) -> tuple[WeightIdentity, str] | None:
        """The newest version that was announced, and the path of its checkpoint, "" where another process serves it."""
        if newest := await newest_manifest(self._broker):
            entry, manifest = newest
            return manifest.weights, entry.entry.fields.get("path", "")
        return None

    async def _answer(self, delivery: Delivery) -> None:
        """Publish what one entry asks for, or say why not; acknowledged in the same step."""
        try:
            update = update_decoder.decode(delivery.entry.payload)
        except MessageError as error:
            await self._leases.reject(delivery, str(error))
            return
        (ack,) = self._leases.acks([delivery.entry_id])
        try:
            await self._publish(update, ack)
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

    async def _publish(self, update: UpdateRequest, ack: Ack) -> None:
        newest = await self._newest()
        version = newest[0].version + 1 if newest is not None else 0
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
        self._epoch = await self._broker.acquire_epoch(ROLE, at_least=newest[0].epoch if newest else 0)

    async def _announce(
        self, manifest: WeightManifest, version: int, *, path: str, update: str, acks: list[Ack]
    ) -> None:
        """One step: the manifest on the weights log, the event, the ack."""
        weights = WeightIdentity(epoch=self._epoch, version=version, digest=manifest.weights.digest)
        ours = replace(manifest, weights=weights)
        try:
            await self._announcer.announce_weights(ours, path=path, update=update, acks=acks)
        except FencedError as error:
            raise CheckpointRefusedError(f"another publisher published meanwhile ({error}): ask again") from error
        self._serving = weights
        log.info("published", weights=str(weights), path=path)
