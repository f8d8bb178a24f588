"""Units that no attempt can score: the run goes on without them, and what was given up can be seen and cleared."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.fakes.live_run import QUICK, LiveRun

pytestmark = pytest.mark.chaos


def test_a_reward_that_raises_leaves_letters_that_are_followed_refused_and_dropped(tmp_path: Path):
    reward = ("scoring.reward=tests.fakes.rewards:raises_for_some", f"scoring.reward_path={Path(__file__).parents[2]}")
    with LiveRun(tmp_path, *QUICK, *reward, "run.batches=4000") as run:
        run.wait_for_batch(4)
        shown = run.command("inspect", str(run.run_dir)).stdout
        letters = re.findall(r"dead (\d+-\d+) from tasks:reward: reward of \S+: .*cannot judge", shown)
        assert letters, shown
        refused = run.command("retry", str(run.run_dir), letters[0])
        assert refused.returncode == 1
        assert "its group has ended" in refused.stdout
        dropped = run.command("drop", str(run.run_dir), "--all")
        assert dropped.returncode == 0
        assert f"dropped {letters[0]} of tasks:reward" in dropped.stdout

        followed = run.follow()
        assert followed.stdout is not None
        while not re.search(r"\d+ s  trained \d+/4000  ", line := followed.stdout.readline()):
            assert line, "it ended before it said where the run is"
        run.interrupt(signal.SIGINT)
        assert run.wait_for_end() == 130
        said, _ = followed.communicate(timeout=60)
        assert said.endswith("the broker is gone: the run is over, or was stopped\n"), said
        assert followed.returncode == 0
