"""One contract over every tensor backend: the same bytes, the same errors, also from peers that lie, leave or stall."""

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import PROTOCOL_VERSION
from transport.errors import (
    ChecksumError,
    ListenError,
    MessageError,
    PeerRejectedError,
    PeerUnavailableError,
    ProtocolMismatchError,
    SecretError,
    SegmentSpaceError,
    StreamError,
)
from transport.tensors.base import (
    Address,
    Deadline,
    Endpoint,
    Segment,
    choose_sources,
    host_id,
    parse_address,
    parse_ports,
)
from transport.tensors.receive import Receiving, Stretch
from transport.tensors.shm import ShmStore, ShmWriter, create_locked, file_name, sweep_stale
from transport.tensors.tcp import RangeFollows, ReadRange, ServedStore, reader_for
from transport.tensors.ucx import is_installed
from transport.tensors.wire import (
    MAX_CONNECTIONS,
    MAX_UNPROVEN,
    Channel,
    ChannelServer,
    Hello,
    Proof,
    Refused,
    connect,
    greet_client,
    greet_server,
)

CONTENT = bytes(range(256)) * 4096  # 1 MiB
ROOT = Path(__file__).parents[2]
RIGHT = b"the right secret"
needs_ucx = pytest.mark.skipif(not is_installed(), reason="extra ucx is not installed")


class TcpOnlyStore(ServedStore):
    """A served store that tells of its network address alone."""

    def addresses(self, writer: ShmWriter) -> tuple[str, ...]:
        return super().addresses(writer)[1:2]


class InprocOnlyStore(ShmStore):
    """A store that only this process can read."""

    def addresses(self, writer: ShmWriter) -> tuple[str, ...]:
        return super().addresses(writer)[-1:]


def make_store(scheme: str, directory: Path) -> ShmStore:
    if scheme in ("inproc", "shm"):
        return (ShmStore if scheme == "shm" else InprocOnlyStore)("contract", (directory,))
    store = TcpOnlyStore("contract", (directory,), Endpoint(ucx=scheme == "ucx"))
    store.start()
    return store


@pytest.fixture(params=["inproc", "shm", "tcp", pytest.param("ucx", marks=needs_ucx)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShmStore]:
    store = make_store(request.param, tmp_path)
    yield store
    store.close()
    assert list(tmp_path.iterdir()) == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tensor-")]


def publish(store: ShmStore, name: str, content: bytes = CONTENT) -> str:
    writer = store.create(name, len(content))
    half = len(content) // 2
    writer.write(half, memoryview(content)[half:])
    writer.write(0, memoryview(content)[:half])
    return writer.seal()[0]


def pull(address: str, nbytes: int = len(CONTENT), *, secret: bytes = b"", deadline_s: float = 10.0) -> bytes:
    parsed = parse_address(address)
    return received(nbytes, reader_for(parsed, secret, ucx=is_installed()).open(parsed, nbytes, Deadline(deadline_s)))


def received(nbytes: int, segment: Segment) -> bytes:
    """All bytes of an opened segment, in memory of the receiver's own."""
    into = bytearray(nbytes)
    try:
        Receiving([Stretch(0, nbytes, lambda: memoryview(into), lambda _: None)]).take(segment)
    finally:
        segment.close()
    return bytes(into)


# --- every backend ----------------------------------------------------------------------------------------------------


def test_readers_get_the_bytes_that_were_sealed(store: ShmStore) -> None:
    first, second = publish(store, "first"), publish(store, "second", CONTENT[::-1])
    assert pull(first) == CONTENT
    assert pull(second) == CONTENT[::-1]
    assert pull(first) == CONTENT


def test_what_is_not_there_is_unavailable(store: ShmStore) -> None:
    address = publish(store, "gone")
    store.drop("gone")
    store.drop("gone")
    with pytest.raises(PeerUnavailableError):
        pull(address)


def test_another_size_than_expected_is_refused(store: ShmStore) -> None:
    address = publish(store, "short")
    for nbytes in (len(CONTENT) - 1, len(CONTENT) + 1):
        with pytest.raises(ChecksumError, match="instead of"):
            pull(address, nbytes)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, -1), (len(CONTENT) - 1, 2), (1 << 60, 1), (0, 1 << 40)])
