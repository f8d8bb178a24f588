"""Segments between hosts: a server sends byte ranges of its store's files, a reader receives into its own buffer.

Which way the bytes go is agreed with each request: a reader that has UCX says where it can be reached, and a server
that has it, too, answers that they come there; in any other case they follow on the connection itself. Where UCX fails,
the reader asks the same host without it for a while.

Owns: the two messages of a transfer, and that choice. Never: what the bytes mean, or whether they are right (the
manifest's checksums say). Invariant: a reader's memory is what its caller asked for, never what a peer announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol, cast

import msgspec

from transport.contracts.messages import MessageDecoder
from transport.contracts.types import Struct
from transport.errors import ChecksumError, MessageError, PeerUnavailableError
from transport.process.logs import get_logger
from transport.tensors.base import Address, Deadline, Endpoint, SegmentReader, TimeLimit, host_id
from transport.tensors.shm import InprocReader, SealedFile, ShmReader, ShmStore, ShmWriter
from transport.tensors.ucx import UcxAddress, UcxReceiving, UcxSending, chunks
from transport.tensors.wire import JOINED_BYTES, Channel, ChannelServer, Refused, connect

log = get_logger(__name__)

WITHOUT_S = 600.0
"""Seconds for which UCX is not tried with a host where it failed once."""


class ReadRange(Struct, frozen=True, kw_only=True, tag=True):
    """Send ``[offset, offset + nbytes)`` of ``segment``, which has ``segment_bytes`` bytes as a whole.

    ucx: the reader's address there, if it may be used; chunks then have the tags from ``tag`` on.
    beat_s: a sender that does not have all of it may send it in ranges one after another, and says as often that it
    waits for the next; 0: it may not.  host: the reader's, which asks for no bytes but where it can map them.
    """

    segment: str
    segment_bytes: int
    offset: int
    nbytes: int
    ucx: UcxAddress | None = None
    tag: Annotated[int, msgspec.Meta(ge=0, lt=2**48)] = 0
    beat_s: float = 0.0
    host: str = ""


class RangeFollows(Struct, frozen=True, kw_only=True, tag=True):
    """ucx: the bytes come by UCX, from this address; else they follow this.

    memory: where a process of the sender's host can map the segment, while it comes in there.
    """

    nbytes: int
    ucx: UcxAddress | None = None
    memory: str = ""


class Follow(Struct, frozen=True, kw_only=True, tag=True):
    """Say what of ``segment`` is verified in ``memory``, which is mapped, and each time that more is."""

    segment: str
    memory: str
    beat_s: float


class Verified(Struct, frozen=True, kw_only=True, tag=True):
    """More is: the tensors that begin there.  whole: that was all."""

    offsets: tuple[int, ...]
    whole: bool


class Waits(Struct, frozen=True, kw_only=True, tag=True):
    """Ahead of an answer, or of more of it: the sender waits for the bytes itself."""


read_range_decoder = MessageDecoder(ReadRange)
_answer_decoder: MessageDecoder[RangeFollows | Waits | Refused] = MessageDecoder(
    cast("type[RangeFollows | Waits | Refused]", RangeFollows | Waits | Refused)
)
_progress_decoder: MessageDecoder[Verified | Waits | Refused] = MessageDecoder(
    cast("type[Verified | Waits | Refused]", Verified | Waits | Refused)
)


class Held(Protocol):
    """The bytes of a segment, where they are served."""

    nbytes: int

    def send(self, channel: Channel, header: RangeFollows, offset: int) -> None:
        """``header`` and the bytes that it announces, from ``offset`` on, over the connection itself."""
        ...

    def chunks(self, channel: Channel, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Such bytes as messages of ``ucx.CHUNK_BYTES``, the last one shorter."""
        ...


def serve_range(channel: Channel, request: ReadRange, held: Held, endpoint: Endpoint) -> None:
    """Answer ``request`` from ``held``. Raises MessageError, after the reader was told, where it is not inside."""
    check_range(channel, request, held.nbytes, endpoint.limit)
    channel.deadline = endpoint.limit.deadline(request.nbytes)
    ucx = sending_by_ucx(channel, request, endpoint)
    if ucx is None:
        held.send(channel, RangeFollows(nbytes=request.nbytes), request.offset)
    else:
        channel.send(RangeFollows(nbytes=request.nbytes, ucx=ucx.address))
        ucx.send(request.tag, held.chunks(channel, request.offset, request.nbytes))


