"""Weights over a network that breaks, lies or stalls: what came stays, what was wrong comes again, no memory grows."""

import gc
import multiprocessing
import os
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from msgspec.structs import replace

from tests.fakes.engine import FakeEngine
from tests.fakes.host_memory import peak_memory
from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import (
    MessageDecoder,
    WeightManifest,
    WeightsFailed,
    WeightsLoaded,
    encode,
    manifest_decoder,
)
from transport.contracts.types import RunName, WeightIdentity, WorkerId
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.tensors.base import Deadline, Endpoint, TimeLimit, host_id, parse_address
from transport.tensors.manifest import (
    digest_tensors,
    layout_bytes,
    part_bytes,
    plan_layout,
    single_part,
    with_checksums,
)
from transport.tensors.receive import available_bytes
from transport.tensors.tcp import RangeFollows, ReadRange
from transport.tensors.wire import Channel, ChannelServer, Refused, connect
from workers.generation.server.upkeep import hold
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller
from workers.weights.updates import WeightUpdates

NUM_TENSORS, TENSOR_BYTES = 16, 1 << 20


def policy() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"t{n}": torch.randn(TENSOR_BYTES // 4, generator=generator) for n in range(NUM_TENSORS)}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("received", tmp_path, endpoint=Endpoint(limit=TimeLimit(1.0, 1e6)))
    yield publisher
    publisher.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tensor-")]


@pytest.fixture
def manifest(publisher: WeightPublisher) -> WeightManifest:
    """Of a version that only travels."""
    published = publisher.publish(1, 0, policy(), torch.float32)
    return replace(published, sources=tuple(s for s in published.sources if s.startswith("tcp")))


def content_of(publisher: WeightPublisher, manifest: WeightManifest) -> bytes:
    file = publisher._store.sealed(parse_address(manifest.sources[0]).path)
    assert file is not None
    return bytes(file.view)


class Relay:
    """A source whose answers are made up; notes what it was asked for and what it gave."""

    def __init__(self, answer: Callable[[Channel, ReadRange], int]) -> None:
        self.asked: list[ReadRange] = []
        self.given: list[int] = []
        self._answer = answer
        self._server = ChannelServer(self._serve, Endpoint(), request_s=5)
        self.address = f"tcp://127.0.0.1:{self._server.start()}/v"

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(MessageDecoder(ReadRange))
        self.asked.append(request)
        channel.send(RangeFollows(nbytes=request.nbytes))
        self.given.append(self._answer(channel, request))

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def relay() -> Iterator[Callable[[Callable[[Channel, ReadRange], int]], Relay]]:
    relays: list[Relay] = []

    def start(answer: Callable[[Channel, ReadRange], int]) -> Relay:
        relays.append(Relay(answer))
        return relays[-1]

    yield start
    for one in relays:
        one.close()


def give(channel: Channel, data: memoryview) -> int:
    done = 0
    while done < data.nbytes:
        done += channel._socket.send(data[done:])
    return done


def pulled(manifest: WeightManifest, wait_s: float = 10) -> dict[str, torch.Tensor]:
    with WeightPuller(limit=TimeLimit(wait_s)).pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_right(tensors: dict[str, torch.Tensor]) -> None:
    expected = policy()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def serve_some(content: bytes, nbytes: int, address: "multiprocessing.SimpleQueue[str]") -> None:
    """Kills itself after so many bytes of an answer."""

    def serve(channel: Channel) -> None:
        request = channel.receive(MessageDecoder(ReadRange))
        channel.send(RangeFollows(nbytes=request.nbytes))
        give(channel, memoryview(content)[request.offset : request.offset + nbytes])
        while True:  # what was sent has to be read first: a kill drops what the kernel still holds
            unread = bytearray(4)
            import fcntl
            import termios

            fcntl.ioctl(channel._socket, termios.TIOCOUTQ, unread)
            if not any(unread):
                os.kill(os.getpid(), 9)

    server = ChannelServer(serve, Endpoint(), request_s=10)
    address.put(f"tcp://127.0.0.1:{server.start()}/v")
    threading.Event().wait(60)


def test_another_source_goes_on_at_the_byte_where_a_killed_one_stopped(publisher, manifest, relay) -> None:
    content = content_of(publisher, manifest)
    stop = random.Random(os.environ.get("STREAMRL_SEED")).randrange(1, len(content))
    context = multiprocessing.get_context("fork")
    addresses = context.SimpleQueue()
    sender = context.Process(target=serve_some, args=(content, stop, addresses))
    sender.start()
    other = relay(lambda channel, ask: give(channel, memoryview(content)[ask.offset : ask.offset + ask.nbytes]))
    try:
        assert_right(pulled(replace(manifest, sources=(addresses.get(), other.address))))
    finally:
        sender.join(30)
    assert sender.exitcode == -9
    assert [(ask.offset, ask.nbytes) for ask in other.asked] == [(stop, manifest.total_bytes - stop)]


def test_a_wrong_byte_makes_one_piece_come_again_from_another_source(publisher, manifest, relay) -> None:
    content = content_of(publisher, manifest)
    torn = bytearray(content)
    wrong = manifest.tensors[5]
    torn[wrong.offset + 12345] ^= 1
    liar = relay(lambda channel, ask: give(channel, memoryview(torn)[ask.offset : ask.offset + ask.nbytes]))
    other = relay(lambda channel, ask: give(channel, memoryview(content)[ask.offset : ask.offset + ask.nbytes]))
    assert_right(pulled(replace(manifest, sources=(liar.address, other.address))))
    assert [(ask.offset, ask.nbytes) for ask in other.asked] == [(wrong.offset, wrong.nbytes)]
    with pytest.raises(ChecksumError, match=wrong.name):
        pulled(replace(manifest, sources=(liar.address,)))
    assert {(ask.offset, ask.nbytes) for ask in liar.asked[2:]} == {(wrong.offset, wrong.nbytes)}


def test_a_mapped_version_with_a_wrong_byte_is_mended_and_what_a_server_holds_is_the_mended_one(
    publisher: WeightPublisher, relay
) -> None:
    manifest = publisher.publish(1, 1, policy(), torch.float32)
    content = content_of(publisher, replace(manifest, sources=manifest.sources[1:2]))
    wrong = manifest.tensors[3]
    with (Path("/") / parse_address(manifest.sources[0]).path).open("r+b") as file:
        file.seek(wrong.offset)
        file.write(bytes(8))
    good = relay(lambda channel, ask: give(channel, memoryview(content)[ask.offset : ask.offset + ask.nbytes]))
    mixed = replace(manifest, sources=(manifest.sources[0], good.address))
    with WeightPuller().pull(mixed) as tensors:
        assert_right({name: tensor.clone() for name, tensor in tensors.items()})
        held = hold(manifest.weights, tensors)
    assert [(ask.offset, ask.nbytes) for ask in good.asked] == [(wrong.offset, wrong.nbytes)]
    assert os.pread(held.fd, wrong.nbytes, wrong.offset) == policy()[wrong.name].numpy().tobytes()
    held.close()


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-1, 8), (0, -8), (0, 1 << 40), (1 << 62, 1 << 62), (-(1 << 40), 1 << 40)],
    ids=["negative offset", "negative size", "1 TB", "overflow", "before"],
)
def test_a_range_that_is_not_there_is_refused_by_name_and_the_connection_closed(
    manifest: WeightManifest, offset: int, nbytes: int
) -> None:
    address = parse_address(manifest.sources[0])
    channel = connect(address.place, address.port, str(address), b"", Deadline(10))
    ask = ReadRange(segment=address.path, segment_bytes=manifest.total_bytes, offset=offset, nbytes=nbytes)
    assert f"has {manifest.total_bytes} bytes" in channel.ask(ask, MessageDecoder(Refused)).reason
    with pytest.raises(PeerUnavailableError):
        channel.receive(MessageDecoder(Refused))
    channel.close()
    assert_right(pulled(manifest))


