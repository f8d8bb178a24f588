"""Storage units: servers that keep the bytes of columns, so that the broker keeps only where they are.

A unit is a table in memory behind a socket; it decides nothing and knows no tasks. Keys are unique to one write
attempt, so a put never changes what another writer stored, and repeating one is harmless.

Owns: the table, its bound in bytes, the messages of a put, get and drop. Invariant: what a unit holds of a group goes
with ``drop_groups``; nothing else removes what a locator may point to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar, cast

from transport.errors import ChecksumError, MessageError, PeerUnavailableError
from transport.messages import MessageDecoder
from transport.rows import MAX_COLUMN_BYTES
from transport.tensors.address import parse_address
from transport.tensors.base import Deadline
from transport.tensors.endpoint import Endpoint
from transport.tensors.manifest import checksum
from transport.tensors.server import ChannelServer
from transport.tensors.wire import Channel, Refused, connect
from transport.types import GroupId, Struct

REQUEST_S = 60.0
"""Limit of one request, both sides."""

T = TypeVar("T")


class Part(Struct, frozen=True, kw_only=True):
    """One value in a put or get. checksum: as in a TensorSpec."""

    key: str
    nbytes: int
    checksum: str


class GroupParts(Struct, frozen=True, kw_only=True):
    """The values of one group in a put."""

    group_id: GroupId
    parts: tuple[Part, ...]


class Put(Struct, frozen=True, kw_only=True, tag=True):
    """Keep these values, which follow one another after the header: all of them, or none."""

    groups: tuple[GroupParts, ...]


class Get(Struct, frozen=True, kw_only=True, tag=True):
    """Send what there is of these keys."""

    keys: tuple[str, ...]


class Drop(Struct, frozen=True, kw_only=True, tag=True):
    """Free these values, and all that belongs to these groups."""

    group_ids: tuple[GroupId, ...] = ()
    keys: tuple[str, ...] = ()


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """A put or drop happened. nbytes: stored or freed.  retained_bytes: in the unit, afterwards."""

    nbytes: int
    retained_bytes: int


class Values(Struct, frozen=True, kw_only=True, tag=True):
    """sizes: per asked key its bytes, -1 where there is none. The values follow one another after the header."""

    sizes: tuple[int, ...]


Request: TypeAlias = Put | Get | Drop
_request_decoder: MessageDecoder[Request] = MessageDecoder(cast("type[Request]", Request))
_done_decoder: MessageDecoder[Done | Refused] = MessageDecoder(cast("type[Done | Refused]", Done | Refused))
_values_decoder: MessageDecoder[Values | Refused] = MessageDecoder(cast("type[Values | Refused]", Values | Refused))


class StorageUnit:
    """One unit, serving while it is started. max_bytes: a put that would pass it is refused.  endpoint: loopback."""

    def __init__(self, *, max_bytes: int, endpoint: Endpoint | None = None) -> None:
        self._max_bytes = max_bytes
        self._endpoint = endpoint or Endpoint()
        self._server = ChannelServer(self._serve, self._endpoint, request_s=REQUEST_S)
        self._lock = threading.Lock()
        self._values: dict[str, bytearray] = {}
        self._group_keys: dict[GroupId, set[str]] = {}
        self._retained_bytes = 0

    def start(self) -> str:
        """Listen. Returns the unit's address."""
        return self._endpoint.address(self._server.start(), "columns")

    def close(self) -> None:
        self._server.close()

    @property
    def retained_bytes(self) -> int:
        return self._retained_bytes

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(_request_decoder)
        channel.deadline = Deadline(REQUEST_S)
        match request:
            case Put():
                self._put(channel, request)
            case Get():
                self._get(channel, request)
            case Drop():
                channel.send(self._drop(request))

    def _put(self, channel: Channel, request: Put) -> None:
        parts = [part for group in request.groups for part in group.parts]
        nbytes = sum(part.nbytes for part in parts)
        if any(not 0 <= part.nbytes <= MAX_COLUMN_BYTES for part in parts):
            raise MessageError(f"{channel.address} puts a column of an impossible size")
        if self._retained_bytes + nbytes > self._max_bytes:
            channel.send(Refused(reason=f"the unit is full: it holds {self._retained_bytes} bytes", retry=True))
            raise PeerUnavailableError(channel.address, "its bytes are not read: the connection ends")
        values = {part.key: _receive(channel, part) for part in parts}
        with self._lock:
            for key, value in values.items():
                self._retained_bytes += len(value) - len(self._values.get(key, b""))
                self._values[key] = value
            for group in request.groups:
                self._group_keys.setdefault(group.group_id, set()).update(part.key for part in group.parts)
        channel.send(Done(nbytes=nbytes, retained_bytes=self._retained_bytes))

    def _get(self, channel: Channel, request: Get) -> None:
        with self._lock:
            values = [self._values.get(key) for key in request.keys]
        sizes = tuple(-1 if value is None else len(value) for value in values)
        channel.send(Values(sizes=sizes), [value for value in values if value is not None])

    def _drop(self, request: Drop) -> Done:
        freed = 0
        with self._lock:
            keys = set(request.keys)
            for group_id in request.group_ids:
                keys |= self._group_keys.pop(group_id, set())
            for key in keys:
                freed += len(self._values.pop(key, b""))
            self._retained_bytes -= freed
        return Done(nbytes=freed, retained_bytes=self._retained_bytes)


