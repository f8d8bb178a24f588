"""Segments between hosts: a server sends byte ranges of its store's files, a reader receives into its own buffer.

Owns: the two messages of a transfer. Never: what the bytes mean, or whether they are right (the manifest's checksums
say). Invariant: a reader allocates what its caller asked for, never what a peer announced.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from transport.contracts.messages import MessageDecoder
from transport.contracts.types import Struct
from transport.errors import ChecksumError, PeerUnavailableError
from transport.tensors.address import Address, Endpoint
from transport.tensors.base import Deadline, SegmentReader, SegmentWriter
from transport.tensors.server import ChannelServer
from transport.tensors.shm import ShmReader, ShmStore
from transport.tensors.wire import Channel, Refused, connect

REQUEST_S = 120.0
"""Limit of one range on the server's side: 1 GB at 10 MB/s. The reader's own deadline is usually shorter."""


class ReadRange(Struct, frozen=True, kw_only=True, tag=True):
    """Send ``[offset, offset + nbytes)`` of ``segment``, which has ``segment_bytes`` bytes as a whole."""

    segment: str
    segment_bytes: int
    offset: int
    nbytes: int


class RangeFollows(Struct, frozen=True, kw_only=True, tag=True):
    """``nbytes`` bytes follow this header."""

    nbytes: int


_request_decoder = MessageDecoder(ReadRange)
_answer_decoder: MessageDecoder[RangeFollows | Refused] = MessageDecoder(
    cast("type[RangeFollows | Refused]", RangeFollows | Refused)
)


class TensorServer:
    """Serves the segments of one store while it is started."""

    def __init__(self, store: ShmStore, endpoint: Endpoint) -> None:
        self._store = store
        self._endpoint = endpoint
        self._server = ChannelServer(self._serve, endpoint, request_s=REQUEST_S)
        self._port = 0

    def start(self) -> None:
        self._port = self._server.start()

    def address(self, name: str) -> str:
        """Where segment ``name`` is served."""
        return self._endpoint.address(self._port, name)

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(_request_decoder)
        channel.deadline = Deadline(REQUEST_S)
        file = self._store.open_file(request.segment)
        if file is None:
            channel.send(Refused(reason=f"no segment {request.segment!r} here", retry=True))
            return
        with file:
            size = file.seek(0, 2)
            inside = min(request.offset, request.nbytes) >= 0 and request.offset + request.nbytes <= size
            if request.segment_bytes != size or not inside:
                channel.send(Refused(reason=f"segment {request.segment!r} has {size} bytes"))
                return
            channel.send(RangeFollows(nbytes=request.nbytes))
            channel.send_file(file, request.offset, request.nbytes)

    def close(self) -> None:
        self._server.close()


class ServedWriter:
    """A segment that will have a network address too."""

    def __init__(self, writer: SegmentWriter, tcp_address: str) -> None:
        self._writer = writer
        self._tcp_address = tcp_address

    def write(self, offset: int, data: memoryview) -> None:
        self._writer.write(offset, data)

    def seal(self) -> tuple[str, ...]:
        return (*self._writer.seal(), self._tcp_address)

    def abort(self) -> None:
        self._writer.abort()


class ServedStore:
    """A shared-memory store whose segments other hosts can read too. Addresses: shm first, then tcp."""

    def __init__(self, store: ShmStore, endpoint: Endpoint) -> None:
        self._store = store
        self._server = TensorServer(store, endpoint)

    def start(self) -> None:
        self._server.start()

    def create(self, name: str, nbytes: int) -> ServedWriter:
        return ServedWriter(self._store.create(name, nbytes), self._server.address(name))

    def drop(self, name: str) -> None:
        self._store.drop(name)

    def close(self) -> None:
        self._store.close()  # first: should this process be killed while it ends, no file is left
        self._server.close()


class TcpSegment:
    """Received bytes, in a buffer on loan from their reader."""

    def __init__(self, reader: TcpReader, buffer: memoryview) -> None:
        self._reader = reader
        self.buffer = buffer

    def close(self) -> None:
        """Give the buffer back: the reader's next segment overwrites it."""
        self._reader.take_back(self.buffer)
        self.buffer = memoryview(b"")


class TcpReader:
    """Pulls whole segments. Keeps one buffer for the next of the same size: fresh pages cost more than the transfer."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._spare: memoryview | None = None

    def open(self, address: Address, nbytes: int, deadline: Deadline) -> TcpSegment:
        channel = connect(address.place, address.port, str(address), self._secret, deadline)
        try:
            channel.send(ReadRange(segment=address.path, segment_bytes=nbytes, offset=0, nbytes=nbytes))
            answer = channel.receive(_answer_decoder)
            _check_answer(answer, address, nbytes)
            buffer = self._take(nbytes)
            channel.receive_into(buffer)
        finally:
            channel.close()
        return TcpSegment(self, buffer)

    def _take(self, nbytes: int) -> memoryview:
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes == nbytes:
            return spare
        try:
            return np.empty(nbytes, np.uint8).data
        except MemoryError as error:
            raise ChecksumError(f"there is no memory for {nbytes} bytes") from error

    def take_back(self, buffer: memoryview) -> None:
        self._spare = buffer


def _check_answer(answer: RangeFollows | Refused, address: Address, nbytes: int) -> None:
    if isinstance(answer, Refused):
        error = (
            PeerUnavailableError(str(address), answer.reason)
            if answer.retry
            else ChecksumError(f"{address}: {answer.reason} instead of {nbytes}")
        )
        raise error
    if answer.nbytes != nbytes:
        raise ChecksumError(f"{address} sends {answer.nbytes} bytes instead of {nbytes}")


def reader_for(address: Address, secret: bytes) -> SegmentReader:
    """What reads ``address``. secret: of a connection; a file of this host is protected by its mode."""
    return ShmReader() if address.scheme == "shm" else TcpReader(secret)
