"""Who may ask, and how much: the door in front of every HTTP route.

Owns: the checks of host, origin, secret and size, and the headers of every answer. Never: what a route does.
Invariant: off loopback nothing but ``/health`` is answered without the secret; what changes a run is answered to nobody
without it. Source: ours (DESIGN, trust).

    loopback   a web page of another origin may reach us through its visitor's browser: Host and Origin are checked
               (DNS rebinding, forged requests); reading needs no secret, changing does
    elsewhere  every request carries ``Authorization: Bearer <secret>``, or Basic with it as the password (browsers ask)
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 1024 * 1024
"""Larger than anything that most routes read; a body that is longer is refused before it is held."""
OPEN_PATHS = ("/health",)
"""Said to anyone: a container's health check has no secret, and learns nothing else."""
READING = ("GET", "HEAD")
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


def host_of(authority: str) -> str:
    """The host name in ``name:port``, "" where it cannot be read."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def presented_secret(authorization: str) -> str:
    """The secret in an Authorization header: a bearer token or a Basic password; "" where there is none."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not text
        return ""


class Guard:
    """Passes on what may pass; answers the rest with a status that says why. An ASGI application around another."""

    def __init__(self, app: ASGIApp, *, host: str, secret: str, body_limits: Mapping[str, int] | None = None) -> None:
        """host: what the listener is bound to.  secret: never empty.  body_limits: bytes, by path."""
        self._app = app
        self._body_limits = body_limits or {}
        self._host = host
        self._on_loopback = is_loopback(host)
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        send = _with_headers(send)
        refusal = self._refusal(scope["method"], scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive, self._body_limit(scope["path"])), send)

    def _refusal(self, method: str, path: str, headers: Headers) -> JSONResponse | None:
        """The answer to a request that may not pass; None for one that may."""
        host = headers.get("host", "")
        if self._on_loopback and not self._is_ours(host_of(host)):
            return _refuse(403, "this host name is not ours; ask by the address that api.address names")
        origin = headers.get("origin")
        if origin is not None and authority_of(origin) != host.lower():
            return _refuse(403, "pages of another origin may not ask")
        reads = method in READING and (self._on_loopback or path in OPEN_PATHS)
        if not reads and not self._knows_secret(headers.get("authorization", "")):
            return _refuse(401, "the secret is missing or wrong", {"www-authenticate": 'Basic realm="streamrl"'})
        length = headers.get("content-length", "0")
        limit = self._body_limit(path)
        if length.isdecimal() and int(length) > limit:
            return _refuse(413, f"a body has at most {limit} bytes")
        return None

    def _body_limit(self, path: str) -> int:
        return self._body_limits.get(path, MAX_BODY_BYTES)

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name == self._host

    def _knows_secret(self, authorization: str) -> bool:
        return hmac.compare_digest(presented_secret(authorization).encode(), self._secret.encode())


def authority_of(origin: str) -> str:
    """``host:port`` of an Origin header, "" for ``null`` and for what cannot be read."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _refuse(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    # An unread body may follow: the connection is of no further use.
    return JSONResponse({"error": reason}, status, {"connection": "close", **(headers or {})})


def _bounded(receive: Receive, limit: int) -> Receive:
    """``receive`` until the body is over its limit, also where its length was not told."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise HTTPException(413, f"a body has at most {limit} bytes", {"connection": "close"})
        return message

    return bounded


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in ANSWER_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
