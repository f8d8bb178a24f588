"""An orchestrator that was stopped goes on while another one has taken its run over: nothing of the run is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.journal import newest_epoch
from tests.fakes.live_run import EMULATED, QUICK, LiveRun

pytestmark = pytest.mark.chaos

BATCHES = 24
SLOW = (*EMULATED, *QUICK, "emulated.time_scale=0.1", f"run.batches={BATCHES}")


def check_emulated(run: LiveRun) -> None:
    """The run ended well: all batches, a clean audit, a journal that replays, no process left."""
    assert run.wait_for_end() == 0, run.describe()
    assert {line["batch"] for line in run.metrics()} == set(range(BATCHES))
    for command in (("inspect", str(run.run_dir), "--audit"), ("replay", str(run.run_dir))):
        done = run.command(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert run.survivors() == []


def test_a_stopped_orchestrator_that_goes_on_after_resume_harms_nothing(tmp_path: Path):
    with LiveRun(tmp_path, *SLOW) as run:
        run.wait_for_batch(3)
        old = run.kill("orchestrator", "serve", number=signal.SIGSTOP)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.start("--resume")
        run.wait_until(lambda: bool(set(run.survivors("orchestrator", "serve")) - {old}), "a new orchestrator")
        run.resume_stopped(old)
        check_emulated(run)


def test_plain_resumes_never_overlap(tmp_path: Path):
    with LiveRun(tmp_path, *SLOW) as run:
        for life in range(1, 4):
            run.wait_for_batch(4 * life)
            run.interrupt(signal.SIGKILL)  # and on at once, whoever of its children is still about
            assert run.wait_for_end() == -signal.SIGKILL
            run.start("--resume")
            run.wait_until(lambda life=life: newest_epoch(run.run_dir / "journal") > life, "a new orchestrator")
        check_emulated(run)
        assert "two orchestrators wrote" not in run.describe()
