"""A run as a user of the broker that may send what a run sends, and nothing else; and one that shows a certificate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fakes.live_run import EMULATED, QUICK, SUMS, LiveRun
from tests.fakes.redis_servers import ServerProcess, Servers, find_binary, free_port, self_signed
from transport.broker.redis_streams import COMMANDS

PASSWORD = "a-long-password"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "broker.md"
RULES = "on >{} resetchannels ~streamrl:* -@all {}".format(PASSWORD, " ".join(f"+{name}" for name in COMMANDS))


SETTINGS = (*QUICK, *EMULATED, *SUMS, "emulated.time_scale=0.1", "run.batches=3")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    rules = tmp_path / "users.acl"
    rules.write_text(f"user streamrl {RULES}\nuser default on nopass ~* &* +@all\n")
    servers = Servers(tmp_path / "servers")
    try:
        yield servers.start("--aclfile", str(rules), "--acllog-max-len", "1000")
    finally:
        servers.kill()


def test_the_documentation_names_them() -> None:
    text = DOCUMENTED.read_text()
    assert [name for name in COMMANDS if f"+{name}" not in text] == []


def test_a_whole_run_is_refused_no_command(tmp_path: Path, server: ServerProcess) -> None:
    url = f"redis://streamrl:{PASSWORD}@127.0.0.1:{server.port}"
    with LiveRun(tmp_path, *SETTINGS, f"broker.url={url}") as run:
        run.wait_for_batch(1)
        inspected = run.command("inspect", str(run.run_dir), "--broker", url)
        assert inspected.returncode == 0, inspected.stdout + inspected.stderr
        assert run.wait_for_end() == 0, run.describe()
        audit = run.command("inspect", str(run.run_dir), "--broker", url, "--audit")
        assert audit.returncode == 0, audit.stdout + audit.stderr
    with redis.Redis(port=server.port) as client:
        assert client.acl_log() == []
        client.set("another's", "1")
    with redis.Redis(port=server.port, username="streamrl", password=PASSWORD) as client:
        for refused in (("GET", "another's"), ("CONFIG", "SET", "dir", "/tmp"), ("FLUSHALL",), ("KEYS", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*refused)


def test_a_whole_run_shows_every_connection_its_certificate(tmp_path: Path) -> None:
    """The server refuses who has none, and has no port without TLS."""
    certificate, key = self_signed(tmp_path)
    binary = find_binary("redis") or pytest.skip("no redis-server on this machine")
    tls = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    port = free_port()
    options = ("--port", "0", "--tls-port", str(port), *tls, "--tls-auth-clients", "yes")
    server = ServerProcess(binary, tmp_path / "server", *options)
    try:
        server.wait_listening(port)
        files = (f"broker.tls_ca={certificate}", f"broker.tls_cert={certificate}", f"broker.tls_key={key}")
        url = f"broker.url=rediss://127.0.0.1:{port}"
        with LiveRun(tmp_path, *SETTINGS, url, *files) as run:
            assert run.wait_for_end() == 0, run.describe()
            audit = run.audit()
            assert audit.returncode == 0, audit.stdout + audit.stderr
        stranger = redis.Redis(port=port, ssl=True, ssl_ca_certs=certificate)
        with stranger, pytest.raises(redis.exceptions.ConnectionError):
            stranger.ping()
    finally:
        server.kill()
