"""Errors of the control plane, named by how the command ends; its exit codes; what of a text a terminal may be shown.

StreamError (transport.errors)
├── MISTAKES (transport.errors) 2: a name that is taken, a password, a port, a file that is another user's
├── FatalError                  1 from ``run``; a child exits with 4, so that it is not started again
│   ├── ConfigError             2: a setting is unknown, of the wrong type, out of range or impossible
│   ├── DataError               2: the prompts cannot be read, or are not what the settings say
│   └── DirectoryError          5: a directory cannot be written (transport.errors)
├── BrokerFullError             5: the broker refused writes for ``broker.outage_s`` (transport.errors)
├── EventFailedError            1, and a supervisor starts the orchestrator again, which skips the event
├── RefusedError                never ends a command: the answer to one request over HTTP
└── RunFailedError              1: the run cannot go on
    ├── ChildFailedError        the child's own 2, 3 or 5, else 1
    ├── EngineLostError         1: what starts the workers on their nodes is gone
    ├── StalledError            3: no progress for ``liveness.stall_s``
    ├── ForeignEntryError       1: somebody else wrote to a stream that only the orchestrator may write
    └── Interrupted             130: a signal asked for the end
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from transport.errors import MISTAKES, BrokerFullError, DirectoryError, FatalError, StreamError


class ExitCode(IntEnum):
    """What a shell, a container or the supervisor sees."""

    OK = 0
    FAILED = 1
    BAD_CONFIG = 2
    STALLED = 3
    FATAL = 4
    UNWRITABLE = 5
    INTERRUPTED = 130  # as a shell reports SIGINT


class ConfigError(FatalError):
    """One setting is wrong. key: dotted, "" when a whole file is.  where: "file.toml:7", "--set", ..."""

    def __init__(self, problem: str, *, key: str = "", where: str = "") -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.key = key
        self.where = where


class DataError(FatalError):
    """The prompts cannot be used; the message names the file and the row."""


class EventFailedError(StreamError):
    """A bug: the core failed on ``event``. entry_id: of the events log, "" for one of the orchestrator's own."""

    def __init__(self, event: object, entry_id: str, error: Exception) -> None:
        kind = type(event).__name__
        where = f"{kind}, entry {entry_id} of the events log," if entry_id else f"{kind}, of the orchestrator itself,"
        after = "; it is among the dead letters now, and the next start skips it" if entry_id else ""
        super().__init__(f"{where} could not be applied: {type(error).__name__}: {error}{after}")
        self.event = event
        self.entry_id = entry_id


class RefusedError(StreamError):
    """What somebody asked of a service cannot be done. status: of HTTP; the message says what to do instead."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RunFailedError(StreamError):
    """The run cannot go on."""


class ChildFailedError(RunFailedError):
    """The local process ``name`` ended with ``code``, and starting it again is no use."""

    def __init__(self, name: str, code: int, last_words: str) -> None:
        how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}"
        super().__init__(f"{name} {how}: {last_words}" if last_words else f"{name} {how}")
        self.name = name
        self.code = code


class StalledError(RunFailedError):
    """Nothing progressed for too long; the message names the stage."""


class ForeignEntryError(RunFailedError):
    """Entry ``entry_id`` of ``stream`` is not of this run, and keeps out everything that should follow it."""

    def __init__(self, stream: str, entry_id: str) -> None:
        super().__init__(
            f"stream {stream} holds entry {entry_id}, which this run never wrote: keep others away from the broker; "
            "--resume takes it out"
        )
        self.stream = stream
        self.entry_id = entry_id


class EngineLostError(RunFailedError):
    """The engine of ``launcher.kind`` is gone, and with it all word of its workers."""


class Interrupted(RunFailedError):
    """A signal asked for the end. by: what sent it, for people."""

    def __init__(self, problem: str, *, by: str = "a signal") -> None:
        super().__init__(problem)
        self.by = by


def exit_code(error: StreamError, *, is_child: bool = False) -> ExitCode:
    """The exit code of a command that ends by ``error``. is_child: a supervisor reads it (see FATAL)."""
    match error:
        case error if isinstance(error, (ConfigError, DataError, *MISTAKES)):
            return ExitCode.BAD_CONFIG
        case DirectoryError() | BrokerFullError():
            return ExitCode.UNWRITABLE
        case StalledError():
            return ExitCode.STALLED
        case Interrupted():
            return ExitCode.INTERRUPTED
        case ChildFailedError(code=ExitCode.BAD_CONFIG | ExitCode.STALLED | ExitCode.UNWRITABLE as code):
            return ExitCode(code)
        case ChildFailedError():
            return ExitCode.FAILED
        case FatalError() | RunFailedError() if is_child:
            return ExitCode.FATAL
        case _:
            return ExitCode.FAILED


@contextmanager
def writing_out(path: Path) -> Generator[None]:
    """Turns what the system says of ``path``, which a user asked for by name, or a file beside it, into ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", where="--out") from error


def check_out(path: Path) -> None:
    """For work that takes long before it writes. Raises ConfigError: there is no directory to write ``path`` to."""
    with writing_out(path):
        if not path.parent.is_dir():
            raise NotADirectoryError(0, f"{path.parent} is no directory")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(0, f"{path.parent} is not yours to write to")
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")


def printable(text: str) -> str:
    """``text`` without control characters other than newline: what a model wrote may carry terminal escapes."""
    return "".join(char for char in text if char == "\n" or char.isprintable())
