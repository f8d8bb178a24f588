"""The generation service for a program that is not ours: prompts in, finished samples out, each exactly once.

    with ServiceClient("http://127.0.0.1:8000", secret) as service:
        for sample in service.generate(["12+3="], samples=4):
            ...

docs/service.md has the same with curl. Source: StreamRL sec. 3.

Invariant: a sample is acknowledged only once its user came back for the next one, so that what a program had in its
hands when it died comes again to the one that goes on with the request's id.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from workers.errors import ClientError, ClientTimeoutError

ACK_EVERY = 32  # samples between two acknowledgements: so many may come again after a crash
RETRY_S = 0.2
Prompt = str | Sequence[int] | Mapping[str, Any]  # a text, token ids, or {"messages": [{"role": ..., "content": ...}]}


class ServiceClient:
    """One program's way to one service; used from one thread."""

    def __init__(self, url: str, secret: str = "", *, silence_s: float = 300.0, outage_s: float = 60.0) -> None:
        """url: http://host:port, see <run-dir>/api.address.  secret: see <run-dir>/api.secret.

        silence_s: a stream that sends nothing for so long has failed.  outage_s: how long a service that is away is
        waited for, in the middle of a stream.
        """
        self._silence_s = silence_s
        self._outage_s = outage_s
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        address = url if "://" in url else f"http://{url}"
        self._http = httpx.Client(base_url=address, headers=headers, timeout=outage_s, trust_env=False)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, also from a stream; what was not acknowledged stays for the program that goes on with it."""
        self._http.close()

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
        following: int | None = None
        deadline_s = time.monotonic() + self._outage_s
        while True:
            try:
                for line in self._lines(name, body, following):
                    deadline_s = time.monotonic() + self._outage_s
                    if "done" in line:
                        # The user has all: should this be lost, the service drops the samples after service.keep_s
                        with suppress(httpx.TransportError):
                            self._take(name, line["done"])
                        return
                    if "error" in line:
                        raise ClientError(f"request {name}: {line['error']}")
                    if following is not None and following % ACK_EVERY == 0:  # and not the last: then it is forgotten
                        self._take(name, following)
                    following = int(line["n"]) + 1
                    yield line
            except httpx.TransportError as error:
                if time.monotonic() > deadline_s:
                    away = f"{self._http.base_url} was away for {self._outage_s:.0f} s"
                    raise ClientTimeoutError(f"{away}: {error}") from error
                time.sleep(RETRY_S)

    def _lines(self, name: str, body: object, following: int | None) -> Iterator[dict[str, Any]]:
        """Lines of a request's stream: all of it, as ``body`` asks for it, or from sample ``following`` on.

        Raises TransportError for a stream that ends without its last line; a line that was cut off comes again.
        """
        method, path = ("POST", "/generate") if following is None else ("GET", f"/generate/{name}?from={following}")
        sent = body if following is None else None
        with self._http.stream(method, path, json=sent, timeout=self._silence_s) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                _content(answer)
            with suppress(json.JSONDecodeError):
                for line in answer.iter_lines():
                    yield json.loads(line)
        raise httpx.ReadError("the stream ended before its last line")

    def _take(self, name: str, upto: int) -> None:
        self._ask("POST", f"/generate/{name}/taken", {"upto": upto})

    def cancel(self, request_id: str) -> None:
        """Drop the rest of a request."""
        self._ask("DELETE", f"/generate/{request_id}")

    def update(self, path: str, *, wait_s: float = 120.0) -> dict[str, Any]:
        """Have a checkpoint's weights served. path: below the publisher's --weights-dir.

        Returns: ``{"version", "epoch", "digest", "loaded", "pending"}``: what is asked for from now on is of it.
        Raises:  ClientError: it cannot be published; the message says why.
        """
        return self._ask("POST", "/update", {"path": path, "wait_s": wait_s}, wait_s=wait_s)

    def _ask(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0) -> dict[str, Any]:
        return _content(self._http.request(method, path, json=body, timeout=wait_s + self._outage_s))


def _content(answer: httpx.Response) -> dict[str, Any]:
    """The answer. Raises ClientError with the service's reason; TransportError for one that may do better later."""
    if answer.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE):
        raise httpx.TransportError(f"status {answer.status_code}")
    content = answer.json()
    if answer.is_error:
        raise ClientError(f"the service refuses with {answer.status_code}: {content['error']}")
    return content
