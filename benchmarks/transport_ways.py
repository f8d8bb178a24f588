"""How bytes go from one process to another: ours, the bare ways beside it, and other libraries (``transport.py``).

A way is two context managers, one for each end, which give the function that makes one transfer. The receiver asks, and
its transfer ends once all bytes lie in its memory and were compared with their CRC-32, piece by piece.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import itertools
import mmap
import os
import select
import socket
import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from transport.broker.embedded import packaged_binary
from transport.errors import ChecksumError
from transport.process.programs import ending_with_this_process
from transport.tensors.base import Deadline, Endpoint, Segment, parse_address
from transport.tensors.receive import Memory, Receiving, Stretch
from transport.tensors.shm import ShmReader, ShmStore
from transport.tensors.tcp import ServedStore, TcpReader

WRITTEN_BYTES = 2 * 1024 * 1024
"""Checked and written at once, as a publisher does."""
STEP_S = 180.0
"""Limit of one step of a child; the slowest, 512 MiB by pickle at load 8, takes 20."""
ENDING_S = 5.0
_REQUEST = struct.Struct("<Q")
_REQUEST_TAG = 1 << 40  # above those of pieces

Transfer = Callable[[int], None]
"""One end of a transfer of so many bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """[start, end) of the content, and the CRC-32 of it."""

    start: int
    end: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What every process is given. content: a file that holds the bytes.  directory: in shared memory.

    pieces: by size, those of the first so many bytes.
    """

    content: Path
    directory: Path
    pieces: Mapping[int, Sequence[Piece]]
    secret: bytes


@dataclass(slots=True)
class Side:
    """One end. link: to the other one, for what is said before bytes go.  others: processes that work for it."""

    inputs: Inputs
    link: Connection
    others: list[int] = field(default_factory=list[int])

    @property
    def content(self) -> memoryview:
        return mapped(self.inputs.content)

    def check(self, data: memoryview, nbytes: int) -> None:
        for piece in self.inputs.pieces[nbytes]:
            check(piece, data[piece.start : piece.end])


@functools.cache
def mapped(path: Path) -> memoryview:
    """A file, for this process alone to write to: libraries ask for writable memory."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))


@functools.cache
def memory(nbytes: int) -> memoryview:
    """Of a receiver, used again and again."""
    return Memory(nbytes).buffer


Read = Callable[[str, int, Sequence["Piece"], bool], None]
"""(address, nbytes, its pieces, whether they are checked)."""


def check(piece: Piece, data: memoryview) -> None:
    if data.nbytes != piece.end - piece.start or zlib.crc32(data) != piece.crc:
        raise ChecksumError(f"bytes {piece.start} to {piece.end} came wrong")


# --- ours -------------------------------------------------------------------------------------------------------------


@contextmanager
def our_sender(side: Side, *, ucx: bool) -> Iterator[Transfer]:
    """A store that serves a segment of each size from threads of its own."""
    endpoint = Endpoint(secret=side.inputs.secret, ucx=ucx)
    store = ServedStore("bench", (side.inputs.directory,), endpoint)
    store.start()
    try:
        addresses: dict[int, str] = {}
        for nbytes in side.inputs.pieces:
            writer = store.create(f"{os.getpid()}-{nbytes}", nbytes)
            writer.write(0, side.content[:nbytes])
            addresses[nbytes] = writer.seal()[1]
        side.link.send(addresses)
        yield lambda nbytes: None
    finally:
        store.close()


