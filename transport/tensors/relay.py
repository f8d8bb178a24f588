"""A version on its way in, forwarded: a receiver serves what it has verified before the rest came.

    trainer ──► worker ──► worker ──► worker      each link carries each byte once, all of them at the same time

A relay begins to listen when its worker starts, at the address that faces the broker: it needs no setting of its own,
and passes on the first version too. A worker whose broker is on its own host learns no address from that: its relay
begins when first bytes come over a network, at the address that faces their source.

A worker of the same host is sent nothing: it maps the memory that the version comes into.

Owns: what may be sent or mapped of a version, and until when. Never: who pulls from whom
(``orchestrator/core/broadcast.py``), or a checksum. Invariants: no byte is sent before it was verified here; memory
that is being sent is not written to.
"""

from __future__ import annotations

import bisect
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from transport.contracts.messages import MessageDecoder, Piece, WeightDelta, WeightManifest
from transport.contracts.types import WeightIdentity
from transport.errors import PeerUnavailableError, StreamError
from transport.process.logs import get_logger
from transport.tensors.assembled import Assembled
from transport.tensors.base import Deadline, Endpoint, TimeLimit, host_id, is_loopback
from transport.tensors.manifest import piece_bytes
from transport.tensors.receive import Memory
from transport.tensors.tcp import (
    Follow,
    RangeFollows,
    ReadRange,
    Verified,
    Waits,
    check_range,
    sending_by_ucx,
    serve_range,
)
from transport.tensors.ucx import CHUNK_BYTES
from transport.tensors.wire import Channel, ChannelServer, Refused

log = get_logger(__name__)

SEND_BYTES = 4 * 1024 * 1024  # in one call at most, so that a reader that stops is noticed
MIN_BEAT_S = 0.1  # however often a reader wants to hear that its bytes are waited for

_request_decoder: MessageDecoder[ReadRange | Follow] = MessageDecoder(
    cast("type[ReadRange | Follow]", ReadRange | Follow)
)


def segment_of(weights: WeightIdentity, part: int | None = None, *, changes: bool = False) -> str:
    """What a relay calls the version's own range of bytes, or that of a part of its manifest; or what changed there."""
    name = f"{weights.epoch}.{weights.version}.{weights.digest}" + (f".{part}" if part is not None else "")
    return f"{name}.changes" if changes else name


