"""Two runs of one name on one broker, in real processes: one has the name, the other is refused and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.fakes.live_run import EMULATED, QUICK, SUMS, LiveRun
from tests.fakes.redis_servers import ServerProcess, Servers

SMALL = (*QUICK, *EMULATED, *SUMS, "emulated.time_scale=0.05", "run.batches=4", "pipeline.groups_per_batch=2")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    servers = Servers(tmp_path / "servers")
    try:
        yield servers.start()
    finally:
        servers.kill()


def test_of_two_starts_at_one_instant_one_is_refused(tmp_path: Path, server: ServerProcess) -> None:
    """And afterwards: a process of another run of that name, and the other directory's start, change nothing."""
    sides = [tmp_path / side for side in "ab"]
    for side in sides:
        side.mkdir()
    settings = (*SMALL, f"broker.url={server.url}")
    with LiveRun(sides[0], *settings) as one, LiveRun(sides[1], *settings) as two:
        runs = [one, two]
        codes = [run.wait_for_end() for run in runs]
        assert sorted(codes) == [0, 2], [run.describe() for run in runs]
        winner, loser = (runs[at] for at in (codes.index(0), codes.index(2)))
        assert f"{winner.run_dir.resolve()} on host" in loser.describe()
        assert not loser.run_dir.exists()
        audit = winner.command("inspect", str(winner.run_dir), "--broker", server.url, "--audit")
        assert audit.returncode == 0, audit.stdout + audit.stderr
        before = json.loads((winner.run_dir / "journal" / "run.json").read_bytes())
        with redis.Redis(port=server.port) as client:
            key = "streamrl:{tiny}:owner"
            assert client.hget(key, "run_id").decode() == before["run_id"]
            words = ["train", "--broker", server.url, "--run", "tiny", "--run-id", "0" * 16]
            worker = subprocess.run(
                [sys.executable, "-m", "workers", *words], capture_output=True, text=True, check=False, cwd=tmp_path
            )
            assert worker.returncode == 2, worker.stderr
            assert f"{winner.run_dir.resolve()} on host" in worker.stderr
            assert client.hget("streamrl:{tiny}:epochs", "trainer") == b"1"