@contextmanager
def our_receiver(side: Side, *, ucx: bool) -> Iterator[Transfer]:
    """As workers/weights/pull.py: a stretch a piece, into memory of its own, over a connection that stands."""
    addresses = side.link.recv()
    reader = TcpReader(side.inputs.secret, ucx=ucx)
    with ExitStack() as stack:

        @functools.cache
        def segment(nbytes: int) -> Segment:
            opened = reader.open(parse_address(addresses[nbytes]), nbytes, Deadline(3600))
            stack.callback(opened.close)
            return opened

        def transfer(nbytes: int) -> None:
            into = memory(nbytes)
            stretches = [
                Stretch(
                    piece.start,
                    piece.end - piece.start,
                    functools.partial(into.__getitem__, slice(piece.start, piece.end)),
                    functools.partial(check, piece),
                )
                for piece in side.inputs.pieces[nbytes]
            ]
            Receiving(stretches).take(segment(nbytes))
            if ucx and not segment(nbytes).by_ucx:
                raise RuntimeError("bytes came by TCP, not by UCX")

        yield transfer


@contextmanager
def our_mapped_sender(side: Side) -> Iterator[Transfer]:
    """Writes each time anew, as the figure of eight readers does."""
    store = ShmStore("bench", (side.inputs.directory,))
    numbers = itertools.count()

    def transfer(nbytes: int) -> None:
        side.link.recv()
        name = f"{os.getpid()}-{next(numbers)}"
        side.link.send(write_ours(store, name, side.content[:nbytes]))
        side.link.recv()
        store.drop(name)

    try:
        yield transfer
    finally:
        store.close()


@contextmanager
def mapping_receiver(side: Side, read: Read) -> Iterator[Transfer]:
    def transfer(nbytes: int) -> None:
        side.link.send(nbytes)
        read(side.link.recv(), nbytes, side.inputs.pieces[nbytes], True)
        side.link.send("read")

    yield transfer


def write_ours(store: ShmStore, name: str, data: memoryview, *, checked: bool = True) -> str:
    """Returns the address."""
    writer = store.create(name, data.nbytes)
    crc = 0
    for start in range(0, data.nbytes, WRITTEN_BYTES):
        written = data[start : start + WRITTEN_BYTES]
        crc = zlib.crc32(written, crc) if checked else 0
        writer.write(start, written)
    return writer.seal()[0]


def read_ours(address: str, nbytes: int, pieces: Sequence[Piece], checked: bool) -> None:
    segment = ShmReader().open(parse_address(address), nbytes, Deadline(STEP_S))
    use(segment.buffer, pieces, checked)
    segment.close()


def use(data: memoryview, pieces: Sequence[Piece], checked: bool) -> None:
    """Check it, or look at one byte of every page."""
    if checked:
        for piece in pieces:
            check(piece, data[piece.start : piece.end])
    else:
        np.frombuffer(data, np.uint8)[:: mmap.PAGESIZE].sum()


# --- bare: by hand, sockets, UCXX -------------------------------------------------------------------------------------


def write_by_hand(path: Path, data: memoryview, *, checked: bool = True) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(fd, data.nbytes)
    crc = 0
    for start in range(0, data.nbytes, WRITTEN_BYTES):
        written = data[start : start + WRITTEN_BYTES]
        crc = zlib.crc32(written, crc) if checked else 0
        assert os.pwrite(fd, written, start) == written.nbytes
    os.close(fd)


def read_by_hand(path: str, nbytes: int, pieces: Sequence[Piece], checked: bool) -> None:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapping:
        data = memoryview(mapping)
        use(data, pieces, checked)
        data.release()


@contextmanager
def by_hand_sender(side: Side) -> Iterator[Transfer]:
    numbers = itertools.count()

    def transfer(nbytes: int) -> None:
        side.link.recv()
        path = side.inputs.directory / f"by-hand-{os.getpid()}-{next(numbers)}"
        write_by_hand(path, side.content[:nbytes])
        side.link.send(str(path))
        side.link.recv()
        path.unlink()

    yield transfer


