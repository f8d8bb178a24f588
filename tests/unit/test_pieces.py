"""Boxes of tensors: where they lie, whether they make up the whole, and checksums that add up to that of the whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from transport.contracts.messages import Piece, WeightManifest, WeightPart, encode, manifest_decoder
from transport.contracts.types import MAX_PARTS, WeightIdentity
from transport.errors import MessageError
from transport.tensors.manifest import (
    check_manifest,
    digest_tensors,
    layout_bytes,
    part_bytes,
    plan_layout,
    plan_pieces,
)
from transport.tensors.manifest import checksum as whole_bytes_checksum
from transport.tensors.pieces import Box, box_checksum, runs, sum_checksums, whole, why_no_tiling

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape and a box within it."""
    shape = draw(SHAPES)
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, Box(start, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, start, strict=True)))


def cells(shape: tuple[int, ...], cuts: list[set[int]]) -> list[Box]:
    """The boxes of a grid."""
    edges = [sorted({0, size, *(cut for cut in of if cut < size)}) for size, of in zip(shape, cuts, strict=True)]
    return [
        Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))
        for pairs in itertools.product(*(itertools.pairwise(one) for one in edges))
    ]


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, cells(shape, [draw(st.sets(st.integers(1, 6))) for _ in shape])


@given(boxes(), st.integers(1, 9), st.sampled_from([1, 2, 8]))
def test_the_checksum_of_a_box_is_that_of_the_tensor_with_zeros_around_it(
    case: tuple[tuple[int, ...], Box], chunk: int, item: int
) -> None:
    shape, box = case
    around = np.zeros((*shape, item), np.uint8)
    inside = np.random.default_rng(chunk).integers(0, 256, (*box.shape, item), np.uint8)
    around[box.slices((0,) * len(shape))] = inside
    raw = inside.tobytes()
    chunks = [raw[at : at + chunk] for at in range(0, len(raw), chunk)]
    assert box_checksum(chunks, box, shape, item) == whole_bytes_checksum(around.tobytes())
    with pytest.raises(ValueError, match="other bytes"):
        box_checksum(chunks[:-1], box, shape, item)


