"""Resharding plans against dense copies: any tensors, split among any ranks, for engines that split them otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.contracts.messages import TensorSpec, WeightManifest, WeightPart
from transport.contracts.types import WeightIdentity
from transport.tensors.manifest import ITEM_BYTES, layout_bytes, part_bytes, plan_layout, plan_pieces
from transport.tensors.pieces import Box, why_no_tiling
from transport.tensors.reshard import HostPlan, plan_reshard, shard_box

Bytes = npt.NDArray[np.uint8]


@dataclass
class Version:
    """dense: of each tensor [*shape, bytes of an element].  parts: the bytes of each trainer rank's segment."""

    manifest: WeightManifest
    dense: Mapping[str, Bytes]
    parts: Sequence[Bytes]


def version(shapes: Mapping[str, tuple[tuple[int, ...], str]], boxes: Sequence[Sequence[tuple[int, Box]]]) -> Version:
    """One whose trainer ranks wrote ``boxes``, each of the tensor at an index; no ranks: it is one range."""
    specs = plan_layout((name, shape, dtype) for name, (shape, dtype) in shapes.items())
    random = np.random.default_rng(len(specs))
    dense = {
        spec.name: random.integers(0, 256, (*spec.shape, ITEM_BYTES[spec.dtype]), dtype=np.uint8) for spec in specs
    }
    all_pieces = [plan_pieces(specs, of_rank) for of_rank in boxes]
    manifest = WeightManifest(
        weights=WeightIdentity(epoch=0, version=1, digest=""),
        tensors=specs,
        total_bytes=layout_bytes(specs),
        sources=(),
        host="",
        parts=tuple(
            WeightPart(pieces=pieces, total_bytes=part_bytes(specs, pieces), sources=(), host="")
            for pieces in all_pieces
        ),
    )
    if not boxes:
        return Version(manifest, dense, [_segment(layout_bytes(specs), [(s.offset, dense[s.name]) for s in specs])])
    parts = [
        _segment(
            part_bytes(specs, pieces), [(p.offset, cut(dense, specs[p.tensor], Box(p.start, p.shape))) for p in pieces]
        )
        for pieces in all_pieces
    ]
    return Version(manifest, dense, parts)


def cut(dense: Mapping[str, Bytes], spec: TensorSpec, box: Box) -> Bytes:
    return dense[spec.name][box.slices((0,) * len(spec.shape))]


def _segment(nbytes: int, contents: Sequence[tuple[int, Bytes]]) -> Bytes:
    segment = np.zeros(nbytes, np.uint8)
    for offset, array in contents:
        segment[offset : offset + array.size] = array.reshape(-1)
    return segment


def carried_out(plan: HostPlan, parts: Sequence[Bytes]) -> list[Bytes]:
    """The buffers of the ranks: what is read comes to this host, and copies take nothing else."""
    here = [np.full(part.size, 0xEE, np.uint8) for part in parts]
    read = [np.zeros(part.size, np.uint8) for part in parts]
    for number, ranges in plan.reads.items():
        for offset, nbytes in ranges:
            here[number][offset : offset + nbytes] = parts[number][offset : offset + nbytes]
            read[number][offset : offset + nbytes] += 1
    buffers = [np.zeros(rank.nbytes, np.uint8) for rank in plan.ranks]
    for buffer, rank in zip(buffers, plan.ranks, strict=True):
        written = np.zeros(buffer.size, np.uint8)
        for copy in rank.copies:
            for source, target in copy.runs():
                assert (read[copy.part][source : source + copy.nbytes] == 1).all(), "each byte came once"
                buffer[target : target + copy.nbytes] = here[copy.part][source : source + copy.nbytes]
                written[target : target + copy.nbytes] += 1
        assert written.max(initial=0) <= 1
    return buffers


def check(version: Version, wanted: Sequence[Mapping[str, Box]], *, gap_bytes: int = 0) -> HostPlan:
    plan = plan_reshard(version.manifest, wanted, gap_bytes=gap_bytes)
    specs = version.manifest.tensors
    for buffer, rank, boxes in zip(carried_out(plan, version.parts), plan.ranks, wanted, strict=True):
        assert {specs[piece.tensor].name for piece in rank.pieces} == {*boxes}
        for piece in rank.pieces:
            spec = specs[piece.tensor]
            dense = cut(version.dense, spec, boxes[spec.name])
            assert (buffer[piece.offset : piece.offset + dense.size] == dense.reshape(-1)).all()
    return plan


def needed_bytes(version: Version, wanted: Sequence[Mapping[str, Box]]) -> int:
    """Of all elements that any rank needs, each once."""
    total = 0
    for spec in version.manifest.tensors:
        mask = np.zeros(spec.shape, bool)
        for boxes in wanted:
            if spec.name in boxes:
                mask[boxes[spec.name].slices((0,) * len(spec.shape))] = True
        total += int(mask.sum()) * ITEM_BYTES[spec.dtype]
    return total