def accepted(side: Side) -> socket.socket:
    """A connection from the other side, to a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(STEP_S)
        side.link.send(server.getsockname()[1])
        connection, _ = server.accept()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@contextmanager
def socket_sender(side: Side, *, from_file: bool) -> Iterator[Transfer]:
    request = bytearray(_REQUEST.size)
    with accepted(side) as connection, side.inputs.content.open("rb") as file:

        def transfer(nbytes: int) -> None:
            connection.recv_into(request, 0, socket.MSG_WAITALL)
            if not from_file:
                connection.sendall(side.content[:nbytes])
                return
            sent = 0
            while sent < nbytes:
                sent += os.sendfile(connection.fileno(), file.fileno(), sent, nbytes - sent)

        yield transfer


@contextmanager
def socket_receiver(side: Side) -> Iterator[Transfer]:
    with socket.create_connection(("127.0.0.1", side.link.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def transfer(nbytes: int) -> None:
            connection.sendall(_REQUEST.pack(nbytes))
            into = memory(nbytes)
            for piece in side.inputs.pieces[nbytes]:
                came = piece.start
                while came < piece.end:
                    count = connection.recv_into(into[came : piece.end])
                    if not count:
                        raise EOFError
                    came += count
                check(piece, into[piece.start : piece.end])

        yield transfer


class UcxBinding:
    """UCXX's lower binding with one worker and one endpoint, whose errors are handled."""

    def __init__(self, side: Side, *, polling: bool) -> None:
        os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
        for library in ("libucx", "libucxx"):
            importlib.import_module(library).load_library()
        self._ucx = importlib.import_module("ucxx._lib.libucxx")
        self._as_array = importlib.import_module("ucxx._lib.arr").Array
        context = self._ucx.UCXContext(feature_flags=(self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP))
        self._worker = self._ucx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self._woken = None if polling else select.poll()
        if self._woken:
            self._woken.register(self._worker.epoll_file_descriptor, select.POLLIN)
        side.link.send(self._worker.address.tobytes())
        there = self._ucx.UCXAddress.create_from_buffer(side.link.recv())
        self._endpoint = self._ucx.UCXEndpoint.create_from_worker_address(self._worker, there, True)

    def send(self, view: memoryview, tag: int) -> Any:
        return self._endpoint.tag_send(self._as_array(view), self._ucx.UCXXTag(tag))

    def receive(self, view: memoryview, tag: int) -> Any:
        return self._worker.tag_recv(self._as_array(view), self._ucx.UCXXTag(tag))

    def finish(self, request: Any) -> None:
        while not request.completed:
            self._worker.progress()
            if self._woken and not request.completed and self._worker.arm():
                self._woken.poll(1000 * STEP_S)
        request.check_error()


@contextmanager
def binding_sender(side: Side, *, polling: bool) -> Iterator[Transfer]:
    ucx = UcxBinding(side, polling=polling)
    asked = memoryview(bytearray(_REQUEST.size))

    def transfer(nbytes: int) -> None:
        ucx.finish(ucx.receive(asked, _REQUEST_TAG))
        pieces = side.inputs.pieces[nbytes]
        for request in [ucx.send(side.content[piece.start : piece.end], tag) for tag, piece in enumerate(pieces)]:
            ucx.finish(request)

    yield transfer
    side.link.recv()  # an end that leaves is an error of the other


@contextmanager
def binding_receiver(side: Side, *, polling: bool) -> Iterator[Transfer]:
    ucx = UcxBinding(side, polling=polling)

    def transfer(nbytes: int) -> None:
        into, pieces = memory(nbytes), side.inputs.pieces[nbytes]
        ucx.finish(ucx.send(memoryview(bytearray(_REQUEST.pack(nbytes))), _REQUEST_TAG))
        requests = [ucx.receive(into[piece.start : piece.end], tag) for tag, piece in enumerate(pieces)]
        for request, piece in zip(requests, pieces, strict=True):
            ucx.finish(request)
            check(piece, into[piece.start : piece.end])

    yield transfer
    side.link.send("end")


