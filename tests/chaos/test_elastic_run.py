"""Generation workers of a real run that come as lengths grow and go as they shrink, as in StreamRL's Figure 11."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.sim.replay import recorded_commands
from tests.fakes.live_run import EMULATED, LiveRun
from transport.contracts.messages import (
    DispatchGroups,
    DrainWorker,
    RolloutFinished,
    SpawnWorkers,
    StepDone,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from transport.contracts.types import WorkerId

pytestmark = pytest.mark.chaos

GROUPS, SAMPLES, BATCHES = 8, 4, 60  # a phase outlasts the start of a worker on a busy machine
PHASES = (60, 320, 30)
"""Mean lengths, a third of the batches each."""
ELASTIC = (
    *EMULATED,
    f"run.batches={BATCHES}",
    f"pipeline.groups_per_batch={GROUPS}",
    f"pipeline.group_size={SAMPLES}",
    "sampling.max_new_tokens=420",
    "generation.slots=8",
    "generation.workers=1",
    "generation.max_workers=3",
    "emulated.time_scale=0.05",
    "emulated.optimizer_s=8.0",
    "ranker.kind=none",
)


def test_workers_come_with_longer_answers_and_go_with_shorter_ones(tmp_path: Path):
    lengths = tmp_path / "lengths.txt"
    per_phase = BATCHES // len(PHASES) * GROUPS * SAMPLES
    lengths.write_text("\n".join(str(mean * (7 + n % 7) // 10) for mean in PHASES for n in range(per_phase)))
    with LiveRun(tmp_path, *ELASTIC, f"generation.lengths={lengths}") as run:
        run.wait_until(lambda: "generation workers 1 -> " in run.output, "more workers")
        assert run.wait_for_end(timeout_s=240.0) == 0, run.describe()
        assert run.command("replay", str(run.run_dir)).returncode == 0
        assert run.audit().returncode == 0
    check_journal(run)
    assert "training is slower by" in run.output, "nobody was told why workers left"
    assert sum(line["samples_trained"] for line in run.metrics()) == BATCHES * GROUPS * SAMPLES


def check_journal(run: LiveRun) -> None:
    """Each change is commanded and seen; who is new loads before it serves, and who leaves was done."""
    history = list(recorded_commands(run.run_dir / "journal"))
    assert [command for _, commands in history for command in commands if isinstance(command, SpawnWorkers)]
    drains = {c.worker_id: record.seq for record, commands in history for c in commands if isinstance(c, DrainWorker)}
    assert drains
    events = [record.event for record, _ in history]
    started = [event for event in events if isinstance(event, WorkerStarted)]
    assert [event.name for event in started] == [f"generate-{index}" for index in range(1, 1 + len(started))]
    assert all("generation is slower by" in event.reason for event in started)
    lost = {event.worker_id: event.reason for event in events if isinstance(event, WorkerLost)}
    last_step = sorted(record.seq for record, _ in history if isinstance(record.event, StepDone))[-2]
    for worker_id, seq in drains.items():
        if worker_id not in lost and seq >= last_step:
            continue  # the run may be over before it can say goodbye
        assert lost[worker_id].startswith("drained: training is slower")
        assert [event.worker_id for event in events if isinstance(event, WorkerJoined)].count(worker_id) == 1
        assert not unfinished(history, worker_id, seq)
    serves = [serves_before_its_groups(history, WorkerId(f"{event.name}.1")) for event in started]
    assert any(serves), "none of them ever served"


def unfinished(history: list, worker_id: WorkerId, seq: int) -> set[str]:
    """Groups of this worker that are not whole when it is told to leave."""
    missing: dict[str, int] = {}
    for record, commands in history:
        if record.seq > seq:
            break
        event = record.event
        if isinstance(event, RolloutFinished) and event.worker_id == worker_id:
            group_id = event.row_id.rpartition("/")[0]
            missing[group_id] -= 1
        for command in commands:
            if isinstance(command, DispatchGroups) and command.worker_id == worker_id:
                (plan,) = command.plans
                missing[plan.group_id] = len(plan.samples)
    return {group_id for group_id, left in missing.items() if left}


def serves_before_its_groups(history: list, worker_id: WorkerId) -> bool:
    """Whether it loaded weights, as one that came just before the end need not; without them it is given no group."""
    loaded = False
    for record, commands in history:
        loaded = loaded or (isinstance(record.event, WeightsLoaded) and record.event.worker_id == worker_id)
        given = [c for c in commands if isinstance(c, DispatchGroups) and c.worker_id == worker_id]
        assert loaded or not given, f"{worker_id} has no weights"
    return loaded
