"""Any process may be killed at any moment: the run finishes, and every row is trained exactly once.

Each test is a whole run of the tiny model in real processes. The named points (transport/faults.py) are the moments of
a sample's life at which its process dies; points of different processes share a run, because starting one takes longer
than it lasts.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes.live_run import BATCHES, EMULATED, QUICK, LiveRun, check_whole

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    "faults",
    [
        {"generate.claimed": 2, "score.claimed": 3, "train.round_accumulated": 2, "orchestrator.applied": 20},
        {"generate.row_ready": 5, "score.committed": 7, "train.stepped": 2, "orchestrator.journaled": 25},
        {"generate.row_committed": 9, "train.published": 3, "orchestrator.executed": 30},
        {"generate.weights_loaded": 2, "train.checkpoint_written": 1, "train.checkpoint_saved": 2},
    ],
    ids=lambda faults: "+".join(faults),
)
def test_a_run_survives_deaths_at_named_points(tmp_path: Path, faults: dict[str, int]):
    with LiveRun(tmp_path, *QUICK, faults=faults) as run:
        check_whole(run)
        assert run.died_at() == set(faults), "a point was not reached: the test proved nothing of it"


@pytest.mark.parametrize("staleness", [0, 2])
def test_other_staleness_bounds_survive_too(tmp_path: Path, staleness: int):
    faults = {"generate.row_committed": 6, "train.stepped": 3}
    with LiveRun(tmp_path, *QUICK, f"pipeline.max_staleness={staleness}", faults=faults) as run:
        check_whole(run)
        assert run.died_at() == set(faults)
        assert all(line["staleness_max"] <= staleness for line in run.metrics() if "staleness_max" in line)


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
def test_the_broker_is_killed_under_load(tmp_path: Path, appendfsync: str):
    with LiveRun(tmp_path, *QUICK, "run.batches=20", f"broker.appendfsync={appendfsync}") as run:
        run.wait_for_batch(2)
        run.kill("valkey-server")
        run.wait_for_batch(8)
        run.kill("valkey-server")
        check_whole(run, batches=20)


def test_a_killed_supervisor_leaves_nothing_behind_and_resume_finishes(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "run.batches=12") as run:
        run.wait_for_batch(3)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=12)


def test_a_supervisor_killed_before_its_run_began_is_resumed(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *EMULATED) as run:
        run.wait_until((run.run_dir / "config.toml").exists, "directory of the run")
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.wait_until_gone()
        assert not (run.run_dir / "journal").exists(), "it began: the test proved nothing"
        run.start("--resume")
        assert run.wait_for_end() == 0, run.describe()
        assert len(run.metrics()) == BATCHES


def test_a_stopped_child_does_not_outlive_a_killed_supervisor(tmp_path: Path):
    """It cannot end itself, and once it goes on it would write into the run of the next supervisor."""
    with LiveRun(tmp_path, *QUICK, "run.batches=12") as run:
        run.wait_for_batch(2)
        for words in (("orchestrator", "serve"), ("workers", "train"), ("valkey-server",)):
            run.kill(*words, number=signal.SIGSTOP)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=12)


def test_a_generation_worker_that_hangs_is_replaced_by_its_lease(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "run.batches=12", "generation.workers=2") as run:
        run.wait_for_batch(2)
        hung = run.kill("workers", "generate", "--index", number=signal.SIGSTOP)
        run.wait_for_batch(8)
        run.resume_stopped(hung)
        check_whole(run, batches=12)
