"""JSON in files from outside: one document, or rows of one object a line, gzipped where the name ends in .gz.

Rows are read as a stream and never held together; a line is bounded, and so is what a small file may unpack to.
Whatever is in a file, the reader returns a value or raises InputFileError with file and line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transport.errors import InputFileError

T = TypeVar("T")

MAX_DOCUMENT_BYTES = 256 * 1024 * 1024
"""The largest tokenizers have 30 MB."""
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_UNPACKED_RATIO = 100
"""gzip packs text to a tenth or a thirtieth, and nothing but repetition to a thousandth: 3 MB held 3 GiB."""
FREE_UNPACKED_BYTES = 256 * 1024 * 1024
"""A file may unpack to this much whatever its ratio: so much repetition takes time to read, and no more."""


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        hint = " (JSON has no NaN)" if b"NaN" in content else ""
        raise InputFileError(f"not the JSON that belongs here: {error}{hint}", where=where) from error


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes); blank lines are skipped. Raises InputFileError."""
    number = unpacked = 0
    try:
        is_packed = path.suffix == ".gz"
        allowed = max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * path.stat().st_size)
        with gzip.open(path) if is_packed else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                unpacked += len(line)
                where = f"{path}:{number}"
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
