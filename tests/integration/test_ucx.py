"""Bytes by UCX between real processes: what was agreed, stretches of any size, and peers that die, stall or lack it."""

import contextlib
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.preloaded import preloaded
from transport.contracts.messages import MessageDecoder, WeightManifest
from transport.errors import ChecksumError, PeerUnavailableError
from transport.tensors import tcp as tcp_module
from transport.tensors import ucx as ucx_module
from transport.tensors.base import Deadline, Endpoint, TimeLimit, parse_address
from transport.tensors.receive import Receiving, Stretch
from transport.tensors.relay import Relay, relayed_address
from transport.tensors.tcp import RangeFollows, ReadRange, ServedStore, TcpReader, TcpSegment
from transport.tensors.ucx import AHEAD, CHUNK_BYTES, is_installed, sealed, wants_ucx
from transport.tensors.wire import Channel
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

pytestmark = pytest.mark.skipif(not is_installed(), reason="extra ucx is not installed")

SIZE = 19 * CHUNK_BYTES + 12345  # more than is ever under way
WAIT_S = 30.0


def content() -> bytes:
    return random.Random(7).randbytes(SIZE)


@contextlib.contextmanager
def served(directory: Path, *, ucx: bool = True, limit: TimeLimit | None = None) -> Iterator[str]:
    """A store with one segment. Gives its TCP address."""
    store = ServedStore("ucx", (directory,), Endpoint(ucx=ucx, limit=limit or TimeLimit()))
    store.start()
    try:
        writer = store.create("v1", SIZE)
        writer.write(0, memoryview(content()))
        yield writer.seal()[1]
    finally:
        store.close()


def opened(address: str, *, ucx: bool = True, reader: TcpReader | None = None) -> TcpSegment:
    parsed = parse_address(address)
    return (reader or TcpReader(ucx=ucx)).open(parsed, SIZE, Deadline(WAIT_S))


def test_every_stretch_comes_whole_wherever_it_begins_and_ends(tmp_path: Path) -> None:
    expected, dice = content(), random.Random(11)
    cuts = sorted({0, 1, 77, CHUNK_BYTES, SIZE, *(dice.randrange(SIZE) for _ in range(40))})
    places = [bytearray(end - start) for start, end in itertools.pairwise(cuts)]
    stretches = [
        Stretch(start, len(into), lambda into=into: memoryview(into), lambda _: None)
        for start, into in zip(cuts, places, strict=False)
        if dice.random() < 0.8  # holes are requests of their own, or are dropped
    ]
    with served(tmp_path) as address:
        segment = opened(address)
        Receiving(stretches).take(segment)
        assert segment.by_ucx
        segment.close()
    wanted = {stretch.offset for stretch in stretches}
    for start, into in zip(cuts, places, strict=False):
        assert start not in wanted or bytes(into) == expected[start : start + len(into)]


def test_the_next_bytes_are_under_way_while_a_stretch_is_compared(tmp_path: Path) -> None:
    cuts = [0, SIZE // 4, SIZE // 2, 3 * SIZE // 4, SIZE]
    places = [memoryview(bytearray(end - start)) for start, end in itertools.pairwise(cuts)]
    under_way, buffers = list[int](), list[int]()
    with served(tmp_path) as address:
        segment = opened(address)
        ucx = segment._ucx
        assert ucx is not None

        def compared(_: memoryview) -> None:
            under_way.append(ucx._worker.num_under_way)
            buffers.append(len(ucx._buffers))

        Receiving(
            [
                Stretch(start, place.nbytes, lambda place=place: place, compared)
                for start, place in zip(cuts, places, strict=False)
            ]
        ).take(segment)
        segment.close()
    assert b"".join(places) == content()
    assert 0 < min(under_way[:-1]) <= max(under_way) <= AHEAD
    assert max(buffers) <= AHEAD


@pytest.mark.parametrize(("serves", "reads"), [(True, False), (False, True)])
def test_an_end_without_ucx_gets_or_gives_the_bytes_by_tcp(tmp_path: Path, serves: bool, reads: bool) -> None:
    with served(tmp_path, ucx=serves) as address:
        segment = opened(address, ucx=reads)
        segment.ask(5, 1000)
        into = bytearray(1000)
        assert segment.read(memoryview(into)) <= 1000
        assert not segment.by_ucx
        segment.close()


def test_a_library_that_cannot_be_loaded_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("libucp.so.0: cannot open shared object file")

    monkeypatch.setattr(ucx_module, "_library", missing)
    with served(tmp_path) as address:
        segment = opened(address)
        segment.ask(0, 10)
        assert segment.read(memoryview(bytearray(10)))
        assert not segment.by_ucx
        segment.close()


def test_auto_asks_for_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ucx_module, "_DEVICES", tmp_path)
    assert [wants_ucx("auto"), wants_ucx("on"), wants_ucx("off")] == [False, True, False]
    (tmp_path / "mlx5_0").mkdir()
    assert wants_ucx("auto")