def test_a_receiver_that_stops_reading_is_dropped_at_the_deadline(publisher: WeightPublisher) -> None:
    manifest = publisher.publish(1, 1, {"t": torch.zeros(16 << 20)}, torch.float32)  # more than sockets' buffers hold
    address = parse_address(manifest.sources[1])
    channel = connect(address.place, address.port, str(address), b"", Deadline(30))
    nbytes = manifest.total_bytes
    channel.send(ReadRange(segment=address.path, segment_bytes=nbytes, offset=0, nbytes=nbytes))
    [serving] = [one for one in threading.enumerate() if one.name.startswith("tensor-connection-")]
    serving.join(30)  # reads nothing
    assert not serving.is_alive()
    with pytest.raises(PeerUnavailableError):
        channel.receive_into(memoryview(bytearray(nbytes)))
    channel.close()


def test_a_sender_that_stalls_is_left_for_another_at_the_same_byte(publisher, manifest, relay) -> None:
    content, given_up = content_of(publisher, manifest), threading.Event()

    def stall(channel: Channel, ask: ReadRange) -> int:
        done = give(channel, memoryview(content)[:1000])
        given_up.wait(30)
        return done

    def go_on(channel: Channel, ask: ReadRange) -> int:
        given_up.set()
        return give(channel, memoryview(content)[ask.offset : ask.offset + ask.nbytes])

    sources = (relay(stall).address, (other := relay(go_on)).address)
    assert_right(pulled(replace(manifest, sources=sources), wait_s=1))
    assert other.asked[0].offset == 1000


