"""A listener that gives each connection a thread and a handshake, and hands it to whoever knows its requests.

Owns: the listening socket, the connection threads, their end. Never: what is asked or answered. Invariant: off
loopback there is a shared secret; after ``close`` no thread and no socket of this server is left.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from transport.errors import ListenError, StreamError
from transport.tensors.base import Deadline
from transport.tensors.endpoint import Endpoint
from transport.tensors.wire import HANDSHAKE_S, Channel, greet_client

IDLE_S = 300.0
"""A connection that asks for nothing for so long is closed; its client connects again."""
MAX_CONNECTIONS = 128
"""Threads that strangers can make us start."""
_POLL_S = 0.05
"""How soon the accept loop sees ``close``."""

Serve = Callable[[Channel], None]
"""Reads one request from a channel and answers it. Called again until the connection ends."""


class _ThreadingServer(socketserver.ThreadingTCPServer):
    """The standard library's, with its connections bounded and known."""

    allow_reuse_address = True
    daemon_threads = True  # a process that dies of an exception must not wait for its clients
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], serve: Callable[[socket.socket, str], None]) -> None:
        self._serve = serve
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, socketserver.BaseRequestHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse connections past the bound; socketserver then closes them."""
        return self._slots.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        name = f"tensor-connection-{client_address[1]}"
        thread = threading.Thread(target=self._run, args=(request, client_address), name=name, daemon=True)
        thread.start()
        # A thread stays here until it has ended, not only its work: ``close`` waits for it.
        self._connections = [one for one in self._connections if one[1].is_alive()]
        self._connections.append((request, thread))

    def _run(self, request: socket.socket, client_address: tuple[str, int]) -> None:
        try:
            self._serve(request, f"{client_address[0]}:{client_address[1]}")
        finally:
            self.shutdown_request(request)
            self._slots.release()

    def cut_connections(self, wait_s: float) -> None:
        """Wake every connection's thread by closing its socket, and wait for them to end; after ``shutdown`` only."""
        for request, _ in self._connections:
            with contextlib.suppress(OSError):  # one that has ended
                request.shutdown(socket.SHUT_RDWR)
        for _, thread in self._connections:
            thread.join(wait_s)


class ChannelServer:
    """Serves connections from ``start`` to ``close``.

    endpoint: where to listen, and the secret of its clients.
    serve: called for one request after another on each connection, on that connection's thread.
    request_s: limit of one request and its answer, seconds.
    """

    def __init__(self, serve: Serve, endpoint: Endpoint, *, request_s: float) -> None:
        self._serve = serve
        self._endpoint = endpoint
        self._request_s = request_s
        self._server: _ThreadingServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen on the first port that is free. Returns it. Raises ListenError: none is, or the host is not ours."""
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

    def _converse(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(sock, peer, Deadline(HANDSHAKE_S))
        with contextlib.suppress(StreamError):  # the peer left, lied or stayed silent: its connection ends, no more
            greet_client(channel, self._endpoint.secret)
            while True:
                channel.deadline = Deadline(IDLE_S)
                self._serve(channel)

    def close(self) -> None:
        """Stop listening and end every connection, also in the middle of a transfer."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_connections(self._request_s)
        self._server = self._thread = None
