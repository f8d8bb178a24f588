"""Weights in: pull the version that a manifest names, from the nearest source that answers, and check every byte.

    manifest ─┬─ sources: one range of bytes ──┬─ on this host: mapped. A tensor that a part holds whole is a view, any
              └─ parts: a segment of each rank ┤  other is put together when it is asked for, and gone when it was used
                                               └─ elsewhere: received, piece by piece, into one memory that is laid out
                                                  as the manifest says and serves version after version

What another worker of this host receives is mapped, too, once it is whole there.

Owns: choice of source, verification, the views, the memory. Never: the engine (the worker hands it the views) or the
decision which version to load. Invariants: what is yielded has the manifest's checksums; nothing is yielded before the
bytes of all parts are there and verified; a worker never serves anything else; beside the memory of one version a pull
holds one piece at most, of those that do not lie in a row there (columns), or what changed in one tensor.

What the last pull received is the base of what changed, part by part where a version has parts: it is made the next
version in place, or in a copy where a server or another worker of this host reads it. Until it is right again nothing
is yielded, and what is wrong is overwritten by whole weights.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from transport.contracts.messages import Piece, TensorPatch, WeightManifest, WeightPart
from transport.contracts.types import WeightIdentity
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError, StreamError
from transport.process.logs import get_logger
from transport.tensors.assembled import Assembled
from transport.tensors.base import (
    Address,
    Deadline,
    Segment,
    SegmentReader,
    TimeLimit,
    choose_sources,
    parse_address,
)
from transport.tensors.delta import apply
from transport.tensors.manifest import (
    ITEM_BYTES,
    check_manifest,
    checksum,
    digest_layout,
    piece_bytes,
    single_part,
    verify_piece,
)
from transport.tensors.pieces import Box, box_of, whole
from transport.tensors.receive import Memory, Receiving, Stretch
from transport.tensors.relay import Relay, RelayedChanges, RelayedVersion, segment_of
from transport.tensors.tcp import TcpSegment, reader_for
from workers.errors import WeightsMismatchError

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)

REACH_S = 3.0  # within which a peer has to greet, where another source is left: a packet that is dropped has no answer
AWAY_S = 600.0  # for so long a peer that did not is asked after the others
ROUNDS = 2  # how often each source is asked before giving up: once more after all have failed
UNREACHABLE = "none can be reached from this host: let the trainer listen off loopback (tensors.host, or --listen)"
SHOWN_NAMES = 4
BACKGROUND_NICE = 10
"""Of who compares what nobody waits for: a tenth of a core that is wanted. Four workers of SmolLM2 took a version on
two cores, where one of them decoded: its longest step was 5.1 of the usual at normal priority, and 2.0 with this; the
version was there after 1.4 s instead of .7. With 19 the step was no shorter, and the version there after 5 s."""

PULL_FAILURES = (PeerUnavailableError, ChecksumError, MessageError, PeerRejectedError)


@dataclass(frozen=True, slots=True)
class OpenedPiece:
    """A piece, verified. view: its bytes, or, where ``whole``, all of its tensor, of which the piece's are valid."""

    piece: Piece
    view: memoryview
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """The pieces of a version. memory: where those are that are not mapped."""

    pieces: Sequence[OpenedPiece]
    memory: Memory


