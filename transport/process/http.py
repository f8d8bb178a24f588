"""An HTTP listener inside a process of a run: its address, its key, its connections, and who may ask what.

Everything that is asked passes the guard: it checks host, origin and key, and a body's size and time, and sets the
headers of every answer. Signals are left to the process.

Invariants: without a key nothing is answered but ``/health`` and the files of the live page, which say nothing
of a run; that holds on loopback too, because a machine has other users. Open paths are listed, so a new route requires
the key by default. When the listener's task ends, also by cancellation, no connection and no task of it is left.
Source: ours (DESIGN, trust).

    everywhere  a request carries ``Authorization: Bearer <key>``; no browser adds it by itself, as it does with cookies
                and passwords, so a page of another origin cannot use it
    loopback    such a page may still reach us through its visitor's browser: Host and Origin are checked, too (DNS
                rebinding, forged requests)
"""

# pyright: standard
# The protocol of uvicorn, which this one extends, leaves most of its types out.

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import SplitResult, urlsplit

import msgspec
import structlog
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from transport.errors import ForeignError
from transport.process.files import read_own, replace
from transport.process.secret import Purpose, derive, is_made

ENDPOINT_KEY = "endpoint.key"
ENDPOINT_ADDRESSES = "endpoint"
"""In a run's directory: the key of the endpoint for agents; <number of the generation worker>.address of each."""

# --- answers ----------------------------------------------------------------------------------------------------------


