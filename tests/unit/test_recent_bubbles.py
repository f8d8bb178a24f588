"""The idle seconds of the last batches, from events that are still in memory."""

from __future__ import annotations

import pytest

from orchestrator.observability.history import MAX_EVENTS, RecentEvents
from orchestrator.observability.report.recent_bubbles import BATCHES, UNSETTLED, recent_bubbles
from transport.contracts.messages import RolloutFinished, RoundDone, StepDone, Tick, TrainerReady, WorkerJoined
from transport.contracts.types import FinishReason, RowId, WeightIdentity, WorkerId, WorkerKind

W0 = WorkerId("generate-0.1")
TRAINER = WorkerId("train-0.1")


def weights(version: int) -> WeightIdentity:
    return WeightIdentity(epoch=1, version=version)


def serial_run(batches: int) -> RecentEvents:
    """Each batch takes 10 s: 6 s of generation by the only slot, then 4 s of training."""
    recent = RecentEvents()
    recent.add(WorkerJoined(worker_id=W0, kind=WorkerKind.GENERATE, capacity=1), 0.0)
    recent.add(WorkerJoined(worker_id=TRAINER, kind=WorkerKind.TRAIN), 0.0)
    recent.add(TrainerReady(worker_id=TRAINER, weights=weights(0)), 0.0)
    for batch in range(batches):
        start_s = 10.0 * batch
        finished = RolloutFinished(
            row_id=RowId(f"{batch}/0/0"),
            worker_id=W0,
            response_tokens=4,
            finish_reason=FinishReason.STOP,
            oldest=weights(batch),
            newest=weights(batch),
            engine_s=6.0,
        )
        recent.add(finished, start_s + 6.0)
        recent.add(Tick(), start_s + 7.0)
        recent.add(RoundDone(round_id=f"{batch}.0", num_rows=1, num_tokens=4, busy_s=4.0), start_s + 10.0)
        recent.add(StepDone(batch=batch, weights=weights(batch + 1), num_rows=1, num_tokens=4), start_s + 10.0)
    return recent


def test_the_causes_of_the_last_whole_batches_are_told():
    answer = recent_bubbles(serial_run(30).records())
    assert answer["batches"] == [30 - UNSETTLED - BATCHES, 30 - UNSETTLED - 1]
    generation, trainer = answer["stages"]["generation"], answer["stages"]["trainer"]
    assert generation["computing"] == pytest.approx(6.0 * BATCHES)
    assert generation["pipeline"] == pytest.approx(4.0 * BATCHES)
    assert trainer["computing"] == pytest.approx(4.0 * BATCHES)
    assert trainer["pipeline"] == pytest.approx(6.0 * BATCHES)


def test_before_a_batch_is_settled_nothing_is_told():
    for batches in range(UNSETTLED + 2):
        assert recent_bubbles(serial_run(batches).records()) == {}
    assert recent_bubbles(serial_run(UNSETTLED + 2).records())["batches"] == [1, 1]


def test_what_is_kept_is_bounded_and_those_who_are_there_are_not_forgotten():
    records = serial_run(3 * MAX_EVENTS).records()
    assert len(records) <= MAX_EVENTS + 3
    assert records[0].event == WorkerJoined(worker_id=W0, kind=WorkerKind.GENERATE, capacity=1)
    assert recent_bubbles(records)["stages"]["generation"]["computing"] == pytest.approx(6.0 * BATCHES)
