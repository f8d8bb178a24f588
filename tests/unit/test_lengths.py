"""Forced output lengths: the file, and which row gets which."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.types import evaluation_id, group_id
from workers.errors import LengthsError
from workers.generation.lengths import ForcedLengths, read_lengths


def test_rows_take_the_lengths_in_their_own_order_in_a_circle():
    lengths = ForcedLengths([1, 2, 3, 4, 5, 6, 7], groups_per_batch=2, group_size=2)
    order = [lengths.limits(group_id(batch, slot), (0, 1)) for batch in (0, 1) for slot in (0, 1)]
    assert order == [(1, 2), (3, 4), (5, 6), (7, 1)]
    assert lengths.limits(group_id(0, 1), (1,)) == (4,), "what is generated again has the length it had"


def test_every_evaluation_takes_the_same_lengths():
    lengths = ForcedLengths([1, 2, 3, 4, 5, 6, 7], groups_per_batch=2, group_size=2)
    assert [lengths.limits(evaluation_id(number, 2), (0,)) for number in (0, 5)] == [(5,), (5,)]


def test_a_file_is_numbers_and_comments(tmp_path: Path):
    path = tmp_path / "lengths.txt"
    path.write_text("# tokens\n12\n\n 7 # short\n900\n")
    assert read_lengths(path, max_tokens=100) == [12, 7, 100]


@pytest.mark.parametrize(
    ("text", "said"), [("3\nmany\n", ":2: 'many'"), ("0\n", ":1: '0'"), ("# none\n", "no lengths")]
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, said: str):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(LengthsError, match=said):
        read_lengths(path, max_tokens=100)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(LengthsError, match=r"missing\.txt"):
        read_lengths(tmp_path / "missing.txt", max_tokens=100)
