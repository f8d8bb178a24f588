"""Where a server of bytes listens, and by what name and port others reach it.

Owns: the difference between the two: a server in a container or behind several network cards listens on all of them
and is reached by one name. Invariant: what listens off loopback has a shared secret; on loopback, where none is set,
the server asks for its user's own (transport/secret.py).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from transport.errors import SecretError
from transport.secret import check_strength
from transport.tensors.address import Address, is_loopback

EVERY_INTERFACE = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """host: what to listen on.  advertise: how others call this host; "" is ``host``, or this machine's name where
    ``host`` is every interface.  ports: tried in this order, 0 is any free one.  secret: shared with the clients.

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
