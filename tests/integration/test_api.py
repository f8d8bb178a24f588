"""The HTTP service on a real socket: what it answers, whom it refuses, and what a bad client cannot do to it."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from orchestrator.api import server
from orchestrator.api.guard import MAX_BODY_BYTES, Guard, is_loopback, presented_secret
from orchestrator.api.routes import HEALTHY_AGE_S, Api, build_app
from orchestrator.api.server import check_secret, control_secret, open_listener, serve_http
from orchestrator.errors import ConfigError
from orchestrator.runtime.status import StatusBoard
from transport.clock import ManualClock
from transport.settings import ApiSettings

SECRET = "hush-hush"
STATUS: dict[str, Any] = {
    "run": "tiny",
    "elapsed_s": 12.5,
    "trained_version": 3,
    "num_batches": 6,
    "pending": 1,
    "running": 2,
    "scoring": 0,
    "ready": 4,
    "in_flight_samples": 8,
    "retained_bytes": 4096,
    "blocked": {"stage": "scoring", "waits_for": "scores", "owner": "score-0.1", "waited_s": 2.0, "still_s": 70.0},
    "queues": {"plans:generate-0.1": 2},
    "workers": [
        {"worker": "generate-0.1", "kind": "generate", "running": 8, "idle": 0.25, "counters": {"tokens": 70.0}},
        {"worker": "train-0.1", "kind": "train", "running": 0, "counters": {}},
    ],
    "last": {"batch": 2, "reward": 0.5, "staleness": 0.5, "loss": float("nan")},
}


class Service:
    """A running service and a client for it."""

    def __init__(self, board: StatusBoard, clock: ManualClock, port: int) -> None:
        self.board = board
        self.clock = clock
        self.port = port

    async def ask(
        self, path: str, *headers: str, method: str = "GET", body: bytes = b"", host: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers, body."""
        head = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", "Connection: close", *headers]
        if body:
            head.append(f"Content-Length: {len(body)}")
        return await self.say("\r\n".join([*head, "", ""]).encode() + body)

    async def say(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw)
            answer = await reader.read()
        finally:
            writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, rest


@asynccontextmanager
async def serving(directory: Path, *, host: str = "127.0.0.1") -> AsyncIterator[Service]:
    """The service with a status. host: what the guard believes to listen on; the socket is on loopback."""
    clock = ManualClock()
    board = StatusBoard(clock)
    board.put(STATUS)
    listener = open_listener(ApiSettings(), directory / "api.address")
    app = build_app(Api(board, directory / "metrics.jsonl", dict).routes(), host=host, secret=SECRET)
    async with running(app, listener):
        yield Service(board, clock, listener.getsockname()[1])


