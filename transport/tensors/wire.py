"""Framed messages and bulk bytes over one blocking socket.

    frame = length of the header (4 bytes, big-endian) | header (MessagePack struct) | bytes whose number it names

Every connection starts with a handshake that compares protocol versions and proves to each side that the other knows
the secret (HMAC-SHA-256 over both nonces; the secret itself never travels): the shared one, or, on loopback where none
is set, this user's own (transport/process/secret.py). What follows is not encrypted. Blocking sockets with recv_into:
.23 CPU-seconds a GB, where asyncio streams take 3.2.

Owns: framing, deadlines, translation of socket errors. Invariant: nothing is read, allocated or waited for beyond a
bound. Errors: PeerUnavailableError (closed, silent, reset), MessageError (not our framing), PeerRejectedError (secret),
ProtocolMismatchError.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import msgspec

from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import PROTOCOL_VERSION, Struct
from transport.errors import MessageError, PeerRejectedError, PeerUnavailableError, ProtocolMismatchError
from transport.process.secret import Purpose, derive, own_secret
from transport.tensors.base import Deadline

MAX_HEADER_BYTES = 1024 * 1024
"""A longer header is not ours: the largest of ours names the columns of a few thousand rows."""
MAX_GREETING_BYTES = 1024
"""Of a header in the handshake, which comes from a stranger."""
HANDSHAKE_S = 10.0
"""A stranger who connects and says nothing is cut off after this."""
PARTS_AT_ONCE = 64
"""Buffers in one system call; the kernel takes up to 1,024, and 64 columns fill any socket's buffer."""
ANOTHER_USER = ": the two ends run as two users, or with two home directories; set STREAMRL_SECRET for both"
"""Where no shared secret is set."""
_SKIPPED_AT_ONCE = 256 * 1024
_LENGTH = struct.Struct(">I")

T = TypeVar("T")


class Hello(Struct, frozen=True, kw_only=True, tag=True):
    """Server speaks first. secret: a shared one is set there, else it wants proof of its user's own."""

    protocol: int
    nonce: bytes
    secret: bool


class Proof(Struct, frozen=True, kw_only=True, tag=True):
    """Client's answer, and then the server's own."""

    protocol: int
    nonce: bytes
    mac: bytes = b""


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """In place of any answer: why there is none. retry: another source or a later attempt may do."""

    reason: str
    retry: bool = False


_hello_decoder = MessageDecoder(Hello)
_proof_decoder: MessageDecoder[Proof | Refused] = MessageDecoder(cast("type[Proof | Refused]", Proof | Refused))


