"""Addresses of segments, where a server of them listens, and which of several addresses to read from here.

shm://<host id>/<absolute path>     a file that readers on that host map
tcp://<host>:<port>/<segment>       a server that sends it
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from transport.errors import MessageError, SecretError
from transport.process.secret import check_strength

MAX_CHARACTERS = 8192
"""Of an address: a path has 4,096."""
SCHEMES = ("shm", "tcp")
"""The cheapest first."""
EVERY_INTERFACE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """place: host id or host name.  port: tcp only, else 0.  path: without the leading slash."""

    scheme: str
    place: str
    path: str
    port: int = 0

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


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine's own loopback, whichever machine asks."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server of bytes listens, and by what name and ports others reach it.

    The two differ behind several network cards, or in a container.

    host: what to listen on.  advertise: how others call this host; "" is ``host``, or this machine's name where
    ``host`` is every interface.  ports: tried in this order, 0 is any free one.  secret: shared with the clients; on
    loopback, where none is set, the server asks for its user's own (transport/process/secret.py).

    Raises SecretError: ``host`` is reached from other machines and there is no secret, or it is too short.
    """

    host: str = "127.0.0.1"
    advertise: str = ""
    ports: Sequence[int] = (0,)
    secret: bytes = b""

    def __post_init__(self) -> None:
        if self.secret:
            check_strength(self.secret, "the shared secret")
        if not self.secret and not is_loopback(self.host):
            raise SecretError(
                f"listening on {self.host or 'every interface'} needs a shared secret: set STREAMRL_SECRET, the same "
                "on every machine, or listen on 127.0.0.1"
            )

    def address(self, port: int, path: str) -> str:
        """The tcp:// address of ``path`` on a server that listens on ``port``."""
        name = self.advertise or (socket.gethostname() if self.host in EVERY_INTERFACE else self.host)
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


def _reachable_from_here(address: Address, publisher_host: str) -> bool:
    """Whether bytes published on host id ``publisher_host`` can be read here through ``address``."""
    if address.scheme == "shm":
        return address.place == host_id()
    return publisher_host == host_id() or not is_loopback(address.place)


def choose_sources(sources: Sequence[str], publisher_host: str) -> list[Address]:
    """The sources that can be read from here, cheapest first.

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
    usable = [address for address in addresses if _reachable_from_here(address, publisher_host)]
    return sorted(usable, key=lambda address: SCHEMES.index(address.scheme))
