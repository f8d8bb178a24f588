"""A file of response lengths: text, one whole number of tokens a line; ``#`` begins a comment.

Workers are forced to them (``generation.lengths``), ``plan`` and ``simulate`` count with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from transport.errors import LengthFileError


def read_lengths(path: Path) -> list[int]:
    """At least one, each >= 1. Raises LengthFileError that names the file, and the first bad line."""
    try:
        lengths = list(_numbers(path))
    except OSError as error:
        raise LengthFileError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LengthFileError(f"{path} cannot be read: it is no text") from error
    if not lengths:
        raise LengthFileError(f"{path} has no length in it; it takes a number of tokens a line")
    return lengths


def _numbers(path: Path) -> Iterator[int]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not 1 <= value < math.inf or value != int(value):
            raise LengthFileError(
                f"{path}:{number}: a length is a whole number of tokens, 1 or more, not {word[:40]!r}"
            )
        yield int(value)
