"""One line a trained batch, once; idle shares from the leases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from orchestrator.observability.http.status import UsageWindow
from orchestrator.observability.metrics import (
    MetricsLog,
    grouped,
    quantiles,
    read_file,
    read_metrics,
    reward_components,
    set_numbers,
    sets_of,
)
from orchestrator.observability.report.pages import parts_of
from transport.contracts.messages import (
    Command,
    EvaluationOutcome,
    Event,
    GroupRows,
    GroupScored,
    HeldOutAnswer,
    JournalRecord,
    RolloutFinished,
    RunResumed,
    SlotOutcome,
    StepDone,
    TrainRound,
    WeightsLoaded,
    WorkerStatus,
)
from transport.contracts.settings import EvalSet, EvalSettings
from transport.contracts.types import (
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


def scored(group: str, rewards: tuple[float, ...], tokens: int = 4) -> GroupScored:
    return GroupScored(
        group_id=GroupId(group),
        rewards=rewards,
        response_tokens=(tokens,) * len(rewards),
        signal=len(set(rewards)) > 1,
        components={"right": rewards[0]},
    )


def step(batch: int, epoch: int = 1, rows: int = 2, tokens: int = 8) -> StepDone:
    weights = WeightIdentity(epoch=epoch, version=batch + 1)
    return StepDone(batch=batch, weights=weights, num_rows=rows, num_tokens=tokens, metrics={"loss": 0.5})


def ended(row: str, engine_s: float = 1.0, *, tokens: int = 4, version: int = 0, cut: bool = False) -> RolloutFinished:
    weights = WeightIdentity(epoch=1, version=version)
    return RolloutFinished(
        row_id=RowId(row),
        worker_id=WorkerId("generate-0.1"),
        response_tokens=tokens,
        finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        oldest=weights,
        newest=weights,
        engine_s=engine_s,
    )


def training(batch: int, *groups: str, pass_index: int = 0) -> TrainRound:
    rows = tuple(GroupRows(group_id=GroupId(group), samples=(0, 1), num_tokens=10) for group in groups)
    return TrainRound(round_id=f"{batch}.{pass_index}", batch=batch, ranks=(rows,), pass_index=pass_index)


def outcome(group: str, how: Literal["trained", "filtered", "stale", "dead"]) -> SlotOutcome:
    return SlotOutcome(group_id=GroupId(group), prompt_id=PromptId("p"), outcome=how)


def line_of(log: MetricsLog, *events: Event, commands: Sequence[Command] = (), now_s: float = 2.0) -> dict[str, Any]:
    """What the last of ``events`` makes the log write; the commands come with the one before it."""
    *before, last = events
    for event in before:
        log.observe(event, commands if event is before[-1] else (), now_s - 1)
    line = log.observe(last, (), now_s)
    assert line is not None
    return line


def test_a_batch_is_summed_up_when_its_step_is_done(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.observe(ended("0/0/0"), [], 1.0)
    log.observe(ended("0/0/1", cut=True), [], 1.0)
    log.observe(scored("0/0", (1.0, 0.0)), [training(0, "0/0")], 1.5)
    line = log.observe(step(0), [outcome("0/0", "trained")], 2.0)
    assert line is not None
    assert (line["reward"], line["reward_std"], line["no_signal"]) == (0.5, 0.5, 0.0)
    assert line["right"] == 1.0
    assert (line["groups_trained"], line["truncated"], line["staleness"]) == (1, 0.5, 0)
    assert (line["samples_trained"], line["tokens_trained"]) == (2, 8)
    assert (line["samples_generated"], line["tokens_generated"]) == (2, 8)
    assert (line["samples_per_s"], line["tokens_per_s"]) == (1.0, 4.0)
    assert (line["response_tokens"], line["response_tokens_p50"], line["response_tokens_max"]) == (4, 4, 4)
    assert line["loss"] == 0.5
    assert read_metrics(tmp_path / "metrics.jsonl") == [line]


def test_tokens_of_an_environment_are_of_the_response_and_were_not_generated(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    rows = [msgspec.structs.replace(ended(f"0/0/{sample}"), environment_tokens=3) for sample in (0, 1)]
    score = msgspec.structs.replace(scored("0/0", (1.0, 0.0)), environment_tokens=6)
    line = line_of(log, *rows, score, step(0, tokens=2), commands=[training(0, "0/0")])
    assert (line["tokens_generated"], line["tokens_trained"]) == (2, 2)
    assert (line["response_tokens"], line["environment_share"]) == (4, 0.75)


def test_a_row_that_is_generated_again_is_trained_once_and_counts_as_it_was_last(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    first = [ended("0/0/0", cut=True), ended("0/0/1", cut=True), scored("0/0", (0.0, 0.0), tokens=9)]
    again = [ended("0/0/0", tokens=5), ended("0/0/1", tokens=5), scored("0/0", (1.0, 0.0), tokens=5)]
    line = line_of(log, *first, *again, step(0, tokens=10), commands=[training(0, "0/0")])
    assert (line["samples_generated"], line["tokens_generated"]) == (4, 18)
    assert (line["samples_trained"], line["tokens_trained"]) == (2, 10)
    assert (line["reward"], line["response_tokens_max"], line["truncated"]) == (0.5, 5, 0.0)


def test_a_group_counts_for_the_batch_that_trains_it_not_for_the_one_that_admitted_it(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    late, pulled = scored("0/0", (0.0, 0.0), tokens=90), scored("2/0", (1.0, 1.0), tokens=3)
    first = line_of(log, ended("2/0/0"), pulled, step(0), commands=[training(0, "2/0")])
    assert (first["reward"], first["response_tokens"], first["no_signal"]) == (1.0, 3, 1.0)
    line_of(log, late, step(1))
    last = line_of(log, ended("0/0/0"), late, step(2), commands=[training(2, "0/0")])
    assert (last["reward"], last["response_tokens_max"], last["staleness"]) == (0.0, 90, 2)


def test_groups_that_were_filtered_are_told_apart_from_those_that_were_trained(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.observe(scored("0/1", (1.0, 1.0)), [outcome("0/1", "filtered")], 0.5)
    line = line_of(log, scored("0/0", (1.0, 0.0)), step(0), commands=[training(0, "0/0"), outcome("0/2", "stale")])
    assert (line["reward"], line["reward_with_filtered"], line["no_signal"]) == (0.5, 0.75, 0.5)
    assert (line["groups_trained"], line["groups_filtered"], line["groups_stale"]) == (1, 1, 1)
    line = line_of(log, scored("1/0", (1.0, 0.0)), step(1), commands=[training(1, "1/0")])
    assert "reward_with_filtered" not in line, "they belong to the line of the batch beside which they ended"


def test_with_two_passes_a_sample_is_trained_once_and_its_rows_are_in_two_steps(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", passes=2)
    rounds = [training(0, "0/0"), training(0, "0/0", pass_index=1)]
    line = line_of(log, scored("0/0", (1.0, 0.0)), step(0, rows=4, tokens=16), commands=rounds)
    assert (line["samples_trained"], line["tokens_trained"], line["groups_trained"]) == (2, 8, 1)
    assert (line["rows_in_steps"], line["tokens_in_steps"]) == (4, 16)
    assert line["samples_per_s"] == 1.0


def test_a_number_that_is_not_finite_is_left_out(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    metrics = {"loss": float("nan"), "grad_norm": float("inf"), "skipped_nonfinite": 1.0}
    log.observe(msgspec.structs.replace(step(0), metrics=metrics), [], 1.0)
    assert "loss" not in log.last_line
    assert log.last_line["skipped_nonfinite"] == 1.0
    assert b"NaN" not in (tmp_path / "metrics.jsonl").read_bytes()


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
    assert not log._groups


def test_a_group_told_twice_counts_once(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    score = scored("0/0", (1.0, 0.0))
    line = line_of(log, score, score, step(0), commands=[training(0, "0/0")])
    assert (line["reward"], line["groups_trained"]) == (0.5, 1)


def test_a_line_is_written_once_also_after_a_restart(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsLog(path).observe(step(0), [], 1.0) is not None
    assert MetricsLog(path).observe(step(0), [], 1.0) is None
    assert MetricsLog(path).observe(step(0, epoch=2), [], 1.0) is not None
    assert [(line["incarnation"], line["batch"]) for line in read_metrics(path)] == [(1, 0), (2, 0)]


def test_steps_that_are_reported_again_add_only_what_is_missing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for batch, now_s in [(0, 1.0), (2, 3.0)]:  # the report of 1 is lost
        log.observe(step(batch), [], now_s)
    newest = log.last_line
    for batch in (0, 1, 2):
        log.observe(step(batch), [], 9.0)
    assert [line["batch"] for line in read_metrics(path)] == [0, 2, 1]
    assert log.last_line == newest, "the newest batch stays the newest"
    again = MetricsLog(path)
    assert [again.observe(step(batch), [], 9.5) for batch in (0, 1, 2)] == [None] * 3


WHOLE = b'{"batch": 0, "incarnation": 1}\n'


@pytest.mark.parametrize("tail", [b'{"batch": 1, "inc', b'{"batch": 1, "incarnation": 1}', b"\0\0\0", b"{", b""])
def test_a_line_after_a_torn_one_is_whole(tmp_path: Path, tail: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + tail)
    whole = [0, 1] if tail.endswith(b"}") else [0]
    assert [line["batch"] for line in read_metrics(path)] == whole
    MetricsLog(path).observe(step(7), [], 1.0)
    assert [line["batch"] for line in read_metrics(path)] == [*whole, 7]
    assert read_file(path).damaged == []


DAMAGED = [b'{"batch": 1, "inc', b"\xff\xfe", b"17", b"{}", b"[" * 100_000, b'{"batch": "x"}', b""]


@pytest.mark.parametrize("bad", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_costs_no_other_and_is_named(tmp_path: Path, bad: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + bad + b"\n" + WHOLE.replace(b"0", b"2"))
    file = read_file(path)
    assert [line["batch"] for line in file.lines] == [0, 2]
    assert file.damaged == [2]
    assert file.say() == "metrics.jsonl: 1 damaged, skipped: line 2"
    MetricsLog(path).observe(step(7), [], 1.0)
    assert [line["batch"] for line in read_metrics(path)] == [0, 2, 7]


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
    before = [ended("1/0/0"), scored("1/0", (1.0, 0.0)), step(0), ended("1/1/0", tokens=3), scored("1/1", (0.0, 0.0))]
    log = MetricsLog(path)
    records = [JournalRecord(seq=seq, now_s=float(seq), event=event) for seq, event in enumerate(before, start=1)]
    log.recall(records, [training(1, "1/0", "1/1")])
    line = log.observe(step(1, rows=4), [], 5.0)
    assert line is not None
    assert (line["reward"], line["groups_trained"], line["seconds"]) == (0.25, 2, 2.0)
    assert (line["samples_generated"], line["tokens_generated"]) == (1, 3)
    assert [line["batch"] for line in read_metrics(path)] == [0, 1]


def test_a_step_that_was_told_again_before_a_restart_begins_no_batch(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for batch in (0, 1):
        MetricsLog(path).observe(step(batch), [], 1.0)
    before = [step(0), step(1), ended("2/0/0"), step(0), step(1)]
    log = MetricsLog(path)
    log.recall(JournalRecord(seq=seq, now_s=float(seq), event=event) for seq, event in enumerate(before, start=1))
    line = log.observe(step(2), [], 6.0)
    assert line is not None
    assert (line["seconds"], line["samples_generated"]) == (4.0, 1)


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
    batch = log.observe(step(0), [training(0, "0/0")], 2.0)
    line, _ = read_file(path).lines
    assert (line["eval"], line["version"], line["time_s"]) == (0, 0, 1.5)
    assert (line["eval_reward"], line["eval_right"]) == (0.5, 0.25)
    assert line["eval_share"] == 0.25
    assert (line["eval_tokens"], line["eval_seconds"], line["eval_short"]) == (16, 2.0, "")
    assert batch is not None
    assert (batch["reward"], batch["samples_generated"]) == (0.0, 1)
    assert [one["batch"] for one in read_metrics(path)] == [0]


def test_an_evaluation_is_written_once_over_restarts_and_has_no_means_without_answers(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).observe(step(0), [evaluated(0)], 1.0)
    log = MetricsLog(path)
    log.observe(step(1), [evaluated(0), evaluated(1, answered=0)], 2.0)
    lines = [line for line in read_file(path).lines if "eval" in line]
    assert [line["eval"] for line in lines] == [0, 1]
    assert "eval_reward" not in lines[1]


def answered(problem: str, right: float, name: str = "hard") -> HeldOutAnswer:
    return HeldOutAnswer(
        eval_set=name, prompt_id=PromptId(problem), reward=right / 2, components={"right": right}, response_tokens=4
    )


def test_sets_are_told_apart_and_a_problem_that_lacks_samples_is_in_no_pass_rate(tmp_path: Path):
    rights = {"a": (1.0, 0.0, 0.0, 0.0), "b": (0.0, 0.0, 0.0, 0.0), "c": (1.0, 1.0)}
    answers = [answered(name, right) for name, each in rights.items() for right in each]
    outcome = msgspec.structs.replace(evaluated(0), answers=(*answers, answered("a", 1.0, name="plain")))
    sets = {"plain": EvalSet(), "hard": EvalSet(samples=4), "unanswered": EvalSet()}
    log = MetricsLog(tmp_path / "metrics.jsonl", held_out=EvalSettings(sets=sets))
    log.observe(step(0), [outcome], 1.0)
    line = next(line for line in read_file(tmp_path / "metrics.jsonl").lines if "eval" in line)
    told = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
    assert told == pytest.approx(
        {
            "plain/reward": 0.5,
            "plain/right": 1.0,
            "plain/response_tokens": 4,
            "plain/problems": 1,
            "plain/answered": 1,
            "hard/reward": 0.15,
            "hard/right": 0.3,
            "hard/pass@1": 1 / 8,
            "hard/pass@2": 1 / 4,
            "hard/pass@4": 1 / 2,
            "hard/response_tokens": 4,
            "hard/problems": 3,
            "hard/answered": 10,
        }
    )
    assert list(sets_of([line])) == ["plain", "hard"]
    assert grouped("eval/hard/pass@4") == "eval/hard/pass@4"


def test_an_answer_passes_by_its_reward_where_it_has_no_such_component():
    assert set_numbers([answered("a", 2.0), answered("a", 0.0)], 2, "solved")["pass@1"] == 0.5


def test_quantiles_are_lengths_that_occur():
    assert quantiles(range(1, 11)) == {"response_tokens_p50": 5, "response_tokens_p90": 9}
    assert quantiles([7]) == {"response_tokens_p50": 7, "response_tokens_p90": 7}


def test_parts_of_the_data_are_told_each_by_itself_with_what_was_filtered(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")

    def of_part(group: str, rewards: tuple[float, ...], part: str) -> GroupScored:
        return msgspec.structs.replace(scored(group, rewards), part=part)

    log.observe(of_part("0/1", (1.0, 1.0), "easy"), [outcome("0/1", "filtered")], 0.5)
    log.observe(of_part("0/0", (1.0, 0.0), "easy"), [training(0, "0/0")], 1.0)
    log.observe(of_part("0/2", (0.0, 0.5), "hard"), [training(0, "0/2")], 1.1)
    log.observe(step(0), [], 2.0)
    line = log.last_line
    assert (line["mix/easy/reward"], line["mix/easy/groups"]) == (0.75, 2)
    assert (line["mix/hard/reward"], line["mix/hard/groups"]) == (0.25, 1)
    assert grouped("mix/easy/right") == "mix/easy/right"
    assert "mix/easy/reward" not in reward_components(line)


def test_a_report_draws_each_number_of_the_parts_together() -> None:
    lines = [
        {"mix/easy/reward": 1.0, "mix/easy/right": 1.0, "mix/easy/groups": 2, "reward": 0.7},
        {"mix/a/b/reward": 0.5, "mix/easy/reward": 1.0},
    ]
    assert parts_of(lines) == {"reward": ["easy", "a/b"], "right": ["easy"]}
    assert parts_of([{"reward": 1.0}]) == {}
