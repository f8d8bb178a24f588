"""A directory that is on a file system or in object storage: one way to list and read both, and to write a file.

    Place = Path | ObjectPath      an ObjectPath has the words of a Path that readers of files use

Owns: how an object store is spoken to, through fsspec. Never: what lies there, or when it counts as whole. Invariants:
every request ends within ``ANSWER_S``, whatever the library does; a file is read in the blocks that are asked for, and
written in parts, so nobody holds all of one; errors are OSErrors, as those of a disk. Credentials are those that the
library finds in the environment.

Files of a local disk do not go through fsspec: it neither syncs them nor renames a directory in one step.
"""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import urlsplit

from transport.errors import DirectoryError
from transport.process.files import writing

ANSWER_S = 60.0
"""For one request, of BLOCK_BYTES at most: slower than 0.3 MB/s is no storage for checkpoints."""
BLOCK_BYTES = 16 * 1024 * 1024
"""Sent or asked for at once: few requests, and small beside a model."""
EXTRAS = {"s3": "pip install 'streamrl[s3]'", "s3a": "pip install 'streamrl[s3]'", "gs": "pip install gcsfs"}
"""By scheme, what installs it; of others the library's own message says it."""

T = TypeVar("T")


class Writer(Protocol):
    """A new file. Raises OSError."""

    def write(self, data: bytes | memoryview, /) -> object: ...


class Size(NamedTuple):
    st_size: int


def within(what: str, call: Callable[[], T], *, more_s: float = 0.0) -> T:
    """Carry out one request to a store. Raises OSError: the store's answer; TimeoutError: none within ``ANSWER_S``."""
    done: list[T] = []
    failed: list[OSError] = []

    def work() -> None:
        try:
            done.append(call())
        except OSError as error:
            failed.append(error)
        except Exception as error:  # fsspec's file systems share no root of errors: botocore's, gcsfs's, aiohttp's
            failed.append(OSError(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name="object storage", daemon=True)  # one that hangs must not keep us here
    thread.start()
    thread.join(ANSWER_S + more_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"{what}: no answer within {ANSWER_S + more_s:.0f} s")
    return done[0]


class ObjectPath:
    """A directory or file of an object store. system: fsspec's, which has no types.  scheme: of the URL."""

    __slots__ = ("_path", "_scheme", "_system")

    def __init__(self, system: Any, path: str, scheme: str) -> None:
        self._system = system
        self._path = path.rstrip("/")
        self._scheme = scheme

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self._system, f"{self._path}/{name}", self._scheme)

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"ObjectPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self._system, self._path.rpartition("/")[0], self._scheme)

    def files(self) -> list[ObjectPath]:
        """Those in here and in directories in here. Raises OSError: also where there is no such bucket."""

        def find() -> list[str]:
            self._system.invalidate_cache()
            found: list[str] = self._system.find(self._path, maxdepth=2)
            if not found:  # which is also what it says of a bucket that is not there, or not ours
                self._system.ls(self._path.lstrip("/").partition("/")[0])
            return found

        return [ObjectPath(self._system, path, self._scheme) for path in within(f"list {self}", find)]

    def stat(self) -> Size:
        return Size(int(within(f"look at {self}", lambda: self._system.info(self._path))["size"]))

    def is_file(self) -> bool:
        return within(f"look at {self}", lambda: self._system.isfile(self._path))

    def read_bytes(self) -> bytes:
        return within(f"read {self}", lambda: self._system.cat_file(self._path))

    def read_range(self, start: int, end: int) -> bytes:
        return within(f"read {self}", lambda: self._system.cat_file(self._path, start=start, end=end))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """To be read, unbuffered: each read is a request. Raises OSError."""
        return _Reading(self, self.stat().st_size)  # pyright: ignore[reportReturnType] what io.open returns unbuffered

    def copy_to(self, target: ObjectPath) -> None:
        """By the store itself, which may take a second for a block."""
        more_s = self.stat().st_size / BLOCK_BYTES
        within(f"copy {self}", lambda: self._system.copy(self._path, target._path), more_s=more_s)

    def remove(self) -> None:
        """This directory and all in it, if it is there."""

        def remove() -> None:
            if found := self._system.find(self._path):
                self._system.rm(found)

        within(f"remove {self}", remove)

    @contextmanager
    def creating(self) -> Generator[Writer]:
        """A new object, there when the block ends without an error; parts are sent meanwhile."""
        file = within(f"write {self}", lambda: self._system.open(self._path, "wb", block_size=BLOCK_BYTES))
        writing = _Writing(self, file)
        try:
            yield writing
        except BaseException:
            writing.discard()
            raise
        within(f"write {self}", file.close)


class _Reading(io.RawIOBase):
    """An object of ``size`` bytes."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size, self._at + BLOCK_BYTES)
        if end <= self._at:
            return 0
        got = self._path.read_range(self._at, end)
        view[: len(got)] = got
        self._at += len(got)
        return len(got)


class _Writing:
    def __init__(self, path: ObjectPath, file: Any) -> None:
        self._path, self._file = path, file

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            part = view[start : start + BLOCK_BYTES]
            within(f"write {self._path}", lambda part=part: self._file.write(part))

    def discard(self) -> None:
        """What was sent becomes no object; ``close`` of the library would make it one."""
        self._file.closed = True
        with suppress(OSError):  # a store that is away ends the upload by rules of its own
            within(f"discard {self._path}", self._file.discard)


Place = Path | ObjectPath


def place_of(text: str) -> Place:
    """A path, or a URL of fsspec. Raises DirectoryError: what speaks its scheme is not installed, or there is none."""
    scheme = urlsplit(text).scheme if "://" in text else "file"
    if scheme == "file":
        return Path(text.removeprefix("file://"))
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    try:
        system, path = cast(Any, fsspec).url_to_fs(text, use_listings_cache=False)
    except ImportError as error:
        raise DirectoryError(f"{text}: {EXTRAS.get(scheme, error)} is needed on this machine") from error
    except ValueError as error:
        raise DirectoryError(f"{text}: {error}") from error
    return ObjectPath(system, path, scheme)


@contextmanager
def reaching(place: object) -> Generator[None]:
    """Turns what a store says of ``place`` into DirectoryError with what can be done."""
    try:
        yield
    except OSError as error:
        raise DirectoryError(f"cannot use {place}: {error}; {_advice(error)}") from error


def prepare(place: Place) -> None:
    """Make the directory, for this user alone, or see that the store takes a file. Raises DirectoryError."""
    if isinstance(place, Path):
        with writing(place):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return
    probe = place / f".try-{secrets.token_hex(4)}"
    with reaching(place):
        with probe.creating() as writer:
            writer.write(b"whether this can be written")
        probe.remove()


def _advice(error: OSError) -> str:
    match error:
        case FileNotFoundError():
            return "make the bucket, or correct its name"
        case PermissionError():
            return "credentials come from the environment, and must allow to list, read, write and delete there"
        case _:
            return "see to the network, the endpoint (of s3: AWS_ENDPOINT_URL) and the credentials of the environment"


@contextmanager
def creating(place: Place) -> Generator[Writer]:
    """A new file, which is durable when the block ends without an error. Raises OSError."""
    if isinstance(place, ObjectPath):
        with place.creating() as writer:
            yield writer
        return
    with place.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
