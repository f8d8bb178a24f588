"""From the shards that trainer ranks wrote to those that engine ranks need, in ranges of bytes. Pure: no I/O, no torch.

    a part of the manifest ──reads: each byte once a host──► the same range here ──copies──► each engine rank's buffer

Trainer ranks split tensors by rows (FSDP), by rows or columns (TP) and by layers (PP); engines split them otherwise, by
another number of ranks. Both are boxes of tensors, so what goes where is what boxes have in common. Engine ranks of one
host share what was read: a tensor that all of them have whole comes once.

Owns: which bytes. Never: a transfer, or how an engine splits its tensors (the caller says). Invariants: every element
that a rank needs is written once, from where its trainer rank wrote it; no byte is read twice, nor one that nobody
needs, unless ``gap_bytes`` says so.

Source: StreamRL sec. 6 (trainer-side sharding, broadcast to the layouts of the generation side); the plan is ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from transport.contracts.messages import Piece, TensorSpec, WeightManifest
from transport.tensors.manifest import ITEM_BYTES, part_bytes, plan_pieces, single_part
from transport.tensors.pieces import Box, box_of, runs, whole, why_no_tiling

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""(offset, nbytes) of parts of a segment."""

Wanted = Mapping[str, Box]
"""What a rank needs: of each named tensor this box."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Runs of ``nbytes`` from a part to a rank's buffer: the first from byte ``source`` to byte ``target``.

    counts: how many there are in each dimension that is cut, the outermost first; in each, the next one lies
    ``source_steps`` and ``target_steps`` further.
    """

    part: int
    source: int
    target: int
    nbytes: int
    counts: tuple[int, ...] = ()
    source_steps: tuple[int, ...] = ()
    target_steps: tuple[int, ...] = ()

    def runs(self) -> Iterator[tuple[int, int]]:
        """(where in the part, where in the buffer) of each."""
        for index in itertools.product(*map(range, self.counts)):
            yield (
                self.source + sum(map(int.__mul__, index, self.source_steps)),
                self.target + sum(map(int.__mul__, index, self.target_steps)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What an engine rank gets. pieces: where each of its boxes lies in a buffer of ``nbytes``, row-major."""

    pieces: tuple[Piece, ...]
    nbytes: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """reads: of each part that is needed at all, ascending and disjoint.  ranks: in the order in which they were asked.

    A manifest without parts counts as one part.
    """

    reads: Mapping[int, Ranges]
    ranks: tuple[RankPlan, ...]

    @property
    def read_bytes(self) -> int:
        return sum(nbytes for ranges in self.reads.values() for _, nbytes in ranges)


def plan_reshard(manifest: WeightManifest, wanted: Sequence[Wanted], *, gap_bytes: int = 0) -> HostPlan:
    """What the engine ranks of one host read and copy.

    Args:    manifest: one that ``check_manifest`` has passed.  wanted: of each rank.  gap_bytes: ranges that are no
             further apart are read as one, with what is between them: a request costs more than a few bytes.
    Raises:  ValueError: the version has no such tensor, or it is smaller than the box.
    """
    parts = manifest.parts or (single_part(manifest),)
    boxes = [_indexed(manifest, one) for one in wanted]
    places = [plan_pieces(manifest.tensors, one.items()) for one in boxes]
    targets = [{piece.tensor: piece for piece in one} for one in places]
    copies: list[list[Copy]] = [[] for _ in wanted]
    reads: dict[int, list[tuple[int, int]]] = {}
    for number, piece in ((number, piece) for number, part in enumerate(parts) for piece in part.pieces):
        item = ITEM_BYTES[manifest.tensors[piece.tensor].dtype]
        needed: dict[Box, None] = {}
        for rank, of_rank in enumerate(targets):
            target = of_rank.get(piece.tensor)
            if target is not None and (common := box_of(target).common(box_of(piece))).num_elements:
                copies[rank].append(_copy(number, piece, target, common, item))
                needed[common] = None
        if needed:
            reads.setdefault(number, []).extend(_ranges(piece, list(needed), item))
    return HostPlan(
        reads={number: _merged(ranges, gap_bytes) for number, ranges in reads.items()},
        ranks=tuple(
            RankPlan(pieces=pieces, nbytes=part_bytes(manifest.tensors, pieces), copies=tuple(of_rank))
            for pieces, of_rank in zip(places, copies, strict=True)
        ),
    )


def shard_box(shape: Sequence[int], axis: int | None, rank: int, ranks: int) -> Box:
    """What ``rank`` of ``ranks`` has of a tensor that is split along ``axis``, None: all of it.

    As torch splits it: equal shares, the last ones smaller or empty where that is not possible.
    """
    if axis is None:
        return whole(shape)
    share = -(-shape[axis] // ranks)
    first, last = min(shape[axis], rank * share), min(shape[axis], (rank + 1) * share)
    start, size = [0] * len(shape), list(shape)
    start[axis], size[axis] = first, last - first
    return Box(tuple(start), tuple(size))


def _indexed(manifest: WeightManifest, wanted: Wanted) -> dict[int, Box]:
    """``wanted`` by the indices of tensors, in their order."""
    index = {spec.name: number for number, spec in enumerate(manifest.tensors)}
    for name, box in wanted.items():
        spec: TensorSpec | None = manifest.tensors[index[name]] if name in index else None
        if spec is None or len(box.shape) != len(spec.shape) or box.common(whole(spec.shape)) != box:
            raise ValueError(f"{box} of tensor {name!r} is wanted, which has shape {spec and spec.shape}")
    return dict(sorted((index[name], box) for name, box in wanted.items()))


def _copy(number: int, piece: Piece, target: Piece, common: Box, item: int) -> Copy:
    """``common`` from where ``piece`` has it in its part to where ``target`` has it in the rank's buffer."""
    dimensions = len(common.shape)
    inner = dimensions  # from here on, both sides have all of each dimension
    while inner and common.shape[inner - 1] == piece.shape[inner - 1] == target.shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # a run may be cut out of the next one
    source_steps, target_steps = _steps(piece.shape, item), _steps(target.shape, item)
    return Copy(
        part=number,
        source=piece.offset + _distance(common, piece, source_steps),
        target=target.offset + _distance(common, target, target_steps),
        nbytes=math.prod(common.shape[outer:]) * item,
        counts=common.shape[:outer],
        source_steps=source_steps[:outer],
        target_steps=target_steps[:outer],
    )


def _steps(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Bytes from one index to the next, of each dimension of a row-major box."""
    return tuple(math.prod(shape[dimension + 1 :]) * item for dimension in range(len(shape)))


def _distance(common: Box, piece: Piece, steps: Sequence[int]) -> int:
    """Bytes from the first element of ``piece`` to the first of ``common``."""
    return sum((at - first) * step for at, first, step in zip(common.start, piece.start, steps, strict=True))


def _ranges(piece: Piece, needed: Sequence[Box], item: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) in the part of what is in any of ``needed``."""
    inside = [Box(tuple(map(int.__sub__, box.start, piece.start)), box.shape) for box in needed]
    if not why_no_tiling(
        piece.shape, inside
    ):  # the ranks of a host often need all of it, in slices of which each is many
        inside = [whole(piece.shape)]
    for box in inside:
        elements, starts = runs(box, piece.shape)
        yield from ((piece.offset + start * item, elements * item) for start in starts)


def _merged(ranges: Iterable[tuple[int, int]], gap_bytes: int) -> Ranges:
    """``ranges`` in ascending order, those together that overlap or are at most ``gap_bytes`` apart."""
    found: list[tuple[int, int]] = []
    for offset, nbytes in sorted(ranges):
        if found and offset <= sum(found[-1]) + gap_bytes:
            first = found[-1][0]
            found[-1] = first, max(sum(found[-1]), offset + nbytes) - first
        else:
            found.append((offset, nbytes))
    return tuple(found)
