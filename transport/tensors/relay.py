"""A version on its way in, forwarded: a receiver serves what it has verified before the rest came.

    trainer ──► worker ──► worker ──► worker      each link carries each byte once, all of them at the same time

A relay begins to listen when its worker starts, at the address that faces the broker: it needs no setting of its own,
and passes on the first version too. A worker whose broker is on its own host learns no address from that: its relay
begins when first bytes come over a network, at the address that faces their source.

Owns: what may be sent of a version, and until when. Never: who pulls from whom (``orchestrator/core/broadcast.py``), or
a checksum. Invariants: no byte is sent before it was verified here; memory that is being sent is not written to.
"""

from __future__ import annotations

import bisect
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from transport.contracts.types import WeightIdentity
from transport.errors import PeerUnavailableError, StreamError
from transport.process.logs import get_logger
from transport.tensors.base import Deadline, Endpoint, TimeLimit, is_loopback
from transport.tensors.receive import Memory
from transport.tensors.tcp import RangeFollows, read_range_decoder, serve_range
from transport.tensors.ucx import chunks
from transport.tensors.wire import Channel, ChannelServer, Refused

log = get_logger(__name__)

SEND_BYTES = 4 * 1024 * 1024  # in one call at most, so that a reader that stops is noticed


def segment_of(weights: WeightIdentity) -> str:
    """What a relay calls the version's own range of bytes."""
    return f"{weights.epoch}.{weights.version}.{weights.digest}"


class Relayed:
    """One version in this process's memory.

    spans: (offset, bytes) of each tensor there; what lies between them is padding, which nobody checks.
    """

    def __init__(self, weights: WeightIdentity, memory: Memory, spans: Sequence[tuple[int, int]]) -> None:
        self.weights = weights
        self.buffer = memory.buffer
        self._memory = memory
        self.nbytes = memory.buffer.nbytes
        self._spans = sorted(spans)
        self._starts = [start for start, _ in self._spans]
        self._here = {start for start, nbytes in self._spans if not nbytes}
        self._changed = threading.Condition()
        self._readers = 0
        self._over = False

    def verified(self, offsets: Iterable[int]) -> None:
        """The tensors that begin there are whole and right."""
        with self._changed:
            self._here.update(offsets)
            self._changed.notify_all()

    def until(self, start: int, deadline: Deadline) -> int:
        """Wait for the byte at ``start``. Returns up to where bytes are here. Raises PeerUnavailableError."""
        with self._changed:
            while (end := self._end(start)) <= start and not self._over:
                if not (remaining_s := deadline.remaining_s()):
                    break
                self._changed.wait(remaining_s)
            if end <= start:
                raise PeerUnavailableError("", f"{self.weights} does not come any further")
            return end

    def send(self, channel: Channel, header: RangeFollows, offset: int) -> None:
        """Send each byte as soon as it is here. Raises PeerUnavailableError."""
        channel.send(header)
        end = offset + header.nbytes
        while offset < end:
            upto = min(end, offset + SEND_BYTES, self.until(offset, channel.deadline))
            channel.send_view(self.buffer[offset:upto])
            offset = upto

    def chunks(self, channel: Channel, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The same bytes in messages, each as soon as all of it is here."""
        here = offset
        for chunk in chunks(self.buffer[offset : offset + nbytes]):
            offset += chunk.nbytes
            while here < offset:
                here = self.until(here, channel.deadline)
            yield chunk

    def _end(self, start: int) -> int:
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for offset, nbytes in self._spans[first:]:
            if offset not in self._here and offset + nbytes > start:
                return offset
        return self.buffer.nbytes

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
        self._relayed: Relayed | None = None
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

    def offer(self, relayed: Relayed) -> None:
        """Serve it instead of what was served."""
        with self._lock:
            self._relayed = relayed
            self._lock.notify_all()

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(read_range_decoder)
        channel.deadline = self._limit.deadline(request.nbytes)
        relayed = self._await(request.segment, channel.deadline)
        if relayed is None or not relayed.enter():
            channel.send(Refused(reason=f"no segment {request.segment!r} here", retry=True))
            return
        sent = False
        try:
            serve_range(channel, request, relayed, self._endpoint)
            sent = True
        finally:
            relayed.leave(failed=not sent)

    def _await(self, segment: str, deadline: Deadline) -> Relayed | None:
        """The version, which may be about to come; None where a newer one came instead, or nothing in time."""
        wanted = _place(segment)
        with self._lock:
            while wanted is not None and self._server is not None:
                at = _place(segment_of(self._relayed.weights)) if self._relayed is not None else None
                if self._relayed is not None and segment_of(self._relayed.weights) == segment:
                    return self._relayed
                remaining_s = deadline.remaining_s()
                if not remaining_s or (at is not None and at >= wanted):
                    return None
                self._lock.wait(remaining_s)
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            server, self._server, self.address = self._server, None, ""
            relayed, self._relayed = self._relayed, None
            self._lock.notify_all()
        if relayed is not None:
            relayed.end()
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
        epoch, version, _ = segment.split(".")
        return int(epoch), int(version)
    except ValueError:
        return None


def relayed_address(relay: str, weights: WeightIdentity) -> str:
    """Where a relay that listens at ``relay`` has the version."""
    return f"{relay}/{segment_of(weights)}"
