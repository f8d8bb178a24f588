"""One contract over both row stores, each over every broker: the broker's hashes, and storage units beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.stored_rows import BOTH, GROUP, admit, ids_block, ids_of, new_unit, response, x_ids_of
from transport.broker import keys
from transport.broker.base import ZERO_ID, Ack, Append, Block, Broker, Commit, Entry, RowWrite, Withdrawal
from transport.contracts.types import Column, TaskSpec, group_id, row_id
from transport.errors import MessageError
from transport.rows.columns import RowStore, decode_array, encode_array, encode_value, encode_values
from transport.rows.unit_rows import UnitRows
from transport.rows.units import StorageUnit


@pytest.fixture(params=["broker", "units"])
async def rows(request: pytest.FixtureRequest, broker: Broker, units: list[StorageUnit]) -> AsyncIterator[RowStore]:
    if request.param == "broker":
        yield RowStore(broker)
        return
    store = UnitRows(broker, [new_unit(units), new_unit(units)])
    yield store
    store.close()


async def test_what_was_committed_is_read(rows: RowStore) -> None:
    await rows.commit(admit(GROUP))
    first, second = row_id(GROUP, 0), row_id(GROUP, 1)
    result = await rows.commit(Commit(rows=[response(first, [1, 2, 3]), response(second, [4])]))
    assert result.inserted == (True, True)
    read = await rows.read_rows([second, first, row_id(GROUP, 9)], BOTH)
    assert [sorted(columns) for columns in read] == [sorted(BOTH), sorted(BOTH), []]
    assert await ids_of(rows, first) == [1, 2, 3]
    assert await ids_of(rows, second) == [4]
    (group,) = await rows.read_groups([GROUP], [Column.PROMPT_IDS])
    assert decode_array(Column.PROMPT_IDS, group[Column.PROMPT_IDS]).tolist() == [7, 8]


async def test_the_first_insert_wins_and_is_told_once(rows: RowStore, broker: Broker) -> None:
    await rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    first = await rows.commit(Commit(rows=[response(row, [1], told="first")]))
    second = await rows.commit(Commit(rows=[response(row, [2], told="second")]))
    assert (first.inserted, second.inserted) == ((True,), (False,))
    assert await ids_of(rows, row) == [1]
    assert [entry.entry.fields["told"] for entry in await broker.read(keys.EVENTS, ZERO_ID, count=9)] == ["first"]


async def test_nothing_bad_is_stored(rows: RowStore, broker: Broker) -> None:
    await rows.commit(admit(GROUP))
    bad = RowWrite(
        row_id=row_id(GROUP, 0),
        columns={
            Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, [1, 2]),
            Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [np.nan, 0.0]),
        },
    )
    with pytest.raises(MessageError, match="0/0/0"):
        await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [1]), bad]))
    assert await rows.read_rows([row_id(GROUP, 0), row_id(GROUP, 1)], BOTH) == [{}, {}]


async def test_a_dropped_group_is_gone_and_takes_no_late_rows(rows: RowStore, units: list[StorageUnit]) -> None:
    kept = group_id(0, 1)
    await rows.commit(admit(GROUP, kept))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1, 2]), response(row_id(kept, 0), [3])]))
    assert await rows.drop_groups([GROUP]) >= 8 + 8 + 4 + 4
    late = await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [5, 6])]))
    assert late.inserted == (False,)
    assert await ids_of(rows, row_id(GROUP, 0)) is None
    assert await ids_of(rows, row_id(kept, 0)) == [3]
    await rows.drop_groups([kept])
    assert [unit.retained_bytes for unit in units] == [0] * len(units)


async def test_complete_inputs_start_a_task_wherever_the_bytes_are(rows: RowStore, broker: Broker) -> None:
    await broker.declare_tasks([TaskSpec(name="reward", unit="sample", reads=frozenset({Column.RESPONSE_IDS}))])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [1])]))
    (notice,) = await broker.claim(keys.tasks("reward"), "score-0.1", count=9)
    assert notice.entry.fields["unit"] == "0/0/1"


async def test_a_withdrawn_row_is_made_again_and_counts_anew(broker: Broker) -> None:
    """With its notices, held or not, and with what was worked out of the group that it was in."""
    rows, (first, second) = RowStore(broker), (row_id(GROUP, 0), row_id(GROUP, 1))
    read, scored = frozenset({Column.RESPONSE_IDS}), frozenset({Column.REWARD})
    await broker.declare_tasks(
        [
            TaskSpec(name="reward", unit="sample", reads=read, writes=scored),
            TaskSpec(name="advantages", unit="group", reads=scored, writes=frozenset({Column.ADVANTAGE})),
        ]
    )
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(first, [1]), response(second, [2])]))
    before = await broker.retained_bytes()
    rewards = await broker.claim(keys.tasks("reward"), "score-0.1", count=9)
    reward = {Column.REWARD: encode_array(Column.REWARD, [1.0])}
    acks = [Ack(queue=delivery.queue, entry_id=delivery.entry_id) for delivery in rewards]
    await rows.commit(Commit(rows=[RowWrite(row_id=row, columns=reward) for row in (first, second)], acks=acks[:1]))
    (late,) = await broker.claim(keys.tasks("advantages"), "score-0.1", count=9)
    advantage = {Column.ADVANTAGE: encode_array(Column.ADVANTAGE, [0.5])}
    await rows.commit(Commit(rows=[RowWrite(row_id=second, columns=advantage)]))

    def withdrawal(ids: list[int]) -> Withdrawal:
        gone = Append(stream=keys.EVENTS, entry=Entry(fields={"gone": "0/0/0"}))
        value = encode_array(Column.RESPONSE_IDS, ids)
        return Withdrawal(row_id=first, column=Column.RESPONSE_IDS, value=value, on_withdrawn=(gone,))

    assert await broker.withdraw_rows([withdrawal([9])]) == [False], "another value is there"
    assert await broker.withdraw_rows([withdrawal([1]), withdrawal([1])]) == [True, False]
    assert await broker.length(keys.EVENTS) == 1
    assert await rows.read_rows([first, second], [Column.RESPONSE_IDS, Column.ADVANTAGE]) == [
        {},
        {Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, [2])},
    ]
    late_write = RowWrite(row_id=first, columns=advantage)
    held = Ack(queue=late.queue, entry_id=late.entry_id)
    assert (await rows.commit(Commit(rows=[late_write], acks=[held], if_held=True))).inserted == (False,)

    assert (await rows.commit(Commit(rows=[response(first, [1])]))).inserted == (True,)
    (again,) = await broker.claim(keys.tasks("reward"), "score-0.1", count=9)
    assert again.entry.fields["unit"] == first
    await rows.commit(Commit(rows=[RowWrite(row_id=first, columns=reward)]))
    (group,) = await broker.claim(keys.tasks("advantages"), "score-0.1", count=9)
    assert group.entry.fields["unit"] == GROUP
    assert await broker.retained_bytes() == before + 2 * 4
    assert await broker.has_groups([GROUP, group_id(9, 9)]) == [True, False]
    await rows.drop_groups([GROUP])
    assert await broker.retained_bytes() == 0


# --- blocks of new rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 300, 8_000])  # small; over BULKY_BYTES; over SHARED_BYTES
async def test_a_block_is_its_groups_and_rows(
    rows: RowStore, broker: Broker, units: list[StorageUnit], tokens: int
) -> None:
    read = frozenset({Column("x_ids")})
    await broker.add_user_task(TaskSpec(name="x_each", unit="sample", reads=read))
    groups = [group_id(0, slot) for slot in range(10)]
    values = np.arange(20 * tokens, dtype=np.int32).reshape(20, tokens)
    block = ids_block(groups, values)
    result = await rows.commit(Commit(blocks=[block]))
    assert result.inserted == (True,) * 20
    found = await x_ids_of(rows, block.row_ids())
    assert found == values.tolist()
    assert [bytes(row[Column("x_ids")]) for row in await rows.read_rows(block.row_ids(), [Column("x_ids")])] == [
        encode_value(value) for value in values
    ]
    noticed = [delivery.entry.fields["unit"] for delivery in await broker.claim(keys.tasks("x_each"), "me", count=99)]
    assert noticed == block.row_ids()
    await rows.drop_groups(groups)
    assert await broker.retained_bytes() == 0
    assert [unit.retained_bytes for unit in units] == [0] * len(units)


async def test_a_block_overwrites_nothing_and_adds_to_groups_that_are_there(rows: RowStore, broker: Broker) -> None:
    await rows.commit(admit(GROUP))
    first = RowWrite(row_id=row_id(GROUP, 1), columns={Column("x_ids"): encode_value(np.array([7]))})
    await rows.commit(Commit(rows=[first]))
    block = ids_block([GROUP, group_id(0, 1)], np.array([[1], [2], [3], [4]]))
    assert (await rows.commit(Commit(rows=[first], blocks=[block]))).inserted == (False, True, False, True, True)
    assert await x_ids_of(rows, block.row_ids()) == [[1], [7], [3], [4]]
    again = ids_block([group_id(0, 1)], np.array([[5], [6]]))
    assert (await rows.commit(Commit(blocks=[again]))).inserted == (False, False)
    await rows.drop_groups([GROUP, group_id(0, 1)])
    assert await broker.retained_bytes() == 0


@pytest.mark.parametrize("num_groups", [1, 10])  # read row by row, and by one script
async def test_rows_of_a_block_have_what_their_group_shares_beside_columns_of_their_own(
    rows: RowStore, broker: Broker, num_groups: int
) -> None:
    groups = [group_id(0, slot) for slot in range(num_groups)]
    ragged = [np.arange(1 + n % 3) + n for n in range(2 * num_groups)]
    block = ids_block(groups, ragged)
    await rows.commit(Commit(blocks=[block]))
    own = [RowWrite(row_id=row, columns={Column("x_own"): encode_value("own")}) for row in block.row_ids()]
    taken = [replace(write, columns={Column("x_ids"): encode_value("late"), **write.columns}) for write in own]
    assert (await rows.commit(Commit(rows=taken))).inserted == (False,) * len(own)
    await broker.add_user_task(TaskSpec(name="x_both", unit="sample", reads=frozenset(map(Column, ("x_ids", "x_own")))))
    assert (await rows.commit(Commit(rows=own[1:]))).inserted == (True,) * (len(own) - 1)
    outside = row_id(groups[-1], 2)
    found = await rows.read_rows([*block.row_ids(), outside], [Column("x_own"), Column("x_ids"), Column("x_none")])
    assert [row.keys() for row in found] == [{"x_ids"}, *[{"x_ids", "x_own"}] * (len(own) - 1), set()]
    assert await x_ids_of(rows, block.row_ids()) == [value.tolist() for value in ragged]
    noticed = [delivery.entry.fields["unit"] for delivery in await broker.claim(keys.tasks("x_both"), "me", count=99)]
    assert noticed == block.row_ids()[1:]
    await rows.drop_groups(groups)
    assert await broker.retained_bytes() == 0
    assert await rows.read_rows(block.row_ids(), [Column("x_own"), Column("x_ids")]) == [{}] * len(own)


async def test_a_value_that_rows_share_is_that_of_each(rows: RowStore) -> None:
    shared = Block(
        group_ids=[GROUP, group_id(0, 1)], size=2, columns={Column("x_ids"): encode_values(np.eye(2))}, shared=True
    )
    await rows.commit(admit(GROUP))
    assert (await rows.commit(Commit(blocks=[shared]))).inserted == (True,) * 4
    assert await x_ids_of(rows, shared.row_ids()) == [[1, 0], [1, 0], [0, 1], [0, 1]]


async def test_a_block_happens_only_while_its_delivery_is_held(rows: RowStore) -> None:
    lost = Ack(queue="plans:nobody", entry_id="1-1")
    block = ids_block([GROUP], np.array([[1], [2]]))
    result = await rows.commit(Commit(blocks=[block], acks=[lost], if_held=True))
    assert result.inserted == (False, False)
    assert await x_ids_of(rows, block.row_ids()) == [None, None]


async def test_a_block_that_does_not_fit_is_refused_whole(rows: RowStore) -> None:
    good = encode_values(np.zeros((2, 3)))
    for columns, error in (
        ({Column("x_ids"): [(b"\xff", b"abc"), good[0]]}, MessageError),
        ({Column("x_ids"): good[:1]}, ValueError),
        ({Column.RESPONSE_IDS: [(b"abcd",), (b"abcd",)]}, ValueError),
        ({}, ValueError),
    ):
        with pytest.raises(error):
            await rows.commit(Commit(blocks=[Block(group_ids=[GROUP], size=2, columns=columns)]))
    assert await rows.read_rows([row_id(GROUP, 0)], list(Column)) == [{}]
