"""Workers that come and go in whole simulated runs, by the rule and the measurements of live ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings, ScalingSettings
from orchestrator.core.state import PipelineState
from orchestrator.sim.costs import TrainCost
from orchestrator.sim.engine import CostModel, FaultModel, Scenario, SimulationLog
from orchestrator.sim.lengths import prompt_id
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import commands_of
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import DrainWorker, PromptRef, SpawnWorkers, Tick, WorkerJoined, WorkerLost
from transport.contracts.types import PromptId, RowId, UpdateMode, WorkerKind

GROUPS, SAMPLES = 32, 2
NO_FAULTS = FaultModel()
DECODE = DecodeCost(fixed_s=0.002, sample_s=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting:
    """Lengths by batch: ``phases`` of so many batches each, a mean length each."""

    phases: tuple[int, ...]
    batches_each: int

    def prompt(self, index: int) -> PromptRef:
        prompt = prompt_id(index)
        return PromptRef(prompt_id=prompt, prompt_tokens=10, predicted_tokens=float(self.phases[0]))

    def prompt_tokens(self, prompt: PromptId) -> int:
        return 10

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        batch, _, place = row.partition("/")
        phase = min(int(batch) // self.batches_each, len(self.phases) - 1)
        spread = 0.7 + 0.6 * (sum(map(ord, place)) % 7) / 6
        return max(1, round(self.phases[phase] * spread))


CORE = CoreSettings(
    num_batches=30,
    groups_per_batch=GROUPS,
    group_size=SAMPLES,
    max_staleness=1,
    update=UpdateMode.IN_FLIGHT,
    micro_batch_tokens=1_000_000,
    decode_cost=DECODE,
    scaling=ScalingSettings(min_workers=2, max_workers=6),
)


def run(
    lengths: Drifting, core: CoreSettings = CORE, faults: FaultModel = NO_FAULTS, train_s: float = 3.0
) -> SimulationLog:
    scenario = Scenario(
        core=core,
        workers=2,
        capacity=16,
        lengths=lengths,
        costs=CostModel(decode=DECODE, train=TrainCost(token_s=0.0, round_s=0.02, optimizer_s=train_s), spawn_s=1.0),
    )
    return simulate(replace(scenario, faults=faults))


def fleet_sizes(log: SimulationLog) -> list[int]:
    """Workers after each join or loss."""
    sizes, present = [0], set[str]()
    for record, _ in log.history:
        if isinstance(record.event, WorkerJoined) and record.event.kind is WorkerKind.GENERATE:
            present.add(record.event.worker_id)
        elif isinstance(record.event, WorkerLost):
            present.discard(record.event.worker_id)
        sizes.append(len(present))
    return sizes


@pytest.mark.parametrize("staleness", [0, 1])
def test_lengths_that_grow_bring_workers_and_a_shorter_run(staleness: int):
    core = msgspec.structs.replace(CORE, max_staleness=staleness, num_batches=30)
    lengths = Drifting(phases=(80, 240, 480), batches_each=10)
    fixed = run(lengths, msgspec.structs.replace(core, scaling=None))
    elastic = run(lengths, core)
    assert elastic.finish_reason == fixed.finish_reason
    assert max(fleet_sizes(elastic)) > 2
    assert elastic.end_s < 0.9 * fixed.end_s


def test_lengths_that_shrink_let_workers_go_and_none_loses_a_sample():
    log = run(Drifting(phases=(480, 60), batches_each=15))
    sizes = fleet_sizes(log)
    assert max(sizes) > 3
    assert sizes[-1] < max(sizes)
    drained = commands_of(log, DrainWorker)
    assert drained
    assert all("training is slower" in command.reason for command in drained if isinstance(command, DrainWorker))
    finished = sum(len(rows) for rows in log.trained.values())
    assert finished == 30 * GROUPS * SAMPLES


def test_lengths_that_stay_change_nothing():
    log = run(Drifting(phases=(80,), batches_each=30))
    assert not commands_of(log, SpawnWorkers)
    assert not commands_of(log, DrainWorker)


@pytest.mark.parametrize(("batches_each", "asked"), [(26, True), (29, False)])
def test_nobody_is_asked_for_when_all_batches_are_begun(batches_each: int, asked: bool):
    eager = ScalingSettings(min_workers=2, max_workers=6, confirm=1)
    lengths = Drifting(phases=(80, 480), batches_each=batches_each)
    log = run(lengths, msgspec.structs.replace(CORE, scaling=eager), train_s=4.0)
    assert bool(commands_of(log, SpawnWorkers)) == asked


@pytest.mark.parametrize("seed", range(4))
def test_a_fleet_under_faults_stays_within_its_limits_and_loses_no_sample(seed: int):
    faults = FaultModel(
        worker_loss_s=40.0,
        trainer_loss_s=60.0,
        row_loss=0.002,
        rollout_failure=0.01,
        repeat=0.05,
        until_s=120.0,
        seed=seed,
    )
    log = run(Drifting(phases=(80, 480, 60), batches_each=10), faults=faults)
    assert max(fleet_sizes(log)) <= 6 + 1, "one may be back before its predecessor is known to be dead"
    assert sum(len(rows) for rows in log.trained.values()) == 30 * GROUPS * SAMPLES


def test_a_run_whose_last_worker_was_drained_asks_for_another():
    """After a resume: the others were dead, and that was not known when the one that lived was chosen to leave."""
    log = run(Drifting(phases=(80, 240), batches_each=10))
    state = PipelineState.restore(log.initial)
    for record, _ in log.history[: len(log.history) // 2]:
        state.handle(record.event, record.now_s)
    now_s = state.now_s
    asked = [
        command
        for seconds, event in [
            *((0.0, WorkerLost(worker_id=worker_id, reason="killed")) for worker_id in state.pipeline.fleet.workers),
            *((float(seconds), Tick()) for seconds in range(1, 400)),
        ]
        for command in state.handle(event, now_s + seconds)
        if isinstance(command, SpawnWorkers)
    ]
    (again,) = asked[:1]
    assert again.reason == "0 generation workers are left, the minimum is 2"
    assert asked[-1].total - again.total <= 2, "it asks once for each in so long as they may take to start"
