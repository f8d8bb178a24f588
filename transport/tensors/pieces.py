"""Tensors in boxes: where the bytes of a box lie within the whole, and checksums that add up. Pure: no I/O, no torch.

Ranks that share a model hold boxes of its tensors: some rows, some columns, or both. Each box travels as it lies in its
rank's memory, row-major, so a receiver scatters runs of it into the whole.

The checksum of a box is the CRC-32 of the whole tensor's bytes with zeros everywhere outside of the box. CRC-32 is
affine over GF(2), so that of the whole tensor follows from those of boxes that make it up, whatever their layout: a
version has one digest, whoever publishes it, and that digest can be checked before a byte is pulled. The zeros are
never touched: bytes that follow multiply a CRC by a power of x modulo its polynomial (zlib's crc32_combine).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transport.contracts.messages import Piece

try:
    from isal import isal_zlib as checksums  # at memory speed
except ModuleNotFoundError:  # a server whose Python has only what the server needs loads weights with this module, too
    import zlib as checksums

POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, lowest power of x in the highest bit
ONE = 1 << 31
ALL_ONES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [start, start + shape) of a tensor, in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: Box) -> Box:
        """What lies in both, without elements where nothing does."""
        start = tuple(map(max, self.start, other.start))
        sizes = (min(ends) - first for first, *ends in zip(start, self.end, other.end, strict=True))
        return Box(start, tuple(max(0, size) for size in sizes))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """As an index into an array whose first element is at ``origin`` of the tensor."""
        return tuple(
            slice(start - first, end - first) for start, end, first in zip(self.start, self.end, origin, strict=True)
        )


def box_of(piece: Piece) -> Box:
    return Box(piece.start, piece.shape)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def why_no_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why ``boxes`` do not make up a tensor of ``shape``, each element once; "" if they do.

    They must be the cells of a grid, as all shards of a mesh of ranks are, which takes time linear in their number. A
    tensor without elements has no boxes.
    """
    if not math.prod(shape):
        return "a tensor without elements comes in pieces" if boxes else ""
    for box in boxes:
        if len(box.start) != len(shape) or len(box.shape) != len(shape):
            return f"a piece has {len(box.shape)} dimensions instead of {len(shape)}"
        if any(size < 1 for size in box.shape) or any(map(int.__gt__, box.end, shape)):
            return f"a piece of shape {box.shape} at {box.start} lies outside of {tuple(shape)}"
    ends: list[dict[int, int]] = []  # of each dimension: where a cell begins -> where it ends
    for dimension, size in enumerate(shape):
        cuts = [*sorted({box.start[dimension] for box in boxes}), size]
        ends.append(dict(itertools.pairwise(cuts)))
        if cuts[0] != 0:
            return f"nothing covers the first elements of dimension {dimension}"
    for box in boxes:
        if any(end != cells[start] for start, end, cells in zip(box.start, box.end, ends, strict=True)):
            return f"the piece of shape {box.shape} at {box.start} overlaps another, or leaves a hole"
    if len({box.start for box in boxes}) != len(boxes):
        return "two pieces begin at the same element"
    if len(boxes) != math.prod(map(len, ends)):
        return "a piece is missing"
    return ""


def runs(box: Box, shape: Sequence[int]) -> tuple[int, Iterator[int]]:
    """The box's elements as runs that are contiguous in the whole.

    Returns: (elements of each run, where the runs begin in the whole, ascending, in elements).
    """
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    outer = len(shape)
    while outer and box.shape[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)  # dimensions of which each index is a run of its own; the next may be cut
    first = sum(map(int.__mul__, box.start, strides))
    steps = [range(0, size * stride, stride) for size, stride in zip(box.shape[:outer], strides[:outer], strict=True)]
    return math.prod(box.shape[outer:]), (first + sum(step) for step in itertools.product(*steps))


# --- checksums --------------------------------------------------------------------------------------------------------


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of bytes that follow others whose CRC-32 is ``value``."""
    return checksums.crc32(data, value)  # pyright: ignore[reportUnknownMemberType]: isal's stub leaves the buffer untyped


def box_checksum(chunks: Iterable[bytes | bytearray | memoryview], box: Box, shape: Sequence[int], item: int) -> str:
    """The checksum of a box from its bytes, row-major, in any chunks; each is read once, when it comes by.

    item: bytes of an element.  Raises ValueError: they are not as many as the box has.
    """
    elements, starts = runs(box, shape)
    run_bytes = elements * item
    if not run_bytes:
        return _text(_of_zeros(math.prod(shape) * item))
    total = end = 0  # of the whole: the sum so far, and where it stands, in bytes
    crc = done = 0  # of the run at hand
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view.nbytes:
            taken = view[: run_bytes - done]
            crc, done, view = crc32(taken, crc), done + taken.nbytes, view[taken.nbytes :]
            if done == run_bytes:
                run_end = next(starts) * item + run_bytes
                total = _shifted(total, run_end - end) ^ crc ^ _of_zeros(run_bytes)
                crc, done, end = 0, 0, run_end
    if done or next(starts, None) is not None:
        raise ValueError(f"a box of shape {box.shape} got other bytes than it has")
    size = math.prod(shape) * item
    return _text(_product(_power(size - end), total) ^ _of_zeros(size))


def sum_checksums(checksums: Iterable[str], nbytes: int) -> str:
    """The checksum of a tensor of ``nbytes`` from those of its pieces. Raises ValueError: one is none of ours."""
    zeros = _of_zeros(nbytes)
    return _text(functools.reduce(lambda total, text: total ^ _number(text) ^ zeros, checksums, zeros))


def _text(crc: int) -> str:
    return f"crc32:{crc:08x}"


def _number(text: str) -> int:
    kind, _, digits = text.partition(":")
    if kind != "crc32" or len(digits) != 8:
        raise ValueError(f"{text[:40]!r} is no checksum")
    return int(digits, 16)


def _product(a: int, b: int) -> int:
    """Of two polynomials modulo ours."""
    product, bit = 0, ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """What ``nbytes`` bytes that follow multiply a CRC by: x to the power of their bits."""
    result, square = ONE, ONE >> 8
    while nbytes:
        if nbytes & 1:
            result = _product(result, square)
        square = _product(square, square)
        nbytes >>= 1
    return result


@functools.lru_cache(maxsize=4096)
def _of_zeros(nbytes: int) -> int:
    """CRC-32 of so many zeros."""
    return _product(_power(nbytes), ALL_ONES) ^ ALL_ONES


@functools.lru_cache(maxsize=16)
def _tables(nbytes: int) -> list[list[int]]:
    """[4][256]: each byte of a CRC times ``_power(nbytes)``. Columns have thousands of runs at one distance."""
    power = _power(nbytes)
    bits = [_product(power, 1 << bit) for bit in range(32)]
    return [
        [functools.reduce(int.__xor__, (bits[place * 8 + bit] for bit in range(8) if byte >> bit & 1), 0)
         for byte in range(256)]
        for place in range(4)
    ]  # fmt: skip


def _shifted(crc: int, nbytes: int) -> int:
    """``crc`` with ``nbytes`` zeros after it, without the conditioning of CRC-32."""
    if not crc:
        return 0
    a, b, c, d = _tables(nbytes)
    return a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
