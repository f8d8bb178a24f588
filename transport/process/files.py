"""Files of ours: replaced whole or not at all, read where they are this user's own, one error for each trouble.

Every place in this repository where a file takes the place of another comes here. JSON from outside is read here too:
rows as a stream that is never held together, with bounds on a line and on what a small file may unpack to; a reader
returns a value or raises InputFileError with file and line.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import gzip
import os
import pwd
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from transport.errors import DECODE_ERRORS, DirectoryError, ForeignError, InputFileError

REMAINS = ".tmp"  # how the name of a file ends that is not in place yet
REMAINS_S = 3600.0  # no file takes so long to write: one that is older was left by a process that was killed


@contextmanager
def writing(directory: Path) -> Generator[None]:
    """Turns what the system says of ``directory``, or a file in it, into DirectoryError."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                advice = "free some space there, or enlarge the volume"
            case errno.EROFS:
                advice = "mount it so that it can be written, or choose another directory"
            case _:
                who = os.getuid()
                advice = f"let user {who} write there (a volume: chown -R {who}), or choose another directory"
        raise DirectoryError(f"cannot write {error.filename or directory}: {error.strerror}; {advice}") from error


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SAYS_NO_ROOM = re.compile("No space left on device|Disk quota exceeded")


def is_no_room(error: BaseException) -> bool:
    """Whether a full disk is behind ``error``, of whichever library: some raise no OSError, and only say so."""
    causes: BaseException | None = error
    while causes is not None:
        if getattr(causes, "errno", None) in _NO_ROOM or _SAYS_NO_ROOM.search(str(causes)):
            return True
        causes = causes.__cause__ or causes.__context__
    return False


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Generator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends, or, if anything fails, never.

    A reader sees the old file or the new one, each whole, also after a kill or a power cut: the
    file is on the disk before its name is, and the name before this returns. A link at ``path`` is replaced, not
    followed. mode: as for ``open``, less the umask.  Raises OSError; nothing of the attempt is left then.
    """
    if path.is_dir() and not path.is_symlink():  # "." has no name to put another beside
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{REMAINS}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def replace(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """``replacing`` for what is there already; a string is written as UTF-8."""
    with replacing(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_directory(directory: Path) -> None:
    """Have the names in ``directory`` on the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that writes names at once has no such call
            raise
    finally:
        os.close(descriptor)


class LockedError(Exception):
    def __init__(self, holder: str) -> None:
        super().__init__(f"process {holder} holds it")
        self.holder = holder


def locked(path: Path) -> IO[bytes]:
    """Own ``path`` until what this returns is closed, or this process ends, however it does.

    Raises LockedError: another process owns it.  OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.fdopen(os.open(path, flags, 0o600), "rb+", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock.read(64).decode("ascii", "replace").strip() or "unknown"
        lock.close()
        raise LockedError(holder) from None
    with suppress(OSError):  # a full disk: the lock holds all the same, without a name
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
    return lock


def is_locked(path: Path) -> bool:
    """Whether a living process owns ``path`` (see ``locked``); False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # briefly: an owner that starts now tries again
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def remove_remains(directory: Path) -> None:
    """Remove what a process that was killed within ``replacing`` left here. For the owner of ``directory``."""
    for path in directory.glob(f".*{REMAINS}"):
        with suppress(FileNotFoundError):
            if time.time() - path.lstat().st_mtime > REMAINS_S:
                path.unlink()


# --- our own ----------------------------------------------------------------------------------------------------------


def read_own(path: Path, *, max_bytes: int = 4 * 1024 * 1024, secret: bool = False) -> bytes:
    """The content of a plain file of this user's.

    Raises: OSError: it is not there, or cannot be read.  ForeignError: it is a link, a pipe or a device (which would
    block), another user's, or larger than ``max_bytes``; with ``secret`` also: others may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ForeignError(f"{path} is a link: put the file itself there") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check(status, path, stat.S_ISREG, "a plain file")
        if secret and status.st_mode & 0o077:
            raise ForeignError(f"{path} is not a file that this user alone can read: remove it")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ForeignError(f"{path} has more than {max_bytes} bytes: it is not what it should be")
    return content


def check_own(path: Path) -> None:
    """Raises ForeignError: ``path`` is a link, or no file, directory or socket of this user's; OSError."""
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISSOCK)
    _check(path.lstat(), path, lambda mode: any(kind(mode) for kind in kinds), "a plain file or directory")


def check_own_tree(directory: Path, *, levels: int, unread: Collection[str] = ()) -> None:
    """``check_own`` for ``directory``, which may be named by a link, and what lies in its uppermost ``levels``.

    What is removed meanwhile (by a live run) is passed over, and what is in directories of it whose names are
    ``unread``; they themselves are checked.  Raises as ``check_own`` does.
    """
    top = directory.resolve()
    check_own(top)
    found, passed = [top], {top / name for name in unread}
    for _ in range(levels):
        found = [path for above in found if above not in passed and above.is_dir() for path in _inside(above)]
        for path in found:
            with suppress(FileNotFoundError):
                check_own(path)


