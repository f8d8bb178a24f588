"""Layout, checksums and digests of published tensors; and what a foreign manifest is answered with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from transport.contracts.messages import Piece, TensorSpec, WeightManifest
from transport.contracts.types import WeightIdentity
from transport.errors import ChecksumError, MessageError
from transport.tensors.base import choose_sources, host_id, parse_address
from transport.tensors.manifest import (
    ALIGNMENT_BYTES,
    check_manifest,
    checksum,
    digest_tensors,
    layout_bytes,
    plan_layout,
    single_part,
    verify_piece,
    with_checksums,
)


def manifest_of(tensors: dict[str, bytes]) -> tuple[WeightManifest, bytearray]:
    """A manifest of uint8 tensors, and its bytes."""
    layout = plan_layout((name, (len(raw),), "uint8") for name, raw in tensors.items())
    specs = with_checksums(layout, [checksum(raw) for raw in tensors.values()])
    buffer = bytearray(layout_bytes(specs))
    for spec, raw in zip(specs, tensors.values(), strict=True):
        buffer[spec.offset : spec.offset + spec.nbytes] = raw
    identity = WeightIdentity(epoch=1, version=2, digest=digest_tensors(specs))
    return WeightManifest(weights=identity, tensors=specs, total_bytes=len(buffer), sources=(), host=host_id()), buffer


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8), st.sampled_from(["uint8", "bfloat16", "float64"]))
def test_a_layout_is_aligned_and_never_overlaps(shapes: list[list[int]], dtype: str) -> None:
    specs = plan_layout((f"t{i}", shape, dtype) for i, shape in enumerate(shapes))
    end = 0
    for spec in specs:
        assert spec.offset % ALIGNMENT_BYTES == 0
        assert spec.offset >= end
        end = spec.offset + spec.nbytes
    assert layout_bytes(specs) >= max(end, 1)


def test_a_layout_refuses_what_it_cannot_place() -> None:
    with pytest.raises(ValueError, match="named twice"):
        plan_layout([("a", (1,), "uint8"), ("a", (1,), "uint8")])
    with pytest.raises(ValueError, match="complex64"):
        plan_layout([("a", (1,), "complex64")])


def test_the_digest_names_the_content_and_not_its_place() -> None:
    first, _ = manifest_of({"a": b"one", "b": b"two"})
    other_order, _ = manifest_of({"b": b"two", "a": b"one"})
    other_content, _ = manifest_of({"a": b"one", "b": b"twp"})
    other_name, _ = manifest_of({"a": b"one", "c": b"two"})
    assert first.weights.digest == other_order.weights.digest
    assert len({m.weights.digest for m in (first, other_content, other_name)}) == 3


def test_verification_names_the_tensor_that_differs() -> None:
    manifest, buffer = manifest_of({"a": b"one", "b": b"two"})
    check_manifest(manifest)
    first, second = single_part(manifest).pieces

    def data(piece: Piece) -> memoryview:
        return memoryview(buffer)[piece.offset : piece.offset + 3]

    for piece in (first, second):
        verify_piece(manifest, piece, data(piece))
    with pytest.raises(ChecksumError, match="2 bytes came instead of 3"):
        verify_piece(manifest, second, data(second)[:2])
    buffer[second.offset] ^= 1
    verify_piece(manifest, first, data(first))
    with pytest.raises(ChecksumError, match="'b'"):
        verify_piece(manifest, second, data(second))


def broken(manifest: WeightManifest, **changes: object) -> WeightManifest:
    """The manifest with its second tensor changed and its digest made to fit."""
    specs = (manifest.tensors[0], replace(manifest.tensors[1], **changes))
    return replace(manifest, tensors=specs, weights=replace(manifest.weights, digest=digest_tensors(specs)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 0}, "overlaps"),
        ({"offset": 65}, "offset"),
        ({"offset": -64}, "offset"),
        ({"shape": (-1, -3)}, "shape"),
        ({"nbytes": 1 << 40}, "cannot have"),
        ({"dtype": "object"}, "unknown dtype"),
        ({"offset": 128}, "the manifest says"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    manifest, _ = manifest_of({"a": b"one", "b": b"two"})
    with pytest.raises(MessageError, match=message):
        check_manifest(broken(manifest, **changes))


def test_a_manifest_with_a_foreign_digest_or_a_tensor_twice_is_refused() -> None:
    manifest, _ = manifest_of({"a": b"one", "b": b"two"})
    with pytest.raises(MessageError, match="digest"):
        check_manifest(replace(manifest, weights=replace(manifest.weights, digest="00")))
    with pytest.raises(MessageError, match="twice"):
        check_manifest(broken(manifest, name="a"))


def test_an_empty_tensor_has_a_place() -> None:
    spec = TensorSpec(name="empty", shape=(0, 4), dtype="float32", offset=0, nbytes=0, checksum="")
    assert plan_layout([("empty", (0, 4), "float32")]) == (spec,)
    assert layout_bytes([spec]) == ALIGNMENT_BYTES


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["shm://0123456789abcdef/dev/shm/streamrl-a@1@b", "tcp://10.0.0.1:80/e1v2"],
)
def test_an_address_survives_parsing(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["", "tcp://host/segment", "tcp://host:port/segment", "tcp://host:99999/s", "shm://host", "shm:///x"]
)
def test_an_incomplete_address_is_refused(text: str) -> None:
    with pytest.raises(MessageError):
        parse_address(text)


def test_an_unknown_scheme_is_answered_with_the_valid_ones() -> None:
    with pytest.raises(MessageError, match=r"shm://, tcp://"):
        parse_address("carrier-pigeon://coop/1")


def test_sources_are_chosen_by_where_they_can_be_reached_from() -> None:
    here = host_id()
    sources = ["tcp://10.0.0.1:80/s", "tcp://127.0.0.1:80/s"]
    sources += [f"shm://{here}/dev/shm/s", "shm://elsewhere/dev/shm/s", "future://x/y"]
    local = [str(address) for address in choose_sources(sources, here)]
    assert local == [f"shm://{here}/dev/shm/s", "tcp://10.0.0.1:80/s", "tcp://127.0.0.1:80/s"]
    remote = [str(address) for address in choose_sources(sources, "elsewhere")]
    assert "tcp://127.0.0.1:80/s" not in remote
    with pytest.raises(MessageError, match="valid are"):
        choose_sources(["future://x/y"], here)
