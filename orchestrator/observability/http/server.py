"""The HTTP listener inside the orchestrator's process: its address, its key, its connections, its one task.

Signals are left to the orchestrator. Invariant: when the task ends, also by cancellation, no connection and no task of
it is left.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.errors import ConfigError
from orchestrator.observability.http.answers import number_of
from orchestrator.observability.http.guard import PROVE, is_loopback
from transport.contracts.settings import ApiSettings
from transport.errors import ForeignError
from transport.process.files import read_own, replace
from transport.process.secret import SHARED_SECRET, Purpose, derive, is_made

log = structlog.get_logger(__name__)

MAX_CLIENTS = 256
"""Connections that have shown the key; more are answered with 503."""
MAX_STRANGERS = 128
"""Connections that have not; one more ends another. Each may hold 16 KiB of a head."""
HEAD_S = 5.0
"""A connection that has not sent a whole request head so long after it began, or after the last answer, is ended."""
READ_S = 60.0
"""How long after an answer its reader may take to fetch the rest of it."""
CLOSE_S = 2.0
"""At the end, how long an answer under way may take."""


def check_secret(api: ApiSettings) -> None:
    """Raises ConfigError where anyone on the network could ask."""
    if api.enabled and not api.secret and not is_loopback(api.host):
        raise ConfigError(
            f"api.host {api.host} is reached from other machines: set {SHARED_SECRET} (or api.secret), "
            "or listen on 127.0.0.1",
            key="api.secret",
        )


def open_listener(api: ApiSettings, address_file: Path) -> socket.socket:
    """Listen, and write ``host:port`` to ``address_file``.

    With port 0 the port of the file is taken again where it is free, so that a page outlives a restart.
    Raises ConfigError: the port is in use, the host is not ours, or the secret is missing.
    """
    check_secret(api)
    before = _port_in(address_file) if not api.port else 0
    try:
        listener = _listen(api.host, before or api.port)
    except OSError as error:
        if not before:
            raise ConfigError(
                f"api.port {api.port} on {api.host} cannot be listened on: {error.strerror}; "
                "choose another, or 0 for a free one",
                key="api.port",
            ) from error
        listener = _listen(api.host, 0)
    host, port = listener.getsockname()[:2]
    replace(address_file, f"[{host}]:{port}\n" if ":" in host else f"{host}:{port}\n")
    return listener


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def _port_in(address_file: Path) -> int:
    """The port of an earlier start, 0 where there was none."""
    text = address_file.read_text(encoding="ascii", errors="replace") if address_file.exists() else ""
    port = number_of(text.strip().rpartition(":")[2])
    return port if port is not None and port < 1 << 16 else 0


def run_key(api: ApiSettings, key_file: Path) -> str:
    """What clients present, kept in ``key_file``, which its owner alone can read: the key that the shared secret makes,
    or, without one, a key of the run's own, made once. A file that we cannot have written, or that others may read, is
    replaced.
    """
    known = _kept_key(key_file)
    key = derive(api.secret, Purpose.HTTP) if api.secret else known or secrets.token_urlsafe(24)
    if key != known:
        replace(key_file, key, mode=0o600)
    return key


def _kept_key(key_file: Path) -> str:
    """ "" where there is none that can be ours."""
    with suppress(FileNotFoundError, ForeignError):
        key = read_own(key_file, max_bytes=1000, secret=True).decode("ascii", "replace").strip()
        return key if is_made(key) else ""
    return ""


async def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Answer on ``listener`` until cancelled; then let answers under way end, and close it."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(_Protocol, admission=Admission())),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(CLOSE_S),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
    log.info("http", address="{}:{}".format(*listener.getsockname()[:2]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None of them: the orchestrator ends in its own order."""
        yield


class Admission:
    """Which connections there may be: clients, which have shown the key, and strangers, each bounded on its own.

    Invariant: a stranger never takes a client's place, and one more is always let in: for it the oldest stranger of the
    address that has most of them goes, so that strangers of one host cannot crowd out those of another.
    """

    def __init__(self) -> None:
        self._strangers: dict[str, dict[_Protocol, None]] = {}
        self._clients: set[_Protocol] = set()

    def opened(self, connection: _Protocol) -> None:
        """A connection begins, as a stranger's."""
        if sum(map(len, self._strangers.values())) >= MAX_STRANGERS:
            oldest = next(iter(max(self._strangers.values(), key=len)))
            self.forget(oldest)
            oldest.transport.abort()
        self._strangers.setdefault(connection.peer, {})[connection] = None

    def proved(self, connection: _Protocol) -> bool:
        """It has shown the key. Returns whether there is room for one more client."""
        if connection not in self._clients:
            if len(self._clients) >= MAX_CLIENTS or connection.transport.is_closing():
                return False
            self.forget(connection)
            self._clients.add(connection)
        return True

    def forget(self, connection: _Protocol) -> None:
        """The connection has ended, is about to, or changes sides."""
        self._clients.discard(connection)
        same_peer = self._strangers.get(connection.peer, {})
        same_peer.pop(connection, None)
        if not same_peer:
            self._strangers.pop(connection.peer, None)


class _Protocol(H11Protocol):
    """HTTP with a deadline for every request head, also for one that comes in pieces or after an answer."""

    def __init__(self, *args: Any, admission: Admission, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None
        self.app_state = {PROVE: partial(admission.proved, self)}

    @property
    def peer(self) -> str:
        """The address at the other end."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._admission.opened(self)
        self._run_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._run_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._run_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.forget(self)
        self._stop_timer()
        super().connection_lost(exc)

    def _run_timer(self) -> None:
        """Limit the time from when a head is expected until it is complete; bytes in between do not extend it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self._time_out, READ_S)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self, more_s: float) -> None:
        """more_s: for a client that still reads its answer."""
        if more_s and self.transport.get_write_buffer_size():
            self._timer = self.loop.call_later(more_s, self._time_out, 0.0)
        else:
            self.transport.abort()
