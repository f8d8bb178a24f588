"""The journal on a real directory: torn tails, damage, snapshots, pruning."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator.journal import (
    Journal,
    JournalError,
    JournalHeldError,
    Recovered,
    newest_epoch,
    read_records,
    read_whole_records,
    recover,
    sole_writer,
)
from transport.contracts.messages import BrokerUsage, JournalRecord
from transport.errors import DirectoryError, FencedError


def record(seq: int) -> JournalRecord:
    return JournalRecord(seq=seq, now_s=seq / 10, event=BrokerUsage(retained_bytes=seq), cursor=f"{seq}-7")


class Shelf:
    """Opens journals in one directory, and closes at the end what a test left open as a kill would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.opened: list[Journal] = []

    def open(self, *, epoch: int = 0) -> tuple[Journal, Recovered]:
        journal, recovered = Journal.open(self.directory, epoch=epoch)
        self.opened.append(journal)
        return journal, recovered

    def write(self, first: int, last: int, *, epoch: int = 0) -> Journal:
        journal, _ = self.open(epoch=epoch)
        journal.append([record(seq) for seq in range(first, last + 1)])
        return journal


@pytest.fixture
def shelf(tmp_path):
    shelf = Shelf(tmp_path)
    yield shelf
    for journal in shelf.opened:
        journal.close()


def only_segment(directory: Path) -> Path:
    (path,) = directory.glob("segment-*.log")
    return path


def test_a_new_directory_is_empty(shelf, tmp_path):
    _, recovered = Shelf(tmp_path / "new" / "journal").open()
    assert (recovered.snapshot, recovered.seq, recovered.cursor, recovered.tail) == (None, 0, "0-0", ())


