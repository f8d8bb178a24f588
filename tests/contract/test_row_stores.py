"""One contract over both row stores, each over every broker: the broker's hashes, and storage units beside it."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from transport.broker import keys
from transport.broker.base import ZERO_ID, Ack, Append, Block, Broker, Commit, Entry, GroupWrite, RowWrite
from transport.errors import ChecksumError, MessageError, PeerRejectedError, PeerUnavailableError, SegmentSpaceError
from transport.rows import BrokerRows, RowStore, decode_array, encode_array
from transport.segments import open_segment, path_of, read_ranges, read_segments
from transport.tensors.endpoint import Endpoint
from transport.tensors.manifest import checksum
from transport.tensors.shm import SHARED_MEMORY
from transport.types import Column, GroupId, RowId, TaskSpec, group_id, row_id
from transport.unit_rows import UNIT_COLUMNS, SegmentLocator, UnitRows, decode_locator
from transport.units import GroupParts, Part, Range, StorageUnit, UnitClient
from transport.user_columns import decode_table, decode_value, encode_value, encode_values

GROUP = group_id(0, 0)
VALUE = GroupParts(group_id=GROUP, parts=(Part(key="key", nbytes=5, checksum=checksum(b"value")),))
BOTH = (Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS)


@pytest.fixture
def units() -> Iterator[list[StorageUnit]]:
    """Started by the tests that want them, closed here."""
    started: list[StorageUnit] = []
    yield started
    for unit in started:
        unit.close()


def new_unit(units: list[StorageUnit], max_bytes: int = 1 << 20) -> str:
    units.append(StorageUnit(max_bytes=max_bytes))
    return units[-1].start()


@pytest.fixture(params=["broker", "units"])
async def rows(request: pytest.FixtureRequest, broker: Broker, units: list[StorageUnit]) -> AsyncIterator[RowStore]:
    if request.param == "broker":
        yield BrokerRows(broker)
        return
    store = UnitRows(broker, [new_unit(units), new_unit(units)])
    yield store
    store.close()


def admit(*groups: GroupId, size: int = 2) -> Commit:
    prompt = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, [7, 8])}
    return Commit(groups=[GroupWrite(group_id=group, size=size, columns=prompt) for group in groups])


def response(row: RowId, ids: list[int], *, told: str = "") -> RowWrite:
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, [-0.5] * len(ids)),
    }
    told_to = [Append(stream=keys.EVENTS, entry=Entry(fields={"told": told}))] if told else []
    return RowWrite(row_id=row, columns=columns, on_insert=told_to)


async def ids_of(rows: RowStore, row: RowId) -> list[int] | None:
    (columns,) = await rows.read_rows([row], BOTH)
    return decode_array(Column.RESPONSE_IDS, columns[Column.RESPONSE_IDS]).tolist() if columns else None


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


# --- storage units ----------------------------------------------------------------------------------------------------


async def test_the_broker_holds_no_bulky_column(broker: Broker, units: list[StorageUnit]) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    await rows.commit(admit(GROUP))
    row = row_id(GROUP, 0)
    await rows.commit(Commit(rows=[response(row, list(range(1000)))]))
    (held,) = await broker.read_rows([row], list(UNIT_COLUMNS))
    assert all(len(raw) < 250 for raw in held.values())
    assert units[0].retained_bytes == 8000
    rows.close()


async def test_a_lost_insert_takes_its_bytes_back(broker: Broker, units: list[StorageUnit]) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    await rows.commit(admit(GROUP))
    for ids in ([1, 2], [3, 4, 5]):
        await rows.commit(Commit(rows=[response(row_id(GROUP, 0), ids)]))
    assert units[0].retained_bytes == 16
    rows.close()


async def test_another_unit_takes_over_from_one_that_is_full_or_gone(broker: Broker, units: list[StorageUnit]) -> None:
    addresses = [new_unit(units), new_unit(units, max_bytes=8)]
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
    rows.add_unit(new_unit(units))
    rows.remove_unit(addresses[0])
    await rows.commit(Commit(rows=[response(row_id(groups[0], 1), [1, 2])]))
    assert await ids_of(rows, row_id(groups[0], 1)) == [1, 2]
    await rows.drop_groups(groups)  # the unit that is gone does not stop it
    assert units[2].retained_bytes == 0
    rows.close()


async def test_rows_of_a_removed_unit_stay_readable(broker: Broker, units: list[StorageUnit]) -> None:
    first = new_unit(units)
    rows = UnitRows(broker, [first])
    await rows.commit(admit(GROUP))
    await rows.commit(Commit(rows=[response(row_id(GROUP, 0), [1])]))
    rows.add_unit(new_unit(units))
    rows.remove_unit(first)
    await rows.commit(Commit(rows=[response(row_id(GROUP, 1), [2])]))
    other = UnitRows(broker, [])  # a reader needs no list of units
    assert [await ids_of(other, row_id(GROUP, sample)) for sample in (0, 1)] == [[1], [2]]
    await rows.drop_groups([GROUP])
    assert [unit.retained_bytes for unit in units] == [0, 0]
    rows.close()
    other.close()


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
    units.append(StorageUnit(max_bytes=100, endpoint=Endpoint(secret=b"right")))
    address = units[-1].start()
    client = UnitClient(address, secret=b"wrong")
    with pytest.raises(PeerRejectedError):
        client.put([VALUE], [b"value"])
    friend = UnitClient(address, secret=b"right")
    friend.put([VALUE], [b"value"])
    assert units[-1].retained_bytes == 5
    friend.close()


def test_a_value_of_another_size_or_content_than_located_is_refused(units: list[StorageUnit]) -> None:
    client = UnitClient(new_unit(units))
    client.put([VALUE], [b"value"])
    for part in (Part(key="key", nbytes=1 << 40, checksum=""), Part(key="key", nbytes=5, checksum="crc32:00000000")):
        with pytest.raises(ChecksumError):
            client.get([part])
    client.close()


# --- blocks of new rows


def ids_block(groups: list[GroupId], values: np.ndarray, size: int = 2) -> Block:
    return Block(group_ids=groups, size=size, columns={Column("x_ids"): encode_values(values)})


async def x_ids_of(rows: RowStore, row_ids: list[RowId]) -> list[list[int] | None]:
    column = Column("x_ids")
    found = await rows.read_views(row_ids, [column])
    return [np.asarray(decode_value(column, row[column])).tolist() if row else None for row in found]


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


async def test_a_block_happens_only_while_its_delivery_is_held(rows: RowStore) -> None:
    lost = Ack(queue="plans:nobody", entry_id="1-1")
    block = ids_block([GROUP], np.array([[1], [2]]))
    result = await rows.commit(Commit(blocks=[block], acks=[lost], if_held=True))
    assert result.inserted == (False, False)
    assert await x_ids_of(rows, block.row_ids()) == [None, None]


async def test_a_block_that_does_not_fit_is_refused_whole(rows: RowStore) -> None:
    good = encode_values(np.zeros((2, 3)))
    for columns, error in (
        ({Column("x_ids"): [(b"\x05\x01\0\0", b"abc"), good[0]]}, MessageError),
        ({Column("x_ids"): good[:1]}, ValueError),
        ({Column.RESPONSE_IDS: [(b"abcd",), (b"abcd",)]}, ValueError),
        ({}, ValueError),
    ):
        with pytest.raises(error):
            await rows.commit(Commit(blocks=[Block(group_ids=[GROUP], size=2, columns=columns)]))
    assert await rows.read_rows([row_id(GROUP, 0)], list(Column)) == [{}]


# --- storage units in shared memory


@pytest.fixture
def large() -> np.ndarray:
    """[4 rows, 20,000 numbers]: 160,000 bytes a group of two."""
    return np.random.default_rng(0).integers(0, 1 << 30, (4, 20_000)).astype(np.int32)


GROUPS = [group_id(0, 0), group_id(0, 1)]


def segments_of(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Of units in this process, whether in use or waiting for their next writer."""
    return sorted(directory.glob(f"streamrl-rows@{os.getpid()}@*"))


