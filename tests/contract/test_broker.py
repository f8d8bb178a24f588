"""The broker's contract (transport/broker/base.py), but for logs and work queues, over every broker there is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.contract.conftest import BrokerHarness
from tests.fakes.broker_entries import IDS, LEASE_S, LOGPROBS, QUEUE, REWARD, entry, group, names, row, told
from tests.fakes.explicit_ids import append_at
from transport.broker import keys
from transport.broker.base import (
    ZERO_ID,
    Ack,
    Append,
    Broker,
    Commit,
    Fence,
    RowWrite,
    StreamWrite,
    parse_entry_id,
)
from transport.contracts.types import Column, GroupId, RowId, RunName, TaskSpec, WorkerId
from transport.errors import FencedError

# -- the atomic step


async def test_columns_come_back_as_written(broker: Broker) -> None:
    columns = {Column.PROMPT_IDS: bytes(range(256)), Column.TASK_ENTRY: b'{"answer": 4}'}
    await broker.commit(Commit(groups=[group("0/0", columns=columns)], rows=[row("0/0/1", response_ids=b"\x01")]))
    assert await broker.read_groups([GroupId("0/0"), GroupId("0/1")], list(columns)) == [columns, {}]
    rows = await broker.read_rows([RowId("0/0/0"), RowId("0/0/1"), RowId("9/9/9")], [IDS, REWARD])
    assert rows == [{}, {IDS: b"\x01"}, {}]
    assert await broker.read_rows([RowId("0/0/1")], []) == [{}]
    assert await broker.read_rows([], [IDS]) == []


async def test_group_is_written_once(broker: Broker) -> None:
    await broker.commit(Commit(groups=[group("0/0", size=2, columns={Column.PROMPT_TEXT: b"first"})]))
    result = await broker.commit(Commit(groups=[group("0/0", size=9, columns={Column.PROMPT_TEXT: b"second"})]))
    assert result.retained_bytes == 5
    assert await broker.read_groups([GroupId("0/0")], [Column.PROMPT_TEXT]) == [{Column.PROMPT_TEXT: b"first"}]


async def test_first_insert_wins_under_concurrency(broker: Broker, harness: BrokerHarness) -> None:
    await broker.commit(Commit(groups=[group("0/0")]))
    writers = [harness.open() for _ in range(8)]
    commits = [
        writer.commit(Commit(rows=[row("0/0/0", told(str(n)), response_ids=bytes([n]) * 10)]))
        for n, writer in enumerate(writers)
    ]
    results = await asyncio.gather(*commits)
    winners = [str(n) for n, result in enumerate(results) if result.inserted == (True,)]
    assert len(winners) == 1
    assert names(await broker.read(keys.EVENTS, ZERO_ID, count=99)) == winners
    assert await broker.read_rows([RowId("0/0/0")], [IDS]) == [{IDS: bytes([int(winners[0])]) * 10}]
    assert await broker.retained_bytes() == 4 + 10


async def test_row_is_refused_whole_when_one_column_is_there(broker: Broker) -> None:
    await broker.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0", response_ids=b"a")]))
    clash = row("0/0/0", told("no"), response_ids=b"b", reward=b"1")
    later = row("0/0/0", told("yes"), reward=b"2")
    assert (await broker.commit(Commit(rows=[clash, later, later]))).inserted == (False, True, False)
    assert await broker.read_rows([RowId("0/0/0")], [IDS, REWARD]) == [{IDS: b"a", REWARD: b"2"}]
    assert names(await broker.read(keys.EVENTS, ZERO_ID, count=9)) == ["yes"]


async def test_row_without_its_group_is_refused(broker: Broker) -> None:
    result = await broker.commit(Commit(rows=[row("0/0/0", told("no"))], appends=[told("in any case")]))
    assert result.inserted == (False,)
    await broker.commit(Commit(groups=[group("0/1", size=2)]))
    assert (await broker.commit(Commit(rows=[row("0/1/1"), row("0/1/2")]))).inserted == (True, False)
    assert names(await broker.read(keys.EVENTS, ZERO_ID, count=9)) == ["in any case"]


async def test_commit_does_everything_in_one_step(broker: Broker) -> None:
    await broker.enqueue(QUEUE, entry("plan"))
    (plan,) = await broker.claim(QUEUE, "c", count=1)
    written = Commit(
        groups=[group("0/0")],
        rows=[row("0/0/0", told("finished"))],
        acks=[Ack(queue=QUEUE, entry_id=plan.entry_id)],
        appends=[told("reported"), Append(stream="metrics", entry=entry("m"))],
    )
    assert (await broker.commit(written)).inserted == (True,)
    assert names(await broker.read(keys.EVENTS, ZERO_ID, count=9)) == ["finished", "reported"]
    assert await broker.pending(QUEUE) == []
    assert await broker.length("metrics") == 1


async def test_a_commit_for_a_delivery_that_is_not_pending_any_more_does_nothing(broker: Broker) -> None:
    await broker.commit(Commit(groups=[group("0/0")]))
    await broker.enqueue(QUEUE, entry("unit"))
    (held,) = await broker.claim(QUEUE, "score-0.1", count=1)
    ack = Ack(queue=QUEUE, entry_id=held.entry_id)
    retained = await broker.retained_bytes()
    for foreign in (Ack(queue=QUEUE, entry_id="1-1"), Ack(queue="plans:nobody", entry_id="1-1")):
        commit = Commit(rows=[row("0/0/0", told("row"))], appends=[told("done")], acks=[ack, foreign], if_held=True)
        result = await broker.commit(commit)
        assert (result.inserted, result.retained_bytes) == ((False,), retained)
    assert await broker.read(keys.EVENTS, ZERO_ID, count=9) == []
    assert await broker.read_rows([RowId("0/0/0")], [IDS]) == [{}]
    assert len(await broker.pending(QUEUE)) == 1
    commit = Commit(rows=[row("0/0/0", told("row"))], acks=[ack], if_held=True)
    assert (await broker.commit(commit)).inserted == (True,)
    assert (await broker.commit(commit)).inserted == (False,)
    assert await broker.pending(QUEUE) == []


async def test_fenced_commit_does_nothing(broker: Broker) -> None:
    old = Fence(role="trainer", epoch=await broker.acquire_epoch("trainer"))
    await broker.enqueue(QUEUE, entry("plan"))
    (plan,) = await broker.claim(QUEUE, "c", count=1)
    await broker.acquire_epoch("trainer")
    ack = Ack(queue=QUEUE, entry_id=plan.entry_id)
    with pytest.raises(FencedError) as caught:
        await broker.commit(
            Commit(fence=old, groups=[group("0/0")], rows=[row("0/0/0")], acks=[ack], appends=[told("x")])
        )
    assert (caught.value.role, caught.value.epoch, caught.value.current_epoch) == ("trainer", 1, 2)
    assert await broker.retained_bytes() == 0
    assert await broker.length(keys.EVENTS) == 0
    assert len(await broker.pending(QUEUE)) == 1


async def test_fences(broker: Broker, harness: BrokerHarness) -> None:
    assert await broker.acquire_epoch("trainer", at_least=4) == 5
    assert await harness.open().acquire_epoch("trainer", at_least=2) == 6
    assert await broker.acquire_epoch("orchestrator") == 1
    current, old = Fence(role="trainer", epoch=6), Fence(role="trainer", epoch=5)
    assert await append_at(broker, "weights", entry("v1"), "1-0", fence=current) == "1-0"
    for write in (
        broker.append("weights", entry("old"), fence=old),
        broker.append_many([StreamWrite(stream="weights", entries=[("2-0", entry("old"))])], fence=old),
        append_at(broker, QUEUE, entry("old"), "1-0", fence=old, is_queue=True),
    ):
        with pytest.raises(FencedError):
            await write
    assert await broker.length("weights") == 1
    assert await broker.length(QUEUE) == 0


async def test_newer_epoch_than_the_broker_knows_is_restored(broker: Broker) -> None:
    await broker.append("weights", entry("after the broker lost its tail"), fence=Fence(role="trainer", epoch=7))
    with pytest.raises(FencedError):
        await broker.append("weights", entry("old"), fence=Fence(role="trainer", epoch=6))
    assert await broker.acquire_epoch("trainer") == 8


async def test_incarnations_count_up_by_name(broker: Broker, harness: BrokerHarness) -> None:
    assert [await broker.next_incarnation("generate-0") for _ in range(3)] == [1, 2, 3]
    assert await harness.open().next_incarnation("generate-0") == 4
    assert await broker.next_incarnation("generate-1") == 1


@pytest.mark.parametrize(
    "commit",
    [Commit(rows=[RowWrite(row_id=RowId("0/0/0"), columns={})]), Commit(groups=[group("0/0", size=0)])],
    ids=["row without columns", "group without samples"],
)
async def test_commit_that_can_never_be_right_is_a_bug(broker: Broker, commit: Commit) -> None:
    with pytest.raises(ValueError, match="0/0"):
        await broker.commit(commit)


# -- tasks

REWARD_TASK = TaskSpec(name="reward", unit="sample", reads=frozenset({IDS}), writes=frozenset({REWARD}))
REFERENCE_TASK = TaskSpec(name="reference", unit="sample", reads=frozenset({IDS, LOGPROBS}))
ADVANTAGES_TASK = TaskSpec(name="advantages", unit="group", reads=frozenset({REWARD, LOGPROBS}))


async def noticed(broker: Broker, task: str) -> list[dict[str, str]]:
    found = await broker.claim(keys.tasks(task), "looker", count=99)
    assert all(delivery.entry.payload == b"" for delivery in found)
    return [dict(delivery.entry.fields) for delivery in found]


async def test_sample_unit_is_noticed_once_when_its_columns_are_there(broker: Broker) -> None:
    await broker.declare_tasks([REWARD_TASK, REFERENCE_TASK])
    await broker.declare_tasks([REWARD_TASK, REFERENCE_TASK])
    await broker.commit(Commit(groups=[group("3/1", size=4)]))
    await broker.commit(Commit(rows=[row("3/1/2", response_ids=b"x")]))
    await broker.commit(Commit(rows=[row("3/1/2", response_ids=b"y")]))
    assert await noticed(broker, "reward") == [{"task": "reward", "unit": "3/1/2", "group": "3/1"}]
    assert await noticed(broker, "reference") == []
    await broker.commit(Commit(rows=[row("3/1/2", rollout_logprobs=b"l"), row("3/1/2", reward=b"r")]))
    assert await noticed(broker, "reference") == [{"task": "reference", "unit": "3/1/2", "group": "3/1"}]
    assert await noticed(broker, "reward") == []


async def test_group_unit_is_noticed_once_when_every_row_is_ready(broker: Broker, harness: BrokerHarness) -> None:
    await broker.declare_tasks([ADVANTAGES_TASK])
    size = 6
    await broker.commit(Commit(groups=[group("0/0", size=size), group("0/1", size=size)]))
    writers = [harness.open() for _ in range(4)]
    writes = [
        writers[n % 4].commit(Commit(rows=[row(f"0/{g}/{sample}", **{column: b"v"})]))
        for n, column in enumerate(["rollout_logprobs", "reward", "reward"])
        for g in (0, 1)
        for sample in range(size)
        if not (g == 1 and sample == 5 and column == "reward")
    ]
    await asyncio.gather(*writes)
    assert await noticed(broker, "advantages") == [{"task": "advantages", "unit": "0/0", "group": "0/0"}]
    await broker.commit(Commit(rows=[row("0/1/5", reward=b"v"), row("0/1/5", advantage=b"v")]))
    assert await noticed(broker, "advantages") == [{"task": "advantages", "unit": "0/1", "group": "0/1"}]
    assert await noticed(broker, "advantages") == []


async def test_former_tasks_are_replaced(broker: Broker) -> None:
    await broker.declare_tasks([REWARD_TASK, REFERENCE_TASK])
    await broker.declare_tasks([REFERENCE_TASK])
    await broker.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0", response_ids=b"x", rollout_logprobs=b"y")]))
    assert await noticed(broker, "reward") == []
    assert len(await noticed(broker, "reference")) == 1


async def test_task_that_reads_nothing_is_a_bug(broker: Broker) -> None:
    with pytest.raises(ValueError, match="reads no column"):
        await broker.declare_tasks([TaskSpec(name="t", unit="group", reads=frozenset())])
    with pytest.raises(ValueError, match="one name"):
        await broker.declare_tasks([REWARD_TASK, REWARD_TASK])


# -- retained bytes


async def test_bytes_are_counted_and_freed(broker: Broker) -> None:
    first = await broker.commit(
        Commit(
            groups=[group("0/0", columns={Column.PROMPT_IDS: bytes(100)})], rows=[row("0/0/0", response_ids=bytes(7))]
        )
    )
    assert first.retained_bytes == 107
    second = await broker.commit(Commit(groups=[group("0/1")], rows=[row("0/0/0", response_ids=bytes(9))]))
    assert second.retained_bytes == await broker.retained_bytes() == 111
    assert await broker.drop_groups([GroupId("0/0"), GroupId("5/5")]) == 107
    assert await broker.drop_groups([GroupId("0/0")]) == 0
    assert await broker.drop_groups([]) == 0
    assert await broker.retained_bytes() == 4


async def test_logs_of_running_samples_go_with_their_group(broker: Broker) -> None:
    await broker.commit(Commit(groups=[group("0/0"), group("0/1")]))
    for group_id in (GroupId("0/0"), GroupId("0/1"), GroupId("5/5")):
        await broker.append(keys.partial(group_id), entry("tokens"))
    await broker.drop_groups([GroupId("0/0"), GroupId("5/5")])
    assert await broker.streams() == {keys.partial(GroupId("0/1")): 1}
    assert await broker.read(keys.partial(GroupId("0/0")), ZERO_ID, count=1) == []


async def test_insert_into_a_dropped_group_is_refused(broker: Broker) -> None:
    await broker.declare_tasks([REWARD_TASK])
    await broker.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0")]))
    await noticed(broker, "reward")
    await broker.drop_groups([GroupId("0/0")])
    assert await broker.read_rows([RowId("0/0/0")], [IDS]) == [{}]
    late = await broker.commit(Commit(rows=[row("0/0/0", told("late")), row("0/0/1", told("late"))]))
    assert late.inserted == (False, False)
    assert late.retained_bytes == 0
    assert await broker.length(keys.EVENTS) == 0
    assert await noticed(broker, "reward") == []


# -- leases of workers, meta, streams, runs


async def test_worker_leases_run_out(broker: Broker, harness: BrokerHarness) -> None:
    alive, silent, ended = WorkerId("generate-0.1"), WorkerId("generate-1.1"), WorkerId("score-0.1")
    await broker.beat(silent, b"\x80", ttl_s=LEASE_S)
    for worker in (alive, ended):
        await broker.beat(worker, b"old", ttl_s=60)
        await broker.beat(worker, b"new", ttl_s=60)
    assert (await harness.open().leases()).keys() >= {alive, ended}
    await broker.end_lease(ended)
    await harness.elapse(3 * LEASE_S)
    assert await broker.leases() == {alive: b"new"}
    await broker.beat(silent, b"back", ttl_s=60)
    assert await broker.leases() == {alive: b"new", silent: b"back"}


async def test_meta(broker: Broker, harness: BrokerHarness) -> None:
    assert await broker.get_meta("settings") is None
    await broker.put_meta("settings", b"\x80")
    await broker.put_meta("settings", b"\x81")
    await broker.put_meta("brief", b"x", ttl_s=LEASE_S)
    await harness.elapse(3 * LEASE_S)
    assert await harness.open().get_meta("settings") == b"\x81"
    assert await broker.get_meta("brief") is None


async def test_streams_are_listed_with_their_lengths(broker: Broker) -> None:
    assert await broker.streams() == {}
    await broker.append("events", entry("a"))
    await broker.append("events", entry("b"))
    await broker.enqueue(QUEUE, entry("c"))
    await broker.declare_tasks([REWARD_TASK])
    assert await broker.streams() == {"events": 2, QUEUE: 1, "tasks:reward": 0}
    (delivery,) = await broker.claim(QUEUE, "c", count=1)
    await broker.reject(delivery, "bad")
    await broker.delete_stream("events")
    assert await broker.streams() == {QUEUE: 0, "tasks:reward": 0, "dead": 1}


async def test_two_runs_do_not_see_each_other(harness: BrokerHarness) -> None:
    first, second = harness.open(RunName(f"{harness.open().run}-a")), harness.open(RunName(f"{harness.open().run}-b"))
    await first.declare_tasks([REWARD_TASK])
    await first.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0", told("x"))]))
    await first.beat(WorkerId("w"), b"", ttl_s=60)
    await first.put_meta("m", b"1")
    await first.acquire_epoch("trainer")
    await first.next_incarnation("w")
    assert await second.streams() == {}
    assert await second.retained_bytes() == 0
    assert await second.leases() == {}
    assert await second.get_meta("m") is None
    assert await second.read_rows([RowId("0/0/0")], [IDS]) == [{}]
    assert await second.acquire_epoch("trainer") == 1
    assert await second.next_incarnation("w") == 1
    assert (await second.commit(Commit(rows=[row("0/0/0")]))).inserted == (False,)


async def test_info_names_the_server(broker: Broker, harness: BrokerHarness) -> None:
    info = await broker.info()
    later = await harness.open().info()
    assert later == msgspec.structs.replace(info, uptime_s=later.uptime_s)
    assert later.uptime_s >= info.uptime_s
    assert info.version
    assert info.boot_id


async def test_ids_ascend_across_kinds_of_writes(broker: Broker) -> None:
    first = await broker.append("log", entry("a"))
    await broker.commit(Commit(appends=[Append(stream="log", entry=entry("b"))]))
    third = await broker.append("log", entry("c"))
    ids = [parse_entry_id(found.entry_id) for found in await broker.read("log", ZERO_ID, count=9)]
    assert first is not None
    assert third is not None
    assert ids == sorted(set(ids))
    assert (ids[0], ids[2]) == (parse_entry_id(first), parse_entry_id(third))