def test_what_was_appended_is_there_after_a_kill(shelf, tmp_path):
    shelf.write(1, 3)  # never closed
    journal, recovered = shelf.open()
    assert recovered.tail == tuple(record(seq) for seq in (1, 2, 3))
    assert (recovered.seq, recovered.cursor, recovered.now_s) == (3, "3-7", 0.3)
    journal.append([record(4)])
    assert [one.seq for one in read_records(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("kept_bytes", [1, 7, 8, 20])
def test_a_torn_tail_is_cut_and_writing_goes_on(shelf, tmp_path, kept_bytes):
    shelf.write(1, 2).close()
    path = only_segment(tmp_path)
    torn = path.read_bytes() + path.read_bytes()[:kept_bytes]
    path.write_bytes(torn)
    assert [one.seq for one in read_whole_records(tmp_path)] == [1, 2]
    assert path.read_bytes() == torn, "who only reads changes nothing"
    journal, recovered = shelf.open()
    assert (recovered.seq, recovered.cut_bytes) == (2, kept_bytes)
    journal.append([record(3)])
    _, again = shelf.open()
    assert (again.seq, again.cut_bytes) == (3, 0)


def test_a_tail_of_zeros_is_torn_too(shelf, tmp_path):
    shelf.write(1, 2).close()
    path = only_segment(tmp_path)
    path.write_bytes(path.read_bytes() + bytes(100))
    _, recovered = shelf.open()
    assert (recovered.seq, recovered.cut_bytes) == (2, 100)


def test_damage_in_the_middle_is_named_with_its_place(shelf, tmp_path):
    shelf.write(1, 3).close()
    path = only_segment(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[12] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(JournalError, match="damaged at byte 0") as caught:
        shelf.open()
    assert caught.value.path == path
    with pytest.raises(JournalError, match="checksum does not hold"):
        list(read_whole_records(tmp_path))


def test_damage_in_an_older_segment_is_never_taken_for_a_torn_tail(shelf, tmp_path):
    journal = shelf.write(1, 2)
    journal.close()
    journal.append([record(3)])
    first = min(tmp_path.glob("segment-*.log"))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match="cut short"):
        shelf.open()


def test_a_missing_segment_is_a_gap(shelf, tmp_path):
    journal = shelf.write(1, 1)
    for seq in (2, 3):
        journal.close()
        journal.append([record(seq)])
    sorted(tmp_path.glob("segment-*.log"))[1].unlink()
    with pytest.raises(JournalError, match="event 3 stands where 2 belongs"):
        shelf.open()


def test_a_record_out_of_order_is_a_bug_of_the_caller(shelf, tmp_path):
    journal = shelf.write(1, 1)
    with pytest.raises(ValueError, match="does not follow"):
        journal.append([record(3)])


def test_recovery_is_the_newest_snapshot_and_what_follows_it(shelf, tmp_path):
    journal = shelf.write(1, 2)
    journal.snapshot(b"two", 2)
    journal.append([record(3), record(4)])
    journal.snapshot(b"three", 3)  # made while 4 was already written
    _, recovered = shelf.open()
    assert (recovered.snapshot, recovered.snapshot_seq) == (b"three", 3)
    assert recovered.tail == (record(4),)


def test_a_snapshot_without_a_tail_knows_its_cursor(shelf, tmp_path):
    journal = shelf.write(1, 2)
    journal.snapshot(b"two", 2)
    _, recovered = shelf.open()
    assert (recovered.seq, recovered.cursor, recovered.now_s, recovered.tail) == (2, "2-7", 0.2, ())


def test_a_damaged_snapshot_falls_back_to_the_one_before(shelf, tmp_path):
    journal = shelf.write(1, 2)
    journal.snapshot(b"zero", 0)
    journal.snapshot(b"two", 2)
    newest = max(tmp_path.glob("snapshot-*.bin"))
    newest.write_bytes(newest.read_bytes()[:-1])
    _, recovered = shelf.open()
    assert (recovered.snapshot, recovered.seq) == (b"zero", 2)
    min(tmp_path.glob("snapshot-*.bin")).write_bytes(b"x")
    with pytest.raises(JournalError, match="snapshot"):
        shelf.open()


def test_history_is_kept(shelf, tmp_path):
    journal, _ = Shelf(tmp_path / "all").open()
    journal.snapshot(b"0", 0)
    for seq in range(1, 5):
        journal.append([record(seq)])
        journal.snapshot(str(seq).encode(), seq)
    assert [one.seq for one in read_records(tmp_path / "all")] == [1, 2, 3, 4]
    max((tmp_path / "all").glob("snapshot-*.bin")).write_bytes(b"x")
    _, recovered = Shelf(tmp_path / "all").open()
    assert (recovered.snapshot, recovered.tail) == (b"3", (record(4),)), "the older snapshot serves"
    assert recovered.cursor == "4-7"


def test_a_full_disk_is_named_and_loses_nothing_that_was_written(shelf, tmp_path):
    journal = shelf.write(1, 2)
    journal.snapshot(b"state", 2)
    following = tmp_path / "segment-000000000003.log"
    following.symlink_to("/dev/full")
    with pytest.raises(DirectoryError, match="No space left on device; free some space"):
        journal.append([record(3)])
    with pytest.raises(DirectoryError):
        journal.close()
    following.unlink()
    _, recovered = shelf.open()
    assert (recovered.snapshot, recovered.seq) == (b"state", 2)


def retold(seq: int) -> JournalRecord:
    """Another event at the same place."""
    return JournalRecord(seq=seq, now_s=seq / 10, event=BrokerUsage(retained_bytes=1000 + seq), cursor=f"{seq}-8")


def test_what_a_writer_adds_after_another_one_began_is_void(shelf, tmp_path):
    old = shelf.write(1, 3, epoch=1)
    new, recovered = shelf.open(epoch=2)
    assert recovered.seq == 3
    old.append([record(4), record(5)])  # it was stopped meanwhile, and goes on
    old.snapshot(b"of the old one", 5)
    old.append([record(6)])
    new.append([retold(4)])
    wanted = [record(1), record(2), record(3), retold(4)]
    assert list(read_records(tmp_path)) == wanted
    assert list(read_whole_records(tmp_path)) == wanted
    third, again = shelf.open(epoch=3)
    assert (again.snapshot, again.tail, again.num_void) == (None, tuple(wanted), 3)
    third.append([retold(5)])
    assert recover(tmp_path).num_void == 0, "it was said at the start that came next"
    assert list(read_records(tmp_path)) == [*wanted, retold(5)]


def test_a_writer_that_began_and_died_before_its_first_record_voids_too(shelf, tmp_path):
    old = shelf.write(1, 3, epoch=1)
    shelf.open(epoch=2)
    old.append([record(4)])
    _, recovered = shelf.open(epoch=3)
    assert (recovered.seq, recovered.num_void) == (3, 1)


def test_a_snapshot_from_before_a_newer_writer_began_counts(shelf):
    old = shelf.write(1, 3, epoch=1)
    old.snapshot(b"three", 3)
    new, _ = shelf.open(epoch=2)
    new.append([retold(4)])
    _, recovered = shelf.open(epoch=3)
    assert (recovered.snapshot, recovered.snapshot_seq, recovered.tail) == (b"three", 3, (retold(4),))


def test_two_snapshots_of_one_place_are_the_newer_writers(shelf):
    shelf.open(epoch=1)[0].snapshot(b"as configured first", 0)
    shelf.open(epoch=2)[0].snapshot(b"as configured now", 0)
    _, recovered = shelf.open(epoch=3)
    assert recovered.snapshot == b"as configured now"


def test_a_torn_end_of_the_writer_before_is_cut_before_the_next_one_begins(shelf, tmp_path):
    shelf.write(1, 2, epoch=1).close()
    path = only_segment(tmp_path)
    path.write_bytes(path.read_bytes() + b"\x20\0\0\0half")
    new, recovered = shelf.open(epoch=2)
    assert recovered.cut_bytes == 8
    new.append([record(3)])
    assert [one.seq for one in read_records(tmp_path)] == [1, 2, 3]


def test_two_writers_of_before_there_were_epochs_are_told_apart_by_who_began_last(shelf, tmp_path):
    old = shelf.write(1, 3)
    new = shelf.write(4, 4)
    old.append([retold(4), retold(5)])
    assert list(read_records(tmp_path)) == [record(1), record(2), record(3), record(4)]
    new.append([record(5)])
    _, recovered = shelf.open(epoch=1)
    assert recovered.seq == 5


def test_nobody_writes_in_an_epoch_that_was_written_in(shelf, tmp_path):
    shelf.write(1, 1, epoch=3)
    assert newest_epoch(tmp_path) == 3
    for epoch in (2, 3):
        with pytest.raises(FencedError):
            shelf.open(epoch=epoch)


async def test_a_start_waits_until_the_writer_before_it_has_left(tmp_path):
    waiting, order = asyncio.Event(), list[str]()

    async def second() -> None:
        waiting.set()
        async with sole_writer(tmp_path):
            order.append("second writes")

    async with asyncio.TaskGroup() as group, sole_writer(tmp_path):
        group.create_task(second())
        await waiting.wait()
        order.append("first writes")
    assert order == ["first writes", "second writes"]


async def test_a_writer_that_does_not_leave_is_named(tmp_path):
    async with sole_writer(tmp_path):
        with pytest.raises(JournalHeldError, match=f"process {os.getpid()} still writes .*kill -9 {os.getpid()}"):
            async with sole_writer(tmp_path, wait_s=0.0):
                pass


async def test_the_lock_of_a_journal_is_no_way_to_another_file(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(DirectoryError):
        async with sole_writer(tmp_path):
            pass
    assert precious.read_text() == "kept"
