"""A worker that runs probes dies: its groups are whole from then on, and the run is exact; its journal replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import EMULATED, QUICK, LiveRun, check_whole
from transport.contracts.messages import DispatchGroups, GroupPlan, WorkerLost, WorkerReported

pytestmark = pytest.mark.chaos

PROBED = (
    "pipeline.probes=true",
    "pipeline.max_staleness=0",
    "pipeline.update=barrier",
    "pipeline.groups_per_batch=8",
    "pipeline.group_size=4",
    "ranker.kind=none",
    "generation.workers=2",
    "generation.slots=4",
    "emulated.time_scale=1.0",
    "emulated.step_s=0.02",
    "sampling.max_new_tokens=100",
    "generation.partial_s=0.3",
)


def test_a_killed_worker_s_probes_start_again_as_whole_groups(tmp_path: Path):
    faults = {"generate.kept": 4}
    with LiveRun(tmp_path, *QUICK, *EMULATED, *PROBED, "run.batches=2", faults=faults) as run:
        check_whole(run, batches=2)
        assert run.died_at() == set(faults)
        plans: dict[str, list[tuple[str, GroupPlan]]] = {}
        lost: set[str] = set()
        told: list[int] = []
        for record, commands in recorded_commands(run.run_dir / "journal"):
            if isinstance(record.event, WorkerLost) and not record.event.left:
                lost.add(record.event.worker_id)
            if isinstance(record.event, WorkerReported):
                told += [one.tokens for group in record.event.partial for one in group.samples if one.tokens]
            for command in (one for one in commands if isinstance(one, DispatchGroups)):
                for plan in command.plans:
                    plans.setdefault(plan.group_id, []).append((command.worker_id, plan))
        probed = {name: asked for name, asked in plans.items() if asked[0][1].alone}
        assert probed
        assert told, "how far probes are was reported"
        of_the_dead = [asked for asked in probed.values() if asked[0][0] in lost]
        assert of_the_dead
        for asked in probed.values():
            assert len(asked) > 1, "the others came"
            assert not any(plan.alone for _, plan in asked[1:])
            assert {sample for _, plan in asked for sample in plan.samples} == {0, 1, 2, 3}
