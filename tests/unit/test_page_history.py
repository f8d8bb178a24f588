"""What the live page draws of the past stays bounded, and says what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from orchestrator.config.starts import GpuUse
from orchestrator.observability.http import status as status_module
from orchestrator.observability.http.status import (
    BATCHES,
    CELLS,
    MAX_EVENTS,
    MAX_LANES,
    MAX_LOST,
    MAX_POINTS,
    UNSETTLED,
    Curves,
    LaneHistory,
    RecentEvents,
    StatusBoard,
    recent_bubbles,
    reported_gpus,
)
from tests.fakes.manual_clock import ManualClock
from transport.contracts.messages import (
    RolloutFinished,
    RoundDone,
    StepDone,
    Tick,
    TrainerReady,
    WorkerJoined,
    WorkerLost,
    WorkerStatus,
)
from transport.contracts.types import FinishReason, RowId, WeightIdentity, WorkerId, WorkerKind


def curves_of(lines: Iterable[Mapping[str, Any]]) -> Curves:
    curves = Curves()
    for line in lines:
        curves.add(line)
    return curves


def status(worker: str, doing: str, *, elapsed_s: float = 0.0, busy_s: float = 0.0) -> dict[WorkerId, WorkerStatus]:
    worker_id = WorkerId(worker)
    return {
        worker_id: WorkerStatus(
            worker_id=worker_id,
            kind=WorkerKind(worker.partition("-")[0]),
            host="here",
            pid=1,
            protocol=1,
            doing=doing,
            elapsed_s=elapsed_s,
            busy_s=busy_s,
        )
    }


def lane(history: LaneHistory, place: str) -> dict[str, str]:
    return next(lane for lane in history.as_dict()["lanes"] if lane["place"] == place)


def doings(history: LaneHistory, place: str, last: int) -> list[str]:
    states = history.as_dict()["states"]
    return ["" if letter == " " else states[ord(letter) - ord("a")] for letter in lane(history, place)["doing"][-last:]]


def test_a_cell_has_the_last_state_in_it_and_the_share_that_was_computed():
    history = LaneHistory()
    history.note(status("generate-0.1", "waiting"), 0.0)
    history.note(status("generate-0.1", "decoding", elapsed_s=1.0, busy_s=0.5), 1.0)
    history.note(status("generate-0.1", "decoding", elapsed_s=2.0, busy_s=1.5), 2.4)
    history.note(status("generate-0.1", "loading", elapsed_s=2.0, busy_s=1.5), 2.9)
    assert doings(history, "generate-0", 3) == ["waiting", "decoding", "loading"]
    assert lane(history, "generate-0")["busy"][-3:] == "049"


def test_seconds_that_nobody_looked_at_are_empty():
    history = LaneHistory()
    history.note(status("score-0.1", "scoring"), 0.0)
    history.note(status("score-0.1", "waiting"), 3.0)
    assert doings(history, "score-0", 4) == ["scoring", "", "", "waiting"]
    history.note({}, 10_000.0)
    assert history.as_dict()["lanes"] == [], "nobody was there for as long as a lane is"


def test_a_replaced_process_goes_on_in_its_predecessors_lane():
    history = LaneHistory()
    history.note(status("train-0.9", "training", elapsed_s=9.0, busy_s=8.0), 0.0)
    both = status("train-0.10", "starting", elapsed_s=0.1) | status("train-0.9", "training", elapsed_s=9.0)
    history.note(both, 1.0)
    assert doings(history, "train-0", 2) == ["training", "starting"]
    assert lane(history, "train-0")["busy"][-1] == "0", "the shares of two processes are not mixed"


def test_lanes_are_bounded_and_in_the_order_of_their_numbers():
    history = LaneHistory()
    statuses = {}
    for index in range(MAX_LANES + 5):
        statuses |= status(f"generate-{index}.1", "decoding")
    for second in range(3 * CELLS):
        history.note(statuses if second % CELLS < 2 else {}, float(second))
    history.note(statuses, 3.0 * CELLS)
    answer = history.as_dict()
    assert [lane["place"] for lane in answer["lanes"]] == [f"generate-{index}" for index in range(MAX_LANES)]
    assert answer["lanes_left_out"] == 5
    assert all(len(lane["doing"]) == len(lane["busy"]) == CELLS for lane in answer["lanes"])


def test_more_states_than_letters_share_the_last():
    history = LaneHistory()
    for number in range(40):
        history.note(status("generate-0.1", f"state {number}"), float(number))
    assert lane(history, "generate-0")["doing"][-1] == "z"
    assert len(history.as_dict()["states"]) == 26


def test_a_long_runs_curve_is_thinned_and_reaches_from_its_first_batch_to_its_last():
    curves = Curves()
    for batch in range(5000):
        curves.add({"batch": batch, "reward": batch / 5000})
        if batch % 97 == 0:
            assert len(curves.as_dict()["batch"]) <= MAX_POINTS + 1
    batches = curves.as_dict()["batch"]
    assert batches[0] == 0
    assert batches[-1] == 4999
    assert batches == sorted(batches)
    assert len(batches) > MAX_POINTS / 2


def test_a_batch_that_is_trained_again_takes_back_what_came_after_it():
    curves = curves_of({"batch": batch, "incarnation": 1, "reward": 0.0} for batch in range(5))
    curves.add({"batch": 3, "incarnation": 2, "reward": 1.0})
    assert curves.as_dict()["batch"] == [0, 1, 2, 3]
    assert curves.as_dict()["reward"] == [0.0, 0.0, 0.0, 1.0]


def test_the_late_line_of_an_earlier_batch_is_left_out():
    curves = curves_of({"batch": batch, "incarnation": 1} for batch in (0, 2, 1))
    assert curves.as_dict()["batch"] == [0, 2]


def test_a_number_that_a_batch_lacks_is_a_gap_and_so_is_one_that_is_none():
    curves = curves_of(
        [{"batch": 0, "loss": float("nan"), "name": "text"}, {"batch": 1, "loss": 0.123456789, "kl": 2.0}]
    )
    assert curves.as_dict() == {"batch": [0, 1], "kl": [None, 2.0], "loss": [None, 0.12346]}


def test_workers_that_were_lost_are_counted_and_the_newest_named():
    board = StatusBoard(ManualClock())
    asked_to_go = WorkerLost(worker_id=WorkerId("generate-9.1"), reason="drained", left=True)
    for number in range(MAX_LOST + 2):
        board.observe(WorkerLost(worker_id=WorkerId(f"generate-{number}.1"), reason="its process ended"), float(number))
        board.observe(asked_to_go, float(number))
    assert board.num_lost == MAX_LOST + 2
    assert [lost["at_s"] for lost in board.lost] == [float(number) for number in range(2, MAX_LOST + 2)]
    assert board.lost[-1] == {"worker": "generate-9.1", "reason": "its process ended", "at_s": 9.0}


# --- bubbles ----------------------------------------------------------------------------------------------------------

W0 = WorkerId("generate-0.1")
TRAINER = WorkerId("train-0.1")


async def test_a_run_that_stops_answers_until_a_slow_page_has_heard_why(monkeypatch: pytest.MonkeyPatch):
    clock = ManualClock()
    board = StatusBoard(clock)
    await board.last_words("nobody asks")  # and nobody is waited for
    monkeypatch.setattr(status_module, "LAST_WORDS_S", 0.0)
    board.answer()
    for heard in (True, False):
        clock.advance(1.0)
        ending = asyncio.create_task(board.last_words("by Ctrl-C"))
        for _ in range(10):  # turns of the loop, in which it looks whether somebody asked
            await asyncio.sleep(0)
        assert not ending.done()
        clock.advance(3.0 if heard else 5.0)
        if heard:
            assert board.answer()["stopped"] == "by Ctrl-C"
        async with asyncio.timeout(10):
            await ending


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


def test_the_causes_of_the_last_whole_batches_are_named():
    answer = recent_bubbles(serial_run(30).records())
    assert answer["batches"] == [30 - UNSETTLED - BATCHES, 30 - UNSETTLED - 1]
    generation, trainer = answer["stages"]["generation"], answer["stages"]["trainer"]
    assert generation["computing"] == pytest.approx(6.0 * BATCHES)
    assert generation["pipeline"] == pytest.approx(4.0 * BATCHES)
    assert trainer["computing"] == pytest.approx(4.0 * BATCHES)
    assert trainer["pipeline"] == pytest.approx(6.0 * BATCHES)


def test_before_a_batch_is_settled_there_is_nothing():
    for batches in range(UNSETTLED + 2):
        assert recent_bubbles(serial_run(batches).records()) == {}
    assert recent_bubbles(serial_run(UNSETTLED + 2).records())["batches"] == [1, 1]


def test_what_is_kept_is_bounded_and_workers_that_are_there_stay():
    records = serial_run(3 * MAX_EVENTS).records()
    assert len(records) <= MAX_EVENTS + 3
    assert records[0].event == WorkerJoined(worker_id=W0, kind=WorkerKind.GENERATE, capacity=1)
    assert recent_bubbles(records)["stages"]["generation"]["computing"] == pytest.approx(6.0 * BATCHES)


def test_gpus_of_workers_that_the_run_did_not_place_are_those_that_their_leases_name():
    def lease(worker: str, host: str, *gpus: str) -> dict[WorkerId, WorkerStatus]:
        return {WorkerId(worker): msgspec.structs.replace(status(worker, "x")[WorkerId(worker)], host=host, gpus=gpus)}

    placed = [GpuUse(number=0, name="H100", workers=["train-0"])]
    leases = lease("train-0.2", "here", "GPU-a H100") | lease("generate-10.1", "there", "GPU-b H100", "GPU-c H100")
    leases |= lease("generate-9.1", "there", "GPU-b H100") | lease("score-0.1", "there")
    row = {"number": None, "memory_mib": None, "share": None, "held": False, "name": "H100 on there"}
    assert reported_gpus(placed, leases) == [
        row | {"workers": ["generate-9", "generate-10"]},
        row | {"workers": ["generate-10"]},
    ]
    assert reported_gpus([], leases)[0] == row | {"name": "H100 on here", "workers": ["train-0"]}
