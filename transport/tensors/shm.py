"""Segments on one host: a file in shared memory, written once, mapped by everybody who reads it, also in this process.

Owns: the files and their life. Invariants: a sealed file is never written again; its owner holds an advisory lock
(flock) on it, which the kernel drops with the process, so an unlocked file is one whose owner died, whatever happened
to process numbers; a reader's mapping survives the file; a store that was closed makes no file any more; what another
user puts into shared memory, under whatever name, is neither read, nor waited for, nor removed.

We keep our own files rather than multiprocessing.shared_memory, whose resource tracker unlinks a segment when any
process that looked at it ends. Bytes go in by pwrite, not through a mapping: a full file system is then an error
instead of SIGBUS, and no page is faulted in twice (270 MB with cast and checksum: .14 s against .19-.88 s mapped).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from transport.errors import ChecksumError, MessageError, PeerUnavailableError, SegmentSpaceError
from transport.tensors.base import Address, Deadline, host_id, process_id

SHARED_MEMORY = Path("/dev/shm")
_FILE_NAME = re.compile(r"streamrl-[A-Za-z0-9_.-]+@[0-9]+@[A-Za-z0-9_.-]+")
_HELD = re.compile(r"(/proc/[0-9]+/fd/[0-9]+)@([0-9]+)")
_SPARE_BYTES = 16 * 1024 * 1024  # left free: a /dev/shm filled to the last byte kills the next that touches it
_NAMES_TRIED = 100
_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPY_BYTES = 16 * 1024 * 1024  # of a segment that moves, so that it can be dropped meanwhile


def file_name(run: str, name: str) -> str:
    """``streamrl-<run>@<pid>@<name>``: what ``ls /dev/shm`` shows."""
    result = f"streamrl-{run}@{os.getpid()}@{name}"
    if not _FILE_NAME.fullmatch(result):
        raise ValueError(f"{run!r} and {name!r} may hold letters, digits, '-', '_' and '.' only")
    return result


def segment_directories(run_dir: Path) -> tuple[Path, Path]:
    """Where the weights of a run are put: in memory, and on disk (mapped all the same, slower) when that is full."""
    return (SHARED_MEMORY, run_dir / "segments")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file of this user; never waits, as opening another user's FIFO of such a name would.

    Raises OSError: there is no such file, or it is a link, or another user's: who may write to it may do so while it is
    read.
    """
    held = _HELD.fullmatch(str(path))
    name, follow = (held[1], 0) if held else (path, os.O_NOFOLLOW)
    fd = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a file of this user", str(path))
    if held and status.st_ino != int(held[2]):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "closed, and its number is another file's by now", str(path))
    return fd