def test_connections_leave_nothing_behind(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        reader, left = TcpReader(ucx=True), list[int]()
        for _ in range(6):
            segment = opened(address, reader=reader)
            segment.ask(0, SIZE)
            segment.read(memoryview(bytearray(CHUNK_BYTES)))  # the rest is under way when it is closed
            segment.close()
            for thread in threading.enumerate():  # of the server's end
                if thread.name.startswith("tensor-connection-"):
                    thread.join(WAIT_S)
            left.append(len(os.listdir("/proc/self/fd")))
        assert max(left[2:]) <= left[1] + 2


def serve_and_wait(directory: Path, address: Connection) -> None:
    """Serve, and say when somebody has begun to read, by dying."""
    sent = ucx_module.UcxSending.send

    def dies(self: ucx_module.UcxSending, tag: int, views: Iterator[memoryview]) -> None:
        def some() -> Iterator[memoryview]:
            for number, view in enumerate(views):
                if number == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield view

        sent(self, tag, some())

    ucx_module.UcxSending.send = dies  # type: ignore[method-assign,assignment]
    with served(directory) as where:
        address.send(where)
        time.sleep(WAIT_S)


def test_a_killed_sender_is_noticed_at_once_and_another_source_goes_on(tmp_path: Path) -> None:
    context = preloaded()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_and_wait, args=(tmp_path, theirs))
    process.start()
    into = bytearray(SIZE)
    receiving = Receiving([Stretch(0, SIZE, lambda: memoryview(into), lambda _: None)])
    try:
        segment = opened(ours.recv())
        started_s = time.monotonic()
        with pytest.raises(PeerUnavailableError):
            receiving.take(segment)
        assert time.monotonic() - started_s < WAIT_S / 2
        segment.close()
    finally:
        process.kill()
        process.join()
    with served(tmp_path) as address:
        segment = opened(address)
        receiving.take(segment)
        segment.close()
    assert bytes(into) == content()


def read_and_die(address: str) -> None:
    segment = opened(address)
    segment.ask(0, SIZE)
    segment.read(memoryview(bytearray(CHUNK_BYTES)))
    os.kill(os.getpid(), signal.SIGKILL)


def stop_reading(address: str, said: Connection) -> None:
    segment = opened(address)
    segment.ask(0, SIZE)
    segment.read(memoryview(bytearray(CHUNK_BYTES)))
    said.send("stopped")
    time.sleep(WAIT_S)


def test_readers_that_die_or_stop_cost_the_server_nothing(tmp_path: Path) -> None:
    context = preloaded()
    ours, theirs = context.Pipe()
    with served(tmp_path, limit=TimeLimit(wait_s=2.0)) as address:
        dead = context.Process(target=read_and_die, args=(address,))
        stuck = context.Process(target=stop_reading, args=(address, theirs))
        for process in (dead, stuck):
            process.start()
        assert ours.recv() == "stopped"
        dead.join()
        into = bytearray(SIZE)
        segment = opened(address)
        Receiving([Stretch(0, SIZE, lambda: memoryview(into), lambda _: None)]).take(segment)
        segment.close()
        assert bytes(into) == content()
        stuck.kill()
        stuck.join()


def serve_for_stalls(directory: Path, said: Connection) -> None:
    keep = ucx_module._Worker.keep
    ucx_module._Worker.keep = lambda self: (keep(self), said.send("kept"))[0]  # type: ignore[method-assign]
    with served(directory, limit=TimeLimit(wait_s=1.0)) as address:
        said.send(address)
        said.recv()


def read_for_stalls(address: str, said: Connection) -> None:
    """For each word: begin to read, wait for the next, and read the rest. Says how that went."""
    while said.recv() == "begin":
        segment = TcpReader(ucx=True).open(parse_address(address), SIZE, Deadline(1.0 if said.recv() else WAIT_S))
        into = memoryview(bytearray(SIZE))
        try:
            segment.ask(0, SIZE)
            came = segment.read(into[:CHUNK_BYTES])
            said.send("begun")
            said.recv()
            while came < SIZE:
                came += segment.read(into[came:])
            outcome = "right" if into == content() else "wrong"
        except PeerUnavailableError:
            outcome = "failed"
        segment.close()
        said.send(outcome)


def flat(*processes: BaseProcess) -> Iterator[int]:
    return itertools.chain(*map(held_by, processes))


