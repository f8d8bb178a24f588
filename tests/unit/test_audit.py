"""The audit must pass a clean history and name each way in which one can be wrong."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.cli.audit import (
    CheckpointRecord,
    RoundsLog,
    audit,
    check_critic,
    check_metrics,
    check_steps,
    closed_batches,
    up_to,
)
from transport.contracts.messages import CloseMiniBatch, GroupRows, StepDone, TrainerCommand, TrainRound
from transport.contracts.types import GroupId, RowId, WeightIdentity, evaluation_id

GROUP_SIZE = 2


def train_round(batch: int, slot: int) -> TrainRound:
    rows = GroupRows(group_id=GroupId(f"{batch}/{slot}"), samples=tuple(range(GROUP_SIZE)), num_tokens=10)
    return TrainRound(round_id=f"{batch}-{slot}", batch=batch, ranks=((rows,),))


def history(batches: int = 3, slots: int = 2) -> list[tuple[str, TrainerCommand]]:
    """Entries of a clean run: each batch sends its slots and closes."""
    commands: list[TrainerCommand] = []
    for batch in range(batches):
        commands += [train_round(batch, slot) for slot in range(slots)]
        commands.append(CloseMiniBatch(batch=batch, num_rows=slots * GROUP_SIZE, num_tokens=99))
    return [(f"{index + 1}-0", command) for index, command in enumerate(commands)]


def ledger(version: int, slots: int = 2) -> CheckpointRecord:
    rows = {
        (batch, 0): [RowId(f"{batch}/{slot}/{sample}") for slot in range(slots) for sample in range(GROUP_SIZE)]
        for batch in range(version)
    }
    return CheckpointRecord(version=version, cursor=f"{version * (slots + 1)}-0", rows=rows)


def problems(commanded: RoundsLog, held: RoundsLog, checkpoint: CheckpointRecord | None, version: int = 3) -> str:
    return "\n".join(audit(commanded, held, checkpoint, trained_version=version, passes=1).problems)


def test_a_clean_run_has_no_problems_and_counts_its_rows():
    report = audit(history(), history(), ledger(2), trained_version=3, passes=1)
    assert report.problems == ()
    assert (report.batches, report.rows) == (3, 12)


def test_a_trimmed_log_is_completed_from_the_journal():
    assert problems(history(), history()[4:], ledger(2)) == ""


def test_the_critics_ledger_is_compared_too():
    assert check_critic(history(), ledger(3), passes=1, finished=3) == []
    assert check_critic(history(), ledger(1), passes=1, finished=None) == [], "it may be behind"
    (behind,) = check_critic(history(), ledger(2), passes=1, finished=3)
    assert "contains 2 batches, and the run is finished with 3" in behind
    (none,) = check_critic(history(), None, passes=1, finished=3)
    assert "there is no checkpoint" in none
    assert check_critic(history(), None, passes=1, finished=None) == []
    rows = {**ledger(3).rows, (1, 0): [*ledger(3).rows[1, 0][1:], RowId("1/9/0")]}
    lost, extra = check_critic(history(), replace(ledger(3), rows=rows), passes=1, finished=3)
    assert lost == "the critic: batch 1, pass 0: sent and not trained: 1/0/0"
    assert extra == "the critic: batch 1, pass 0: trained and never sent: 1/9/0"
    (changed,) = check_critic(history(), replace(ledger(3), changed=["model.safetensors"]), passes=1, finished=3)
    assert "model.safetensors is not the one" in changed


def test_a_row_sent_twice_is_found():
    log = history()
    log[1] = ("2-0", train_round(0, 0))
    assert "sent twice: 0/0/0, 0/0/1" in problems(log, log, None)


def test_a_duplicated_entry_in_the_broker_is_foreign_to_the_journal():
    held = [*history(), ("10-0", train_round(2, 1))]
    assert "10-0 was never commanded" in problems(history(), held, ledger(2))


def test_an_entry_removed_from_the_broker_is_found():
    held = [entry for entry in history() if entry[0] != "5-0"]
    found = problems(history(), held, ledger(2))
    assert "5-0 was removed" in found
    assert "closed with 4 rows" in found


def test_a_changed_entry_is_found():
    held = history()
    held[4] = ("5-0", train_round(1, 7))
    assert "5-0 is not what was commanded" in problems(history(), held, None)


def test_a_row_missing_from_the_checkpoint_is_found():
    checkpoint = ledger(2)
    rows = {**checkpoint.rows, (1, 0): checkpoint.rows[1, 0][:-1]}
    broken = CheckpointRecord(version=2, cursor=checkpoint.cursor, rows=rows)
    assert "batch 1, pass 0: sent and not trained: 1/1/1" in problems(history(), history(), broken)


def test_a_row_twice_in_the_checkpoint_is_found():
    checkpoint = ledger(2)
    rows = {**checkpoint.rows, (0, 0): [*checkpoint.rows[0, 0], RowId("0/0/0")]}
    broken = CheckpointRecord(version=2, cursor=checkpoint.cursor, rows=rows)
    assert "trained twice by the checkpoint: 0/0/0" in problems(history(), history(), broken)


def test_a_checkpoint_ahead_of_its_version_is_found():
    checkpoint = CheckpointRecord(version=1, cursor="3-0", rows=ledger(2).rows)
    assert "version 1 contains rows of batch 1" in problems(history(), history(), checkpoint)


def test_a_trained_batch_that_was_never_closed_is_found():
    log = history()[:-1]
    assert "batch 2 was trained and is closed 0 times" in problems(log, log, ledger(2))


def test_rows_gone_from_the_broker_are_named_a_few_at_a_time():
    missing = [RowId(f"2/0/{sample}") for sample in range(7)]
    report = audit(history(), history(), None, trained_version=3, passes=1, missing=missing)
    assert report.problems == ("not in the broker, and in no checkpoint: 2/0/0, 2/0/1, 2/0/2, 2/0/3, 2/0/4 and 2 more",)


def test_a_row_of_an_evaluation_in_a_round_is_found():
    log = history()
    rows = GroupRows(group_id=evaluation_id(3, 7), samples=(0,), num_tokens=10)
    log[0] = ("1-0", TrainRound(round_id="0-0", batch=0, ranks=((rows,),)))
    assert "of an evaluation, and sent to the trainer: eval3/7/0" in problems(log, log, None)


def step(batch: int, *, epoch: int = 1, digest: str = "") -> StepDone:
    weights = WeightIdentity(epoch=epoch, version=batch + 1, digest=digest or f"of {batch + 1}")
    return StepDone(batch=batch, weights=weights, num_rows=4, num_tokens=9)


def sealed(version: int, *, digest: str = "", changed: tuple[str, ...] = ()) -> CheckpointRecord:
    weights = WeightIdentity(epoch=1, version=version, digest=digest or f"of {version}")
    return CheckpointRecord(
        version=version, cursor="9-0", rows={}, name=f"step-{version}", weights=weights, changed=changed
    )


def line(batch: int, **changes: int) -> dict[str, int]:
    return {"batch": batch, "version": batch + 1, "incarnation": 1, "rows_in_steps": 4, **changes}


STEPS = [step(batch) for batch in range(3)]


def test_a_checkpoint_that_the_steps_led_to_is_right():
    assert check_steps(STEPS, sealed(3), finished=True) == []


def test_weights_that_were_never_published_are_found():
    (problem,) = check_steps(STEPS, sealed(3, digest="another"), finished=False)
    assert problem == "step-3: its weights are e1v3:another, the trainer published e1v3:of 3"


def test_a_step_that_nobody_told_is_found_once_the_run_is_finished():
    assert check_steps(STEPS[:-1], sealed(3), finished=False) == [], "its report may be on the way"
    (problem,) = check_steps(STEPS[:-1], sealed(3), finished=True)
    assert problem == "batch 2 is in step-3, and the journal has no step that trained it"


def test_a_trainer_that_went_further_and_was_lost_leaves_nothing_to_find():
    steps = [*STEPS, step(3), step(3, epoch=2), step(4, epoch=2)]
    record = replace(sealed(5), weights=WeightIdentity(epoch=2, version=5, digest="of 5"))
    assert check_steps(steps, record, finished=True) == []


def test_every_step_has_its_line():
    assert check_metrics(STEPS, [line(0), line(1), line(2)], damaged=()) == []
    assert check_metrics(STEPS, [line(0), line(2, rows_in_steps=5)], damaged=[2]) == [
        "metrics.jsonl: line 2 is damaged",
        "metrics.jsonl: no line of batch 1 of the trainer's incarnation 1",
        "metrics.jsonl: the line of batch 2 of the trainer's incarnation 1 differs from its report",
    ]


def test_a_run_that_goes_on_is_compared_up_to_the_cut():
    log = up_to(history(), "7-0")
    assert closed_batches(log) == 2
    report = audit(log, log, ledger(2), trained_version=2, passes=1, live=True)
    assert (report.problems, report.batches, report.live) == ((), 2, True)
