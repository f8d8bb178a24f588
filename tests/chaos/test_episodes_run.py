"""Episodes in a real run: environments and workers are killed, and every episode is trained once, as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.fakes.live_run import EMULATED, QUICK, LiveRun, check_whole

pytestmark = pytest.mark.chaos

TALKING = (
    "environment.name=tests.fakes.environments:Echo",
    f"environment.path={Path(__file__).parents[2]}",
    "environment.max_turn_tokens=6",
    "environment.jail=off",
    "sampling.max_new_tokens=48",
)
ECHO = "workers.environments.environment"


def test_killed_environments_and_workers_cost_no_episode_and_give_no_zero(tmp_path: Path):
    """Each episode is paid for what it said, so a reward of 0 would be one that was made up."""
    with LiveRun(tmp_path, *QUICK, *TALKING, "run.batches=12") as run:
        for batch in (1, 3, 5):
            run.wait_for_batch(batch)
            run.kill(ECHO)
        run.wait_for_batch(7)
        run.kill("workers", "generate")
        check_whole(run, batches=12)
        lines = run.metrics()
        assert all(0 < line["environment_share"] < 1 for line in lines), lines
        assert all(line["tokens_trained"] == line["tokens_in_steps"] for line in lines)
        assert "held other rows than the log says" not in run.describe()
        rows = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
        assert rows
        assert all(row["reward"] > 0 for row in rows)


@pytest.mark.parametrize("ends", [True, False], ids=["the run ends", "the run may go on"])
def test_an_environment_that_always_raises_ends_slots_with_its_reason(tmp_path: Path, ends: bool):
    """Every group is generated again until its attempts are used up, and then dead; nothing is trained in its place."""
    told = (
        "environment.name=tests.fakes.environments:AsTold",
        *TALKING[1:],
        'environment.params={"always" = "raise"}',
        "environment.max_replays=1",
        "pipeline.max_attempts=2",
        "pipeline.max_refills=1",
    )
    told += (f"scoring.max_failed_share={0.5 if ends else 1}",)
    with LiveRun(tmp_path, *QUICK, *EMULATED, *told, "run.batches=2", "emulated.time_scale=0.05") as run:
        assert run.wait_for_end() == ends, run.describe()
        why = "groups have no rewards (scoring.max_failed_share is 0.5), the last one because of: the environment"
        assert (why in run.output) == ends, run.output
        assert "'no such thing'" in (run.run_dir / "logs" / "orchestrator.log").read_text()
        journal = b"".join(path.read_bytes() for path in (run.run_dir / "journal").glob("segment-*"))
        assert re.search(rb"the environment raised KeyError: 'no such thing', \S+:\d+ \(turn 1, 2 attempts\)", journal)
        assert not any(line["samples_trained"] for line in run.metrics())
        if not ends:
            assert [line["batch"] for line in run.metrics()] == [0, 1]
            assert sum(line.get("groups_dead", 0) for line in run.metrics()) >= 8