def test_a_range_that_is_not_there_is_refused(store: ShmStore, offset: int, nbytes: int) -> None:
    parsed = parse_address(publish(store, "ranges"))
    segment = reader_for(parsed, b"", ucx=is_installed()).open(parsed, len(CONTENT), Deadline(10))
    with contextlib.closing(segment), pytest.raises(ChecksumError, match=r"ha(s|ve) "):
        segment.ask(offset, nbytes)


def test_a_reader_keeps_the_bytes_of_a_dropped_segment(store: ShmStore) -> None:
    parsed = parse_address(publish(store, "dropped"))
    segment = reader_for(parsed, b"", ucx=is_installed()).open(parsed, len(CONTENT), Deadline(10))
    segment.ask(0, len(CONTENT))
    first = bytearray(1)
    assert segment.read(memoryview(first)) == 1
    store.drop("dropped")
    publish(store, "dropped", CONTENT[::-1])
    rest = bytearray(len(CONTENT) - 1)
    came = 0
    while came < len(rest):
        came += segment.read(memoryview(rest)[came:])
    assert first + rest == CONTENT
    segment.close()


def test_a_name_in_use_and_a_write_past_the_end_are_bugs(store: ShmStore) -> None:
    writer = store.create("twice", 8)
    with pytest.raises(ValueError, match="exists"):
        store.create("twice", 8)
    with pytest.raises(ValueError, match="do not fit"):
        writer.write(1, memoryview(b"12345678"))


def test_an_aborted_segment_leaves_its_name_free(store: ShmStore) -> None:
    store.create("again", 8).abort()
    assert pull(publish(store, "again")) == CONTENT


def test_nothing_is_served_after_close(store: ShmStore) -> None:
    address = publish(store, "closed")
    store.close()
    with pytest.raises(PeerUnavailableError):
        pull(address)


# --- within one process -----------------------------------------------------------------------------------------------


def test_a_process_reads_its_own_stores_where_they_have_it_open(tmp_path: Path) -> None:
    one, other = ShmStore("one", (tmp_path,)), ServedStore("other", (tmp_path,), Endpoint())
    other.start()
    publish(one, "v1")
    writer = other.create("v1", len(CONTENT))
    writer.write(0, memoryview(CONTENT[::-1]))
    sources = writer.seal()
    assert [address.scheme for address in choose_sources(sources, host_id())] == ["inproc", "shm", "tcp"]
    for path in tmp_path.iterdir():
        path.unlink()  # it needs no name
    best = choose_sources(sources, host_id())[0]
    assert pull(str(best)) == CONTENT[::-1]
    one.close()
    other.close()
    with pytest.raises(PeerUnavailableError, match="in this process"):
        pull(str(best))


@pytest.mark.parametrize("kind", [InprocOnlyStore, ShmStore])
def test_writing_to_what_was_read_changes_nobody_elses_bytes(tmp_path: Path, kind: type[ShmStore]) -> None:
    store = kind("private", (tmp_path,))
    parsed = parse_address(publish(store, "v1"))
    with contextlib.closing(reader_for(parsed, b"").open(parsed, len(CONTENT), Deadline(1))) as segment:
        assert segment.buffer is not None
        segment.buffer[:4] = b"mine"
        assert pull(str(parsed)) == CONTENT
    store.close()


def test_another_process_takes_another_way(tmp_path: Path) -> None:
    store = ShmStore("forked", (tmp_path,))
    writer = store.create("v1", 8)
    sources = writer.seal()
    chosen = "from transport.tensors.base import *; import sys; print(*choose_sources(sys.argv[1:], host_id()))"
    command = [sys.executable, "-c", chosen, *sources]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [sources[0]]
    if not (child := os.fork()):  # which has the store, too, and would not hear that a segment is dropped
        os._exit(int([str(address) for address in choose_sources(sources, host_id())] != [sources[0]]))
    assert os.waitpid(child, 0)[1] == 0
    store.close()


