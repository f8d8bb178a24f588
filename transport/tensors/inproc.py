"""Segments inside one process: for tests and for roles that share a process.

Owns: a table of this process's sealed segments. Invariant: a sealed segment is bytes that nobody changes.
"""

from __future__ import annotations

from transport.errors import ChecksumError, PeerUnavailableError
from transport.tensors.address import Address, process_token
from transport.tensors.base import Deadline

_sealed: dict[str, memoryview] = {}
"""What can be read, by name: an address scheme needs one table a process."""


class InprocSegment:
    """A view of a sealed segment, or of one dropped since."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def close(self) -> None:
        self.buffer = memoryview(b"")


class InprocReader:
    """Reads segments of the same process."""

    def open(self, address: Address, nbytes: int, deadline: Deadline) -> InprocSegment:
        segment = _sealed.get(address.path)
        if segment is None or address.place != process_token():
            raise PeerUnavailableError(str(address), "this process has no such segment")
        if segment.nbytes != nbytes:
            raise ChecksumError(f"{address} has {segment.nbytes} bytes instead of {nbytes}")
        return InprocSegment(segment)


class InprocWriter:
    """A segment that is not readable yet."""

    def __init__(self, store: InprocStore, name: str, nbytes: int) -> None:
        self._store = store
        self._name = name
        self._bytes = bytearray(nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        if offset + data.nbytes > len(self._bytes):
            raise ValueError(f"{data.nbytes} bytes at {offset} do not fit into {len(self._bytes)}")
        self._bytes[offset : offset + data.nbytes] = data

    def seal(self) -> tuple[str, ...]:
        _sealed[self._name] = memoryview(self._bytes).toreadonly()
        return (f"inproc://{process_token()}/{self._name}",)

    def abort(self) -> None:
        self._store.drop(self._name)


class InprocStore:
    """Segments owned by one part of this process."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def create(self, name: str, nbytes: int) -> InprocWriter:
        if name in self._names or name in _sealed:
            raise ValueError(f"segment {name!r} exists")
        self._names.add(name)
        return InprocWriter(self, name, nbytes)

    def drop(self, name: str) -> None:
        if name in self._names:
            self._names.discard(name)
            _sealed.pop(name, None)

    def close(self) -> None:
        for name in list(self._names):
            self.drop(name)


def reader(secret: bytes) -> InprocReader:
    """The backend behind inproc://; there is nobody to prove anything to."""
    return InprocReader()
