"""Tasks and columns of users beside a run's own, over every broker: added and removed without touching the run."""

from __future__ import annotations

import pytest

from transport.broker import keys
from transport.broker.base import Broker, Commit, GroupWrite, RowWrite
from transport.contracts.types import Column, TaskSpec, group_id, row_id
from transport.errors import MessageError
from transport.rows.columns import RowStore, encode_value

GROUP = group_id(0, 0)
NOTES = Column("x_notes")
REWARD_TASK = TaskSpec(name="reward", unit="sample", reads=frozenset({Column.RESPONSE_IDS}))
USER_TASK = TaskSpec(name="x_train", unit="sample", reads=frozenset({Column.RESPONSE_IDS, NOTES}))


async def write(broker: Broker, sample: int, *columns: Column) -> None:
    written = {column: encode_value("why") if column == NOTES else bytes(4) for column in columns}
    group = GroupWrite(group_id=GROUP, size=8, columns={})
    row = RowWrite(row_id=row_id(GROUP, sample), columns=written)
    await RowStore(broker).commit(Commit(groups=[group], rows=[row]))


async def noticed(broker: Broker, task: str) -> list[str]:
    return [one.entry.fields["unit"] for one in await broker.claim(keys.tasks(task), "looker", count=99)]


async def test_a_users_task_hears_of_the_runs_rows_and_of_its_own_columns(broker: Broker) -> None:
    await broker.declare_tasks([REWARD_TASK])
    await broker.add_user_task(USER_TASK)
    await write(broker, 0, Column.RESPONSE_IDS)
    assert await noticed(broker, "x_train") == []
    await write(broker, 0, NOTES)
    assert await noticed(broker, "x_train") == ["0/0/0"]
    assert await noticed(broker, "reward") == ["0/0/0"]
    (row,) = await broker.read_rows([row_id(GROUP, 0)], [NOTES, Column.RESPONSE_IDS])
    assert row == {NOTES: encode_value("why"), Column.RESPONSE_IDS: bytes(4)}


async def test_it_outlives_the_runs_declaring_its_own_again(broker: Broker) -> None:
    await broker.add_user_task(USER_TASK)
    await broker.add_user_task(USER_TASK)
    await broker.declare_tasks([REWARD_TASK])
    await broker.declare_tasks([])
    await write(broker, 3, Column.RESPONSE_IDS, NOTES)
    assert await noticed(broker, "x_train") == ["0/0/3"]
    assert await noticed(broker, "reward") == []


async def test_a_removed_task_leaves_nothing_behind(broker: Broker) -> None:
    await broker.declare_tasks([REWARD_TASK])
    await broker.add_user_task(USER_TASK)
    await write(broker, 0, Column.RESPONSE_IDS, NOTES)
    await broker.remove_user_task("x_train")
    await broker.remove_user_task("x_train")
    await write(broker, 1, Column.RESPONSE_IDS, NOTES)
    assert "tasks:x_train" not in await broker.streams()
    assert await noticed(broker, "reward") == ["0/0/0", "0/0/1"]


async def test_nobody_declares_under_a_name_of_the_other(broker: Broker) -> None:
    of_run = TaskSpec(name="reward", unit="sample", reads=frozenset({NOTES}))
    with pytest.raises(ValueError, match="'reward' is not a user's"):
        await broker.add_user_task(of_run)
    with pytest.raises(ValueError, match="'reward' is not a user's"):
        await broker.remove_user_task("reward")
    with pytest.raises(ValueError, match="'x_train' is a user's"):
        await broker.declare_tasks([USER_TASK])


async def test_a_users_column_that_is_no_value_is_not_stored(broker: Broker) -> None:
    group = GroupWrite(group_id=GROUP, size=1, columns={})
    bad = RowWrite(row_id=row_id(GROUP, 0), columns={NOTES: b"\x93not a value"})
    with pytest.raises(MessageError, match="x_notes"):
        await RowStore(broker).commit(Commit(groups=[group], rows=[bad]))
    assert await broker.read_rows([row_id(GROUP, 0)], [NOTES]) == [{}]