class PulledTensors(Mapping[str, "torch.Tensor"]):
    """A version's tensors, or the boxes of them that were wanted.

    Each look at a tensor that came in several pieces puts it together anew, in memory of its own: a reader that takes
    one after another never holds two copies of the model. ``manifest`` says what they are.
    """

    def __init__(self, manifest: WeightManifest, opened: Opened, wanted: Mapping[str, Box] | None = None) -> None:
        self.manifest = manifest
        self.boxes: Mapping[str, Box] = wanted or {spec.name: whole(spec.shape) for spec in manifest.tensors}
        """Where each tensor here lies in the whole one."""
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._pieces: dict[str, list[OpenedPiece]] = {name: [] for name in self.boxes}
        self.received = opened.memory if not wanted and all(one.whole for one in opened.pieces) else None
        """All of them as the manifest lays them out, where they came from elsewhere."""
        for one in opened.pieces:
            name = manifest.tensors[one.piece.tensor].name
            if name in self._pieces:
                self._pieces[name].append(one)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch  # here, because an engine without a model has none

        box, pieces = self.boxes[name], self._pieces[name]
        dtype: torch.dtype = getattr(torch, self._specs[name].dtype)  # of ITEM_BYTES: the manifest was checked
        if pieces and all(one.whole for one in pieces):
            return _view(pieces[0].view, self._specs[name].shape, dtype)[box.slices((0,) * len(box.start))]
        if len(pieces) == 1 and box_of(pieces[0].piece) == box:
            return _view(pieces[0].view, box.shape, dtype)
        tensor = torch.empty(box.shape, dtype=dtype)
        for one in pieces:
            common = box_of(one.piece).common(box)
            if common.num_elements:
                given = whole(self._specs[name].shape) if one.whole else box_of(one.piece)
                tensor[common.slices(box.start)] = _view(one.view, given.shape, dtype)[common.slices(given.start)]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: box.shape for name, box in self.boxes.items()}

    def bytes_at(self) -> Iterator[tuple[int, memoryview]]:
        """(offset in the manifest's own range, bytes) of every tensor: together a version of one part again."""
        import torch

        for name, spec in self._specs.items():
            if spec.nbytes:
                yield spec.offset, self[name].reshape(-1).view(torch.uint8).numpy().data


class _Checks:
    """Runs what compares bytes, which takes nearly all the time of a pull on one host.

    As long as ``hurry`` is there and not set, in a thread of low priority. None may raise its own again without a
    privilege, so that thread gets one tensor after another, and the caller's goes on with the next once it is set.
    """

    def __init__(self, hurry: threading.Event | None) -> None:
        self._hurry = hurry
        self._background = ThreadPoolExecutor(1, "check-weights", _lower_priority)

    def __enter__(self) -> _Checks:
        return self

    def run(self, check: Callable[[], None]) -> None:
        """Raises what ``check`` raises."""
        if self._hurry is None or self._hurry.is_set():
            check()
        else:
            self._background.submit(check).result()

    def end(self) -> None:
        """Nothing is compared any more."""
        self._background.shutdown()

    def __exit__(self, *_: object) -> None:
        self.end()


def _lower_priority() -> None:
    """Of this thread: elsewhere than on Linux it would be that of the whole process."""
    if sys.platform == "linux":
        os.nice(BACKGROUND_NICE)