def create_locked(paths: Iterable[Path], lock: int) -> tuple[Path, int]:
    """Create a file under the first name that is free and lock it. Returns its path and descriptor.

    Anyone may have taken a name in shared memory, and a sweeper of ours may see the file before it is locked and remove
    it: then the next name serves. Raises FileExistsError: none is free.
    """
    tried = Path()
    for tried in itertools.islice(paths, _NAMES_TRIED):
        try:
            fd = os.open(tried, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, lock | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return tried, fd
        os.close(fd)
    raise FileExistsError(errno.EEXIST, f"{_NAMES_TRIED} names for a segment are taken, the last", str(tried))


def sweep_stale(*directories: Path) -> list[str]:
    """Unlink the segments of owners that died, of any run. Returns their file names."""
    swept: list[str] = []
    for path in itertools.chain.from_iterable(directory.glob("streamrl-*@*@*") for directory in directories):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            fd = open_own(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(fd)
    return swept


def held_address(fd: int) -> str:
    """Where this user's other processes, if of one pid namespace, find a segment that is open here, named or not.

    It says which file that is: the number may be another's once this one is closed.
    """
    return f"shm://{host_id()}/proc/{os.getpid()}/fd/{fd}@{os.fstat(fd).st_ino}"


def map_held(address: Address, nbytes: int) -> tuple[int, memoryview]:
    """A descriptor, and private pages, of what another process of this user has open and does not change meanwhile.

    Both keep a shared lock on it, which its owner asks for before it changes anything.
    Raises MessageError: no such address.  PeerUnavailableError: it is not there, or not seen from here, or about to
    change.  ChecksumError: it has another size.
    """
    path = Path("/") / address.path
    if address.scheme != "shm" or not _HELD.fullmatch(str(path)):  # a message cannot make us map any file
        raise MessageError(f"{address} is not memory of a process")
    try:
        fd = open_own(path)
    except OSError as error:
        raise PeerUnavailableError(str(address), error.strerror or str(error)) from error
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # The mapping has the same open file, and so the lock, for as long as anyone looks at a page.
            pages = memoryview(_map(fd, nbytes, address))
        except OSError as error:
            raise PeerUnavailableError(str(address), error.strerror or str(error)) from error
        stack.pop_all()
        return fd, pages


def _map(fd: int, nbytes: int, address: Address) -> mmap.mmap:
    """Private pages of an open file, which may be closed then. Raises ChecksumError: it has another size."""
    if (size := os.fstat(fd).st_size) != nbytes:
        raise ChecksumError(f"{address} has {size} bytes instead of {nbytes}")
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def choose_directory(directories: Sequence[Path], nbytes: int) -> Path:
    """The first directory with room for ``nbytes``. Raises SegmentSpaceError that says how much each has."""
    tried: list[str] = []
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            usage = os.statvfs(directory)
        except OSError as error:
            tried.append(f"{directory}: {error.strerror}")
            continue
        free = usage.f_bavail * usage.f_frsize
        if free >= nbytes + _SPARE_BYTES:
            return directory
        tried.append(f"{directory} has {free} bytes free")
    raise SegmentSpaceError(nbytes, ", ".join(tried))


class SealedFile:
    """The bytes of a sealed segment, for a server to send from: here while anybody has this, dropped or not.

    fd: closed with it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        weakref.finalize(self, os.close, fd)

    @functools.cached_property
    def view(self) -> memoryview:
        """All of them, mapped."""
        return memoryview(mmap.mmap(self.fd, self.nbytes, prot=mmap.PROT_READ) if self.nbytes else b"")


class ShmWriter:
    """A segment's file while its owner has it open. sealed: what is served of it, whose descriptor it is then."""

    def __init__(self, store: ShmStore, name: str, path: Path, fd: int, nbytes: int) -> None:
        self._store = store
        self._nbytes = nbytes
        self.name = name
        self.path = path
        self.fd = fd
        self.sealed: SealedFile | None = None

    def write(self, offset: int, data: memoryview) -> None:
        if offset + data.nbytes > self._nbytes:
            raise ValueError(f"{data.nbytes} bytes at {offset} do not fit into {self._nbytes}")
        rest = data.cast("B")
        while rest.nbytes:
            try:
                written = self._store.write(self, offset, rest)
            except OSError as error:
                self._go_on_elsewhere(error)
                continue
            offset += written
            rest = rest[written:]

    def _go_on_elsewhere(self, error: OSError) -> None:
        """In the next directory, where this one filled up. Raises SegmentSpaceError, or another ``error``."""
        try:
            if error.errno not in _FULL:
                raise error
            self._store.move(self, self._nbytes)
        except BaseException:
            self.abort()
            raise

    def seal(self) -> tuple[str, ...]:
        """Make it readable. Returns its addresses, best first. Raises ValueError: it was dropped meanwhile."""
        self._store.seal(self, self._nbytes)
        return self._store.addresses(self)

    def abort(self) -> None:
        """Forget it, written or not."""
        self._store.drop(self.name)


_numbers = itertools.count()
_stores: weakref.WeakValueDictionary[str, ShmStore] = weakref.WeakValueDictionary()
"""By the place of their inproc:// addresses."""


class ShmStore:
    """The segments of one owner on this host. Any thread may close it, whatever another one is writing."""

    def __init__(self, run: str, directories: Sequence[Path] = (SHARED_MEMORY,)) -> None:
        self._run = run
        self._directories = tuple(directory.absolute() for directory in directories)  # tried in order
        self._open: dict[str, ShmWriter] = {}
        self._lock = threading.Lock()  # or a descriptor could be closed, and given to another file, before it is used
        self._swept = False
        self._closed = False
        self._place = f"{process_id()}.{next(_numbers)}"
        _stores[self._place] = self

    def create(self, name: str, nbytes: int) -> ShmWriter:
        """Make the file of a new segment; the first call also sweeps what dead owners left behind.

        Raises SegmentSpaceError where it cannot fit, ValueError for a name in use.
        """
        with self._lock:
            if self._closed or name in self._open:
                raise ValueError(f"the store of segment {name!r} is closed" if self._closed else f"{name!r} exists")
            if not self._swept:
                sweep_stale(*self._directories)
                self._swept = True
            path, fd = self._create_file(choose_directory(self._directories, nbytes), name, nbytes)
            self._open[name] = ShmWriter(self, name, path, fd, nbytes)
            return self._open[name]

    def _create_file(self, directory: Path, name: str, nbytes: int) -> tuple[Path, int]:
        wanted = directory / file_name(self._run, name)
        others = (wanted.with_name(f"{wanted.name}.{secrets.token_hex(4)}") for _ in itertools.count())
        path, fd = create_locked(itertools.chain([wanted], others), fcntl.LOCK_EX)
        os.ftruncate(fd, nbytes)
        return path, fd

    def move(self, writer: ShmWriter, nbytes: int) -> None:
        """Take a segment that is being written on to the next directory with room, since its own filled up.

        Raises SegmentSpaceError that says how much each has, OSError.
        """
        tried = self._directories.index(writer.path.parent) + 1
        try:
            directory = choose_directory(self._directories[tried:], nbytes)
        except SegmentSpaceError as error:
            raise SegmentSpaceError(nbytes, f"{writer.path.parent} filled up, {error.tried}".rstrip(", ")) from error
        path, fd = self._create_file(directory, writer.name, nbytes)
        try:
            at = 0
            while at < nbytes:
                with self._lock:
                    self._check_open(writer)
                    at = _copy_some(writer.fd, fd, at, nbytes)
            with self._lock:
                self._check_open(writer)
                path, writer.path = writer.path, path
                fd, writer.fd = writer.fd, fd
        except OSError as error:
            if error.errno in _FULL:
                raise SegmentSpaceError(nbytes, f"{writer.path.parent} and {directory} filled up") from error
            raise
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def addresses(self, writer: ShmWriter) -> tuple[str, ...]:
        return (f"shm://{host_id()}/{str(writer.path).lstrip('/')}", f"inproc://{self._place}/{writer.name}")

    def write(self, writer: ShmWriter, offset: int, data: memoryview) -> int:
        """As os.pwrite. Raises ValueError for a segment that was dropped meanwhile."""
        with self._lock:
            self._check_open(writer)
            return os.pwrite(writer.fd, data, offset)

    def _check_open(self, writer: ShmWriter) -> None:
        if self._open.get(writer.name) is not writer:
            raise ValueError(f"segment {writer.name!r} was dropped while it was written")

    def seal(self, writer: ShmWriter, nbytes: int) -> None:
        """Serve what was written. Raises ValueError for a segment that was dropped meanwhile."""
        with self._lock:
            self._check_open(writer)
            writer.sealed = writer.sealed or SealedFile(writer.fd, nbytes)

    def sealed(self, name: str) -> SealedFile | None:
        """The bytes of a segment; None for a name that is not served."""
        writer = self._open.get(name)
        return writer.sealed if writer is not None else None

    def drop(self, name: str) -> None:
        """Stop serving ``name`` and free it after its last reader. Dropping what is not there is no error."""
        with self._lock:
            if name in self._open:
                _unlink(self._open.pop(name))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._open:
                _unlink(self._open.popitem()[1])


def _copy_some(source: int, target: int, at: int, nbytes: int) -> int:
    """The next bytes from ``at`` on that were written to ``source``. Returns up to where both files are the same."""
    try:
        at = os.lseek(source, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return nbytes  # nothing but zeros that were never written
    data = os.pread(source, _COPY_BYTES, at)
    return at + os.pwrite(target, data, at)


def _unlink(writer: ShmWriter) -> None:
    writer.path.unlink(missing_ok=True)
    if writer.sealed is None:
        os.close(writer.fd)
    writer.sealed = None


class ShmSegment:
    """A private mapping: pages are shared until one is written to, of which the writer then has a copy."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.buffer = memoryview(mapping)
        self._asked = self.buffer[:0]

    def ask(self, offset: int, nbytes: int) -> None:
        if min(offset, nbytes) < 0 or offset + nbytes > self.buffer.nbytes:
            raise ChecksumError(f"the segment has {self.buffer.nbytes} bytes, not {nbytes} at {offset}")
        self._asked = self.buffer[offset : offset + nbytes]

    def read(self, view: memoryview) -> int:
        """A copy, for a receiver that wants the bytes in memory of its own."""
        count = min(view.nbytes, self._asked.nbytes)
        view[:count] = self._asked[:count]
        self._asked = self._asked[count:]
        return count

    def close(self) -> None:
        self._asked.release()
        self.buffer.release()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: the mapping goes when the tensor does
            self._mapping.close()


class ShmReader:
    def open(self, address: Address, nbytes: int, deadline: Deadline, reach: Deadline | None = None) -> ShmSegment:
        path = Path("/") / address.path
        held = bool(_HELD.fullmatch(str(path)))
        if not held and (not _FILE_NAME.fullmatch(path.name) or ".." in path.parts):
            raise MessageError(f"{address} is not the path of a segment")  # a message cannot make us map any file
        try:
            fd = open_own(path)
        except OSError as error:
            raise PeerUnavailableError(str(address), error.strerror or str(error)) from error
        try:
            return ShmSegment(_map(fd, nbytes, address))
        finally:
            os.close(fd)


class InprocReader:
    """Within one process, as where one program publishes and generates in turns (``streamrl-worker profile``, a client
    that reads back what it published): also where the file's name is gone or was never visible.
    """

    def open(self, address: Address, nbytes: int, deadline: Deadline, reach: Deadline | None = None) -> ShmSegment:
        store = _stores.get(address.place)
        file = store.sealed(address.path) if store is not None else None
        if file is None:
            raise PeerUnavailableError(str(address), "no such segment in this process")
        return ShmSegment(_map(file.fd, nbytes, address))
