"""Requests over HTTP to a real service run (``serve``, with control, generation and updates), by raw sockets.

An input is what a client sends; ``@KEY@`` and ``@PORT@`` in it stand for the run's own. No answer is a 5xx, every
connection is answered or ended, and the service goes on answering a good client.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.observability.http.routes import Change
from orchestrator.serving.http import Generate, Taken, Update
from tests.fakes.service_run import ServiceRun, service_run
from tests.fuzz.harness import Check, CheckFailedError, Target
from tests.fuzz.hostile import Maker, damaged, nested, text
from workers.models import prepare_model

ANSWER_S = 30.0
"""No request of these takes so long on any machine: who gets no answer by then never does."""
SOON_S = 0.5
"""An answer begins sooner as a rule. If not, the end of input is sent, and less is tried; nothing is judged by it."""
HEALTH_EVERY = 25
KEY = "Authorization: Bearer @KEY@"
SOURCES = ("tcp://127.0.0.1:1/x", "shm://0/x", "tcp://[", "file:///etc/passwd")
"""Where a manifest may point to: nothing leaves this machine."""
PATHS = (
    "/", "/health", "/status", "/history", "/batches", "/batches?from=0", "/metrics", "/generate", "/generate/mine",
    "/generate/mine/taken", "/update", "/control/pause", "/control/resume", "/control/checkpoint", "/control/set",
    "/control/nothing", "/app.js", "/../api.secret", "/nothing", "*", "//", "/%00", "/%ff", "http://other/status",
)  # fmt: skip
METHODS = ("GET", "POST", "HEAD", "DELETE", "PUT", "OPTIONS", "TRACE", "CONNECT", "get", "", "X" * 300)
NUMBERS = ("0", "1", "-1", "9" * 5000, "1e9", "nan", "٣", "", "0x1", "18446744073709551616", " 1", "1_0")
HEADERS = (
    "Origin: http://other", "Origin: null", "Origin: http://[::1", "Cookie: key=@KEY@", "Expect: 100-continue",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "Connection: upgrade",
    "Upgrade: websocket", "Range: bytes=0-9999999999", "If-None-Match: *", "X: " + "a" * 20_000, "Content-Type: \x7f",
    "Content-Length: 5", "Content-Length: -1", "Content-Length: 9" + "9" * 4999, "Host: other", ": empty", "no colon",
    "If-Modified-Since: yesterday", "Authorization: Basic Og==", "Authorization: Bearer é",
    "Accept-Encoding: " + "gzip," * 500,
)  # fmt: skip


class Served:
    """A service on a loop that runs while somebody asks."""

    def __init__(self, runner: asyncio.Runner, run: ServiceRun) -> None:
        self._runner, self.run = runner, run
        self.key = run.secret
        self._asked = 0

    def ask(self, raw: bytes) -> bytes:
        """Send a request. Returns the answer, of a long one its beginning; b"" where the connection was ended."""
        filled = raw.replace(b"@KEY@", self.key.encode()).replace(b"@PORT@", str(self.run.port).encode())
        return self._runner.run(_ask(self.run.port, filled))

    def check_alive(self) -> None:
        """Every so often: a good client is answered."""
        self._asked += 1
        if self._asked % HEALTH_EVERY:
            return
        raw = self.ask(b"GET /status HTTP/1.1\r\nHost: 127.0.0.1:@PORT@\r\nAuthorization: Bearer @KEY@\r\n\r\n")
        if status_of(raw) != 200:
            raise CheckFailedError(f"a good client is not answered: {raw[:60]!r}")


async def _ask(port: int, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(raw)
            answer = await _begun(reader)
            if not answer and not reader.at_eof():  # what came so far is no whole request
                writer.write_eof()
            while b"\r\n\r\n" not in answer and len(answer) < 65536 and (more := await reader.read(65536)):
                answer += more
            if _is_json(answer):  # a stream of samples may take as long as it likes
                answer += await reader.read(65536)
    except ConnectionError:
        pass
    except TimeoutError:
        raise CheckFailedError("no answer and no end") from None
    finally:
        writer.transport.abort()
    return answer


async def _begun(reader: asyncio.StreamReader) -> bytes:
    """What comes soon, b"" where nothing does."""
    try:
        async with asyncio.timeout(SOON_S):
            return await reader.read(65536)
    except TimeoutError:
        return b""


def _is_json(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    return bool(end) and not body and b"content-type: application/json" in head.lower()


def status_of(answer: bytes) -> int:
    """0 where there is none."""
    found = re.match(rb"HTTP/1\.1 (\d\d\d)", answer)
    return int(found[1]) if found else 0


@contextmanager
def served() -> Iterator[Served]:
    """The service, once a worker of it serves."""
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-") as name, asyncio.Runner() as runner:
        directory = Path(name)
        model_dir = prepare_model("random:qwen3-tiny", cache_dir=directory / "models", say=lambda line: None)
        weights = directory / "weights"
        weights.mkdir()
        stack = AsyncExitStack()
        entering = stack.enter_async_context(service_run(directory / "run", model_dir, weights_dir=weights))
        run = runner.run(entering)
        try:
            runner.run(run.until_serving(1))
            yield Served(runner, run)
        finally:
            runner.run(stack.aclose())


@contextmanager
def _opened() -> Iterator[Check]:
    with served() as service:

        def check(content: bytes) -> None:
            answer = service.ask(content)
            expected = b"/update" in content.split(b"\r\n", 1)[0]  # its weights do not come in time
            if status_of(answer) >= 500 and not (expected and status_of(answer) == 504):
                raise CheckFailedError(f"status {status_of(answer)} {content.split(b' HTTP', 1)[0][:60]!r}")
            service.check_alive()

        yield check


# --- requests ---------------------------------------------------------------------------------------------------------


def make(random: Random) -> bytes:
    match random.randrange(8):
        case 0:
            return random.randbytes(random.choice((1, 20, 400)))
        case 1:
            return damaged(random, _request(random, *_asked(random)))
        case 2 | 3:
            return _request(random, random.choice(METHODS), random.choice(PATHS), _body(random, Generate))
        case _:
            return _request(random, *_asked(random))


def _asked(random: Random) -> tuple[str, str, bytes]:
    """Method, path and body that belong together, with content that does not."""
    name = random.choice(("mine", "other", "x" * 65, "a%2Fb", "..", "%00", "é"))
    asked: tuple[tuple[str, str, bytes], ...] = (
        ("POST", "/generate", _body(random, Generate)),
        ("POST", "/control/set", _body(random, Change)),
        ("POST", f"/control/{random.choice(('pause', 'resume', 'checkpoint', 'resume', 'x', '%00'))}", b""),
        ("POST", "/update", _update(random)),
        ("POST", f"/generate/{name}/taken", _body(random, Taken)),
        ("GET", f"/generate/{name}?from={random.choice(NUMBERS)}", b""),
        ("DELETE", f"/generate/{name}", b""),
        ("GET", f"/batches?from={random.choice(NUMBERS)}", b""),
        ("GET", random.choice(PATHS), b""),
    )
    return random.choice(asked)


def _update(random: Random) -> bytes:
    """It waits for its weights no longer than a moment, and asks for none outside of this machine."""
    made: Any = Maker(random, wild=0.0, strings=SOURCES).value(Update) | {"wait_s": 0.05}
    manifest = made.get("manifest")
    if isinstance(manifest, dict):
        manifest["sources"] = [random.choice(SOURCES)]
    return _encoded(random, made)


def _body(random: Random, kind: object) -> bytes:
    strings = ("mine", "other", "pipeline.max_staleness", "run.batches", "2+2=")
    return _encoded(random, Maker(random, wild=random.choice((0.0, 0.05)), strings=strings).value(kind))


def _encoded(random: Random, value: object) -> bytes:
    raw = json.dumps(value, default=str, skipkeys=True).encode()
    digits = raw.replace(b"1", b"9" * 5000)
    return random.choice((raw, raw, raw, raw, damaged(random, raw), digits, nested(random), b"\xff\xfe", b""))


def _request(random: Random, method: str, path: str, body: bytes) -> bytes:
    head = [f"{method} {path} HTTP/{random.choice(('1.1', '1.1', '1.1', '1.0', '2.0', ''))}"]
    head.append(random.choice(("Host: 127.0.0.1:@PORT@",) * 6 + ("Host: other", "Host: [::1", "Host: ")))
    head += [KEY] * (random.random() < 0.9)
    head += random.choices(HEADERS, k=random.choice((0, 0, 0, 1, 2)))
    if random.random() < 0.3:
        head.append(f"{text(random)}: {text(random)}")
    if body:
        length = random.choice((len(body),) * 8 + (len(body) + 1, max(0, len(body) - 1)))
        head.append(f"Content-Length: {length}")
    return "\r\n".join([*head, "", ""]).encode(errors="replace") + body


TARGET = Target(name="http", make=make, opened=_opened, num_inputs=75)