def test_of_a_version_withdrawn_while_it_is_pulled_nothing_is_given(publisher, manifest, relay) -> None:
    content = content_of(publisher, manifest)

    def cut(channel: Channel, ask: ReadRange) -> int:
        if not ask.offset:  # the first time
            publisher._store.drop(parse_address(manifest.sources[0]).path)
            give(channel, memoryview(content)[:100_000])
        raise PeerUnavailableError("relay", "gone")

    with pytest.raises(PeerUnavailableError, match="no segment"):
        pulled(replace(manifest, sources=(relay(cut).address, *manifest.sources)))


def test_a_truncated_manifest_and_a_wrong_secret_are_named(manifest: WeightManifest) -> None:
    raw = encode(manifest)
    for length in (0, 1, len(raw) // 2, len(raw) - 1):
        with pytest.raises(MessageError):
            manifest_decoder.decode(raw[:length])
    with pytest.raises(MessageError):
        pulled(replace(manifest, tensors=manifest.tensors[:-1]))
    with pytest.raises(PeerRejectedError), WeightPuller(secret=b"0123456789abcdef").pull(manifest):
        pass


def of_one_tensor(num_elements: int) -> WeightManifest:
    """Consistent, of zeros as far as anyone can tell without their bytes."""
    (spec,) = plan_layout([("huge", (num_elements,), "float32")])
    specs = with_checksums([spec], ["crc32:00000000"])
    return WeightManifest(
        weights=WeightIdentity(epoch=1, version=7, digest=digest_tensors(specs)),
        tensors=specs,
        total_bytes=layout_bytes(specs),
        sources=("tcp://127.0.0.1:9/v",),
        host=host_id(),
    )


def test_a_version_that_no_memory_here_can_hold_is_refused_before_any_is_taken(manifest: WeightManifest) -> None:
    puller = WeightPuller(limit=TimeLimit(5))
    before = set(os.listdir("/proc/self/fd"))
    for num_elements in (1 << 38, 1 << 48):  # 1 TiB, and as many as a manifest can have
        with pytest.raises(MessageError, match="there is memory for"), puller.pull(of_one_tensor(num_elements)):
            pass
    assert set(os.listdir("/proc/self/fd")) == before
    with puller.pull(manifest) as tensors:
        assert_right({name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8 << 20),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": "max"}, 8 << 20),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": "5000",
                "sys/fs/cgroup/a/memory.current": "3000",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 20\nactive_file 100",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": "2000",
            },
            2120,
        ),
        (
            {
                "proc/self/cgroup": "9:cpu:/\n4:memory,other:/not/seen/here",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000",
            },
            1000,
        ),
    ],
    ids=["no groups", "no limit", "limit above", "first version, in a container"],
)
def test_memory_is_what_the_machine_and_its_control_groups_leave(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8192 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == available


def test_memory_of_an_unknown_machine_is_not_bounded(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > 1 << 60
    assert available_bytes() < psutil.virtual_memory().total


async def test_a_worker_reports_manifests_that_are_cut_or_huge_and_loads_the_next(manifest: WeightManifest) -> None:
    broker = MemoryBroker(MemoryServer(), RunName("run"))
    engine = FakeEngine()
    updates = WeightUpdates(
        broker, engine, WeightPuller(limit=TimeLimit(10)), WorkerId("generate-0.1"), MonotonicClock()
    )
    raw, huge = encode(manifest), of_one_tensor(1 << 38)
    for payload in (encode(huge), raw[: len(raw) // 2], raw[:-1], raw):
        await broker.append(keys.WEIGHTS, Entry(fields={}, payload=payload))
    failed = await updates.load(huge.weights)
    assert isinstance(failed, WeightsFailed)
    assert "there is memory for" in failed.reason
    assert updates.served is None
    assert isinstance(await updates.load(manifest.weights), WeightsLoaded)
    assert updates.served == manifest.weights
    await broker.close()


@pytest.mark.parametrize("wrong", [False, True], ids=["silence", "wrong bytes"])
def test_memory_of_a_pull_that_failed_goes_with_its_last_user_and_waits_for_no_collector(
    publisher, manifest, relay, wrong: bool
) -> None:
    content = bytearray(content_of(publisher, manifest))
    content[0] ^= 1
    liar = relay(lambda channel, ask: give(channel, memoryview(content)[ask.offset : ask.offset + ask.nbytes]))
    sources = (liar.address,) if wrong else ("tcp://127.0.0.1:9/v",)
    parts = replace(manifest, sources=sources, parts=(replace(single_part(manifest), sources=sources),))
    puller = WeightPuller(limit=TimeLimit(5))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((PeerUnavailableError, ChecksumError)) as raised, puller.pull(parts):
            pass
        assert puller._spare is not None
        memory = weakref.ref(puller._spare)
        del puller, raised
        assert memory() is None
    finally:
        gc.enable()


def test_what_came_from_the_whole_version_is_not_asked_of_its_parts_again(publisher, manifest, relay) -> None:
    content = content_of(publisher, manifest)
    stop = manifest.tensors[9].offset + 1000

    def cut(channel: Channel, ask: ReadRange) -> int:
        give(channel, memoryview(content)[ask.offset : max(ask.offset, stop)])
        raise PeerUnavailableError("relay", "gone")

    one = single_part(manifest)
    halves, rest = [], relay(lambda channel, ask: give(channel, memoryview(content)[ask.offset :][: ask.nbytes]))
    for pieces in (one.pieces[:5], one.pieces[5:]):
        nbytes = part_bytes(manifest.tensors, pieces)
        halves.append(replace(one, pieces=pieces, total_bytes=nbytes, sources=(rest.address,)))
    assert_right(pulled(replace(manifest, sources=(relay(cut).address,), parts=tuple(halves))))
    assert [(ask.offset, ask.nbytes) for ask in rest.asked] == [
        (manifest.tensors[9].offset, manifest.total_bytes - manifest.tensors[9].offset)
    ]


def read_and_die(manifest: bytes, nbytes: int) -> None:
    """Take so many bytes of a version, and be killed."""
    wanted = manifest_decoder.decode(manifest)
    address = parse_address(wanted.sources[0])
    channel = connect(address.place, address.port, str(address), b"", Deadline(30))
    request = ReadRange(segment=address.path, segment_bytes=wanted.total_bytes, offset=0, nbytes=wanted.total_bytes)
    channel.ask(request, MessageDecoder(RangeFollows))
    channel.receive_into(memoryview(bytearray(nbytes)))
    os.kill(os.getpid(), 9)


def test_receivers_that_are_killed_at_any_byte_cost_the_others_and_the_sender_nothing(manifest) -> None:
    dice = random.Random(os.environ.get("STREAMRL_SEED"))
    context = multiprocessing.get_context("fork")
    assert_right(pulled(manifest))
    before = sorted(os.listdir("/proc/self/fd"))
    stops = [0, *(dice.randrange(manifest.total_bytes) for _ in range(5))]
    dying = [context.Process(target=read_and_die, args=(encode(manifest), stop)) for stop in stops]
    for process in dying:
        process.start()
    assert_right(pulled(manifest))
    for process in dying:
        process.join(30)
    assert [process.exitcode for process in dying] == [-9] * len(dying), stops
    for process in dying:
        process.close()
    assert_right(pulled(manifest))
    for thread in threading.enumerate():  # of their connections
        if thread.name.startswith("tensor-connection-"):
            thread.join(30)
            assert not thread.is_alive(), stops
    assert sorted(os.listdir("/proc/self/fd")) == before, stops


def test_nothing_is_left_of_pulls_that_went_well_or_ill(manifest: WeightManifest) -> None:
    puller = WeightPuller(limit=TimeLimit(5))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"tcp://127.0.0.1:{taken.getsockname()[1]}/v"

    def pull_all() -> None:
        with puller.pull(manifest) as tensors:
            assert torch.equal(tensors["t1"], policy()["t1"])
        with pytest.raises(PeerUnavailableError), puller.pull(replace(manifest, sources=(closed,))):
            pass

    pull_all()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        pull_all()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1  # the server's end of the last connection may close late


def peak_of(manifest: bytes, result: "multiprocessing.SimpleQueue[float]", keep: bool) -> None:
    """Pull three versions; the most memory meanwhile over bytes of a version."""
    wanted, puller, held = manifest_decoder.decode(manifest), WeightPuller(), None
    with peak_memory() as peak:
        for _ in range(3):
            with puller.pull(wanted) as tensors:
                now = hold(wanted.weights, tensors) if keep else None
                peak.look()
            del tensors
            if held:
                held.close()
            held = now
    result.put(peak.num_bytes / wanted.total_bytes)


@pytest.mark.parametrize(("keep", "limit"), [(False, 1.2), (True, 2.2)], ids=["embedded", "server"])
def test_a_worker_holds_one_version_and_a_piece_while_it_receives_another(
    publisher: WeightPublisher, keep: bool, limit: float
) -> None:
    """The worker of a server beside it the version that the server would be given if it had to start again."""
    tensors = {f"t{n}": torch.zeros(1 << 20) + n for n in range(32)}
    published = publisher.publish(1, 1, tensors, torch.float32)
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    manifest = encode(replace(published, sources=published.sources[1:2]))
    worker = context.Process(target=peak_of, args=(manifest, result, keep))
    worker.start()
    copies = result.get()
    worker.join(30)
    print(f"peak_copies {copies:.3f}")
    assert copies <= limit
