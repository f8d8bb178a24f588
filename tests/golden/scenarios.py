"""Simulated runs whose decisions are held by a digest: every pipeline, every dispatch, and what may go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from orchestrator.core.dispatch.compute import PLANNERS
from orchestrator.core.model.settings import LEAST_LOADED, PULLED, CoreSettings, ScalingSettings
from orchestrator.sim.costs import TrainCost
from orchestrator.sim.engine import CostModel, FaultModel, Scenario
from orchestrator.sim.lengths import LengthModel, long_tailed
from orchestrator.sim.scenarios import PIPELINES, Layout, Workload, scenario
from transport.contracts.types import UpdateMode

BATCHES = 4
WORKLOAD = Workload(lengths=long_tailed(24 * BATCHES, seed=1, recall=0.87), batch=24, group_size=2)
SPLIT = Layout(generation_gpus=24, training_gpus=32, ranks=2, slots=16, micro_batch_tokens=100_000)
COLOCATED = replace(SPLIT, generation_gpus=32, colocated=True)

CORE = CoreSettings(num_batches=5, groups_per_batch=8, group_size=3, rollout_timeout_s=60.0, max_attempts=6)
SKEWED = LengthModel(median_tokens=150, prompt_sigma=1.0, max_tokens=2000)
COSTS = CostModel(train=TrainCost(round_s=0.05, token_s=0.0006, optimizer_s=0.5), spawn_s=2.0)
FAULTS = FaultModel(
    worker_loss_s=12.0,
    trainer_loss_s=20.0,
    row_loss=0.02,
    rollout_failure=0.05,
    repeat=0.1,
    until_s=120.0,
)


def _paper(pipeline: str, layout: Layout = SPLIT, dispatch: str = "scored") -> Scenario:
    return scenario(WORKLOAD, layout, PIPELINES[pipeline], iterations=BATCHES, dispatch=dispatch, record=True)


def _faulty(seed: int, **core: object) -> Scenario:
    settings = msgspec.structs.replace(CORE, **core)
    faults = replace(FAULTS, seed=seed)
    return Scenario(core=settings, faults=faults, lengths=SKEWED, costs=COSTS, dp_size=1 + seed % 2, max_s=5000.0)


SCENARIOS: Mapping[str, Scenario] = {
    **{f"pipeline {name}": _paper(name) for name in PIPELINES},
    **{f"dispatch {name}": _paper("stream", dispatch=name) for name in (LEAST_LOADED, PULLED, *PLANNERS)},
    "dispatch paced, in flight": _paper("in_flight", dispatch="paced"),
    "colocated": _paper("serial", COLOCATED),
    "faults, synchronous": _faulty(0, max_staleness=0, update=UpdateMode.BARRIER, checkpoint_every=2),
    "faults, several steps": _faulty(1, mini_batches=2, epochs=2, record_logprobs=True, checkpoint_every=1),
    "faults, staleness 2": _faulty(2, max_staleness=2, update=UpdateMode.STAGGERED, drop_no_signal=True),
    "faults, rolling": _faulty(3, max_staleness=2, membership="rolling", oversampled_groups=2),
    "faults, evaluation": _faulty(4, eval_every=1, eval_problems=10, dispatch="even", plan_wait_s=0.5),
    "faults, elastic": _faulty(
        5,
        num_batches=16,
        scaling=ScalingSettings(min_workers=1, max_workers=4),
        migrate_running=True,
        dispatch="scored",
    ),
    "faults, probes": replace(
        _faulty(6, max_staleness=0, update=UpdateMode.BARRIER, groups_per_batch=16, dispatch=PULLED, probes=True),
        costs=replace(COSTS, partial_s=0.5),
    ),
}
