"""Segments of storage units: ranges of bytes, mostly files in shared memory that one host's processes use directly.

    made     by the unit, which keeps a shared lock (flock) on each: it outlives its writer, and the unit's death shows
    used     under a shared lock of the user's own, taken before the user makes sure that the file still has its name
    reused   by the unit, when the file can be locked against everyone: it gets another name before anything else, so
             that an old locator finds nothing, and never what another process wrote since

A segment that was sent to the unit is in the unit's own memory, and read by asking the unit for ranges of it.

Bytes are copied out, not mapped: a reader keeps what it read, whatever happens to its segment. Mapping would cost more:
13 ms of page faults for 34 MB, where the copy takes 8-15. Reuse is what makes writing cheap: pages that are there take
34 MB in 10 ms, new ones in 30.

Owns: the segments, their names, their locks. Never: what they hold, or for whom (units.py). Invariant: nothing is
written to or read from a file that is being reused. No checksums of files: their bytes never leave the memory of one
host; every offset and size is checked against the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from transport.contracts.types import Count, Struct
from transport.errors import ChecksumError, MessageError, SegmentSpaceError
from transport.rows.columns import MAX_COLUMN_BYTES
from transport.tensors.shm import SHARED_MEMORY, choose_directory, create_locked, open_own, sweep_stale

_PREFIX = "streamrl-rows@"
_NAME = re.compile(r"[0-9]+@[0-9a-f]{12}")
_BUFFERS_AT_ONCE = 1024  # IOV_MAX of Linux: buffers in one pwritev
_MAX_SPARE_BYTES = 256 * 1024 * 1024  # files kept for the next writers, by one unit
_MERGED_GAP_BYTES = 64  # ranges no further apart are read in one call: between two values is nothing but padding

Buffer: TypeAlias = bytes | memoryview
ValueBytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COLUMN_BYTES)]


class Range(Struct, frozen=True, kw_only=True):
    segment: str
    offset: Count
    nbytes: ValueBytes


def name_of_sent() -> str:
    """A new name for a segment in a unit's own memory; no process has the number 0, so no file has such a name."""
    return f"0@{secrets.token_hex(6)}"


def path_of(name: str, directory: Path = SHARED_MEMORY) -> Path:
    """The file of a segment. Raises MessageError for what is no name: a message cannot make us open any file."""
    if not _NAME.fullmatch(name):
        raise MessageError(f"{name!r} is not the name of a segment")
    return directory / f"{_PREFIX}{name}"


@contextmanager
def open_segment(name: str, *, write: bool = False, directory: Path = SHARED_MEMORY) -> Generator[int]:
    """A descriptor of a segment that is not reused meanwhile.

    Raises OSError: there is no such file (any more), it is another host's or another user's, or it is being reused.
    """
    path = path_of(name, directory)
    fd = open_own(path, os.O_RDWR if write else os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "the segment was freed", str(path))
        yield fd
    finally:
        os.close(fd)