@asynccontextmanager
async def running(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    task = asyncio.create_task(serve_http(app, listener))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- what it answers


async def test_status_is_what_was_published_and_a_number_that_is_none_is_null(tmp_path: Path):
    async with serving(tmp_path) as service:
        service.clock.advance(1.0)
        code, headers, body = await service.ask("/status")
    assert code == 200
    assert headers["content-type"] == "application/json"
    answer = json.loads(body)
    assert answer.pop("age_s") == 1.0
    assert answer.pop("last") == {**STATUS["last"], "loss": None}
    assert answer == {key: value for key, value in STATUS.items() if key != "last"}


async def test_health_turns_when_no_status_is_made_any_more(tmp_path: Path):
    async with serving(tmp_path) as service:
        assert (await service.ask("/health"))[0] == 200
        service.clock.advance(HEALTHY_AGE_S + 1)
        code, _, body = await service.ask("/health")
        assert code == 503
        assert json.loads(body) == {
            "healthy": False,
            "reason": "no status for 6 s: the broker does not answer, or deciding stands still",
        }


async def test_before_the_first_status_the_run_is_starting(tmp_path: Path):
    async with serving(tmp_path) as service:
        service.board.latest = {}
        code, _, body = await service.ask("/status")
        assert (code, json.loads(body)) == (503, {"error": "the run is starting"})
        assert b"streamrl_up 0.0" in (await service.ask("/metrics"))[2]


async def test_metrics_are_prometheus_text(tmp_path: Path):
    async with serving(tmp_path) as service:
        code, headers, body = await service.ask("/metrics")
    assert code == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = body.decode().splitlines()
    for line in (
        "streamrl_trained_batches_total 3.0",
        "streamrl_batch_reward 0.5",
        "streamrl_batch_staleness 0.5",
        "streamrl_retained_bytes 4096.0",
        'streamrl_blocked_seconds{stage="scoring"} 70.0',
        'streamrl_groups{stage="ready"} 4.0',
        'streamrl_queue_entries{stream="plans:generate-0.1"} 2.0',
        'streamrl_workers{kind="generate"} 1.0',
        'streamrl_worker_idle_ratio{worker="generate-0.1"} 0.25',
        'streamrl_worker_tokens_total{worker="generate-0.1"} 70.0',
    ):
        assert line in lines


async def test_the_metrics_of_a_service_count_its_requests(tmp_path: Path):
    counts = {"samples": 64, "started": 40, "ended": 30, "failed": 1, "taken": 8}
    async with serving(tmp_path) as service:
        service.board.latest = {**STATUS, "num_requests": 12, "requests": {11: counts, 12: counts}}
        lines = (await service.ask("/metrics"))[2].decode().splitlines()
    assert {"streamrl_requests_total 12.0", "streamrl_open_requests 2.0"} <= set(lines)
    assert 'streamrl_request_samples{are="ended"} 60.0' in lines


async def test_batches_are_read_on_from_a_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"batch": 0}\n{"batch": 1}\n{"batch": 2}\n{"torn')
    async with serving(tmp_path) as service:
        assert json.loads((await service.ask("/batches?from=1"))[2]) == {
            "from": 1,
            "batches": [{"batch": 1}, {"batch": 2}],
        }
        assert (await service.ask("/batches?from=minus"))[0] == 400


async def test_the_page_is_served_and_nothing_beside_it(tmp_path: Path):
    async with serving(tmp_path) as service:
        code, headers, body = await service.ask("/")
        assert code == 200
        assert b"<title>StreamRL" in body
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        for path in ("/absent.js", "/../server.py", "/%2e%2e/server.py", "//etc/passwd"):
            assert (await service.ask(path))[0] == 404


# --- whom it refuses


@pytest.mark.parametrize(
    ("host", "headers", "code"),
    [
        ("", (), 200),
        ("localhost:1", (), 200),
        ("[::1]:9", (), 200),
        ("evil.example", (), 403),
        ("[", (), 403),
        ("127.0.0.1.evil.example", (), 403),
        ("", ("Origin: http://evil.example",), 403),
        ("", ("Origin: null",), 403),
        ("127.0.0.1:7", ("Origin: http://127.0.0.1:7",), 200),
        ("127.0.0.1:7", ("Origin: http://127.0.0.1:8",), 403),
    ],
)
async def test_pages_of_another_origin_and_foreign_host_names_are_refused(
    tmp_path: Path, host: str, headers: tuple[str, ...], code: int
):
    async with serving(tmp_path) as service:
        assert (await service.ask("/status", *headers, host=host))[0] == code


def basic(password: str) -> str:
    return "Authorization: Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("X: y", 401),
        ("Authorization: Bearer wrong", 401),
        ("Authorization: Bearer", 401),
        ("Authorization: Basic !!", 401),
        (basic("wrong"), 401),
        (f"Authorization: Bearer {SECRET}", 200),
        (basic(SECRET), 200),
    ],
)
async def test_off_loopback_only_health_is_open(tmp_path: Path, header: str, code: int):
    async with serving(tmp_path, host="0.0.0.0") as service:
        answered, headers, _ = await service.ask("/status", header, host="gpu-box:8000")
        assert answered == code
        assert ("www-authenticate" in headers) == (code == 401)
        assert (await service.ask("/health", header, host="gpu-box:8000"))[0] == 200


async def test_changing_needs_the_secret_on_loopback_too(tmp_path: Path):
    async with serving(tmp_path) as service:
        assert (await service.ask("/control/pause", method="POST"))[0] == 401


