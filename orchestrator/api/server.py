"""The HTTP listener inside the orchestrator's process: its address, its secret, its one task.

Owns: the socket and uvicorn's life. Never: signals (the orchestrator has them) nor what is answered (routes.py).
Invariant: when the task ends, also by cancellation, no connection and no task of it is left.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.api.guard import is_loopback
from orchestrator.config import SECRET_VARIABLE
from orchestrator.errors import ConfigError
from transport.files import replace
from transport.settings import ApiSettings

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 256
"""More are answered with 503; each may hold 64 KiB."""
HEAD_S = 5.0
"""A connection that has not sent one whole request head by then is closed."""
CLOSE_S = 2.0
"""At the end, how long an answer under way may take."""


def check_secret(api: ApiSettings) -> None:
    """Raises ConfigError where anyone on the network could ask."""
    if api.enabled and not api.secret and not is_loopback(api.host):
        raise ConfigError(
            f"api.host {api.host} is reached from other machines: set {SECRET_VARIABLE} (or api.secret), "
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
    """The port of a former life, 0 where none is told."""
    text = address_file.read_text(encoding="ascii", errors="replace") if address_file.exists() else ""
    port = text.strip().rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def control_secret(api: ApiSettings, secret_file: Path) -> str:
    """The configured secret; else one of the run's own, readable by its owner alone, made once."""
    if api.secret:
        return api.secret
    if not secret_file.exists():
        replace(secret_file, secrets.token_urlsafe(32), mode=0o600)
    return secret_file.read_text(encoding="ascii").strip()


async def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Answer on ``listener`` until cancelled; then let answers under way end, and close it."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
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


class _Protocol(H11Protocol):
    """HTTP, and a client that says nothing, or never ends its first head, is let go."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._patience = self.loop.call_later(HEAD_S, self._let_go)

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def _let_go(self) -> None:
        if self.cycle is None:
            self.transport.close()