@st.composite
def sub_boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(start, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))


@st.composite
def versions(draw: st.DrawFn) -> Version:
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        shapes[f"t{number}"] = shape, draw(st.sampled_from(sorted(ITEM_BYTES)))
    boxes: list[list[tuple[int, Box]]] = [[] for _ in range(draw(st.integers(0, 4)))]
    for index, (shape, _) in enumerate(shapes.values()):
        edges = [
            sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) if size else [0, 0] for size in shape
        ]
        for pairs in itertools.product(*(itertools.pairwise(one) for one in edges)):
            box = Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
            if boxes and box.num_elements:
                draw(st.sampled_from(boxes)).append((index, box))
    return version(shapes, boxes)


@given(one=versions(), data=st.data(), gap_bytes=st.sampled_from([0, 0, 3, 1 << 20]))
def test_ranks_get_what_a_dense_copy_has_and_their_host_reads_it_once(
    one: Version, data: st.DataObject, gap_bytes: int
):
    wanted: list[dict[str, Box]] = []
    for _ in range(data.draw(st.integers(0, 4))):
        specs = [spec for spec in one.manifest.tensors if data.draw(st.booleans())]
        wanted.append({spec.name: data.draw(sub_boxes(spec.shape)) for spec in specs})
    plan = check(one, wanted, gap_bytes=gap_bytes)
    needed = needed_bytes(one, wanted)
    assert plan.read_bytes >= needed
    if not gap_bytes:
        assert plan.read_bytes == needed


@given(
    one=versions(),
    ranks=st.integers(1, 5),
    axes=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=4, max_size=4),
)
def test_all_ranks_of_an_engine_on_one_host_read_the_version_once(one: Version, ranks: int, axes: Sequence[int | None]):
    """Whatever is split, and what every rank has whole."""

    def of(rank: int) -> dict[str, Box]:
        return {
            spec.name: shard_box(spec.shape, axis if axis is not None and axis < len(spec.shape) else None, rank, ranks)
            for spec, axis in zip(one.manifest.tensors, axes, strict=False)
        }

    plan = check(one, [of(rank) for rank in range(ranks)])
    assert plan.read_bytes == sum(spec.nbytes for spec in one.manifest.tensors)


@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    data=st.data(),
    ranks=st.integers(1, 6),
)
def test_shards_make_up_the_tensor(shape: list[int], data: st.DataObject, ranks: int):
    axis = data.draw(st.integers(0, len(shape) - 1))
    boxes = [shard_box(shape, axis, rank, ranks) for rank in range(ranks)]
    assert why_no_tiling(shape, [box for box in boxes if box.num_elements]) == ""
    assert sum(box.num_elements for box in boxes) == math.prod(shape)


def test_rows_of_two_trainer_ranks_become_columns_of_two_hosts():
    """[4, 6] of 2 bytes: a host reads half of each row, a run for each."""
    shape = (4, 6)
    rows = [[(0, shard_box(shape, 0, rank, 2))] for rank in range(2)]
    one = version({"w": (shape, "bfloat16")}, rows)
    for host in range(2):
        plan = check(one, [{"w": shard_box(shape, 1, host, 2)}])
        assert plan.reads == {part: ((6 * host, 6), (12 + 6 * host, 6)) for part in (0, 1)}
        (copy, _) = plan.ranks[0].copies
        assert (copy.nbytes, copy.counts, copy.source_steps, copy.target_steps) == (6, (2,), (12,), (6,))


def test_layers_that_a_rank_does_not_have_are_not_read():
    """Pipeline stages: what only another stage of the engine has stays where it is."""
    shapes = {f"layer{number}": ((3, 3), "float32") for number in range(4)}
    stages = [[(number, Box((0, 0), (3, 3))) for number in (2 * stage, 2 * stage + 1)] for stage in range(2)]
    one = version(shapes, stages)
    plan = check(one, [{"layer2": Box((0, 0), (3, 3))}, {"layer2": Box((0, 0), (3, 3))}])
    assert plan.reads == {1: ((0, 36),)}


def test_short_gaps_are_read_along():
    one = version({"w": ((4, 8), "uint8")}, [])
    half = [{"w": Box((0, 0), (4, 4))}]
    assert check(one, half).reads == {0: ((0, 4), (8, 4), (16, 4), (24, 4))}
    assert check(one, half, gap_bytes=4).reads == {0: ((0, 28),)}


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 1), (2, 3)), Box((-1, 0), (1, 1))])
def test_a_box_outside_of_its_tensor_is_refused(box: Box):
    one = version({"w": ((2, 3), "uint8")}, [])
    with pytest.raises(ValueError, match=r"of tensor 'w' is wanted, which has shape \(2, 3\)"):
        plan_reshard(one.manifest, [{"w": box}])
    with pytest.raises(ValueError, match="of tensor 'v' is wanted, which has shape None"):
        plan_reshard(one.manifest, [{"v": box}])
