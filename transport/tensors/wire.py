"""Connections between processes, both ends: framed messages and bulk bytes over blocking sockets.

    frame = length of the header (4 bytes, big-endian) | header (MessagePack struct) | bytes whose number it names

Every connection starts with a handshake that compares protocol versions and proves to each side that the other knows
the secret (HMAC-SHA-256 over both nonces; the secret itself never travels): the shared one, or, on loopback where none
is set, this user's own (transport/process/secret.py). What follows is not encrypted. Blocking sockets with recv_into:
.23 CPU-seconds a GB, where asyncio streams take 3.2.

A small request takes four calls to the kernel, two at each end, as a bare loop does: a header and the bytes with it go
in one, and come in one. The kernel keeps the limits (SO_RCVTIMEO), and is told anew where they are longer than what is
left of a deadline, or far shorter; of Python's own time limits each costs two calls more.

A server gives each connection a thread:

    unproven   until the handshake is done, HANDSHAKE_S at most. Past their bound the oldest goes, of the address that
               has most of them: a client proves itself within milliseconds, so silent strangers push out each other
    proven     bounded for themselves: no number of strangers keeps a client out

Owns: framing, deadlines, translation of socket errors; the listening socket and the connection threads. Never: what is
asked or answered. Invariants: nothing is read, allocated or waited for beyond a bound; nothing is served to a client
that does not prove that it knows the secret; after ``close`` no thread and no socket of ours is left. Errors:
PeerUnavailableError (closed, silent, reset), MessageError (not our framing), PeerRejectedError (secret),
ProtocolMismatchError.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import select
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec

from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import PROTOCOL_VERSION, Struct
from transport.errors import (
    ListenError,
    MessageError,
    PeerRejectedError,
    PeerUnavailableError,
    ProtocolMismatchError,
    StreamError,
)
from transport.process.secret import Purpose, derive, own_secret
from transport.tensors.base import Deadline, Endpoint

MAX_HEADER_BYTES = 1024 * 1024  # a longer one is not ours: the largest names the columns of a few thousand rows
MAX_GREETING_BYTES = 1024  # of a header in the handshake, which comes from a stranger
HANDSHAKE_S = 10.0  # a stranger who connects and says nothing is cut off after this
IDLE_S = 300.0  # a connection that asks for nothing for so long is closed; its client connects again
MAX_CONNECTIONS = 128  # of clients that have proved themselves: each has a thread
MAX_UNPROVEN = 64  # threads that strangers can make us start
PARTS_AT_ONCE = 64  # buffers in one system call; the kernel takes up to 1,024, and 64 columns fill any socket's buffer
JOINED_BYTES = 64 * 1024  # so much is copied behind its header: cheaper than to be told where each part lies
AHEAD_BYTES = 16 * 1024  # of what came with a header; more would be copied once more for nothing
FILE_BYTES = 4 * 1024 * 1024  # of a file in one call
_POLL_S = 0.05  # how soon the accept loop sees ``close``
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("ll")

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


class SupportsClose(Protocol):
    def close(self) -> None: ...


class Channel:
    """One connection. Not for use by two threads at once.

    address: how errors name the other side.  beside: what belongs to this connection, and is closed before it.
    """

    def __init__(self, sock: socket.socket, address: str, deadline: Deadline) -> None:
        sock.settimeout(None)
        self._socket = sock
        self.address = address
        self.deadline = deadline
        self.beside: SupportsClose | None = None
        self._limits_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # that the kernel was told
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._first = self._last = 0  # [first, last) of it came, and was not asked for yet

    def _wait(self, option: int, call: Callable[..., int], *arguments: Any) -> int:
        """A socket call that may take what is left of the deadline. option: the kernel's limit that holds for it."""
        remaining_s, share = self.deadline.remaining_s(), 0.75  # so that it still holds when less is left
        try:
            while remaining_s > 0:
                if not remaining_s / 2 <= self._limits_s[option] <= remaining_s:
                    self._limit(option, share * remaining_s)
                try:
                    return call(*arguments)
                except BlockingIOError:
                    remaining_s = min(remaining_s - self._limits_s[option], self.deadline.remaining_s())
                    share = 1.0
        except OSError as error:
            raise self._failed(error) from error
        raise self._silent()

    def _silent(self) -> PeerUnavailableError:
        return PeerUnavailableError(self.address, f"silent for longer than {self.deadline.seconds:.1f} s")

    def _limit(self, option: int, seconds: float) -> None:
        limit_us = max(1, int(1e6 * seconds))  # 0 would be no limit
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(limit_us, 1_000_000)))
        self._limits_s[option] = limit_us / 1e6

    def _failed(self, error: OSError) -> PeerUnavailableError:
        return PeerUnavailableError(self.address, error.strerror or str(error))

    def send(self, header: msgspec.Struct, payload: Sequence[bytes | bytearray | memoryview] = ()) -> None:
        """Send one frame; the parts of ``payload`` follow its header, whose fields say how long they are."""
        raw = encode(header)
        if len(raw) > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {len(raw)} bytes is over the limit of {MAX_HEADER_BYTES}")
        parts = (_LENGTH.pack(len(raw)), raw, *payload)
        if sum(map(len, payload)) <= JOINED_BYTES:
            self.send_view(b"".join(parts))
            return
        # Not joined: that would copy every byte once more.
        rest = [memoryview(part).cast("B") for part in parts]
        while rest:
            sent = self._wait(socket.SO_SNDTIMEO, self._socket.sendmsg, rest[:PARTS_AT_ONCE])
            first = 0
            while first < len(rest) and sent >= rest[first].nbytes:
                sent -= rest[first].nbytes
                first += 1
            rest = rest[first:]
            if sent:
                rest[0] = rest[0][sent:]

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send a part of an open file from the kernel, without a copy in this process: 40% less of a sender's CPU.

        One such call on a blocking socket may wait as often as it likes.
        """
        end = offset + nbytes
        self._socket.setblocking(False)
        try:
            writable = select.poll()
            writable.register(self._socket, select.POLLOUT)
            while offset < end:
                try:
                    sent = os.sendfile(self._socket.fileno(), fd, offset, min(FILE_BYTES, end - offset))
                except BlockingIOError:
                    remaining_s = self.deadline.remaining_s()
                    if not (remaining_s and writable.poll(1000 * remaining_s)):
                        raise self._silent() from None
                    continue
                if not sent:
                    raise PeerUnavailableError(self.address, f"{end - offset} bytes of the file are not there")
                offset += sent
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._socket.setblocking(True)

    def send_view(self, view: bytes | memoryview) -> None:
        """Send bytes that may change once this returns."""
        try:
            sent = self._socket.send(view, socket.MSG_DONTWAIT)  # mostly there is room, and no limit to look after
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._failed(error) from error
        while sent < len(view):
            sent += self._wait(socket.SO_SNDTIMEO, self._socket.send, memoryview(view)[sent:])

    def receive(self, decoder: MessageDecoder[T], max_bytes: int = MAX_HEADER_BYTES) -> T:
        """The next frame's header. Bytes behind it may come with it, and are there for who asks next."""
        while (kept := self._last - self._first) < _LENGTH.size:
            if kept:
                self._ahead[:kept] = bytes(self._ahead[self._first : self._last])
            self._first, self._last = 0, kept + self._receive_now(self._ahead[kept:])
        (length,) = _LENGTH.unpack_from(self._ahead, self._first)
        if length > max_bytes:
            raise MessageError(f"{self.address} announces a header of {length} bytes: not one of ours")
        self._first += _LENGTH.size
        if self._first + length <= self._last:
            raw = self._ahead[self._first : self._first + length]
            self._first += length
        else:
            raw = memoryview(bytearray(length))
            self.receive_into(raw)
        return decoder.decode(raw)

    def ask(self, header: msgspec.Struct, decoder: MessageDecoder[T], payload: Sequence[bytes | memoryview] = ()) -> T:
        self.send(header, payload)
        return self.receive(decoder)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes."""
        received = 0
        while received < view.nbytes:
            received += self.receive_some(view[received:])

    def receive_some(self, view: memoryview) -> int:
        """Put what is there, at least one byte, at the beginning of ``view``. Returns how many bytes came."""
        if self._first == self._last:
            return self._receive_now(view)
        count = min(view.nbytes, self._last - self._first)
        view[:count] = self._ahead[self._first : self._first + count]
        self._first += count
        return count

    def _receive_now(self, view: memoryview) -> int:
        if not (count := self._wait(socket.SO_RCVTIMEO, self._socket.recv_into, view)):
            raise PeerUnavailableError(self.address, f"closed before {view.nbytes} bytes that were to come")
        return count

    def skip(self, nbytes: int) -> None:
        """Receive bytes and drop them, so that what follows them can be read."""
        scratch = memoryview(bytearray(min(nbytes, 256 * 1024)))
        while nbytes:
            self.receive_into(scratch[:nbytes])
            nbytes -= min(nbytes, len(scratch))

    @property
    def own_host(self) -> str:
        """The address of this end. Raises PeerUnavailableError: there is no connection any more."""
        try:
            return str(self._socket.getsockname()[0])
        except OSError as error:
            raise self._failed(error) from error

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this very network stack."""
        try:
            return self._socket.getsockname()[0] == self._socket.getpeername()[0]
        except OSError:  # no connection any more
            return False

    @property
    def own_port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def peer_port(self) -> int:
        """Raises PeerUnavailableError: the peer has disconnected."""
        try:
            return int(self._socket.getpeername()[1])
        except OSError as error:
            raise self._failed(error) from error

    def fileno(self) -> int:
        """Becomes readable when the other side speaks or leaves."""
        return self._socket.fileno()

    def close(self) -> None:
        beside, self.beside = self.beside, None  # it may refer to this connection
        if beside is not None:
            beside.close()
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
        of_two_users = ": the two ends run as two users, or with two home directories; set STREAMRL_SECRET for both"
        raise PeerRejectedError(channel.address, answer.reason if secret else f"{answer.reason}{of_two_users}")
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