@contextmanager
def ucxx_sender(side: Side) -> Iterator[Transfer]:
    import ucxx

    with asyncio.Runner() as runner:

        async def connected() -> tuple[Any, Any]:
            ucxx.init(progress_mode="blocking")
            came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def accept(endpoint: Any) -> None:
                came.set_result(endpoint)

            listener = ucxx.create_listener(accept)
            side.link.send(listener.port)
            return listener, await came

        listener, endpoint = runner.run(connected())
        asked = np.zeros(1, np.int64)

        async def send(nbytes: int) -> None:
            await endpoint.recv(asked)
            for piece in side.inputs.pieces[nbytes]:
                await endpoint.send(np.frombuffer(side.content[piece.start : piece.end], np.uint8))

        async def ended() -> None:
            await endpoint.recv(asked)

        yield lambda nbytes: runner.run(send(nbytes))
        runner.run(ended())
        del listener


@contextmanager
def ucxx_receiver(side: Side) -> Iterator[Transfer]:
    import ucxx

    with asyncio.Runner() as runner:

        async def connected() -> Any:
            ucxx.init(progress_mode="blocking")
            return await ucxx.create_endpoint("127.0.0.1", side.link.recv())

        endpoint = runner.run(connected())
        asking = np.zeros(1, np.int64)

        async def receive(nbytes: int) -> None:
            await endpoint.send(asking)
            into = memory(nbytes)
            for piece in side.inputs.pieces[nbytes]:
                await endpoint.recv(np.frombuffer(into[piece.start : piece.end], np.uint8))
                check(piece, into[piece.start : piece.end])

        yield lambda nbytes: runner.run(receive(nbytes))
        runner.run(endpoint.send(asking))


# --- others -----------------------------------------------------------------------------------------------------------


