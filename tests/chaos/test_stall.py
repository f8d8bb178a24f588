"""A run that stands still says at which stage, and who should act; then it stops, and resume finishes it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.fakes.live_run import PACED, LiveRun, check_whole

pytestmark = pytest.mark.chaos

PATIENT = ("liveness.lease_s=120.0", "scoring.lease_s=5.0", "pipeline.rollout_timeout_s=20.0")
"""A stopped worker keeps its lease: nobody takes over, so the run can only say what it waits for."""


def test_a_stopped_scoring_worker_is_named_and_the_run_goes_on_with_it(tmp_path: Path):
    with LiveRun(tmp_path, *PATIENT, "run.batches=12", "liveness.warn_s=3.0", "liveness.stall_s=300.0") as run:
        run.wait_for_batch(2)
        stopped = run.kill("workers", "score", number=signal.SIGSTOP)
        run.wait_until(lambda: "blocked: scoring waits for the scores of" in run.output, "word of the blocked stage")
        assert "to act: score-0.1" in run.output
        client = run.redis()
        status = json.loads(client.get("streamrl:{tiny}:meta:status"))
        client.close()
        blocked = status["blocked"]
        assert (blocked["stage"], blocked["owner"]) == ("scoring", "score-0.1")
        assert blocked["still_s"] >= 3.0
        assert 0 < blocked["waited_s"] <= status["elapsed_s"]
        looked = run.command("inspect", str(run.run_dir))
        assert "blocked: scoring waits for" in looked.stdout
        run.resume_stopped(stopped)
        check_whole(run, batches=12)
        assert "it goes on" in run.output


def test_a_stall_ends_the_run_with_its_own_code_and_resume_finishes(tmp_path: Path):
    quick = ("liveness.lease_s=29.0", "pipeline.rollout_timeout_s=20.0", "liveness.warn_s=3.0", "liveness.stall_s=30.0")
    with LiveRun(tmp_path, *PACED, *quick, "run.batches=12", "scoring.lease_s=5.0") as run:
        run.wait_for_batch(2)
        run.kill("workers", "score", number=signal.SIGSTOP)
        assert run.wait_for_end() == 3, run.describe()
        assert re.search(r"the run stopped, no progress for \d+ s: scoring waits for", run.output)
        assert "run --resume --name tiny" in run.output
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=12)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("orchestrator", "serve"), "orchestrator"),
        pytest.param(("workers", "generate"), "generate-0", marks=pytest.mark.long),
    ],
)
def test_a_process_that_hangs_is_ended_and_started_again(tmp_path: Path, words: tuple[str, str], name: str):
    """Nobody else could do its work, and it cannot report itself."""
    with LiveRun(tmp_path, *PACED, "run.batches=12", "liveness.lease_s=3.0", "liveness.stall_s=400.0") as run:
        run.wait_for_batch(2)
        run.kill(*words, number=signal.SIGSTOP)
        run.wait_until(lambda: f"{name} gave no sign of life" in run.output, "word of the hung process")
        check_whole(run, batches=12)
