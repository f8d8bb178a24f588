"""Whole simulated runs: the modes against one another, faults, determinism, replay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from orchestrator.core.model.settings import CoreSettings
from orchestrator.journal import Journal, JournalError
from orchestrator.sim.costs import TrainCost
from orchestrator.sim.engine import CostModel, FaultModel, Scenario, SimulationLog, SimulationStalledError
from orchestrator.sim.lengths import LengthModel
from orchestrator.sim.replay import recorded_commands
from orchestrator.sim.simulate import simulate
from tests.fakes.histories import commands_of, digest, events_of
from transport.contracts.messages import (
    AbortRollouts,
    CloseMiniBatch,
    DispatchGroups,
    PromptRef,
    RolloutFinished,
    RowsMissing,
    SlotOutcome,
    TrainerReady,
    WorkerLost,
)
from transport.contracts.types import UpdateMode, batch_of, parse_row_id

CORE = CoreSettings(num_batches=6, groups_per_batch=16, group_size=4, max_staleness=1)
BALANCED = CostModel(train=TrainCost(round_s=0.05, token_s=0.0006, optimizer_s=0.5))
"""About as long to train a batch as to generate it, so that overlap shows."""


MODEL = LengthModel()


def run(costs: CostModel = BALANCED, lengths: LengthModel = MODEL, **core) -> SimulationLog:
    return simulate(Scenario(core=msgspec.structs.replace(CORE, **core), costs=costs, lengths=lengths))


def trained_groups(log: SimulationLog, batch: int) -> set[str]:
    return {row.rpartition("/")[0] for row in log.trained[batch]}


def test_overlap_pays_and_more_staleness_pays_more():
    synchronous = run(max_staleness=0).end_s
    one_step = run(max_staleness=1, update=UpdateMode.BARRIER).end_s
    in_flight = run(max_staleness=1).end_s
    looser = run(max_staleness=2).end_s
    assert one_step < 0.8 * synchronous
    assert in_flight < 0.95 * one_step
    assert looser < in_flight


def test_streaming_starts_training_before_the_batch_is_generated():
    """Dynamic-batch pipelining: synchronous RL, and yet the trainer works while the tail is generated."""
    log = run(max_staleness=0)
    generation_alone = run(
        costs=replace(BALANCED, train=TrainCost(token_s=0.0, optimizer_s=0.5)), max_staleness=0
    ).end_s
    assert log.end_s < 0.85 * (generation_alone + log.trainer_busy_s)


def test_the_less_the_trainer_waits_for_the_sooner_a_synchronous_run_ends():
    serial, mini_batch, stream = (
        run(max_staleness=0, release=release, mini_batch_groups=8).end_s
        for release in ("batch", "mini_batch", "stream")
    )
    assert stream < mini_batch < 0.97 * serial


def test_an_enlarged_rollout_batch_lies_between_synchronous_and_one_step_asynchronous():
    enlarged = run(max_staleness=1, rollout_batches=2, update=UpdateMode.BARRIER).end_s
    assert run(max_staleness=1, update=UpdateMode.BARRIER).end_s < enlarged < run(max_staleness=0).end_s


def test_staggered_loading_keeps_the_others_generating_when_loads_are_slow():
    core = msgspec.structs.replace(CORE, num_batches=12, max_staleness=3)
    slow = replace(BALANCED, transfer_s=8.0)
    ends = {
        update: simulate(
            Scenario(core=msgspec.structs.replace(core, update=update), costs=slow, workers=4, capacity=8)
        ).end_s
        for update in UpdateMode
    }
    assert ends[UpdateMode.STAGGERED] < 0.95 * ends[UpdateMode.BARRIER]
    assert ends[UpdateMode.IN_FLIGHT] < ends[UpdateMode.STAGGERED]


def test_longest_first_shortens_a_synchronous_batch():
    """Few slots, and predictions that are right, or that have the order reversed."""

    class Reversed(LengthModel):
        def prompt(self, index: int) -> PromptRef:
            prompt = LengthModel.prompt(self, index)
            return msgspec.structs.replace(prompt, predicted_tokens=1.0 / prompt.predicted_tokens)

    right, reversed_order = (kind(median_tokens=100, prompt_sigma=1.0) for kind in (LengthModel, Reversed))
    core = msgspec.structs.replace(CORE, max_staleness=0, group_size=1, groups_per_batch=64, num_batches=1)
    longest = simulate(Scenario(core=core, workers=2, capacity=8, lengths=right))
    shortest = simulate(Scenario(core=core, workers=2, capacity=8, lengths=reversed_order))
    assert longest.end_s < 0.85 * shortest.end_s


def chaos(seed: int) -> Scenario:
    """Workers and trainer die every 15-20 virtual seconds, rows vanish, rollouts fail, events repeat."""
    core = CoreSettings(
        num_batches=6,
        groups_per_batch=8,
        group_size=4,
        max_staleness=seed % 3,
        update=list(UpdateMode)[seed % 3],
        mini_batches=1 + seed % 2,
        epochs=1 + seed // 2 % 2,
        record_logprobs=seed % 4 == 3,
        drop_no_signal=seed % 5 == 0,
        checkpoint_every=1 + seed % 3,
        max_attempts=6,
        rollout_timeout_s=60.0,
    )
    faults = FaultModel(
        worker_loss_s=15.0,
        trainer_loss_s=20.0,
        row_loss=0.02,
        rollout_failure=0.05,
        repeat=0.1,
        until_s=150.0,
        seed=seed,
    )
    return Scenario(core=core, faults=faults, dp_size=1 + seed % 2, max_s=5000.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_run_with_random_faults_ends_with_every_row_trained_once(seed):
    scenario = chaos(seed)
    log = simulate(scenario)
    assert log.finish_reason == "all batches are trained"
    assert events_of(log, WorkerLost)
    assert len(events_of(log, TrainerReady)) > 1
    closes = {close.batch: close for close in commands_of(log, CloseMiniBatch) if close.finishes_batch}
    for batch in range(scenario.core.num_batches):
        rows = log.trained[batch]
        assert len(set(rows)) == len(rows), "a row is trained twice in the surviving lineage"
        assert len(trained_groups(log, batch)) == scenario.core.groups_per_batch - closes[batch].short_by
        assert len(rows) == len(trained_groups(log, batch)) * scenario.core.group_size
    ended = [outcome.group_id for outcome in commands_of(log, SlotOutcome)]
    assert len(set(ended)) == len(ended), "a slot ended twice"


def test_the_faults_of_the_chaos_runs_do_strike():
    logs = [simulate(chaos(seed)) for seed in range(4)]
    assert sum(len(events_of(log, RowsMissing)) for log in logs) > 0
    assert sum(len(commands_of(log, AbortRollouts)) for log in logs) > 0


def test_a_run_that_cannot_end_is_named():
    """No worker ever serves weights: loading takes longer than the simulation lasts."""
    scenario = Scenario(core=CORE, costs=replace(BALANCED, transfer_s=1e9), max_s=100.0)
    with pytest.raises(SimulationStalledError, match="batch 1: 16 pending"):
        simulate(scenario)


LOG_DIGEST = """
import hashlib
from tests.sim.test_modes import chaos
from orchestrator.sim.simulate import simulate
from transport.contracts.messages import encode
print(hashlib.sha256(encode(simulate(chaos(7)).history)).hexdigest())
"""


def test_the_same_seed_gives_a_byte_identical_log_under_any_hash_seed():
    digests = {
        subprocess.run(
            [sys.executable, "-c", LOG_DIGEST],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            check=True,
            capture_output=True,
            timeout=150,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_recorded_journal_replays_to_the_same_commands(tmp_path):
    log = simulate(chaos(3))
    journal, _ = Journal.open(tmp_path)
    journal.snapshot(log.initial, 0)
    records = [record for record, _ in log.history]
    journal.append(records[: len(records) // 2])
    journal.close()
    journal.append(records[len(records) // 2 :])
    journal.close()
    replayed = list(recorded_commands(tmp_path))
    assert [commands for _, commands in replayed] == [commands for _, commands in log.history]
    assert digest(replayed) == digest(log.history)
    assert digest(replayed[:-1]) != digest(log.history)


def test_a_journal_without_a_beginning_cannot_be_replayed(tmp_path):
    Journal.open(tmp_path)
    with pytest.raises(JournalError, match="no snapshot"):
        list(recorded_commands(tmp_path))


def test_the_strawman_starts_no_batch_before_every_worker_has_ended_the_one_before():
    """StreamRL fig. 5(c): all take the weights together, which costs what each at its own boundary saves."""
    together, each = (
        run(lengths=LengthModel(sample_sigma=0.8), release="batch", update=update)
        for update in (UpdateMode.TOGETHER, UpdateMode.BARRIER)
    )
    assert together.oldest_age <= 1
    assert started_early(together) == 0 < started_early(each)
    assert together.end_s > each.end_s


def started_early(log: SimulationLog) -> int:
    """Groups that were dispatched while some of an earlier batch still ran; the first two batches have one version."""
    missing, early = Counter[str](), 0
    for record, commands in log.history:
        if isinstance(record.event, RolloutFinished):
            missing[parse_row_id(record.event.row_id)[0]] -= 1
        for command in commands:
            if isinstance(command, DispatchGroups):
                group_id = command.plans[0].group_id
                earlier = any(count and batch_of(running) < batch_of(group_id) for running, count in missing.items())
                early += earlier and batch_of(group_id) > 1
                missing[group_id] += len(command.plans[0].samples)
    return early
