"""``logs``: what the processes of a run wrote, merged by time, as people read it.

In the files a line is a JSON object; what a program prints besides, as a traceback, belongs to the line before it.
Invariant: control characters are removed, since a model's output may be in a line. Changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from orchestrator.config.run_directory import RunDir, existing_run
from orchestrator.errors import ConfigError, printable
from orchestrator.observability.live import plain_console
from transport.process.files import is_locked

POLL_S = 0.3
TAIL_BYTES = 4 * 1024 * 1024  # of each file, that are searched for its last lines
NAMED = ("event", "level", "timestamp", "process")  # keys that have a place of their own in a line
STYLES = {"warning": "yellow", "error": "red", "critical": "red"}


class LogLine(NamedTuple):
    """at: ISO time in UTC; a line without one has that of the line before it.  level: "" for what is not JSON."""

    at: str
    process: str
    level: str
    text: str


class LogFile:
    """Whole lines of a growing file, each read once."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._at = ""
        self._offset = max(0, path.stat().st_size - TAIL_BYTES)
        self._cut = self._offset > 0

    def read(self) -> list[LogLine]:
        """Those since the last call; at first those of the last TAIL_BYTES."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        lines = whole.split(b"\n") if newline else []
        if self._cut and lines:  # its beginning was not read
            lines, self._cut = lines[1:], False
        return [self._parsed(line.decode("utf-8", "replace")) for line in lines]

    def _parsed(self, line: str) -> LogLine:
        try:
            fields: Any = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or "event" not in fields:
            return LogLine(self._at, self.process, "", line)
        found: Mapping[str, Any] = fields
        self._at = str(found.get("timestamp", self._at))
        rest = [f"{key}={_value(value)}" for key, value in found.items() if key not in NAMED]
        return LogLine(self._at, self.process, str(found.get("level", "")), "  ".join([str(found["event"]), *rest]))


def _value(value: object) -> str:
    plain = isinstance(value, str) and value and not any(char in value for char in ' "=\n')
    return str(value) if plain else json.dumps(value)


def main(run_dir: Path, process: str | None, *, num_lines: int, follow: bool) -> int:
    """Print the last lines, of one process or of all, and with ``follow`` those that come until the run has ended.

    Returns 0.  Raises: ConfigError: there is no run, or no such process; ForeignError.
    """
    rundir = existing_run(run_dir)
    names = sorted(path.stem for path in rundir.logs.glob("*.log"))
    if process is not None and process not in names:
        raise ConfigError(f"{run_dir} has no process {process}; it has: {', '.join(names) or 'none yet'}")
    console = plain_console()
    files: dict[Path, LogFile] = {}
    lines = list(_new_lines(rundir, process, files))
    _print(console, lines[max(0, len(lines) - num_lines) :])
    while follow:
        over = not is_locked(run_dir / "lock")  # looked at first: what it wrote last is read once more
        _print(console, list(_new_lines(rundir, process, files)))
        if over:
            break
        time.sleep(POLL_S)
    return 0


def _new_lines(rundir: RunDir, process: str | None, files: dict[Path, LogFile]) -> Iterator[LogLine]:
    """By time. files: those that are known; new ones, of workers that joined, are added."""
    for path in rundir.logs.glob("*.log" if process is None else f"{process}.log"):
        if path not in files:
            files[path] = LogFile(path)
    found = [line for file in files.values() for line in file.read()]
    yield from sorted(found, key=lambda line: line.at)  # stable: lines of one process stay in their order


def _print(console: Console, lines: list[LogLine]) -> None:
    for line in lines:
        style = STYLES.get(line.level, "")
        said = Text.assemble(
            (_clock(line.at) if line.level else " " * 8, "dim"),
            (f"  {printable(line.process):12}", "cyan"),
            (f"  {line.level:7}" if line.level else " " * 9, style),
            (f"  {printable(line.text)}", style),
        )
        console.print(said, soft_wrap=True)


def _clock(at: str) -> str:
    """Local time of day."""
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return " " * 8