def check_range(channel: Channel, request: ReadRange, nbytes: int, limit: TimeLimit) -> None:
    """Raises MessageError, after the reader was told: it is not inside of a segment of ``nbytes``."""
    inside = min(request.offset, request.nbytes) >= 0 and request.offset + request.nbytes <= nbytes
    if request.segment_bytes != nbytes or not inside:
        channel.deadline = limit.deadline(0)
        channel.send(Refused(reason=f"segment {request.segment!r} has {nbytes} bytes"))
        raise MessageError(f"{channel.address} asks for bytes that segment {request.segment!r} does not have")


def sending_by_ucx(channel: Channel, request: ReadRange, endpoint: Endpoint) -> UcxSending | None:
    """UCX to the reader of this connection; None where one of the two has it not, or it finds no way."""
    if not endpoint.ucx or request.ucx is None:
        return None
    if channel.beside is None:
        try:
            channel.beside = UcxSending(channel, request.ucx)
        except PeerUnavailableError as error:
            log.info("bytes go by TCP", to=channel.address, reason=error.reason)
    return channel.beside if isinstance(channel.beside, UcxSending) else None


class HeldFile:
    """A segment of a store."""

    def __init__(self, file: SealedFile) -> None:
        self._file = file
        self.nbytes = file.nbytes

    def send(self, channel: Channel, header: RangeFollows, offset: int) -> None:
        first = self._file.view[offset : offset + min(header.nbytes, JOINED_BYTES)]
        channel.send(header, [first])
        if first.nbytes < header.nbytes:
            channel.send_file(self._file.fd, offset + first.nbytes, header.nbytes - first.nbytes)

    def chunks(self, channel: Channel, offset: int, nbytes: int) -> Iterator[memoryview]:
        return chunks(self._file.view[offset : offset + nbytes])


class ServedStore(ShmStore):
    """A shared-memory store whose segments other hosts can read too, while it is started.

    Addresses: shm, tcp, inproc.
    """

    def __init__(self, run: str, directories: Sequence[Path], endpoint: Endpoint) -> None:
        super().__init__(run, directories)
        self._endpoint = endpoint
        self._server = ChannelServer(self._serve, endpoint, request_s=endpoint.limit.wait_s)
        self._port = 0

    def start(self) -> None:
        self._port = self._server.start()

    def addresses(self, writer: ShmWriter) -> tuple[str, ...]:
        shm, *others = super().addresses(writer)
        return (shm, self._endpoint.address(self._port, writer.name), *others)

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(read_range_decoder)
        if (file := self.sealed(request.segment)) is None:
            channel.deadline = self._endpoint.limit.deadline(0)
            channel.send(Refused(reason=f"no segment {request.segment!r} here", retry=True))
            return
        serve_range(channel, request, HeldFile(file), self._endpoint)

    def close(self) -> None:
        super().close()  # first: should this process be killed while it ends, no file is left
        self._server.close()


