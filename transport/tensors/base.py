"""What a tensor backend is: somewhere to write a segment once, and somewhere to read it from, by its address.

A **segment** is one immutable range of bytes with a name, e.g. one version of the weights. Its owner creates it, writes
it, seals it and later drops it; readers open it by an address. A reader that holds a dropped segment keeps its bytes.

    inproc://<process>/<segment>        what a store of this very process has open
    shm://<host id>/<absolute path>     a file that readers on that host map
    tcp://<host>:<port>/<segment>       a server that sends it, over that connection or, where both ends want it, UCX

An owner names all of its addresses, and each reader takes the cheapest that it can reach.
One contract (``tests/contract/test_tensors.py``) over inproc, shared memory, TCP and UCX:

- what is read are exactly the sealed bytes, or it raises; what was read before it raised is right, too, and a receiver
  goes on behind it, at another source (``receive.py``);
- a segment that does not exist, was dropped, or whose owner went away: PeerUnavailableError (try another source);
- one of another size than the caller expects: ChecksumError, before anything is allocated on the peer's word, and so a
  range that it does not have;
- a peer that talks nonsense: MessageError; one that does not know the secret: PeerRejectedError;
- nothing waits longer than the deadline, nor longer than ``TimeLimit.wait_s`` for the next byte.

What the bytes mean is the manifest's business (``manifest.py``).
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import math
import os
import re
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from transport.contracts.settings import TensorSettings
from transport.errors import MessageError, SecretError
from transport.process.secret import check_strength

MAX_CHARACTERS = 8192  # of an address: a path has 4,096
SCHEMES = ("inproc", "shm", "tcp")  # the cheapest first
BEATS = 4  # of a sender that waits itself, while its reader bears silence: three of them may come late
_DEFAULT = TensorSettings()
_TOKEN = secrets.token_hex(8)  # numbers of processes come again


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """place: host id, host name, or a store of a process.  port: tcp only, else 0.  path: without the leading slash."""

    scheme: str
    place: str
    path: str
    port: int = 0

    @property
    def is_mapped(self) -> bool:
        """Whether its reader gets the owner's own pages; else bytes are received."""
        return self.scheme != "tcp"

    def __str__(self) -> str:
        place = f"[{self.place}]" if ":" in self.place else self.place  # IPv6
        return f"{self.scheme}://{place}{f':{self.port}' if self.port else ''}/{self.path}"


def parse_address(text: str) -> Address:
    """Read an address. Raises MessageError that names the valid schemes, or what is wrong with it."""
    if len(text) > MAX_CHARACTERS or not text.isprintable():  # a NUL would raise where the path or host is used
        raise MessageError(f"{text[:80]!r} is not an address")
    try:
        parts = urlsplit(text)
        port = parts.port or 0
    except ValueError as error:
        raise MessageError(f"{text!r} is not an address: {error}") from error
    if parts.scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise MessageError(f"{text!r} has no known scheme; valid are {schemes}")
    path = parts.path.removeprefix("/")
    if not parts.hostname or not path or (parts.scheme == "tcp") != bool(port):
        raise MessageError(f"{text!r} is not a complete {parts.scheme}:// address")
    return Address(scheme=parts.scheme, place=parts.hostname, port=port, path=path)


