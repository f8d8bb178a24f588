"""Addresses of segments, and the names of this host and process in them.

    shm://<host id>/<absolute path>     a file that readers on that host map
    tcp://<host>:<port>/<segment>       a server that sends it
    inproc://<process token>/<segment>  the same process

Owns: their syntax. Never: which of several is read (``sources.py``), nor bytes.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from transport.errors import MessageError

MAX_CHARACTERS = 8192
"""Of an address: a path has 4,096."""
SCHEMES = ("shm", "inproc", "tcp")
"""The cheapest first."""


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