def test_a_secret_is_read_from_both_schemes_and_nothing_else():
    assert presented_secret("Bearer a b") == "a b"
    assert presented_secret("basic " + base64.b64encode(b"user:with:colon").decode()) == "with:colon"
    assert presented_secret("Digest x") == presented_secret("") == presented_secret("Basic \xe9") == ""


def test_what_loopback_is():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "page.localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gpu-box", "", "127.0.0.1.example"))


def test_off_loopback_a_secret_must_be_set():
    with pytest.raises(ConfigError, match="STREAMRL_SECRET"):
        check_secret(ApiSettings(host="0.0.0.0"))
    check_secret(ApiSettings(host="0.0.0.0", secret="x"))
    check_secret(ApiSettings(host="0.0.0.0", enabled=False))


# --- what a bad client cannot do


async def test_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path):
    async with serving(tmp_path) as service:
        head = f"POST /control/set HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\n"
        code, _, _ = await service.say((head + f"Content-Length: {10**9}\r\n\r\n").encode() + b"x" * 100_000)
        assert code == 413
        assert (await service.ask("/health"))[0] == 200


async def test_a_body_of_untold_length_is_cut_off(tmp_path: Path):
    async def reads_all(scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        await PlainTextResponse(str(len(await Request(scope, receive).body())))(scope, receive, send)

    from starlette.middleware.exceptions import ExceptionMiddleware

    listener = open_listener(ApiSettings(), tmp_path / "api.address")
    guard = Guard(ExceptionMiddleware(reads_all), host="127.0.0.1", secret=SECRET)
    async with running(guard, listener):
        service = Service(StatusBoard(ManualClock()), ManualClock(), listener.getsockname()[1])
        head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\nConnection: close\r\n"
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        sent = (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunk * (MAX_BODY_BYTES // 0x10000 + 1)
        assert (await service.say(sent + b"0\r\n\r\n"))[0] == 413
        assert (await service.ask("/", f"Authorization: Bearer {SECRET}", method="POST", body=b"x" * 10))[2] == b"10"


async def test_garbage_is_answered_with_400(tmp_path: Path):
    async with serving(tmp_path) as service:
        assert (await service.say(b"\x16\x03\x01\x02\x00 not http\r\n\r\n"))[0] == 400
        assert (await service.ask("/health"))[0] == 200


@pytest.mark.parametrize("said", [b"", b"GET /status HTTP/1.1\r\nHost: local"])
async def test_a_client_that_never_asks_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes):
    monkeypatch.setattr(server, "HEAD_S", 0.05)
    async with serving(tmp_path) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), timeout=60) == b""
        writer.close()


async def test_the_end_does_not_wait_for_a_client_that_stays(tmp_path: Path):
    async with serving(tmp_path) as service:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
    writer.close()


# --- where it listens


def test_a_port_in_use_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"api.port {port} on 127.0.0.1 cannot be listened on: Address already"):
            open_listener(ApiSettings(port=port), tmp_path / "api.address")
    assert not (tmp_path / "api.address").exists()


def test_a_free_port_is_kept_over_a_restart_and_given_up_when_taken(tmp_path: Path):
    address = tmp_path / "api.address"
    with open_listener(ApiSettings(), address) as listener:
        port = listener.getsockname()[1]
        assert address.read_text() == f"127.0.0.1:{port}\n"
    with open_listener(ApiSettings(), address) as again:
        assert again.getsockname()[1] == port
        with open_listener(ApiSettings(), address) as other:
            assert address.read_text() == f"127.0.0.1:{other.getsockname()[1]}\n" != f"127.0.0.1:{port}\n"


def test_a_host_that_is_not_ours_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"on 192\.0\.2\.1 cannot be listened on"):
        open_listener(ApiSettings(host="192.0.2.1", port=8000, secret="x"), tmp_path / "api.address")


def test_a_secret_is_made_once_for_its_owner_alone(tmp_path: Path):
    path = tmp_path / "api.secret"
    made = control_secret(ApiSettings(), path)
    assert len(made) >= 32
    assert path.stat().st_mode & 0o077 == 0
    assert control_secret(ApiSettings(), path) == made
    assert control_secret(ApiSettings(secret="mine"), path) == "mine"
