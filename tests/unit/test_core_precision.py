"""fp8 is used until the trainer disagrees with what engines say: who is told, since when, and what ends it or not."""

from __future__ import annotations

import math

import pytest

from orchestrator.core.model.precision import METRIC, Precision, PrecisionSettings
from orchestrator.core.model.settings import CoreSettings, core_settings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import LoadWeights, StepDone
from transport.contracts.settings import GenerationSettings, Settings
from transport.contracts.types import UpdateMode, WeightIdentity, WorkerId

LIMIT = 0.05
FP8 = PrecisionSettings(limit=LIMIT, batches=2, held="keys and values")


def since_after(*mismatches: float | None, batches: int = 2) -> int:
    precision, settings = Precision(), PrecisionSettings(limit=LIMIT, batches=batches, held="keys and values")
    for version, mismatch in enumerate(mismatches, start=1):
        precision.observe(settings, version, mismatch)
    return precision.since


@pytest.mark.parametrize(
    ("mismatches", "since"),
    [
        ((0.01, LIMIT, 0.02), 0),
        ((0.06, 0.01, 0.06), 0),  # not in a row
        ((0.06, 0.06), 2),
        ((0.06, None, 0.06), 3),  # a batch without a row says nothing
        ((0.01, 0.06, math.nan), 3),
        ((math.inf, math.inf), 2),
        ((0.06, 0.06, 0.0, 0.0), 2),  # no way back
    ],
)
def test_only_so_many_batches_in_a_row_beyond_the_limit_end_it(mismatches: tuple[float | None, ...], since: int):
    assert since_after(*mismatches) == since


def test_a_single_batch_may_be_enough():
    assert since_after(0.01, 0.06, batches=1) == 2


def test_the_reason_says_how_much_of_what_and_since_when():
    precision = Precision()
    for version in (4, 5):
        precision.observe(
            PrecisionSettings(limit=LIMIT, batches=2, held="keys and values and weights"), version, 0.0712
        )
    assert "differ by 0.071 on average" in precision.reason
    assert "generation.fp8_mismatch_limit 0.05 in 2 batches in a row" in precision.reason
    assert "keys and values and weights are no longer held in fp8 from version 5 on" in precision.reason


def core(*, fp8: PrecisionSettings | None = FP8) -> CoreSettings:
    return CoreSettings(
        num_batches=6, groups_per_batch=2, group_size=2, max_staleness=1, update=UpdateMode.IN_FLIGHT, fp8=fp8
    )


class Run(PipelineWorld):
    """Batches are trained with these mismatches, one after another. loads: all that workers were told."""

    def __init__(self, settings: CoreSettings, prompts: int = 1000) -> None:
        self.loads: list[LoadWeights] = []
        super().__init__(settings, prompts)

    def _check_load(self, command: LoadWeights) -> None:
        super()._check_load(command)
        self.loads.append(command)

    def train_with(self, *mismatches: float) -> Run:
        for mismatch in mismatches:
            version, self.metrics = self.trainer.version + 1, {METRIC: mismatch}
            for _ in range(200):
                self.turn()
                if self.trainer.version == version:
                    break
            else:
                raise AssertionError(self.state.describe_wait())
        return self


def run_of(settings: CoreSettings, *mismatches: float) -> Run:
    return Run.ready(settings, workers=2).train_with(*mismatches)


def test_every_worker_is_told_with_the_next_version_and_those_that_come_later_with_their_first():
    run = run_of(core(), 0.01, 0.2)
    assert not any(load.full_precision for load in run.loads)
    run.train_with(0.2)
    told = [load for load in run.loads if load.full_precision]
    assert {load.worker_id for load in told} == {WorkerId("generate-0.1"), WorkerId("generate-1.1")}
    assert {load.weights.version for load in told} == {3}
    newcomer = run.join()
    (first,) = [load for load in run.loads if load.worker_id == newcomer]
    assert first.full_precision == run.state.view().full_precision != ""


def test_where_nothing_is_in_fp8_no_mismatch_matters():
    run = run_of(core(fp8=None), 9.0, 9.0, 9.0)
    assert not any(load.full_precision for load in run.loads)
    assert run.state.view().full_precision == ""


def test_a_report_that_comes_twice_counts_once():
    run = run_of(core(), 0.2)
    state = run.state
    again = StepDone(
        batch=0, weights=WeightIdentity(epoch=1, version=1), num_rows=1, num_tokens=1, metrics={METRIC: 0.2}
    )
    state.handle(again, state.now_s)
    assert state.pipeline.precision.over == 1


def test_a_resumed_run_stays_without_it_until_its_settings_change():
    state = run_of(core(), 0.2, 0.2).state
    assert state.view().full_precision
    same = PipelineState.restore(state.snapshot(), settings=core())
    assert same.view().full_precision == state.view().full_precision
    more = PrecisionSettings(limit=0.3, batches=2, held="keys and values")
    changed = PipelineState.restore(state.snapshot(), settings=core(fp8=more))
    assert (changed.view().full_precision, changed.pipeline.precision.over) == ("", 0)


def test_settings_reach_the_core():
    generation = GenerationSettings(
        engine="sglang", kv_dtype="fp8", weights_dtype="fp8", fp8_mismatch_limit=0.2, fp8_mismatch_batches=4
    )
    assert core_settings(Settings(generation=generation)).fp8 == PrecisionSettings(
        limit=0.2, batches=4, held="keys and values and weights"
    )
    assert core_settings(Settings()).fp8 is None