def torch_alone() -> Any:
    """Torch with one thread, on loopback."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    import torch

    torch.set_num_threads(1)
    return torch


def meeting_point(side: Side, rank: int) -> str:
    """A file by which two ranks find each other."""
    if rank:
        return side.link.recv()
    point = f"file://{side.inputs.directory}/meeting-{os.getpid()}"
    side.link.send(point)
    return point


@contextmanager
def gloo(side: Side, *, rank: int) -> Iterator[Transfer]:
    torch = torch_alone()
    point = meeting_point(side, rank)
    torch.distributed.init_process_group("gloo", init_method=point, rank=rank, world_size=2)
    asked = torch.zeros(1, dtype=torch.int64)

    def send(nbytes: int) -> None:
        torch.distributed.recv(asked, 1)
        torch.distributed.send(torch.frombuffer(side.content[:nbytes], dtype=torch.uint8), 1)

    def receive(nbytes: int) -> None:
        torch.distributed.send(asked, 0)
        into = memory(nbytes)
        torch.distributed.recv(torch.frombuffer(into, dtype=torch.uint8), 0)
        side.check(into, nbytes)

    yield send if rank == 0 else receive
    torch.distributed.destroy_process_group()


def rpc_give(content: Path, nbytes: int) -> Any:
    """Called by the other process."""
    import torch

    return torch.frombuffer(mapped(content)[:nbytes], dtype=torch.uint8)


@contextmanager
def torch_rpc(side: Side, *, rank: int) -> Iterator[Transfer]:
    torch_alone()
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1, init_method=meeting_point(side, rank))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def receive(nbytes: int) -> None:
        side.check(rpc.rpc_sync("rank0", rpc_give, (side.inputs.content, nbytes)).numpy().data, nbytes)

    yield receive if rank else lambda nbytes: None
    rpc.shutdown()


@contextmanager
def pickle_sender(side: Side) -> Iterator[Transfer]:
    def transfer(nbytes: int) -> None:
        side.link.recv()
        side.link.send(np.frombuffer(side.content[:nbytes], np.uint8))

    yield transfer


@contextmanager
def pickle_receiver(side: Side) -> Iterator[Transfer]:
    def transfer(nbytes: int) -> None:
        side.link.send(nbytes)
        side.check(side.link.recv().data, nbytes)

    yield transfer


@contextmanager
def streams_sender(side: Side) -> Iterator[Transfer]:
    with asyncio.Runner() as runner:

        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
            came = asyncio.get_running_loop().create_future()
            server = await asyncio.start_server(lambda *ends: came.set_result(ends), "127.0.0.1", 0)
            side.link.send(server.sockets[0].getsockname()[1])
            ends = await came
            server.close()
            return ends

        reader, writer = runner.run(connected())
        writer.transport.set_write_buffer_limits(0)  # drained is sent: nothing is while no coroutine runs

        async def send(nbytes: int) -> None:
            await reader.readexactly(_REQUEST.size)
            writer.write(side.content[:nbytes])
            await writer.drain()

        yield lambda nbytes: runner.run(send(nbytes))
        writer.close()


@contextmanager
def streams_receiver(side: Side) -> Iterator[Transfer]:
    with asyncio.Runner() as runner:
        reader, writer = runner.run(asyncio.open_connection("127.0.0.1", side.link.recv()))

        async def receive(nbytes: int) -> None:
            writer.write(_REQUEST.pack(nbytes))
            side.check(memoryview(await reader.readexactly(nbytes)), nbytes)

        yield lambda nbytes: runner.run(receive(nbytes))
        writer.close()


@contextmanager
def redis_sender(side: Side) -> Iterator[Transfer]:
    import redis

    path = side.inputs.directory / f"redis-{os.getpid()}.sock"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(
        [str(packaged_binary()), *options], stdout=subprocess.DEVNULL, preexec_fn=ending_with_this_process()
    )
    side.others.append(server.pid)
    try:
        client = redis.Redis(unix_socket_path=str(path))
        until_s = time.monotonic() + STEP_S
        while not path.exists() and server.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        client.ping()
        side.link.send(str(path))

        def transfer(nbytes: int) -> None:
            side.link.recv()
            client.set("tensor", side.content[:nbytes])
            side.link.send("set")

        yield transfer
        client.close()
    finally:
        server.terminate()
        server.wait(ENDING_S)


@contextmanager
def redis_receiver(side: Side) -> Iterator[Transfer]:
    import redis

    client = redis.Redis(unix_socket_path=side.link.recv())

    def transfer(nbytes: int) -> None:
        side.link.send(nbytes)
        side.link.recv()
        side.check(memoryview(client.get("tensor")), nbytes)

    yield transfer
    client.close()


@contextmanager
def ray_sender(side: Side) -> Iterator[Transfer]:
    yield lambda nbytes: None  # an actor sends


@contextmanager
def ray_receiver(side: Side) -> Iterator[Transfer]:
    import ray

    class Owner:
        def put(self, content: str, nbytes: int) -> list[Any]:
            import numpy
            import ray

            if not hasattr(self, "content"):
                self.content = numpy.memmap(content, numpy.uint8, "r")
            return [ray.put(numpy.asarray(self.content[:nbytes]))]

    most = 4 * max(side.inputs.pieces) + (256 << 20)
    ray.init(num_cpus=2, object_store_memory=most, include_dashboard=False, log_to_driver=False, logging_level="error")
    owner: Any = ray.remote(Owner).remote()
    ray.get(owner.put.remote(str(side.inputs.content), min(side.inputs.pieces)))
    side.others += [process.pid for process in psutil.Process().children(recursive=True)]

    def transfer(nbytes: int) -> None:
        [put] = ray.get(owner.put.remote(str(side.inputs.content), nbytes))
        side.check(memoryview(ray.get(put)), nbytes)

    try:
        yield transfer
    finally:
        ray.shutdown()


NIXL = ("nixl", "nixl_cu12", "nixl_cu13")


def nixl_agent(name: str) -> Any:
    [found, *_] = [module for module in NIXL if importlib.util.find_spec(module)]
    api = importlib.import_module(f"{found}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def region(view: memoryview) -> tuple[int, int, int, str]:
    return (np.frombuffer(view, np.uint8).ctypes.data, view.nbytes, 0, "")


@contextmanager
def nixl_sender(side: Side) -> Iterator[Transfer]:
    """Its memory is read by the other side; its library's thread sees to that."""
    agent = nixl_agent("sender")
    registered = agent.register_memory([region(side.content)], "DRAM")
    side.link.send((agent.get_agent_metadata(), region(side.content)[0]))
    yield lambda nbytes: None
    side.link.recv()
    agent.deregister_memory(registered)


