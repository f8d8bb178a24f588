"""Weights from one host to another: a second network and host name, joined to ours by a virtual cable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.second_host import SecondHost, second_host
from transport.contracts.messages import encode
from transport.process.secret import SHARED_SECRET
from transport.tensors.base import Endpoint
from workers.weights.publish import WeightPublisher

ROOT = Path(__file__).parents[2]
PULL = """
import os, sys
from transport.contracts.messages import manifest_decoder
from transport.process.secret import SHARED_SECRET, read_secret
from transport.errors import StreamError
from transport.tensors.base import TimeLimit
from workers.weights.pull import WeightPuller
manifest = manifest_decoder.decode(open(sys.argv[1], "rb").read())
puller = WeightPuller(secret=read_secret(os.environ, SHARED_SECRET).encode(), limit=TimeLimit(10))
try:
    with puller.pull(manifest) as tensors:
        print(tensors["weight"].sum().item())
except StreamError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def other_host() -> Iterator[SecondHost]:
    with second_host() as host:
        yield host


SHARED = "a secret that two hosts share"


def test_another_host_pulls_by_the_advertised_name_and_the_secret(other_host: SecondHost, tmp_path: Path):
    endpoint = Endpoint(host="0.0.0.0", advertise=other_host.here, ports=range(7411, 7420), secret=SHARED.encode())
    publisher = WeightPublisher("two-hosts", tmp_path, endpoint=endpoint)
    try:
        manifest = publisher.publish(1, 1, {"weight": torch.arange(1000.0)}, torch.float32)
        assert manifest.sources[1].startswith(f"tcp://{other_host.here}:741")
        (tmp_path / "manifest").write_bytes(encode(manifest))
        assert ask(other_host, tmp_path / "manifest", SHARED) == "499500.0"
        assert "PeerRejectedError" in ask(other_host, tmp_path / "manifest", "")
        assert "PeerRejectedError" in ask(other_host, tmp_path / "manifest", SHARED[::-1])
    finally:
        publisher.close()


def test_a_trainer_that_listens_on_loopback_is_not_even_asked(other_host: SecondHost, tmp_path: Path):
    publisher = WeightPublisher("one-host", tmp_path)
    try:
        manifest = publisher.publish(1, 1, {"weight": torch.arange(1000.0)}, torch.float32)
        (tmp_path / "manifest").write_bytes(encode(manifest))
        assert "none can be reached from this host" in ask(other_host, tmp_path / "manifest", "")
    finally:
        publisher.close()


def ask(other_host: SecondHost, manifest: Path, secret: str) -> str:
    """What the other host says after pulling."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), SHARED_SECRET: secret, "OMP_NUM_THREADS": "1"}
    command = [*other_host.run, sys.executable, "-c", PULL, str(manifest)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or done.stderr