def held_by(process: BaseProcess) -> tuple[int, int, int]:
    """Descriptors, threads, and shared segments of UCX."""
    proc = Path(f"/proc/{process.pid}")
    return (
        len(os.listdir(proc / "fd")),
        len(os.listdir(proc / "task")),
        (proc / "maps").read_text().count("ucx_shm"),
    )


@pytest.mark.parametrize("stopped", ["server", "reader"])
def test_transfers_that_stall_leave_nothing_at_either_end(tmp_path: Path, stopped: str) -> None:
    context = preloaded()
    server_said, to_parent = context.Pipe()
    server = context.Process(target=serve_for_stalls, args=(tmp_path, to_parent), daemon=True)
    server.start()
    reader_said, to_test = context.Pipe()
    reader = context.Process(target=read_for_stalls, args=(server_said.recv(), to_test), daemon=True)
    reader.start()
    victim = server if stopped == "server" else reader

    def read(stall: bool) -> str:
        for attempt in range(10):  # on a busy machine the first chunk may take longer than a stall is borne
            for word in ("begin", stall):
                reader_said.send(word)
            if (said := reader_said.recv()) == "begun":
                break
            assert stall, f"{said}, in attempt {attempt}"
        else:
            raise AssertionError("no transfer began")
        if stall:
            os.kill(victim.pid or 0, signal.SIGSTOP)
        reader_said.send("go on")
        if stall and victim is reader:
            assert server_said.poll(WAIT_S)
            assert server_said.recv() == "kept"
        outcome = reader_said.recv() if victim is server or not stall else ""
        os.kill(victim.pid or 0, signal.SIGCONT)
        return outcome or reader_said.recv()

    try:
        assert read(stall=False) == "right"
        before = [held_by(server), held_by(reader)]
        for _ in range(6):
            assert read(stall=True) == "failed"
        assert read(stall=False) == "right"
        deadline = Deadline(WAIT_S)
        while any(now > then for now, then in zip(flat(server, reader), itertools.chain(*before), strict=True)):
            assert deadline.remaining_s(), (before, held_by(server), held_by(reader))
            time.sleep(0.05)
    finally:
        for process in (server, reader):
            process.kill()
            process.join()


def test_where_too_much_is_kept_bytes_go_by_tcp_until_some_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept:
        given_back = False

        def settle(self, within_s: float) -> bool:
            return self.given_back

    kept = [Kept() for _ in range(ucx_module.MAX_KEPT)]
    monkeypatch.setattr(ucx_module, "_kept", list(kept))

    def is_by_ucx(address: str) -> bool:
        segment = opened(address)
        segment.ask(0, 10)
        assert segment.read(memoryview(bytearray(10)))
        segment.close()
        return segment.by_ucx

    with served(tmp_path) as address:
        assert not is_by_ucx(address)
        kept[0].given_back = True
        assert is_by_ucx(address)
    assert kept[0] not in ucx_module._kept


@pytest.mark.parametrize("torn", ["address", "checksum", "version", "empty", "long"])
def test_an_address_that_came_torn_ends_nothing_and_bytes_go_by_tcp(tmp_path: Path, torn: str) -> None:
    version = ucx_module.version()
    noise = random.Random(5).randbytes(200)
    there = {
        "address": replace(sealed(version, noise), address=b"\xff" * 100),
        "checksum": replace(sealed(version, noise), checksum=""),
        "version": sealed("0.0.0", noise),
        "empty": sealed(version, b""),
        "long": sealed("9" * 500, noise),
    }[torn]
    with served(tmp_path) as address:
        segment = opened(address, ucx=False)
        channel, where = segment._channel, parse_address(address)
        request = ReadRange(segment=where.path, segment_bytes=SIZE, offset=3, nbytes=100, ucx=there)
        assert channel.ask(request, MessageDecoder(RangeFollows)) == RangeFollows(nbytes=100)
        into = bytearray(100)
        channel.receive_into(memoryview(into))
        assert into == content()[3:103]
        segment.close()