@contextmanager
def nixl_receiver(side: Side) -> Iterator[Transfer]:
    agent = nixl_agent("receiver")
    into = memory(max(side.inputs.pieces))
    registered = agent.register_memory([region(into)], "DRAM")
    metadata, there = side.link.recv()
    name = agent.add_remote_agent(metadata)

    @functools.cache
    def handle(nbytes: int) -> Any:
        here = agent.get_xfer_descs([region(into[:nbytes])[:3]], "DRAM")
        return agent.initialize_xfer("READ", here, agent.get_xfer_descs([(there, nbytes, 0)], "DRAM"), name, b"")

    def transfer(nbytes: int) -> None:
        state = agent.transfer(handle(nbytes))
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("nixl: the transfer failed")
            state = agent.check_xfer_state(handle(nbytes))
        side.check(into, nbytes)

    yield transfer
    for nbytes in side.inputs.pieces:
        agent.release_xfer_handle(handle(nbytes))
    agent.deregister_memory(registered)
    side.link.send("end")


# --- what is measured -------------------------------------------------------------------------------------------------

End = Callable[[Side], AbstractContextManager[Transfer]]


@dataclass(frozen=True, slots=True)
class Way:
    """needs: any of these modules; none: always there.  bare_of: whose bare way this is."""

    send: End
    receive: End
    needs: Sequence[str] = ()
    bare_of: str = ""

    @property
    def is_there(self) -> bool:
        return not self.needs or any(importlib.util.find_spec(module) for module in self.needs)


UCXX = ("ucxx",)
COMPARED = {
    "ours, shared memory": Way(our_mapped_sender, functools.partial(mapping_receiver, read=read_ours)),
    "shared memory by hand": Way(
        by_hand_sender, functools.partial(mapping_receiver, read=read_by_hand), bare_of="ours, shared memory"
    ),
    "ours, TCP": Way(functools.partial(our_sender, ucx=False), functools.partial(our_receiver, ucx=False)),
    "socket, send": Way(functools.partial(socket_sender, from_file=False), socket_receiver, bare_of="ours, TCP"),
    "socket, sendfile": Way(functools.partial(socket_sender, from_file=True), socket_receiver, bare_of="ours, TCP"),
    "ours, UCX": Way(functools.partial(our_sender, ucx=True), functools.partial(our_receiver, ucx=True), UCXX),
    "UCXX binding, waiting": Way(
        functools.partial(binding_sender, polling=False),
        functools.partial(binding_receiver, polling=False),
        UCXX,
        "ours, UCX",
    ),
    "UCXX binding, polling": Way(
        functools.partial(binding_sender, polling=True),
        functools.partial(binding_receiver, polling=True),
        UCXX,
        "ours, UCX",
    ),
    "UCXX asyncio": Way(ucxx_sender, ucxx_receiver, UCXX, "ours, UCX"),
}
OTHERS = {
    "gloo send/recv": Way(functools.partial(gloo, rank=0), functools.partial(gloo, rank=1)),
    "torch RPC": Way(functools.partial(torch_rpc, rank=0), functools.partial(torch_rpc, rank=1)),
    "nixl, READ": Way(nixl_sender, nixl_receiver, NIXL),
    "Ray put/get": Way(ray_sender, ray_receiver, ("ray",)),
    "Redis SET/GET (Valkey)": Way(redis_sender, redis_receiver),
    "pickle, multiprocessing": Way(pickle_sender, pickle_receiver),
    "asyncio streams": Way(streams_sender, streams_receiver),
}
