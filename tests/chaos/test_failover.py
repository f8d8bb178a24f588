"""A run whose broker's server is killed, with a replica that sentinels promote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.redis_servers import Servers, Watched

pytestmark = pytest.mark.chaos

BATCHES = 30


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Servers(tmp_path / "servers")
    try:
        yield Watched(servers)
    finally:
        servers.kill()


def test_a_run_goes_on_with_the_replica_and_trains_every_row_once(tmp_path: Path, watched: Watched) -> None:
    settings = (*QUICK, *EMULATED, "emulated.time_scale=0.1", f"broker.url={watched.url}", f"run.batches={BATCHES}")
    with LiveRun(tmp_path, *settings) as run:
        run.wait_for_batch(5)
        watched.primary.kill()
        run.wait_for_batch(12)
        with redis.Redis(port=watched.replica.port) as client:
            assert client.info("replication")["role"] == "master"
        assert run.wait_for_end() == 0, run.describe()
        assert {line["batch"] for line in run.metrics()} == set(range(BATCHES))
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout + audit.stderr