class WeightPuller:
    """Pulls versions, one at a time, on the caller's thread (``asyncio.to_thread`` in a worker)."""

    def __init__(
        self, *, secret: bytes = b"", limit: TimeLimit | None = None, relay: Relay | None = None, ucx: bool = False
    ) -> None:
        """relay: passes on what is received.  ucx: bytes of other hosts may come by it."""
        self.way = ""
        """How the last bytes came: "inproc", "mapped", "tcp" or "ucx"."""
        self._ucx = ucx
        self._secret = secret  # shared with the publisher
        self._limit = limit or TimeLimit()  # of one pull over all its sources and attempts
        self._readers: dict[str, SegmentReader] = {}
        self._spare: Memory | None = None
        self._relay = relay
        self._away: dict[str | tuple[str, int], Deadline] = {}  # peers, or all of a host, that could not be reached
        self._relayed: RelayedVersion | None = None  # the last one, which is served until the next is asked for

    @contextmanager
    def pull(
        self,
        manifest: WeightManifest,
        *,
        verify: bool = True,
        wanted: Mapping[str, Box] | None = None,
        given_up: threading.Event | None = None,
        hurry: threading.Event | None = None,
    ) -> Iterator[PulledTensors]:
        """Give the tensors of ``manifest``, verified; they are valid inside the ``with`` and must be copied there.

        Shared memory is mapped, not copied: writing to a view changes no other process's bytes.  verify: False only for
        bytes that were verified on this host just now.  wanted: of each named tensor only this box; only the pieces
        that it lies in are pulled and verified. Others are not given. None: all tensors, whole.  given_up: once another
        thread sets it, no more bytes are waited for than those of the next silence: PeerUnavailableError.  hurry: until
        another thread sets it, bytes are compared at low priority; None: never.

        Raises: MessageError: the manifest contradicts itself.  PeerUnavailableError: no source answers (superseded by
                a newer version, its trainer died): wait for the next manifest.  ChecksumError: bytes came and were
                wrong.  PeerRejectedError: the shared secret differs.  ValueError: a wanted box lies outside of its
                tensor.
        """
        with self.opened(manifest, verify=verify, wanted=wanted, given_up=given_up, hurry=hurry) as opened:
            yield PulledTensors(manifest, opened, wanted)

    @contextmanager
    def opened(
        self,
        manifest: WeightManifest,
        *,
        verify: bool = True,
        wanted: Mapping[str, Box] | None = None,
        given_up: threading.Event | None = None,
        hurry: threading.Event | None = None,
    ) -> Iterator[Opened]:
        """Give the bytes of ``manifest``, verified, as ``pull`` does; nothing here needs torch."""
        check_manifest(manifest)
        boxes = _checked(manifest, wanted)
        self._leave_to_readers()
        with _Checks(hurry) as checks:
            base = self._spare.content if self._spare is not None else ""
            changes = _changes_since(base, manifest) if wanted is None else {}
            memory = self._copy_of_base() if changes else self._memory_of(manifest.total_bytes)
            content, memory.content = "" if changes else memory.content, ""
            relayed = self._relayed = self._pass_on(manifest, memory, changes) if wanted is None else None
            wish = _Wish(manifest, verify, boxes, self._limit.deadline(0), memory, checks, relayed)
            try:
                changed = all([self._change(wish, *part, given_up) for part in changes.items()]) and wish.is_all_here()
                wish.deadline = self._limit.deadline(manifest.total_bytes, given_up)  # of what comes whole: from now on
                stack, pieces = (ExitStack(), wish.whole_pieces()) if changed else self._opened_or_ended(wish)
                checks.end()
                if not any(one.whole for one in pieces):
                    memory.content = content
                elif wanted is None and all(one.whole for one in pieces):
                    wish.memory.content = _content(manifest.weights, manifest)
                    if wish.relayed is not None:
                        wish.relayed.verified_tensors(range(len(manifest.tensors)))
                with stack:
                    yield Opened(pieces, wish.memory)
            finally:
                if wish.memory is memory:
                    self._spare = memory
                elif self._relay is not None and wish.relayed is not None:  # memory of another, and wanted back there
                    self._relay.withdraw(*wish.relayed.segments)
                    self._relayed = None if self._relayed is wish.relayed else self._relayed

    def _memory_of(self, nbytes: int) -> Memory:
        """What may be received into; what the last pull received is forgotten, unless it may be that."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == nbytes and spare.is_free():
            return spare
        del spare  # of a layout that is no more, or somebody else's by now
        return Memory(nbytes)

    def _leave_to_readers(self) -> None:
        """What is still being sent of the last version is nobody's to write to any more."""
        if self._relayed is not None:
            self._relayed.end()

    def _pass_on(
        self, manifest: WeightManifest, memory: Memory, changes: Mapping[int | None, WeightPart] | None = None
    ) -> RelayedVersion | None:
        if self._relay is None:
            return None
        deltas = {number: part.delta for number, part in (changes or {}).items() if part.delta is not None}
        relayed = RelayedVersion(manifest, memory, deltas)
        self._relay.offer(*relayed.segments)
        return relayed

    def _copy_of_base(self) -> Memory:
        """What the last pull received, to be changed in place, or where somebody else reads it, a copy."""
        base, self._spare = self._spare, None
        assert base is not None
        if base.is_free():
            return base
        memory = Memory(base.nbytes)
        memory.buffer[:] = base.buffer
        return memory

    def _change(self, wish: _Wish, number: int | None, part: WeightPart, given_up: threading.Event | None) -> bool:
        """Receive what changed in ``part``, each patch into its piece in the memory, and check all pieces.

        Returns False where no source has that, or it is wrong: whole pieces have to come.
        """
        delta = part.delta
        if delta is None:
            return False
        relayed = wish.relayed.changes[number] if wish.relayed is not None else None
        receiving = Receiving([wish.patching(part, patch, relayed) for patch in delta.patches])
        whole_deadline = self._limit.deadline(delta.total_bytes, given_up)
        failure: StreamError | None = None
        try:
            found = choose_sources(delta.sources, part.host)
            for address, deadline, reach_s in self._in_turn(found, whole_deadline, receiving):
                try:
                    with closing(self._open(address, delta.total_bytes, deadline, reach_s)) as segment:
                        self._listen_facing(segment, wish)
                        receiving.take(segment)
                except PULL_FAILURES as error:
                    failure = error
                    continue
                for piece in part.pieces:
                    wish.verify_in_memory(piece)
                return True
        except PULL_FAILURES as error:  # the base was another, or no source can be read
            failure = error
        log.warning("changes not used, whole weights are", weights=str(wish.manifest.weights), reason=str(failure))
        if relayed is not None:
            relayed.end()
        return False

    def _in_turn(
        self, found: Sequence[Address], whole_deadline: Deadline, receiving: Receiving
    ) -> Iterator[tuple[Address, Deadline, float]]:
        """Each of ``found``, best first, until when it is borne with, and how long it may take to greet.

        The last of them is the publisher, for which time is left.
        """
        addresses = sorted(found, key=self._is_away)
        for number, address in enumerate(addresses):
            if address == found[-1]:
                yield address, whole_deadline, math.inf
            else:
                reach_s = min(REACH_S, whole_deadline.remaining_s() / (2 * (len(addresses) - number)))
                yield address, self._limit.patience(whole_deadline, receiving.missing_bytes), reach_s

    def _open(self, address: Address, nbytes: int, deadline: Deadline, reach_s: float = math.inf) -> Segment:
        """reach_s: within which its server has to greet. One that does not is asked last for a while."""
        if not deadline.remaining_s():  # that says nothing of its server
            raise PeerUnavailableError(str(address), "not asked: there is no time left, or others are wanted")
        if address.scheme not in self._readers:
            self._readers[address.scheme] = reader_for(address, self._secret, ucx=self._ucx)
        reach = Deadline(min(reach_s, deadline.remaining_s()))
        try:
            segment = self._readers[address.scheme].open(address, nbytes, deadline, reach)
            for name in (address.place, (address.place, address.port)):
                self._away.pop(name, None)
            return segment
        except PeerUnavailableError:
            is_silent = not reach.remaining_s()  # as what is behind a firewall: all of its host, then
            self._away[address.place if is_silent else (address.place, address.port)] = Deadline(AWAY_S)
            raise

    def _is_away(self, address: Address) -> bool:
        found = (self._away.get(address.place), self._away.get((address.place, address.port)))
        return any(away is not None and away.remaining_s() > 0 for away in found)

    def _opened_or_ended(self, wish: _Wish) -> tuple[ExitStack, Sequence[OpenedPiece]]:
        """As ``_open_any``; what is not here as a whole is not passed on any further."""
        whole_here = False
        try:
            stack, pieces = self._open_any(wish)
            whole_here = all(one.whole for one in pieces)
            return stack, pieces
        finally:
            if wish.relayed is not None and not whole_here:
                wish.relayed.end()

    def _open_any(self, wish: _Wish) -> tuple[ExitStack, Sequence[OpenedPiece]]:
        """From the manifest's own sources, or from those of its parts, of which all have to answer."""
        manifest = wish.manifest
        ways = [(single_part(manifest),)] if manifest.sources or not manifest.parts else []
        failures: list[StreamError] = []
        try:
            for parts in [*ways, manifest.parts] if manifest.parts else ways:
                try:
                    return self._open_parts(wish, parts)
                except PULL_FAILURES as error:
                    failures.append(error)
            raise _most_telling(failures)
        finally:
            failures.clear()  # each refers to this frame, and so to the memory of a version

    def _open_parts(self, wish: _Wish, parts: Sequence[WeightPart]) -> tuple[ExitStack, Sequence[OpenedPiece]]:
        """Those of several hosts at once, so that all their cards send; of one host one after another."""
        asked: dict[str, list[tuple[WeightPart, Sequence[Piece], str]]] = {}
        for number, part in enumerate(parts, 1):
            pieces = [piece for piece in part.pieces if wish.has(piece)]
            if wish.wanted is None or pieces:
                label = f"{wish.manifest.weights}" + (f", part {number} of {len(parts)}" if len(parts) > 1 else "")
                nearest = choose_sources(part.sources, part.host)[:1]
                asked.setdefault(nearest[0].place if nearest else "", []).append((part, pieces, label))
        with ExitStack() as stack:

            def opened(group: Sequence[tuple[WeightPart, Sequence[Piece], str]]) -> list[OpenedPiece]:
                return [piece for one in group for piece in self._open_part(wish, *one, stack)]

            if len(asked) <= 1:
                return stack.pop_all(), [piece for group in asked.values() for piece in opened(group)]
            wish.memory.allocate()  # before several threads want it
            # One thread for each: were one to wait for another's end, workers could wait for each other in a circle.
            with ThreadPoolExecutor(len(asked), "pull-part") as pool:
                context = contextvars.copy_context()
                coming = [pool.submit(context.copy().run, opened, group) for group in asked.values()]
            found = [piece for one in coming for piece in one.result()]
            return stack.pop_all(), found

    def _open_part(
        self, wish: _Wish, part: WeightPart, pieces: Sequence[Piece], label: str, stack: ExitStack
    ) -> Sequence[OpenedPiece]:
        """From one source after another, and all of them again for as long as that brings bytes."""
        failures: list[StreamError] = []
        receiving = Receiving([wish.stretch(piece) for piece in pieces if not wish.has_come(piece)])
        if pieces and receiving.is_done:
            return wish.received(pieces)
        found, idle = choose_sources(part.sources, part.host), 0
        if not any(wish.may_map(address) for address in found):
            wish.memory.allocate()  # or nobody need be asked
        try:
            while found and idle < ROUNDS:
                received = receiving.nbytes
                for address, deadline, reach_s in self._in_turn(found, wish.deadline, receiving):
                    try:
                        return self._open_at(address, wish, part, pieces, receiving, stack, reach_s, deadline)
                    except PULL_FAILURES as error:
                        failures.append(error)
                idle = 0 if receiving.nbytes > received else idle + 1
            reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures)) or UNREACHABLE
            failures.append(PeerUnavailableError(", ".join(part.sources) or "(no source)", f"{label}: {reasons}"))
            raise _most_telling(failures)
        finally:
            failures.clear()

    def _open_at(
        self,
        address: Address,
        wish: _Wish,
        part: WeightPart,
        pieces: Sequence[Piece],
        receiving: Receiving,
        stack: ExitStack,
        reach_s: float,
        deadline: Deadline,
    ) -> Sequence[OpenedPiece]:
        """Map the part, or receive what is missing of it. stack: closes what was mapped."""
        with ExitStack() as opened:
            segment = self._open(address, part.total_bytes, deadline, reach_s)
            opened.callback(segment.close)
            if segment.buffer is not None:
                self.way = "mapped" if address.scheme == "shm" else address.scheme
                mapped = [OpenedPiece(piece, wish.bytes_of(piece, segment.buffer)) for piece in pieces]
                if wish.are_right(mapped):
                    stack.enter_context(opened.pop_all())
                    return mapped
                del mapped  # the pieces that are right are taken from it all the same
            self._listen_facing(segment, wish)
            if isinstance(segment, TcpSegment) and self._shared(segment, address, wish):
                self.way = "mapped"
                return wish.received(pieces)
            wish.save(receiving, pieces)
            try:
                receiving.take(segment)
            except PeerUnavailableError:
                # UCX has let go of it, if it could be told to: no other version is put there.
                wish.memory.kept |= isinstance(segment, TcpSegment) and segment.by_ucx
                raise
            self.way = "ucx" if isinstance(segment, TcpSegment) and segment.by_ucx else address.scheme
        return wish.received(pieces)

    def _listen_facing(self, segment: Segment, wish: _Wish) -> None:
        """What is passed on is served from now on, where others of the source's network reach this host."""
        if self._relay is not None and wish.relayed is not None and isinstance(segment, TcpSegment):
            self._relay.listen(segment.own_host)

    def _shared(self, segment: TcpSegment, address: Address, wish: _Wish) -> bool:
        """Map what another worker of this host receives, as soon as it is whole there. False: that cannot be had.

        Each tensor is compared as it comes there. Raises PeerUnavailableError, ChecksumError: what had come until then
        can still be had of that memory, for as long as ``wish`` is there.
        """
        if wish.wanted is not None or not wish.may_map(address) or not (where := segment.memory()):
            return False
        try:
            memory = Memory.of_mate(parse_address(where), wish.manifest.total_bytes)
        except PULL_FAILURES as error:  # of another container, or about to be used for the next version
            log.info("memory of another worker is not mapped", reason=str(error))
            return False
        came = wish.left_there[memory] = set[int]()
        pieces = {piece.offset: piece for piece in single_part(wish.manifest).pieces if math.prod(piece.shape)}
        for offsets in segment.follow(where):
            for offset in pieces.keys() & set(offsets):
                nbytes = piece_bytes(wish.manifest.tensors, pieces[offset])
                if wish.verify:
                    view = memory.buffer[offset : offset + nbytes]
                    wish.checks.run(partial(verify_piece, wish.manifest, pieces[offset], view))
                segment.note_bytes(nbytes)
                came.add(offset)
        if came != pieces.keys():
            raise ChecksumError(f"{wish.manifest.weights}: {len(pieces) - len(came)} tensors did not come")
        wish.left_there.clear()
        wish.memory = memory
        if wish.relayed is not None:  # what waits for the rest of what came here so far asks again
            wish.relayed.end()
            wish.relayed = self._relayed = self._pass_on(wish.manifest, memory)
        return True