@functools.cache
def host_id() -> str:
    """Names this host: 16 hex digits of its boot id and host name (containers share the former, not the latter)."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux: the network card's number has to do
        boot_id = str(uuid.getnode())
    return hashlib.blake2b(f"{boot_id} {socket.gethostname()}".encode(), digest_size=8).hexdigest()


def process_id() -> str:
    """Names this process; a fork of it has another."""
    return f"{host_id()}.{os.getpid()}.{_TOKEN}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine's own loopback, whichever machine asks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Deadline:
    """A point in time that several waits share. silent_s: the longest of them, where it comes earlier.

    given_up: from when it is set no wait is begun any more.
    """

    __slots__ = ("_end_s", "_given_up", "_silent_s", "_to_prolong_s", "beat_s", "seconds")

    def __init__(self, seconds: float, silent_s: float = math.inf, given_up: threading.Event | None = None) -> None:
        self._end_s = time.monotonic() + seconds
        self._silent_s = silent_s
        self._given_up = given_up
        self._to_prolong_s = seconds
        self.seconds = seconds if seconds < silent_s else silent_s
        """How long the first wait may take."""
        self.beat_s = 0.0
        """How often a sender that waits itself has to say so; 0: it need not."""

    def remaining_s(self) -> float:
        """How long the next wait may take."""
        if self._given_up is not None and self._given_up.is_set():
            return 0.0
        left_s = self._end_s - time.monotonic()  # asked four times a request: comparing costs half of min and max
        return 0.0 if left_s < 0 else left_s if left_s < self._silent_s else self._silent_s

    @property
    def left_s(self) -> float:
        """For all waits together."""
        return max(0.0, self._end_s - time.monotonic())

    @property
    def whole(self) -> Deadline:
        """That of all sources together."""
        return self

    def prolong(self, seconds: float) -> bool:
        """Let it come later, in all by as much as it had at first. Returns False where nothing is left of that."""
        more_s = min(seconds, self._to_prolong_s)
        self._end_s, self._to_prolong_s = self._end_s + more_s, self._to_prolong_s - more_s
        return self._to_prolong_s > 0

    def note_bytes(self, nbytes: int) -> None:
        """So many came."""

    def note_waiting(self) -> None:
        """The sender lives, and waits for its own source."""


class Patience(Deadline):
    """How long one source is borne with while others can be asked: ``idle_s`` without progress.

    Bytes are progress as far as they come at ``bytes_per_s``, so a source that sends them drop by drop is left as one
    that is silent is. One that says that it waits itself begins anew, since nobody else may have more, and the whole
    pull is given that time once more: sources behind it have what they had.
    """

    __slots__ = ("_bytes_per_s", "_heard_s", "_idle_s", "_whole")

    def __init__(self, whole: Deadline, idle_s: float, bytes_per_s: float) -> None:
        super().__init__(idle_s)
        self._whole = whole
        self._idle_s = idle_s
        self._bytes_per_s = bytes_per_s
        self._heard_s = time.monotonic()
        self.beat_s = idle_s / BEATS

    def remaining_s(self) -> float:
        return min(self._whole.remaining_s(), self.left_s)

    @property
    def whole(self) -> Deadline:
        return self._whole

    def note_bytes(self, nbytes: int) -> None:
        self._heard_s = time.monotonic()
        self._end_s = min(self._end_s + nbytes / self._bytes_per_s, self._heard_s + self._idle_s)

    def note_waiting(self) -> None:
        now_s, heard_s = time.monotonic(), self._heard_s
        self._heard_s = now_s
        if self._whole.prolong(now_s - heard_s):
            self._end_s = now_s + self._idle_s


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long bytes may take: ``wait_s`` and their number over the slowest rate that is borne with.

    wait_s: also the longest silence of a peer that may still be there (``tensors.wait_s``).
    min_mb_s: megabytes (10**6 bytes) a second (``tensors.min_mb_s``).
    """

    wait_s: float = _DEFAULT.wait_s
    min_mb_s: float = _DEFAULT.min_mb_s

    def deadline(self, nbytes: int, given_up: threading.Event | None = None) -> Deadline:
        return Deadline(self.wait_s + nbytes / (self.min_mb_s * 1e6), self.wait_s, given_up)

    def patience(self, whole: Deadline, nbytes: int) -> Patience:
        """With a source of ``nbytes`` that are missing, where others are left: half of the time that there is to spare.

        So however many of them stall, some is left for the last.
        """
        spare_s = max(0.0, whole.left_s - nbytes / (self.min_mb_s * 1e6))
        return Patience(whole, spare_s / 2, self.min_mb_s * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server of bytes listens, and how others reach it: behind several network cards, or in a container.

    Raises SecretError: ``host`` is reached from other machines and there is no secret, or it is too short.
    """

    host: str = "127.0.0.1"  # what to listen on
    advertise: str = ""  # how others call this host; "" is ``host``, or the machine's name for every interface
    ports: Sequence[int] = (0,)  # tried in this order, 0 is any free one
    secret: bytes = b""  # shared with the clients; where none is set, on loopback, this user's (process/secret.py)
    limit: TimeLimit = TimeLimit()
    ucx: bool = False  # bytes may go by UCX to who asks for that (ucx.py)

    def __post_init__(self) -> None:
        if self.secret:
            check_strength(self.secret, "the shared secret")
        elif not is_loopback(self.host):
            raise SecretError(
                f"listening on {self.host or 'every interface'} needs a shared secret: set STREAMRL_SECRET, the same "
                "on every machine, or listen on 127.0.0.1"
            )

    def address(self, port: int, path: str) -> str:
        """The tcp:// address of ``path`` on a server that listens on ``port``."""
        name = self.advertise or (socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host)
        return str(Address(scheme="tcp", place=name, port=port, path=path))


def parse_ports(text: str) -> Sequence[int]:
    """``"7400"``, ``"7400-7409"``, or "" for any free one. Raises ValueError for anything else."""
    if not text:
        return (0,)
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"{text!r} is no port and no range of ports like 7400-7409")
    return range(first, last + 1)


def choose_sources(sources: Sequence[str], publisher_host: str) -> list[Address]:
    """The sources that can be read from here, cheapest first. publisher_host: its host id.

    What is no address is left out, and a scheme that this version does not know (a newer publisher may offer it),
    unless nothing else is there: then MessageError says what is wrong with the first.
    """
    addresses: list[Address] = []
    problems: list[MessageError] = []
    for source in sources:
        try:
            addresses.append(parse_address(source))
        except MessageError as error:
            problems.append(error)
    if problems and not addresses:
        raise problems[0]
    on_this_host = publisher_host == host_id()

    def is_usable(address: Address) -> bool:
        if address.scheme == "inproc":
            return address.place.startswith(f"{process_id()}.")
        if address.scheme == "shm":
            return address.place == host_id()
        return on_this_host or not is_loopback(address.place)

    return sorted(filter(is_usable, addresses), key=lambda address: SCHEMES.index(address.scheme))


class Segment(Protocol):
    """A segment that a reader has opened at one address."""

    @property
    def buffer(self) -> memoryview | None:
        """[nbytes] uint8 where it is mapped and nothing has to travel; None elsewhere. Valid until ``close``.

        Writing to it changes it for no other reader.
        """
        ...

    def ask(self, offset: int, nbytes: int) -> None:
        """Let bytes [offset, offset + nbytes) come; all that was asked for before has been read."""
        ...

    def read(self, view: memoryview) -> int:
        """Put the next bytes that were asked for into ``view``. Returns how many came: at least one."""
        ...

    def close(self) -> None: ...


class SegmentReader(Protocol):
    """The reading side of one backend."""

    def open(self, address: Address, nbytes: int, deadline: Deadline, reach: Deadline | None = None) -> Segment:
        """Open the segment at ``address``, which must have ``nbytes`` bytes.

        deadline: of all that is read.  reach: of the connection alone; None: the same.
        """
        ...
