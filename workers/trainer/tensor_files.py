"""Safetensors files on any file system: written tensor by tensor, read a slice at a time.

The format is a length (8 bytes), a JSON header and the tensors' bytes, so a reader that knows a tensor's place takes
the rows that it needs and no more, from a disk as from object storage; nothing in it can run. The library's own
functions write and read whole files of a local disk.

Owns: the bytes of such a file. Never: what the tensors mean; torch. Invariant: what ``TensorReader`` accepts lies
within the file, so that no slice of it is short. Source: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

import msgspec

from transport.errors import DECODE_ERRORS
from workers.errors import TensorFileError

BLOCK_BYTES = 16 * 1024 * 1024
"""Read at once: large enough for object storage, small beside a tensor."""
MAX_HEADER_BYTES = 100 * 1000 * 1000  # the format's own limit
METADATA = "__metadata__"
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
    "I64": 8,
    "F64": 8,
}
"""Bytes of an element, by the format's name of the dtype."""


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a file. data_offsets: first byte and the one after the last, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorReader:
    """Reads slices of one open file. name: of the file, for people.

    Raises TensorFileError: the file is cut off, or none of this format.
    """

    def __init__(self, file: IO[bytes], *, name: str) -> None:
        self._file = file
        self._name = name
        size = file.seek(0, 2)
        header_bytes = int.from_bytes(self._bytes(0, 8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise TensorFileError(name, f"its header would have {header_bytes} bytes, and the file has {size}")
        self.places, self.metadata = self._header(bytes(self._bytes(8, header_bytes)))
        """By name; what the writer noted beside the tensors."""
        self._data = 8 + header_bytes
        end = max((place.data_offsets[1] for place in self.places.values()), default=0)
        if self._data + end != size:
            raise TensorFileError(name, f"it should have {self._data + end} bytes and has {size}")

    def blocks(self, name: str, first: int, count: int) -> Iterator[tuple[int, int, bytearray]]:
        """Rows ``first`` to ``first + count`` of a tensor, a few megabytes at a time. A row: of dimension 0.

        Yields: (first row of the block, its rows, their bytes, which the receiver may keep).
        """
        place = self.places[name]
        row_bytes = math.prod(place.shape[1:]) * ITEM_BYTES[place.dtype]
        step = max(1, BLOCK_BYTES // max(row_bytes, 1))
        for row in range(first, first + count, step):
            rows = min(step, first + count - row)
            start = self._data + place.data_offsets[0] + row * row_bytes
            yield row, rows, self._bytes(start, rows * row_bytes)

    def _header(self, raw: bytes) -> tuple[dict[str, TensorPlace], dict[str, str]]:
        try:
            header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(header.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
            places = {name: msgspec.json.decode(entry, type=TensorPlace) for name, entry in header.items()}
        except (*DECODE_ERRORS, UnicodeDecodeError) as error:
            raise TensorFileError(self._name, f"its header is not that of safetensors: {error}") from error
        for name, place in places.items():
            start, end = place.data_offsets
            nbytes = math.prod(place.shape) * ITEM_BYTES.get(place.dtype, -1)
            if min(start, nbytes, *place.shape, 0) < 0 or end - start != nbytes:
                raise TensorFileError(self._name, f"tensor {name!r} is no {place.dtype} of {list(place.shape)}")
        return places, metadata

    def _bytes(self, start: int, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        self._file.seek(start)
        view, got = memoryview(content), 0
        while got < nbytes:
            part = self._file.readinto(view[got:])  # pyright: ignore[reportAttributeAccessIssue] typeshed leaves it out
            if not part:
                raise TensorFileError(self._name, f"it ends at byte {start + got}")
            got += part
        return content


def file_content(
    tensors: Mapping[str, tuple[str, Sequence[int], Callable[[], memoryview]]],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[memoryview]:
    """The bytes of a file from its beginning to its end.

    tensors: name -> (dtype by the format's name, shape, its bytes in C order), asked for one after another, so that no
    more than one has to be in host memory.
    """
    places: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        places[name] = TensorPlace(dtype=dtype, shape=tuple(shape), data_offsets=(start, end))
    header = msgspec.json.encode(places)
    header += b" " * (-len(header) % 8)  # tensors begin at multiples of 8 bytes
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for _, _, content in tensors.values():
        yield content()
