"""Rows in storage units: what the broker keeps of them, and units that are full, gone or new."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil
import pytest
from msgspec.structs import replace

from tests.fakes.stored_rows import BOTH, GROUP, admit, ids_of, new_unit, response
from tests.fakes.waiting import until
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Commit, Fence
from transport.contracts.messages import RowsMissing, WorkerStatus, encode, event_decoder
from transport.contracts.types import PROTOCOL_VERSION, WorkerId, WorkerKind, group_id, row_id
from transport.errors import ChecksumError, FencedError, MessageError, PeerRejectedError, PeerUnavailableError
from transport.rows.run_rows import RunRows
from transport.rows.segments import Range, name_of_sent
from transport.rows.unit_rows import UNIT_COLUMNS, Locator, UnitRows, locator_decoder
from transport.rows.units import Full, Put, StorageUnit, UnitClient, _done_decoder
from transport.tensors.base import Deadline, Endpoint, parse_address
from transport.tensors.manifest import checksum
from transport.tensors.wire import connect
from workers.storage.worker import StorageWorker

RIGHT = b"the right secret"
NO_SEGMENT = "1@000000000000"


async def test_the_broker_holds_no_bulky_column(unit_rows: UnitRows, broker: Broker, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    await unit_rows.commit(Commit(rows=[response(row, list(range(1000)))]))
    (held,) = await broker.read_rows([row], list(UNIT_COLUMNS))
    assert all(len(raw) < 250 for raw in held.values())
    assert units[0].retained_bytes == 8000


async def test_a_lost_insert_takes_its_bytes_back(unit_rows: UnitRows, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    for ids in ([1, 2], [3, 4, 5]):
        await unit_rows.commit(Commit(rows=[response(row_id(GROUP, 0), ids)]))
    assert units[0].retained_bytes == 16


async def test_another_unit_takes_over_from_one_that_is_full_or_gone(broker: Broker, units: list[StorageUnit]) -> None:
    addresses = [new_unit(units), new_unit(units, max_bytes=7)]
    rows = UnitRows(broker, addresses)
    groups = [group_id(0, slot) for slot in range(20)]
    assert len({rows.ranked_units(group)[0] for group in groups}) == 2
    await rows.commit(admit(*groups))
    await rows.commit(Commit(rows=[response(row_id(group, 0), [1, 2]) for group in groups]))
    assert [await ids_of(rows, row_id(group, 0)) for group in groups] == [[1, 2]] * 20
    assert units[1].retained_bytes == 0

    units[0].close()
    with pytest.raises(PeerUnavailableError):
        await rows.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    with pytest.raises(PeerUnavailableError):
        await rows.read_rows([row_id(groups[0], 0)], BOTH)
    later = UnitRows(broker, [*addresses[1:], new_unit(units)])
    await later.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    assert await ids_of(rows, row_id(groups[0], 1)) == [1, 2]
    await rows.drop_groups(groups)  # the unit that is gone does not stop it
    assert units[2].retained_bytes == 0
    rows.close()
    later.close()


async def test_a_reader_needs_no_list_of_units(unit_rows: UnitRows, broker: Broker, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    await unit_rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    second = UnitRows(broker, [new_unit(units)])
    await second.commit(Commit(rows=[response(row_id(GROUP, 1), [2])]))
    reader = UnitRows(broker, [])
    assert [await ids_of(reader, row_id(GROUP, sample)) for sample in (0, 1)] == [[1], [2]]
    await reader.drop_groups([GROUP])
    assert [unit.retained_bytes for unit in units] == [0, 0]
    second.close()
    reader.close()


async def test_a_column_that_a_unit_lost_is_missing(broker: Broker, units: list[StorageUnit]) -> None:
    address = new_unit(units)
    rows = UnitRows(broker, [address])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    units[0].close()
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    units.append(StorageUnit(max_bytes=1 << 20, endpoint=Endpoint(ports=(port,))))  # the unit was restarted, empty
    units[-1].start()
    assert await rows.read_rows([row_id(GROUP, 0)], BOTH) == [{}]
    rows.close()


def test_a_unit_asks_for_the_secret(units: list[StorageUnit]) -> None:
    units.append(StorageUnit(max_bytes=100, endpoint=Endpoint(secret=RIGHT)))
    address = units[-1].start()
    client = UnitClient(address, secret=RIGHT[::-1])
    with pytest.raises(PeerRejectedError):
        client.put([GROUP], [b"value"])
    friend = UnitClient(address, secret=RIGHT)
    friend.put([GROUP], [b"value"])
    assert units[-1].retained_bytes == 5
    friend.close()


@pytest.mark.parametrize("ids", [[1, 2], list(range(20_000))], ids=["sent", "in segments"])
async def test_what_one_unit_has_no_room_for_goes_to_another_and_all_room_is_used(
    broker: Broker, units: list[StorageUnit], ids: list[int]
) -> None:
    of_group = 8 * len(ids)
    rows = UnitRows(broker, [new_unit(units, 7 * of_group), new_unit(units, 14 * of_group)])
    groups = [group_id(0, slot) for slot in range(22)]
    await rows.commit(admit(*groups))
    await rows.commit(Commit(rows=[response(row_id(group, 0), ids) for group in groups[:20]]))
    assert [await ids_of(rows, row_id(group, 0)) for group in groups[:20]] == [ids] * 20
    with pytest.raises(PeerUnavailableError, match="full"):
        await rows.commit(Commit(rows=[response(row_id(group, 0), ids) for group in groups[20:]]))
    assert sum(unit.retained_bytes for unit in units) == 20 * of_group, "what was put of a write that failed is freed"
    await rows.commit(Commit(rows=[response(row_id(groups[20], 0), ids)]))
    rows.close()


async def test_what_a_fenced_writer_put_is_freed(unit_rows: UnitRows, broker: Broker, units: list[StorageUnit]) -> None:
    await unit_rows.commit(admit(GROUP))
    old = Fence(role="writer", epoch=await broker.acquire_epoch("writer"))
    await broker.acquire_epoch("writer")
    with pytest.raises(FencedError):
        await unit_rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1, 2])], fence=old))
    assert units[0].retained_bytes == 0


def test_puts_that_are_announced_and_not_sent_take_no_memory_and_hold_no_room_for_longer_than_their_connection(
    units: list[StorageUnit],
) -> None:
    address = parse_address(new_unit(units, max_bytes=256 << 20))
    announced = Put(segment=name_of_sent(), group_ids=(GROUP,), nbytes=60 << 20, checksum="")
    before = psutil.Process().memory_info().rss
    client = UnitClient(str(address))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            channel = connect(address.place, address.port, str(address), b"", Deadline(30))
            stack.callback(channel.close)
            channel.send(announced)
        full = until(lambda: client.put([GROUP], [bytes(20 << 20)]))
        while isinstance(full, str):  # until the unit has seen all four
            client.drop(group_ids=[GROUP])
            full = client.put([GROUP], [bytes(20 << 20)])
        assert full.free_bytes == 16 << 20, "room is kept for what is on its way"
        client.drop(group_ids=[GROUP])
        assert psutil.Process().memory_info().rss - before < 100 << 20
    until(lambda: isinstance(client.put([GROUP], [bytes(20 << 20)]), str))
    assert units[0].retained_bytes == 20 << 20
    client.close()


def test_a_full_unit_says_what_it_has_room_for_and_goes_on(units: list[StorageUnit]) -> None:
    client = UnitClient(new_unit(units, max_bytes=1000))
    for nbytes in (1001, 1 << 24):
        assert client.put([GROUP], [bytes(nbytes)]) == Full(retained_bytes=0, free_bytes=1000)
    segment = client.put([GROUP], [b"a" * 600, b"b" * 300])
    assert isinstance(segment, str)
    assert client.allocate([GROUP], 200) == Full(retained_bytes=900, free_bytes=100)
    into = memoryview(bytearray(301))
    assert client.read([Range(segment=segment, offset=599, nbytes=301)], [into]) == [True]
    assert bytes(into) == b"a" + b"b" * 300
    client.close()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda at: at.read([Range(segment=NO_SEGMENT, offset=0, nbytes=size) for size in (-(3 << 30), 3 << 30)], []),
        lambda at: at.read([Range(segment=NO_SEGMENT, offset=-1, nbytes=1)], []),
        lambda at: at.put([], [b"value"]),
        lambda at: at.allocate([GROUP], -(3 << 30)),
        lambda at: at.allocate([], 1 << 20),
    ],
    ids=["negative range", "negative offset", "value of nobody", "negative segment", "segment of nobody"],
)
def test_a_request_that_cannot_be_ends_its_connection(units: list[StorageUnit], request_of) -> None:
    client = UnitClient(new_unit(units, max_bytes=8 << 30))
    with pytest.raises(PeerUnavailableError, match="closed"):
        request_of(client)
    assert units[0].retained_bytes == 0
    client.close()


def test_a_locator_of_fewer_values_than_rows_is_refused() -> None:
    locator = Locator("u", NO_SEGMENT, 0, (1, 2))
    assert locator_decoder.decode(encode(locator)).of(1).nbytes == 2
    with pytest.raises(ChecksumError, match="none of sample 2"):
        locator_decoder.decode(encode(locator)).of(2)
    for wrong in (replace(locator, nbytes=(-1,)), replace(locator, nbytes=-8), replace(locator, offset=-8)):
        with pytest.raises(MessageError):
            locator_decoder.decode(encode(wrong))


def test_a_range_beyond_its_segment_ends_the_connection(units: list[StorageUnit]) -> None:
    client = UnitClient(new_unit(units))
    segment = client.put([GROUP], [b"value"])
    assert isinstance(segment, str)
    with pytest.raises(PeerUnavailableError, match="closed"):
        client.read([Range(segment=segment, offset=3, nbytes=3)], [memoryview(bytearray(3))])
    client.close()


def test_bytes_that_arrive_damaged_are_not_kept(units: list[StorageUnit]) -> None:
    address = parse_address(new_unit(units))
    channel = connect(address.place, address.port, str(address), b"", Deadline(30))
    with contextlib.closing(channel):
        channel.send(Put(segment=name_of_sent(), group_ids=(GROUP,), nbytes=5, checksum="crc32:00000000"), [b"value"])
        with pytest.raises(PeerUnavailableError, match="closed"):
            channel.receive(locator_decoder)
    assert units[0].retained_bytes == 0


def test_a_put_that_is_repeated_counts_once(units: list[StorageUnit]) -> None:
    address = parse_address(new_unit(units))
    again = Put(segment=name_of_sent(), group_ids=(GROUP,), nbytes=5, checksum=checksum(b"value"))
    for _ in range(2):
        channel = connect(address.place, address.port, str(address), b"", Deadline(30))
        with contextlib.closing(channel):
            channel.send(again, [b"value"])
            assert channel.receive(_done_decoder).retained_bytes == 5


# --- units of a run, which come and go -------------------------------------------------------------------------------


async def join(broker: Broker, address: str, name: str = "store-0.1") -> WorkerId:
    """As a storage worker does with its lease."""
    status = WorkerStatus(
        worker_id=name, kind=WorkerKind.STORE, host="h", pid=1, protocol=PROTOCOL_VERSION, doing="storing", unit=address
    )
    await broker.beat(WorkerId(name), encode(status), ttl_s=60.0)
    return WorkerId(name)


@pytest.fixture
async def run_rows(broker: Broker) -> AsyncIterator[RunRows]:
    rows = RunRows(broker, wait_s=0.5)
    yield rows
    rows.close()


async def test_rows_of_a_dead_unit_are_withdrawn_reported_and_made_again(
    run_rows: RunRows, broker: Broker, units: list[StorageUnit]
) -> None:
    dead = await join(broker, new_unit(units))
    row, kept = row_id(GROUP, 0), row_id(GROUP, 1)
    await run_rows.commit(admit(GROUP))
    await run_rows.commit(Commit(rows=[response(row, [1, 2])]))
    await broker.end_lease(dead)
    await join(broker, new_unit(units), "store-1.1")
    other = RunRows(broker, wait_s=0.5)
    await other.commit(Commit(rows=[response(kept, [3])]))
    units[0].close()
    assert [await ids_of(run_rows, one) for one in (row, kept)] == [None, [3]]
    (event,) = await broker.read(keys.EVENTS, ZERO_ID, count=9)
    assert event_decoder.decode(event.entry.payload) == RowsMissing(row_ids=(row,))
    assert (await run_rows.commit(Commit(rows=[response(row, [4])]))).inserted == (True,)
    assert await ids_of(run_rows, row) == [4]
    assert await broker.length(keys.EVENTS) == 1
    other.close()


async def test_a_unit_that_holds_its_lease_and_does_not_answer_loses_no_row(
    run_rows: RunRows, broker: Broker, units: list[StorageUnit]
) -> None:
    await join(broker, new_unit(units))
    row = row_id(GROUP, 0)
    await run_rows.commit(admit(GROUP))
    await run_rows.commit(Commit(rows=[response(row, [1, 2])]))
    units[0].close()
    with pytest.raises(PeerUnavailableError):
        await run_rows.read_rows([row], BOTH)
    (held,) = await broker.read_rows([row], BOTH)
    assert held.keys() == set(BOTH)
    assert await broker.length(keys.EVENTS) == 0


async def test_a_write_waits_for_a_unit_with_room_and_no_longer_than_it_may(
    run_rows: RunRows, broker: Broker, units: list[StorageUnit]
) -> None:
    write = Commit(rows=[response(row_id(GROUP, 0), [1, 2])])
    await run_rows.commit(admit(GROUP))
    with pytest.raises(PeerUnavailableError, match="there are none"):
        await run_rows.commit(write)
    await join(broker, new_unit(units, max_bytes=7))
    with pytest.raises(PeerUnavailableError, match="full"):
        await run_rows.commit(write)
    patient = RunRows(broker, wait_s=60.0)
    async with asyncio.TaskGroup() as tasks:
        written = tasks.create_task(patient.commit(write))
        await asyncio.sleep(0)
        await join(broker, new_unit(units), "store-1.1")
    assert written.result().inserted == (True,)
    patient.close()


async def test_a_unit_frees_what_the_broker_dropped(broker: Broker) -> None:
    worker = StorageWorker(broker, Endpoint(), max_bytes=1 << 20)
    serving = asyncio.create_task(worker.run())
    while worker.activity().doing != "storing":  # noqa: ASYNC110 a lease looks at it in turns, too
        await asyncio.sleep(0.01)
    await join(broker, worker.activity().unit)
    rows, kept = RunRows(broker, wait_s=5.0), group_id(0, 1)
    await rows.commit(admit(GROUP, kept))
    await rows.commit(Commit(rows=[response(row_id(group, 0), [1, 2]) for group in (GROUP, kept)]))
    assert worker.activity().counters == {"retained_bytes": 32, "freed_bytes": 0}
    await broker.drop_groups([GROUP])
    await worker.sweep()
    assert worker.activity().counters["retained_bytes"] == 32, "the two groups were written together"
    await broker.drop_groups([kept])
    await worker.sweep()
    assert worker.activity().counters == {"retained_bytes": 0, "freed_bytes": 32}
    rows.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
