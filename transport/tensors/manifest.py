"""Where each tensor lies in a byte range, and what its bytes must be. Pure: no I/O, no torch.

Owns: layout, checksums, the digest that names a version's content. Never: moving bytes. Invariant: a manifest that
passes ``check_manifest`` can be used to slice a buffer of ``total_bytes``, and one of each part, without another bounds
check; its parts give every element of every tensor once; its digest is the same whatever the parts are.

Checksums are CRC-32, at memory speed (9 GB/s on one core): they find truncation, torn writes and wrong files. They are
no defence against a forger; the shared secret of a connection is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from transport.contracts.messages import Piece, TensorPatch, TensorSpec, WeightDelta, WeightManifest, WeightPart
from transport.contracts.types import MAX_DIMENSIONS, MAX_PARTS
from transport.errors import ChecksumError, MessageError
from transport.process.storage import BLOCK_BYTES, Place
from transport.tensors.pieces import Box, box_checksum, box_of, crc32, sum_checksums, whole, why_no_tiling

ALIGNMENT_BYTES = 64  # offsets are multiples of it: one cache line, and enough for any vector load on a view

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the dtype."""
MAX_ELEMENTS = 2**48  # of a tensor, a dimension of 0 counted as 1: torch has no strides for more


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT_BYTES, >= ``nbytes``."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_layout(tensors: Iterable[tuple[str, Sequence[int], str]]) -> tuple[TensorSpec, ...]:
    """Place tensors one after another.

    Args:    tensors: (name, shape, dtype) in the order of their bytes; names are unique.
    Returns: specs with empty checksums; offsets ascend and are multiples of ALIGNMENT_BYTES.
    Raises:  ValueError: an unknown dtype, a name used twice, or too many dimensions.
    """
    specs: dict[str, TensorSpec] = {}
    end = 0
    for name, shape, dtype in tensors:
        if name in specs:
            raise ValueError(f"tensor {name!r} is named twice")
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}")
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {len(shape)} dimensions, and {MAX_DIMENSIONS} are the most")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        offset = aligned(end)
        specs[name] = TensorSpec(name=name, shape=tuple(shape), dtype=dtype, offset=offset, nbytes=nbytes, checksum="")
        end = offset + nbytes
    return tuple(specs.values())


def plan_pieces(specs: Sequence[TensorSpec], boxes: Iterable[tuple[int, Box]]) -> tuple[Piece, ...]:
    """Place boxes, each of the tensor at an index in ``specs``, one after another. Returns them without checksums."""
    pieces: list[Piece] = []
    end = 0
    for tensor, box in boxes:
        piece = Piece(tensor=tensor, start=box.start, shape=box.shape, offset=aligned(end), checksum="")
        end = piece.offset + piece_bytes(specs, piece)
        pieces.append(piece)
    return tuple(pieces)


def piece_bytes(specs: Sequence[TensorSpec], piece: Piece) -> int:
    return math.prod(piece.shape) * ITEM_BYTES[specs[piece.tensor].dtype]


def layout_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes that hold all of ``specs``, padding included; at least one, since nothing maps an empty file."""
    return _range_bytes(spec.offset + spec.nbytes for spec in specs)


def part_bytes(specs: Sequence[TensorSpec], pieces: Sequence[Piece]) -> int:
    """``layout_bytes`` of a part of tensors ``specs``."""
    return _range_bytes(piece.offset + piece_bytes(specs, piece) for piece in pieces)


def plan_patches(patches: Sequence[tuple[int, bytes]]) -> tuple[TensorPatch, ...]:
    """Place patches, each of the tensor at an index of the manifest, one after another."""
    result: list[TensorPatch] = []
    end = 0
    for tensor, patch in patches:
        placed = TensorPatch(tensor=tensor, offset=aligned(end), nbytes=len(patch), checksum=checksum(patch))
        end = placed.offset + placed.nbytes
        result.append(placed)
    return tuple(result)


def delta_bytes(patches: Sequence[TensorPatch]) -> int:
    """``layout_bytes`` of patches."""
    return _range_bytes(patch.offset + patch.nbytes for patch in patches)


def _range_bytes(ends: Iterable[int]) -> int:
    return max(map(aligned, ends), default=ALIGNMENT_BYTES) or ALIGNMENT_BYTES


def single_part(manifest: WeightManifest) -> WeightPart:
    """The manifest's own byte range as one part, which holds every tensor whole."""
    boxes = [(index, spec.offset, whole(spec.shape), spec.checksum) for index, spec in enumerate(manifest.tensors)]
    pieces = tuple(
        Piece(tensor=index, start=box.start, shape=box.shape, offset=offset, checksum=value)
        for index, offset, box, value in boxes
    )
    return WeightPart(
        pieces=pieces,
        total_bytes=manifest.total_bytes,
        sources=manifest.sources,
        host=manifest.host,
        delta=manifest.delta,
    )


