"""Addresses of segments, and which backend reads them from here.

    shm://<host id>/<absolute path>     a file that readers on that host map
    tcp://<host>:<port>/<segment>       a server that sends it
    inproc://<process token>/<segment>  the same process

A backend is imported when an address first needs it. Owns: syntax and choice. Never: bytes. Invariant: an address that
cannot be reached from here (another host's memory, another machine's loopback) is never tried.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import ipaddress
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from transport.errors import MessageError

if TYPE_CHECKING:
    from transport.tensors.base import SegmentReader

BACKENDS = {
    "shm": "transport.tensors.shm",
    "inproc": "transport.tensors.inproc",
    "tcp": "transport.tensors.tcp",
}
"""Scheme to module, the cheapest first. A module offers ``reader(secret: bytes) -> SegmentReader``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """place: host id, process token or host name.  port: tcp only, else 0.  path: without the leading slash."""

    scheme: str
    place: str
    path: str
    port: int = 0

    def __str__(self) -> str:
        place = f"[{self.place}]" if ":" in self.place else self.place  # IPv6
        return f"{self.scheme}://{place}{f':{self.port}' if self.port else ''}/{self.path}"


def parse_address(text: str) -> Address:
    """Read an address. Raises MessageError that names the valid schemes, or what is wrong with it."""
    try:
        parts = urlsplit(text)
        port = parts.port or 0
    except ValueError as error:
        raise MessageError(f"{text!r} is not an address: {error}") from error
    if parts.scheme not in BACKENDS:
        schemes = ", ".join(f"{scheme}://" for scheme in BACKENDS)
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


_token: tuple[int, str] = (0, "")


def process_token() -> str:
    """Names this process; a forked child has another."""
    global _token
    if _token[0] != os.getpid():
        _token = (os.getpid(), uuid.uuid4().hex)
    return _token[1]


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine's own loopback, whichever machine asks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable_from_here(address: Address, publisher_host: str) -> bool:
    """Whether bytes published on host id ``publisher_host`` can be read here through ``address``."""
    match address.scheme:
        case "shm":
            return address.place == host_id()
        case "inproc":
            return address.place == process_token()
        case _:
            return publisher_host == host_id() or not is_loopback(address.place)


def choose_sources(sources: Sequence[str], publisher_host: str) -> list[Address]:
    """The sources that can be read from here, cheapest first.

    A scheme that this version does not know is left out (a newer publisher may offer it), unless nothing else is
    there: then MessageError names the valid ones.
    """
    known = [source for source in sources if urlsplit(source).scheme in BACKENDS]
    addresses = [parse_address(source) for source in known or sources]
    order = list(BACKENDS)
    usable = [address for address in addresses if reachable_from_here(address, publisher_host)]
    return sorted(usable, key=lambda address: order.index(address.scheme))


def reader_for(address: Address, secret: bytes) -> SegmentReader:
    """The backend that reads ``address``, imported on first use."""
    module = importlib.import_module(BACKENDS[address.scheme])
    return module.reader(secret)
