"""How a generation worker takes new weights, over the in-memory broker and a fake engine."""

import asyncio
import threading

import msgspec
import pytest

from tests.fakes.generation_world import ME, V1, V2, V3, World, running
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import (
    LoadWeights,
    RolloutFinished,
    WeightManifest,
    WeightsFailed,
    WeightsLoaded,
    WorkerReported,
)
from transport.contracts.settings import Settings
from transport.contracts.types import RunName, WeightIdentity
from transport.errors import ChecksumError, PeerUnavailableError
from transport.tensors import relay as relay_module
from transport.tensors.base import TimeLimit
from transport.tensors.manifest import digest_tensors, plan_layout, with_checksums
from transport.tensors.relay import Relay
from workers.commands.build import ServerChoice, generation_worker
from workers.errors import WeightsMismatchError
from workers.generation.emulated import EmulatedLink
from workers.weights import updates as updates_module


async def test_weights_are_pulled_loaded_and_told():
    async with running() as world:
        await world.manifest(V1, load=True)
        (loaded,) = await world.events(1)
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.weights == V1
        ((weights, tensors),) = world.engine.loaded
        assert (weights, tensors["w"].tolist()) == (V1, [1.0, 1.0])
        assert world.puller.held == []
        assert world.worker.activity().weights == V1
        await world.command(LoadWeights(worker_id=ME, weights=V1))  # what is served already is only said again
        await world.events(1)
        assert world.puller.pulled == [V1]


async def test_a_load_hurries_what_it_waits_for_and_nothing_after_it(monkeypatch: pytest.MonkeyPatch):
    async with running() as world:
        world.puller.slow = {V1: threading.Event(), V2: threading.Event()}
        await world.manifest(V1)
        await asyncio.to_thread(world.puller.wait_until, lambda: V1 in world.puller.coming)
        assert not world.puller.hurried
        monkeypatch.setattr(updates_module, "HURRY_S", 0.01)
        await world.command(LoadWeights(worker_id=ME, weights=V1))
        await asyncio.to_thread(world.puller.wait_until, lambda: world.puller.hurried)
        world.puller.slow[V1].set()
        await world.events(1)
        world.puller.hurried = False
        await world.manifest(V2)
        await asyncio.to_thread(world.puller.wait_until, lambda: V2 in world.puller.coming)
        world.puller.slow[V2].set()
        await world.until_held(V2)
        assert not world.puller.hurried


async def test_the_newest_version_is_brought_in_while_the_old_one_serves():
    async with running() as world:
        await world.manifest(V1, load=True)
        await world.events(1)
        for weights in (V2, V3):
            await world.manifest(weights)
            await world.until_held(weights)  # what it replaced is given back
        assert world.worker.activity().weights == V1
        await world.command(LoadWeights(worker_id=ME, weights=V3))
        (loaded,) = await world.events(1)
        assert (type(loaded), loaded.weights) == (WeightsLoaded, V3)
        assert world.puller.pulled == [V1, V2, V3], "not pulled again"
        assert world.puller.held == []


async def test_a_version_that_comes_slowly_is_given_up_for_the_next():
    async with running() as world:
        world.puller.slow[V1] = threading.Event()
        await world.manifest(V1)
        await world.until_coming(V1)
        await world.manifest(V1)  # of a broker that lost it: says nothing new
        await world.manifest(V2)
        await world.until_held(V2)
        assert world.puller.given_up == [V1]
        assert world.puller.pulled == [V2]


async def test_a_load_does_not_wait_for_older_weights_that_come_slowly():
    async with running() as world:
        world.puller.slow[V1] = threading.Event()
        await world.manifest(V1)
        await world.until_coming(V1)
        await world.command(LoadWeights(worker_id=ME, weights=V2))
        await world.until(lambda: world.puller.given_up == [V1])
        await world.manifest(V2)
        assert (await world.events(1))[0].weights == V2


async def test_what_a_load_waits_for_is_not_given_up_or_nothing_would_ever_be_loaded():
    async with running() as world:
        world.puller.slow[V1] = threading.Event()
        await world.manifest(V1)
        await world.until_coming(V1)
        await world.command(LoadWeights(worker_id=ME, weights=V1))
        await world.until(lambda: world.worker.activity().doing == "loading")
        await world.manifest(V2)
        await world.until(lambda: world.worker._updates._newest.weights == V2)
        world.puller.slow[V1].set()
        assert (await world.events(1))[0].weights == V1
        await world.until_held(V2)
        assert world.puller.pulled == [V1, V2]


async def test_a_worker_that_ends_waits_for_no_bytes():
    async with running() as world:
        world.puller.slow[V1] = threading.Event()
        await world.manifest(V1)
        await world.until_coming(V1)
    await world.until(lambda: world.puller.given_up == [V1])


async def test_a_relay_listens_before_its_worker_is_known_of(monkeypatch):
    monkeypatch.setattr(relay_module, "facing", lambda peer: "127.0.0.1" if peer == "memory" else "")
    relay = Relay(secret=b"a secret of more than sixteen bytes", limit=TimeLimit())
    async with running(relay=relay) as world:
        assert (await world.events(1, of=WorkerReported))[0].weights is None
        assert world.worker.activity().relay.startswith("tcp://127.0.0.1:")
    assert relay.address == ""