@given(grids())
def test_checksums_of_the_cells_of_a_grid_add_up_to_that_of_the_tensor(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, grid = case
    tensor = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    parts = [box_checksum([np.ascontiguousarray(tensor[b.slices((0,) * len(shape))]).data], b, shape, 1) for b in grid]
    assert sum_checksums(parts, tensor.nbytes) == whole_bytes_checksum(tensor.tobytes())


@given(boxes())
def test_the_runs_of_a_box_are_its_elements_in_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    length, starts = runs(box, shape)
    found = [index for start in starts for index in range(start, start + length)]
    assert found == numbers[box.slices((0,) * len(shape))].reshape(-1).tolist()


@given(grids(), st.data())
def test_a_grid_makes_up_a_tensor_and_nothing_else_does(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, grid = case
    assert why_no_tiling(shape, data.draw(st.permutations(grid))) == ""
    one = data.draw(st.sampled_from(grid))
    rest = [box for box in grid if box != one]
    assert why_no_tiling(shape, rest)
    assert why_no_tiling(shape, [*grid, one])
    if shape:
        dimension = data.draw(st.integers(0, len(shape) - 1))
        for change in (-1, 1):
            start = tuple(at + change * (axis == dimension) for axis, at in enumerate(one.start))
            size = tuple(number + change * (axis == dimension) for axis, number in enumerate(one.shape))
            for bad in (Box(start, one.shape), Box(one.start, size)):
                assert why_no_tiling(shape, [*rest, bad]) or covers(shape, [*rest, bad])


def covers(shape: tuple[int, ...], grid: list[Box]) -> bool:
    """Brute force: each element once."""
    count = np.zeros(shape, int)
    for box in grid:
        if any(at < 0 for at in box.start) or any(map(int.__gt__, box.end, shape)):
            return False
        count[box.slices((0,) * len(shape))] += 1
    return bool((count == 1).all())


@given(
    SHAPES.flatmap(lambda s: st.tuples(st.just(s), st.lists(st.sampled_from(cells(s, [{1, 2}] * len(s))), max_size=5)))
)
def test_what_passes_for_a_tiling_is_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, some = case
    assert (why_no_tiling(shape, some) == "") <= covers(shape, some)


def test_a_tensor_without_elements_has_no_pieces() -> None:
    assert why_no_tiling((0, 3), []) == ""
    assert why_no_tiling((0, 3), [Box((0, 0), (0, 3))])
    assert box_checksum([], whole((0, 3)), (0, 3), 2) == whole_bytes_checksum(b"")


# --- manifests of parts that come from strangers ----------------------------------------------------------------------


def manifest_in_parts() -> WeightManifest:
    """Tensor [4, 6] uint8 from two parts, columns [0, 2) and [2, 6), and [3] int16 from the second."""
    layout = plan_layout([("a", (4, 6), "uint8"), ("b", (3,), "int16")])
    tensor = np.arange(24, dtype=np.uint8).reshape(4, 6)
    vector = np.arange(3, dtype=np.int16)
    held = [[(0, Box((0, 0), (4, 2)))], [(0, Box((0, 2), (4, 4))), (1, Box((0,), (3,)))]]
    parts: list[WeightPart] = []
    for boxes_of in held:
        pieces = []
        for piece in plan_pieces(layout, boxes_of):
            spec, whole_one = layout[piece.tensor], (tensor, vector)[piece.tensor]
            box = Box(piece.start, piece.shape)
            raw = np.ascontiguousarray(whole_one[box.slices((0,) * whole_one.ndim)]).tobytes()
            value = box_checksum([raw], box, spec.shape, whole_one.itemsize)
            pieces.append(replace(piece, checksum=value))
        parts.append(WeightPart(pieces=tuple(pieces), total_bytes=part_bytes(layout, pieces), sources=(), host="h"))
    specs = tuple(
        replace(spec, checksum=whole_bytes_checksum(raw.tobytes()))
        for spec, raw in zip(layout, (tensor, vector), strict=True)
    )
    return WeightManifest(
        weights=WeightIdentity(epoch=1, version=2, digest=digest_tensors(specs)),
        tensors=specs,
        total_bytes=layout_bytes(specs),
        sources=(),
        host="h",
        parts=tuple(parts),
    )


def test_a_manifest_in_parts_survives_the_wire_and_one_of_a_single_part_is_that_of_before() -> None:
    manifest = manifest_in_parts()
    check_manifest(manifest)
    assert manifest_decoder.decode(encode(manifest)) == manifest
    alone = replace(manifest, parts=(), sources=("shm://x/y",))
    check_manifest(alone)
    assert b"parts" not in encode(alone)


HUGE = 2**48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": (0, 1)}, "overlaps|hole|covers"),
        ({"start": (0, 3)}, "outside|hole"),
        ({"shape": (4, 3)}, "hole"),
        ({"shape": (HUGE, HUGE)}, "offset|outside|bytes"),
        ({"start": (HUGE, 0)}, "outside"),
        ({"shape": (4,)}, "begins at"),
        ({"shape": (2,) * 8, "start": (0,) * 8}, "offset|dimensions"),
        ({"tensor": 2}, "lacks"),
        ({"tensor": HUGE}, "lacks"),
        ({"offset": 1}, "offset"),
        ({"offset": HUGE}, "offset|bytes"),
        ({"checksum": "crc32:00000000"}, "checksum"),
        ({"checksum": "crc32:none"}, "no checksum|invalid"),
        ({"checksum": ""}, "no checksum"),
    ],
)
def test_a_part_that_contradicts_the_manifest_is_refused(changes: dict[str, object], message: str) -> None:
    manifest = manifest_in_parts()
    first, second = manifest.parts[1].pieces
    bad = replace(manifest.parts[1], pieces=(replace(first, **changes), second))
    for total in (bad.total_bytes, HUGE):
        forged = replace(manifest, parts=(manifest.parts[0], replace(bad, total_bytes=total)))
        with pytest.raises(MessageError, match=message if total == bad.total_bytes else "."):
            check_manifest(manifest_decoder.decode(encode(forged)))


def test_parts_that_leave_out_or_repeat_a_piece_are_refused() -> None:
    manifest = manifest_in_parts()
    one, two = manifest.parts
    for parts, message in (
        ((one,), "covers|missing|hole"),
        ((two,), "covers"),
        ((one, one, two), "begin at|hole"),
        ((two, one, *[replace(one, pieces=(), total_bytes=64)] * MAX_PARTS), "most|length"),
    ):
        forged = replace(manifest, parts=parts)
        with pytest.raises(MessageError, match=message):
            check_manifest(forged)
        with pytest.raises(MessageError):
            check_manifest(manifest_decoder.decode(encode(forged)))


def test_pieces_of_negative_numbers_are_refused_also_where_nothing_was_decoded() -> None:
    manifest = manifest_in_parts()
    for bad in (Piece(0, (-1, 0), (4, 2), 0, ""), Piece(0, (0, 0), (-4, -2), 0, ""), Piece(-1, (0, 0), (4, 2), 0, "")):
        part = replace(manifest.parts[0], pieces=(bad,))
        with pytest.raises(MessageError):
            check_manifest(replace(manifest, parts=(part, manifest.parts[1])))
