"""Evaluations in whole simulated runs: what they cost, what they disturb, and what happens to them under faults."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.costs import TrainCost
from orchestrator.sim.engine import CostModel, FaultModel, Scenario, SimulationLog
from orchestrator.sim.lengths import LengthModel
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import commands_of, events_of
from transport.contracts.messages import EvaluationOutcome, GroupScored, RolloutFinished
from transport.contracts.types import UpdateMode, is_evaluation

CORE = CoreSettings(num_batches=8, groups_per_batch=16, group_size=4, max_staleness=1)
BALANCED = CostModel(train=TrainCost(round_s=0.05, token_s=0.0006, optimizer_s=0.5))


def run(faults: FaultModel | None = None, seed: int = 0, **core: object) -> SimulationLog:
    changed = msgspec.structs.replace(CORE, eval_problems=24, **core)
    lengths = LengthModel(seed=seed)
    return simulate(Scenario(core=changed, costs=BALANCED, lengths=lengths, faults=faults or FaultModel()))


def outcomes(log: SimulationLog) -> list[EvaluationOutcome]:
    return [command for command in commands_of(log, EvaluationOutcome) if isinstance(command, EvaluationOutcome)]


@pytest.mark.parametrize("update", list(UpdateMode))
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_every_mode_evaluates_whole_and_each_token_under_the_pin(update: UpdateMode, max_staleness: int):
    log = run(eval_every=2, update=update, max_staleness=max_staleness)
    *whole, last = outcomes(log)
    assert [(one.weights.version, one.answered, one.reason) for one in whole] == [(v, 24, "") for v in (0, 2, 4)]
    assert (last.weights.version, last.reason) in [(6, ""), (6, "the run is over")]
    spans = {
        (event.oldest.version, event.newest.version)
        for event in (record.event for record in events_of(log, RolloutFinished))
        if isinstance(event, RolloutFinished) and is_evaluation(event.row_id)
    }
    assert spans == {(0, 0), (2, 2), (4, 4), (6, 6)}
    assert not [row for rows in log.trained.values() for row in rows if is_evaluation(row)]


def test_what_is_trained_does_not_change_and_it_costs_little_time():
    without, with_it = run(eval_every=0), run(eval_every=2)
    assert {batch: set(rows) for batch, rows in with_it.trained.items()} == {
        batch: set(rows) for batch, rows in without.trained.items()
    }
    generated = sum(one.tokens for one in outcomes(with_it)) / with_it.tokens
    assert 0.1 < generated < 0.3, "up to 96 answers beside 512 samples"
    assert with_it.end_s < 1.3 * without.end_s


@pytest.mark.parametrize("seed", range(4))
def test_kills_of_workers_and_trainer_end_each_evaluation_whole_or_by_name(seed: int):
    faults = FaultModel(
        worker_loss_s=15.0, trainer_loss_s=40.0, row_loss=0.02, rollout_failure=0.05, repeat=0.2, seed=seed
    )
    log = run(faults=faults, seed=seed, eval_every=1)
    assert log.finish_reason == "all batches are trained"
    told = outcomes(log)
    assert [one.number for one in told] == list(range(len(told)))
    assert all(one.answered == one.problems or one.reason for one in told)
    assert {one.weights.version for one in told if one.answered == one.problems} != set()
    assert not [row for rows in log.trained.values() for row in rows if is_evaluation(row)]
    assert any(is_evaluation(record.event.group_id) for record in events_of(log, GroupScored))  # type: ignore[union-attr]