class TcpSegment:
    """A connection to who has the segment."""

    buffer = None

    def __init__(self, channel: Channel, address: Address, nbytes: int, ucx: UcxReceiving | None = None) -> None:
        """ucx: where its bytes may come."""
        self._channel = channel
        self._path = address.path
        self._nbytes = nbytes
        self._ucx = ucx
        self._left = self._in_range = 0  # bytes that were asked for, and those of them that are announced
        self.by_ucx = False
        channel.beside = ucx

    @property
    def own_host(self) -> str:
        """This host, as the other side sees it. Raises PeerUnavailableError."""
        return self._channel.own_host

    def ask(self, offset: int, nbytes: int) -> None:
        """Raises PeerUnavailableError, ChecksumError: the bytes do not follow."""
        self._left = nbytes
        answer = self._answer_to(
            ReadRange(
                segment=self._path,
                segment_bytes=self._nbytes,
                offset=offset,
                nbytes=nbytes,
                ucx=self._ucx.address if self._ucx else None,
                tag=self._ucx.next_tag() if self._ucx else 0,
                beat_s=self._channel.deadline.beat_s,
            )
        )
        self.by_ucx = self._ucx is not None and answer.ucx is not None

    def _answer_to(self, request: ReadRange) -> RangeFollows:
        self._channel.send(request)
        return self._next_range()

    def _receive_answer(self) -> RangeFollows | Waits | Refused:
        """Within the time for the first bytes by UCX, where they are to come so: a server whose UCX finds no way to
        this host does not answer at all.
        """
        channel, whole = self._channel, self._channel.deadline
        if self._ucx is None or self._ucx.has_come:
            return channel.receive(_answer_decoder)
        channel.deadline = self._ucx.first_limit()
        try:
            return channel.receive(_answer_decoder)
        except PeerUnavailableError as error:
            if channel.deadline.remaining_s():
                raise  # it left
            raise self._ucx.unanswered(channel.deadline) from error
        finally:
            channel.deadline = whole

    def _next_range(self) -> RangeFollows:
        """The next of the ranges in which what was asked for comes."""
        while isinstance(answer := self._receive_answer(), Waits):
            self._channel.deadline.note_waiting()
        if isinstance(answer, Refused):
            if answer.retry:
                raise PeerUnavailableError(self._channel.address, answer.reason)
            raise ChecksumError(f"{self._channel.address}: {answer.reason} instead of {self._nbytes}")
        in_ranges = bool(self._channel.deadline.beat_s)
        if answer.nbytes != self._left and not (in_ranges and 0 < answer.nbytes < self._left):
            raise ChecksumError(f"{self._channel.address} sends {answer.nbytes} bytes instead of {self._left}")
        self._in_range = answer.nbytes
        if self._ucx is not None and answer.ucx is not None:
            self._ucx.expect(answer.nbytes, answer.ucx)
        return answer

    def read(self, view: memoryview) -> int:
        if not self._in_range:
            self._next_range()
        view = view[: self._in_range]
        count = self._ucx.read(view) if self._ucx is not None and self.by_ucx else self._channel.receive_some(view)
        self._in_range -= count
        self._left -= count
        self._channel.deadline.note_bytes(count)
        return count

    def memory(self) -> str:
        """Where all of it can be mapped once it begins to come there; "": nowhere. Raises PeerUnavailableError."""
        if not self._channel.is_local:
            return ""
        self._left = 0
        beat_s = self._channel.deadline.beat_s
        request = ReadRange(
            segment=self._path, segment_bytes=self._nbytes, offset=0, nbytes=0, beat_s=beat_s, host=host_id()
        )
        return self._answer_to(request).memory

    def follow(self, memory: str) -> Iterator[Sequence[int]]:
        """What is verified there, until all is: offsets of tensors. Raises PeerUnavailableError."""
        self._channel.send(Follow(segment=self._path, memory=memory, beat_s=self._channel.deadline.beat_s))
        while True:
            match self._channel.receive(_progress_decoder):
                case Refused(reason=reason):
                    raise PeerUnavailableError(self._channel.address, reason)
                case Waits():
                    self._channel.deadline.note_waiting()
                case Verified(offsets=offsets, whole=whole):
                    yield offsets
                    if whole:
                        return

    def note_bytes(self, nbytes: int) -> None:
        """So many were found right that lie where they were mapped."""
        self._channel.deadline.note_bytes(nbytes)

    def close(self) -> None:
        self._channel.close()


class TcpReader:
    """Pulls ranges of segments."""

    def __init__(self, secret: bytes = b"", *, ucx: bool = False) -> None:
        """ucx: bytes may come by it."""
        self._secret = secret
        self._ucx = ucx
        self._without: dict[str, Deadline] = {}  # hosts at which UCX has failed, and until when it is not tried there
        self._failures: Counter[str] = Counter()

    def open(self, address: Address, nbytes: int, deadline: Deadline, reach: Deadline | None = None) -> TcpSegment:
        channel = connect(address.place, address.port, str(address), self._secret, reach or deadline)
        channel.deadline = deadline
        receiving: UcxReceiving | None = None
        if self._ucx and not self._does_without(address.place):
            try:
                receiving = UcxReceiving(channel, partial(self._do_without, address.place))
            except PeerUnavailableError as error:
                log.warning("bytes come by TCP", reason=error.reason)
                self._ucx = False
        return TcpSegment(channel, address, nbytes, receiving)

    def _does_without(self, host: str) -> bool:
        return host in self._without and self._without[host].remaining_s() > 0

    def _do_without(self, host: str, reason: str) -> None:
        """UCX failed there: TCP for a while, which doubles each time, since what closes a port mostly stays."""
        self._failures[host] += 1
        seconds = WITHOUT_S * 2 ** min(self._failures[host] - 1, 6)
        self._without[host] = Deadline(seconds)
        log.warning("UCX failed; bytes come by TCP", peer=host, for_s=seconds, reason=reason)


def reader_for(address: Address, secret: bytes, *, ucx: bool = False) -> SegmentReader:
    """What reads ``address``. secret: of a connection; a file of this host is protected by its mode."""
    if address.scheme == "inproc":
        return InprocReader()
    return ShmReader() if address.scheme == "shm" else TcpReader(secret, ucx=ucx)