async def held_segments(broker: Broker, block: Block) -> set[str]:
    held = await broker.read_rows(block.row_ids(), list(block.columns))
    locators = [decode_locator(raw) for row in held for raw in row.values()]
    return {at.segment for at in locators if isinstance(at, SegmentLocator)}


async def test_large_values_go_through_shared_memory_and_small_locators(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    (held,) = await broker.read_rows([row_id(GROUP, 0)], [Column("x_ids")])
    assert len(held[Column("x_ids")]) <= 64
    assert len(await held_segments(broker, block)) == 1
    units[0].close()  # its files are gone with it: what is read below came before
    with pytest.raises(PeerUnavailableError):
        await x_ids_of(rows, block.row_ids())
    assert segments_of() == []
    rows.close()


async def test_rows_are_read_without_asking_the_unit(
    broker: Broker, units: list[StorageUnit], large: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    monkeypatch.setattr(units[0], "_get", None)
    found = await x_ids_of(rows, block.row_ids()[::-1])
    assert found == large[::-1].tolist()
    rows.close()


async def test_rows_of_one_shape_are_one_array_without_a_copy(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    column = Column("x_ids")
    rows = UnitRows(broker, [new_unit(units), new_unit(units)])
    groups = [group_id(0, slot) for slot in range(40)]
    wide = np.tile(large, (20, 1))[:, :4_999]  # 19,996 bytes: padded between two values
    block = ids_block(groups, wide)
    await rows.commit(Commit(blocks=[block]))
    views = [row[column] for row in await rows.read_views(block.row_ids(), [column])]
    table = decode_table(column, views)
    assert isinstance(table, np.ndarray)
    assert np.array_equal(table, wide)
    assert np.shares_memory(table, np.frombuffer(views[3], np.uint8))
    assert not table.flags.writeable
    some = [views[place] for place in (0, 5, 2, 2)]
    assert np.array_equal(np.asarray(decode_table(column, some)), wide[[0, 5, 2, 2]])
    mixed = [views[0], encode_value(np.array([1, 2]))]
    assert [np.size(value) for value in decode_table(column, mixed)] == [4_999, 2]
    assert decode_table(column, [encode_value("a")] * 2) == ["a", "a"]
    assert decode_table(column, []) == []
    rows.close()


async def test_a_reader_on_another_host_asks_the_unit(
    broker: Broker, units: list[StorageUnit], large: np.ndarray, tmp_path: Path
) -> None:
    address = new_unit(units)
    rows = UnitRows(broker, [address])
    elsewhere = UnitRows(broker, [], directory=tmp_path)
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    found = await x_ids_of(elsewhere, block.row_ids())
    assert found == large.tolist()
    unit = UnitClient(address)
    (segment,) = await held_segments(broker, block)
    with pytest.raises((ChecksumError, PeerUnavailableError)):
        unit.read([Range(segment=segment, offset=1 << 30, nbytes=8)])
    assert unit.read([Range(segment="1@000000000000", offset=0, nbytes=8)]) == [None]
    unit.close()
    rows.close()
    elsewhere.close()


async def test_a_writer_that_cannot_reach_the_segments_sends_its_bytes(
    broker: Broker, units: list[StorageUnit], large: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = new_unit(units)
    elsewhere = UnitRows(broker, [address], directory=tmp_path)  # the same host by name, another /dev/shm
    first = ids_block(GROUPS[:1], large[:2])
    await elsewhere.commit(Commit(blocks=[first]))
    assert units[0].retained_bytes == sum(len(encode_value(value)) for value in large[:2])
    monkeypatch.setattr("transport.units.host_id", lambda: "another")
    second = ids_block(GROUPS[1:], large[2:])
    await elsewhere.commit(Commit(blocks=[second]))
    assert await held_segments(broker, first) | await held_segments(broker, second) == set()
    found = await x_ids_of(elsewhere, first.row_ids() + second.row_ids())
    assert found == large.tolist()
    elsewhere.close()


async def test_full_shared_memory_leaves_the_bytes_to_the_unit(
    broker: Broker, units: list[StorageUnit], large: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise SegmentSpaceError(1, "nothing is free")

    monkeypatch.setattr("transport.segments.choose_directory", full)
    rows = UnitRows(broker, [new_unit(units)])
    before = ids_block(GROUPS[:1], large[:2])
    await rows.commit(Commit(blocks=[before]))
    monkeypatch.undo()

    def fills_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transport.unit_rows.write_buffers", fills_up)
    while_writing = ids_block(GROUPS[1:], large[2:])
    await rows.commit(Commit(blocks=[while_writing]))
    assert await held_segments(broker, before) | await held_segments(broker, while_writing) == set()
    found = await x_ids_of(rows, before.row_ids() + while_writing.row_ids())
    assert found == large.tolist()
    await rows.drop_groups(GROUPS)
    assert units[0].retained_bytes == 0
    rows.close()


async def test_what_a_reader_got_outlives_the_rows(broker: Broker, units: list[StorageUnit], large: np.ndarray) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    views = await rows.read_views(block.row_ids(), [Column("x_ids")])
    assert await rows.drop_groups(GROUPS) >= large.nbytes
    later = ids_block([group_id(1, 0), group_id(1, 1)], -large)
    await rows.commit(Commit(blocks=[later]))  # into the same file
    assert len(segments_of()) == 1
    values = [decode_value(Column("x_ids"), view[Column("x_ids")]) for view in views]
    assert np.array_equal(np.stack([np.asarray(value) for value in values]), large)
    assert await x_ids_of(rows, block.row_ids()) == [None] * 4
    rows.close()


async def test_a_segment_in_use_is_not_reused_and_an_old_locator_finds_nothing(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    (segment,) = await held_segments(broker, block)
    with open_segment(segment) as fd:
        await rows.drop_groups(GROUPS)
        await rows.commit(Commit(blocks=[ids_block([group_id(1, 0), group_id(1, 1)], -large)]))
        value = memoryview(bytearray(len(encode_value(large[0]))))
        read_ranges(fd, [(0, len(value))], [value])
        assert np.array_equal(decode_value(Column("x_ids"), value), large[0])
    assert read_segments([(segment, 0, 8)], [memoryview(bytearray(8))]) == [False]
    rows.close()


async def test_a_segment_goes_with_the_last_of_its_groups(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    whole = units[0].retained_bytes
    await rows.drop_groups(GROUPS[:1])
    assert units[0].retained_bytes == whole
    assert [value is None for value in await x_ids_of(rows, block.row_ids())] == [True, True, False, False]
    await rows.drop_groups(GROUPS[1:])
    assert units[0].retained_bytes == 0
    rows.close()


async def test_a_full_unit_takes_no_segment_and_keeps_no_spare_beyond_its_bound(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    rows = UnitRows(broker, [new_unit(units, max_bytes=400_000)])
    await rows.commit(Commit(blocks=[ids_block(GROUPS, large)]))
    with pytest.raises(PeerUnavailableError, match="full"):
        await rows.commit(Commit(blocks=[ids_block([group_id(1, 0), group_id(1, 1)], large)]))
    await rows.drop_groups(GROUPS)
    await rows.commit(Commit(blocks=[ids_block([group_id(2, 0)], np.tile(large[:1], (2, 2))[:, :15_000])]))
    assert sum(path.stat().st_size for path in segments_of()) <= 400_000
    rows.close()


async def test_large_rows_that_lose_give_their_segment_back(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    rows = UnitRows(broker, [new_unit(units)])
    block = ids_block(GROUPS, large)
    await rows.commit(Commit(blocks=[block]))
    retained = units[0].retained_bytes
    assert (await rows.commit(Commit(blocks=[ids_block(GROUPS, -large)]))).inserted == (False,) * 4
    assert units[0].retained_bytes == retained
    found = await x_ids_of(rows, block.row_ids())
    assert found == large.tolist()
    rows.close()


async def test_bytes_of_a_writer_that_died_before_its_commit_go_with_their_group(
    broker: Broker, units: list[StorageUnit]
) -> None:
    address = new_unit(units)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _DYING_WRITER, address, GROUP)
    async with asyncio.timeout(30):
        assert await child.wait() == -signal.SIGKILL
    assert units[0].retained_bytes == 100_000
    rows = UnitRows(broker, [address])
    assert await x_ids_of(rows, [row_id(GROUP, 0)]) == [None]
    await rows.drop_groups([GROUP])
    assert units[0].retained_bytes == 0
    rows.close()


_DYING_WRITER = """
import os, signal, sys
from transport.segments import open_segment, write_buffers
from transport.units import UnitClient
with open_segment(UnitClient(sys.argv[1]).allocate([sys.argv[2]], 100_000), write=True) as fd:
    write_buffers(fd, [bytes(50_000)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_unit_that_was_killed_are_swept_by_the_next(units: list[StorageUnit]) -> None:
    child = subprocess.run([sys.executable, "-c", _DYING_UNIT], capture_output=True, text=True, timeout=30, check=False)
    left = path_of(child.stdout.strip())
    assert left.exists()
    client = UnitClient(new_unit(units))
    client.allocate([GROUP], 100)
    assert not left.exists()
    client.close()


_DYING_UNIT = """
import os, signal
from transport.segments import Segments
print(Segments().take(100_000, 1 << 20), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["../../etc/passwd", "1@zz", "", "1@0123456789ab/../x"])
def test_no_message_opens_a_file_that_is_no_segment(name: str) -> None:
    with pytest.raises(MessageError):
        read_segments([(name, 0, 1)], [memoryview(bytearray(1))])
