"""A listener that gives each connection a thread and a handshake, and hands it to the code that knows its requests.

    unproven   until the handshake is done, HANDSHAKE_S at most. Past their bound the oldest goes, of the address that
               has most of them: a client proves itself within milliseconds, so silent strangers push out each other
    proven     bounded for themselves: no number of strangers keeps a client out

Owns: the listening socket, the connection threads, their end. Never: what is asked or answered. Invariant: nothing is
served to a client that does not prove that it knows the secret; after ``close`` no thread and no socket of ours is
left.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from transport.errors import ListenError, StreamError
from transport.process.secret import own_secret
from transport.tensors.address import Endpoint
from transport.tensors.base import Deadline
from transport.tensors.wire import HANDSHAKE_S, Channel, greet_client

IDLE_S = 300.0
"""A connection that asks for nothing for so long is closed; its client connects again."""
MAX_CONNECTIONS = 128
"""Of clients that have proved themselves: each has a thread."""
MAX_UNPROVEN = 64
"""Threads that strangers can make us start."""
_POLL_S = 0.05
"""How soon the accept loop sees ``close``."""

Serve = Callable[[Channel], None]
"""Reads one request from a channel and answers it. Called again until the connection ends."""


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


class _ThreadingServer(socketserver.ThreadingTCPServer):
    """The standard library's, with its connections bounded and known."""

    allow_reuse_address = True
    daemon_threads = True  # a process that dies of an exception must not wait for its clients
    request_queue_size = 512  # of connections not yet accepted; when it is full, the kernel lets a client wait for 1 s

    def __init__(self, address: tuple[str, int], serve: Callable[[_Connection, Callable[[], bool]], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []  # in the order in which they came
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, socketserver.BaseRequestHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        connection = _Connection(request, *client_address[:2])
        name = f"tensor-connection-{connection.port}"
        connection.thread = threading.Thread(target=self._run, args=(connection,), name=name, daemon=True)
        with self._lock:
            # A connection stays here until its thread has ended, not only its work: ``close`` waits for it.
            self._connections = [one for one in self._connections if one.thread.is_alive()]
            self._make_room()
            self._connections.append(connection)
            connection.thread.start()

    def _make_room(self) -> None:
        unproven = [one for one in self._connections if one.standing is _Standing.UNPROVEN]
        if len(unproven) >= MAX_UNPROVEN:
            [(crowded, _)] = Counter(one.host for one in unproven).most_common(1)
            next(one for one in unproven if one.host == crowded).cut()

    def _admit(self, connection: _Connection) -> bool:
        """Count a client that has proved itself among the others. Returns False where there are too many."""
        with self._lock:
            num_proven = sum(one.standing is _Standing.PROVEN for one in self._connections)
            if connection.standing is _Standing.CUT or num_proven >= MAX_CONNECTIONS:
                return False
            connection.standing = _Standing.PROVEN
            return True

    def _run(self, connection: _Connection) -> None:
        try:
            self._serve(connection, lambda: self._admit(connection))
        finally:
            self.shutdown_request(connection.socket)
            connection.standing = _Standing.CUT

    def cut_connections(self, wait_s: float) -> None:
        """Wake every connection's thread by closing its socket, and wait for them to end; after ``shutdown`` only."""
        for connection in self._connections:
            connection.cut()
        for connection in self._connections:
            connection.thread.join(wait_s)


class ChannelServer:
    """Serves connections from ``start`` to ``close``.

    endpoint: where to listen, and the secret of its clients; none: that of this user.
    serve: called for one request after another on each connection, on that connection's thread.
    request_s: limit of one request and its answer, seconds.
    ended: called once for each connection that was served, after its last request.
    """

    def __init__(
        self, serve: Serve, endpoint: Endpoint, *, request_s: float, ended: Callable[[Channel], None] = lambda _: None
    ) -> None:
        self._serve = serve
        self._ended = ended
        self._endpoint = endpoint
        self._request_s = request_s
        self._server: _ThreadingServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen on the first port that is free. Returns it.

        Raises ListenError: none is, or the host is not ours.  SecretError: this user cannot have a secret.
        """
        if not self._endpoint.secret:
            own_secret()  # fails here rather than at each connection, where the reason would not be seen
        self._server = self._bind()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="tensor-server", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def _bind(self) -> _ThreadingServer:
        reason = "it has no ports"
        for port in self._endpoint.ports:
            try:
                return _ThreadingServer((self._endpoint.host, port), self._converse)
            except OSError as error:
                reason = error.strerror or str(error)
        ports = " to ".join(str(port) for port in sorted({self._endpoint.ports[0], self._endpoint.ports[-1]}))
        raise ListenError(f"cannot listen on {self._endpoint.host}, port {ports}: {reason}; choose others")

    def _converse(self, connection: _Connection, admit: Callable[[], bool]) -> None:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection.socket, f"{connection.host}:{connection.port}", Deadline(HANDSHAKE_S))
        with contextlib.suppress(StreamError):  # the peer left, lied or stayed silent: its connection ends, no more
            greet_client(channel, self._endpoint.secret, admit)
            try:
                while True:
                    channel.deadline = Deadline(IDLE_S)
                    self._serve(channel)
            finally:
                self._ended(channel)

    def close(self) -> None:
        """Stop listening and end every connection, also in the middle of a transfer."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_connections(self._request_s)
        self._server = self._thread = None