def checksum(data: bytes | bytearray | memoryview) -> str:
    """The checksum of ``data`` as it stands in a TensorSpec."""
    return checksum_of([data])


def checksum_of(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """The checksum of bytes in pieces, each of which is read once, when it comes by."""
    value = 0
    for piece in pieces:
        value = crc32(piece, value)
    return f"crc32:{value:08x}"


def file_checksum(path: Place) -> str:
    """The checksum of what a file holds. Raises OSError."""
    with path.open("rb") as file:
        return checksum_of(iter(partial(file.read, BLOCK_BYTES), b""))


def with_checksums(specs: Sequence[TensorSpec], checksums: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, checksum=value) for spec, value in zip(specs, checksums, strict=True))


def digest_tensors(specs: Sequence[TensorSpec]) -> str:
    """Name the content: equal names, shapes, dtypes and bytes give equal digests, wherever the bytes lie.

    Returns: 32 hex digits (blake2b-128 over the specs sorted by name, checksum of the bytes included).
    """
    content = hashlib.blake2b(digest_size=16)
    for spec in sorted(specs, key=lambda spec: spec.name):
        content.update(repr((spec.name, spec.shape, spec.dtype, spec.checksum)).encode())
    return content.hexdigest()


def digest_layout(specs: Sequence[TensorSpec]) -> str:
    """Name the places: equal where the same tensors lie at the same offsets, whatever their bytes."""
    places = repr([(spec.name, spec.shape, spec.dtype, spec.offset) for spec in specs])
    return hashlib.blake2b(places.encode(), digest_size=16).hexdigest()


def check_manifest(manifest: WeightManifest) -> None:
    """Refuse a manifest whose parts contradict each other: it came from the network and decides what is allocated.

    Raises: MessageError naming the tensor and the contradiction.
    """
    end = 0
    for spec in sorted(manifest.tensors, key=lambda spec: spec.offset):
        _check_spec(spec)
        if spec.offset < end:
            raise MessageError(f"tensor {spec.name!r} overlaps the one before it")
        end = spec.offset + spec.nbytes
    if len({spec.name for spec in manifest.tensors}) != len(manifest.tensors):
        raise MessageError("the manifest names a tensor twice")
    if manifest.total_bytes != layout_bytes(manifest.tensors):
        raise MessageError(
            f"the manifest says {manifest.total_bytes} bytes, its tensors {layout_bytes(manifest.tensors)}"
        )
    if manifest.weights.digest != digest_tensors(manifest.tensors):
        raise MessageError(f"the manifest of {manifest.weights} has a digest that is not that of its tensors")
    if manifest.parts:
        _check_parts(manifest)
    if manifest.delta is not None:
        _check_delta(manifest.delta, len(manifest.tensors), manifest.total_bytes)


def _check_delta(delta: WeightDelta, num_tensors: int, most_bytes: int) -> None:
    """Raises MessageError: its patches overlap or are of no tensor, or it is longer than what it changes."""
    end = 0
    for patch in sorted(delta.patches, key=lambda patch: patch.offset):
        if not 0 <= patch.tensor < num_tensors or patch.offset < end or patch.nbytes < 0:
            raise MessageError(
                f"the changes since {delta.base} have a patch of tensor {patch.tensor} at {patch.offset}"
            )
        end = patch.offset + patch.nbytes
    if len({patch.tensor for patch in delta.patches}) != len(delta.patches):
        raise MessageError(f"the changes since {delta.base} name a tensor twice")
    if delta.total_bytes != delta_bytes(delta.patches) or delta.total_bytes > most_bytes:
        raise MessageError(f"the changes since {delta.base} say {delta.total_bytes} bytes, which they do not have")


