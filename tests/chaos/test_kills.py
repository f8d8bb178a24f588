"""Any process may be killed at any moment: the run finishes, and every row is trained exactly once.

Each test is a whole run of the tiny model in real processes. The named points (transport/process/faults.py) are the
moments of a sample's life at which its process dies; points of different processes share a run, because starting one
takes longer than it lasts.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from orchestrator.core.model.groups import STABLE_S
from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import BATCHES, EMULATED, PACED, QUICK, LiveRun, check_whole
from transport.contracts.messages import SlotOutcome

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize(
    "faults",
    [
        {"generate.claimed": 2, "score.claimed": 3, "train.round_accumulated": 2, "orchestrator.applied": 12},
        {"generate.row_ready": 5, "score.committed": 7, "train.stepped": 2, "orchestrator.journaled": 15},
        {"generate.row_committed": 9, "train.published": 3, "orchestrator.executed": 12},
        {"generate.weights_loaded": 2, "train.checkpoint_written": 1, "train.checkpoint_saved": 2},
    ],
    ids=lambda faults: "+".join(faults),
)
def test_a_run_survives_deaths_at_named_points(tmp_path: Path, faults: dict[str, int]):
    with LiveRun(tmp_path, *QUICK, faults=faults) as run:
        check_whole(run)
        assert run.died_at() == set(faults), "a point was not reached: the test proved nothing of it"


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 2])
def test_other_staleness_bounds_survive_too(tmp_path: Path, staleness: int):
    faults = {"generate.row_committed": 6, "train.stepped": 3}
    with LiveRun(tmp_path, *QUICK, f"pipeline.max_staleness={staleness}", faults=faults) as run:
        check_whole(run)
        assert run.died_at() == set(faults)
        assert all(line["staleness_max"] <= staleness for line in run.metrics() if "staleness_max" in line)


@pytest.mark.parametrize("appendfsync", [pytest.param("always", marks=pytest.mark.long), "everysec"])
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
    with LiveRun(tmp_path, *QUICK, *PACED, "run.batches=12") as run:
        run.wait_for_batch(2)
        for words in (("orchestrator", "serve"), ("workers", "train"), ("valkey-server",)):
            run.kill(*words, number=signal.SIGSTOP)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.wait_until_gone()
        run.start("--resume")
        check_whole(run, batches=12)


def generating(run: LiveRun) -> bool:
    """Whether a generation worker that lives has samples in its slots, as the run's status says."""
    client = run.redis()
    try:
        status = json.loads(client.get("streamrl:{tiny}:meta:status") or "{}")
        leases = {key.decode().rpartition(":")[2] for key in client.scan_iter("streamrl:{tiny}:lease:generate-*")}
    finally:
        client.close()
    rows = {row["worker"]: row["running"] for row in status.get("workers", ())}
    return any(rows.get(worker, 0) > 0 for worker in leases)


def test_four_deaths_of_a_worker_under_long_groups_cost_no_prompt(tmp_path: Path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n")
    long = (f"generation.lengths={lengths}", "sampling.max_new_tokens=400", "pipeline.rollout_timeout_s=80.0")
    with LiveRun(tmp_path, *QUICK, *EMULATED, *long, "run.batches=2", "pipeline.groups_per_batch=2") as run:
        run.wait_until((run.run_dir / "api.address").exists, "an orchestrator that serves")
        for _ in range(4):
            run.wait_until(lambda: generating(run), "samples in the slots")
            run.kill("workers", "generate")
            run.wait_until(lambda: not generating(run), "word of the death")
        assert run.wait_for_end() == 0, run.describe()
    commands = [command for _, issued in recorded_commands(run.run_dir / "journal") for command in issued]
    outcomes = [command.outcome for command in commands if isinstance(command, SlotOutcome)]
    assert outcomes == ["trained"] * 4


@pytest.mark.long
def test_deaths_of_the_broker_that_are_far_apart_do_not_end_the_run(tmp_path: Path):
    patient = ("liveness.max_restarts=1", "emulated.time_scale=0.5", "run.batches=100000")
    with LiveRun(tmp_path, *QUICK, *EMULATED, *patient) as run:
        for _ in range(3):
            run.wait_for_batch(len(run.metrics()) + 2)
            run.kill("valkey-server")
            run.pass_time(STABLE_S + 2.0)
        run.kill("valkey-server")
        run.wait_for_batch(len(run.metrics()) + 1)
        run.kill("valkey-server")
        assert run.wait_for_end() == 1
        assert "it died 2 times in a row" in run.output
        run.wait_until_gone()


def test_a_generation_worker_that_hangs_is_replaced_by_its_lease(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "run.batches=12", "generation.workers=2") as run:
        run.wait_for_batch(2)
        hung = run.kill("workers", "generate", "--index", number=signal.SIGSTOP)
        run.wait_for_batch(8)
        run.resume_stopped(hung)
        check_whole(run, batches=12)
