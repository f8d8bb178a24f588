"""Weights from a trainer's publisher to a worker's puller: exact, verified, from another source when one fails."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.engine import FakeEngine
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.preloaded import preloaded
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import (
    Piece,
    TensorSpec,
    WeightManifest,
    WeightsFailed,
    WeightsLoaded,
    encode,
    manifest_decoder,
)
from transport.contracts.types import RunName, WeightIdentity, WorkerId
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.tensors.base import Endpoint, TimeLimit
from transport.tensors.manifest import check_manifest, digest_tensors, plan_layout, verify_piece
from workers.weights import pull as pull_module
from workers.weights.publish import CHUNK_ELEMENTS, WeightPublisher
from workers.weights.pull import BACKGROUND_NICE, WeightPuller
from workers.weights.updates import WeightUpdates, newest_manifest

RIGHT = b"the right secret"


def policy(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every awkward kind: larger than a chunk, a view, a scalar, an empty one, an integer buffer."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(64, 48, generator=generator)
    return {
        "embedding": torch.randn(CHUNK_ELEMENTS + 7, generator=generator),
        "transposed": base.T,
        "weight": torch.nn.Parameter(base.clone()),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "steps": torch.arange(5, dtype=torch.int64),
    }


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("weights-test", tmp_path, keep=2)
    yield publisher
    publisher.close()


def pulled(manifest: WeightManifest, puller: WeightPuller | None = None) -> dict[str, torch.Tensor]:
    with (puller or WeightPuller(limit=TimeLimit(10))).pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def only(manifest: WeightManifest, scheme: str) -> WeightManifest:
    return replace(manifest, sources=tuple(s for s in manifest.sources if s.startswith(scheme)))


@pytest.mark.parametrize("scheme", ["shm://", "tcp://"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_pulled_version_equals_the_published_one(publisher: WeightPublisher, scheme: str, dtype: torch.dtype) -> None:
    tensors = policy()
    manifest = manifest_decoder.decode(encode(publisher.publish(1, 0, tensors, dtype)))
    result = pulled(only(manifest, scheme))
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        assert result[name].dtype == expected.dtype
        assert torch.equal(result[name], expected)


def test_equal_weights_have_equal_digests_under_another_version(publisher: WeightPublisher) -> None:
    first = publisher.publish(1, 0, policy(), torch.bfloat16)
    again = publisher.publish(2, 1, policy(), torch.bfloat16)
    other = publisher.publish(2, 2, policy(seed=1), torch.bfloat16)
    assert first.weights.digest == again.weights.digest != other.weights.digest


def test_superseded_versions_go_and_the_kept_ones_stay(publisher: WeightPublisher) -> None:
    manifests = [publisher.publish(1, version, policy(version), torch.bfloat16) for version in range(3)]
    with pytest.raises(PeerUnavailableError, match="e1v0"):
        pulled(manifests[0])
    for version in (1, 2):
        assert torch.equal(pulled(manifests[version])["weight"], policy(version)["weight"].bfloat16())


def test_a_version_that_is_being_read_outlives_its_publisher(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, 0, policy(), torch.float32)
    with WeightPuller().pull(manifest) as tensors:
        publisher.close()
        assert torch.equal(tensors["embedding"], policy()["embedding"])


def test_the_next_source_is_asked_when_one_gives_wrong_bytes(publisher: WeightPublisher, tmp_path: Path) -> None:
    manifest = publisher.publish(1, 0, policy(), torch.float32)
    foreign = WeightPublisher("foreign", tmp_path)
    wrong = foreign.publish(1, 0, policy(seed=1), torch.float32)
    both = replace(manifest, sources=(*only(wrong, "shm://").sources, *only(manifest, "tcp://").sources))
    assert torch.equal(pulled(both)["weight"], policy()["weight"])
    with pytest.raises(ChecksumError, match="'embedding'"):
        pulled(replace(manifest, sources=wrong.sources))
    foreign.close()


def test_a_wrong_secret_and_a_foreign_manifest_are_named(tmp_path: Path) -> None:
    publisher = WeightPublisher("secret-test", tmp_path, endpoint=Endpoint(secret=RIGHT))
    manifest = publisher.publish(1, 0, policy(), torch.bfloat16)
    with pytest.raises(PeerRejectedError):
        pulled(only(manifest, "tcp://"), WeightPuller(secret=RIGHT[::-1], limit=TimeLimit(5)))
    assert pulled(only(manifest, "tcp://"), WeightPuller(secret=RIGHT))
    with pytest.raises(MessageError):
        pulled(replace(manifest, total_bytes=64))
    with pytest.raises(PeerUnavailableError, match="reached"):
        pulled(replace(manifest, host="another-host", sources=("shm://another-host/dev/shm/x", "tcp://127.0.0.1:9/x")))
    publisher.close()


def test_publishing_the_same_version_twice_is_a_bug(publisher: WeightPublisher) -> None:
    publisher.publish(1, 0, policy(), torch.bfloat16)
    with pytest.raises(ValueError, match="exists"):
        publisher.publish(1, 0, policy(), torch.bfloat16)


def test_a_source_that_is_no_address_is_passed_over(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, 0, policy(), torch.float32)
    assert pulled(replace(manifest, sources=("tcp://[", *manifest.sources)))
    with pytest.raises(MessageError, match="not an address"):
        pulled(replace(manifest, sources=("tcp://[",)))


LONG = 50_000 * (2**48,)


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": LONG},
        {"shape": (-1,)},
        {"shape": (2**49,)},
        {"offset": -64},
        {"nbytes": -4},
        {"name": 2000 * "n"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_tensor_that_cannot_be_is_refused_when_its_manifest_is_read(changed: dict[str, object]) -> None:
    spec = replace(plan_layout([("weight", (2, 3), "float32")])[0], **changed)
    manifest = WeightManifest(
        weights=WeightIdentity(epoch=1, version=0), tensors=(spec,), total_bytes=64, sources=(), host="h"
    )
    with pytest.raises(MessageError):
        manifest_decoder.decode(encode(manifest))
    with pytest.raises(MessageError):
        check_manifest(manifest)


def test_a_shape_that_no_tensor_has_is_refused_also_where_nothing_was_decoded() -> None:
    spec = plan_layout([("weight", (0, 3), "float32")])[0]
    check_manifest(manifest_of(spec))
    for shape, reason in (((0, 2**48, 2**48), "impossible shape"), (LONG, "50000 dimensions")):  # torch: RuntimeError
        with pytest.raises(MessageError, match=reason):
            check_manifest(manifest_of(replace(spec, shape=shape)))
    with pytest.raises(ValueError, match="9 dimensions"):
        plan_layout([("weight", (1,) * 9, "float32")])


def manifest_of(spec: TensorSpec) -> WeightManifest:
    weights = WeightIdentity(epoch=1, version=0, digest=digest_tensors([spec]))
    return WeightManifest(weights=weights, tensors=(spec,), total_bytes=64, sources=(), host="h")


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_what_nobody_waits_for_is_compared_at_low_priority(
    publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """And the rest of it as everything else, once somebody does."""
    published = publisher.publish(1, 1, policy(), torch.float32)
    manifest = replace(published, sources=tuple(s for s in published.sources if s.startswith(scheme)))
    usual, hurry, nices = os.getpriority(os.PRIO_PROCESS, 0), threading.Event(), list[int]()

    def noted(manifest: WeightManifest, piece: Piece, view: memoryview) -> None:
        nices.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        if len(nices) == 2:
            hurry.set()
        verify_piece(manifest, piece, view)

    monkeypatch.setattr(pull_module, "verify_piece", noted)
    before = threading.active_count()
    with WeightPuller(limit=TimeLimit(10)).pull(manifest, hurry=hurry) as tensors:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in policy().items())
        assert not [one for one in threading.enumerate() if one.name.startswith("check-weights")]
    assert (nices[:2], set(nices[2:])) == ([min(19, usual + BACKGROUND_NICE)] * 2, {usual})
    assert threading.active_count() <= before + (scheme == "tcp")  # the publisher's end of a connection
    hurry.clear()
    wrong = replace(manifest.tensors[0], checksum="crc32:00000000")
    wrong_digest = digest_tensors([wrong, *manifest.tensors[1:]])
    lying = replace(
        manifest,
        tensors=(wrong, *manifest.tensors[1:]),
        weights=replace(manifest.weights, digest=wrong_digest),
    )
    with pytest.raises(ChecksumError), WeightPuller(limit=TimeLimit(10)).pull(lying, hurry=hurry):
        pass


async def test_a_worker_passes_over_what_is_no_manifest_and_loads_the_next(publisher: WeightPublisher) -> None:
    server = MemoryServer()
    broker = MemoryBroker(server, RunName("run"))
    updates = WeightUpdates(
        broker, FakeEngine(), WeightPuller(limit=TimeLimit(10)), WorkerId("generate-0.1"), MonotonicClock()
    )
    good = publisher.publish(1, 1, policy(), torch.float32)
    bad = replace(good.tensors[0], shape=LONG)
    for payload in (b"\xff", encode(replace(good, tensors=(bad,))), encode(good)):
        await broker.append(keys.WEIGHTS, Entry(fields={}, payload=payload))
    assert isinstance(await updates.load(good.weights), WeightsLoaded)
    unreachable = replace(good, weights=replace(good.weights, version=2), sources=("tcp://[",))
    await broker.append(keys.WEIGHTS, Entry(fields={}, payload=encode(unreachable)))
    failed = await updates.load(unreachable.weights)
    assert isinstance(failed, WeightsFailed)
    assert "not an address" in failed.reason
    await broker.append(keys.WEIGHTS, Entry(fields={}, payload=b"\xff"))
    newest = await newest_manifest(broker)
    assert newest is not None
    assert newest[1].weights.version == 2
    await broker.close()


def publish_and_die(run_dir: Path, manifests: "multiprocessing.SimpleQueue[bytes]") -> None:
    publisher = WeightPublisher("mortal", run_dir)
    manifests.put(encode(publisher.publish(1, 4, policy(), torch.bfloat16)))
    os.kill(os.getpid(), 9)


def test_a_killed_trainer_leaves_no_torn_version(tmp_path: Path) -> None:
    context = preloaded()
    manifests = context.SimpleQueue()
    trainer = context.Process(target=publish_and_die, args=(tmp_path, manifests))
    trainer.start()
    manifest = manifest_decoder.decode(manifests.get())
    trainer.join(60)
    assert trainer.exitcode == -9
    assert torch.equal(pulled(manifest)["weight"], policy()["weight"].bfloat16())
    with pytest.raises(PeerUnavailableError):
        pulled(only(manifest, "tcp://"))
    successor = WeightPublisher("mortal", tmp_path)
    successor.publish(2, 4, policy(), torch.bfloat16)  # its first version sweeps what the dead one left
    with pytest.raises(PeerUnavailableError):
        pulled(manifest)
    successor.close()
