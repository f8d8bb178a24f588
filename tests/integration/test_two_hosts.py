"""Weights from one host to another: a second network and host name, joined to ours by a virtual cable.

Needs root and iproute2, to make the second host; skipped, and said so, elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from transport.contracts.messages import encode
from transport.process.secret import SHARED_SECRET
from transport.tensors.base import Endpoint
from workers.weights.publish import WeightPublisher

ROOT = Path(__file__).parents[2]
HERE, THERE = "10.213.77.1", "10.213.77.2"
PULL = """
import os, sys
from transport.contracts.messages import manifest_decoder
from transport.process.secret import SHARED_SECRET, read_secret
from transport.errors import StreamError
from workers.weights.pull import WeightPuller
manifest = manifest_decoder.decode(open(sys.argv[1], "rb").read())
puller = WeightPuller(secret=read_secret(os.environ, SHARED_SECRET).encode(), deadline_s=10)
try:
    with puller.pull(manifest) as tensors:
        print(tensors["weight"].sum().item())
except StreamError as error:
    print(type(error).__name__, error)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def other_host() -> Iterator[list[str]]:
    """The beginning of a command line that runs its rest on the other host."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("making a second host needs root, iproute2 and unshare")
    name = f"streamrl-{os.getpid()}"
    cable = (f"sr{os.getpid()}a", f"sr{os.getpid()}b")
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1], "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", cable[0])
        ip("link", "set", cable[0], "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", cable[1])
        ip("-n", name, "link", "set", cable[1], "up")
        yield ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname other && exec "$@"', "sh"]
    finally:
        # The namespace takes its end of the cable along, but later: the next test's would find it in the way.
        subprocess.run(["ip", "link", "del", cable[0]], check=False, capture_output=True, timeout=10)
        ip("netns", "del", name)


SHARED = "a secret that two hosts share"


def test_another_host_pulls_by_the_advertised_name_and_the_secret(other_host: list[str], tmp_path: Path):
    endpoint = Endpoint(host="0.0.0.0", advertise=HERE, ports=range(7411, 7420), secret=SHARED.encode())
    publisher = WeightPublisher("two-hosts", tmp_path, endpoint=endpoint)
    try:
        manifest = publisher.publish(1, 1, {"weight": torch.arange(1000.0)}, torch.float32)
        assert manifest.sources[1].startswith(f"tcp://{HERE}:741")
        (tmp_path / "manifest").write_bytes(encode(manifest))
        assert ask(other_host, tmp_path / "manifest", SHARED) == "499500.0"
        assert "PeerRejectedError" in ask(other_host, tmp_path / "manifest", "")
        assert "PeerRejectedError" in ask(other_host, tmp_path / "manifest", SHARED[::-1])
    finally:
        publisher.close()


def test_a_trainer_that_listens_on_loopback_is_not_even_asked(other_host: list[str], tmp_path: Path):
    publisher = WeightPublisher("one-host", tmp_path)
    try:
        manifest = publisher.publish(1, 1, {"weight": torch.arange(1000.0)}, torch.float32)
        (tmp_path / "manifest").write_bytes(encode(manifest))
        assert "none can be reached from this host" in ask(other_host, tmp_path / "manifest", "")
    finally:
        publisher.close()


def ask(other_host: list[str], manifest: Path, secret: str) -> str:
    """What the other host says after pulling."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), SHARED_SECRET: secret, "OMP_NUM_THREADS": "1"}
    command = [*other_host, sys.executable, "-c", PULL, str(manifest)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() or done.stderr