class Channel:
    """One connection. Not for use by two threads at once. address: how errors name the other side."""

    def __init__(self, sock: socket.socket, address: str, deadline: Deadline) -> None:
        self._socket = sock
        self.address = address
        self.deadline = deadline

    @contextmanager
    def _limited(self) -> Generator[None]:
        """Give one socket call what is left of the deadline, and name what goes wrong with it."""
        remaining_s = self.deadline.remaining_s()
        if remaining_s <= 0:
            raise PeerUnavailableError(self.address, f"silent for longer than {self.deadline.seconds:.1f} s")
        try:
            self._socket.settimeout(remaining_s)
            yield
        except TimeoutError as error:
            reason = f"silent for longer than {self.deadline.seconds:.1f} s"
            raise PeerUnavailableError(self.address, reason) from error
        except OSError as error:
            raise PeerUnavailableError(self.address, error.strerror or str(error)) from error

    def send(self, header: msgspec.Struct, payload: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Send one frame; the parts of ``payload`` follow its header, whose fields say how long they are."""
        raw = encode(header)
        if len(raw) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(raw)} bytes is over the limit of {MAX_HEADER_BYTES}")
        self._send_all([_LENGTH.pack(len(raw)), raw, *payload])

    def _send_all(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """All parts, one after another, without joining them: that would copy every byte once more."""
        rest = [memoryview(part).cast("B") for part in parts]
        while rest:
            with self._limited():
                sent = self._socket.sendmsg(rest[:PARTS_AT_ONCE])
            first = 0
            while first < len(rest) and sent >= rest[first].nbytes:
                sent -= rest[first].nbytes
                first += 1
            rest = rest[first:]
            if sent:
                rest[0] = rest[0][sent:]

    def send_file(self, file: object, offset: int, nbytes: int) -> None:
        """Send a part of an open binary file from the kernel, without a copy in this process."""
        with self._limited():
            sent = self._socket.sendfile(file, offset, nbytes)  # type: ignore[arg-type]
        if sent != nbytes:
            raise PeerUnavailableError(self.address, f"only {sent} of {nbytes} bytes could be sent")

    def receive(self, decoder: MessageDecoder[T], max_bytes: int = MAX_HEADER_BYTES) -> T:
        """The next header."""
        size = bytearray(_LENGTH.size)
        self.receive_into(memoryview(size))
        (length,) = _LENGTH.unpack(size)
        if length > max_bytes:
            raise MessageError(f"{self.address} announces a header of {length} bytes: not one of ours")
        raw = bytearray(length)
        self.receive_into(memoryview(raw))
        return decoder.decode(memoryview(raw))

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        received = 0
        while received < view.nbytes:
            with self._limited():
                count = self._socket.recv_into(view[received:])
            if not count:
                raise PeerUnavailableError(self.address, f"closed after {received} of {view.nbytes} bytes")
            received += count

    def skip(self, nbytes: int) -> None:
        """Receive bytes and drop them, so that what follows them can be read."""
        scratch = memoryview(bytearray(min(nbytes, _SKIPPED_AT_ONCE)))
        while nbytes:
            self.receive_into(scratch[:nbytes])
            nbytes -= min(nbytes, len(scratch))

    @property
    def own_port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def peer_port(self) -> int:
        """Raises PeerUnavailableError: the peer has disconnected."""
        with self._limited():
            return int(self._socket.getpeername()[1])

    def close(self) -> None:
        self._socket.close()


def _mac(secret: bytes, role: str, port: int, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Proof of ``secret`` for one connection.

    The role keeps one side's proof from being sent back as the other's; the server's port, as each side sees it, keeps
    a process that took the port of a server that died from passing its clients' proofs on to another one.
    Raises SecretError: none is set, and this user cannot have one.
    """
    key = derive(secret or own_secret(), Purpose.TENSORS).encode()
    return hmac.digest(key, encode((role, port, server_nonce, client_nonce)), hashlib.sha256)


def greet_client(channel: Channel, secret: bytes, admit: Callable[[], bool] = lambda: True) -> None:
    """The server's half of the handshake. admit: asked once the client has proved itself: whether there is room for it.

    Raises PeerRejectedError, or PeerUnavailableError where there is no room, after the client was sent the reason.
    """
    nonce = secrets.token_bytes(16)
    channel.send(Hello(protocol=PROTOCOL_VERSION, nonce=nonce, secret=bool(secret)))
    answer = channel.receive(_proof_decoder, MAX_GREETING_BYTES)
    if isinstance(answer, Refused):
        raise PeerRejectedError(channel.address, answer.reason)
    _check_protocol(channel.address, answer.protocol)
    if not hmac.compare_digest(answer.mac, _mac(secret, "client", channel.own_port, nonce, answer.nonce)):
        channel.send(Refused(reason="the secret differs"))
        raise PeerRejectedError(channel.address, "the secret differs")
    if not admit():
        channel.send(Refused(reason="all its connections are in use", retry=True))
        raise PeerUnavailableError(channel.address, "there is no room for one more connection")
    mac = _mac(secret, "server", channel.own_port, nonce, answer.nonce)
    channel.send(Proof(protocol=PROTOCOL_VERSION, nonce=nonce, mac=mac))


def greet_server(channel: Channel, secret: bytes) -> None:
    """The client's half: no server is accepted that cannot prove itself."""
    hello = channel.receive(_hello_decoder, MAX_GREETING_BYTES)
    _check_protocol(channel.address, hello.protocol)
    if hello.secret != bool(secret):
        side = "asks for a shared secret and none is set here" if hello.secret else "has no shared secret, we have one"
        channel.send(Refused(reason="one side has a shared secret, the other has none"))
        raise PeerRejectedError(channel.address, f"it {side}")
    nonce = secrets.token_bytes(16)
    mac = _mac(secret, "client", channel.peer_port, hello.nonce, nonce)
    channel.send(Proof(protocol=PROTOCOL_VERSION, nonce=nonce, mac=mac))
    answer = channel.receive(_proof_decoder, MAX_GREETING_BYTES)
    if isinstance(answer, Refused):
        if answer.retry:
            raise PeerUnavailableError(channel.address, answer.reason)
        raise PeerRejectedError(channel.address, answer.reason if secret else f"{answer.reason}{ANOTHER_USER}")
    if not hmac.compare_digest(answer.mac, _mac(secret, "server", channel.peer_port, hello.nonce, nonce)):
        raise PeerRejectedError(channel.address, "it cannot prove that it knows the secret")


def _check_protocol(address: str, protocol: int) -> None:
    if protocol not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
        raise ProtocolMismatchError(f"{address} speaks protocol {protocol}, we speak {PROTOCOL_VERSION}")


def connect(host: str, port: int, address: str, secret: bytes, deadline: Deadline) -> Channel:
    """Open a connection and shake hands within ``deadline``."""
    try:
        sock = socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s()))
    except OSError as error:
        raise PeerUnavailableError(address, error.strerror or str(error)) from error
    except UnicodeError as error:  # from the look-up of a name with an empty part, or one of more than 63 characters
        raise PeerUnavailableError(address, f"{host[:80]!r} is no host name") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(sock, address, deadline)
    try:
        greet_server(channel, secret)
    except BaseException:
        channel.close()
        raise
    return channel