# --- shared memory ----------------------------------------------------------------------------------------------------


def test_a_message_cannot_make_a_reader_map_any_file(tmp_path: Path) -> None:
    (tmp_path / "secrets.txt").write_bytes(CONTENT)
    store = ShmStore("r", (tmp_path,))
    good = publish(store, "v1")
    link = tmp_path / "streamrl-r@1@link"
    link.symlink_to(tmp_path / "secrets.txt")
    folder = good.rpartition("/")[0]
    for name, error in [("secrets.txt", MessageError), ("../x/streamrl-r@1@v1", MessageError)]:
        with pytest.raises(error):
            pull(f"{folder}/{name}")
    with pytest.raises(PeerUnavailableError):
        pull(f"{folder}/{link.name}")
    link.unlink()
    store.close()


def test_no_room_is_said_with_what_was_tried(tmp_path: Path) -> None:
    store = ShmStore("big", (tmp_path, tmp_path / "more"))
    with pytest.raises(SegmentSpaceError, match=r"more has \d+ bytes free"):
        store.create("v1", 1 << 60)


def test_a_full_directory_falls_back_to_the_next(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    store = ShmStore("fallback", (blocked / "sub", tmp_path / "disk"))
    assert pull(publish(store, "v1")) == CONTENT
    assert len(list((tmp_path / "disk").iterdir())) == 1
    store.close()


def filling_up(monkeypatch: pytest.MonkeyPatch, *full: Path) -> None:
    """No byte from the second half of CONTENT on fits into a directory of ``full``."""
    write = os.pwrite

    def limited(fd: int, data: memoryview, offset: int) -> int:
        if offset >= len(CONTENT) // 2 and Path(os.readlink(f"/proc/self/fd/{fd}")).parent in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    monkeypatch.setattr("transport.tensors.shm.os.pwrite", limited)


def test_a_directory_that_fills_up_while_it_is_written_to_falls_back_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    filling_up(monkeypatch, memory)
    store = ShmStore("filling", (memory, disk))
    before = len(os.listdir("/proc/self/fd"))
    writer = store.create("v1", len(CONTENT))
    for start in range(0, len(CONTENT), 1 << 16):
        writer.write(start, memoryview(CONTENT)[start : start + (1 << 16)])
    assert pull(writer.seal()[0]) == CONTENT
    assert (list(memory.iterdir()), len(list(disk.iterdir()))) == ([], 1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    store.close()
    assert list(disk.iterdir()) == []


def test_where_every_directory_fills_up_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    filling_up(monkeypatch, memory, disk)
    for directories in ((memory,), (memory, disk)):
        store = ShmStore("filling", directories)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SegmentSpaceError, match="filled up"):
            publish(store, "v1")
        assert [list(one.iterdir()) for one in directories] == [[]] * len(directories)
        assert len(os.listdir("/proc/self/fd")) == before
        assert store.sealed("v1") is None
        store.close()


def test_a_store_that_is_closed_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    store = ShmStore("closing", (tmp_path,))
    writer = store.create("v1", len(CONTENT))
    writer.write(0, memoryview(CONTENT)[:100])
    store.close()
    with pytest.raises(ValueError, match="dropped while it was written"):
        writer.write(100, memoryview(CONTENT)[100:])
    with pytest.raises(ValueError, match="is closed"):
        store.create("v2", len(CONTENT))
    assert list(tmp_path.iterdir()) == []


def leave_a_segment_behind(directory: Path, address: "multiprocessing.SimpleQueue[str]") -> None:
    address.put(publish(ShmStore("dead", (directory,)), "v1"))
    os.kill(os.getpid(), 9)


def test_segments_of_dead_owners_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    addresses = context.SimpleQueue()
    owner = context.Process(target=leave_a_segment_behind, args=(tmp_path, addresses))
    owner.start()
    abandoned = addresses.get()
    owner.join(30)
    assert pull(abandoned) == CONTENT  # the file is still there: nobody cleaned up

    first = ShmStore("living", (tmp_path,))
    address = publish(first, "v1")  # its first segment sweeps
    with pytest.raises(PeerUnavailableError):
        pull(abandoned)
    assert sweep_stale(tmp_path) == []
    assert pull(address) == CONTENT
    first.close()


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """One that nobody writes to, under the name of a segment."""
    path = tmp_path / "streamrl-run@1@v1"
    os.mkfifo(path, 0o666)
    yield path
    path.unlink()


def test_a_fifo_under_a_name_of_ours_stops_neither_a_run_nor_a_reader(fifo: Path) -> None:
    assert sweep_stale(fifo.parent) == []
    store = ShmStore("waiting", (fifo.parent,))
    address = publish(store, "v1")
    assert pull(address) == CONTENT
    with pytest.raises(PeerUnavailableError, match="not a file of this user"):
        pull(f"{address.rpartition('/')[0]}/{fifo.name}")
    store.close()


def test_a_name_that_a_stranger_took_leads_to_another(tmp_path: Path) -> None:
    taken = tmp_path / file_name("run", "v1")
    os.mkfifo(taken)
    store = ShmStore("run", (tmp_path,))
    assert pull(publish(store, "v1")) == CONTENT
    store.close()
    taken.unlink()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileExistsError, match="names for a segment are taken"):
        create_locked(itertools.repeat(tmp_path), fcntl.LOCK_EX)


