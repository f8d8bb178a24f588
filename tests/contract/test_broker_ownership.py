"""One run a name: who may claim it, and what a process of another run can do there, over every broker there is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from tests.contract.conftest import BrokerHarness
from tests.fakes.broker_entries import QUEUE, entry, group, names, row
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Commit, Delivery, Fence, RunClaim, RunOwner, Withdrawal
from transport.broker.ownership import may_take
from transport.contracts.types import Column, GroupId, RowId, TaskSpec, WorkerId
from transport.errors import BrokerRejectedError, BrokerUnavailableError, FencedError, OtherRunError

OURS = RunClaim(run_id="a" * 16, start="1", directory="/one/x", host="left", place="left /one/x")
THEIRS = RunClaim(run_id="b" * 16, start="2", directory="/two/x", host="right", place="right /two/x")


def later(claim: RunClaim, start: str, **more: str) -> RunClaim:
    return msgspec.structs.replace(claim, start=start, **more)


async def test_the_first_start_has_the_name_and_keeps_it(broker: Broker, harness: BrokerHarness) -> None:
    assert await broker.owner() is None
    await broker.hold_run(OURS)
    await broker.hold_run(OURS)
    other = harness.open()
    with pytest.raises(OtherRunError, match=r"/one/x on host left, on this broker for .*, live"):
        await other.hold_run(THEIRS)
    owner = await other.owner()
    assert owner is not None
    assert (owner.claim, owner.is_live) == (OURS, True)
    assert owner.age_s is not None
    assert 0 <= owner.age_s < 600
    await broker.leave_run()
    owner = await other.owner()
    assert owner is not None
    assert not owner.is_live
    with pytest.raises(OtherRunError, match="not live"):
        await other.hold_run(THEIRS, after=OURS.start)


async def test_a_run_notices_that_its_broker_lost_it(broker: Broker, harness: BrokerHarness) -> None:
    """Also where the server was not started again: what it must hold of the run is then written again."""
    await broker.hold_run(OURS)
    worker = harness.open()
    await worker.join_run()
    before = [(await one.info()).boot_id for one in (broker, worker)]
    await harness.lose()
    await harness.elapse(0.01)
    await broker.hold_run(OURS)
    after = [(await one.info()).boot_id for one in (broker, worker)]
    assert (before[0], after[0]) == (before[1], after[1])
    assert before[0] != after[0]


async def test_of_starts_at_one_instant_one_has_the_name(harness: BrokerHarness) -> None:
    claims = [later(OURS, str(n), run_id=f"{n:016x}") for n in range(8)]
    done = await asyncio.gather(*(harness.open().hold_run(claim) for claim in claims), return_exceptions=True)
    assert sorted(str(type(one).__name__) for one in done) == ["NoneType"] + ["OtherRunError"] * 7


async def test_a_start_follows_the_one_that_it_names_and_no_other(broker: Broker, harness: BrokerHarness) -> None:
    await broker.hold_run(OURS)
    second, copied = harness.open(), harness.open()
    await second.hold_run(later(OURS, "5"), after="1")
    with pytest.raises(OtherRunError, match=r"another start of run .* has taken over"):
        await copied.hold_run(later(OURS, "6"), after="1")
    with pytest.raises(OtherRunError):
        await broker.acquire_epoch("orchestrator")
    assert await second.acquire_epoch("orchestrator") == 1


async def test_an_epoch_is_taken_with_the_claim_in_one_step(broker: Broker, harness: BrokerHarness) -> None:
    await broker.hold_run(OURS)
    assert await broker.acquire_epoch("orchestrator") == 1
    await harness.lose()
    assert await broker.acquire_epoch("orchestrator", at_least=1) == 2
    owner = await broker.owner()
    assert owner is not None
    assert owner.claim == OURS
    await harness.lose()
    newcomer = harness.open()
    await newcomer.hold_run(THEIRS)
    assert await newcomer.acquire_epoch("orchestrator") == 1
    with pytest.raises(OtherRunError, match="/two/x on host right"):
        await broker.acquire_epoch("orchestrator")
    assert await newcomer.acquire_epoch("orchestrator") == 2


Call = Callable[[Broker], Awaitable[object]]
CALLS: dict[str, Call] = {
    "acquire_epoch": lambda b: b.acquire_epoch("trainer"),
    "next_incarnation": lambda b: b.next_incarnation("train-0"),
    "append": lambda b: b.append("log", entry("x")),
    "fenced append": lambda b: b.append("log", entry("x"), fence=Fence(role="trainer", epoch=9)),
    "read": lambda b: b.read("log", ZERO_ID, count=9),
    "blocking read": lambda b: b.read("log", "999999999999999-0", count=9, wait_s=0.01),
    "tail": lambda b: b.tail("log", count=9),
    "last_id": lambda b: b.last_id("log"),
    "length": lambda b: b.length("log"),
    "trim": lambda b: b.trim("log", "1-0"),
    "delete_stream": lambda b: b.delete_stream("log"),
    "enqueue": lambda b: b.enqueue(QUEUE, entry("x")),
    "claim": lambda b: b.claim(QUEUE, "worker", count=9),
    "blocking claim": lambda b: b.claim(QUEUE, "worker", count=9, wait_s=0.01),
    "renew": lambda b: b.renew(QUEUE, "worker", ["1-0"]),
    "reclaim": lambda b: b.reclaim(QUEUE, "worker", idle_s=0.0, max_deliveries=9, count=9),
    "reject": lambda b: b.reject(Delivery(queue=QUEUE, entry_id="1-0", entry=entry("x")), "why"),
    "pending": lambda b: b.pending(QUEUE),
    "dead_letters": lambda b: b.dead_letters(),
    "retry_dead": lambda b: b.retry_dead("1-0"),
    "drop_dead": lambda b: b.drop_dead("1-0"),
    "declare_tasks": lambda b: b.declare_tasks([]),
    "add_user_task": lambda b: b.add_user_task(
        TaskSpec(name="x_t", unit="sample", reads=frozenset({Column.REWARD}), writes=frozenset())
    ),
    "remove_user_task": lambda b: b.remove_user_task("x_t"),
    "commit": lambda b: b.commit(Commit(groups=[group("7/7")])),
    "read_rows": lambda b: b.read_rows([RowId("0/0/0")], [Column.RESPONSE_IDS]),
    "read many rows": lambda b: b.read_rows([RowId("0/0/0")] * 20, [Column.RESPONSE_IDS]),
    "read_groups": lambda b: b.read_groups([GroupId("0/0")], [Column.PROMPT_IDS]),
    "has_groups": lambda b: b.has_groups([GroupId("0/0")]),
    "withdraw_rows": lambda b: b.withdraw_rows(
        [Withdrawal(row_id=RowId("0/0/0"), column=Column.RESPONSE_IDS, value=b"ids")]
    ),
    "drop_groups": lambda b: b.drop_groups([GroupId("0/0")]),
    "retained_bytes": lambda b: b.retained_bytes(),
    "beat": lambda b: b.beat(WorkerId("train-0.1"), b"", ttl_s=600),
    "leases": lambda b: b.leases(),
    "end_lease": lambda b: b.end_lease(WorkerId("train-0.1")),
    "put_meta": lambda b: b.put_meta(keys.STATE, keys.STATE_FINISHED),
    "get_meta": lambda b: b.get_meta(keys.STATE),
    "streams": lambda b: b.streams(),
}


async def told(call: Awaitable[object]) -> str:
    try:
        return f"answered {await call}"
    except OtherRunError as error:
        return str(error)


async def test_a_process_of_another_run_reads_and_changes_nothing(broker: Broker, harness: BrokerHarness) -> None:
    """Its broker was emptied, and a run of that name began there; it never ran since."""
    stale = harness.open()
    await broker.hold_run(OURS)
    await stale.join_run()
    await harness.lose()
    new = harness.open()
    await new.hold_run(THEIRS)
    assert await new.acquire_epoch("trainer") == 1
    await new.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0", response_ids=b"ids")]))
    await new.append("log", entry("theirs"))
    await new.enqueue(QUEUE, entry("theirs"))
    await new.beat(WorkerId("train-0.1"), b"theirs", ttl_s=600)
    await new.put_meta(keys.STATE, keys.STATE_RUNNING)
    for process in (stale, broker):  # a worker of the earlier run, and its orchestrator
        said = [await told(call(process)) for call in CALLS.values()]
        refused = [name for name, text in zip(CALLS, said, strict=True) if "/two/x on host right" in text]
        assert refused == list(CALLS)
    assert names(await new.read("log", ZERO_ID, count=9)) == ["theirs"]
    assert [names([one]) for one in await new.claim(QUEUE, "worker", count=9)] == [["theirs"]]
    assert [one.deliveries for one in await new.pending(QUEUE)] == [1]
    assert await new.read_rows([RowId("0/0/0")], [Column.RESPONSE_IDS]) == [{Column.RESPONSE_IDS: b"ids"}]
    assert await new.has_groups([GroupId("7/7")]) == [False]
    assert await new.leases() == {WorkerId("train-0.1"): b"theirs"}
    assert await new.get_meta(keys.STATE) == keys.STATE_RUNNING
    assert await new.acquire_epoch("trainer") == 2


async def test_a_worker_waits_until_its_run_is_there_again(broker: Broker, harness: BrokerHarness) -> None:
    harness.outage_s = 0.0
    worker = harness.open()
    await broker.hold_run(OURS)
    assert await worker.join_run() == OURS.run_id
    await harness.lose()
    with pytest.raises(BrokerUnavailableError, match="holds no run named"):
        await worker.append("log", entry("x"))
    with pytest.raises(BrokerUnavailableError, match="holds no run named"):
        await worker.acquire_epoch("trainer")
    assert await broker.length("log") == 0  # who claimed the run does so again at its next call
    await worker.append("log", entry("x"))
    assert await broker.length("log") == 1


async def test_a_worker_that_was_given_an_id_joins_no_other_run(broker: Broker, harness: BrokerHarness) -> None:
    await broker.hold_run(OURS)
    worker = harness.open()
    assert await worker.join_run(THEIRS.run_id) == THEIRS.run_id
    with pytest.raises(OtherRunError, match="/one/x"):
        await worker.get_meta(keys.SETTINGS)


async def test_without_a_run_nothing_is_compared(broker: Broker) -> None:
    assert await broker.join_run() == ""
    await broker.append("log", entry("x"))
    assert await broker.acquire_epoch("trainer") == 1


async def test_queues_of_an_earlier_version_are_handed_out_anew(broker: Broker, harness: BrokerHarness) -> None:
    """Its broker knew no runs; whatever was held there is held by processes that have ended."""
    old = harness.open()
    await old.enqueue(QUEUE, entry("held"))
    await old.enqueue(QUEUE, entry("waiting"))
    await old.claim(QUEUE, "worker", count=1)
    await broker.hold_run(OURS)
    if harness.url is not None:  # the memory broker has one group a queue
        assert await broker.trim(QUEUE, "999999999999999-0") == 0
        assert names(await broker.claim(QUEUE, "worker", count=9)) == ["held", "waiting"]


async def test_a_name_that_is_forgotten_is_free(broker: Broker, harness: BrokerHarness) -> None:
    await broker.hold_run(OURS)
    await broker.commit(Commit(groups=[group("0/0")], rows=[row("0/0/0", response_ids=b"ids")]))
    await broker.put_meta(keys.STATE, keys.STATE_RUNNING)
    if harness.may_list:
        await broker.forget_run()
    else:
        with pytest.raises(BrokerRejectedError, match="scan"):
            await broker.forget_run()
        return
    new = harness.open()
    await new.hold_run(THEIRS)
    assert await new.has_groups([GroupId("0/0")]) == [False]
    assert await new.get_meta(keys.STATE) is None
    await broker.forget_run()
    assert await new.owner() is not None


async def test_who_is_fenced_off_reads_by_whom(broker: Broker, harness: BrokerHarness) -> None:
    await broker.hold_run(OURS)
    fence = Fence(role="orchestrator", epoch=await broker.acquire_epoch("orchestrator"))
    second = harness.open()
    await second.hold_run(later(OURS, "5", directory="/moved/x"), after="1")
    await second.acquire_epoch("orchestrator")
    with pytest.raises(FencedError, match=r"newest start is that of /moved/x on host left.*Go on there, or stop"):
        await broker.append("log", entry("x"), fence=fence)


# -- the decision, which is pure


def owned(claim: RunClaim, *, live: bool) -> RunOwner:
    return RunOwner(claim=claim, age_s=7200.0, is_live=live)


def test_whose_name_it_is() -> None:
    mine = later(OURS, "9")
    assert may_take("x", mine, None, former=["1"]) == ""
    assert may_take("x", mine, owned(mine, live=True), former=["1"]) == ""
    assert may_take("x", mine, owned(OURS, live=False), former=["1"]) == "1"
    assert may_take("x", mine, owned(OURS, live=True), former=["1"]) == "1"  # its lock is ours: it was killed
    moved = later(mine, "9", place="elsewhere", directory="/copy/x")
    assert may_take("x", moved, owned(OURS, live=False), former=["1"]) == "1"
    assert may_take("x", moved, owned(OURS, live=True), former=["1"], exclusive=True) == "1"
    with pytest.raises(OtherRunError, match=r"is live: /one/x on host left, on this broker for 2 h, live. /copy/x is"):
        may_take("x", moved, owned(OURS, live=True), former=["1"])
    with pytest.raises(OtherRunError, match="has gone on since /copy/x was copied"):
        may_take("x", moved, owned(later(OURS, "2"), live=False), former=["1"])
    with pytest.raises(OtherRunError, match=r"another run named 'x': /two/x .* stop that run first, or free"):
        may_take("x", mine, owned(THEIRS, live=True), former=["1", "2"])
    with pytest.raises(OtherRunError, match=r"not live. Choose another --name, or free that name"):
        may_take("x", mine, owned(THEIRS, live=False), former=["1", "2"])
