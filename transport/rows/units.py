"""Storage units: servers that keep the bytes of columns, so that the broker keeps only where they are.

A unit holds segments (segments.py) and decides nothing: it knows neither rows nor tasks. A writer on the unit's own
host asks for a segment and writes it, in shared memory; readers of that host read it there. Few bytes, those of other
hosts, and those for which shared memory has no room are put: sent to the unit, which keeps them as a segment of its own
memory. Readers that cannot open a segment ask the unit for ranges of it. A segment belongs to all groups whose values
are in it, and counts as a whole until the last of them is dropped.

    put       counts from its header on, and no longer than its connection lasts or its time, unless all of it came;
              repeating one replaces it
    allocate  counts at once; a segment is freed with the connection that asked for it, until ``keep`` says that it is
              written, which comes before any locator

Owns: which group has which segments, their bound in bytes, the messages. Invariants: what a unit holds of a group goes
with ``drop_groups``; nothing else removes what a locator may point to; what was announced and what is held are together
never more than ``max_bytes``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from transport.contracts.messages import MessageDecoder
from transport.contracts.types import Count, GroupId, Struct
from transport.errors import ChecksumError, MessageError, PeerUnavailableError, SegmentSpaceError
from transport.rows.columns import MAX_COLUMN_BYTES
from transport.rows.segments import Buffer, Range, Segments, name_of_sent, read_segments
from transport.tensors.base import Deadline, Endpoint, host_id, parse_address
from transport.tensors.manifest import checksum, checksum_of
from transport.tensors.shm import SHARED_MEMORY
from transport.tensors.wire import Channel, ChannelServer, Refused, connect

REQUEST_S = 60.0  # limit of one request, both sides

T = TypeVar("T")
GroupIds: TypeAlias = Annotated[tuple[GroupId, ...], msgspec.Meta(min_length=1)]


class Put(Struct, frozen=True, kw_only=True, tag=True):
    """Keep the bytes that follow the header as a segment for values of these groups, or none of them."""

    segment: Annotated[str, msgspec.Meta(pattern=r"^0@[0-9a-f]{12}\Z")]  # its name, from ``name_of_sent``
    group_ids: GroupIds
    nbytes: Count
    checksum: str  # as in a TensorSpec


class Allocate(Struct, frozen=True, kw_only=True, tag=True):
    """Make a segment for values of these groups that a process on ``host`` will write."""

    host: str
    group_ids: GroupIds
    nbytes: Count


class Keep(Struct, frozen=True, kw_only=True, tag=True):
    """A segment that this connection asked for is written: it stays until its groups are dropped."""

    segment: str


class Get(Struct, frozen=True, kw_only=True, tag=True):
    ranges: tuple[Range, ...]


class Drop(Struct, frozen=True, kw_only=True, tag=True):
    """Free these segments, and all that belongs to these groups."""

    group_ids: tuple[GroupId, ...] = ()
    segments: tuple[str, ...] = ()


class Full(Struct, frozen=True, kw_only=True, tag=True):
    """In answer to an allocate or a put: the unit has no room for all of it."""

    retained_bytes: int
    free_bytes: int


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """A put, keep or drop happened. nbytes: stored or freed.  retained_bytes: in the unit, afterwards."""

    nbytes: int
    retained_bytes: int


class Allocated(Struct, frozen=True, kw_only=True, tag=True):
    """segment: its name; "" where there is none: the unit is on another ``host``, or its shared memory is full."""

    segment: str
    host: str


class Values(Struct, frozen=True, kw_only=True, tag=True):
    """Per range whether it is there, and its checksum. Those that are there follow one another after the header."""

    found: tuple[bool, ...]
    checksums: tuple[str, ...]


UnitRequest: TypeAlias = Allocate | Keep | Put | Get | Drop
_request_decoder: MessageDecoder[UnitRequest] = MessageDecoder(cast("type[UnitRequest]", UnitRequest))
_done_decoder: MessageDecoder[Done | Refused] = MessageDecoder(cast("type[Done | Refused]", Done | Refused))
_put_decoder: MessageDecoder[Done | Full] = MessageDecoder(cast("type[Done | Full]", Done | Full))
_allocated_decoder: MessageDecoder[Allocated | Full] = MessageDecoder(cast("type[Allocated | Full]", Allocated | Full))
_values_decoder: MessageDecoder[Values | Refused] = MessageDecoder(cast("type[Values | Refused]", Values | Refused))


class StorageUnit:
    """One unit, serving while it is started. What would pass ``max_bytes`` is refused."""

    def __init__(self, *, max_bytes: int, endpoint: Endpoint | None = None, directory: Path = SHARED_MEMORY) -> None:
        self._max_bytes = max_bytes
        self._endpoint = endpoint or Endpoint()
        self._server = ChannelServer(self._serve, self._endpoint, request_s=REQUEST_S, ended=self._forget)
        self._lock = threading.Lock()
        self._segments = Segments(directory)
        self._segment_groups: dict[str, set[GroupId]] = {}
        self._group_segments: dict[GroupId, set[str]] = {}
        self._unwritten: dict[Channel, set[str]] = {}
        self.retained_bytes = self._announced_bytes = 0

    def start(self) -> str:
        """Listen. Returns the unit's address."""
        return self._endpoint.address(self._server.start(), "columns")

    def close(self) -> None:
        self._server.close()
        with self._lock:
            self._segments.close()

    def groups(self) -> list[GroupId]:
        """Those whose values it holds."""
        with self._lock:
            return list(self._group_segments)

    def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """Free all that belongs to these groups alone. Returns the bytes freed."""
        return self._drop(Drop(group_ids=tuple(group_ids))).nbytes

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(_request_decoder)
        channel.deadline = Deadline(REQUEST_S)
        match request:
            case Allocate():
                channel.send(self._allocate(channel, request))
            case Keep():
                channel.send(self._keep(channel, request))
            case Put():
                self._put(channel, request)
            case Get():
                self._get(channel, request)
            case Drop():
                channel.send(self._drop(request))

    @property
    def _free_bytes(self) -> int:
        return self._max_bytes - self.retained_bytes - self._announced_bytes

    def _full(self) -> Full:
        return Full(retained_bytes=self.retained_bytes, free_bytes=self._free_bytes)

    def _allocate(self, channel: Channel, request: Allocate) -> Allocated | Full:
        elsewhere = Allocated(segment="", host=host_id())
        if request.host != host_id():
            return elsewhere
        with self._lock:
            if request.nbytes > self._free_bytes:
                return self._full()
            try:
                segment = self._segments.take(request.nbytes, self._free_bytes)
            except SegmentSpaceError:
                return elsewhere
            self._hold(segment, request.group_ids)
            self._unwritten.setdefault(channel, set()).add(segment)
        return Allocated(segment=segment, host=host_id())

    def _hold(self, segment: str, group_ids: Iterable[GroupId]) -> None:
        """Count a segment that was made, for these groups."""
        self.retained_bytes += self._segments.sizes[segment]
        self._segments.trim(max(0, self._free_bytes))
        self._segment_groups[segment] = set(group_ids)
        for group_id in group_ids:
            self._group_segments.setdefault(group_id, set()).add(segment)

    def _keep(self, channel: Channel, request: Keep) -> Done | Refused:
        with self._lock:
            unwritten = self._unwritten.get(channel, set())
            if request.segment not in unwritten:
                return Refused(reason=f"segment {request.segment!r} was freed, or never asked for on this connection")
            unwritten.discard(request.segment)
            return Done(nbytes=self._segments.sizes[request.segment], retained_bytes=self.retained_bytes)

    def _forget(self, channel: Channel) -> None:
        """Free what a connection that ended had asked for and not written."""
        with self._lock:
            for segment in self._unwritten.pop(channel, set()):
                self._free(segment)

    def _put(self, channel: Channel, request: Put) -> None:
        nbytes = request.nbytes
        with self._lock:
            full = self._full() if nbytes > self._free_bytes else None
            self._announced_bytes += 0 if full else nbytes
        if full is not None:
            channel.skip(nbytes)
            channel.send(full)
            return
        try:
            # numpy takes pages as they are written to: what is announced and does not come takes no memory
            value = np.empty(nbytes, np.uint8).data
            _receive(channel, value, request.checksum)
        except BaseException:
            with self._lock:
                self._announced_bytes -= nbytes
            raise
        with self._lock:
            self._announced_bytes -= nbytes
            self._free(request.segment)
            self._segments.keep_sent(request.segment, value)
            self._hold(request.segment, request.group_ids)
        channel.send(Done(nbytes=nbytes, retained_bytes=self.retained_bytes))

    def _get(self, channel: Channel, request: Get) -> None:
        """Raises ChecksumError for a range that is not in its segment."""
        if sum(part.nbytes for part in request.ranges) > MAX_COLUMN_BYTES:
            raise MessageError(f"ranges of more than {MAX_COLUMN_BYTES} bytes are asked for at once")
        with self._lock:
            values = [self._segments.sent(part) for part in request.ranges]
        in_files = {place: part for place, part in enumerate(request.ranges) if values[place] is None}
        # As every other reader does: what is sent is not being reused.
        buffers = [memoryview(bytearray(part.nbytes)) for part in in_files.values()]
        found = read_segments([*in_files.values()], buffers, self._segments.directory)
        for place, buffer, is_there in zip(in_files, buffers, found, strict=True):
            values[place] = buffer if is_there else None
        checksums = tuple("" if value is None else checksum(value) for value in values)
        answer = Values(found=tuple(value is not None for value in values), checksums=checksums)
        channel.send(answer, [value for value in values if value is not None])

    def _drop(self, request: Drop) -> Done:
        with self._lock:
            freed = sum(map(self._free, request.segments))
            for group_id in request.group_ids:
                for segment in self._group_segments.pop(group_id, ()):
                    self._segment_groups[segment].discard(group_id)
                    if not self._segment_groups[segment]:
                        freed += self._free(segment)
            return Done(nbytes=freed, retained_bytes=self.retained_bytes)

    def _free(self, segment: str) -> int:
        """Free a whole segment. Returns its bytes, 0 where it is not there any more."""
        if segment not in self._segment_groups:
            return 0
        for group_id in self._segment_groups.pop(segment):
            self._group_segments[group_id].discard(segment)
            if not self._group_segments[group_id]:
                del self._group_segments[group_id]
        for unwritten in self._unwritten.values():
            unwritten.discard(segment)
        nbytes = self._segments.sizes[segment]
        self.retained_bytes -= nbytes
        self._segments.free(segment)
        return nbytes


