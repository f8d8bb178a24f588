"""The broker's contract (transport/broker/base.py) on logs and work queues, over every broker there is."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.conftest import BrokerHarness
from tests.fakes.broker_entries import QUEUE, entry, group, names, told
from tests.fakes.explicit_ids import append_at
from transport.broker import keys
from transport.broker.base import (
    ZERO_ID,
    Ack,
    Append,
    Broker,
    Commit,
    Delivery,
    Entry,
    Fence,
    Mark,
    StreamWrite,
)
from transport.contracts.messages import MAX_MESSAGE_BYTES
from transport.errors import FencedError, MessageError, TailLostError

UNTIL_RECLAIM_S = 3.0


# -- logs


async def test_log_gives_every_reader_all_entries_in_order(broker: Broker) -> None:
    written = [await broker.append("log", entry(str(i), bytes([i, 255 - i]))) for i in range(5)]
    first = await broker.read("log", ZERO_ID, count=3)
    rest = await broker.read("log", first[-1].entry_id, count=10)
    assert [found.entry_id for found in first + rest] == written
    assert [found.entry for found in first + rest] == [entry(str(i), bytes([i, 255 - i])) for i in range(5)]
    assert await broker.read("log", ZERO_ID, count=10) == first + rest
    assert await broker.length("log") == 5


async def test_empty_log(broker: Broker) -> None:
    assert await broker.read("log", ZERO_ID, count=1) == []
    assert await broker.read("log", ZERO_ID, count=1, wait_s=0.01) == []
    assert await broker.tail("log", count=3) == []
    assert await broker.last_id("log") == ZERO_ID
    assert await broker.length("log") == 0
    assert await broker.trim("log", "5-0") == 0


async def test_read_wakes_when_an_entry_comes(broker: Broker, harness: BrokerHarness) -> None:
    reading = asyncio.create_task(broker.read("log", ZERO_ID, count=1, wait_s=20.0))
    await harness.open().append("log", entry("late"))
    async with asyncio.timeout(60):
        assert names(await reading) == ["late"]


async def test_tail_gives_the_newest_oldest_first(broker: Broker) -> None:
    for i in range(5):
        await broker.append("log", entry(str(i)))
    assert names(await broker.tail("log", count=2)) == ["3", "4"]


async def test_explicit_id_is_appended_once(broker: Broker) -> None:
    assert await append_at(broker, "rounds", entry("a"), "7-1") == "7-1"
    assert await append_at(broker, "rounds", entry("a"), "7-1") is None
    assert await append_at(broker, "rounds", entry("older"), "6-9") is None
    again = StreamWrite(stream="rounds", entries=[("7-1", entry("a")), ("7-2", entry("b")), ("8-0", entry("c"))])
    assert await broker.append_many([again]) == [2]
    assert await broker.append_many([StreamWrite(stream="rounds", entries=[])]) == [0]
    assert await broker.append_many([]) == []
    assert names(await broker.read("rounds", ZERO_ID, count=9)) == ["a", "b", "c"]
    assert await broker.last_id("rounds") == "8-0"


@pytest.mark.parametrize("ids", [["0-0"], ["5-1", "5-1"], ["5-1", "4-0"]])
async def test_ids_that_do_not_ascend_are_a_bug(broker: Broker, ids: list[str]) -> None:
    with pytest.raises(ValueError, match="is not above"):
        await broker.append_many(
            [
                StreamWrite(stream="log", entries=[("1-0", entry("x"))]),
                StreamWrite(stream="rounds", entries=[(entry_id, entry("x")) for entry_id in ids]),
            ]
        )
    assert await broker.length("log") == 0
    assert await broker.length("rounds") == 0


async def test_many_are_enqueued_once_each_and_claimed_in_order(broker: Broker) -> None:
    def write(*named: tuple[str, str]) -> StreamWrite:
        entries = [(entry_id, entry(name)) for entry_id, name in named]
        return StreamWrite(stream=QUEUE, entries=entries, is_queue=True)

    assert await broker.append_many([write()]) == [0]
    assert await broker.append_many([write(("1-0", "a"), ("1-1", "b"))]) == [2]
    assert await broker.append_many([write(("1-1", "again"), ("2-0", "c"))]) == [1]
    claimed = await broker.claim(QUEUE, "me", count=9)
    assert [delivery.entry_id for delivery in claimed] == ["1-0", "1-1", "2-0"]
    assert [delivery.entry.fields["name"] for delivery in claimed] == ["a", "b", "c"]


async def test_streams_are_appended_to_in_one_step(broker: Broker) -> None:
    await append_at(broker, "rounds", entry("first"), "1-0")
    writes = [
        StreamWrite(stream="rounds", entries=[("1-0", entry("again")), ("2-0", entry("second"))]),
        StreamWrite(stream=QUEUE, entries=[("2-1", entry("plan"))], is_queue=True),
    ]
    old = Fence(role="orchestrator", epoch=await broker.acquire_epoch("orchestrator"))
    await broker.acquire_epoch("orchestrator")
    with pytest.raises(FencedError):
        await broker.append_many(writes, fence=old)
    assert names(await broker.read("rounds", ZERO_ID, count=9)) == ["first"]
    assert await broker.append_many(writes) == [1, 1]
    assert names(await broker.read("rounds", ZERO_ID, count=9)) == ["first", "second"]
    assert [delivery.entry.fields["name"] for delivery in await broker.claim(QUEUE, "me", count=9)] == ["plan"]


async def test_a_writer_is_refused_by_a_broker_that_lost_what_it_wrote(broker: Broker) -> None:
    def write(entry_id: str) -> list[StreamWrite]:
        return [StreamWrite(stream="rounds", entries=[(entry_id, entry(entry_id))])]

    assert await broker.append_many(write("1-0"), mark=Mark(after="", now="a")) == [1]
    assert await broker.append_many(write("2-0"), mark=Mark(after="a", now="b")) == [1]
    with pytest.raises(TailLostError):
        await broker.append_many(write("4-0"), mark=Mark(after="c", now="d"))
    assert names(await broker.read("rounds", ZERO_ID, count=9)) == ["1-0", "2-0"]
    assert await broker.append_many(write("3-0"), mark=Mark(after="", now="c")) == [1]
    assert await broker.append_many(write("4-0"), mark=Mark(after="c", now="d")) == [1]


async def test_trim_frees_up_to_the_cursor_and_keeps_the_last_id(broker: Broker) -> None:
    for i in range(1, 6):
        await append_at(broker, "rounds", entry(str(i)), f"{i}-{i}")
    assert await broker.trim("rounds", "3-3") == 3
    assert names(await broker.read("rounds", ZERO_ID, count=9)) == ["4", "5"]
    assert await broker.trim("rounds", "9-0") == 2
    assert await broker.last_id("rounds") == "5-5"
    assert await append_at(broker, "rounds", entry("again"), "5-5") is None


async def test_oversized_payload_is_refused(broker: Broker) -> None:
    with pytest.raises(MessageError, match="over the limit"):
        await broker.append("log", entry("big", bytes(MAX_MESSAGE_BYTES + 1)))
    big = Append(stream="log", entry=entry("big", bytes(MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(MessageError):
        await broker.commit(Commit(groups=[group("0/0")], appends=[big]))
    assert await broker.length("log") == 0
    assert await broker.retained_bytes() == 0


async def test_payload_is_no_field_name(broker: Broker) -> None:
    with pytest.raises(ValueError, match="payload"):
        await broker.append("log", Entry(fields={"payload": "x"}))


async def test_entry_without_fields(broker: Broker) -> None:
    await broker.append("log", Entry())
    await broker.append("log", Entry(payload=b"\x81\xa0"))
    assert [found.entry for found in await broker.read("log", ZERO_ID, count=9)] == [
        Entry(),
        Entry(payload=b"\x81\xa0"),
    ]


# -- work queues


async def test_each_entry_goes_to_one_consumer(broker: Broker, harness: BrokerHarness) -> None:
    for i in range(40):
        await broker.enqueue(QUEUE, entry(str(i)))
    others = [harness.open() for _ in range(4)]
    claims = [other.claim(QUEUE, f"c{n}", count=3) for n, other in enumerate(others) for _ in range(5)]
    claimed = [delivery for part in await asyncio.gather(*claims) for delivery in part]
    assert sorted(names(claimed), key=int) == [str(i) for i in range(40)]
    assert {delivery.deliveries for delivery in claimed} == {1}
    assert {delivery.queue for delivery in claimed} == {QUEUE}
    assert await broker.claim(QUEUE, "c0", count=3, wait_s=0.01) == []


async def test_claim_waits_on_a_queue_that_is_not_there_yet(broker: Broker, harness: BrokerHarness) -> None:
    claiming = asyncio.create_task(broker.claim(QUEUE, "c", count=1, wait_s=20.0))
    await append_at(harness.open(), QUEUE, entry("first"), "3-0", is_queue=True)
    async with asyncio.timeout(60):
        assert names(await claiming) == ["first"]


async def test_claim_survives_the_deletion_of_its_queue(broker: Broker, harness: BrokerHarness) -> None:
    await broker.enqueue(QUEUE, entry("gone"))
    await broker.claim(QUEUE, "c", count=1)
    claiming = asyncio.create_task(broker.claim(QUEUE, "c", count=1, wait_s=20.0))
    other = harness.open()
    await other.delete_stream(QUEUE)
    await other.enqueue(QUEUE, entry("new"))
    async with asyncio.timeout(60):
        assert names(await claiming) == ["new"]


async def test_acknowledged_entries_are_freed(broker: Broker) -> None:
    for i in range(3):
        await broker.enqueue(QUEUE, entry(str(i)))
    first, second = await broker.claim(QUEUE, "c", count=2)
    await broker.commit(Commit(acks=[Ack(queue=QUEUE, entry_id=first.entry_id)]))
    assert [held.entry_id for held in await broker.pending(QUEUE)] == [second.entry_id]
    assert await broker.length(QUEUE) == 2
    last = await broker.last_id(QUEUE)
    await broker.commit(Commit(acks=[Ack(queue=QUEUE, entry_id=second.entry_id)]))
    assert await broker.last_id(QUEUE) == last
    assert await broker.length(QUEUE) == 1


async def test_acknowledging_twice_or_elsewhere_does_nothing(broker: Broker) -> None:
    await broker.append("log", entry("kept"))
    last = await broker.last_id("log")
    nothing = [Ack(queue="log", entry_id=last), Ack(queue="absent", entry_id="1-1"), Ack(queue=QUEUE, entry_id="1-1")]
    await broker.commit(Commit(acks=nothing))
    assert await broker.length("log") == 1


async def test_renewed_lease_is_not_taken(broker: Broker, harness: BrokerHarness) -> None:
    await broker.enqueue(QUEUE, entry("a"))
    await broker.enqueue(QUEUE, entry("b"))
    held, lost = await broker.claim(QUEUE, "slow", count=2)
    await harness.elapse(UNTIL_RECLAIM_S)  # a loaded machine may take long from the renewal to the reclaim
    assert await broker.renew(QUEUE, "slow", [held.entry_id]) == [held.entry_id]
    taken, dead = await broker.reclaim(QUEUE, "thief", idle_s=UNTIL_RECLAIM_S, max_deliveries=3, count=10)
    assert names(taken) == ["b"]
    assert dead == []
    assert taken[0].entry_id == lost.entry_id
    assert taken[0].deliveries == 2
    assert await broker.renew(QUEUE, "slow", [held.entry_id, lost.entry_id, "9-9"]) == [held.entry_id]
    assert await broker.renew("absent", "slow", ["1-1"]) == []


async def test_renewing_counts_no_delivery(broker: Broker) -> None:
    await broker.enqueue(QUEUE, entry("a"))
    (held,) = await broker.claim(QUEUE, "c", count=1)
    for _ in range(5):
        await broker.renew(QUEUE, "c", [held.entry_id])
    (found,) = await broker.pending(QUEUE)
    assert (found.consumer, found.deliveries) == ("c", 1)
    assert 0 <= found.idle_s < 10


async def test_poisoned_entry_goes_to_the_dead_letters(broker: Broker) -> None:
    await broker.enqueue(QUEUE, entry("poison", b"\xc1"))
    (claimed,) = await broker.claim(QUEUE, "c0", count=1)
    for attempt in (2, 3):
        taken, dead = await broker.reclaim(QUEUE, f"c{attempt}", idle_s=0, max_deliveries=3, count=10)
        assert [delivery.deliveries for delivery in taken] == [attempt]
        assert dead == []
    taken, dead = await broker.reclaim(QUEUE, "c4", idle_s=0, max_deliveries=3, count=10)
    assert taken == []
    assert dead == await broker.dead_letters()
    assert (dead[0].queue, dead[0].entry_id, dead[0].entry) == (QUEUE, claimed.entry_id, entry("poison", b"\xc1"))
    assert "3 times" in dead[0].reason
    assert await broker.length(QUEUE) == 0
    assert await broker.pending(QUEUE) == []


async def test_reclaim_takes_the_oldest_up_to_count(broker: Broker) -> None:
    for i in range(5):
        await append_at(broker, QUEUE, entry(str(i)), f"1-{i}", is_queue=True)
    await broker.claim(QUEUE, "c", count=5)
    taken, _ = await broker.reclaim(QUEUE, "d", idle_s=0, max_deliveries=9, count=2)
    assert names(taken) == ["0", "1"]
    assert await broker.reclaim("absent", "d", idle_s=0, max_deliveries=9, count=2) == ([], [])


async def test_reject_buries_acknowledges_and_tells_in_one_step(broker: Broker) -> None:
    await broker.enqueue(QUEUE, entry("bad"))
    (delivery,) = await broker.claim(QUEUE, "c", count=1)
    await broker.reject(delivery, "reward raised: 1/0", appends=[told("failed")])
    await broker.reject(delivery, "again", appends=[told("failed")])
    (letter,) = await broker.dead_letters()
    assert (letter.queue, letter.reason, letter.entry) == (QUEUE, "reward raised: 1/0", entry("bad"))
    assert names(await broker.read(keys.EVENTS, ZERO_ID, count=9)) == ["failed"]
    assert await broker.pending(QUEUE) == []
    never_claimed = Delivery(queue="absent", entry_id="1-1", entry=entry("x"))
    await broker.reject(never_claimed, "nobody holds it", appends=[told("failed")])
    assert await broker.length(keys.EVENTS) == 1


async def bury(broker: Broker, name: str) -> Delivery:
    await broker.enqueue(QUEUE, entry(name, b"\xc1"))
    (delivery,) = await broker.claim(QUEUE, "c", count=1)
    await broker.reject(delivery, f"{name} raised")
    return delivery


async def test_a_retried_dead_letter_is_back_in_its_queue_as_if_it_were_new(broker: Broker) -> None:
    await bury(broker, "a")
    await bury(broker, "b")
    first, second = await broker.dead_letters()
    assert [letter.reason for letter in (first, second)] == ["a raised", "b raised"]
    entry_id = await broker.retry_dead(second.letter_id)
    assert await broker.dead_letters() == [first]
    (again,) = await broker.claim(QUEUE, "d", count=9)
    assert (again.entry_id, again.entry, again.deliveries) == (entry_id, entry("b", b"\xc1"), 1)
    (held,) = await broker.pending(QUEUE)
    assert (held.consumer, held.deliveries) == ("d", 1)


async def test_a_dead_letter_is_retried_once_and_a_queue_that_is_gone_comes_back(broker: Broker) -> None:
    await bury(broker, "a")
    await broker.delete_stream(QUEUE)
    (letter,) = await broker.dead_letters()
    tries = await asyncio.gather(*(broker.retry_dead(letter.letter_id) for _ in range(3)))
    assert sum(entry_id is not None for entry_id in tries) == 1
    assert names(await broker.claim(QUEUE, "c", count=9)) == ["a"]
    assert (await broker.streams())[QUEUE] == 1


async def test_a_dropped_dead_letter_is_gone(broker: Broker) -> None:
    await bury(broker, "a")
    (letter,) = await broker.dead_letters()
    assert await broker.drop_dead(letter.letter_id)
    assert not await broker.drop_dead(letter.letter_id)
    assert await broker.retry_dead(letter.letter_id) is None
    assert await broker.dead_letters() == []
    assert await broker.length(QUEUE) == 0


async def test_foreign_bytes_among_the_dead_letters_are_not_retried(broker: Broker) -> None:
    await broker.append(keys.DEAD, entry("foreign"))
    (letter,) = await broker.dead_letters()
    assert await broker.retry_dead(letter.letter_id) is None
    assert await broker.dead_letters() == [letter]
    assert await broker.drop_dead(letter.letter_id)
    with pytest.raises(ValueError, match="not an entry id"):
        await broker.retry_dead("all")


async def test_trimming_a_queue_never_removes_what_is_held_or_waiting(broker: Broker) -> None:
    for i in range(1, 5):
        await append_at(broker, QUEUE, entry(str(i)), f"{i}-0", is_queue=True)
    assert await broker.trim(QUEUE, "9-0") == 0
    first, second = await broker.claim(QUEUE, "c", count=2)
    assert await broker.trim(QUEUE, "9-0") == 0
    await broker.commit(Commit(acks=[Ack(queue=QUEUE, entry_id=first.entry_id)]))
    assert await broker.trim(QUEUE, "9-0") == 0
    assert [held.entry_id for held in await broker.pending(QUEUE)] == [second.entry_id]
    taken, _ = await broker.reclaim(QUEUE, "d", idle_s=0, max_deliveries=9, count=9)
    assert names(taken) + names(await broker.claim(QUEUE, "d", count=9)) == ["2", "3", "4"]
