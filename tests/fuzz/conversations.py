"""Conversations with the servers of bytes (weights, columns), by raw sockets: strangers and clients that went mad.

An input is ``(server, proven, frames, end)``. The server ends the conversation or answers, gives away no file but its
own, holds no more than it may, and goes on serving a good client.
"""

from __future__ import annotations

import itertools
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import psutil

from tests.fuzz.harness import Check, CheckFailedError, Target
from tests.fuzz.hostile import Maker, damaged, packed, raw_message
from transport.contracts.types import PROTOCOL_VERSION, GroupId
from transport.rows.segments import Range, name_of_sent
from transport.rows.units import Allocate, Keep, Put, StorageUnit, UnitClient, UnitRequest
from transport.tensors.base import Address, Deadline, Endpoint, host_id, parse_address
from transport.tensors.manifest import checksum
from transport.tensors.receive import Receiving, Stretch
from transport.tensors.tcp import ReadRange, ServedStore, reader_for
from transport.tensors.ucx import UcxAddress, is_installed, sealed, version
from transport.tensors.wire import Hello, Proof, Refused, connect

SECRET = b"of the fuzzed servers"
CONTENT = bytes(range(256)) * 16
MARKER = b"what is in a file that no server may open"
MAX_BYTES = 4 * 1024 * 1024
"""Of the storage unit."""
MAX_GROWTH_BYTES = 512 * 1024 * 1024
"""Of this process, over all conversations: what one announces and another never sends is not held."""
ANSWER_S = 30.0
GOOD_EVERY = 20


@dataclass(slots=True)
class Servers:
    """A storage unit and a server of weights with one segment."""

    unit: Address
    weights: Address

    def check_good(self) -> None:
        """A good client puts, gets and drops; another pulls weights."""
        into = memoryview(bytearray(len(CONTENT)))
        client = UnitClient(str(self.unit), secret=SECRET)
        try:
            client.drop(group_ids=[GroupId(f"0/{slot}") for slot in range(4)])
            segment = client.put([GroupId("9/9")], [CONTENT])
            assert isinstance(segment, str), "there is room"
            found = client.read([Range(segment=segment, offset=0, nbytes=len(CONTENT))], [into])
            if found != [True] or into != CONTENT or client.drop(segments=[segment]) != len(CONTENT):
                raise CheckFailedError("the unit gives other bytes")
        finally:
            client.close()
        pulled = reader_for(self.weights, SECRET).open(self.weights, len(CONTENT), Deadline(ANSWER_S))
        received = bytearray(len(CONTENT))
        Receiving([Stretch(0, len(CONTENT), lambda: memoryview(received), lambda _: None)]).take(pulled)
        pulled.close()
        if received != CONTENT:
            raise CheckFailedError("other weights")


@contextmanager
def _opened() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-") as name, ExitStack() as stack:
        directory = Path(name) / "segments"
        directory.mkdir()
        (Path(name) / "outside").write_bytes(MARKER)
        (directory / "inside").write_bytes(MARKER)
        (directory / "link").symlink_to(Path(name) / "outside")
        store = ServedStore("fuzz", (directory,), Endpoint(secret=SECRET, ucx=is_installed()))
        store.start()
        stack.callback(store.close)
        writer = store.create("weights", len(CONTENT))
        writer.write(0, memoryview(CONTENT))
        weights = parse_address(writer.seal()[1])
        unit = StorageUnit(max_bytes=MAX_BYTES, endpoint=Endpoint(secret=SECRET), directory=directory)
        servers = Servers(parse_address(unit.start()), weights)
        stack.callback(unit.close)
        process, tried = psutil.Process(), itertools.count(1)
        before = process.memory_info().rss

        def check(content: bytes) -> None:
            number = next(tried)
            told = _converse(servers, content)
            if MARKER in told:
                raise CheckFailedError("a file that is none of the server's")
            if not 0 <= unit.retained_bytes <= MAX_BYTES:
                raise CheckFailedError("the unit holds more than it may, or less than nothing")
            if process.memory_info().rss - before > MAX_GROWTH_BYTES:
                raise CheckFailedError("the servers' memory grows")
            if number % GOOD_EVERY == 0:
                servers.check_good()

        yield check


def _converse(servers: Servers, content: bytes) -> bytes:
    """Say everything and hear everything. Returns what was heard."""
    server, proven, frames, end = msgspec.msgpack.decode(content, type=tuple[str, bool, list[bytes], bool])
    address = servers.unit if server == "unit" else servers.weights
    if proven:
        channel = connect(address.place, address.port, str(address), SECRET, Deadline(ANSWER_S))
        sock = channel._socket
    else:
        sock = socket.create_connection((address.place, address.port), timeout=ANSWER_S)
    with sock:
        sock.settimeout(ANSWER_S)
        hearing = _Hearing(sock)
        hearing.start()
        try:
            for frame in frames:
                sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR if end else socket.SHUT_RDWR)
        except OSError:  # it has heard enough
            pass
        hearing.join(ANSWER_S)
        if hearing.is_alive() or hearing.waited:
            raise CheckFailedError("neither an answer nor an end")
    return b"".join(hearing.heard)


