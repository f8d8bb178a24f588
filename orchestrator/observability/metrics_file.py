"""The file ``metrics.jsonl``: appended line by line, and read whole or as it grows, also where a kill damaged it.

Every key is explained in docs/metrics.md. A last line without an end is being written, or a kill tore it: readers wait
for its end, and the next append removes it.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transport.process.files import writing

MAX_NAMED = 5
"""Damaged lines that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsFile:
    """What a metrics file holds. lines: the good ones, in order.  damaged: numbers of the others, from 1.

    A last line without an end is neither.
    """

    lines: Sequence[dict[str, Any]]
    damaged: Sequence[int]

    def say(self) -> str:
        """That lines are damaged, and which, "" where none is."""
        if not self.damaged:
            return ""
        more = ", ..." if len(self.damaged) > MAX_NAMED else ""
        named = ", ".join(map(str, self.damaged[:MAX_NAMED])) + more
        return f"metrics.jsonl: {len(self.damaged)} damaged, skipped: line {named}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of trained batches in a metrics file, in order."""
    return [line for line in read_lines(path) if "batch" in line]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All good lines of a metrics file, [] if there is none."""
    return list(read_file(path).lines)


def read_file(path: Path) -> MetricsFile:
    """A metrics file, also a damaged one; an empty one where there is none."""
    lines: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, raw in enumerate(_whole_lines(path), start=1):
        line = parse_line(raw)
        if line is None:
            damaged.append(number)
        else:
            lines.append(line)
    return MetricsFile(lines=lines, damaged=damaged)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Without a last one that does not end, unless only its end is missing."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"\n") or parse_line(raw) is not None:
                yield raw


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """One line of a metrics file; None where it is damaged: it is not an object with the number of a batch or an
    evaluation."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("batch", line.get("eval")), int):
        return None
    return line


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line. A tail that a kill tore off is taken away first: behind it, this one would be lost, too.

    Raises: DirectoryError: the disk is full, or may not be written.
    """
    with writing(path.parent), path.open("ab+") as file:
        _mend_tail(file)
        file.write(json.dumps(line).encode() + b"\n")


def _mend_tail(file: BinaryIO) -> None:
    """Make the file end with the end of a line."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 1))
    if file.read() in (b"", b"\n"):
        return
    file.seek(0)
    tail = file.read().rpartition(b"\n")[2]
    if parse_line(tail) is not None:
        file.write(b"\n")
    else:
        file.truncate(end - len(tail))


# --- while it grows ---------------------------------------------------------------------------------------------------


class _Appended:
    """Whole lines that were appended to a file since the last call, with where they begin."""

    def __init__(self) -> None:
        self._inode = self._seen_bytes = 0

    def is_replaced(self, file: BinaryIO) -> bool:
        """Whether another file, or a shorter one, stands at the path: the next lines are its first."""
        now = os.fstat(file.fileno())
        if now.st_ino == self._inode and now.st_size >= self._seen_bytes:
            return False
        self._inode, self._seen_bytes = now.st_ino, 0
        return True

    def lines(self, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        file.seek(self._seen_bytes)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield self._seen_bytes, raw
            self._seen_bytes += len(raw)


class NewLines:
    """Every good line of a growing metrics file, each returned once; only what was appended is read."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        """skip: leave out the lines that are there now."""
        self._path = path
        self._appended = _Appended()
        self._num_read = 0
        if skip:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last call. A file that was replaced goes on after as many lines as were returned."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            known = self._num_read if self._appended.is_replaced(file) else 0
            lines = [line for _, raw in self._appended.lines(file) if (line := parse_line(raw)) is not None][known:]
        self._num_read += len(lines)
        return lines


class BatchLines:
    """Lines of any batches of a growing metrics file. Safe for use by several threads.

    Keeps eight bytes a batch: where its line begins. What was appended is read once, line by line; a file that was
    replaced is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begins = array("Q")
        self._appended = _Appended()
        self._lock = threading.Lock()

    def read(self, first: int, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` lines from number ``first`` on, as ``read_metrics`` has them; [] where there are none."""
        if not self._path.exists():
            return []
        with self._lock, self._path.open("rb") as file:
            if self._appended.is_replaced(file):
                self._begins = array("Q")
            for begin, raw in self._appended.lines(file):
                if "batch" in (parse_line(raw) or {}):
                    self._begins.append(begin)
            return [line for begin in self._begins[first : first + count] if (line := _line_at(file, begin))]


def _line_at(file: BinaryIO, begin: int) -> dict[str, Any] | None:
    file.seek(begin)
    return parse_line(file.readline())
