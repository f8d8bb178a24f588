"""What a broker had acknowledged is gone: its file was cut short, or its whole directory; the run goes on all the same.

A kill alone loses nothing here, because the kernel keeps what the server has written; so the tests cut the file.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.fakes.live_run import PACED, QUICK, LiveRun, check_whole

pytestmark = pytest.mark.chaos


def lose_tail(run: LiveRun, kept: float) -> None:
    """Kill the embedded broker and keep the first ``kept`` (0..1) of its append-only file before it comes back."""
    run.interrupt(signal.SIGSTOP)  # or it would be back before its file is cut
    run.kill("valkey-server")
    (path,) = (run.run_dir / "broker" / "aof").glob("*.incr.aof")
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * kept))
    run.interrupt(signal.SIGCONT)


@pytest.mark.parametrize(
    "kept", [pytest.param(0.97, marks=pytest.mark.long), pytest.param(0.6, marks=pytest.mark.long), 0.0]
)
def test_a_broker_that_lost_its_tail_is_told_again_and_the_rest_is_made_again(tmp_path: Path, kept: float):
    with LiveRun(tmp_path, *QUICK, *PACED, "run.batches=24") as run:
        run.wait_for_batch(4)
        lose_tail(run, kept)
        run.wait_for_batch(12)
        lose_tail(run, kept)
        check_whole(run, batches=24)
        assert sorted(line["batch"] for line in run.metrics()) == list(range(24)), "each has one line"


def test_a_resumed_run_needs_its_journal_and_checkpoints_but_not_its_broker(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, *PACED, "run.batches=12") as run:
        run.wait_for_batch(5)
        run.interrupt(signal.SIGKILL)
        run.wait_for_end()
        run.wait_until_gone()
        shutil.rmtree(run.run_dir / "broker")
        run.start("--resume")
        check_whole(run, batches=12)


def test_a_finished_run_goes_on_when_it_is_resumed_with_more_batches(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK) as run:
        check_whole(run)
        run.start("--resume", "--set", "trainer.lr=0.002", "--set", "run.batches=9")
        assert run.wait_for_end() == 0
        assert [line["batch"] for line in run.metrics()] == list(range(9))
        assert {line["lr"] for line in run.metrics()[6:]} == {0.002}
        assert run.audit().returncode == 0
