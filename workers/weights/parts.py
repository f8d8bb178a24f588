"""A version from several ranks: which of them writes what, and the one manifest of all.

    what a rank holds ──gather──► the same plan on all ──► its pieces in a segment of its own ──gather──► manifest

A rank holds of each tensor all, a box, or nothing. What several hold alike, one writes: of those the one that has least
to write so far. Every rank makes the same plan of the same words, so only checksums and addresses are told afterwards.

Owns: the plan and the words that ranks exchange (MessagePack). Never: bytes of tensors. Invariant: a manifest holds
every element of every tensor once, whatever the layout, and its digest does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from msgspec.structs import replace

from transport.contracts.messages import (
    Addresses,
    MessageDecoder,
    Name,
    Piece,
    Shape,
    TensorSpec,
    WeightDelta,
    WeightManifest,
    WeightPart,
)
from transport.contracts.types import Count, Struct, WeightIdentity
from transport.tensors.manifest import (
    digest_tensors,
    layout_bytes,
    part_bytes,
    piece_bytes,
    plan_layout,
    plan_pieces,
    whole_checksum,
)
from transport.tensors.pieces import Box, why_no_tiling

if TYPE_CHECKING:
    import torch


class TalkingRanks(Protocol):
    """The ranks that publish together, as one of them sees it."""

    @property
    def rank(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in their order, on all of them, which call it at once."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a tensor. local: the box's elements.  start: of the box.  shape: of the whole tensor."""

    local: torch.Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.local.shape))

    @property
    def is_whole(self) -> bool:
        return tuple(self.local.shape) == self.shape


def shard_of(tensor: torch.Tensor | Shard) -> Shard:
    """What this rank holds of a tensor, sharing its memory: all of it, unless it is a DTensor.

    Raises ValueError: it is a DTensor whose parts still have to be summed.
    """
    if isinstance(tensor, Shard):
        return tensor
    if not hasattr(tensor, "placements"):  # as a DTensor has: seconds of import for who has none
        return Shard(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape))
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensor = cast("DTensor", tensor)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor of placements {tensor.placements} is not the same as any part of it")
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"a rank holds {tuple(local.shape)} of {tuple(tensor.shape)}, and should hold {shape}")
    return Shard(local, tuple(start), tuple(tensor.shape))


# --- what ranks tell one another --------------------------------------------------------------------------------------


class HeldBox(Struct, frozen=True, array_like=True):
    name: Name
    dtype: Name
    whole: Shape
    start: Shape
    shape: Shape


class Holding(Struct, frozen=True):
    """What a rank holds of a version. epoch: rank 0's counts."""

    epoch: Count
    version: Count
    boxes: tuple[HeldBox, ...]


class Written(Struct, frozen=True, tag=True):
    """A rank's pieces lie ready. checksums: in the order of the plan.  delta: what changed, if that is offered."""

    checksums: tuple[Name, ...]
    sources: Addresses
    host: Name
    delta: WeightDelta | None = None


class NotWritten(Struct, frozen=True, tag=True):
    """A rank had no room for its pieces."""

    nbytes: Count
    reason: str


holding_decoder = MessageDecoder(Holding)
written_decoder: MessageDecoder[Written | NotWritten] = MessageDecoder(
    cast("type[Written | NotWritten]", Written | NotWritten)
)


def holding_of(epoch: int, version: int, shards: Mapping[str, Shard], dtypes: Mapping[str, str]) -> Holding:
    boxes = (
        HeldBox(name=name, dtype=dtypes[name], whole=shard.shape, start=shard.box.start, shape=shard.box.shape)
        for name, shard in shards.items()
    )
    return Holding(epoch=epoch, version=version, boxes=tuple(boxes))


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """tensors: whole, without checksums.  pieces: those that each rank writes, without checksums."""

    epoch: int
    tensors: tuple[TensorSpec, ...]
    pieces: tuple[tuple[Piece, ...], ...]

    def nbytes(self, rank: int) -> int:
        return part_bytes(self.tensors, self.pieces[rank])

    def manifest(self, version: int, written: Sequence[Written]) -> WeightManifest:
        """Of the version, now that every rank has written its pieces."""
        parts = tuple(
            WeightPart(
                pieces=tuple(
                    replace(piece, checksum=value) for piece, value in zip(pieces, one.checksums, strict=True)
                ),
                total_bytes=part_bytes(self.tensors, pieces),
                sources=one.sources,
                host=one.host,
                delta=one.delta,
            )
            for pieces, one in zip(self.pieces, written, strict=True)
        )
        of_tensor: list[list[Piece]] = [[] for _ in self.tensors]
        for piece in (piece for part in parts for piece in part.pieces):
            of_tensor[piece.tensor].append(piece)
        specs = tuple(
            replace(spec, checksum=whole_checksum(spec, pieces))
            for spec, pieces in zip(self.tensors, of_tensor, strict=True)
        )
        return WeightManifest(
            weights=WeightIdentity(epoch=self.epoch, version=version, digest=digest_tensors(specs)),
            tensors=specs,
            total_bytes=layout_bytes(specs),
            sources=(),
            host=parts[0].host,
            parts=parts,
        )


def plan_parts(holdings: Sequence[Holding]) -> PartsPlan:
    """Who writes what. holdings: of each rank.

    Raises ValueError: ranks disagree about a tensor or the version, or do not hold every element of a tensor.
    """
    if len({holding.version for holding in holdings}) != 1:
        raise ValueError(f"ranks publish versions {[holding.version for holding in holdings]} at once")
    holders = _holders(holdings)
    specs = plan_layout((name, shape, dtype) for name, (shape, dtype, _) in holders.items())
    load = [0] * len(holdings)
    boxes: list[list[tuple[int, Box]]] = [[] for _ in holdings]
    for index, (spec, (_, _, ranks_of)) in enumerate(zip(specs, holders.values(), strict=True)):
        if problem := why_no_tiling(spec.shape, list(ranks_of)):
            raise ValueError(f"the ranks do not hold tensor {spec.name!r}: {problem}")
        for box, ranks in sorted(ranks_of.items(), key=lambda item: item[0].start):
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            boxes[writer].append((index, box))
            load[writer] += piece_bytes(specs, Piece(index, box.start, box.shape, 0, ""))
    return PartsPlan(holdings[0].epoch, specs, tuple(plan_pieces(specs, one) for one in boxes))


def _holders(
    holdings: Iterable[Holding],
) -> dict[str, tuple[tuple[int, ...], str, dict[Box, list[int]]]]:
    """Name -> (whole shape, dtype, box -> ranks that hold it), without boxes that have no elements."""
    found: dict[str, tuple[tuple[int, ...], str, dict[Box, list[int]]]] = {}
    for rank, holding in enumerate(holdings):
        for held in holding.boxes:
            shape, dtype, boxes = found.setdefault(held.name, (held.whole, held.dtype, {}))
            if (shape, dtype) != (held.whole, held.dtype):
                raise ValueError(
                    f"tensor {held.name!r} is {held.whole} {held.dtype} on rank {rank} and {shape} {dtype} before it"
                )
            box = Box(held.start, held.shape)
            if box.num_elements:
                boxes.setdefault(box, []).append(rank)
    return found
