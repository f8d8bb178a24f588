"""Ranks of one trainer die where the others wait for them: all start over from the checkpoint, under a new epoch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import QUICK, LiveRun, check_whole
from tests.fakes.s3_server import S3Server, s3_server
from transport.contracts.ledger import checkpoint_dirs
from transport.contracts.messages import STARTING, TrainerReady, worker_status_decoder

pytestmark = pytest.mark.chaos

RANKS = ("trainer.ranks=2", "trainer.checkpoint_every=1")


def starts(run: LiveRun) -> list[tuple[int, int]]:
    """(epoch, version) of the trainers that became ready, in their order."""
    events = [record.event for record, _ in recorded_commands(run.run_dir / "journal")]
    return [(event.weights.epoch, event.weights.version) for event in events if isinstance(event, TrainerReady)]


def epochs(run: LiveRun) -> list[int]:
    """Of the trainers that became ready, in their order."""
    return [epoch for epoch, _ in starts(run)]


def have_reported(run: LiveRun) -> bool:
    """Whether both ranks' leases say that they started: from then on the supervisor notices one that stops."""
    with run.redis() as client:
        leases: list[Any] = [client.get(key) for key in client.scan_iter("streamrl:{tiny}:lease:train-*")]
    found = [worker_status_decoder.decode(lease) for lease in leases if lease]
    alive = run.survivors("workers", "train")
    return len(alive) == 2 and {one.pid for one in found if one.doing != STARTING} >= set(alive)


def test_a_rank_killed_in_its_save_and_one_that_hangs_in_a_round_cost_one_restart_each(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *RANKS, "run.batches=12", faults={"train.shard_written": 2}) as run:
        run.wait_until(lambda: bool(run.died_at()), "death in a save")
        run.wait_for_batch(4)
        run.wait_until(lambda: have_reported(run), "a sign of life of both ranks")
        before = len(epochs(run))
        run.kill("workers", "train", number=signal.SIGSTOP)
        check_whole(run, batches=12)
        assert (before, len(epochs(run))) == (2, 3)
        assert epochs(run) == [1, 2, 3]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.mark.long
def test_a_killed_run_of_two_ranks_is_resumed_from_object_storage(s3: S3Server, tmp_path: Path):
    settings = (*RANKS, "run.batches=6", "trainer.checkpoint_dir=s3://bucket/ranks")
    with LiveRun(tmp_path, *QUICK, *settings) as run:
        run.wait_until(lambda: bool(checkpoint_dirs(s3.place("bucket/ranks/tiny"))), "a checkpoint")
        run.interrupt(signal.SIGKILL)
        run.wait_for_end()
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=6)
        first, second = starts(run)
        assert first == (1, 0)
        assert second[1] >= 1, "from the checkpoint"
        assert not (run.run_dir / "checkpoints").exists()
