"""Who may ask, and how much: the door in front of every HTTP route.

It checks host, origin and key, and a body's size and time, and sets the headers of every answer. Invariant: without the
run's key nothing is answered but ``/health`` and the files of the live page, which say nothing of a run; that holds on
loopback too, because a machine has other users. Open paths are listed, so a new route requires the key by default.
Source: ours (DESIGN, trust).

    everywhere  a request carries ``Authorization: Bearer <key>``; no browser adds it by itself, as it does with cookies
                and passwords, so a page of another origin cannot use it
    loopback    such a page may still reach us through its visitor's browser: Host and Origin are checked, too (DNS
                rebinding, forged requests)
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.observability.http.answers import number_of


class BodyLimit(NamedTuple):
    """num_bytes: a longer one is refused before it is held.  seconds: from when a route begins to read it."""

    num_bytes: int = 1024 * 1024
    seconds: float = 5.0


SMALL_BODY = BodyLimit()
"""More than anything that most routes read."""
HEALTH = "/health"
"""Open to all, because a container's health check has no key. It says only whether the run is well."""
READING = ("GET", "HEAD")
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


def host_of(authority: str) -> str:
    """The host name in ``name:port``, "" where it cannot be read."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def presented_key(authorization: str) -> str:
    """The bearer token in an Authorization header, "" where there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


class Guard:
    """Passes on what may pass; answers the rest with a status that says why. An ASGI application around another."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        key: str,
        open_paths: Collection[str] = (),
        body_limits: Mapping[str, BodyLimit] | None = None,
    ) -> None:
        """host: what the listener is bound to.  key: never empty.  open_paths: that anyone may read, beside HEALTH.
        body_limits: by path.
        """
        self._app = app
        self._body_limits = body_limits or {}
        self._host = host
        self._on_loopback = is_loopback(host)
        self._key = key
        self._open_paths = frozenset({HEALTH, *open_paths})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        send = _with_headers(send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive, self._body_limit(scope["path"])), send)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """The answer to a request that may not pass; None for one that may."""
        host = headers.get("host", "")
        if self._on_loopback and not self._is_ours(host_of(host)):
            return _refuse(403, "this host name is not ours; ask by the address that api.address names")
        origin = headers.get("origin")
        if origin is not None and authority_of(origin) != host.lower():
            return _refuse(403, "pages of another origin may not ask")
        if not self._knows_key(headers.get("authorization", "")):
            if scope["method"] not in READING or scope["path"] not in self._open_paths:
                return _refuse(401, KEY_WANTED, {"www-authenticate": 'Bearer realm="streamrl"'})
        elif not _stays(scope):
            return _refuse(503, "too many clients with the key are connected: close some connections")
        length = number_of(headers.get("content-length", "0"))
        limit = self._body_limit(scope["path"]).num_bytes
        if length is None or length > limit:
            return _refuse(413, f"a body has at most {limit} bytes here")
        return None

    def _body_limit(self, path: str) -> BodyLimit:
        return self._body_limits.get(path, SMALL_BODY)

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name == self._host

    def _knows_key(self, authorization: str) -> bool:
        return hmac.compare_digest(presented_key(authorization).encode(), self._key.encode())


def _stays(scope: Scope) -> bool:
    """Report to the listener that this client has shown the key. Returns whether it may stay connected."""
    prove: Callable[[], bool] | None = scope.get("state", {}).get(PROVE)
    return prove is None or prove()


def authority_of(origin: str) -> str:
    """``host:port`` of an Origin header, "" for ``null`` and for what cannot be read."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _refuse(status: int, reason: str, headers: dict[str, str] | None = None) -> JSONResponse:
    # An unread body may follow: the connection is of no further use.
    return JSONResponse({"error": reason}, status, {"connection": "close", **(headers or {})})


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
            raise HTTPException(
                408, f"the body did not come within {limit.seconds:.0f} s", {"connection": "close"}
            ) from None
        received += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if received > limit.num_bytes:
            raise HTTPException(413, f"a body has at most {limit.num_bytes} bytes here", {"connection": "close"})
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