def _receive(channel: Channel, part: Part) -> bytearray:
    """One value of a put. Raises ChecksumError, which ends the connection before anything is kept."""
    value = bytearray(part.nbytes)
    channel.receive_into(memoryview(value))
    if checksum(value) != part.checksum:
        raise ChecksumError(f"{channel.address}: value {part.key!r} arrived damaged")
    return value


class UnitClient:
    """Talks to one unit over one connection, opened when needed. Blocking; one caller at a time, others wait."""

    def __init__(self, address: str, *, secret: bytes = b"", timeout_s: float = REQUEST_S) -> None:
        self.address = address
        self._parsed = parse_address(address)
        self._secret = secret
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._lock = threading.Lock()

    def put(self, groups: Sequence[GroupParts], values: Sequence[bytes]) -> None:
        """Store values under new keys: all of them in one request. Raises PeerUnavailableError, also for a unit that is
        full. values: of all parts of ``groups``, in their order."""

        def request(channel: Channel) -> None:
            channel.send(Put(groups=tuple(groups)), values)
            self._accepted(channel.receive(_done_decoder))

        self._ask(request)

    def get(self, parts: Sequence[Part]) -> list[bytes | None]:
        """Per part its bytes, None where the unit has none. Raises ChecksumError for bytes that are not the part's."""

        def request(channel: Channel) -> list[bytes | None]:
            channel.send(Get(keys=tuple(part.key for part in parts)))
            sizes = self._accepted(channel.receive(_values_decoder)).sizes
            wrong = [p.key for p, size in zip(parts, sizes, strict=False) if size not in (-1, p.nbytes)]
            if len(sizes) != len(parts) or wrong:
                raise ChecksumError(f"{self.address} has values of another size: {wrong[:3]}")
            received = zip(parts, sizes, strict=True)
            return [None if size < 0 else bytes(_receive(channel, part)) for part, size in received]

        return self._ask(request)

    def drop(self, *, group_ids: Sequence[GroupId] = (), keys: Sequence[str] = ()) -> int:
        """Free groups and single values. Returns the bytes freed."""

        def request(channel: Channel) -> int:
            channel.send(Drop(group_ids=tuple(group_ids), keys=tuple(keys)))
            return self._accepted(channel.receive(_done_decoder)).nbytes

        return self._ask(request)

    def _accepted(self, answer: T | Refused) -> T:
        if isinstance(answer, Refused):
            raise PeerUnavailableError(self.address, answer.reason)
        return answer

    def _ask(self, request: Callable[[Channel], T]) -> T:
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
