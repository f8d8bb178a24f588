"""An S3 server of this machine: moto, in a process of its own, which speaks the protocol and checks who asks."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.fakes.redis_servers import free_port
from transport.contracts.ledger import checkpoint_dirs
from transport.process.storage import ObjectPath, place_of

START_S = 60.0


class S3Server:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def place(self, path: str) -> ObjectPath:
        found = place_of(f"s3://{path}")
        assert isinstance(found, ObjectPath)
        return found

    def make_bucket(self, name: str) -> None:
        self._ask(f"/{name}", method="PUT")

    def admit(self, requests: float) -> None:
        """From now on so many requests are let in, and then those alone whose keys are known: none."""
        self._ask("/moto-api/reset-auth", str(requests).encode())

    def _ask(self, path: str, body: bytes | None = None, method: str = "POST") -> None:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "text/plain"}, method=method)
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            answer.read()

    def answers(self) -> bool:
        with suppress(OSError):
            self._ask("/moto-api/data.json", method="GET")
            return True
        return False


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """With a bucket ``bucket``; its address and keys are in this process's environment."""
    pytest.importorskip("moto", reason="`make setup` installs moto")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = S3Server(port)
    try:
        until = time.monotonic() + START_S
        while not server.answers():
            assert process.poll() is None, "moto ended"
            assert time.monotonic() < until, "moto does not answer"
            time.sleep(0.05)
        server.make_bucket("bucket")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            checkpoint_dirs(server.place("bucket/none"))  # the library starts its thread
            yield server
    finally:
        process.kill()
        process.wait(START_S)
