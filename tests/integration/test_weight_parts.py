"""Weights from several ranks: each publishes what it holds, and a receiver has the whole, or just what it wants."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.fakes.rank_threads import ThreadRank, on_ranks
from transport.contracts.messages import WeightManifest, WeightPart, encode, manifest_decoder
from transport.errors import ChecksumError, MessageError, PeerUnavailableError, SegmentSpaceError
from transport.tensors import tcp
from transport.tensors.base import SCHEMES, TimeLimit, host_id
from transport.tensors.manifest import check_manifest
from transport.tensors.pieces import Box, whole
from transport.tensors.tcp import ReadRange
from transport.tensors.wire import Channel
from workers.generation.server.upkeep import hold
from workers.weights import publish
from workers.weights.parts import Shard
from workers.weights.publish import DELTA, WeightPublisher
from workers.weights.pull import WeightPuller, check_tensors

Held = Mapping[str, "torch.Tensor | Shard"]
"""What one rank publishes."""


def dense(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(13, 6, generator=generator),
        "columns": torch.randn(6, 8, generator=generator),
        "both": torch.randn(6, 8, generator=generator),
        "norm": torch.randn(6, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "steps": torch.arange(5, dtype=torch.int64),
    }


def part(tensor: torch.Tensor, rows: slice, columns: slice = slice(None)) -> Shard:
    local = tensor[rows, columns] if tensor.ndim > 1 else tensor[rows]
    start = (rows.start or 0, columns.start or 0)[: tensor.ndim]
    return Shard(local, start, tuple(tensor.shape))


def split(tensors: Mapping[str, torch.Tensor]) -> list[Held]:
    """Over four ranks: rows unevenly, columns, both; the norm on all, the last rank has no row of the embedding."""
    ranks: list[dict[str, torch.Tensor | Shard]] = []
    for rank, rows in enumerate((slice(0, 5), slice(5, 10), slice(10, 13), slice(13, 13))):
        up, left = divmod(rank, 2)
        ranks.append(
            {
                "embedding": part(tensors["embedding"], rows),
                "columns": part(tensors["columns"], slice(0, 6), slice(rank * 2, rank * 2 + 2)),
                "both": part(tensors["both"], slice(up * 3, up * 3 + 3), slice(left * 4, left * 4 + 4)),
                "norm": tensors["norm"],
            }
        )
    ranks[2] |= {name: tensors[name] for name in ("scalar", "empty", "steps")}  # of its stage alone
    return ranks


class Fleet:
    """Publishers of four ranks of one host."""

    def __init__(self, directory: Path, count: int = 4, keep: int = 2, delta_share: float = 0.0) -> None:
        self.publishers = [
            WeightPublisher("parts-test", directory / str(rank), keep=keep, delta_share=delta_share)
            for rank in range(count)
        ]

    def publish(self, held: Sequence[Held], *, version: int = 0, dtype: torch.dtype = torch.bfloat16) -> WeightManifest:
        """Every rank has the same manifest, of the epoch of rank 0."""

        def work(rank: ThreadRank) -> WeightManifest:
            epoch = 3 if rank.rank == 0 else 0
            return self.publishers[rank.rank].publish(epoch, version, held[rank.rank], dtype, rank)

        manifests = on_ranks(len(held), work)
        assert isinstance(manifests[0], WeightManifest), manifests
        assert all(manifest == manifests[0] for manifest in manifests)
        assert manifests[0].weights.epoch == 3
        return manifest_decoder.decode(encode(manifests[0]))

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def over(manifest: WeightManifest, scheme: str) -> WeightManifest:
    """The manifest with addresses of one scheme only."""

    def only(sources: Sequence[str]) -> tuple[str, ...]:
        return tuple(source for source in sources if source.startswith(scheme))

    parts = tuple(replace(one, sources=only(one.sources)) for one in manifest.parts)
    return replace(manifest, sources=only(manifest.sources), parts=parts)


def pulled(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with WeightPuller(limit=TimeLimit(20)).pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def expect(found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("scheme", ["shm://", "tcp://"])
def test_what_ranks_hold_arrives_whole_and_each_byte_is_published_once(fleet: Fleet, scheme: str) -> None:
    manifest = fleet.publish(split(dense()))
    expect(pulled(over(manifest, scheme)), dense(), torch.bfloat16)
    elements = sum(math.prod(piece.shape) for one in manifest.parts for piece in one.pieces)
    assert elements == sum(tensor.numel() for tensor in dense().values())
    assert len({address for one in manifest.parts for address in one.sources}) == 4 * len(SCHEMES)


def test_the_digest_is_that_of_one_rank_alone(fleet: Fleet, tmp_path: Path) -> None:
    alone = WeightPublisher("parts-alone", tmp_path)
    single = alone.publish(1, 0, dense(), torch.bfloat16)
    in_parts = fleet.publish(split(dense()))
    other = fleet.publish(split(dense(seed=1)), version=1)
    assert in_parts.weights.digest == single.weights.digest != other.weights.digest
    assert not single.parts
    alone.close()


def test_a_tensor_that_a_part_holds_whole_is_mapped_and_others_are_put_together_when_they_are_looked_at(
    fleet: Fleet,
) -> None:
    manifest = fleet.publish(split(dense()))
    with WeightPuller().pull(over(manifest, "shm://")) as tensors:
        again = tensors["norm"]
        assert tensors["norm"].data_ptr() == again.data_ptr()
        first, second = tensors["both"], tensors["both"]
        assert first.data_ptr() != second.data_ptr()
        check_tensors(dense(), tensors)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and the boxes of several ranks, which make it up; some ranks hold the same box."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    edges = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=3))}) for size in shape]
    cells = itertools.product(*(itertools.pairwise(one) for one in edges))
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return shape, draw(st.permutations(boxes + draw(st.lists(st.sampled_from(boxes), max_size=2))))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layouts(), st.data())
def test_any_layout_arrives_as_the_dense_tensor_and_so_does_any_box_of_it(
    tmp_path: Path, case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    origin = (0,) * len(shape)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    wanted = Box(start, tuple(data.draw(st.integers(1, most - at)) for most, at in zip(shape, start, strict=True)))
    fleet = Fleet(tmp_path, count=len(boxes))
    try:
        ranks = [{"t": Shard(tensor[box.slices(origin)], box.start, shape)} for box in boxes]
        manifest = fleet.publish(ranks, dtype=torch.float32)
        assert torch.equal(pulled(manifest)["t"], tensor)
        for scheme in ("shm://", "tcp://"):
            with WeightPuller(limit=TimeLimit(20)).pull(over(manifest, scheme), wanted={"t": wanted}) as some:
                assert torch.equal(some["t"], tensor[wanted.slices(origin)])
    finally:
        fleet.close()


def test_only_parts_that_hold_something_wanted_are_asked(fleet: Fleet) -> None:
    manifest = fleet.publish(split(dense()), dtype=torch.float32)
    fleet.publishers[3].close()  # has columns [6, 8), the last quarter of "both", and was given the norm to write
    wanted = {"columns": Box((1, 1), (4, 4)), "embedding": Box((4, 2), (3, 3))}
    with WeightPuller(limit=TimeLimit(5)).pull(manifest, wanted=wanted) as some:
        assert some.keys() == wanted.keys()
        assert torch.equal(some["columns"], dense()["columns"][1:5, 1:5])
        assert torch.equal(some["embedding"], dense()["embedding"][4:7, 2:5])
    with pytest.raises(PeerUnavailableError, match="part 4 of 4"):
        pulled(manifest)
    for bad in ({"columns": Box((0, 0), (7, 1))}, {"columns": Box((0,), (1,))}, {"none": Box((0,), (1,))}):
        with pytest.raises(ValueError, match="is wanted"), WeightPuller().pull(manifest, wanted=bad):
            pass


def test_a_damaged_part_and_one_of_another_version_are_refused_and_another_source_is_asked(fleet: Fleet) -> None:
    manifest = fleet.publish(split(dense()))
    newer = fleet.publish(split(dense(seed=1)), version=1)
    exchanged = replace(manifest.parts[1], sources=newer.parts[1].sources)
    with pytest.raises(ChecksumError, match="piece at"):
        pulled(replace(manifest, parts=(manifest.parts[0], exchanged, *manifest.parts[2:])))
    path = Path("/") / manifest.parts[2].sources[0].split("/", 3)[3]
    with path.open("r+b") as file:
        file.seek(manifest.parts[2].pieces[0].offset)
        file.write(b"\xff\xff")
    with pytest.raises(ChecksumError, match=r"e3v0.*'embedding'"):
        pulled(manifest)
    good = replace(manifest.parts[1], sources=(*newer.parts[1].sources, *manifest.parts[1].sources))
    with WeightPuller().pull(
        replace(manifest, parts=(manifest.parts[0], good, *manifest.parts[2:])), wanted={"columns": whole((6, 8))}
    ) as some:
        assert torch.equal(some["columns"], dense()["columns"].bfloat16())


def test_a_part_of_another_host_needs_a_source_that_can_be_reached_from_here(fleet: Fleet) -> None:
    manifest = fleet.publish(split(dense()))
    theirs = replace(manifest.parts[1], host="another-host")
    with pytest.raises(PeerUnavailableError, match=r"part 2 of 4: none can be reached"):
        pulled(over(replace(manifest, parts=(manifest.parts[0], theirs, *manifest.parts[2:])), "tcp://"))


def test_no_room_on_one_rank_is_told_by_all_of_them(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.publish(split(dense()))
    full = fleet.publishers[2]

    def no_room(name: str, nbytes: int, fill: Callable[..., object]) -> object:
        raise SegmentSpaceError(nbytes, "/dev/shm has 0 bytes free")

    monkeypatch.setattr(full, "_fill", no_room)
    held = split(dense())
    failed = on_ranks(4, lambda rank: fleet.publishers[rank.rank].publish(1, 1, held[rank.rank], torch.bfloat16, rank))
    assert all(isinstance(error, SegmentSpaceError) for error in failed)
    assert {str(error).count("on rank 2: /dev/shm has 0 bytes free") for error in failed} == {1}


def test_ranks_that_do_not_hold_the_whole_model_say_what_is_missing(fleet: Fleet) -> None:
    held = split(dense())

    def work(rank: ThreadRank) -> WeightManifest:
        mine = dict(held[rank.rank])
        if rank.rank == 1:
            del mine["columns"]
        return fleet.publishers[rank.rank].publish(1, 0, mine, torch.bfloat16, rank)

    assert all("'columns'" in str(error) and isinstance(error, ValueError) for error in on_ranks(4, work))
    with pytest.raises(ValueError, match="'embedding' is only in part"):
        fleet.publishers[0].publish(1, 1, held[0], torch.bfloat16)


def test_what_a_server_holds_of_a_version_in_parts_is_one_range_with_the_same_digest(fleet: Fleet) -> None:
    manifest = fleet.publish(split(dense()))
    with WeightPuller().pull(manifest) as tensors:
        held = hold(manifest.weights, tensors)
    fleet.close()
    here, elsewhere = held.offer(same_host=True), held.offer(same_host=False)
    assert not here.parts
    assert elsewhere.parts == manifest.parts
    for offered in (here, elsewhere):
        expect(pulled(offered), dense(), torch.bfloat16)
    held.close()


def test_parts_serve_where_the_manifests_own_source_does_not(fleet: Fleet) -> None:
    manifest = fleet.publish(split(dense()))
    expect(pulled(replace(manifest, sources=(f"shm://{host_id()}/proc/1/fd/999@1",))), dense(), torch.bfloat16)


def test_chunks_end_anywhere_in_a_row(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "CHUNK_ELEMENTS", 5)
    expect(pulled(fleet.publish(split(dense()))), dense(), torch.bfloat16)


# --- what changed -----------------------------------------------------------------------------------------------------


class Steps:
    """A policy of four ranks whose tensors change a little each step, and a puller of another host."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.puller, self.version = fleet, WeightPuller(limit=TimeLimit(5.0)), -1
        self._random = torch.Generator().manual_seed(0)
        self.tensors = {
            "embedding": torch.randn(13, 3000, generator=self._random),
            "columns": torch.randn(600, 80, generator=self._random),
            "both": torch.randn(600, 80, generator=self._random),
            "norm": torch.randn(6, generator=self._random),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "steps": torch.arange(5, dtype=torch.int64),
        }

    def step(self) -> None:
        for name in ("embedding", "columns", "both"):
            tensor = self.tensors[name]
            self.tensors[name] = torch.where(torch.rand(tensor.shape, generator=self._random) < 0.02, -tensor, tensor)

    def held(self) -> list[Held]:
        ranks = [dict(rank) for rank in split(self.tensors)]
        for rank, one in enumerate(ranks):
            up, left = divmod(rank, 2)
            one["columns"] = part(self.tensors["columns"], slice(0, 600), slice(rank * 20, rank * 20 + 20))
            one["both"] = part(self.tensors["both"], slice(up * 300, up * 300 + 300), slice(left * 40, left * 40 + 40))
        return ranks

    def publish(self) -> WeightManifest:
        self.version += 1
        if self.version:
            self.step()
        return elsewhere(self.fleet.publish(self.held(), version=self.version))

    def pull(self, manifest: WeightManifest) -> None:
        with self.puller.pull(manifest) as tensors:
            expect(tensors, self.tensors, torch.bfloat16)


