"""Generation workers die in the middle of long samples: the run goes on from what they had kept, and is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import EMULATED, QUICK, LiveRun, check_whole
from transport.contracts.messages import DispatchGroups, RolloutFinished

pytestmark = pytest.mark.chaos

SLOW = ("emulated.time_scale=1.0", "emulated.step_s=0.02", "sampling.max_new_tokens=300", "generation.partial_s=0.3")
"""A sample takes 6 s, of which a kill loses 0.3."""


def test_samples_of_a_killed_worker_go_on_from_what_it_had_kept(tmp_path: Path):
    faults = {"generate.kept": 6}
    with LiveRun(tmp_path, *QUICK, *EMULATED, *SLOW, "run.batches=3", faults=faults) as run:
        check_whole(run, batches=3)
        assert run.died_at() == set(faults)
        resumed: dict[str, int] = {}
        planned: set[str] = set()
        for record, commands in recorded_commands(run.run_dir / "journal"):
            if isinstance(record.event, RolloutFinished) and record.event.resumed_tokens:
                assert record.event.resumed_tokens < record.event.response_tokens
                resumed[record.event.row_id] = record.event.resumed_tokens
            for plan in (plan for one in commands if isinstance(one, DispatchGroups) for plan in one.plans):
                planned |= {f"{plan.group_id}/{sample.sample}" for sample in plan.partial}
        assert resumed
        assert set(resumed) <= planned