def _inside(directory: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return list(directory.iterdir())
    return []


def run_directory(path: Path) -> None:
    """Make the directory of a run, which this user alone may enter: it holds prompts, answers, weights and secrets.

    Directories above it are made as any are, and one that is there keeps the mode that its owner gave it.
    Raises: ForeignError: another user's.  OSError.
    """
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    check_own(path.resolve())


def private_directory(path: Path) -> None:
    """Make ``path`` a directory that this user alone may enter; its parent is there.

    Raises: ForeignError: another user's, or a link or file is in its place.  OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ForeignError(f"{path} is no directory (a link, or a file): remove it") from error
        if error.errno == errno.EACCES:
            _check(path.lstat(), path, stat.S_ISDIR, "a directory")
        raise
    try:
        _check(os.fstat(descriptor), path, stat.S_ISDIR, "a directory")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _check(status: os.stat_result, path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    if not is_kind(status.st_mode):
        advice = "put what it names in its place, or remove it" if stat.S_ISLNK(status.st_mode) else "remove it"
        raise ForeignError(f"{path} is not {kind}: {advice}")
    if status.st_uid != os.geteuid():
        raise ForeignError(
            f"{path} belongs to {_user(status.st_uid)}, you are {_user(os.geteuid())}: what lies there could act in "
            "your name; let its owner do this, or make a copy of your own (cp -r), if you trust it"
        )


def other_writers(status: os.stat_result) -> str:
    """Reason why others than this process's user and root can have written a file; "": they cannot.

    A group that has no member but its user, as many distributions make one for each (umask 002), is that user.
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to {_user(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid, status.st_uid):
        return f"can be written by group {_group(status.st_gid)}"
    return ""


def _is_private(group: int, user: int) -> bool:
    """Whether ``group`` is root's, or the own one of ``user``: its first, of its name, without other members."""
    if group == 0:
        return True
    with suppress(KeyError):
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
        return owner.pw_gid == group and owner.pw_name == found.gr_name and not {*found.gr_mem} - {owner.pw_name}
    return False


def _group(number: int) -> str:
    with suppress(KeyError):
        return f"{grp.getgrgid(number).gr_name} ({number})"
    return str(number)


def _user(number: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    return f"user {number}"


# --- JSON from outside: one document, or rows of one object a line ----------------------------------------------------


MAX_DOCUMENT_BYTES = 256 * 1024 * 1024  # the largest tokenizers have 30 MB
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_UNPACKED_RATIO = 100
"""gzip packs text to a tenth or a thirtieth, and nothing but repetition to a thousandth: 3 MB held 3 GiB."""
FREE_UNPACKED_BYTES = 256 * 1024 * 1024
"""A file may unpack to this much whatever its ratio: so much repetition takes time to read, and no more."""

T = TypeVar("T")
_decoder = msgspec.json.Decoder(dict[str, Any])


def read_json(path: Path, kind: type[T]) -> T:
    """The one document in ``path``. Raises InputFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise InputFileError(f"cannot be read: {reason}", where=str(path)) from error
    if len(content) > MAX_DOCUMENT_BYTES:
        raise InputFileError(f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB", where=str(path))
    return _decoded(msgspec.json.Decoder(kind), content, str(path))


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line from 1, row); blank lines are skipped. Raises InputFileError."""
    for number, line in read_lines(path):
        yield number, decode_row(line, f"{path}:{number}")


def decode_row(line: bytes, where: str) -> dict[str, Any]:
    """Raises InputFileError for a line that is no JSON object."""
    return _decoded(_decoder, line, where)


def _decoded(decoder: msgspec.json.Decoder[T], content: bytes, where: str) -> T:
    try:
        return decoder.decode(content)
    except UnicodeDecodeError as error:
        raise InputFileError("it is not UTF-8 text: save it as UTF-8", where=where) from error
    except DECODE_ERRORS as error:
        hint = " (JSON has no NaN)" if b"NaN" in content else ""
        if re.match(rb"\s*\{\s*'", content):
            hint = " (JSON has double quotes around names and texts, as json.dumps writes them)"
        raise InputFileError(f"not the JSON that belongs here: {error}{hint}", where=where) from error


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FOREIGN = {
    b"PAR1": "it is a Parquet file, not lines of JSON",
    b"\x1f\x8b": "it is packed with gzip: give it a name that ends in .gz",
    b"\xff\xfe": "it is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "it is UTF-16 text: save it as UTF-8",
    b"PK\x03\x04": "it is a zip archive: unpack it",
}
"""How files begin that are given as lines of JSON by mistake."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes), without a byte order mark; blank lines are skipped. Raises InputFileError."""
    number = unpacked = 0
    try:
        is_packed = path.suffix == ".gz"
        if stat.S_ISFIFO(path.stat().st_mode):
            raise InputFileError("it is a pipe, and is read several times: write it to a file", where=str(path))
        allowed = max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * path.stat().st_size)
        with gzip.open(path) if is_packed else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                unpacked += len(line)
                where = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                    for magic, problem in FOREIGN.items():
                        if line.startswith(magic):
                            raise InputFileError(problem, where=where)
                if len(line) > MAX_LINE_BYTES:
                    raise InputFileError(f"longer than {MAX_LINE_BYTES >> 20} MiB", where=where)
                if is_packed and unpacked > allowed:
                    raise InputFileError(
                        f"it unpacks to more than {MAX_UNPACKED_RATIO} times its size, which no text does; if it is "
                        "yours, unpack it and name the file without .gz",
                        where=where,
                    )
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = getattr(error, "strerror", None) or f"it is damaged: {error}"
        after = f" after line {number}" if number else ""
        raise InputFileError(f"cannot be read{after}: {reason}", where=str(path)) from error