def elsewhere(manifest: WeightManifest) -> WeightManifest:
    """As a worker of another host reads it."""

    def only(sources: Sequence[str]) -> tuple[str, ...]:
        return tuple(source for source in sources if source.startswith("tcp://"))

    def changed(one: WeightPart) -> WeightPart:
        return replace(one, delta=one.delta and replace(one.delta, sources=only(one.delta.sources)))

    return replace(over(manifest, "tcp://"), parts=tuple(map(changed, over(manifest, "tcp://").parts)))


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    fleet = Fleet(tmp_path, delta_share=0.5)
    yield Steps(fleet)
    fleet.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What servers in this process were asked for: segment and bytes."""
    asked: list[tuple[str, int]] = []
    serve = tcp.serve_range

    def watched(channel: Channel, request: ReadRange, *more: Any) -> None:
        asked.append((request.segment, request.nbytes))
        serve(channel, request, *more)

    monkeypatch.setattr(tcp, "serve_range", watched)
    return asked


def take(sent: list[tuple[str, int]]) -> tuple[set[str], int]:
    """(segments, bytes) that were asked for since."""
    taken, sent[:] = list(sent), []
    return {segment for segment, _ in taken}, sum(nbytes for _, nbytes in taken)


def test_each_rank_tells_what_changed_in_its_part(steps: Steps, sent: list[tuple[str, int]]) -> None:
    first = steps.publish()
    steps.pull(first)
    assert [one.delta for one in first.parts] == [None] * 4
    whole_bytes = take(sent)[1]
    for version in (1, 2, 3):
        steps.pull(steps.publish())
        segments, nbytes = take(sent)
        assert segments == {f"e3v{version}r{rank}{DELTA}" for rank in range(4)}
        assert 0 < nbytes < 0.1 * whole_bytes


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_changes_are_lost_or_wrong_gives_its_part_whole(
    steps: Steps, sent: list[tuple[str, int]], rank: int
) -> None:
    steps.pull(steps.publish())
    for version, harm in ((1, "withdrawn"), (2, "wrong"), (3, "none"), (4, "swapped")):
        manifest = steps.publish()
        changed = manifest.parts[rank].delta
        assert changed is not None
        if harm == "withdrawn":
            steps.fleet.publishers[rank]._store.drop(f"e3v{version}r{rank}{DELTA}")
        elif harm == "wrong":
            first, *others = changed.patches
            changed = replace(changed, patches=(replace(first, checksum="crc32:00000000"), *others))
        elif harm == "swapped":
            first, second, *others = changed.patches
            swapped = (replace(first, tensor=second.tensor), replace(second, tensor=first.tensor))
            changed = replace(changed, patches=(*swapped, *others))
        else:
            changed = None
        parts = [*manifest.parts[:rank], replace(manifest.parts[rank], delta=changed), *manifest.parts[rank + 1 :]]
        take(sent)
        steps.pull(replace(manifest, parts=tuple(parts)))
        segments, nbytes = take(sent)
        assert {name for name in segments if not name.endswith(DELTA)} == {f"e3v{version}r{rank}"}
        assert nbytes < 1.5 * manifest.parts[rank].total_bytes
    steps.pull(steps.publish())
    assert take(sent)[0] == {f"e3v5r{rank}{DELTA}" for rank in range(4)}


def test_a_rank_that_began_anew_has_no_base_and_the_others_have(
    steps: Steps, sent: list[tuple[str, int]], tmp_path: Path
) -> None:
    steps.pull(steps.publish())
    steps.fleet.publishers[1].close()
    steps.fleet.publishers[1] = WeightPublisher("parts-test", tmp_path / "1", keep=2, delta_share=0.5)
    manifest = steps.publish()
    assert [one.delta is None for one in manifest.parts] == [False, True, False, False]
    take(sent)
    steps.pull(manifest)
    assert take(sent)[0] == {"e3v1r1"} | {f"e3v1r{rank}{DELTA}" for rank in (0, 2, 3)}


def test_ranks_that_split_anew_offer_no_changes(steps: Steps) -> None:
    steps.publish()
    steps.version += 1
    turned = steps.held()
    turned[0]["columns"], turned[1]["columns"] = turned[1]["columns"], turned[0]["columns"]  # pyright: ignore
    manifest = steps.fleet.publish(turned, version=steps.version)
    assert [one.delta is None for one in manifest.parts] == [True, True, False, False]


def test_what_contradicts_a_part_is_refused(steps: Steps) -> None:
    steps.publish()
    manifest = steps.publish()
    one = manifest.parts[0]
    assert one.delta is not None
    for patch in (replace(one.delta.patches[0], tensor=len(one.pieces)), replace(one.delta.patches[0], nbytes=1 << 40)):
        changed = replace(one.delta, patches=(patch, *one.delta.patches[1:]))
        with pytest.raises(MessageError, match="changes since"):
            check_manifest(replace(manifest, parts=(replace(one, delta=changed), *manifest.parts[1:])))