@dataclass(slots=True)
class _Wish:
    """What one pull is to give. wanted: boxes by the index of their tensor, None for all.  memory: for what comes.
    checks: run what compares it.  relayed: told of each tensor that is whole.  left_there: offsets of those that are
    right in another's memory.
    """

    manifest: WeightManifest
    verify: bool
    wanted: Mapping[int, Box] | None
    deadline: Deadline
    memory: Memory
    checks: _Checks
    relayed: RelayedVersion | None = None
    came: dict[int, set[Box]] = field(default_factory=dict[int, "set[Box]"])  # by tensor: what was verified of it
    left_there: dict[Memory, set[int]] = field(default_factory=dict[Memory, set[int]])

    def may_map(self, address: Address) -> bool:
        """Whether the bytes there may be of this host: a segment's, or those of a worker that passes them on."""
        return address.is_mapped or address.path == segment_of(self.manifest.weights)

    def has(self, piece: Piece) -> bool:
        if self.wanted is None:
            return True
        box = self.wanted.get(piece.tensor)
        return box is not None and bool(box.common(box_of(piece)).num_elements)

    def bytes_of(self, piece: Piece, buffer: memoryview) -> memoryview:
        """In a part that is mapped at ``buffer``."""
        return buffer[piece.offset : piece.offset + piece_bytes(self.manifest.tensors, piece)]

    @property
    def assembled(self) -> Assembled:
        return Assembled(self.manifest.tensors, self.memory)

    def is_here(self, tensor: int) -> bool:
        """Whether all of it was received and verified, by whichever way."""
        boxes, shape = self.came.get(tensor, set()), self.manifest.tensors[tensor].shape
        return whole(shape) in boxes or sum(box.num_elements for box in boxes) == math.prod(shape) > 0

    def is_all_here(self) -> bool:
        return all(not spec.nbytes or self.is_here(tensor) for tensor, spec in enumerate(self.manifest.tensors))

    def has_come(self, piece: Piece) -> bool:
        return box_of(piece) in self.came.get(piece.tensor, ()) or self.is_here(piece.tensor)

    def received(self, pieces: Sequence[Piece]) -> Sequence[OpenedPiece]:
        """Pieces whose tensors lie in ``memory``."""
        return [OpenedPiece(piece, self.assembled.tensor(piece.tensor), whole=True) for piece in pieces]

    def are_right(self, mapped: Sequence[OpenedPiece]) -> bool:
        try:
            self.compare(mapped if self.verify else ())
        except ChecksumError:
            return False
        return True

    def save(self, receiving: Receiving, pieces: Sequence[Piece]) -> None:
        """Bring here what another of this host had received before it died. Raises ChecksumError."""
        places = {spec.offset: (number, spec.shape) for number, spec in enumerate(self.manifest.tensors) if spec.nbytes}
        alike = {one.offset for one in pieces if places.get(one.offset) == (one.tensor, one.shape)}
        while self.left_there:
            memory, offsets = self.left_there.popitem()
            receiving.copy(memory.buffer, alike & offsets)

    def compare(self, pieces: Sequence[OpenedPiece]) -> None:
        """Raises ChecksumError."""
        for one in pieces:
            self.checks.run(partial(verify_piece, self.manifest, one.piece, one.view))

    def whole_pieces(self) -> Sequence[OpenedPiece]:
        """All tensors, in ``memory``."""
        return self.received(single_part(self.manifest).pieces)

    def patching(self, part: WeightPart, patch: TensorPatch, relayed: RelayedChanges | None) -> Stretch:
        """The patch, and once it is there its piece, changed. relayed: where others may ask for it then."""
        piece = part.pieces[patch.tensor]
        spec = self.manifest.tensors[piece.tensor]

        def finish(data: memoryview) -> None:
            if checksum(data) != patch.checksum:
                raise ChecksumError(f"{self.manifest.weights}: what changed in tensor {spec.name!r} came wrong")
            if relayed is not None:
                relayed.verified([patch.offset])
            row = self.assembled.row(piece)
            apply(data, row, ITEM_BYTES[spec.dtype])
            if not self.assembled.is_row(piece):
                self.assembled.put(piece, row)

        def place() -> memoryview:
            if relayed is not None:
                return relayed.memory.buffer[patch.offset : patch.offset + patch.nbytes]
            return memoryview(bytearray(patch.nbytes))

        return Stretch(patch.offset, patch.nbytes, place, lambda data: self.checks.run(partial(finish, data)))

    def verify_in_memory(self, piece: Piece) -> None:
        """Raises ChecksumError."""
        self.checks.run(partial(verify_piece, self.manifest, piece, self.assembled.row(piece)))
        self._note(piece)

    def stretch(self, piece: Piece) -> Stretch:
        """The piece, received where it lies in its tensor, or where it does not lie in a row there, put there then."""
        nbytes, is_row = piece_bytes(self.manifest.tensors, piece), self.assembled.is_row(piece)

        def place() -> memoryview:  # only when its bytes come: there is no memory before, and none at all for who maps
            return self.assembled.row(piece) if is_row else memoryview(bytearray(nbytes))

        def finish(data: memoryview) -> None:
            self.checks.run(partial(verify_piece, self.manifest, piece, data))
            if not is_row:
                self.assembled.put(piece, data)
            self._note(piece)

        return Stretch(piece.offset, nbytes, place, finish)

    def _note(self, piece: Piece) -> None:
        """It is verified. Changes, the range of the manifest and the parts may each bring it."""
        self.came.setdefault(piece.tensor, set()).add(box_of(piece))
        if self.relayed is not None:
            self.relayed.verified(piece)
            if self.is_here(piece.tensor):
                self.relayed.verified_tensors([piece.tensor])


