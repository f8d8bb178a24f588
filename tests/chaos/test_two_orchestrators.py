"""An orchestrator that was stopped goes on while another one has taken its run over: nothing of the run is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.journal import newest_epoch
from tests.fakes.live_run import PACED, QUICK, LiveRun, check_whole

pytestmark = pytest.mark.chaos

BATCHES = 24
SETTINGS = (*PACED, *QUICK, f"run.batches={BATCHES}")


def check_replays(run: LiveRun) -> None:
    """The run ended well, and its journal replays."""
    check_whole(run, batches=BATCHES)
    done = run.command("replay", str(run.run_dir))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stopped_orchestrator_that_goes_on_after_resume_harms_nothing(tmp_path: Path):
    with LiveRun(tmp_path, *SETTINGS) as run:
        run.wait_for_batch(3)
        old = run.kill("orchestrator", "serve", number=signal.SIGSTOP)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.start("--resume")
        run.wait_until(lambda: bool(set(run.survivors("orchestrator", "serve")) - {old}), "a new orchestrator")
        run.resume_stopped(old)
        check_replays(run)


@pytest.mark.long
def test_plain_resumes_never_overlap(tmp_path: Path):
    with LiveRun(tmp_path, *SETTINGS) as run:
        for life in range(1, 4):
            run.wait_for_batch(4 * life)
            run.interrupt(signal.SIGKILL)  # and on at once, whoever of its children is still about
            assert run.wait_for_end() == -signal.SIGKILL
            run.start("--resume")
            run.wait_until(lambda life=life: newest_epoch(run.run_dir / "journal") > life, "a new orchestrator")
        check_replays(run)
        assert "two orchestrators wrote" not in run.describe()
