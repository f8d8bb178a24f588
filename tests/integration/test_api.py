"""The HTTP service on a real socket: what it answers, whom it refuses, and what a bad client cannot do to it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from orchestrator.errors import ConfigError
from orchestrator.http import check_secret, open_listener
from orchestrator.observability.http.routes import HEALTHY_AGE_S, Api, build_app
from orchestrator.observability.http.status import StatusBoard
from tests.fakes.manual_clock import ManualClock
from transport.broker.reach import Away
from transport.contracts.settings import ApiSettings
from transport.process import http as server
from transport.process.http import SMALL_BODY, BodyLimit, is_loopback, presented_key, run_key, serve_http
from transport.process.secret import Purpose, derive

SECRET = "hush-hush"
KEY = f"Authorization: Bearer {SECRET}"
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
    "generation": [{"worker_id": "generate-1.1", "aside_s": 12.0}, {"worker_id": "generate-0.1", "aside_s": None}],
    "workers": [
        {
            "worker": "generate-0.1",
            "kind": "generate",
            "running": 8,
            "idle": 0.25,
            "way": "ucx",
            "counters": {"tokens": 70.0, "drafted_tokens": 12.0, "accepted_tokens": 7.0},
        },
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
async def serving(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    body_limits: Mapping[str, BodyLimit] | None = None,
    reads: str = "/reads",
) -> AsyncIterator[Service]:
    """The service with a status. host: what the guard believes to listen on; the socket is on loopback.  reads: a path
    whose route reads a body and tells how many bytes it has.
    """
    clock = ManualClock()
    board = StatusBoard(clock)
    board.put(STATUS)
    listener = open_listener(ApiSettings(), directory / "api.address")
    routes = [*Api(board, directory / "metrics.jsonl", dict).routes(), Route(reads, count_bytes, methods=["POST"])]
    app = build_app(routes, host=host, key=SECRET, body_limits=body_limits)
    async with running(app, listener):
        yield Service(board, clock, listener.getsockname()[1])


async def count_bytes(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


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
        code, headers, body = await service.ask("/status", KEY)
    assert code == 200
    assert headers["content-type"] == "application/json"
    answer = json.loads(body)
    assert [answer.pop(key) for key in ("age_s", "stopped", "go_on")] == [1.0, "", ""]
    assert answer.pop("last") == {**STATUS["last"], "loss": None}
    assert answer == {key: value for key, value in STATUS.items() if key != "last"}


async def test_while_the_broker_is_away_status_and_health_say_so_from_memory(tmp_path: Path):
    async with serving(tmp_path) as service:
        away = Away(address="redis:6379", seconds=12.0, reason="name does not resolve", until_s=60.0)
        service.board.away = lambda: away
        service.clock.advance(HEALTHY_AGE_S + 1)
        code, _, body = await service.ask("/health")
        assert (code, json.loads(body)) == (200, {"healthy": True, "reason": str(away)})
        code, _, body = await service.ask("/status", KEY)
    answer = json.loads(body)
    assert answer["broker"] == {
        "address": "redis:6379",
        "away_s": 12.0,
        "reason": "name does not resolve",
        "until_s": 60.0,
    }
    for named in (answer["wait"], answer["blocked"]):
        assert (named["stage"], named["waits_for"]) == ("broker", "broker redis:6379 to answer, until 60 s")
        assert "generate" not in named["owner"]


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
        code, _, body = await service.ask("/status", KEY)
        assert (code, json.loads(body)) == (503, {"error": "the run is starting"})
        assert b"streamrl_up 0.0" in (await service.ask("/metrics", KEY))[2]


async def test_metrics_are_prometheus_text(tmp_path: Path):
    async with serving(tmp_path) as service:
        code, headers, body = await service.ask("/metrics", KEY)
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
        'streamrl_worker_weights_way{way="ucx",worker="generate-0.1"} 1.0',
        'streamrl_worker_aside_seconds{worker="generate-1.1"} 12.0',
        'streamrl_worker_tokens_total{worker="generate-0.1"} 70.0',
        'streamrl_worker_drafted_tokens_total{worker="generate-0.1"} 12.0',
        'streamrl_worker_accepted_tokens_total{worker="generate-0.1"} 7.0',
    ):
        assert line in lines


async def test_the_metrics_of_a_service_count_its_requests(tmp_path: Path):
    counts = {"samples": 64, "started": 40, "ended": 30, "failed": 1, "taken": 8}
    async with serving(tmp_path) as service:
        service.board.latest = {**STATUS, "num_requests": 12, "requests": {11: counts, 12: counts}}
        lines = (await service.ask("/metrics", KEY))[2].decode().splitlines()
    assert {"streamrl_requests_total 12.0", "streamrl_open_requests 2.0"} <= set(lines)
    assert 'streamrl_request_samples{are="ended"} 60.0' in lines


async def test_batches_are_read_on_from_a_line(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"batch": 0}\n{"batch": 1}\n{"batch": 2}\n{"torn')
    async with serving(tmp_path) as service:
        assert json.loads((await service.ask("/batches?from=1", KEY))[2]) == {
            "from": 1,
            "batches": [{"batch": 1}, {"batch": 2}],
        }
        assert (await service.ask("/batches?from=minus", KEY))[0] == 400


async def test_the_page_is_served_and_nothing_beside_it(tmp_path: Path):
    async with serving(tmp_path) as service:
        code, headers, body = await service.ask("/")
        assert code == 200
        assert b"<title>StreamRL" in body
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        for path in ("/absent.js", "/../server.py", "/%2e%2e/server.py", "//etc/passwd"):
            assert (await service.ask(path, KEY))[0] == 404


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
        assert (await service.ask("/status", KEY, *headers, host=host))[0] == code


OPEN = ("/health", "/", "/app.js", "/key.js", "/style.css")
CLOSED = ("/status", "/history", "/batches", "/metrics", "/generate/mine", "/there-is-no-such-route", "//health")
WRONG = ("X: y", "Authorization: Bearer wrong", "Authorization: Bearer", "Authorization: Basic OmhEAAA=")


@pytest.mark.parametrize(("host", "called"), [("127.0.0.1", ""), ("0.0.0.0", "gpu-box:8000")])
async def test_without_the_key_there_is_health_and_an_empty_page_on_loopback_too(
    tmp_path: Path, host: str, called: str
):
    async with serving(tmp_path, host=host) as service:
        for header in WRONG:
            assert [(await service.ask(path, header, host=called))[0] for path in OPEN] == [200] * len(OPEN)
            for path in CLOSED:
                code, headers, body = await service.ask(path, header, host=called)
                assert (code, headers["www-authenticate"]) == (401, 'bearer realm="streamrl"')
                assert b"api.secret" in body, "it says where the key is"
        assert (await service.ask("/status", KEY, host=called))[0] == 200


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "OPTIONS"])
async def test_what_changes_needs_the_key_also_where_reading_is_open(tmp_path: Path, method: str):
    async with serving(tmp_path) as service:
        for path in (*OPEN, "/control/pause", "/update"):
            assert (await service.ask(path, method=method))[0] == 401


async def test_a_new_route_is_closed_without_a_word(tmp_path: Path):
    def tells(request: Request) -> Response:
        return PlainTextResponse("what a run knows")

    listener = open_listener(ApiSettings(), tmp_path / "api.address")
    async with running(build_app([Route("/new", tells)], host="127.0.0.1", key=SECRET), listener):
        service = Service(StatusBoard(ManualClock()), ManualClock(), listener.getsockname()[1])
        assert (await service.ask("/new"))[0] == 401
        assert (await service.ask("/new", KEY))[2] == b"what a run knows"


def test_a_key_is_a_bearer_token_and_nothing_else():
    assert presented_key("Bearer a b") == "a b"
    assert presented_key("Digest x") == presented_key("") == presented_key("Basic YTpi") == ""


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
    async with serving(tmp_path) as service:
        head = f"POST /reads HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nConnection: close\r\n"
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        chunks = chunk * (SMALL_BODY.num_bytes // 0x10000 + 1)
        sent = (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunks
        assert (await service.say(sent + b"0\r\n\r\n"))[0] == 413
        assert (await service.ask("/reads", KEY, method="POST", body=b"x" * 10))[2] == b"10"


async def test_garbage_is_answered_with_400(tmp_path: Path):
    async with serving(tmp_path) as service:
        assert (await service.say(b"\x16\x03\x01\x02\x00 not http\r\n\r\n"))[0] == 400
        assert (await service.ask("/health"))[0] == 200


HALF = b"GET /status HTTP/1.1\r\nHost: local"
ANSWERED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("said", [b"", HALF, ANSWERED, ANSWERED + HALF, HALF[:9]])
async def test_a_client_that_never_asks_is_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes):
    monkeypatch.setattr(server, "HEAD_S", 0.05)
    async with serving(tmp_path) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(said)
        answer = await asyncio.wait_for(reader.read(), timeout=60)
        assert answer.startswith(b"HTTP/1.1 200" if ANSWERED in said else b"")
        writer.close()


@pytest.mark.parametrize("before", [b"", ANSWERED])
async def test_a_head_that_comes_in_drops_has_no_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
):
    monkeypatch.setattr(server, "HEAD_S", 0.3)
    async with serving(tmp_path) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(before + b"GET /status HTTP/1.1\r\nX: ")

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.02)  # drops, on a real socket

        dripping = asyncio.create_task(drip())
        try:
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), timeout=60)
        finally:
            dripping.cancel()
            writer.close()


async def test_strangers_who_hold_half_heads_take_nobodys_place(tmp_path: Path):
    async with serving(tmp_path) as service:
        known, known_writer = await asyncio.open_connection("127.0.0.1", service.port)
        asked = f"GET /status HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\n\r\n".encode()
        known_writer.write(asked)
        assert (await known.readline()).startswith(b"HTTP/1.1 200")
        strangers = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(300)]
        for _, writer in strangers:
            writer.write(HALF)
        assert (await service.ask("/health"))[0] == 200
        assert (await service.ask("/status", KEY))[0] == 200
        known_writer.write(asked)
        assert b"HTTP/1.1 200" in await asyncio.wait_for(known.readuntil(b"HTTP/1.1 200"), timeout=60)
        open_ones = [reader for reader, _ in strangers if not reader.at_eof()]
        assert len(open_ones) <= server.MAX_STRANGERS
        for writer in (known_writer, *(writer for _, writer in strangers)):
            writer.close()


async def test_one_client_too_many_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_CLIENTS", 1)
    async with serving(tmp_path) as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(f"GET /status HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        code, _, body = await service.ask("/status", KEY)
        assert (code, b"clients" in body) == (503, True)
        assert (await service.ask("/health"))[0] == 200
        writer.close()


class Caller:
    """A connection, as Admission sees it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.gone = False

    @property
    def transport(self) -> Caller:
        return self

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True