def _content(weights: WeightIdentity, manifest: WeightManifest) -> str:
    """Names the bytes of a version that lies as ``manifest`` lays it out."""
    return f"{weights.digest} {digest_layout(manifest.tensors)}"


def _changes_since(base: str, manifest: WeightManifest) -> Mapping[int | None, WeightPart]:
    """By number the parts of which there is what changed since the content ``base``, None for the version as one.

    None of them where all of it costs nothing.
    """
    parts = dict(enumerate(manifest.parts)) if manifest.parts else {None: single_part(manifest)}
    if all(any(one.is_mapped for one in choose_sources(part.sources, part.host)) for part in parts.values()):
        return {}
    return {
        number: part
        for number, part in parts.items()
        if part.delta is not None and _content(part.delta.base, manifest) == base
    }


def _checked(manifest: WeightManifest, wanted: Mapping[str, Box] | None) -> Mapping[int, Box] | None:
    """``wanted`` by index. Raises ValueError: the version has no such tensor, or it is smaller."""
    if wanted is None:
        return None
    index = {spec.name: number for number, spec in enumerate(manifest.tensors)}
    for name, box in wanted.items():
        shape = manifest.tensors[index[name]].shape if name in index else None
        if shape is None or len(box.shape) != len(shape) or box.common(whole(shape)) != box:
            raise ValueError(f"{box} of tensor {name!r} is wanted, which has shape {shape}")
    return {index[name]: box for name, box in wanted.items()}


