"""Weights passed on from worker to worker: while they come in, past a relay that dies, and never what is not theirs."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.engine import FakeEngine
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.preloaded import preloaded
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import MessageDecoder, WeightManifest, WeightsLoaded, encode, manifest_decoder
from transport.contracts.types import RunName, WeightIdentity, WorkerId
from transport.errors import PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.tensors.base import Deadline, Endpoint, TimeLimit, parse_address
from transport.tensors.receive import Memory
from transport.tensors.relay import Relay, Relayed, relayed_address
from transport.tensors.tcp import RangeFollows, ReadRange, TcpReader, Waits
from transport.tensors.ucx import is_installed
from transport.tensors.wire import Channel, ChannelServer
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller
from workers.weights.updates import WeightUpdates

NUM_TENSORS, TENSOR_BYTES = 16, 1 << 20
WAIT_S = 60.0
LIMIT = TimeLimit(WAIT_S)


needs_ucx = pytest.param(True, marks=pytest.mark.skipif(not is_installed(), reason="extra ucx is not installed"))


def policy(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{n}": torch.randn(TENSOR_BYTES // 4, generator=generator) for n in range(NUM_TENSORS)}


@pytest.fixture(autouse=True)
def hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for workers of several hosts: nobody maps another's memory (tests/integration/test_shared_weights.py)."""
    monkeypatch.setattr(Channel, "is_local", False)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("relayed", tmp_path, endpoint=Endpoint(limit=LIMIT))
    yield publisher
    publisher.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tensor-")]


class Trainer:
    """Sends what it is asked for up to byte ``gate`` of a version, and the rest once ``opened`` is set."""

    def __init__(self, publisher: WeightPublisher, version: int, gate: int | None = None) -> None:
        published = publisher.publish(1, version, policy(version), torch.float32)
        file = publisher._store.sealed(parse_address(published.sources[-1]).path)
        assert file is not None
        self._content = memoryview(bytes(file.view))
        self._gate = len(self._content) if gate is None else gate
        self.opened, self.stopped = threading.Event(), threading.Event()
        self.asked: list[ReadRange] = []
        self._server = ChannelServer(self._serve, Endpoint(), request_s=5)
        self.source = f"tcp://127.0.0.1:{self._server.start()}/v{version}"
        self.manifest = replace(published, sources=(self.source,))

    def _serve(self, channel: Channel) -> None:
        request = channel.receive(MessageDecoder(ReadRange))
        channel.deadline = Deadline(WAIT_S)
        self.asked.append(request)
        channel.send(RangeFollows(nbytes=request.nbytes))
        end = request.offset + request.nbytes
        at_gate = max(request.offset, min(end, self._gate))
        channel.send_view(self._content[request.offset : at_gate])
        if at_gate < end:
            self.stopped.set()
            if self.opened.wait(WAIT_S):
                channel.send_view(self._content[at_gate:end])

    @property
    def num_asked_bytes(self) -> int:
        return sum(request.nbytes for request in self.asked)

    def close(self) -> None:
        self.opened.set()
        self._server.close()


@pytest.fixture
def trainer(publisher: WeightPublisher) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(version: int, gate: int | None = None) -> Trainer:
        made.append(Trainer(publisher, version, gate))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(ucx: bool = False) -> Relay:
        made.append(Relay(secret=b"", limit=LIMIT, ucx=ucx))
        return made[-1]

    yield make
    for one in made:
        one.close()


def behind(manifest: WeightManifest, *relays: str) -> WeightManifest:
    """For who asks ``relays`` first."""
    return replace(manifest, sources=(*(relayed_address(one, manifest.weights) for one in relays), *manifest.sources))


