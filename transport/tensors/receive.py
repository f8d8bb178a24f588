"""Bytes in: stretches of a segment go where they are wanted, and one source goes on where another stopped.

    Memory      a receiver's own, allocated once and used for version after version, unless others of its host map it
    Receiving   which stretches came, and which were found right: each is checked as soon as it is there

Invariants: a byte of a stretch that is verified is never asked for again, and no other byte either unless its stretch
was found wrong, wherever the connection breaks; a stretch counts only once it was compared with its checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transport.errors import ChecksumError, MessageError
from transport.tensors.base import Address, Segment
from transport.tensors.shm import held_address, map_held

GAP_BYTES = 16 * 1024  # so much between two stretches is received and dropped: a request of its own costs a round trip


class Memory:
    """Bytes in a file without a name, made when they are first used. Pages that were never written to cost nothing; all
    go with their last user, in whichever process that is.

    kept: somebody else reads it from now on, and nothing may be received into it any more.
    content: names what all of it holds, verified; "" while that is not known. Its user says so.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.kept = False
        self.content = ""

    @classmethod
    def of_mate(cls, address: Address, nbytes: int) -> Memory:
        """What another process of this host and user receives into, which it does no more as long as this is here.

        The kernel says so (flock), and lets go of it with the process. Writing here changes no byte there.
        Raises PeerUnavailableError: it cannot be had here.  MessageError, ChecksumError: it is none, or not so large.
        """
        memory = cls(nbytes)
        memory.kept = True
        memory._file, memory.buffer = map_held(address, nbytes)  # both hold on to it, until the last of them goes
        weakref.finalize(memory, os.close, memory._file)
        return memory

    @functools.cached_property
    def _file(self) -> int:
        """Raises MessageError: this machine, or a control group, has no memory for so many."""
        if self.nbytes > (free := available_bytes()):
            raise MessageError(f"a version has {self.nbytes} bytes, and there is memory for {free}")
        fd = os.memfd_create("streamrl-received", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        try:
            os.ftruncate(fd, self.nbytes)
        except (OSError, OverflowError) as error:
            raise MessageError(f"there is no memory for {self.nbytes} bytes") from error
        return fd

    @functools.cached_property
    def buffer(self) -> memoryview:
        """[nbytes] uint8. Raises MessageError: there is no memory for them."""
        try:
            return memoryview(mmap.mmap(self._file, self.nbytes))
        except (OSError, OverflowError, ValueError) as error:
            raise MessageError(f"there is no memory for {self.nbytes} bytes") from error

    def allocate(self) -> None:
        """Raises MessageError: there is no memory for it."""
        _ = self.buffer

    @property
    def address(self) -> str:
        """Where other processes of this host and user can map it."""
        return held_address(self._file)

    def is_free(self) -> bool:
        """Whether it may be received into again: nobody else holds it."""
        if self.kept or "_file" not in self.__dict__:
            return not self.kept
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def keep(self) -> int:
        """A descriptor of the file, for who goes on with it and closes it."""
        self.kept = True
        return os.dup(self._file)


def available_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: of the machine's memory, and of what each control group above it has left.

    What the page cache holds can be had. A file that is not there bounds nothing.
    """
    free = [kib * 1024 for kib in _numbers(root / "proc/meminfo", ("MemAvailable:",))]
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            with contextlib.suppress(OSError, ValueError):  # another's, or "max"
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                free.append(left + sum(_numbers(folder / "memory.stat", ("inactive_file", "active_file"))))
    return min(free, default=sys.maxsize)


def _numbers(path: Path, names: Sequence[str]) -> Iterator[int]:
    """Of the lines that begin with one of ``names``."""
    words = (line.split() for line in _lines(path))
    return (int(number) for name, number, *_ in words if name in names)


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return ()


@dataclass(slots=True, eq=False)
class Stretch:
    """Bytes [offset, offset + nbytes) of a segment.

    place: where they go, asked for when the first of them come.
    finish: given all of them. Raises ChecksumError where they are not those that they should be.
    """

    offset: int
    nbytes: int
    place: Callable[[], memoryview]
    finish: Callable[[memoryview], None]
    came: int = field(default=0, init=False)
    verified: bool = field(default=False, init=False)
    _into: memoryview | None = field(default=None, init=False)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def take(self, source: Segment) -> None:
        """Receive what is missing of it, which ``source`` was asked for. Raises ChecksumError: it has to come again."""
        into = self._placed()
        while self.came < self.nbytes:
            self.came += source.read(into[self.came :])
        self._compare(into)

    def copy(self, data: memoryview) -> None:
        """Take what is missing from ``data``, which are all of its bytes. Raises ChecksumError."""
        into = self._placed()
        into[self.came :] = data[self.came :]
        self.came = self.nbytes
        self._compare(into)

    def _placed(self) -> memoryview:
        into = self._into = self.place() if self._into is None else self._into
        return into

    def _compare(self, into: memoryview) -> None:
        try:
            self.finish(into)
        except ChecksumError:
            self.came = 0
            raise
        self.verified, self._into = True, None


class Receiving:
    """What has come of one segment, from whichever sources have it."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = sorted(stretches, key=lambda stretch: stretch.offset)

    @property
    def nbytes(self) -> int:
        """That came and were not found wrong."""
        return sum(stretch.came for stretch in self._stretches)

    @property
    def missing_bytes(self) -> int:
        return sum(stretch.nbytes - stretch.came for stretch in self._stretches)

    @property
    def is_done(self) -> bool:
        return all(stretch.verified for stretch in self._stretches)

    def take(self, source: Segment) -> None:
        """Receive what is missing. Raises ChecksumError, after all else came, or what ``source`` raises."""
        wrong: ChecksumError | None = None
        for run in self._runs():
            at = run[0].offset + run[0].came
            source.ask(at, run[-1].end - at)
            for stretch in run:
                _skip(source, stretch.offset - at)
                at = stretch.end
                try:
                    stretch.take(source)
                except ChecksumError as error:
                    wrong = wrong or error
        if wrong:
            try:
                raise wrong
            finally:
                wrong = None  # it refers to this frame

    def copy(self, buffer: memoryview, offsets: Collection[int]) -> None:
        """Take the stretches that begin at ``offsets`` from memory that is mapped. Raises ChecksumError."""
        for stretch in self._stretches:
            if stretch.offset in offsets and not stretch.verified:
                stretch.copy(buffer[stretch.offset : stretch.end])

    def _runs(self) -> list[list[Stretch]]:
        """What is missing, so that each run is one request."""
        runs: list[list[Stretch]] = []
        for stretch in self._stretches:
            if stretch.verified:
                continue
            if not runs or stretch.came or stretch.offset - runs[-1][-1].end > GAP_BYTES:
                runs.append([])
            runs[-1].append(stretch)
        return runs


def _skip(source: Segment, nbytes: int) -> None:
    while nbytes > 0:
        nbytes -= source.read(memoryview(bytearray(nbytes)))
