"""Rankers in files: one MessagePack document, typed and checked when it is read; never pickle.

A file comes from wherever the user got it. Its size is bounded before it is read, its schema while it is decoded, and
its numbers by those who use them (trees, calibration, history), so a damaged or hostile one is a RankerFileError.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ranker.errors import RankerFileError
from ranker.history import StoredHistory
from ranker.model import StoredModel
from transport.process.files import replace

FORMAT = "streamrl-ranker"
VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
"""A text model takes 1 to 4 MB, a history of 200,000 prompts about 15."""


class StoredRanker(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds: a text model, a history, or both."""

    format: str = FORMAT
    version: int = VERSION
    model: StoredModel | None = None
    history: StoredHistory | None = None
    trusted: bool | None = None


def encode(ranker: StoredRanker) -> bytes:
    return msgspec.msgpack.encode(ranker)


def decode(content: bytes, where: str) -> StoredRanker:
    """Raises RankerFileError: not a ranker, or one of another version."""
    try:
        ranker = msgspec.msgpack.decode(content, type=StoredRanker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RankerFileError(f"{where} is not a stored ranker: {error}") from error
    if ranker.format != FORMAT or ranker.version != VERSION:
        raise RankerFileError(
            f"{where} is a {ranker.format!r} of version {ranker.version}, not {FORMAT!r} {VERSION}: train it again"
        )
    if ranker.model is None and ranker.history is None:
        raise RankerFileError(f"{where} is not a stored ranker: it holds neither a model nor a history")
    return ranker


def write(path: Path, ranker: StoredRanker) -> None:
    """Replace the file whole: a reader never sees half of it. Raises RankerFileError."""
    try:
        replace(path, encode(ranker))
    except OSError as error:
        raise RankerFileError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> StoredRanker:
    """Raises RankerFileError: missing, too large, or as ``decode``."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RankerFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise RankerFileError(f"{path} has more than {MAX_BYTES >> 20} MiB: it is not a stored ranker")
    return decode(content, str(path))
