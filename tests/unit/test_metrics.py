"""One line a trained batch, once; idle shares from the leases."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.runtime.metrics import MetricsLog, UsageWindow, read_evaluations, read_metrics
from transport.messages import (
    EvaluationOutcome,
    GroupScored,
    JournalRecord,
    RolloutFinished,
    RunResumed,
    SlotOutcome,
    StepDone,
    WeightsLoaded,
    WorkerStatus,
)
from transport.types import (
    FinishReason,
    GroupId,
    PromptId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
    evaluation_id,
    row_id,
)

W0 = WeightIdentity(epoch=1, version=0)


def scored(group: str, rewards: tuple[float, ...]) -> GroupScored:
    return GroupScored(
        group_id=GroupId(group),
        rewards=rewards,
        response_tokens=(4,) * len(rewards),
        signal=True,
        components={"right": rewards[0]},
    )


def step(batch: int, epoch: int = 1) -> StepDone:
    weights = WeightIdentity(epoch=epoch, version=batch + 1)
    return StepDone(batch=batch, weights=weights, num_rows=2, num_tokens=8, metrics={"loss": 0.5})


def test_a_batch_is_summed_up_when_its_step_is_done(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    finished = RolloutFinished(
        row_id=RowId("0/0/0"),
        worker_id=WorkerId("generate-0.1"),
        response_tokens=4,
        finish_reason=FinishReason.STOP,
        oldest=W0,
        newest=W0,
    )
    log.observe(finished, [], 1.0)
    log.observe(scored("0/0", (1.0, 0.0)), [], 1.5)
    outcome = SlotOutcome(group_id=GroupId("0/0"), prompt_id=PromptId("p"), outcome="trained")
    line = log.observe(step(0), [outcome], 2.0)
    assert line is not None
    assert line["reward"] == 0.5
    assert line["right"] == 1.0
    assert line["groups_trained"] == 1
    assert line["staleness"] == 0
    assert line["samples_per_s"] == 1.0
    assert line["tokens_per_s"] == 4.0
    assert line["loss"] == 0.5
    assert read_metrics(tmp_path / "metrics.jsonl") == [line]


def test_the_first_batch_begins_when_there_are_weights_to_generate_with(tmp_path: Path):
    loaded = WeightsLoaded(worker_id=WorkerId("generate-0.1"), weights=W0, seconds=0.1)
    again = WeightsLoaded(worker_id=WorkerId("generate-1.1"), weights=W0, seconds=0.1)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    lines = [log.observe(event, [], now_s) for event, now_s in ((loaded, 30.0), (again, 31.0), (step(0), 32.0))]
    assert lines[-1] is not None
    assert lines[-1]["seconds"] == 2.0
    late = WeightsLoaded(worker_id=WorkerId("generate-0.2"), weights=W0, seconds=0.1)
    lines = [log.observe(event, [], now_s) for event, now_s in ((RunResumed(), 50.0), (late, 80.0), (step(1), 83.0))]
    assert lines[-1] is not None
    assert lines[-1]["seconds"] == 3.0, "and not the time in which it stood still and started up again"


def test_nothing_is_kept_of_the_samples_of_a_run_that_trains_nothing(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", trains=False)
    for number in range(1, 200):
        log.observe(ended(f"{number}/0/0", 1.0), [], float(number))
    assert not log._open


def test_a_group_told_twice_counts_once(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for _ in range(2):
        log.observe(scored("0/0", (1.0, 1.0)), [], 0.0)
    line = log.observe(step(0), [], 1.0)
    assert line is not None
    assert line["samples"] == 2


def test_a_line_is_written_once_also_after_a_restart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsLog(path).observe(step(0), [], 1.0) is not None
    assert MetricsLog(path).observe(step(0), [], 1.0) is None
    assert MetricsLog(path).observe(step(0, epoch=2), [], 1.0) is not None
    assert [(line["epoch"], line["batch"]) for line in read_metrics(path)] == [(1, 0), (2, 0)]


def test_steps_that_are_told_again_add_only_what_is_missing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for batch, now_s in [(0, 1.0), (2, 3.0)]:  # what was said of 1 is lost
        log.observe(step(batch), [], now_s)
    newest = log.last_line
    for batch in (0, 1, 2):
        log.observe(step(batch), [], 9.0)
    assert [line["batch"] for line in read_metrics(path)] == [0, 2, 1]
    assert log.last_line == newest, "the newest batch stays the newest"
    assert log.curves.as_dict()["batch"] == [0, 2]
    again = MetricsLog(path)
    assert [again.observe(step(batch), [], 9.5) for batch in (0, 1, 2)] == [None] * 3
    assert again.curves.as_dict()["batch"] == [0, 1, 2]


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"batch": 0, "epoch": 1}\n{"batch": 1, "ep', encoding="utf-8")
    assert [line["batch"] for line in read_metrics(path)] == [0]


def test_idle_is_the_share_of_time_that_was_not_busy():
    window = UsageWindow()
    worker = WorkerId("generate-0.1")

    def status(elapsed_s: float, busy_s: float, tokens: float) -> WorkerStatus:
        return WorkerStatus(
            worker_id=worker,
            kind=WorkerKind.GENERATE,
            host="h",
            pid=1,
            protocol=1,
            busy_s=busy_s,
            elapsed_s=elapsed_s,
            counters={"tokens": tokens},
        )

    window.update({worker: status(10.0, 2.0, 100)})
    (row,) = window.update({worker: status(14.0, 5.0, 300)})
    assert row["idle"] == 0.25
    assert row["tokens_per_s"] == pytest.approx(50.0)
    assert window.update({}) == []


def test_an_orchestrator_that_was_started_again_knows_what_the_open_batches_hold(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).observe(step(0), [], 1.0)
    before = [scored("1/0", (1.0, 0.0)), step(0), scored("1/1", (0.0, 0.0))]
    log = MetricsLog(path)
    log.recall(JournalRecord(seq=seq, now_s=float(seq), event=event) for seq, event in enumerate(before, start=1))
    line = log.observe(step(1), [], 4.0)
    assert line is not None
    assert (line["reward"], line["samples"], line["seconds"]) == (0.25, 4, 2.0)
    assert [line["batch"] for line in read_metrics(path)] == [0, 1]


def ended(row: str, engine_s: float) -> RolloutFinished:
    return RolloutFinished(
        row_id=RowId(row),
        worker_id=WorkerId("generate-0.1"),
        response_tokens=4,
        finish_reason=FinishReason.STOP,
        oldest=W0,
        newest=W0,
        engine_s=engine_s,
    )


def evaluated(number: int, answered: int = 4) -> EvaluationOutcome:
    return EvaluationOutcome(
        number=number,
        weights=W0,
        problems=4,
        answered=answered,
        reward=0.5,
        components={"right": 0.25},
        tokens=16,
        seconds=2.0,
    )


def test_an_evaluation_has_a_line_of_its_own_with_its_cost_and_none_of_it_is_a_batchs(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    group = evaluation_id(0, 0)
    log.observe(ended("0/0/0", engine_s=3.0), [], 0.5)
    log.observe(ended(row_id(group, 0), engine_s=1.0), [], 1.0)
    log.observe(scored(group, (1.0,)), [evaluated(0)], 1.5)
    log.observe(scored("0/0", (0.0, 0.0)), [], 1.6)
    batch = log.observe(step(0), [], 2.0)
    (line,) = read_evaluations(path)
    assert (line["eval"], line["version"], line["time_s"]) == (0, 0, 1.5)
    assert (line["eval_reward"], line["eval_right"]) == (0.5, 0.25)
    assert line["eval_share"] == 0.25
    assert (line["eval_tokens"], line["eval_seconds"], line["eval_short"]) == (16, 2.0, "")
    assert batch is not None
    assert (batch["reward"], batch["samples"]) == (0.0, 2)
    assert [one["batch"] for one in read_metrics(path)] == [0]


def test_an_evaluation_is_written_once_over_restarts_and_has_no_means_without_answers(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).observe(step(0), [evaluated(0)], 1.0)
    log = MetricsLog(path)
    log.observe(step(1), [evaluated(0), evaluated(1, answered=0)], 2.0)
    lines = read_evaluations(path)
    assert [line["eval"] for line in lines] == [0, 1]
    assert "eval_reward" not in lines[1]
    assert log.evaluations == lines
