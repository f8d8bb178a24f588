"""The ledger: a row is trained once for each pass, and the file says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.contracts.ledger import FILE_NAME, Ledger, Seal, checkpoint_dirs, newest_checkpoint
from transport.contracts.types import RowId, WeightIdentity, evaluation_id, row_id
from transport.errors import MessageError

ROWS = [RowId(row) for row in ("3/0/0", "3/0/7", "3/12/1", "4/0/0")]


def test_a_known_row_is_refused_in_its_pass_only() -> None:
    ledger = Ledger(version=0, cursor="0-0")
    assert ledger.add(0, ROWS) == ()
    assert ledger.add(0, [ROWS[1], RowId("3/0/1")]) == (ROWS[1],)
    assert ledger.add(1, ROWS) == ()
    assert ledger.rows()[3, 0] == [RowId("3/0/0"), RowId("3/0/1"), *ROWS[1:3]]


def test_a_row_named_twice_in_one_call_is_refused_the_second_time() -> None:
    assert Ledger(version=0, cursor="0-0").add(0, [ROWS[0], ROWS[0]]) == (ROWS[0],)


def test_a_row_of_an_evaluation_has_no_place_in_it() -> None:
    with pytest.raises(ValueError, match="eval3"):
        Ledger(version=0, cursor="0-0").add(0, [row_id(evaluation_id(3, 0), 0)])


def test_rows_come_back_from_the_file_in_order() -> None:
    ledger = Ledger(version=5, cursor="17-2")
    ledger.add(0, reversed(ROWS))
    again = Ledger.from_bytes(ledger.to_bytes())
    assert (again.version, again.cursor) == (5, "17-2")
    assert again.rows() == {(3, 0): ROWS[:3], (4, 0): ROWS[3:]}


def test_a_thousand_groups_take_a_few_bytes_each() -> None:
    ledger = Ledger(version=0, cursor="0-0")
    ledger.add(0, [RowId(f"{batch}/{slot}/{i}") for batch in range(125) for slot in range(8) for i in range(8)])
    assert len(ledger.to_bytes()) < 6 * 1000


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", b"\x83\xa7version"])
def test_anything_else_is_no_ledger(raw: bytes) -> None:
    with pytest.raises(MessageError):
        Ledger.from_bytes(raw)


def test_the_newest_readable_checkpoint_is_read(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for version in (2, 10, 9):
        (tmp_path / f"step-{version}").mkdir()
        (tmp_path / f"step-{version}" / FILE_NAME).write_bytes(Ledger(version=version, cursor="0-0").to_bytes())
    (tmp_path / "step-11.partial").mkdir()
    (tmp_path / "step-12").mkdir()  # damaged: no file
    (tmp_path / "step-10" / FILE_NAME).write_bytes(b"\xc1")
    (tmp_path / "step-9.1").mkdir()  # the same version, saved again
    assert [path.name for path in checkpoint_dirs(tmp_path)] == ["step-12", "step-10", "step-9.1", "step-9", "step-2"]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].version == 9


def test_a_ledger_knows_the_weights_that_it_was_written_beside() -> None:
    seal = Seal(weights=WeightIdentity(epoch=2, version=5, digest="abc"), files={"model.safetensors": "crc32:1"})
    assert Ledger.from_bytes(Ledger(version=5, cursor="0-0").to_bytes(seal)).seal == seal
    assert Ledger.from_bytes(Ledger(version=5, cursor="0-0").to_bytes()).seal is None
