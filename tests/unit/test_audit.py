"""The audit must pass a clean history and name each way in which one can be wrong."""

from __future__ import annotations

from orchestrator.audit import CheckpointRecord, RoundsLog, audit
from transport.messages import CloseMiniBatch, GroupRows, TrainerCommand, TrainRound
from transport.types import GroupId, RowId, evaluation_id

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
