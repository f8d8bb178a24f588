"""Files that a user asked for by name: what keeps them from being written is an error of the command line."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.errors import ConfigError


@contextmanager
def writing_out(path: Path) -> Generator[None]:
    """Turns what the system says of ``path``, or a file beside it, into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", where="--out") from error


def check_place(path: Path) -> None:
    """For work that takes minutes before it writes. Raises ConfigError: there is no directory to write ``path`` to."""
    with writing_out(path):
        if not path.parent.is_dir():
            raise NotADirectoryError(0, f"{path.parent} is no directory")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(0, f"{path.parent} is not yours to write to")
