"""Response lengths that a user wrote down: what is one, and how many odd values a file may hold.

A text file has one number of tokens a line; ``#`` begins a comment. Workers are forced to them
(``generation.lengths``), ``plan`` and ``simulate`` count with them. Logs with prompts are read by ``ranker/logs.py``.

Real logs hold answers of no token, lines that were cut, and columns without a value. Invariant: such a value is skipped
and counted, never repaired; a file in which more than MAX_SKIPPED are so is refused, and the first of them is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from transport.errors import LengthFileError

log = structlog.get_logger(__name__)

MAX_TOKENS = 100_000_000
MAX_SKIPPED = 0.1
"""Share of values that may be no lengths. Source: ours; chat logs have up to a few percent of empty answers."""

Say = Callable[[str], None]
"""Gets one sentence about what was skipped, where something was."""


class Skipping:
    """Takes the values of one file, and counts those that are no lengths."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = 0
        self._num_skipped = 0
        self._first = ""

    def take(self, value: object, where: str, shown: object = None) -> int | None:
        """The length that ``value`` is, tokens, or None. where: file and line.  shown: as it stands there."""
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if 1 <= number <= MAX_TOKENS and number == int(number):
            self._num_read += 1
            return int(number)
        said = repr(value if shown is None else shown)[:40]
        self.skip(f"a length is a whole number of tokens, 1 or more, not {said}", where)
        return None

    def skip(self, problem: str, where: str) -> None:
        """There is no length at ``where``."""
        self._num_read += 1
        self._num_skipped += 1
        self._first = self._first or f"{where}: {problem}"

    def end(self, say: Say) -> str:
        """All was read. Returns why the file is refused, "" where it is not; then ``say`` hears what was skipped."""
        if self._num_skipped > MAX_SKIPPED * self._num_read:
            return f"{self._first} ({self._count()} are no lengths, more than {MAX_SKIPPED:.0%})"
        if self._num_skipped:
            say(f"{self._path}: {self._count()} are no lengths and were skipped; the first: {self._first}")
        return ""

    def _count(self) -> str:
        return f"{self._num_skipped} of {self._num_read} values"


def warn(sentence: str) -> None:
    """Say it in the log of this process."""
    log.warning(sentence)


def read_lengths(path: Path, say: Say = warn) -> list[int]:
    """At least one, each >= 1. Raises LengthFileError that names the file, and the first bad line."""
    return [tokens for group in read_groups(path, 1, say) for tokens in group]


def read_groups(path: Path, group_size: int, say: Say = warn) -> list[tuple[int, ...]]:
    """The same by prompt: ``group_size`` lines are one. What is skipped moves no other line to another prompt; a prompt
    without any length is left out."""
    skipping = Skipping(path)
    try:
        values = list(_values(path, skipping))
    except OSError as error:
        raise LengthFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LengthFileError(f"{path} cannot be read: it is no text") from error
    if refusal := skipping.end(say):
        raise LengthFileError(refusal)
    places = range(0, len(values), group_size)
    groups = [tuple(value for value in values[start : start + group_size] if value is not None) for start in places]
    if not any(groups):
        raise LengthFileError(f"{path} has no length in it; it takes a number of tokens a line")
    return [group for group in groups if group]


def _values(path: Path, skipping: Skipping) -> Iterator[int | None]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            value: float | str = float(word)
        except ValueError:
            value = word
        yield skipping.take(value, f"{path}:{number}", shown=word)