class Relayed:
    """One version in this process's memory.

    spans: (offset, bytes) of each tensor there; what lies between them is padding, which nobody checks.
    """

    def __init__(self, weights: WeightIdentity, memory: Memory, spans: Iterable[tuple[int, int]]) -> None:
        self.weights = weights
        self.segment = segment_of(weights)
        self.nbytes = memory.nbytes
        self._memory = memory
        self._spans = sorted(span for span in spans if span[1])
        self._starts = [start for start, _ in self._spans]
        self._all = frozenset(self._starts)
        self._here: set[int] = set()
        self._changed = threading.Condition()
        self._readers = 0
        self._over = False

    def verified(self, offsets: Iterable[int]) -> None:
        """What begins there is whole and right."""
        with self._changed:
            self._here.update(self._all.intersection(offsets))
            self._changed.notify_all()

    def until(self, start: int, deadline: Deadline) -> int:
        """Wait for the byte at ``start``. Returns up to where bytes are here. Raises PeerUnavailableError."""
        while not (end := self._until(start, deadline.remaining_s())):
            if not deadline.remaining_s():
                raise self._ended()
        return end

    def _until(self, start: int, wait_s: float) -> int:
        """As ``until``; 0: not for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._end(start) > start, wait_s)
            if (end := self._end(start)) > start:
                return end
            if self._over:
                raise self._ended()
            return 0

    def _ended(self) -> PeerUnavailableError:
        return PeerUnavailableError("", f"{self.weights} does not come any further")

    def send(self, channel: Channel, header: RangeFollows, offset: int) -> None:
        """Send each byte as soon as it is here. Raises PeerUnavailableError."""
        channel.send(header)
        end = offset + header.nbytes
        while offset < end:
            upto = min(end, offset + SEND_BYTES, self.until(offset, channel.deadline))
            channel.send_view(self._view(offset, upto))
            offset = upto

    def send_ranges(self, channel: Channel, request: ReadRange, beat_s: float, endpoint: Endpoint) -> None:
        """The same, and each time that nothing came for ``beat_s``, that it is waited for."""
        ucx = sending_by_ucx(channel, request, endpoint)
        offset, end, tag = request.offset, request.offset + request.nbytes, request.tag
        at_once = SEND_BYTES if ucx is None else request.nbytes
        while offset < end:
            channel.deadline = endpoint.limit.deadline(end - offset)
            while upto := min(end, offset + at_once, self._until(offset, beat_s)):
                if ucx is None:
                    channel.send(RangeFollows(nbytes=upto - offset), [self._view(offset, upto)])
                else:
                    channel.send(RangeFollows(nbytes=upto - offset, ucx=ucx.address))
                    tag = ucx.send(tag, self.chunks(channel, offset, upto - offset))
                if (offset := upto) == end:
                    return
            channel.send(Waits())
        channel.send(RangeFollows(nbytes=0))  # it asked for none

    def chunks(self, channel: Channel, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The same bytes in messages, each as soon as all of it is here."""
        here, end = offset, offset + nbytes
        while offset < end:
            upto = min(end, offset + CHUNK_BYTES)
            while here < upto:
                here = self.until(here, channel.deadline)
            yield self._view(offset, upto)
            offset = upto

    def _view(self, start: int, end: int) -> memoryview:
        """Those bytes, which are here."""
        return self._memory.buffer[start:end]

    def address(self, channel: Channel, beat_s: float, limit: TimeLimit) -> str:
        """Where it can be mapped. Until some of it is here it may still come elsewhere. Raises PeerUnavailableError."""
        while self._more_than(0, beat_s) is None:
            channel.deadline = limit.deadline(0)
            channel.send(Waits())
        return self._memory.address

    def follow(self, channel: Channel, memory: str, beat_s: float, limit: TimeLimit) -> None:
        """Say what is here, until all is. Raises PeerUnavailableError."""
        if memory != self._memory.address:
            raise PeerUnavailableError(channel.address, "maps other memory")
        told = frozenset[int]()
        while True:
            here = self._more_than(len(told), beat_s)
            channel.deadline = limit.deadline(0)
            if here is None:
                channel.send(Waits())
                continue
            channel.send(Verified(offsets=tuple(sorted(here - told)), whole=here == self._all))
            if here == self._all:
                return
            told = here

    def _more_than(self, number: int, wait_s: float) -> frozenset[int] | None:
        """What is here, once that is more than ``number`` tensors or all; None: not for so long.

        Raises PeerUnavailableError.
        """
        with self._changed:

            def is_here() -> bool:
                return len(self._here) > number or len(self._here) == len(self._all)

            self._changed.wait_for(lambda: self._over or is_here(), wait_s)
            if is_here():
                return frozenset(self._here)
            if self._over:
                raise self._ended()
            return None

    def _end(self, start: int) -> int:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for offset, nbytes in self._spans[first:]:
            if offset not in self._here and offset + nbytes > start:
                return offset
        return self.nbytes

    def enter(self) -> bool:
        """Count a reader. Returns False where the version is over."""
        with self._changed:
            self._readers += not self._over
            return not self._over

    def leave(self, *, failed: bool) -> None:
        """failed: not all was sent, and what carries the bytes may still read some of them (ucx.py)."""
        with self._changed:
            self._readers -= 1
            self._memory.kept |= failed

    def end(self) -> None:
        """No byte of it is sent to anyone new; where some are being sent, its memory is not received into again."""
        with self._changed:
            self._over = True
            self._memory.kept |= self._readers > 0
            self._changed.notify_all()


