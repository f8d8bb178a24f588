"""Rows in storage units of the same host: large values go through shared memory."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.stored_rows import GROUP, ids_block, new_unit, x_ids_of
from transport.broker.base import Block, Broker, Commit
from transport.contracts.types import Column, group_id, row_id
from transport.errors import ChecksumError, MessageError, PeerUnavailableError, SegmentSpaceError
from transport.rows.columns import decode_table, decode_value, encode_value
from transport.rows.segments import Range, open_segment, path_of, read_ranges, read_segments
from transport.rows.unit_rows import UnitRows, locator_decoder
from transport.rows.units import Full, StorageUnit, UnitClient
from transport.tensors.base import Deadline
from transport.tensors.shm import SHARED_MEMORY

GROUPS = [group_id(0, 0), group_id(0, 1)]


@pytest.fixture
def large() -> np.ndarray:
    """[4 rows, 20,000 numbers]: 160,000 bytes a group of two."""
    return np.random.default_rng(0).integers(0, 1 << 30, (4, 20_000)).astype(np.int32)


@pytest.fixture
async def block(unit_rows: UnitRows, large: np.ndarray) -> Block:
    """``large``, stored."""
    made = ids_block(GROUPS, large)
    await unit_rows.commit(Commit(blocks=[made]))
    return made


def segments_of(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Of units in this process, whether in use or waiting for their next writer."""
    return sorted(directory.glob(f"streamrl-rows@{os.getpid()}@*"))


async def held_segments(broker: Broker, block: Block) -> set[str]:
    """Those in shared memory."""
    held = await broker.read_rows(block.row_ids(), list(block.columns))
    names = {locator_decoder.decode(raw).segment for row in held for raw in row.values()}
    return {name for name in names if not name.startswith("0@")}


async def test_a_fifo_under_the_name_of_a_segment_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(path_of("1@0123456789ab", tmp_path))
    for write in (False, True):
        with pytest.raises(PermissionError), open_segment("1@0123456789ab", write=write, directory=tmp_path):
            pass
    unit = StorageUnit(max_bytes=1 << 20, directory=tmp_path)
    client = UnitClient(unit.start())
    assert client.allocate([GROUP], 1000), "its first segment sweeps"
    client.close()
    unit.close()


async def test_large_values_go_through_shared_memory_and_small_locators(
    unit_rows: UnitRows, block: Block, broker: Broker, units: list[StorageUnit]
) -> None:
    (held,) = await broker.read_rows([row_id(GROUP, 0)], [Column("x_ids")])
    assert len(held[Column("x_ids")]) <= 64
    assert len(await held_segments(broker, block)) == 1
    units[0].close()  # its files are gone with it: what is read below came before
    with pytest.raises(PeerUnavailableError):
        await x_ids_of(unit_rows, block.row_ids())
    assert segments_of() == []


async def test_rows_are_read_without_asking_the_unit(
    unit_rows: UnitRows, block: Block, units: list[StorageUnit], large: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units[0], "_get", None)
    found = await x_ids_of(unit_rows, block.row_ids()[::-1])
    assert found == large[::-1].tolist()


async def test_rows_of_one_shape_are_one_array_without_a_copy(
    broker: Broker, units: list[StorageUnit], large: np.ndarray
) -> None:
    column = Column("x_ids")
    all_of_it = 1 << 21  # which unit gets how many groups hangs on the ports
    rows = UnitRows(broker, [new_unit(units, all_of_it), new_unit(units, all_of_it)])
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
        unit.read([Range(segment=segment, offset=1 << 30, nbytes=8)], [memoryview(bytearray(8))])
    gone = Range(segment="1@000000000000", offset=0, nbytes=8)
    assert unit.read([gone], [memoryview(bytearray(8))]) == [False]
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
    monkeypatch.setattr("transport.rows.units.host_id", lambda: "another")
    second = ids_block(GROUPS[1:], large[2:])
    await elsewhere.commit(Commit(blocks=[second]))
    assert await held_segments(broker, first) | await held_segments(broker, second) == set()
    found = await x_ids_of(elsewhere, first.row_ids() + second.row_ids())
    assert found == large.tolist()
    elsewhere.close()


