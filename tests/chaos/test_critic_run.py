"""A critic may be killed at any moment: the run waits for it, and both it and the policy train every row once.

No test's name holds the word "critic": it names the directory, which stands on every command line, by which processes
are found.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.journal import read_records
from tests.fakes.live_run import BATCHES, EMULATED, QUICK, LiveRun, check_whole
from transport.contracts.ledger import newest_checkpoint
from transport.contracts.messages import CriticReported, TrainerReady

pytestmark = pytest.mark.chaos

PPO = ("algorithm.name=ppo", "critic.lr=1e-2", *QUICK)


def check_both(run: LiveRun, *, batches: int = BATCHES) -> None:
    """The audit compares the critic's ledger with what was sent; here it is compared with the policy's."""
    check_whole(run, batches=batches)
    ledgers = [newest_checkpoint(run.run_dir / place) for place in ("checkpoints", "critic/checkpoints")]
    policy, critic = (found[1] for found in ledgers if found is not None)
    assert policy.rows() == critic.rows()
    assert critic.version == batches


def epochs(run: LiveRun) -> set[int]:
    """Critics that there were."""
    events = [record.event for record in read_records(run.run_dir / "journal")]
    readies = [event.report for event in events if isinstance(event, CriticReported)]
    return {report.weights.epoch for report in readies if isinstance(report, TrainerReady)}


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 1])
def test_its_death_is_waited_for_and_nothing_is_trained_twice(tmp_path: Path, staleness: int):
    with LiveRun(tmp_path, *PPO, f"pipeline.max_staleness={staleness}", "run.batches=12") as run:
        run.wait_for_batch(3)
        run.kill("workers", "critic")
        run.wait_for_batch(7)
        run.kill("workers", "critic")
        check_both(run, batches=12)
        assert epochs(run) == {1, 2, 3}
        assert all(line["value_staleness_max"] <= staleness for line in run.metrics())


@pytest.mark.parametrize(
    "faults",
    [
        {"critic.valued": 5, "critic.round_accumulated": 3},
        pytest.param({"critic.stepped": 2, "critic.checkpoint_saved": 2}, marks=pytest.mark.long),
    ],
    ids=lambda faults: "+".join(faults),
)
def test_it_survives_deaths_at_named_points(tmp_path: Path, faults: dict[str, int]):
    with LiveRun(tmp_path, *PPO, faults=faults) as run:
        check_both(run)
        assert run.died_at() == set(faults), "a point was not reached: the test proved nothing of it"


@pytest.mark.long
def test_it_dies_together_with_trainer_and_scorer(tmp_path: Path):
    with LiveRun(tmp_path, *PPO, "run.batches=10") as run:
        run.wait_for_batch(2)
        for kind in ("critic", "train", "score"):
            run.kill("workers", kind)
        check_both(run, batches=10)


@pytest.mark.long
def test_a_killed_supervisor_is_resumed_with_it(tmp_path: Path):
    with LiveRun(tmp_path, *PPO, "run.batches=10") as run:
        run.wait_for_batch(3)
        run.interrupt(signal.SIGKILL)
        assert run.wait_for_end() == -signal.SIGKILL
        run.wait_until_gone()
        run.start("--resume")
        check_both(run, batches=10)


@pytest.mark.long
def test_a_run_that_is_over_is_resumed_to_train_more(tmp_path: Path):
    with LiveRun(tmp_path, *PPO) as run:
        check_both(run)
        run.start("--resume", "--set", f"run.batches={BATCHES + 4}")
        check_both(run, batches=BATCHES + 4)


def test_one_that_always_dies_ends_the_run_by_name(tmp_path: Path):
    with LiveRun(tmp_path, *PPO, *EMULATED, "liveness.max_restarts=1", "run.batches=100000") as run:
        run.wait_for_batch(2)
        for _ in range(2):
            run.wait_until(lambda: bool(run.survivors("workers", "critic")), "a critic")
            run.kill("workers", "critic")
            run.wait_until(lambda: not run.survivors("workers", "critic"), "its death")
        assert run.wait_for_end() != 0
        assert "critic-0" in run.output
        run.wait_until_gone()


@pytest.mark.long
def test_one_that_hangs_is_replaced(tmp_path: Path):
    with LiveRun(tmp_path, *PPO, "run.batches=8") as run:
        run.wait_for_batch(2)
        hung = run.kill("workers", "critic", number=signal.SIGSTOP)
        run.wait_for_batch(6)
        run.resume_stopped(hung)
        check_both(run, batches=8)