class _Standing(Enum):
    UNPROVEN = 1
    PROVEN = 2
    CUT = 3


@dataclass(slots=True, eq=False)
class _Connection:
    """One client, or stranger, and the thread that speaks with it. host: where it comes from."""

    socket: socket.socket
    host: str
    port: int
    standing: _Standing = _Standing.UNPROVEN
    thread: threading.Thread = field(init=False)

    def cut(self) -> None:
        """Wake its thread, which then ends."""
        self.standing = _Standing.CUT
        with contextlib.suppress(OSError):  # it has ended by itself
            self.socket.shutdown(socket.SHUT_RDWR)


class _Listener(socketserver.TCPServer):
    """The standard library's, which hands each connection to ``accept``."""

    allow_reuse_address = True
    request_queue_size = 512  # of connections not yet accepted; when it is full, the kernel lets a client wait for 1 s

    def __init__(self, host: str, port: int, accept: Callable[[socket.socket, Any], None]) -> None:
        self._accept = accept
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), socketserver.BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._accept(request, client_address)


class ChannelServer:
    """Serves connections from ``start`` to ``close``."""

    def __init__(
        self,
        serve: Callable[[Channel], None],  # one request and its answer; called again until the connection ends
        endpoint: Endpoint,  # where to listen, and the secret of its clients; none: that of this user
        *,
        request_s: float,  # limit of one request and its answer
        ended: Callable[[Channel], None] = lambda _: None,  # called once for each connection that was served
    ) -> None:
        self._serve = serve
        self._ended = ended
        self._endpoint = endpoint
        self._request_s = request_s
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []  # in the order in which they came
        self._listener: _Listener | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen on the first port that is free. Returns it.

        Raises ListenError: none is, or the host is not ours.  SecretError: this user cannot have a secret.
        """
        if not self._endpoint.secret:
            own_secret()  # fails here rather than at each connection, where the reason would not be seen
        self._listener = self._bind()
        # Daemons, as the connections' threads: a process that dies of an exception must not wait for its clients.
        serve = self._listener.serve_forever
        self._thread = threading.Thread(target=serve, args=(_POLL_S,), name="tensor-server", daemon=True)
        self._thread.start()
        return int(self._listener.server_address[1])

    def check(self) -> None:
        """Raises ListenError where ``start`` would now."""
        self._bind().server_close()

    def _bind(self) -> _Listener:
        reason = "it has no ports"
        for port in self._endpoint.ports:
            try:
                return _Listener(self._endpoint.host, port, self._accept)
            except OSError as error:
                reason = error.strerror or str(error)
        ports = " to ".join(str(port) for port in sorted({self._endpoint.ports[0], self._endpoint.ports[-1]}))
        raise ListenError(f"cannot listen on {self._endpoint.host}, port {ports}: {reason}; choose others")

    def _accept(self, accepted: socket.socket, peer: Any) -> None:
        """Begin a connection, for which an unproven one may have to go."""
        connection = _Connection(accepted, *peer[:2])
        name = f"tensor-connection-{connection.port}"
        connection.thread = threading.Thread(target=self._converse, args=(connection,), name=name, daemon=True)
        with self._lock:
            # A connection stays here until its thread has ended, not only its work: ``close`` waits for it.
            self._connections = [one for one in self._connections if one.thread.is_alive()]
            unproven = [one for one in self._connections if one.standing is _Standing.UNPROVEN]
            if len(unproven) >= MAX_UNPROVEN:
                [(crowded, _)] = Counter(one.host for one in unproven).most_common(1)
                next(one for one in unproven if one.host == crowded).cut()
            self._connections.append(connection)
            connection.thread.start()

    def _converse(self, connection: _Connection) -> None:
        channel = Channel(connection.socket, f"{connection.host}:{connection.port}", Deadline(HANDSHAKE_S))
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(StreamError):  # the peer left, lied or stayed silent: its connection ends, no more
                greet_client(channel, self._endpoint.secret, partial(self._admit, connection))
                try:
                    while True:
                        channel.deadline = Deadline(IDLE_S)
                        self._serve(channel)
                finally:
                    self._ended(channel)
        finally:
            connection.cut()
            channel.close()

    def _admit(self, connection: _Connection) -> bool:
        """Count a client that has proved itself among the others. Returns False where there are too many."""
        with self._lock:
            num_proven = sum(one.standing is _Standing.PROVEN for one in self._connections)
            if connection.standing is _Standing.CUT or num_proven >= MAX_CONNECTIONS:
                return False
            connection.standing = _Standing.PROVEN
            return True

    def close(self) -> None:
        """Stop listening and end every connection, also in the middle of a transfer."""
        if self._listener is None or self._thread is None:
            return
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
        for connection in self._connections:
            connection.cut()
        for connection in self._connections:
            connection.thread.join(self._request_s)
        self._listener = self._thread = None