def _check_parts(manifest: WeightManifest) -> None:
    """Raises MessageError: some part contradicts itself, or all together are not every tensor once."""
    if len(manifest.parts) > MAX_PARTS:
        raise MessageError(f"the manifest has {len(manifest.parts)} parts, and {MAX_PARTS} are the most")
    pieces: list[list[Piece]] = [[] for _ in manifest.tensors]
    for number, part in enumerate(manifest.parts):
        end = 0
        for piece in sorted(part.pieces, key=lambda piece: piece.offset):
            if not 0 <= piece.tensor < len(manifest.tensors):
                raise MessageError(f"part {number} has a piece of tensor {piece.tensor}, which the manifest lacks")
            name = manifest.tensors[piece.tensor].name
            if piece.offset < end or piece.offset % ALIGNMENT_BYTES:
                raise MessageError(f"part {number}: a piece of tensor {name!r} has offset {piece.offset}")
            end = piece.offset + piece_bytes(manifest.tensors, piece)
            pieces[piece.tensor].append(piece)
            if len(piece.start) != len(piece.shape) or any(number < 0 for number in (*piece.start, *piece.shape)):
                raise MessageError(f"tensor {name!r}: a piece of shape {piece.shape} begins at {piece.start}")
        if part.total_bytes != part_bytes(manifest.tensors, part.pieces):
            raise MessageError(f"part {number} says {part.total_bytes} bytes, which its pieces do not have")
        if part.delta is not None:
            _check_delta(part.delta, len(part.pieces), part.total_bytes)
    for spec, found in zip(manifest.tensors, pieces, strict=True):
        if problem := why_no_tiling(spec.shape, [box_of(piece) for piece in found]):
            raise MessageError(f"tensor {spec.name!r}: {problem}")
        if spec.checksum != whole_checksum(spec, found):
            raise MessageError(f"tensor {spec.name!r} has a checksum that is not that of its pieces")


def whole_checksum(spec: TensorSpec, pieces: Iterable[Piece]) -> str:
    """The checksum of a tensor from those of pieces that make it up. Raises MessageError: one is none of ours."""
    try:
        return sum_checksums((piece.checksum for piece in pieces), spec.nbytes)
    except ValueError as error:
        raise MessageError(f"tensor {spec.name!r}: {error}") from error


def _check_spec(spec: TensorSpec) -> None:
    if spec.dtype not in ITEM_BYTES:
        raise MessageError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}")
    if len(spec.shape) > MAX_DIMENSIONS:
        raise MessageError(f"tensor {spec.name!r} has {len(spec.shape)} dimensions")
    if spec.offset < 0 or spec.offset % ALIGNMENT_BYTES or any(size < 0 for size in spec.shape):
        raise MessageError(f"tensor {spec.name!r} has offset {spec.offset} and shape {spec.shape}")
    if math.prod(max(1, size) for size in spec.shape) > MAX_ELEMENTS:
        raise MessageError(f"tensor {spec.name!r} has an impossible shape {spec.shape}")
    if spec.nbytes != math.prod(spec.shape) * ITEM_BYTES[spec.dtype]:
        raise MessageError(f"tensor {spec.name!r} of shape {spec.shape} {spec.dtype} cannot have {spec.nbytes} bytes")


def verify_piece(manifest: WeightManifest, piece: Piece, data: memoryview) -> None:
    """Compare a piece's bytes with its checksum. Raises ChecksumError, which names the tensor."""
    spec = manifest.tensors[piece.tensor]
    if data.nbytes != (nbytes := piece_bytes(manifest.tensors, piece)):
        raise ChecksumError(f"{manifest.weights}: tensor {spec.name!r}: {data.nbytes} bytes came instead of {nbytes}")
    if piece.shape == spec.shape:
        found = checksum(data)
    else:
        found = box_checksum([data], box_of(piece), spec.shape, ITEM_BYTES[spec.dtype])
    if found != piece.checksum:
        where = "" if piece.shape == spec.shape else f", piece at {piece.start},"
        raise ChecksumError(f"{manifest.weights}: tensor {spec.name!r}{where} has {found} instead of {piece.checksum}")