def test_a_servers_address_that_came_torn_is_no_place_to_read_from(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        segment = opened(address)
        assert segment._ucx is not None
        with pytest.raises(PeerUnavailableError, match="torn"):
            segment._ucx.expect(10, replace(segment._ucx.address, address=b"\xff" * 100))
        segment.close()


def test_a_reader_that_asks_for_more_before_the_server_knows_that_all_came_has_not_left(tmp_path: Path) -> None:
    with served(tmp_path) as address:
        segment, into = opened(address), memoryview(bytearray(SIZE))
        segment.ask(0, SIZE)
        came = segment.read(into)
        where = parse_address(address)
        segment._channel.send(ReadRange(segment=where.path, segment_bytes=SIZE, offset=0, nbytes=10))
        time.sleep(0.3)  # the server waits for UCX with that at hand
        while came < SIZE:
            came += segment.read(into[came:])
        assert into == content()
        assert segment._channel.receive(MessageDecoder(RangeFollows)).nbytes == 10
        segment.close()


def test_a_library_that_is_never_ready_to_wait_is_waited_for_until_the_deadline() -> None:
    class Busy:
        completed = False

        def progress(self) -> None: ...

        def arm(self) -> bool:
            return False

    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = ucx_module._Worker(Channel(ours, "peer", Deadline(0.2)))
        worker.worker = Busy()
        with pytest.raises(PeerUnavailableError, match="silent"):
            worker.finish(Busy())
        worker.end()


def test_after_a_failure_the_same_server_is_asked_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ucx_module.UcxSending, tag: int, views: object) -> None:
        raise PeerUnavailableError("", "a fabric that drops everything")

    monkeypatch.setattr(ucx_module.UcxSending, "send", fails)
    reader = TcpReader(ucx=True)
    with served(tmp_path) as address:
        segment = opened(address, reader=reader)
        into = bytearray(SIZE)
        with pytest.raises(PeerUnavailableError):
            Receiving([Stretch(0, SIZE, lambda: memoryview(into), lambda _: None)]).take(segment)
        segment.close()
        segment = opened(address, reader=reader)
        segment.ask(0, 10)
        assert (segment.read(memoryview(bytearray(10))) > 0, segment.by_ucx) == (True, False)
        segment.close()


def elsewhere(manifest: WeightManifest, *sources: str) -> WeightManifest:
    """As a worker of another host sees it: what is mapped is not there."""
    return replace(manifest, sources=(*sources, *(one for one in manifest.sources if one.startswith("tcp:"))))


def test_a_version_goes_by_ucx_from_the_trainer_through_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "is_local", False)  # as on two hosts: on one it would be mapped
    torch.manual_seed(3)
    tensors = {f"t{n}": torch.randn(n * 1000 + 1, 77) for n in range(12)}
    publisher = WeightPublisher("ucx", tmp_path, endpoint=Endpoint(ucx=True))
    relay = Relay(secret=b"", limit=TimeLimit(), ucx=True)
    try:
        manifest = publisher.publish(1, 1, tensors, torch.bfloat16)
        first, second = WeightPuller(relay=relay, ucx=True), WeightPuller(ucx=True)
        with first.pull(elsewhere(manifest)) as got:
            assert first.way == "ucx"
            there = relayed_address(relay.address, manifest.weights)
            with second.pull(elsewhere(manifest, there)) as passed:
                assert second.way == "ucx"
                for name, tensor in tensors.items():
                    assert torch.equal(got[name], tensor.bfloat16())
                    assert torch.equal(passed[name], tensor.bfloat16())
    finally:
        relay.close()
        publisher.close()


def test_where_ucx_is_silent_the_same_pull_ends_by_tcp_and_the_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that lets through no port but the trainer's."""
    over = threading.Event()
    monkeypatch.setattr(ucx_module, "FIRST_S", 0.1)
    monkeypatch.setattr(ucx_module.UcxSending, "send", lambda self, tag, views: over.wait(WAIT_S))
    publisher = WeightPublisher("ucx", tmp_path, endpoint=Endpoint(ucx=True))
    try:
        manifest = elsewhere(publisher.publish(1, 1, {"t": torch.ones(1000)}, torch.float32))
        puller, said = WeightPuller(ucx=True), list[str]()
        monkeypatch.setattr(tcp_module.log, "warning", lambda event, **fields: said.append(f"{event} {fields}"))
        for _ in range(2):  # of the second version nothing is asked by UCX
            with puller.pull(manifest) as got:
                assert torch.equal(got["t"], torch.ones(1000))
            assert puller.way == "tcp"
        assert len(said) == 1
        assert said[0].startswith("UCX failed; bytes come by TCP {'peer': '127.0.0.1', 'for_s': 600.0")
        assert "UCX 1." in said[0]
    finally:
        over.set()
        publisher.close()


def test_bytes_that_are_wrong_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = ucx_module.UcxReceiving.read

    def flips(self: ucx_module.UcxReceiving, view: memoryview) -> int:
        count = received(self, view)
        view[0] ^= 1
        return count

    publisher = WeightPublisher("ucx", tmp_path, endpoint=Endpoint(ucx=True))
    try:
        manifest = publisher.publish(1, 1, {"t": torch.ones(1000)}, torch.float32)
        monkeypatch.setattr(ucx_module.UcxReceiving, "read", flips)
        with pytest.raises(ChecksumError), WeightPuller(ucx=True).pull(elsewhere(manifest)):
            pass
    finally:
        publisher.close()
