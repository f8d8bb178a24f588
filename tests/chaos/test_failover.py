"""A run whose broker's server is killed, with a replica that is promoted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fakes.live_run import EMULATED, QUICK, LiveRun
from tests.fakes.redis_servers import Clustered, Servers, Watched

pytestmark = pytest.mark.chaos

BATCHES = 30


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path / "servers")
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("kind", ["sentinels", "cluster"])
def test_a_run_goes_on_with_the_replica_and_trains_every_row_once(tmp_path: Path, servers: Servers, kind: str) -> None:
    """Sentinels promote it, or the other nodes of the cluster."""
    watched = Watched(servers) if kind == "sentinels" else Clustered(servers, "tiny")
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
