"""Segments between hosts: a server sends byte ranges of its store's files, a reader receives into its own buffer.

Owns: the two messages of a transfer. Never: what the bytes mean, or whether they are right (the manifest's checksums
say). Invariant: a reader allocates what its caller asked for, never what a peer announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from transport.contracts.messages import MessageDecoder
from transport.contracts.types import Struct
from transport.errors import ChecksumError, PeerUnavailableError
from transport.tensors.base import Address, Deadline, Endpoint, Ranges, SegmentReader
from transport.tensors.shm import ShmReader, ShmStore, ShmWriter
from transport.tensors.wire import Channel, ChannelServer, Refused, connect

REQUEST_S = 120.0  # of one range, on the server: 1 GB at 10 MB/s. The reader's own deadline is usually shorter


class ReadRange(Struct, frozen=True, kw_only=True, tag=True):
    """Send ``[offset, offset + nbytes)`` of ``segment``, which has ``segment_bytes`` bytes as a whole."""

    segment: str
    segment_bytes: int
    offset: int
    nbytes: int


class RangeFollows(Struct, frozen=True, kw_only=True, tag=True):
    nbytes: int


_request_decoder = MessageDecoder(ReadRange)
_answer_decoder: MessageDecoder[RangeFollows | Refused] = MessageDecoder(
    cast("type[RangeFollows | Refused]", RangeFollows | Refused)
)


class ServedStore(ShmStore):
    """A shared-memory store whose segments other hosts can read too, while it is started. Addresses: shm, then tcp."""

    def __init__(self, run: str, directories: Sequence[Path], endpoint: Endpoint) -> None:
        super().__init__(run, directories)
        self._endpoint = endpoint
        self._server = ChannelServer(self._serve, endpoint, request_s=REQUEST_S)
        self._port = 0

    def start(self) -> None:
        self._port = self._server.start()

    def addresses(self, writer: ShmWriter) -> tuple[str, ...]:
        return (*super().addresses(writer), self._endpoint.address(self._port, writer.name))

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(_request_decoder)
        channel.deadline = Deadline(REQUEST_S)
        file = self.open_file(request.segment)
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
        super().close()  # first: should this process be killed while it ends, no file is left
        self._server.close()


class TcpSegment:
    """Received bytes, in a buffer on loan from their reader."""

    def __init__(self, reader: TcpReader, buffer: memoryview) -> None:
        self._reader = reader
        self.buffer = buffer

    def close(self) -> None:
        """Give the buffer back: the reader's next segment of this size overwrites it."""
        self._reader.spare.append(self.buffer)
        self.buffer = memoryview(b"")


class TcpReader:
    """Pulls segments, whole or ranges of them. Keeps its buffers for the next of the same sizes: fresh pages cost more
    than the transfer.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self.spare: list[memoryview] = []

    def open(self, address: Address, nbytes: int, deadline: Deadline, ranges: Ranges | None = None) -> TcpSegment:
        channel = connect(address.place, address.port, str(address), self._secret, deadline)
        try:
            buffer: memoryview | None = None
            for offset, length in ranges or [(0, nbytes)]:
                self._ask(channel, ReadRange(segment=address.path, segment_bytes=nbytes, offset=offset, nbytes=length))
                if buffer is None:  # only now: there is such a segment
                    buffer = self._take(nbytes)
                channel.receive_into(buffer[offset : offset + length])
        finally:
            channel.close()
        assert buffer is not None  # there is a range
        return TcpSegment(self, buffer)

    def _ask(self, channel: Channel, request: ReadRange) -> None:
        """Raises PeerUnavailableError, ChecksumError: the bytes do not follow."""
        answer = channel.ask(request, _answer_decoder)
        if isinstance(answer, Refused):
            if answer.retry:
                raise PeerUnavailableError(channel.address, answer.reason)
            raise ChecksumError(f"{channel.address}: {answer.reason} instead of {request.segment_bytes}")
        if answer.nbytes != request.nbytes:
            raise ChecksumError(f"{channel.address} sends {answer.nbytes} bytes instead of {request.nbytes}")

    def _take(self, nbytes: int) -> memoryview:
        for index, buffer in enumerate(self.spare):
            if buffer.nbytes == nbytes:
                return self.spare.pop(index)
        self.spare.clear()  # of a layout that is no more
        try:
            return np.empty(nbytes, np.uint8).data
        except MemoryError as error:
            raise ChecksumError(f"there is no memory for {nbytes} bytes") from error


def reader_for(address: Address, secret: bytes) -> SegmentReader:
    """What reads ``address``. secret: of a connection; a file of this host is protected by its mode."""
    return ShmReader() if address.scheme == "shm" else TcpReader(secret)
