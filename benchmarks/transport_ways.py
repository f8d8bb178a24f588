"""What a way for bytes from one process to another is, to compare some (``transport.py``).

A way is two context managers, one for each end, which give the function that makes one transfer. The receiver asks, and
its transfer ends once all bytes lie in its memory and were compared with their CRC-32, piece by piece.

    transport_compared.py   ours, and the bare ways that they are compared with
    transport_others.py     what other libraries take
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from transport.errors import ChecksumError
from transport.tensors.pieces import crc32
from transport.tensors.receive import Memory

STEP_S = 180.0
"""Limit of one step of a child; the slowest, 512 MiB by pickle at load 8, takes 20."""
ENDING_S = 5.0
REQUEST = struct.Struct("<Q")

Transfer = Callable[[int], None]
"""One end of a transfer of so many bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, end) of the content, and the CRC-32 of it."""

    start: int
    end: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What every process is given. content: a file that holds the bytes.  directory: in shared memory.

    pieces: by size, those of the first so many bytes.
    """

    content: Path
    directory: Path
    pieces: Mapping[int, Sequence[Piece]]
    secret: bytes


@dataclass(slots=True)
class Side:
    """One end. link: to the other one, for what is said before bytes go.  others: processes that work for it."""

    inputs: Inputs
    link: Connection
    others: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> memoryview:
        return mapped(self.inputs.content)

    def check(self, data: memoryview, nbytes: int) -> None:
        for piece in self.inputs.pieces[nbytes]:
            check(piece, data[piece.start : piece.end])


@functools.cache
def mapped(path: Path) -> memoryview:
    """A file, for this process alone to write to: libraries ask for writable memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


@functools.cache
def memory(nbytes: int) -> memoryview:
    """Of a receiver, used again and again."""
    return Memory(nbytes).buffer


def check(piece: Piece, data: memoryview) -> None:
    if data.nbytes != piece.end - piece.start or crc32(data) != piece.crc:
        raise ChecksumError(f"bytes {piece.start} to {piece.end} came wrong")


End = Callable[[Side], AbstractContextManager[Transfer]]


@dataclass(frozen=True, slots=True)
class Way:
    """needs: any of these modules; none: always there.  bare_of: whose bare way this is."""

    send: End
    receive: End
    needs: Sequence[str] = ()
    bare_of: str = ""

    @property
    def is_there(self) -> bool:
        return not self.needs or any(importlib.util.find_spec(module) for module in self.needs)
