"""Files of ours: replaced whole or not at all, read where they are this user's own, one error for each trouble.

Every place in this repository where a file takes the place of another comes here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import secrets
import stat
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from transport.errors import DirectoryError, ForeignError

REMAINS = ".tmp"
"""How the name of a file ends that is not in place yet."""
REMAINS_S = 3600.0
"""No file takes so long to write: one that is older was left by a process that was killed."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(directory: Path) -> Generator[None]:
    """Turns what the system says of ``directory``, or a file in it, into DirectoryError."""
    try:
        yield
    except OSError as error:
        advice = (
            "free some space there, or enlarge the volume"
            if error.errno in _FULL
            else f"let user {os.getuid()} write there (a volume: chown -R {os.getuid()}), or choose another directory"
        )
        raise DirectoryError(f"cannot write {error.filename or directory}: {error.strerror}; {advice}") from error


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Generator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends, or, if anything fails, never.

    A reader sees the old file or the new one, each whole, also after a kill or a power cut: the
    file is on the disk before its name is, and the name before this returns. A link at ``path`` is replaced, not
    followed. mode: as for ``open``, less the umask.  Raises OSError; nothing of the attempt is left then.
    """
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
    """Somebody else holds a lock. holder: the process that does, as it says."""

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

MAX_OWN_BYTES = 4 * 1024 * 1024
"""Of a file that is read whole: settings, a password."""


def read_own(path: Path, *, max_bytes: int = MAX_OWN_BYTES, secret: bool = False) -> bytes:
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


def check_own_tree(directory: Path, *, levels: int) -> None:
    """``check_own`` for ``directory``, which may be named by a link, and what lies in its uppermost ``levels``.

    What is removed meanwhile (by a live run) is passed over.  Raises as ``check_own`` does.
    """
    top = directory.resolve()
    check_own(top)
    found = [top]
    for _ in range(levels):
        found = [path for above in found if above.is_dir() for path in _inside(above)]
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


def _user(number: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    return f"user {number}"