def test_a_file_that_its_owner_may_still_change_is_not_read(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    store = ShmStore("foreign", (tmp_path,))
    address = publish(store, "v1")
    (path,) = tmp_path.iterdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(PeerUnavailableError, match="not a file of this user"):
        pull(address)
    store.close()
    dead = tmp_path / file_name("foreign", "v2")
    dead.touch()
    os.chown(dead, 65534, 65534)
    assert sweep_stale(tmp_path) == [], "it is not ours to remove"


# --- addresses --------------------------------------------------------------------------------------------------------

BAD_SOURCES = [
    "tcp://[",
    "tcp://h:99999/x",
    "tcp://h:7/a\0b",
    f"shm://{host_id()}//dev/shm\0/streamrl-r@1@x",
    "x" * 9000,
    "",
]


def test_what_is_no_address_is_left_out_and_named_where_nothing_else_is_there() -> None:
    good = "tcp://127.0.0.1:7/v1"
    assert [str(address) for address in choose_sources([*BAD_SOURCES, good], host_id())] == [good]
    for source in BAD_SOURCES:
        with pytest.raises(MessageError):
            choose_sources([source], host_id())


def test_a_host_that_cannot_be_one_is_unavailable() -> None:
    for host in ("a..b", "a" * 64, "%00"):
        with pytest.raises(PeerUnavailableError):
            pull(f"tcp://{host}:7/v1", deadline_s=5.0)


# --- tcp: secrets, and peers that lie, leave or stall -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "client"), [(RIGHT, RIGHT[::-1]), (RIGHT, b""), (b"", RIGHT)], ids=["wrong", "missing", "unasked"]
)
def test_a_secret_must_be_shared(tmp_path: Path, server: bytes, client: bytes) -> None:
    store = ServedStore("secret", (tmp_path,), Endpoint(secret=server))
    store.start()
    writer = store.create("v1", len(CONTENT))
    writer.write(0, memoryview(CONTENT))
    address = writer.seal()[1]
    with pytest.raises(PeerRejectedError):
        pull(address, secret=client)
    assert pull(address, secret=server) == CONTENT
    store.close()


def test_off_loopback_a_secret_is_mandatory() -> None:
    for host in ("0.0.0.0", "", "::", "192.0.2.1", "trainer"):
        with pytest.raises(SecretError, match="STREAMRL_SECRET"):
            Endpoint(host=host)
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(SecretError, match="has 15 characters"):
            Endpoint(host=host, secret=RIGHT[:-1])