def write_buffers(fd: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after another from the start of a segment. Raises OSError when shared memory is full."""
    offset = 0
    for start in range(0, len(buffers), _BUFFERS_AT_ONCE):
        some = buffers[start : start + _BUFFERS_AT_ONCE]
        wanted = sum(map(len, some))
        written = os.pwritev(fd, some, offset)
        if written != wanted:  # on a file in memory, for no other reason
            raise OSError(errno.ENOSPC, "shared memory filled up")
        offset += written


def read_ranges(fd: int, ranges: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> None:
    """Copy each (offset, size) into its buffer. Raises ChecksumError outside of the segment."""
    size = os.fstat(fd).st_size
    gap_buffer = memoryview(bytearray(_MERGED_GAP_BYTES))
    buffers: list[memoryview] = []
    start = end = 0
    for place in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, nbytes = ranges[place]
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ChecksumError(f"a segment of {size} bytes has no {nbytes} bytes at {offset}")
        if not 0 <= offset - end <= _MERGED_GAP_BYTES or len(buffers) > _BUFFERS_AT_ONCE - 2:
            _fill(fd, buffers, start, end)
            buffers, start, end = [], offset, offset
        if offset > end:
            buffers.append(gap_buffer[: offset - end])
        buffers.append(into[place])
        end = offset + nbytes
    _fill(fd, buffers, start, end)


def _fill(fd: int, buffers: Sequence[memoryview], start: int, end: int) -> None:
    if buffers and os.preadv(fd, buffers, start) != end - start:
        raise ChecksumError(f"a segment ended before its byte {end}")


def read_segments(ranges: Sequence[Range], into: Sequence[memoryview], directory: Path = SHARED_MEMORY) -> list[bool]:
    """Copy each range into its buffer. Returns for each whether it was there: not, where the segment cannot be opened
    from here (any more).

    Raises ChecksumError: a range that is not in its segment.
    """
    by_segment: dict[str, list[int]] = {}
    for place, part in enumerate(ranges):
        by_segment.setdefault(part.segment, []).append(place)
    found = [False] * len(ranges)
    for segment, places in by_segment.items():
        with contextlib.suppress(OSError), open_segment(segment, directory=directory) as fd:
            wanted = [(ranges[place].offset, ranges[place].nbytes) for place in places]
            read_ranges(fd, wanted, [into[place] for place in places])
            for place in places:
                found[place] = True
    return found


class Segments:
    """The segments of one unit. Used by one thread at a time."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self.directory = directory  # of every process that shall find them
        self._sent: dict[str, memoryview] = {}
        self._held: dict[str, int] = {}
        self._spare: dict[str, int] = {}
        self.sizes: dict[str, int] = {}  # bytes of each
        self._swept = False

    def take(self, nbytes: int, at_most: int) -> str:
        """Name of a segment of ``nbytes`` to ``at_most`` bytes. Raises SegmentSpaceError: shared memory has no room."""
        largest = min(2 * nbytes, at_most)
        fitting = [name for name in self._spare if nbytes <= self.sizes[name] <= largest]
        if fitting:
            name = min(fitting, key=self.sizes.__getitem__)
            self._held[name] = self._spare.pop(name)
            return name
        if not self._swept:
            sweep_stale(self.directory)
            self._swept = True
        try:
            choose_directory([self.directory], nbytes)
        except SegmentSpaceError:
            self.trim(0)
            choose_directory([self.directory], nbytes)
        path, fd = create_locked((path_of(_new_name(), self.directory) for _ in itertools.count()), fcntl.LOCK_SH)
        name = path.name.removeprefix(_PREFIX)
        os.ftruncate(fd, nbytes)
        self._held[name], self.sizes[name] = fd, nbytes
        return name

    def keep_sent(self, name: str, value: memoryview) -> None:
        """A segment that came over the socket."""
        self._sent[name], self.sizes[name] = value, value.nbytes

    def sent(self, part: Range) -> memoryview | None:
        """A range of such a segment, None where there is none. Raises ChecksumError for one that is not in it."""
        value = self._sent.get(part.segment)
        if value is None:
            return None
        if part.offset + part.nbytes > value.nbytes:
            raise ChecksumError(f"a segment of {value.nbytes} bytes has no {part.nbytes} bytes at {part.offset}")
        return value[part.offset : part.offset + part.nbytes]

    def free(self, name: str) -> None:
        """End a segment: its file serves the next writer, or is gone once its last reader has left it."""
        if self._sent.pop(name, None) is not None:
            del self.sizes[name]
            return
        fd = self._held.pop(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            spare = _new_name()
            os.rename(path_of(name, self.directory), path_of(spare, self.directory))
            fcntl.flock(fd, fcntl.LOCK_SH)
        except OSError:  # it is being read or written, or was removed by hand
            self._remove(name, fd)
            return
        self.sizes[spare] = self.sizes.pop(name)
        self._spare[spare] = fd
        self.trim(_MAX_SPARE_BYTES)

    def trim(self, keep_bytes: int) -> None:
        """Remove the oldest files that wait for a next writer until they have no more than so many bytes."""
        while sum(self.sizes[name] for name in self._spare) > keep_bytes:
            name = next(iter(self._spare))
            self._remove(name, self._spare.pop(name))

    def _remove(self, name: str, fd: int) -> None:
        del self.sizes[name]
        with contextlib.suppress(FileNotFoundError):
            path_of(name, self.directory).unlink()
        os.close(fd)

    def close(self) -> None:
        self._sent.clear()
        for files in (self._held, self._spare):
            while files:
                self._remove(*files.popitem())


def _new_name() -> str:
    return f"{os.getpid()}@{secrets.token_hex(6)}"
