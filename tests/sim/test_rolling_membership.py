"""Rolling membership, over-sampling, deferred tails in whole runs: what they gain, and bend, and never break."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.sim.costs import TrainCost
from orchestrator.sim.engine import CostModel, FaultModel, Scenario, SimulationLog
from orchestrator.sim.lengths import LengthModel
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import commands_of, events_of
from transport.contracts.messages import AdmitGroups, CloseMiniBatch, GroupScored, SlotOutcome
from transport.contracts.types import UpdateMode, batch_of

CORE = CoreSettings(num_batches=8, groups_per_batch=24, group_size=2, max_staleness=2, update=UpdateMode.IN_FLIGHT)
SKEWED = LengthModel(median_tokens=100, prompt_sigma=1.1, max_tokens=2000)
COSTS = CostModel(train=TrainCost(round_s=0.02, token_s=0.0004, optimizer_s=0.2), partial_s=0.5)
DEFERS = {"oversampled_groups": 8, "oversampled_tail": "defer"}


def mean_trained(log: SimulationLog) -> float:
    """Response tokens of a sample that was trained."""
    scored = {record.event.group_id: record.event for record in events_of(log, GroupScored)}
    trained = {row.rpartition("/")[0] for batch in log.trained for row in log.trained[batch]}
    lengths = [tokens for name in trained for tokens in scored[name].response_tokens]
    return sum(lengths) / len(lengths)


def run(faults: FaultModel | None = None, **core) -> SimulationLog:
    settings = msgspec.structs.replace(CORE, **core)
    return simulate(Scenario(core=settings, lengths=SKEWED, costs=COSTS, faults=faults or FaultModel(), workers=3))


def closes(log: SimulationLog) -> list[CloseMiniBatch]:
    return [command for command in commands_of(log, CloseMiniBatch) if command.finishes_batch]


def test_rolling_membership_ends_sooner_and_says_what_it_moved():
    fixed, rolling = run(), run(membership="rolling")
    assert rolling.end_s < 0.95 * fixed.end_s
    assert all(close.num_moved == 0 for close in closes(fixed))
    moved = closes(rolling)
    assert sum(close.num_moved for close in moved) > 10
    assert moved[0].moved_tokens < 0, "the first batch is shorter than it was admitted"


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_rolling_trains_every_group_once_and_nothing_beyond_the_bound(max_staleness):
    log = run(membership="rolling", max_staleness=max_staleness)
    rows = [row for batch in sorted(log.trained) for row in log.trained[batch]]
    assert len(rows) == len(set(rows)) == CORE.num_batches * CORE.groups_per_batch * CORE.group_size
    assert all(len(log.trained[batch]) == CORE.groups_per_batch * CORE.group_size for batch in log.trained)
    assert log.oldest_age <= max_staleness
    stale = [outcome for outcome in commands_of(log, SlotOutcome) if outcome.outcome == "stale"]
    assert not stale, "a sample was moved behind its bound"


@pytest.mark.parametrize("seed", range(4))
def test_rolling_survives_faults(seed):
    faults = FaultModel(
        worker_loss_s=15.0, trainer_loss_s=25.0, row_loss=0.02, rollout_failure=0.03, repeat=0.1, until_s=80, seed=seed
    )
    log = run(faults, membership="rolling", max_attempts=8, rollout_timeout_s=60.0, mini_batches=1 + seed % 2)
    rows = [row for batch in log.trained for row in log.trained[batch]]
    assert log.finish_reason == "all batches are trained"
    assert len(rows) == len(set(rows)), "a row is trained twice in the surviving lineage"


def test_over_sampling_trains_full_batches_of_shorter_responses():
    plain, over = run(max_staleness=0), run(max_staleness=0, oversampled_groups=8)
    rows = CORE.groups_per_batch * CORE.group_size
    assert [len(over.trained[batch]) for batch in range(CORE.num_batches)] == [rows] * CORE.num_batches
    assert over.end_s < 0.9 * plain.end_s

    assert mean_trained(over) < 0.85 * mean_trained(plain), "the longest answers are the ones that are dropped"
    unused = [outcome for outcome in commands_of(over, SlotOutcome) if outcome.reason.startswith("over-sampled")]
    assert len(unused) == 8 * CORE.num_batches


@pytest.mark.parametrize("update", UpdateMode)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_deferring_trains_every_group_once_and_one_version_later_at_most(update, max_staleness):
    plain = run(max_staleness=max_staleness, update=update)
    log = run(max_staleness=max_staleness, update=update, **DEFERS)
    rows = [row for batch in sorted(log.trained) for row in log.trained[batch]]
    assert len(rows) == len(set(rows)) == CORE.num_batches * CORE.groups_per_batch * CORE.group_size
    assert all(len(log.trained[batch]) == CORE.groups_per_batch * CORE.group_size for batch in log.trained)
    assert {batch - batch_of(row) for batch in log.trained for row in log.trained[batch]} == {0, 1}
    assert log.oldest_age <= max_staleness + 1
    assert {outcome.outcome for outcome in commands_of(log, SlotOutcome)} == {"trained"}
    assert 0.9 < mean_trained(log) / mean_trained(plain) < 1.1, "no answer is left out for its length"
    if max_staleness == 0:
        assert log.end_s < (0.6 if update is UpdateMode.IN_FLIGHT else 0.85) * plain.end_s
        assert log.sampled_tokens < 1.02 * log.tokens, "what was taken back went on"


@pytest.mark.parametrize("seed", range(4))
def test_deferring_survives_faults(seed):
    faults = FaultModel(
        worker_loss_s=15.0, trainer_loss_s=25.0, row_loss=0.02, rollout_failure=0.03, repeat=0.1, until_s=80, seed=seed
    )
    update = list(UpdateMode)[seed]
    core = {"max_staleness": seed % 2, "update": update, "max_attempts": 8, "rollout_timeout_s": 60.0, **DEFERS}
    log = run(faults, mini_batches=1 + seed % 2, drop_no_signal=seed == 3, **core)
    rows = [row for batch in log.trained for row in log.trained[batch]]
    assert log.finish_reason == "all batches are trained"
    assert len(rows) == len(set(rows)), "a row is trained twice in the surviving lineage"
    began = {group.group_id for command in commands_of(log, AdmitGroups) for group in command.groups}
    assert began == {outcome.group_id for outcome in commands_of(log, SlotOutcome)}, "a group was left over"