def number_of(text: str) -> int | None:
    """A whole number from 0 on that a client sent, None for anything else.

    No number here needs more than 18 digits, and int() refuses to read very many.
    """
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def answer(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON that a browser can read: a loss that is not a number becomes null."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


async def name_error(request: Request, error: Exception) -> Response:
    """``{"error": why}`` for what a route refused."""
    assert isinstance(error, HTTPException)  # the only kind it is registered for
    return answer({"error": error.detail}, error.status_code, error.headers)


# --- the guard --------------------------------------------------------------------------------------------------------


class BodyLimit(NamedTuple):
    """num_bytes: a longer one is refused before it is held.  seconds: from when a route begins to read it."""

    num_bytes: int = 1024 * 1024
    seconds: float = 5.0


SMALL_BODY = BodyLimit()
"""More than anything that most routes read."""
HEALTH = "/health"
"""Open to all, because a container's health check has no key. It says only whether the run is well."""
READING = ("GET", "HEAD")
Opens = Callable[[str], bool]
"""Whether a key that a client presents opens this listener; it takes as long for a nearly right one as for any."""


class Refuse(Protocol):
    """The answer to what may not pass."""

    def __call__(self, status: int, reason: str, headers: dict[str, str] | None = None, /) -> Response: ...


KEY_WANTED = (
    "the key is missing or wrong: send 'Authorization: Bearer KEY'; it is in the file api.secret of the run's directory"
)
PROVE = "prove"
"""Key of a request's ``state``: called when a client has shown the key. () -> whether there is room for it."""
ANSWER_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on ``host``."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def presented_key(authorization: str) -> str:
    """The bearer token in an Authorization header, "" where there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _parts(url: str) -> SplitResult:
    """Those of a host or an origin that a client sent; all empty where it cannot be read."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def same_key(key: str) -> Opens:
    """One key opens it. key: never empty."""
    return lambda presented: hmac.compare_digest(presented.encode(), key.encode())


def name_refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    # An unread body may follow: the connection is of no further use.
    return JSONResponse({"error": reason}, status, {"connection": "close", **(headers or {})})


class Guard:
    """Passes on what may pass; answers the rest with a status that says why. An ASGI application around another."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        opens: Opens,
        open_paths: Collection[str] = (),
        body_limits: Mapping[str, BodyLimit] | None = None,
        body_limit: BodyLimit = SMALL_BODY,
        key_wanted: str = KEY_WANTED,
        refuse: Refuse = name_refusal,
    ) -> None:
        """host: what the listener is bound to.  opens: whether a key does.  open_paths: that anyone may read, beside
        HEALTH.  body_limits: by path; ``body_limit`` of any other.  key_wanted, refuse: what is answered without a key,
        and in which form.
        """
        self._app = app
        self._body_limits = body_limits or {}
        self._body_limit = body_limit
        self._host = host
        self._on_loopback = is_loopback(host)
        self._opens = opens
        self._key_wanted = key_wanted
        self._refuse = refuse
        self._open_paths = frozenset({HEALTH, *open_paths})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        limit = self._body_limits.get(scope["path"], self._body_limit)
        refusal = self._refusal(scope, Headers(scope=scope), limit.num_bytes)
        if refusal is not None:
            await refusal(scope, receive, sending)
            return
        try:
            await self._app(scope, _bounded(receive, limit), sending)
        except asyncio.CancelledError:  # the listener has ended, and CLOSE_S are over: nobody waits for this task
            if not begun:
                await self._refuse(503, "this server has ended meanwhile")(scope, receive, sending)

    def _refusal(self, scope: Scope, headers: Headers, limit: int) -> Response | None:
        """The answer to a request that may not pass; None for one that may."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _parts(f"//{host}").hostname or ""
        if self._on_loopback and not (is_loopback(name) or name == self._host):
            return self._refuse(403, "this host name is not ours; ask by the address that api.address names")
        if origin is not None and _parts(origin).netloc.lower() != host.lower():
            return self._refuse(403, "pages of another origin may not ask")
        prove: Callable[[], bool] | None = scope.get("state", {}).get(PROVE)
        key = presented_key(headers.get("authorization", ""))
        if not self._opens(key):
            if scope["method"] not in READING or scope["path"] not in self._open_paths:
                return self._refuse(401, self._key_wanted, {"www-authenticate": 'Bearer realm="streamrl"'})
        elif prove is not None and not prove():
            return self._refuse(503, "too many clients with the key are connected: close some connections")
        length = number_of(headers.get("content-length", "0"))
        if length is None or length > limit:
            return self._refuse(413, f"a body has at most {limit} bytes here")
        return None


def _bounded(receive: Receive, limit: BodyLimit) -> Receive:
    """``receive`` until the body is over its limit, also where no length was sent, or takes too long."""
    received = 0
    whole = False
    deadline_s: float | None = None

    async def bounded() -> Message:
        nonlocal received, whole, deadline_s
        if whole:  # what comes now is the client's end, for which an answer may wait for ever
            return await receive()
        if deadline_s is None:
            deadline_s = asyncio.get_running_loop().time() + limit.seconds
        try:
            async with asyncio.timeout_at(deadline_s):
                message = await receive()
        except TimeoutError:
            reason = f"the body did not come within {limit.seconds:.0f} s"
            raise HTTPException(408, reason, {"connection": "close"}) from None
        received += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if received > limit.num_bytes:
            raise HTTPException(413, f"a body has at most {limit.num_bytes} bytes here", {"connection": "close"})
        return message

    return bounded


# --- the listener -----------------------------------------------------------------------------------------------------

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


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError: the port is in use, or the host is not ours."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=128)


def listen_again(host: str, address_file: Path) -> socket.socket | None:
    """Listen on the port that ``address_file`` says, so that clients outlive a restart; None where it is not free."""
    if address_file.exists():
        text = address_file.read_text(encoding="ascii", errors="replace")
        port = number_of(text.strip().rpartition(":")[2]) or 0
        with suppress(OSError):
            return listen(host, port if port < 1 << 16 else 0)
    return None


def write_address(listener: socket.socket, address_file: Path) -> str:
    """Write ``host:port``, and return it."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    replace(address_file, address + "\n")
    return address


def run_key(secret: str | bytes, key_file: Path, purpose: Purpose = Purpose.HTTP) -> str:
    """What clients present, kept in ``key_file``, which its owner alone can read: the key that the shared secret makes,
    or, without one, a key of the run's own, made once. A file that we cannot have written, or that others may read, is
    replaced.
    """
    known = ""
    with suppress(FileNotFoundError, ForeignError):
        kept = read_own(key_file, max_bytes=1000, secret=True).decode("ascii", "replace").strip()
        known = kept if is_made(kept) else ""
    key = derive(secret, purpose) if secret else known or secrets.token_urlsafe(24)
    if key != known:
        replace(key_file, key, mode=0o600)
    return key


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
        """None of them: the process ends in its own order."""
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
