"""One copy a host: one worker receives a version, the others of its host map it, whichever of them is killed."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.fakes.preloaded import preloaded
from tests.fakes.several_hosts import Host
from tests.fakes.waiting import until
from tests.fakes.weight_site import WeightPeer
from tests.integration.test_relayed_weights import (
    LIMIT,
    NUM_TENSORS,
    TENSOR_BYTES,
    WAIT_S,
    Trainer,
    behind,
    policy,
    publisher,
    trainer,
)
from transport.contracts.messages import WeightManifest, encode, manifest_decoder
from transport.errors import ChecksumError, MessageError, PeerUnavailableError
from transport.tensors.base import TimeLimit, parse_address
from transport.tensors.receive import Memory
from transport.tensors.relay import Relay
from workers.generation.server.upkeep import hold
from workers.weights.pull import WeightPuller

__all__ = ["publisher", "trainer"]

SECRET = "a secret that all these hosts share"
MEMORY = re.compile(rb"^[0-9a-f]+-[0-9a-f]+ .* (\d+) +/memfd:streamrl-received .*$")


def received_memory(pid: int) -> dict[int, tuple[int, int]]:
    """Inode of each memory for weights that a process maps -> (Rss, Pss) bytes of it."""
    found: dict[int, tuple[int, int]] = {}
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_bytes().splitlines():
        if re.match(rb"^[0-9a-f]+-", line):
            inode = int(match[1]) if (match := MEMORY.match(line)) else None
        elif inode is not None and line.startswith((b"Rss:", b"Pss:")):
            rss, pss = found.get(inode, (0, 0))
            nbytes = int(line.split()[1]) * 1024
            found[inode] = (rss + nbytes, pss) if line.startswith(b"Rss") else (rss, pss + nbytes)
    return found


def work(pipe: Connection) -> None:
    """A worker: pulls each manifest that comes, says how it came and that it is right, and lets go when told to."""
    relay = Relay(secret=b"", limit=LIMIT)
    relay.listen("127.0.0.1")
    puller = WeightPuller(limit=LIMIT, relay=relay)
    pipe.send(relay.address)
    with contextlib.suppress(EOFError):
        while True:
            manifest = manifest_decoder.decode(pipe.recv_bytes())
            expected = policy(manifest.weights.version)
            with puller.pull(manifest) as tensors:
                pipe.send(puller.way)
                pipe.recv_bytes()
                pipe.send(all(torch.equal(tensors[name], expected[name]) for name in expected))
            del tensors


class Worker:
    """A process of this host. address: of its relay."""

    def __init__(self) -> None:
        context = preloaded()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.address = ""

    def started(self) -> None:
        self.address = self.answer()

    def pull(self, manifest: WeightManifest) -> None:
        self._pipe.send_bytes(encode(manifest))

    def answer(self) -> str:
        assert self._pipe.poll(WAIT_S), "no answer"
        return self._pipe.recv()

    def let_go(self) -> None:
        """Of the version, which is still right."""
        self._pipe.send_bytes(b"go on")
        assert self.answer(), "the version that it holds has changed"

    @property
    def memory(self) -> dict[int, tuple[int, int]]:
        return received_memory(self.process.pid or 0)

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(WAIT_S)

    def close(self) -> None:
        self._pipe.close()
        self.process.join(WAIT_S)
        self.process.kill()
        self.process.join()
        self.process.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """The first receives; each of the others asks it first, and then those before itself."""
    made = [Worker() for _ in range(3)]
    try:
        for worker in made:
            worker.started()
        yield made
    finally:
        for worker in made:
            worker.close()


def begin(workers: list[Worker], manifest: WeightManifest) -> None:
    leader, *mates = workers
    leader.pull(manifest)
    for number, mate in enumerate(mates):
        mate.pull(behind(manifest, leader.address, *[one.address for one in mates[:number]]))


def test_workers_of_one_host_have_one_copy_that_came_once(trainer, workers: list[Worker]) -> None:
    inodes = set[int]()
    for version in (1, 2, 3):
        source = trainer(version)
        begin(workers, source.manifest)
        assert [worker.answer() for worker in workers] == ["tcp", "mapped", "mapped"]
        assert source.num_asked_bytes == source.manifest.total_bytes
        memory = [worker.memory for worker in workers]
        assert len({inode for one in memory for inode in one}) == 1
        copies = sum(pss for one in memory for _, pss in one.values()) / source.manifest.total_bytes
        print(f"{copies:.3f} copies in memory")
        assert 0.9 < copies < 1.1
        inodes |= memory[0].keys()
        for worker in workers[::-1]:
            worker.let_go()
        until(lambda: not any(worker.memory for worker in workers[1:]))
    assert len(inodes) == 1, "it is received into again once nobody maps it"


def test_what_a_mate_still_maps_is_not_received_into_and_what_a_killed_one_mapped_is(trainer, workers) -> None:
    leader, mate, other = workers
    begin([leader, mate], trainer(1).manifest)
    assert [leader.answer(), mate.answer()] == ["tcp", "mapped"]
    leader.let_go()
    (first,) = mate.memory
    begin([leader, other], trainer(2).manifest)
    assert [leader.answer(), other.answer()] == ["tcp", "mapped"]
    (second,) = leader.memory
    assert second != first
    mate.let_go()  # its version is as it was
    other.kill()
    leader.let_go()
    begin([leader, mate], trainer(3).manifest)
    assert [leader.answer(), mate.answer()] == ["tcp", "mapped"]
    assert leader.memory.keys() == mate.memory.keys() == {second}


def half_way(workers: list[Worker], source: Trainer) -> None:
    """Until those who map have looked at what came."""
    assert source.stopped.wait(WAIT_S)
    half = NUM_TENSORS // 2 * TENSOR_BYTES
    until(lambda: all(sum(rss for rss, _ in worker.memory.values()) >= half for worker in workers))


def test_where_the_one_that_receives_is_killed_another_goes_on_with_what_it_had(trainer, workers) -> None:
    source = trainer(1, gate=NUM_TENSORS // 2 * TENSOR_BYTES)
    begin(workers, source.manifest)
    half_way(workers, source)
    workers[0].kill()
    source.opened.set()
    assert [worker.answer() for worker in workers[1:]] == ["tcp", "mapped"]
    assert [request.offset for request in source.asked] == [0, NUM_TENSORS // 2 * TENSOR_BYTES]
    for worker in workers[1:]:
        worker.let_go()


def test_where_the_one_that_received_is_killed_its_mates_keep_it_and_pass_it_on(trainer, workers) -> None:
    leader, mate, other = workers
    source = trainer(1)
    begin([leader, mate], source.manifest)
    assert [leader.answer(), mate.answer()] == ["tcp", "mapped"]
    leader.kill()
    other.pull(behind(source.manifest, leader.address, mate.address))
    assert other.answer() == "mapped"
    assert mate.memory.keys() == other.memory.keys()
    assert source.num_asked_bytes == source.manifest.total_bytes
    for worker in (mate, other):
        worker.let_go()


def test_a_mate_that_cannot_see_the_memory_receives_over_the_connection(trainer) -> None:
    """As in a container with processes of its own on the network of the host."""
    relay = Relay(secret=SECRET.encode(), limit=LIMIT)
    relay.listen("127.0.0.1")
    puller = WeightPuller(limit=LIMIT, relay=relay)
    source = trainer(1)
    apart = Host(name="", address="", run=("unshare", "--pid", "--fork", "--mount-proc"))
    try:
        with puller.pull(source.manifest) as tensors:
            peer = WeightPeer(apart, "receive", "/none", "60")
            try:
                if peer.process.poll() is not None:
                    pytest.skip("no namespace of processes can be made here")
                peer.answer()
                peer.pull(behind(source.manifest, relay.address))
                assert peer.answer()["way"] == "tcp"
            finally:
                peer.close()
            assert torch.equal(tensors["t1"], policy(1)["t1"])
    finally:
        relay.close()
    assert source.num_asked_bytes == source.manifest.total_bytes


def test_a_server_is_given_what_its_worker_maps_and_not_a_copy(trainer) -> None:
    relay = Relay(secret=b"", limit=LIMIT)
    relay.listen("127.0.0.1")
    leader, mate = WeightPuller(limit=LIMIT, relay=relay), WeightPuller(limit=LIMIT)
    first = trainer(1)
    try:
        with leader.pull(first.manifest) as there, mate.pull(behind(first.manifest, relay.address)) as tensors:
            held = hold(first.manifest.weights, tensors)
            assert os.fstat(held.fd).st_ino == os.fstat(there.received._file).st_ino
        del there, tensors
        with leader.pull(trainer(2).manifest):  # elsewhere: the server may be started from it again
            offered = held.offer(same_host=True)
            with WeightPuller().pull(offered) as tensors:
                assert torch.equal(tensors["t3"], policy(1)["t3"])
    finally:
        relay.close()
        held.close()


def test_a_worker_of_a_host_of_its_own_asks_nothing_more(trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from transport.tensors.wire import Channel

    monkeypatch.setattr(Channel, "is_local", False)
    relay = Relay(secret=b"", limit=LIMIT)
    relay.listen("127.0.0.1")
    puller, other = WeightPuller(limit=LIMIT, relay=relay), WeightPuller(limit=LIMIT)
    manifest = trainer(1).manifest
    try:
        with puller.pull(manifest), other.pull(behind(manifest, relay.address)):
            assert other.way == "tcp"
    finally:
        relay.close()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("etc/passwd", MessageError),
        ("dev/shm/streamrl-x@1@y", MessageError),
        ("proc/1/fd/1000000@7", PeerUnavailableError),
        ("{mine}x", MessageError),
        ("{mine}", ChecksumError),
    ],
)
def test_nothing_is_mapped_but_memory_of_this_size_that_is_received_into(path: str, error: type[Exception]) -> None:
    memory = Memory(64)
    there = memory.address
    address = parse_address(there)
    asked = replace_path(there, path.format(mine=address.path))
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        Memory.of_mate(parse_address(asked), 128)
    assert sorted(os.listdir("/proc/self/fd")) == before


def replace_path(address: str, path: str) -> str:
    return f"shm://{parse_address(address).place}/{path}"


def test_memory_is_free_again_when_the_last_page_that_is_mapped_goes() -> None:
    memory = Memory(64)
    assert memory.is_free()
    mate = Memory.of_mate(parse_address(memory.address), 64)
    page = mate.buffer[:8]
    assert not memory.is_free()
    del mate
    assert not memory.is_free(), "a tensor still looks at it"
    del page
    assert memory.is_free()


def test_a_mate_waits_for_one_that_receives_and_moves_on_where_that_one_fails(trainer) -> None:
    relay = Relay(secret=b"", limit=LIMIT)
    relay.listen("127.0.0.1")
    source = trainer(1, gate=NUM_TENSORS // 2 * TENSOR_BYTES)
    leader, mate = WeightPuller(limit=LIMIT, relay=relay), WeightPuller(limit=TimeLimit(WAIT_S))
    given_up = threading.Event()

    def receive() -> None:
        with pytest.raises(PeerUnavailableError), leader.pull(source.manifest, given_up=given_up):
            pass

    receiving = threading.Thread(target=receive)
    receiving.start()
    try:
        assert source.stopped.wait(WAIT_S)
        got: list[bool] = []

        def follow() -> None:
            with mate.pull(behind(source.manifest, relay.address)) as tensors:
                got.append(all(torch.equal(tensors[name], one) for name, one in policy(1).items()))

        following = threading.Thread(target=follow)
        following.start()
        half = NUM_TENSORS // 2 * TENSOR_BYTES
        until(lambda: any(rss >= 2 * half for rss, _ in received_memory(os.getpid()).values()))
        given_up.set()
        source.opened.set()
        following.join(WAIT_S)
        assert got == [True]
        # The leader may have taken one tensor more before it noticed: that is had, too.
        assert source.asked[-1].offset >= half, "what had come is not asked for again"
    finally:
        receiving.join(WAIT_S)
        relay.close()
