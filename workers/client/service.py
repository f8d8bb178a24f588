"""The generation service for a program that is not ours: prompts in, finished samples out, each exactly once.

    with ServiceClient("http://127.0.0.1:8000", secret) as service:
        for sample in service.generate(["12+3="], samples=4):
            ...

Over HTTP and the standard library alone; docs/service.md has the same with curl. Source: StreamRL sec. 3.

Owns: where it is in a stream. Invariant: a sample is acknowledged only once its user came back for the next one, so
what a program had in its hands when it died comes again to the one that goes on with the request's id.
"""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from workers.errors import ClientError, ClientTimeoutError

ACK_EVERY = 32
"""Samples between two acknowledgements: so many may come again after a crash."""
RETRY_S = 0.2
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"messages": [{"role": ..., "content": ...}]}."""


class ServiceClient:
    """One program's way to one service; used from one thread. Made without I/O."""

    def __init__(self, url: str, secret: str = "", *, silence_s: float = 300.0, outage_s: float = 60.0) -> None:
        """url: http://host:port, see <run-dir>/api.address.  secret: see <run-dir>/api.secret.

        silence_s: a stream that says nothing for so long has failed.  outage_s: how long a service that is away is sat
        out, in the middle of a stream.
        """
        self._address = urlsplit(url).netloc or url
        self._headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._silence_s = silence_s
        self._outage_s = outage_s
        self._open: http.client.HTTPConnection | None = None

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leave a stream that is open; what was not acknowledged stays for whoever goes on with it."""
        if self._open is not None:
            self._open.close()
            self._open = None

    # -- generate

    def generate(
        self, prompts: Sequence[Prompt], *, samples: int = 1, request_id: str = "", **sampling: float
    ) -> Iterator[dict[str, Any]]:
        """Yield each sample as it ends: ``n, prompt, sample, text, token_ids, logprobs, finish_reason, versions``.

        Args:   samples: of each prompt.  request_id: names the request; the same one again, also from another process,
                goes on with what was not acknowledged.  sampling: max_new_tokens, temperature, top_p, top_k.
        Raises: ClientError: the service refuses; it says why.  ClientTimeoutError: it was away for ``outage_s``.
        """
        name = request_id or uuid.uuid4().hex
        body = {"prompts": list(prompts), "samples": samples, "id": name, "acknowledge": True, **sampling}
        path, content = "/generate", json.dumps(body).encode()
        following: int | None = None
        deadline_s = time.monotonic() + self._outage_s
        while True:
            try:
                for line in self._lines("POST" if content else "GET", path, content):
                    deadline_s = time.monotonic() + self._outage_s
                    if "done" in line:
                        self._take_last(name, line["done"])
                        return
                    if "error" in line:
                        raise ClientError(f"request {name}: {line['error']}")
                    if following is not None and following % ACK_EVERY == 0:  # and not the last: then it is forgotten
                        self._take(name, following)
                    following = int(line["n"]) + 1
                    yield line
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline_s:
                    raise ClientTimeoutError(f"{self._address} was away for {self._outage_s:.0f} s: {error}") from error
                time.sleep(RETRY_S)
            if following is not None:
                path, content = f"/generate/{name}?from={following}", b""

    def _take(self, name: str, upto: int) -> None:
        self._ask("POST", f"/generate/{name}/taken", {"upto": upto})

    def _take_last(self, name: str, upto: int) -> None:
        """The user has all: should this word be lost, the service forgets the request after its ``service.keep_s``."""
        with suppress(OSError, http.client.HTTPException):
            self._take(name, upto)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the rest of a request."""
        self._ask("DELETE", f"/generate/{request_id}")

    # -- update

    def update(self, path: str, *, wait_s: float = 120.0) -> dict[str, Any]:
        """Have a checkpoint's weights served. path: below the publisher's --weights-dir.

        Returns: ``{"version", "epoch", "digest", "loaded", "pending"}``: what is asked for from now on is of it.
        Raises:  ClientError: it cannot be published; the message says why.
        """
        return self._ask("POST", "/update", {"path": path, "wait_s": wait_s}, wait_s=wait_s)

    # -- HTTP

    def _ask(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._address, timeout=wait_s + self._outage_s)
        try:
            content = json.dumps(body).encode() if body is not None else b""
            connection.request(method, path, body=content, headers=self._headers)
            return _checked(connection.getresponse())
        finally:
            connection.close()

    def _lines(self, method: str, path: str, content: bytes) -> Iterator[dict[str, Any]]:
        """Lines of a stream, to its end. A line that is cut off is none: it comes again."""
        self.close()
        self._open = http.client.HTTPConnection(self._address, timeout=self._silence_s)
        try:
            self._open.request(method, path, body=content, headers=self._headers)
            answer = self._open.getresponse()
            if answer.status != http.client.OK:
                _checked(answer)
            while (line := answer.readline()).endswith(b"\n"):
                yield json.loads(line)
            raise http.client.IncompleteRead(line)
        finally:
            self.close()


def _checked(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """The answer. Raises ClientError with the service's reason; HTTPException for one that may do better later."""
    raw = answer.read()
    if answer.status in (http.client.BAD_GATEWAY, http.client.SERVICE_UNAVAILABLE):
        raise http.client.HTTPException(f"status {answer.status}")
    content = json.loads(raw)
    if answer.status >= http.client.BAD_REQUEST:
        raise ClientError(f"the service refuses with {answer.status}: {content['error']}")
    return content