def test_one_hosts_strangers_do_not_crowd_out_anothers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "MAX_STRANGERS", 4)
    admission = server.Admission()
    quiet, *crowd = [Caller("10.0.0.1"), *(Caller("10.0.0.2") for _ in range(9))]
    for caller in (quiet, *crowd):
        admission.opened(cast(Any, caller))
    assert not quiet.gone
    assert [caller.gone for caller in crowd] == [True] * 6 + [False] * 3
    assert admission.proved(cast(Any, quiet))
    assert not admission.proved(cast(Any, crowd[0])), "it was let go before it was heard"


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path):
    limits = {"/control/set": BodyLimit(1000, 0.05)}
    async with serving(tmp_path, body_limits=limits, reads="/control/set") as service:
        head = f"POST /control/set HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: 10\r\n\r\n"
        code, _, body = await asyncio.wait_for(service.say(head.encode() + b"{"), timeout=60)
    assert code == 408
    assert b"did not come within" in body


@pytest.mark.parametrize("path", ["/batches?from={}", "/status?x={}", "/{}"])
async def test_a_number_of_5000_digits_is_answered_with_why(tmp_path: Path, path: str):
    async with serving(tmp_path) as service:
        code, _, _ = await service.ask(path.format("9" * 5000), KEY)
        assert code in (200, 400, 404)
        code, _, _ = await service.ask("/app.js", KEY, f"Range: bytes={'9' * 5000}-")
        assert code < 500
        assert (await service.ask("/health", KEY, f"Content-Length: {'9' * 5000}"))[0] in (400, 413)


