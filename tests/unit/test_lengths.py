"""Forced output lengths: which row gets which."""

from __future__ import annotations

from transport.contracts.types import evaluation_id, group_id
from transport.contracts.user_files import ForcedLengths


def test_rows_take_the_lengths_in_their_own_order_in_a_circle():
    lengths = ForcedLengths([1, 2, 3, 4, 5, 6, 7], groups_per_batch=2, group_size=2)
    order = [lengths.limits(group_id(batch, slot), (0, 1)) for batch in (0, 1) for slot in (0, 1)]
    assert order == [(1, 2), (3, 4), (5, 6), (7, 1)]
    assert lengths.limits(group_id(0, 1), (1,)) == (4,), "what is generated again has the length it had"


def test_every_evaluation_takes_the_same_lengths():
    lengths = ForcedLengths([1, 2, 3, 4, 5, 6, 7], groups_per_batch=2, group_size=2)
    assert [lengths.limits(evaluation_id(number, 2), (0,)) for number in (0, 5)] == [(5,), (5,)]
