"""Parts of the client that need no broker: dealing by tokens, sizes of commits, tensors without padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Commit, GroupWrite, RowWrite
from transport.contracts.types import Column, RunName, TaskSpec, evaluation_id, group_id, row_id
from transport.rows.columns import RowStore
from workers.client.batch import Ragged, to_field
from workers.client.consumption import TaskLeases, balance
from workers.client.tasks import TaskOptions
from workers.client.writer import BLOCK_ROWS, COMMIT_ROWS, Writer, pieces

COMMIT_BYTES = RowStore.commit_bytes


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_parts_hold_every_place_once_and_differ_by_no_more_than_one_row(weights: list[int], parts: int) -> None:
    dealt = balance(weights, parts)
    assert len(dealt) == parts
    assert sorted(place for part in dealt for place in part) == list(range(len(weights)))
    sums = [sum(weights[place] for place in part) for part in dealt]
    assert max(sums) - min(sums) <= max(weights, default=0)
    assert all(part == sorted(part) for part in dealt)


def test_rows_without_tokens_are_dealt_evenly_too() -> None:
    assert [len(part) for part in balance([0] * 9, 3)] == [3, 3, 3]


def writer() -> Writer:
    return Writer(RowStore(MemoryBroker(MemoryServer(ManualClock()), RunName("r"))), "me.1")


def test_further_columns_are_cut_into_commits_of_bounded_size() -> None:
    index = [row_id(group_id(0, 0), sample) for sample in range(COMMIT_ROWS + 1)]
    large = writer().further_columns({"x_ids": [np.zeros(COMMIT_BYTES // 10, np.int32)] * 6}, index[:6])
    assert [len(piece.rows) for piece in pieces(Commit(rows=large), COMMIT_BYTES)] == [2, 2, 2]
    small = writer().further_columns({"x_ids": [1] * len(index)}, index)
    cut = pieces(Commit(rows=small), COMMIT_BYTES)
    assert [len(piece.rows) for piece in cut] == [COMMIT_ROWS, 1]
    assert [row for piece in cut for row in piece.rows] == small


def test_a_block_is_cut_between_groups_only() -> None:
    few_large = writer().new_rows({"x_ids": [np.zeros(COMMIT_BYTES // 10, np.int32)] * 9}, 3)
    cut = [block for piece in pieces(Commit(blocks=[few_large]), COMMIT_BYTES) for block in piece.blocks]
    assert [piece.group_ids for piece in cut] == [["client-me.1/0"], ["client-me.1/1"], ["client-me.1/2"]]
    many_small = writer().new_rows({"x_ids": [1] * (BLOCK_ROWS + 2), "x_note": ["a"] * (BLOCK_ROWS + 2)}, 2)
    cut = [block for piece in pieces(Commit(blocks=[many_small]), COMMIT_BYTES) for block in piece.blocks]
    assert [len(piece.group_ids) for piece in cut] == [BLOCK_ROWS // 2, 1]
    assert [row for piece in cut for row in piece.row_ids()] == many_small.row_ids()
    assert [value for piece in cut for value in piece.values()] == list(many_small.values())


async def test_nothing_to_put_is_no_commit() -> None:
    empty = Commit(blocks=[writer().new_rows({"x_ids": []}, 4)])
    assert pieces(empty, COMMIT_BYTES) == []
    await writer().write(empty)


def test_rows_that_make_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="7 rows make no whole groups of 3"):
        writer().new_rows({"x_ids": [1] * 7}, 3)


def test_fields_are_tensors_without_padding() -> None:
    ragged = to_field([np.array([[1, 2], [3, 4]]), np.zeros((0, 2), np.int64), np.array([[5, 6]])])
    assert isinstance(ragged, Ragged)
    assert ragged.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [row.tolist() for row in ragged.split()] == [[[1, 2], [3, 4]], [], [[5, 6]]]
    assert ragged.padded(-1).tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]], [[5, 6], [-1, -1]]]
    scalars = to_field([np.array(1.5), np.array(2.5)])
    assert isinstance(scalars, torch.Tensor)
    assert scalars.tolist() == [1.5, 2.5]
    assert to_field(["a", "b"]) == ["a", "b"]
    empty = to_field([])
    assert isinstance(empty, Ragged)
    assert (len(empty), empty.split(), empty.padded().shape) == (0, [], (0, 0))
    with pytest.raises(ValueError, match="types"):
        to_field([np.zeros(1, np.int32), np.zeros(1, np.float32)])


async def test_answers_to_held_out_problems_are_handed_to_no_consumer() -> None:
    clock = ManualClock()
    broker = MemoryBroker(MemoryServer(clock), RunName("r"))
    await broker.add_user_task(TaskSpec(name="x_train", unit="sample", reads=frozenset({Column.RESPONSE_IDS})))
    ids = {Column.RESPONSE_IDS: b"\1\0\0\0"}
    for group in (evaluation_id(0, 0), group_id(0, 0), evaluation_id(0, 1)):
        rows = [RowWrite(row_id=row_id(group, 0), columns=ids)]
        await broker.commit(Commit(groups=[GroupWrite(group_id=group, size=1, columns={})], rows=rows))
    leases = TaskLeases(broker, "x_train", "me", TaskOptions(), clock)
    assert not await leases.fill(3, 0.0)
    assert [delivery.entry.fields["unit"] for delivery in leases.take(3)] == ["0/0/0"]
    assert await broker.length(keys.tasks("x_train")) == 1, "the others are acknowledged, not left for another consumer"