async def test_the_end_does_not_wait_for_a_client_that_stays(tmp_path: Path):
    async with serving(tmp_path) as service:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
    writer.close()


async def test_half_a_request_at_the_end_is_told_that_it_is_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(server, "CLOSE_S", 0)
    reading = asyncio.Event()

    async def read(request: Request) -> Response:
        reading.set()
        return await count_bytes(request)

    listener = open_listener(ApiSettings(), tmp_path / "api.address")
    limits = {"/control/set": BodyLimit(1000, 600.0)}
    app = build_app([Route("/control/set", read, methods=["POST"])], host="127.0.0.1", key=SECRET, body_limits=limits)
    async with running(app, listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(f"POST /control/set HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: 10\r\n\r\n{{".encode())
        await asyncio.wait_for(reading.wait(), 60)
    said = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"this server has ended meanwhile" in said
    assert "Traceback" not in caplog.text


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
    made = run_key("", path)
    assert len(made) == 32
    assert path.stat().st_mode & 0o077 == 0
    assert run_key("", path) == made
    key = run_key("a-shared-secret!", path)
    assert key == derive("a-shared-secret!", Purpose.HTTP) == path.read_text(), "the secret itself stays unsaid"
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["", "short", "x" * 31, "x" * 65, "x" * 31 + "/", "x" * 40 + "\n" + "y" * 40])
def test_a_key_that_we_never_wrote_is_replaced(tmp_path: Path, content: str):
    path = tmp_path / "api.secret"
    path.write_text(content)
    path.chmod(0o600)
    made = run_key("", path)
    assert len(made) == 32
    assert path.read_text() == made


def test_a_key_that_others_may_know_is_replaced(tmp_path: Path):
    path, target = tmp_path / "api.secret", tmp_path / "target"
    key = run_key("", path)
    path.chmod(0o644)
    after = run_key("", path)
    assert after != key
    path.rename(target)
    path.symlink_to(target)
    assert run_key("", path) != after
    assert target.read_text() == after
    path.unlink()
    os.mkfifo(path, 0o600)
    assert run_key("", path) == path.read_text()