def test_the_advertised_name_is_what_readers_are_told() -> None:
    assert Endpoint(host="192.0.2.1", secret=RIGHT).address(7, "v1") == "tcp://192.0.2.1:7/v1"
    assert Endpoint(host="0.0.0.0", advertise="trainer", secret=RIGHT).address(7, "v1") == "tcp://trainer:7/v1"
    assert Endpoint(host="0.0.0.0", secret=RIGHT).address(7, "v1") == f"tcp://{socket.gethostname()}:7/v1"
    assert parse_address(Endpoint(host="::1").address(7, "v1")).place == "::1"


def test_ports_are_tried_in_order_and_a_host_that_is_not_ours_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = (taken.getsockname()[1], free.getsockname()[1])
        with pytest.raises(ListenError, match=f"port {min(ports)} to {max(ports)}: Address already in use"):
            ChannelServer(lambda channel: None, Endpoint(ports=sorted(ports)), request_s=1).start()
        free.close()
        server = ChannelServer(lambda channel: None, Endpoint(ports=ports), request_s=1)
        assert server.start() == ports[1]
        server.close()
    with pytest.raises(ListenError, match=r"192\.0\.2\.77"):
        ChannelServer(lambda channel: None, Endpoint(host="192.0.2.77", secret=RIGHT), request_s=1).start()


