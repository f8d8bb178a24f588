"""What changed between two versions of a tensor, as bytes. Pure: no I/O, no torch.

    encode  base, new ─► patch       apply  patch, base ─► new, in place

A step at the learning rates of RL changes a few elements in a hundred of bf16 weights, mostly by one unit in the last
place. A patch holds, block by block, the gaps between changed elements (a byte each; 255 is "254 and no element yet, go
on") and by how much the elements changed as integers (the sign in the lowest bit, low bytes before high ones), both
deflated by runs and Huffman codes alone, which is fast. It is lossless for every pattern of bits, NaN included.

Invariant: ``apply`` raises MessageError for what ``encode`` does not write, and writes to no byte outside of the
tensor; what it left in the tensor then is neither version.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from transport.errors import MessageError

BLOCK_ELEMENTS = 1 << 20  # compared at once: what it takes beside the tensors stays a few MB
SKIP = 255  # of a gap byte: so many elements did not change, and neither did the next one
_HEADER = struct.Struct("<III")  # of a block: elements that changed, bytes of gaps and of changes, deflated
_UNSIGNED = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def encode(base: memoryview, new: memoryview, item_bytes: int) -> bytes:
    """The patch that makes ``new`` of ``base``: tensors of equal size, of elements of 1, 2, 4 or 8 bytes.

    Returns: b"" where they are equal.
    """
    before, after = (np.frombuffer(data, _UNSIGNED[item_bytes]) for data in (base, new))
    if before.size != after.size:
        raise ValueError(f"a tensor of {before.size} elements has {after.size} in the next version")
    blocks = [_encode_block(before[block], after[block]) for block in _blocks(after.size)]
    return b"".join(blocks) if any(len(block) > _HEADER.size for block in blocks) else b""


def apply(patch: bytes | bytearray | memoryview, tensor: memoryview, item_bytes: int) -> None:
    """Change ``tensor``, the base, in place. Raises MessageError: the patch is not one for such a tensor."""
    elements = np.frombuffer(tensor, _UNSIGNED[item_bytes])
    rest = memoryview(patch).cast("B")
    for block in _blocks(elements.size) if rest.nbytes else ():
        rest = _apply_block(rest, elements[block])
    if rest.nbytes:
        raise MessageError(f"a patch goes on for {rest.nbytes} bytes behind its tensor")


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(size, start + BLOCK_ELEMENTS)) for start in range(0, size, BLOCK_ELEMENTS))


def _encode_block(before: NDArray[np.unsignedinteger], after: NDArray[np.unsignedinteger]) -> bytes:
    changed = np.flatnonzero(before != after)
    if not changed.size:
        return _HEADER.pack(0, 0, 0)
    gaps = _deflated(_gap_bytes(changed))
    changes = _deflated(_change_bytes(after[changed] - before[changed]))
    return _HEADER.pack(changed.size, len(gaps), len(changes)) + gaps + changes


def _apply_block(rest: memoryview, elements: NDArray[np.unsignedinteger]) -> memoryview:
    """Returns what follows the block in ``rest``."""
    if rest.nbytes < _HEADER.size:
        raise MessageError("a patch ends within a block")
    count, *sizes = _HEADER.unpack_from(rest)
    body, rest = rest[_HEADER.size :], rest[_HEADER.size + sum(sizes) :]
    if count > elements.size or body.nbytes < sum(sizes) or (not count and any(sizes)):
        raise MessageError(f"a patch changes {count} of {elements.size} elements in {body.nbytes} bytes")
    if count:
        item = elements.itemsize
        gaps = _inflated(body[: sizes[0]], count + elements.size // SKIP)
        changes = _inflated(body[sizes[0] : sum(sizes)], count * item)
        if len(changes) != count * item:
            raise MessageError(f"a patch has {len(changes)} bytes of {count} changes")
        elements[_positions(gaps, count, elements.size)] += _changes(changes, item)
    return rest


def _gap_bytes(changed: NDArray[np.intp]) -> bytes:
    """changed: [N] ascending positions, N >= 1."""
    skips, last = np.divmod(np.diff(changed, prepend=-1) - 1, SKIP)
    ends = np.cumsum(skips + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, SKIP, np.uint8)
    gaps[ends] = last
    return gaps.tobytes()


def _positions(gaps: bytes, count: int, size: int) -> NDArray[np.int64]:
    """[count] ascending positions below ``size``. Raises MessageError: the gaps lead to others."""
    steps = np.frombuffer(gaps, np.uint8)
    ends = steps != SKIP
    if not steps.size or not ends[-1] or int(np.count_nonzero(ends)) != count:
        raise MessageError(f"the gaps of a patch do not lead to {count} elements")
    positions = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(count)
    if positions[-1] >= size:
        raise MessageError(f"a patch changes element {positions[-1]} of {size}")
    return positions


def _change_bytes(changes: NDArray[np.unsignedinteger]) -> bytes:
    """changes: [N] unsigned differences, which wrap around."""
    signed = changes.view(f"<i{changes.itemsize}")
    folded = (signed << 1) ^ (signed >> (8 * changes.itemsize - 1))
    return folded.view(np.uint8).reshape(-1, changes.itemsize).T.tobytes()


def _changes(data: bytes, item_bytes: int) -> NDArray[np.unsignedinteger]:
    planes = np.frombuffer(data, np.uint8).reshape(item_bytes, -1)
    folded = np.ascontiguousarray(planes.T).view(_UNSIGNED[item_bytes]).reshape(-1)
    signs = np.multiply(folded & 1, folded.dtype.type(-1 % 256**item_bytes))
    return np.bitwise_xor(folded >> 1, signs)


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _inflated(data: memoryview, most: int) -> bytes:
    """At most ``most`` bytes. Raises MessageError: it has more, or is not what was deflated."""
    unpacker = zlib.decompressobj()
    try:
        result = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise MessageError(f"a patch cannot be unpacked: {error}") from error
    if not unpacker.eof or unpacker.unused_data or len(result) > most:
        raise MessageError(f"a patch does not unpack to {most} bytes or fewer")
    return result