def pulled(puller: WeightPuller, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with puller.pull(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_right(tensors: dict[str, torch.Tensor], version: int) -> None:
    expected = policy(version)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_three_workers_in_a_row_have_a_version_that_its_trainer_sent_once(trainer, relay) -> None:
    relays = [relay() for _ in range(3)]
    pullers = [WeightPuller(limit=LIMIT, relay=one) for one in relays]
    first = trainer(1)
    for puller in pullers:  # a relay begins with the first version that came over a network
        assert_right(pulled(puller, first.manifest), 1)
    second = trainer(2, gate=NUM_TENSORS // 2 * TENSOR_BYTES)
    routes = [(), (relays[0].address,), (relays[1].address, relays[0].address)]
    with ThreadPoolExecutor(3) as threads:
        pulls = [
            threads.submit(pulled, puller, behind(second.manifest, *route))
            for puller, route in zip(pullers, routes, strict=True)
        ]
        assert second.stopped.wait(WAIT_S)
        there = TcpReader().open(  # half of it is all the way down before the trainer has sent the rest
            parse_address(relayed_address(relays[2].address, second.manifest.weights)),
            second.manifest.total_bytes,
            Deadline(WAIT_S),
        )
        there.ask(0, 4 * TENSOR_BYTES)
        quarter = memoryview(bytearray(4 * TENSOR_BYTES))
        came = 0
        while came < quarter.nbytes:
            came += there.read(quarter[came:])
        there.close()
        assert not second.opened.is_set()
        second.opened.set()
        for pull in pulls:
            assert_right(pull.result(WAIT_S), 2)
    assert quarter == b"".join(policy(2)[f"t{n}"].numpy().tobytes() for n in range(4))
    assert second.num_asked_bytes == second.manifest.total_bytes


def pass_on(first: bytes, routes: "multiprocessing.Queue[bytes]", addresses: "multiprocessing.Queue[str]") -> None:
    """A process that passes weights on, until it is killed."""
    relay = Relay(secret=b"", limit=LIMIT)
    puller = WeightPuller(limit=LIMIT, relay=relay)
    pulled(puller, manifest_decoder.decode(first))
    addresses.put(relay.address)
    pulled(puller, manifest_decoder.decode(routes.get(timeout=WAIT_S)))


def test_who_pulled_from_a_killed_worker_goes_on_elsewhere_with_what_it_has(trainer) -> None:
    context = preloaded()
    routes, addresses = context.Queue(), context.Queue()
    process = context.Process(target=pass_on, args=(encode(trainer(1).manifest), routes, addresses), daemon=True)
    process.start()
    try:
        second = trainer(2, gate=NUM_TENSORS // 2 * TENSOR_BYTES)
        address = addresses.get(timeout=WAIT_S)
        routes.put(encode(second.manifest))
        assert second.stopped.wait(WAIT_S)
        with ThreadPoolExecutor(1) as threads:
            half = threads.submit(read_half, address, second.manifest)  # what it has of it can be had by now
            half.result(WAIT_S)
            pull = threads.submit(pulled, WeightPuller(limit=LIMIT), behind(second.manifest, address))
            half_through(address, second)
            os.kill(process.pid or 0, signal.SIGKILL)
            second.opened.set()
            assert_right(pull.result(WAIT_S), 2)
    finally:
        process.kill()
        process.join()
    assert [request.offset > 0 for request in second.asked] in ([False], [False, True], [False, False])
    assert second.num_asked_bytes <= 2 * second.manifest.total_bytes


def read_half(address: str, manifest: WeightManifest) -> None:
    there = TcpReader().open(
        parse_address(relayed_address(address, manifest.weights)), manifest.total_bytes, Deadline(WAIT_S)
    )
    try:
        there.ask(0, NUM_TENSORS // 4 * TENSOR_BYTES)
        rest = memoryview(bytearray(NUM_TENSORS // 4 * TENSOR_BYTES))
        while rest.nbytes:
            rest = rest[there.read(rest) :]
    finally:
        there.close()


def half_through(address: str, second: Trainer) -> None:
    """Until as much as the relay has could have been taken from it by one more."""
    read_half(address, second.manifest)


def test_a_version_that_a_relay_left_behind_comes_from_the_trainer_at_once(trainer, relay) -> None:
    one = relay()
    puller = WeightPuller(limit=LIMIT, relay=one)
    old = trainer(1)
    assert_right(pulled(puller, old.manifest), 1)
    assert_right(pulled(puller, trainer(2).manifest), 2)
    asked = len(old.asked)
    assert_right(pulled(WeightPuller(limit=LIMIT), behind(old.manifest, one.address)), 1)
    assert len(old.asked) == asked + 1


def test_memory_that_somebody_still_reads_is_not_written_to(trainer, relay) -> None:
    one = relay()
    puller = WeightPuller(limit=LIMIT, relay=one)
    first = trainer(1)
    assert_right(pulled(puller, first.manifest), 1)
    slow = TcpReader().open(
        parse_address(relayed_address(one.address, first.manifest.weights)),
        first.manifest.total_bytes,
        Deadline(WAIT_S),
    )
    slow.ask(0, first.manifest.total_bytes)
    data = memoryview(bytearray(first.manifest.total_bytes))
    came = slow.read(data[:1])
    assert_right(pulled(puller, trainer(2).manifest), 2)
    while came < data.nbytes:
        came += slow.read(data[came:])
    slow.close()
    assert data == b"".join(policy(1)[f"t{n}"].numpy().tobytes() for n in range(NUM_TENSORS))


def test_memory_that_is_read_stays_so_where_the_next_version_came_while_it_was_open(trainer, relay) -> None:
    one = relay()
    puller = WeightPuller(limit=LIMIT, relay=one)
    first = trainer(1)
    into = memoryview(bytearray(first.manifest.total_bytes))
    with puller.pull(first.manifest):
        slow = TcpReader().open(
            parse_address(relayed_address(one.address, first.manifest.weights)),
            first.manifest.total_bytes,
            Deadline(WAIT_S),
        )
        slow.ask(0, first.manifest.total_bytes)
        came = slow.read(into[:1])
        with puller.pull(trainer(2).manifest):
            pass
    assert_right(pulled(puller, trainer(3).manifest), 3)
    while came < into.nbytes:
        came += slow.read(into[came:])
    slow.close()
    assert into == b"".join(policy(1)[f"t{n}"].numpy().tobytes() for n in range(NUM_TENSORS))


def test_memory_of_which_a_send_failed_is_not_received_into_again() -> None:
    memory = Memory(64)
    relayed = Relayed(WeightIdentity(epoch=1, version=1), memory, [(0, 64)])
    for failed in (False, True):
        assert not memory.kept
        assert relayed.enter()
        relayed.leave(failed=failed)
    assert memory.kept


def test_a_relay_that_was_closed_does_not_listen_again() -> None:
    one = Relay(secret=b"", limit=LIMIT)
    one.close()
    one.listen("127.0.0.1")
    assert one.address == ""


def test_a_relay_whose_own_source_failed_refuses_instead_of_waiting(trainer, relay, publisher) -> None:
    one = relay()
    puller = WeightPuller(limit=TimeLimit(2.0), relay=one)
    assert_right(pulled(puller, trainer(1).manifest), 1)
    second = trainer(2)
    with pytest.raises(PeerUnavailableError):
        pulled(puller, replace(second.manifest, sources=("tcp://127.0.0.1:9/v",)))
    assert_right(pulled(WeightPuller(limit=LIMIT), behind(second.manifest, one.address)), 2)
    assert second.num_asked_bytes == second.manifest.total_bytes


@pytest.mark.parametrize("request_", [(0, 1 << 40), (-1, 8), (8, -1)])
def test_a_relay_gives_nothing_outside_of_its_version(trainer, relay, request_: tuple[int, int]) -> None:
    one = relay()
    manifest = trainer(1).manifest
    pulled(WeightPuller(limit=LIMIT, relay=one), manifest)
    address = parse_address(relayed_address(one.address, manifest.weights))
    segment = TcpReader().open(address, manifest.total_bytes, Deadline(WAIT_S))
    with pytest.raises(Exception, match="bytes"):
        segment.ask(*request_)
    segment.close()


def test_a_worker_that_cannot_be_reached_is_asked_once_and_then_last(trainer, relay) -> None:
    gone = relay()
    puller = WeightPuller(limit=LIMIT)
    gone.listen("127.0.0.1")
    address = gone.address
    gone.close()
    first, second = trainer(1), trainer(2)
    assert_right(pulled(puller, behind(first.manifest, address)), 1)
    assert asked_by(puller, lambda: assert_right(pulled(puller, behind(second.manifest, address)), 2)) == [
        second.source
    ]


def asked_by(puller: WeightPuller, pulls: Callable[[], None]) -> list[str]:
    """Which addresses are opened."""
    tried: list[str] = []
    reader = puller._readers["tcp"]
    opened = reader.open
    reader.open = lambda at, *more: (tried.append(str(at)), opened(at, *more))[1]  # type: ignore[method-assign]
    pulls()
    return tried


def test_workers_that_never_answer_leave_time_for_the_trainer_and_their_host_is_asked_last(trainer) -> None:
    puller = WeightPuller(limit=TimeLimit(3.0, 1e6))
    first, second = trainer(1), trainer(2)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.2", 0))) for _ in range(7)]
        addresses = [f"tcp://127.0.0.2:{one.getsockname()[1]}" for one in silent]
        assert_right(pulled(puller, behind(first.manifest, *addresses[:6])), 1)
        assert asked_by(puller, lambda: assert_right(pulled(puller, behind(second.manifest, addresses[6])), 2)) == [
            second.source
        ]


def test_a_pull_that_is_given_up_ends_with_the_next_bytes_and_blames_no_source(trainer) -> None:
    slow, given_up = trainer(1, gate=NUM_TENSORS // 2 * TENSOR_BYTES), threading.Event()
    puller = WeightPuller(limit=LIMIT)

    def give_up() -> None:
        assert slow.stopped.wait(WAIT_S)
        given_up.set()
        slow.opened.set()

    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(give_up)
        with pytest.raises(PeerUnavailableError), puller.pull(slow.manifest, given_up=given_up):
            pass
        ended.result()
    assert len(slow.asked) == 1
    assert not puller._away
    assert_right(pulled(puller, trainer(2).manifest), 2)


@contextlib.contextmanager
def answering(serve: Callable[[Channel, ReadRange], None]) -> Iterator[str]:
    """A worker that shakes hands and takes requests, and then does as ``serve`` does."""
    server = ChannelServer(
        lambda channel: serve(channel, channel.receive(MessageDecoder(ReadRange))), Endpoint(), request_s=5
    )
    try:
        yield f"tcp://127.0.0.1:{server.start()}"
    finally:
        server.close()


async def loaded(manifest: WeightManifest, limit: TimeLimit) -> list[tuple[WeightIdentity, Mapping[str, torch.Tensor]]]:
    """What an engine is given by a worker that is commanded to load it."""
    broker, engine = MemoryBroker(MemoryServer(), RunName("run")), FakeEngine()
    await broker.append(keys.WEIGHTS, Entry(fields={}, payload=encode(manifest)))
    updates = WeightUpdates(broker, engine, WeightPuller(limit=limit), WorkerId("generate-0.1"), MonotonicClock())
    assert isinstance(await updates.load(manifest.weights), WeightsLoaded)
    await broker.close()
    return engine.loaded


FAST_MB_S = 1e6  # so fast that bytes buy no time: what there is of it is ``wait_s``


@pytest.mark.parametrize("beating", [True, False])
async def test_a_worker_that_is_silent_is_left_for_the_trainer_by_a_load_too(trainer, beating: bool) -> None:
    """Also one that says again and again that it waits itself, and nothing else."""
    over, source = threading.Event(), trainer(1)

    def say_nothing(channel: Channel, request: ReadRange) -> None:
        with contextlib.suppress(PeerUnavailableError):
            while not over.wait(0.1 if beating else WAIT_S):
                channel.send(Waits())

    with answering(say_nothing) as silent:
        [(_, tensors)] = await loaded(behind(source.manifest, silent), TimeLimit(8.0, FAST_MB_S))
        over.set()
    assert_right(dict(tensors), 1)
    assert source.num_asked_bytes == source.manifest.total_bytes


async def test_a_worker_that_sends_drop_by_drop_is_left_and_what_it_sent_is_not_asked_for_again(trainer) -> None:
    over, source = threading.Event(), trainer(1)
    half = NUM_TENSORS // 2 * TENSOR_BYTES

    def drip(channel: Channel, request: ReadRange) -> None:
        channel.send(RangeFollows(nbytes=request.nbytes))
        channel.send_view(source._content[:half])
        with contextlib.suppress(PeerUnavailableError):
            for drop in range(half, request.nbytes):
                channel.send_view(source._content[drop : drop + 1])
                if over.wait(0.1):
                    return

    with answering(drip) as slow:
        [(_, tensors)] = await loaded(behind(source.manifest, slow), TimeLimit(8.0, FAST_MB_S))
        over.set()
    assert_right(dict(tensors), 1)
    (asked,) = source.asked
    assert asked.offset > half


@pytest.mark.parametrize("ucx", [False, needs_ucx])
def test_a_worker_that_waits_for_its_own_source_is_waited_for(trainer, relay, ucx: bool) -> None:
    """The trainer is silent for longer than a worker alone is borne with: nobody else could have more."""
    one, source = relay(ucx), trainer(1, gate=NUM_TENSORS // 2 * TENSOR_BYTES)
    one.listen("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pulled, WeightPuller(limit=LIMIT, relay=one), source.manifest)
        assert source.stopped.wait(WAIT_S)
        puller = WeightPuller(limit=TimeLimit(16.0, FAST_MB_S), ucx=ucx)
        second = threads.submit(pulled, puller, behind(source.manifest, one.address))
        time.sleep(11)  # of the 16 s it would bear a silent one for 8
        source.opened.set()
        for pull in (first, second):
            assert_right(pull.result(WAIT_S), 1)
    assert source.num_asked_bytes == source.manifest.total_bytes
    assert puller.way == ("ucx" if ucx else "tcp")