@pytest.mark.parametrize("broker", ["/run/streamrl/broker.sock", "127.0.0.1:6379", "localhost:6379", "::1:6379", "x"])
async def test_a_relay_does_not_listen_where_the_broker_says_nothing_of_its_network(broker):
    relay = Relay(secret=b"a secret of more than sixteen bytes", limit=TimeLimit())
    await asyncio.to_thread(relay.listen_facing, broker)
    assert relay.address == ""


async def test_an_emulated_worker_brings_versions_in_as_a_real_one(tmp_path):
    """Its relay passes them on, and a journey that is given up ends."""
    settings = msgspec.convert({"generation": {"engine": "emulated"}, "emulated": {"transfer_s": 600.0}}, Settings)
    broker = MemoryBroker(MemoryServer(), RunName("emulated"))
    worker = await generation_worker(
        broker, settings, ME, tmp_path, run_dir=tmp_path, trust_remote_code=False, secret=b"", server=ServerChoice()
    )
    link, given_up = worker._updates._puller, threading.Event()
    assert isinstance(link, EmulatedLink)
    assert link._puller._relay is worker._relay is not None
    tensors = with_checksums(plan_layout([("a", (16,), "float32")]), ["0" * 16])
    weights = WeightIdentity(epoch=1, version=1, digest=digest_tensors(tensors))
    manifest = WeightManifest(weights=weights, tensors=tensors, total_bytes=64, sources=("tcp://x:9/v",), host="there")
    given_up.set()
    with pytest.raises(PeerUnavailableError), link.pull(manifest, given_up=given_up):
        pass


async def test_what_was_brought_in_is_given_back_when_the_worker_ends():
    async with running() as world:
        await world.manifest(V1)
        await world.until_held(V1)
    await world.until_held()


async def test_a_load_waits_for_a_manifest_that_comes_late():
    async with running() as world:
        await world.command(LoadWeights(worker_id=ME, weights=V2))
        await world.events(2, of=WorkerReported)
        await world.broker.append(keys.WEIGHTS, Entry(payload=b"\xc1 nonsense"))
        await world.manifest(V1)
        await world.manifest(V2)
        (loaded,) = await world.events(1)
        assert loaded.weights == V2


async def test_a_manifest_that_never_comes_is_a_failure(monkeypatch):
    monkeypatch.setattr(updates_module, "MANIFEST_WAIT_S", 0.0)
    async with running() as world:
        await world.command(LoadWeights(worker_id=ME, weights=V2))
        (failed,) = await world.events(1)
        assert isinstance(failed, WeightsFailed)
        assert "no manifest of e1v2" in failed.reason


async def test_nobody_waits_for_a_manifest_that_a_newer_one_has_overtaken():
    """The broker lost it; its trainer, or the next one, announces only its newest again."""
    async with running() as world:
        await world.command(LoadWeights(worker_id=ME, weights=V1))
        await world.events(2, of=WorkerReported)
        await world.manifest(V2, load=True)
        failed, loaded = await world.events(2)
        assert isinstance(failed, WeightsFailed)
        assert "no manifest of e1v1, only of newer ones" in failed.reason
        assert isinstance(loaded, WeightsLoaded)
        assert loaded.weights == V2


@pytest.mark.parametrize("where", ["puller", "engine"])
async def test_weights_that_do_not_load_are_told_and_the_old_ones_stay(where):
    async with running() as world:
        await world.manifest(V1, load=True)
        await world.events(1)
        if where == "puller":
            world.puller.error = ChecksumError("bytes of w are wrong")
        else:
            world.engine.load_error = WeightsMismatchError("missing: w")
        await world.manifest(V2)
        if where == "engine":
            await world.until_held(V2)
        await world.command(LoadWeights(worker_id=ME, weights=V2))
        (failed,) = await world.events(1)
        assert isinstance(failed, WeightsFailed)
        assert failed.weights == V2
        assert failed.permanent == (where == "engine"), "bytes may come right the next time, shapes do not"
        assert "w" in failed.reason
        assert world.worker.activity().weights == V1
        assert world.puller.held == []


async def test_of_several_loads_at_once_only_the_last_is_taken():
    world = World(4)
    for weights in (V1, V2):
        await world.manifest(weights, load=True)
    task = asyncio.create_task(world.worker.run())
    (loaded,) = await world.events(1)
    assert loaded.weights == V2
    assert world.puller.pulled == [V2], "it is the only one that is brought in, too"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_unreadable_command_is_skipped():
    async with running() as world:
        await world.broker.append(keys.control(ME), Entry(payload=b"\xc1"))
        await world.manifest(V1, load=True)
        assert isinstance((await world.events(1))[0], WeightsLoaded)


async def test_an_unreachable_source_leaves_the_worker_at_work():
    async with running() as world:
        await world.manifest(V1)
        world.puller.error = PeerUnavailableError("tcp://there", "gone")
        await world.command(LoadWeights(worker_id=ME, weights=V1))
        (failed,) = await world.events(1)
        assert "gone" in failed.reason
        request = await world.asked(0)
        world.engine.finish(request, 0)
        assert isinstance((await world.events(1))[0], RolloutFinished)


async def test_a_load_that_says_so_ends_fp8_first_and_loads_all_the_same():
    async with running() as world:
        await world.manifest(V1)
        await world.command(LoadWeights(worker_id=ME, weights=V1, full_precision="too far off"))
        (loaded,) = await world.events(1)
        assert isinstance(loaded, WeightsLoaded)
        assert (world.engine.full_precision, world.engine.weights) == (["too far off"], V1)
