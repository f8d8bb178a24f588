"""A run is paused, changed, checkpointed and drained from the command line, while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.journal import read_records
from tests.fakes.command_line import ask_status
from tests.fakes.live_run import LiveRun
from transport.contracts.messages import (
    CheckpointRequested,
    PauseRequested,
    ResumeRequested,
    SettingChanged,
    StopRequested,
)

pytestmark = pytest.mark.chaos

MANY = ("run.batches=5000", "trainer.checkpoint_every=5000")

REFUSED = {
    "trainer.lr=1": "trainer.lr cannot change while a run goes on",
    "pipeline.max_staleness=99": "pipeline.max_staleness must be a whole number in [0, 16]",
    "run.batches=1": "run.batches must be at least ",
}


def status(run: LiveRun) -> dict[str, Any]:
    return ask_status(run.run_dir)


def rests(now: dict[str, Any]) -> bool:
    return not now["running"] and now["pending"] > 0


def ask(run: LiveRun, *arguments: str) -> str:
    done = run.command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr + run.describe()
    return done.stdout


def test_people_hold_change_and_end_a_run(tmp_path: Path):
    with LiveRun(tmp_path, *MANY) as run:
        where = str(run.run_dir)
        run.wait_for_batch(2)

        assert ask(run, "pause", where).startswith("paused: running samples finish")
        run.wait_until(lambda: rests(status(run)), "the end of what ran, and groups that wait for the end of the pause")
        still = status(run)["in_flight_samples"]

        assert ask(run, "set", where, "pipeline.max_staleness=2") == "pipeline.max_staleness = 2 from now on\n"
        for assignment, problem in REFUSED.items():
            refused = run.command("set", where, assignment)
            assert refused.returncode == 2
            assert problem in refused.stderr
        now = status(run)
        assert (now["settings"]["pipeline.max_staleness"], now["in_flight_samples"], still) == (2, 0, 0)

        ask(run, "resume", where)
        run.wait_for_batch(len(run.metrics()) + 2)
        assert not list(run.run_dir.glob("checkpoints/step-*"))
        assert ask(run, "checkpoint", where) == "a checkpoint follows the batch in training\n"
        run.wait_until(lambda: bool(list(run.run_dir.glob("checkpoints/step-*"))), "a checkpoint")

        ask(run, "drain", where)
        assert run.wait_for_end() == 0, run.describe()
        assert (run.run_dir / "model" / "config.json").exists()
        asked = (PauseRequested, SettingChanged, ResumeRequested, CheckpointRequested, StopRequested)
        journaled = [type(record.event) for record in read_records(run.run_dir / "journal", from_seq=1)]
        assert [kind for kind in journaled if kind in asked] == list(asked)
        assert run.audit().returncode == 0
        assert run.command("replay", where).returncode == 0

        late = run.command("pause", where)
        assert late.returncode == 1
        assert "Traceback" not in late.stderr
        run.wait_until_gone()