@pytest.mark.parametrize("text", ["7409-7400", "0", "70000", "7400-", "a", "7400,7401"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no range of ports"):
        parse_ports(text)


@pytest.fixture
def peer() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Starts a server that treats its one connection as told; returns its address."""
    listeners: list[tuple[socket.socket, threading.Thread]] = []

    def start(treat: Callable[[socket.socket], None]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                treat(connection)

        thread = threading.Thread(target=run)
        thread.start()
        listeners.append((listener, thread))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield start
    for listener, thread in listeners:
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def framed(message: object) -> bytes:
    raw = encode(message)
    return len(raw).to_bytes(4, "big") + raw


HELLO = framed(Hello(protocol=PROTOCOL_VERSION, nonce=b"n" * 16, secret=False))
WELCOME = framed(Proof(protocol=PROTOCOL_VERSION, nonce=b"n" * 16))


@pytest.mark.parametrize(
    ("sends", "error"),
    [
        (b"", PeerUnavailableError),
        (b"\x00\x00", PeerUnavailableError),
        (HELLO[:-3], PeerUnavailableError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", MessageError),
        ((64 * 1024).to_bytes(4, "big") + bytes(64 * 1024), MessageError),
        (framed({"type": "Something", "else": 1}), MessageError),
        (framed(Hello(protocol=99, nonce=b"", secret=False)), ProtocolMismatchError),
        (HELLO + WELCOME + framed(RangeFollows(nbytes=len(CONTENT))) + CONTENT, PeerRejectedError),
    ],
    ids=["silence", "cut length", "cut header", "http", "long greeting", "foreign", "version", "no proof"],
)
def test_a_stranger_in_place_of_a_server_is_named(peer, sends: bytes, error: type[StreamError]) -> None:
    with pytest.raises(error):
        pull(peer(lambda connection: send_all(connection, sends)))


@pytest.mark.parametrize(
    ("sends", "error"),
    [
        (framed(RangeFollows(nbytes=1 << 50)), ChecksumError),
        (framed(RangeFollows(nbytes=len(CONTENT))) + CONTENT[:-1], PeerUnavailableError),
    ],
    ids=["other size", "truncated"],
)
def test_a_peer_that_lies_or_leaves_is_named(peer, sends: bytes, error: type[StreamError]) -> None:
    def treat(connection: socket.socket) -> None:
        greet_client(Channel(connection, "reader", Deadline(10)), b"")
        send_all(connection, sends)

    with pytest.raises(error):
        pull(peer(treat))


def send_all(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader may leave at any point, without reading the rest
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


def test_a_peer_that_stalls_is_given_up_at_the_deadline(peer) -> None:
    given_up = threading.Event()

    def treat(connection: socket.socket) -> None:
        greet_client(Channel(connection, "reader", Deadline(10)), b"")
        connection.sendall(framed(RangeFollows(nbytes=len(CONTENT))) + CONTENT[:1000])
        given_up.wait(10)

    with pytest.raises(PeerUnavailableError, match="silent"):
        pull(peer(treat), deadline_s=0.3)
    given_up.set()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A connection: our end with two seconds for everything, and a peer's bare socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    channel = Channel(ours, "peer", Deadline(2.0))
    with theirs:
        yield channel, theirs
        channel.close()


def drop_by_drop(step: Callable[[], object]) -> tuple[threading.Event, threading.Thread]:
    """Take a step every few milliseconds until told to stop, or for ten times as long as our end has."""
    stopped = threading.Event()

    def run() -> None:
        for _ in range(2000):
            if stopped.wait(0.01):
                return
            with contextlib.suppress(OSError):
                step()

    thread = threading.Thread(target=run)
    thread.start()
    return stopped, thread


def test_a_peer_that_sends_drop_by_drop_is_given_up_at_the_deadline(ends) -> None:
    channel, theirs = ends
    stopped, thread = drop_by_drop(lambda: theirs.send(b"x"))
    with pytest.raises(PeerUnavailableError, match="silent"):
        channel.receive_into(memoryview(bytearray(len(CONTENT))))
    assert thread.is_alive(), "it was waited for to the end"
    stopped.set()
    thread.join(10)


def send_frame(channel: Channel, path: Path) -> None:
    channel.send(RangeFollows(nbytes=path.stat().st_size), [path.read_bytes()])


def send_view(channel: Channel, path: Path) -> None:
    channel.send_view(memoryview(path.read_bytes()))


def send_file(channel: Channel, path: Path) -> None:
    with path.open("rb") as file:
        channel.send_file(file.fileno(), 0, path.stat().st_size)


@pytest.mark.parametrize("send", [send_frame, send_view, send_file])
def test_a_peer_that_reads_drop_by_drop_is_given_up_at_the_deadline(
    ends, tmp_path: Path, send: Callable[[Channel, Path], None]
) -> None:
    channel, theirs = ends
    many = tmp_path / "many"
    many.write_bytes(bytes(48 << 20))  # more than the buffers of both ends hold, and than it reads in two seconds
    stopped, thread = drop_by_drop(lambda: theirs.recv(64 << 10, socket.MSG_DONTWAIT))
    with pytest.raises(PeerUnavailableError, match="silent"):
        send(channel, many)
    assert thread.is_alive(), "it was waited for to the end"
    stopped.set()
    thread.join(10)


def test_what_comes_with_a_header_is_kept_for_who_asks_next(ends) -> None:
    channel, theirs = ends
    header, answer = framed(RangeFollows(nbytes=5)), MessageDecoder(RangeFollows)
    theirs.sendall(header + b"bytes" + header + header[:2])  # as few calls bring them as the kernel likes
    assert channel.receive(answer).nbytes == 5
    into = bytearray(5)
    channel.receive_into(memoryview(into))
    assert bytes(into) == b"bytes"
    assert channel.receive(answer).nbytes == 5
    theirs.sendall(header[2:7])
    theirs.sendall(header[7:] + b"b")
    assert channel.receive(answer).nbytes == 5
    theirs.sendall(b"ytes!" + CONTENT)
    channel.receive_into(memoryview(into))
    assert bytes(into) == b"bytes"
    channel.skip(1)
    rest = bytearray(len(CONTENT))
    channel.receive_into(memoryview(rest))
    assert rest == CONTENT


def test_a_limit_holds_for_each_wait_anew(ends) -> None:
    """The kernel keeps what it was told until it is told otherwise."""
    channel, theirs = ends
    byte = memoryview(bytearray(1))
    theirs.sendall(b"x")
    channel.deadline = Deadline(60.0)
    channel.receive_into(byte)
    late = threading.Timer(20.0, theirs.sendall, [b"late"])
    late.start()
    channel.deadline = Deadline(0.02)
    with pytest.raises(PeerUnavailableError, match="silent"):
        channel.receive_into(byte)
    late.cancel()
    late.join()
    sent = threading.Timer(0.2, theirs.sendall, [b"x"])
    sent.start()
    channel.deadline = Deadline(60.0)
    channel.receive_into(byte)
    sent.join()


def mappings_of(directory: Path) -> int:
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("ucx", [False, pytest.param(True, marks=needs_ucx)], ids=["tcp", "ucx"])
def test_a_segment_that_was_served_is_gone_with_its_last_reader(tmp_path: Path, ucx: bool) -> None:
    """It is mapped once, and neither mapped nor open once it is dropped, also while its connections stand."""
    store = TcpOnlyStore("mapped", (tmp_path,), Endpoint(ucx=ucx))
    store.start()
    with contextlib.ExitStack() as stack:
        segments: list[Segment] = []
        writers = [store.create(f"v{number}", len(CONTENT)) for number in range(3)]
        for writer in writers:
            writer.write(0, memoryview(CONTENT))
            address = parse_address(writer.seal()[0])
            segments.append(reader_for(address, b"", ucx=ucx).open(address, len(CONTENT), Deadline(30)))
            stack.callback(segments[-1].close)
        into = memoryview(bytearray(len(CONTENT)))
        for segment in segments * 2:
            segment.ask(0, len(CONTENT))
            came = 0
            while came < len(CONTENT):
                came += segment.read(into[came:])
            assert into == CONTENT
        assert mappings_of(tmp_path) == 3
        for writer in writers:
            store.drop(writer.name)
        for segment in segments:  # its connection's thread has let go of what it sent before
            with pytest.raises(PeerUnavailableError, match="no segment"):
                segment.ask(0, 1)
        assert mappings_of(tmp_path) == 0
        opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        assert not [path for path in opened if path.startswith(str(tmp_path))]
    store.close()


def test_what_is_not_sealed_yet_is_not_served(tmp_path: Path) -> None:
    store = TcpOnlyStore("unsealed", (tmp_path,), Endpoint())
    store.start()
    sealed = publish(store, "v1")
    writer = store.create("v2", len(CONTENT))
    unsealed = sealed.replace("v1", "v2")
    with pytest.raises(PeerUnavailableError, match="no segment"):
        pull(unsealed)
    writer.write(0, memoryview(CONTENT))
    writer.seal()
    assert pull(unsealed) == CONTENT
    store.close()


def test_closing_the_server_ends_a_transfer_in_progress(tmp_path: Path) -> None:
    content = CONTENT * 32  # more than the sockets' buffers hold
    store = ServedStore("closing", (tmp_path,), Endpoint())
    store.start()
    writer = store.create("v1", len(content))
    address = parse_address(writer.seal()[1])
    with socket.create_connection((address.place, address.port)) as reader:
        reader.recv(1)  # the conversation has begun and will not go on
        store.close()
    with pytest.raises(PeerUnavailableError):
        pull(str(address), len(content))


@pytest.mark.parametrize(
    "sends",
    [b"", b"\xff" * 64, framed({"type": "Proof"}), b"GET / HTTP/1.1\r\n\r\n"],
    ids=["silence", "garbage", "incomplete", "http"],
)
def test_a_client_that_talks_nonsense_does_not_disturb_others(tmp_path: Path, sends: bytes) -> None:
    store = ServedStore("noise", (tmp_path,), Endpoint())
    store.start()
    writer = store.create("v1", len(CONTENT))
    writer.write(0, memoryview(CONTENT))
    address = parse_address(writer.seal()[1])
    with socket.create_connection((address.place, address.port)) as noisy:
        noisy.sendall(sends)
        with contextlib.suppress(OSError):  # the server may have ended it already
            noisy.shutdown(socket.SHUT_WR)
        noisy.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while noisy.recv(4096):  # the server ends it
                pass
    assert pull(str(address)) == CONTENT
    store.close()


# --- strangers on loopback, where nobody set a secret -----------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Address]:
    """The network address of a segment."""
    store = ServedStore("served", (tmp_path,), Endpoint())
    store.start()
    writer = store.create("v1", len(CONTENT))
    writer.write(0, memoryview(CONTENT))
    yield parse_address(writer.seal()[1])
    store.close()


def test_who_cannot_prove_to_be_the_same_user_gets_nothing(served: Address) -> None:
    with socket.create_connection((served.place, served.port), timeout=10) as stranger:
        channel = Channel(stranger, "server", Deadline(10))
        channel.receive(MessageDecoder(Hello))
        channel.send(Proof(protocol=PROTOCOL_VERSION, nonce=b"n" * 16))
        channel.send(ReadRange(segment="v1", segment_bytes=len(CONTENT), offset=0, nbytes=len(CONTENT)))
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while received := stranger.recv(65536):
                answer += received
    assert b"the secret differs" in answer
    assert len(answer) < 100


PULL_AS_ANOTHER_USER = """
import sys
from transport.errors import StreamError
from transport.tensors.base import Deadline, parse_address
from transport.tensors.tcp import TcpReader
try:
    TcpReader().open(parse_address(sys.argv[1]), int(sys.argv[2]), Deadline(10))
except StreamError as error:
    print(type(error).__name__, error)
"""


def test_another_users_program_is_refused_and_told_what_to_set(served: Address, tmp_path_factory) -> None:
    elsewhere = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path_factory.mktemp("home"))}
    command = [sys.executable, "-c", PULL_AS_ANOTHER_USER, str(served), str(len(CONTENT))]
    done = subprocess.run(command, env=elsewhere, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("PeerRejectedError"), done.stdout + done.stderr
    assert "set STREAMRL_SECRET for both" in done.stdout


def test_a_proof_cannot_be_passed_on_to_another_server(served: Address) -> None:
    """Whoever took the port of a server that died hears the proofs of its clients."""
    with contextlib.ExitStack() as stack:
        trap = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pulling = stack.enter_context(ThreadPoolExecutor(1)).submit(pull, f"tcp://127.0.0.1:{trap.getsockname()[1]}/v1")
        victim = stack.enter_context(trap.accept()[0])
        server = stack.enter_context(socket.create_connection((served.place, served.port), timeout=10))
        to_server, to_victim = Channel(server, "server", Deadline(10)), Channel(victim, "victim", Deadline(10))
        to_victim.send(to_server.receive(MessageDecoder(Hello)))
        to_server.send(to_victim.receive(MessageDecoder(Proof)))
        assert to_server.receive(MessageDecoder(Refused)).reason == "the secret differs"
    assert isinstance(pulling.exception(10), PeerUnavailableError)


def test_silent_strangers_keep_no_client_out(served: Address) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((served.place, served.port), timeout=10))
        with ThreadPoolExecutor(47) as readers:
            pulled = list(readers.map(lambda _: pull(str(served)), range(47)))
    assert pulled == [CONTENT] * 47


def test_strangers_of_one_address_push_out_each_other_and_nobody_elses_handshake(
    served: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.tensors.wire.HANDSHAKE_S", 100.0)  # none ends of itself
    with contextlib.ExitStack() as stack:

        def from_address(host: str) -> socket.socket:
            place = (served.place, served.port)
            return stack.enter_context(socket.create_connection(place, timeout=10, source_address=(host, 0)))

        slow = from_address("127.0.0.3")
        strangers = [from_address("127.0.0.2") for _ in range(3 * MAX_UNPROVEN)]
        assert strangers[-1].recv(1), "all connections were seen"
        greet_server(Channel(slow, "server", Deadline(10)), b"")
        for stranger in strangers[:MAX_UNPROVEN]:
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):  # its greeting, then the end
                    pass


def test_more_clients_than_are_served_at_once_are_told_to_come_again(served: Address) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            channel = connect(served.place, served.port, str(served), b"", Deadline(30))
            stack.callback(channel.close)
        with pytest.raises(PeerUnavailableError, match="all its connections are in use"):
            pull(str(served))
    for _ in range(100):  # each ends on a thread of its own
        with contextlib.suppress(PeerUnavailableError):
            assert pull(str(served)) == CONTENT
            break
    else:
        raise AssertionError("those who left still count")