class RelayedPart(Relayed):
    """What one rank of the trainer holds of a version, laid out as there, from this process's memory of the whole.

    Its spans are pieces. One that does not lie in a row here (columns) is copied when it is sent.
    """

    def __init__(self, manifest: WeightManifest, part: int, memory: Memory) -> None:
        pieces = manifest.parts[part].pieces
        super().__init__(
            manifest.weights, memory, [(piece.offset, piece_bytes(manifest.tensors, piece)) for piece in pieces]
        )
        self.segment = segment_of(manifest.weights, part)
        self.nbytes = manifest.parts[part].total_bytes
        self._assembled = Assembled(manifest.tensors, memory)
        self._pieces = {piece.offset: piece for piece in pieces}
        self._copied: tuple[int, memoryview] | None = None  # the last one, by its offset

    def _view(self, start: int, end: int) -> memoryview:
        found = memoryview(bytearray(end - start))
        for offset, nbytes in self._spans[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if offset >= end:
                break
            first, last = max(start, offset), min(end, offset + nbytes)
            if first < last:
                row = self._row(offset)[first - offset : last - offset]
                if row.nbytes == found.nbytes:
                    return row
                found[first - start : last - start] = row
        return found

    def _row(self, offset: int) -> memoryview:
        piece = self._pieces[offset]
        if self._assembled.is_row(piece):
            return self._assembled.row(piece)
        copied = self._copied
        if copied is None or copied[0] != offset:
            copied = self._copied = offset, self._assembled.row(piece)
        return copied[1]


class RelayedChanges(Relayed):
    """What changed in the version, or in a part of it, as it came. Its spans are patches."""

    def __init__(self, weights: WeightIdentity, part: int | None, delta: WeightDelta) -> None:
        self.memory = Memory(delta.total_bytes)
        super().__init__(weights, self.memory, [(patch.offset, patch.nbytes) for patch in delta.patches])
        self.segment = segment_of(weights, part, changes=True)


class RelayedVersion:
    """A version that comes in, as others may ask for it: in one range, as each part of its manifest, and as changes."""

    def __init__(
        self, manifest: WeightManifest, memory: Memory, deltas: Mapping[int | None, WeightDelta] | None = None
    ) -> None:
        """deltas: of the parts that come as changes, by number; None: the version's own."""
        self._tensors = manifest.tensors
        whole = Relayed(manifest.weights, memory, [(spec.offset, spec.nbytes) for spec in manifest.tensors])
        parts = [RelayedPart(manifest, part, memory) for part in range(len(manifest.parts))]
        self.changes = {part: RelayedChanges(manifest.weights, part, delta) for part, delta in (deltas or {}).items()}
        self.segments: Sequence[Relayed] = (whole, *parts, *self.changes.values())
        self._pieces: dict[int, list[tuple[Relayed, Piece]]] = {}  # by tensor
        for segment, part in zip(parts, manifest.parts, strict=True):
            for piece in part.pieces:
                self._pieces.setdefault(piece.tensor, []).append((segment, piece))

    def verified(self, piece: Piece) -> None:
        """Its bytes are here, and right."""
        for segment, other in self._pieces.get(piece.tensor, ()):
            if (other.start, other.shape) == (piece.start, piece.shape):
                segment.verified([other.offset])

    def verified_tensors(self, tensors: Iterable[int]) -> None:
        """All of their bytes are."""
        found: dict[Relayed, list[int]] = {}
        for tensor in tensors:
            found.setdefault(self.segments[0], []).append(self._tensors[tensor].offset)
            for segment, piece in self._pieces.get(tensor, ()):
                found.setdefault(segment, []).append(piece.offset)
        for segment, offsets in found.items():
            segment.verified(offsets)

    def end(self) -> None:
        for segment in self.segments:
            segment.end()


class Relay:
    """What a worker passes on of the weights that it receives. Any thread may use it.

    address: tcp://host:port, "" as long as it does not listen.
    """

    def __init__(self, *, secret: bytes, limit: TimeLimit, ucx: bool = False) -> None:
        """ucx: bytes may go by it."""
        self._endpoint = Endpoint(secret=secret, limit=limit, ucx=ucx)
        self._limit = limit
        self._lock = threading.Condition()
        self._server: ChannelServer | None = None
        self._relayed: dict[str, Relayed] = {}  # by segment, all of one version
        self._place: tuple[int, int] | None = None  # of what was offered last
        self._closed = False
        self.address = ""

    def listen(self, host: str) -> None:
        """Begin, unless it has begun or was closed. host: the address of this machine that others of its network reach.

        Where it cannot, there is no relay, and others get their weights elsewhere.
        """
        with self._lock:
            if self._server is not None or self._closed:
                return
            try:
                endpoint = self._endpoint = replace(self._endpoint, host=host)
                server = ChannelServer(self._serve, endpoint, request_s=self._limit.wait_s)
                address = endpoint.address(server.start(), "x").removesuffix("/x")
            except StreamError as error:
                log.warning("weights are not passed on to others", reason=str(error))
                return
            self._server, self.address = server, address
            log.info("passes weights on", address=address)

    def listen_facing(self, peer: str) -> None:
        """Begin at the address that faces ``peer``, where that is another machine and there is a secret to ask for."""
        if self._endpoint.secret and (host := facing(peer)):
            self.listen(host)

    def offer(self, *segments: Relayed) -> None:
        """Serve these, of one version, instead of what was served."""
        with self._lock:
            self._relayed = {one.segment: one for one in segments}
            self._place = _place(segments[0].segment)
            self._lock.notify_all()

    def withdraw(self, *segments: Relayed) -> None:
        """They are over, and their memory is not held on to."""
        for one in segments:
            one.end()
        with self._lock:
            self._relayed = {name: one for name, one in self._relayed.items() if one not in segments}

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(_request_decoder)
        channel.deadline = self._limit.deadline(0)
        relayed = self._await(channel, request.segment, request.beat_s and self._beat_s(request))
        if relayed is None or not relayed.enter():
            channel.send(Refused(reason=f"no segment {request.segment!r} here", retry=True))
            return
        sent = isinstance(request, Follow)  # who maps holds on to it by itself
        try:
            self._answer(channel, request, relayed)
            sent = True
        finally:
            relayed.leave(failed=not sent)

    def _answer(self, channel: Channel, request: ReadRange | Follow, relayed: Relayed) -> None:
        """Raises MessageError, after the reader was told; PeerUnavailableError."""
        if isinstance(request, Follow):
            relayed.follow(channel, request.memory, self._beat_s(request), self._limit)
        elif not request.beat_s:
            serve_range(channel, request, relayed, self._endpoint)
        else:
            check_range(channel, request, relayed.nbytes, self._limit)
            if request.host == host_id():
                where = relayed.address(channel, self._beat_s(request), self._limit)
                channel.send(RangeFollows(nbytes=0, memory=where))
            else:
                relayed.send_ranges(channel, request, self._beat_s(request), self._endpoint)

    def _beat_s(self, request: ReadRange | Follow) -> float:
        """As often as the reader wants, within reason."""
        return min(max(MIN_BEAT_S, request.beat_s), self._limit.wait_s)

    def _await(self, channel: Channel, segment: str, beat_s: float) -> Relayed | None:
        """The version, which may be about to come; None where a newer one came instead, or nothing in time."""
        deadline = Deadline(self._limit.wait_s)
        while True:
            with self._lock:
                if self._may_come(segment):
                    self._lock.wait(min(deadline.remaining_s(), beat_s or deadline.remaining_s()))
                may_come, relayed = self._may_come(segment), self._relayed.get(segment)
            if not may_come or not deadline.remaining_s():
                return relayed
            if beat_s:
                channel.deadline = self._limit.deadline(0)
                channel.send(Waits())

    def _may_come(self, segment: str) -> bool:
        """Whether it is neither here nor never will be."""
        wanted = _place(segment)
        return self._server is not None and wanted is not None and (self._place is None or self._place < wanted)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            server, self._server, self.address = self._server, None, ""
            relayed, self._relayed = self._relayed, {}
            self._lock.notify_all()
        for one in relayed.values():
            one.end()
        if server is not None:
            server.close()


def facing(peer: str) -> str:
    """The address that this machine has for ``peer``, host:port; "" for one of its own, or none that can be reached."""
    host, _, port = peer.rpartition(":")
    if not host or host.startswith("/"):  # a socket of this host
        return ""
    try:
        for family, kind, _, _, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as unsent:
                unsent.connect(there)  # nothing travels: the kernel says which way it would
                here = str(unsent.getsockname()[0])
            return "" if is_loopback(here) else here
    except (OSError, UnicodeError):
        log.info("no way to the broker is known yet", broker=peer)
    return ""


def _place(segment: str) -> tuple[int, int] | None:
    """Epoch and version; None for a name that is none of ours."""
    try:
        epoch, version, _ = segment.split(".", 2)
        return int(epoch), int(version)
    except ValueError:
        return None


def relayed_address(relay: str, weights: WeightIdentity, part: int | None = None) -> str:
    """Where a relay that listens at ``relay`` has the version, or a part of it."""
    return f"{relay}/{segment_of(weights, part)}"


def relayed_changes(address: str, weights: WeightIdentity, part: int | None = None) -> str:
    """Where the relay that ``relayed_address`` names has what changed, if the version comes to it so."""
    return f"{address.rpartition('/')[0]}/{segment_of(weights, part, changes=True)}"