async def test_full_shared_memory_leaves_the_bytes_to_the_unit(
    unit_rows: UnitRows, broker: Broker, units: list[StorageUnit], large: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise SegmentSpaceError(1, "nothing is free")

    monkeypatch.setattr("transport.rows.segments.choose_directory", full)
    before = ids_block(GROUPS[:1], large[:2])
    await unit_rows.commit(Commit(blocks=[before]))
    monkeypatch.undo()

    def fills_up(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transport.rows.unit_rows.write_buffers", fills_up)
    while_writing = ids_block(GROUPS[1:], large[2:])
    await unit_rows.commit(Commit(blocks=[while_writing]))
    assert await held_segments(broker, before) | await held_segments(broker, while_writing) == set()
    found = await x_ids_of(unit_rows, before.row_ids() + while_writing.row_ids())
    assert found == large.tolist()
    await unit_rows.drop_groups(GROUPS)
    assert units[0].retained_bytes == 0


async def test_what_a_reader_got_outlives_the_rows(unit_rows: UnitRows, block: Block, large: np.ndarray) -> None:
    views = await unit_rows.read_views(block.row_ids(), [Column("x_ids")])
    assert await unit_rows.drop_groups(GROUPS) >= large.nbytes
    later = ids_block([group_id(1, 0), group_id(1, 1)], -large)
    await unit_rows.commit(Commit(blocks=[later]))  # into the same file
    assert len(segments_of()) == 1
    values = [decode_value(Column("x_ids"), view[Column("x_ids")]) for view in views]
    assert np.array_equal(np.stack([np.asarray(value) for value in values]), large)
    assert await x_ids_of(unit_rows, block.row_ids()) == [None] * 4


async def test_a_segment_in_use_is_not_reused_and_an_old_locator_finds_nothing(
    unit_rows: UnitRows, block: Block, broker: Broker, large: np.ndarray
) -> None:
    (segment,) = await held_segments(broker, block)
    with open_segment(segment) as fd:
        await unit_rows.drop_groups(GROUPS)
        await unit_rows.commit(Commit(blocks=[ids_block([group_id(1, 0), group_id(1, 1)], -large)]))
        value = memoryview(bytearray(len(encode_value(large[0]))))
        read_ranges(fd, [(0, len(value))], [value])
        assert np.array_equal(decode_value(Column("x_ids"), value), large[0])
    assert read_segments([Range(segment=segment, offset=0, nbytes=8)], [memoryview(bytearray(8))]) == [False]


async def test_a_segment_goes_with_the_last_of_its_groups(
    unit_rows: UnitRows, block: Block, units: list[StorageUnit]
) -> None:
    whole = units[0].retained_bytes
    await unit_rows.drop_groups(GROUPS[:1])
    assert units[0].retained_bytes == whole
    assert [value is None for value in await x_ids_of(unit_rows, block.row_ids())] == [True, True, False, False]
    await unit_rows.drop_groups(GROUPS[1:])
    assert units[0].retained_bytes == 0


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
    unit_rows: UnitRows, block: Block, units: list[StorageUnit], large: np.ndarray
) -> None:
    retained = units[0].retained_bytes
    assert (await unit_rows.commit(Commit(blocks=[ids_block(GROUPS, -large)]))).inserted == (False,) * 4
    assert units[0].retained_bytes == retained
    found = await x_ids_of(unit_rows, block.row_ids())
    assert found == large.tolist()


async def test_bytes_of_a_writer_that_died_before_its_commit_go_with_their_group(
    broker: Broker, units: list[StorageUnit]
) -> None:
    address = new_unit(units)
    await die(address, "having written")
    assert units[0].retained_bytes == 100_000
    rows = UnitRows(broker, [address])
    assert await x_ids_of(rows, [row_id(GROUP, 0)]) == [None]
    await rows.drop_groups([GROUP])
    assert units[0].retained_bytes == 0
    rows.close()


async def test_a_segment_whose_writer_died_while_it_wrote_is_freed_with_its_connection(
    units: list[StorageUnit],
) -> None:
    address = new_unit(units, max_bytes=150_000)
    await die(address, "writing")
    client, deadline = UnitClient(address), Deadline(60)
    while not isinstance(segment := client.allocate([GROUP], 100_000), str):  # until that connection's end is seen
        assert deadline.remaining_s()
    assert units[0].retained_bytes == 100_000
    other = UnitClient(address)
    assert not other.keep(segment), "it is of another connection"
    assert client.keep(segment)
    client.close()
    assert isinstance(other.allocate([GROUP], 100_000), Full), "what is written stays"
    other.close()


async def die(address: str, when: str) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _DYING_WRITER, address, GROUP, when)
    async with asyncio.timeout(60):
        assert await child.wait() == -signal.SIGKILL


_DYING_WRITER = """
import os, signal, sys
from transport.rows.segments import open_segment, write_buffers
from transport.rows.units import UnitClient
client = UnitClient(sys.argv[1])
segment = client.allocate([sys.argv[2]], 100_000)
with open_segment(segment, write=True) as fd:
    write_buffers(fd, [bytes(50_000)])
    assert sys.argv[3] == "writing" or client.keep(segment)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_unit_that_was_killed_are_swept_by_the_next(units: list[StorageUnit]) -> None:
    child = subprocess.run([sys.executable, "-c", _DYING_UNIT], capture_output=True, text=True, timeout=90, check=False)
    left = path_of(child.stdout.strip())
    assert left.exists()
    client = UnitClient(new_unit(units))
    client.allocate([GROUP], 100)
    assert not left.exists()
    client.close()


_DYING_UNIT = """
import os, signal
from transport.rows.segments import Segments
print(Segments().take(100_000, 1 << 20), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["../../etc/passwd", "1@zz", "", "1@0123456789ab/../x"])
def test_no_message_opens_a_file_that_is_no_segment(name: str) -> None:
    with pytest.raises(MessageError):
        read_segments([Range(segment=name, offset=0, nbytes=1)], [memoryview(bytearray(1))])
