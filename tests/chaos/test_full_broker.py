"""A broker that is full, in memory or on disk: the run waits, says so, and goes on when there is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.live_run import PACED, QUICK, LiveRun, check_whole
from tests.fakes.redis_servers import ServerProcess, find_binary
from tests.fakes.small_disk import filled, small_disk

pytestmark = pytest.mark.chaos


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the user's own, whose limits a test changes while the run goes on."""
    binary = find_binary("valkey")
    assert binary is not None
    made = ServerProcess(binary, tmp_path / "server")
    made.wait_listening()
    yield made
    made.kill()


def says_full(run: LiveRun) -> None:
    run.wait_until(lambda: "is full: " in run.output, "word of the full broker")


def children(run: LiveRun) -> set[int]:
    kinds = (("orchestrator", "serve"), ("workers", "generate"), ("workers", "score"), ("workers", "train"))
    return {run.child(*words).pid for words in kinds}


def test_a_run_waits_for_room_in_its_brokers_memory_and_nobody_loses_his_place(tmp_path: Path, server: ServerProcess):
    with LiveRun(tmp_path, *QUICK, *PACED, f"broker.url={server.url}", "run.batches=30") as run:
        run.wait_for_batch(3)
        before = children(run)
        server.limit_memory(1)
        says_full(run)
        full_at = len(run.metrics())
        run.pass_time(8.0)  # twice a lease: nobody can renew his
        assert len(run.metrics()) <= full_at + 1, "the batch in training at most"
        server.limit_memory(0)
        run.wait_until(lambda: "takes writes again" in run.output, "word of the room")
        run.wait_for_batch(full_at + 3)
        assert children(run) == before
        check_whole(run, batches=30)


def test_a_broker_that_stays_full_ends_the_run_with_its_own_code_and_resume_waits(
    tmp_path: Path, server: ServerProcess
):
    short = ("broker.outage_s=8.0", f"broker.url={server.url}", "run.batches=20")
    with LiveRun(tmp_path, *QUICK, *PACED, *short) as run:
        run.wait_for_batch(2)
        server.limit_memory(1)
        assert run.wait_for_end() == 5, run.describe()
        assert "run --resume" in run.output
        run.wait_until_gone()
        run.start("--resume", "--set", "broker.outage_s=300.0")
        run.wait_until(lambda: run.output.count("everything waits for it") >= 2, "word of the full broker")
        server.limit_memory(0)
        check_whole(run, batches=20)


@pytest.mark.parametrize("appendfsync", [pytest.param("everysec", marks=pytest.mark.long), "always"])
def test_a_run_waits_for_room_on_the_disk_of_its_embedded_broker(tmp_path: Path, appendfsync: str):
    """With "always" the server ends when it cannot write, and cannot start until there is room."""
    run = LiveRun(tmp_path, *QUICK, *PACED, f"broker.appendfsync={appendfsync}", "run.batches=30")
    with small_disk(run.run_dir / "broker") as disk, run:
        run.wait_for_batch(3)
        with filled(disk):
            run.wait_until(lambda: "everything waits for it" in run.output, "word of the full disk")
        run.wait_until(lambda: "takes writes again" in run.output, "word of the room")
        check_whole(run, batches=30)
