"""Files of ours on disks that are full, read-only or somebody else's: one error that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from transport.errors import DirectoryError

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
