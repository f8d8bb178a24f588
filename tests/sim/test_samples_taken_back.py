"""Samples that are taken back go on elsewhere: the same faults with and without, in virtual time."""

from dataclasses import replace

import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.engine import CostModel, FaultModel, Scenario, SimulationLog
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import digest, events_of
from transport.contracts.messages import RolloutFinished, WorkerLost

CORE = CoreSettings(
    num_batches=6, groups_per_batch=16, group_size=4, max_staleness=1, rollout_timeout_s=25.0, max_attempts=9
)
FAULTS = FaultModel(worker_loss_s=20.0, trainer_loss_s=60.0, row_loss=0.01, repeat=0.1, until_s=150.0)


def run(seed: int, partial_s: float) -> SimulationLog:
    costs = CostModel(partial_s=partial_s)
    return simulate(Scenario(core=CORE, costs=costs, faults=replace(FAULTS, seed=seed), max_s=5000.0))


def twice(log: SimulationLog) -> int:
    return log.sampled_tokens - log.tokens


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_trained_once_and_little_is_sampled_twice(seed: int):
    with_partial, without = run(seed, 1.0), run(seed, 0.0)
    assert with_partial.finish_reason == without.finish_reason == "all batches are trained"
    assert events_of(with_partial, WorkerLost)
    finished = [record.event for record in events_of(with_partial, RolloutFinished)]
    assert any(event.resumed_tokens for event in finished)
    assert all(event.resumed_tokens < event.response_tokens for event in finished)
    assert not any(record.event.resumed_tokens for record in events_of(without, RolloutFinished))
    for rows in with_partial.trained.values():
        assert len(set(rows)) == len(rows)
    assert twice(with_partial) < 0.5 * twice(without)


def test_the_same_seed_gives_the_same_run():
    assert digest(run(3, 0.7).history) == digest(run(3, 0.7).history)
