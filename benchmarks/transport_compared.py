"""Ours, and the bare ways beside them: shared memory by hand, loops on a socket, UCXX (``transport_ways.py``)."""

from __future__ import annotations

import asyncio
import functools
import importlib
import itertools
import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transport_ways import REQUEST, STEP_S, Piece, Side, Transfer, Way, check, memory
from transport.tensors.base import Deadline, Endpoint, Segment, parse_address
from transport.tensors.pieces import crc32
from transport.tensors.receive import Receiving, Stretch
from transport.tensors.shm import ShmReader, ShmStore
from transport.tensors.tcp import ServedStore, TcpReader

WRITTEN_BYTES = 2 * 1024 * 1024
"""Checked and written at once, as a publisher does."""
REQUEST_TAG = 1 << 40  # above those of pieces

Read = Callable[[str, int, Sequence[Piece], bool], None]
"""(address, nbytes, its pieces, whether they are checked)."""

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
        crc = crc32(written, crc) if checked else 0
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
        crc = crc32(written, crc) if checked else 0
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
    request = bytearray(REQUEST.size)
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
            connection.sendall(REQUEST.pack(nbytes))
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
    asked = memoryview(bytearray(REQUEST.size))

    def transfer(nbytes: int) -> None:
        ucx.finish(ucx.receive(asked, REQUEST_TAG))
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
        ucx.finish(ucx.send(memoryview(bytearray(REQUEST.pack(nbytes))), REQUEST_TAG))
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


# --- what is measured -------------------------------------------------------------------------------------------------

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