def _most_telling(failures: Sequence[StreamError]) -> StreamError:
    """A refusal or wrong bytes before silence; of silences the last, which sums up those before."""
    for kind in (PeerRejectedError, ChecksumError, MessageError):
        if said := next((failure for failure in failures if isinstance(failure, kind)), None):
            return said
    return failures[-1]


def _view(data: memoryview, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The elements in ``data``, without a copy."""
    import torch

    return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape)) if data.nbytes else torch.empty(shape, dtype=dtype)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Sequence[int]]:
    """Their shapes, for which no tensor is put together."""
    if isinstance(tensors, PulledTensors | Renamed):
        return tensors.shapes()
    return {n: tuple(t.shape) for n, t in tensors.items()}


class Renamed(Mapping[str, "torch.Tensor"]):
    """Tensors under other names, none put together before it is asked for. names: old -> new; others stay."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._old = {names.get(name, name): name for name in tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._old[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._old)

    def __len__(self) -> int:
        return len(self._old)

    def shapes(self) -> Mapping[str, Sequence[int]]:
        shapes = shapes_of(self._tensors)
        return {new: shapes[old] for new, old in self._old.items()}


def check_tensors(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` can replace all ``parameters``; a tied tensor may come under any or all of its names.

    Raises: WeightsMismatchError naming what is missing, unknown, or of another shape.
    """
    given = {id(parameters[name]) for name in tensors if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    unknown = [name for name in tensors if name not in parameters]
    misshaped = [
        f"{name} {tuple(shape)} instead of {tuple(parameters[name].shape)}"
        for name, shape in shapes_of(tensors).items()
        if name in parameters and tuple(shape) != tuple(parameters[name].shape)
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    if any(problems.values()):
        found = "; ".join(f"{kind}: {shown_names(names)}" for kind, names in problems.items() if names)
        raise WeightsMismatchError(f"the new weights do not fit the model: {found}")


def shown_names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