class _Hearing(threading.Thread):
    """Takes what comes, so that a server that answers much is not held up by us."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(name="fuzz-hearing", daemon=True)
        self._socket = sock
        self.heard: list[bytes] = []
        self.waited = False

    def run(self) -> None:
        try:
            while more := self._socket.recv(1 << 20):
                self.heard.append(more)
        except TimeoutError:
            self.waited = True
        except OSError:
            return


# --- what is said -----------------------------------------------------------------------------------------------------

NAMES = (
    "0/0", "0/1", "0/2", "k:0", "k:1", "weights", "../outside", "inside", "link", "segments/../../outside",
    "/etc/passwd", "..", ".", "", "a\0b", "x" * 5000,
)  # fmt: skip


def make(random: Random) -> bytes:
    server = random.choice(("unit", "unit", "weights"))
    proven = random.random() < 0.8
    frames = [_frame(random, server) if proven else _greeting(random) for _ in range(random.choice((1, 1, 2, 4)))]
    return packed((server, proven, frames, random.random() < 0.9))


def _framed(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def _greeting(random: Random) -> bytes:
    match random.randrange(5):
        case 0:
            return random.randbytes(random.choice((1, 4, 300)))
        case 1:
            return struct.pack(">I", random.choice((0, 2**20, 2**20 + 1, 2**31, 2**32 - 1)))
        case 2:
            return _framed(raw_message(random, Hello | Proof | Refused))
        case 3:
            return _framed(
                packed({"type": "Proof", "protocol": PROTOCOL_VERSION, "nonce": b"", "mac": random.randbytes(32)})
            )
        case _:
            return _framed(raw_message(random, UnitRequest))


def _frame(random: Random, server: str) -> bytes:
    match random.randrange(8):
        case 0:
            return _greeting(random)
        case 1 if server == "unit":
            return _put(random)
        case 2 if server == "unit":
            return _allocation(random)
        case 1 if server == "weights":
            return _range_by_ucx(random)
    kind = UnitRequest if server == "unit" else ReadRange
    raw = packed(Maker(random, wild=random.choice((0.0, 0.0, 0.05)), strings=NAMES).value(kind))
    return _framed(damaged(random, raw) if random.random() < 0.2 else raw) + random.choice(
        (b"", b"", random.randbytes(50))
    )


def _range_by_ucx(random: Random) -> bytes:
    """Bytes that are there, to an address that is none."""
    address = random.randbytes(random.choice((0, 1, 100, 1000)))
    named = random.choice(("", "1.0.0", version())) if is_installed() else "1.0.0"
    there = random.choice(
        (
            sealed(named, b""),
            UcxAddress(ucx=named, address=address, checksum=sealed(named, address[1:]).checksum),
            UcxAddress(ucx=named, address=address, checksum=random.choice(NAMES)),
        )
    )
    offset = random.randrange(len(CONTENT))
    nbytes = random.randrange(len(CONTENT) - offset + 1)
    return _framed(
        packed(
            ReadRange(
                segment="weights", segment_bytes=len(CONTENT), offset=offset, nbytes=nbytes, ucx=there, tag=offset
            )
        )
    )


def _put(random: Random) -> bytes:
    """Values with the right checksum or a wrong one, of which some do not come, or more than was said."""
    rest = random.randbytes(random.choice((0, 1, 100, 5000)))
    header = packed(
        Put(
            segment=random.choice(("0@000000000000", name_of_sent())),
            group_ids=tuple(GroupId(f"0/{random.randrange(4)}") for _ in range(random.randrange(1, 3))),
            nbytes=len(rest),
            checksum=checksum(random.choice((rest, rest, rest, b"x"))),
        )
    )
    return _framed(header) + random.choice((rest, rest, rest[:-1], rest + b"more"))


def _allocation(random: Random) -> bytes:
    nbytes = random.choice((0, 1, 4096, MAX_BYTES, MAX_BYTES + 1, 2**40))
    group_ids = tuple(GroupId(f"0/{random.randrange(4)}") for _ in range(random.randrange(3)))
    asked = packed(Allocate(host=host_id(), group_ids=group_ids, nbytes=nbytes))
    return _framed(asked) + (_framed(packed(Keep(segment=random.choice(NAMES)))) if random.random() < 0.3 else b"")


TARGET = Target(name="conversations", make=make, opened=_opened, num_inputs=250)