def _receive(channel: Channel, into: memoryview, announced: str) -> None:
    """Raises ChecksumError, which ends the connection before anything is kept."""
    channel.receive_into(into)
    if checksum(into) != announced:
        raise ChecksumError(f"{channel.address}: {into.nbytes} bytes arrived damaged")


class UnitClient:
    """Talks to one unit over one connection, opened when needed. Blocking; one caller at a time, others wait."""

    def __init__(self, address: str, *, secret: bytes = b"", timeout_s: float = REQUEST_S) -> None:
        self.address = address
        self.shares_memory = True  # worth asking for a segment: until the unit is seen to be elsewhere
        self._parsed = parse_address(address)
        self._secret = secret
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def put(self, group_ids: Sequence[GroupId], buffers: Sequence[Buffer]) -> str | Full:
        """Send values of these groups. Returns the name of their segment; or how much the unit has room for, if not for
        all of them: then it keeps none."""
        nbytes, segment = sum(map(len, buffers)), name_of_sent()
        header = Put(segment=segment, group_ids=tuple(group_ids), nbytes=nbytes, checksum=checksum_of(buffers))
        answer = self._call(lambda channel: channel.ask(header, _put_decoder, buffers))
        return answer if isinstance(answer, Full) else segment

    def allocate(self, group_ids: Sequence[GroupId], nbytes: int) -> str | Full:
        """Name of a segment for values of these groups, to be written and kept; "" when they must be put instead: the
        unit is on another host, or its shared memory is full. Or how much the unit has room for, if not for that."""
        if not self.shares_memory:
            return ""
        header = Allocate(host=host_id(), group_ids=tuple(group_ids), nbytes=nbytes)
        answer = self._call(lambda channel: channel.ask(header, _allocated_decoder))
        if isinstance(answer, Full):
            return answer
        self.shares_memory = answer.host == host_id()
        return answer.segment

    def keep(self, segment: str) -> bool:
        """Say that an allocated segment is written. Returns False where it was freed meanwhile."""
        return isinstance(self._call(lambda channel: channel.ask(Keep(segment=segment), _done_decoder)), Done)

    def read(self, ranges: Sequence[Range], into: Sequence[memoryview]) -> list[bool]:
        """Receive each range into its buffer. Returns for each whether its segment is there.

        Raises ChecksumError for bytes that arrived damaged.
        """

        def request(channel: Channel) -> list[bool]:
            answer = self._accepted(channel.ask(Get(ranges=tuple(ranges)), _values_decoder))
            if not len(ranges) == len(answer.found) == len(answer.checksums):
                raise ChecksumError(f"{self.address} answers {len(ranges)} ranges with {len(answer.found)}")
            for is_there, buffer, text in zip(answer.found, into, answer.checksums, strict=True):
                if is_there:
                    _receive(channel, buffer, text)
            return list(answer.found)

        return self._call(request)

    def drop(self, *, group_ids: Sequence[GroupId] = (), segments: Sequence[str] = ()) -> int:
        """Free groups and segments. Returns the bytes freed."""
        header = Drop(group_ids=tuple(group_ids), segments=tuple(segments))
        return self._accepted(self._call(lambda channel: channel.ask(header, _done_decoder))).nbytes

    def _accepted(self, answer: T | Refused) -> T:
        if isinstance(answer, Refused):
            raise PeerUnavailableError(self.address, answer.reason)
        return answer

    def _call(self, request: Callable[[Channel], T]) -> T:
        """One request. A connection kept from before may have been closed since: then once more on a new one."""
        with self._lock:
            kept = self._channel is not None
            try:
                return self._once(request)
            except PeerUnavailableError:
                if not kept:
                    raise
                return self._once(request)

    def _once(self, request: Callable[[Channel], T]) -> T:
        deadline = Deadline(self._timeout_s)
        channel = self._channel or connect(self._parsed.place, self._parsed.port, self.address, self._secret, deadline)
        channel.deadline = deadline
        self._channel = None
        try:
            answer = request(channel)
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        return answer

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
