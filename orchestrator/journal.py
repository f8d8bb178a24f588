"""The journal: every applied event in the order applied, and snapshots of the state between them.

Owns: files under one directory. Never: what an event means. Invariant: a record that ``append`` returned for survives
the death of this process; recovery gives the newest whole snapshot and exactly the records after it, or a named error.

    journal/
      lock                            held while its writer lives
      snapshot-000000000000.e1.bin    the state before the first event, then after event N, written in epoch 1
      segment-000000000001.e1.log     frames from event 1 on; a new segment begins at every snapshot, and every start
    frame:    length u32 | crc32 u32 | MessagePack JournalRecord
    snapshot: b"SRS1" | seq u64 | crc32 u32 | the state's bytes; written beside, flushed, renamed

A crash can tear the last frames of the last segment: they are cut off, and their commands were never carried out,
because the journal is written first. Damage anywhere else is not a crash's doing and is never skipped.

One writer. It takes its epoch from the broker, which from then on refuses all that an older one commands; then the
lock, for which it waits until the older one is gone; then it reads, and begins a segment in its epoch. On a file system
without locks an older writer that goes on does no harm either: its records are void from the place on where a later
epoch began. No reader returns them, the next start reports how many there were, and the broker refused their commands,
so they had no effect. Source: ours.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple

from transport.contracts.messages import MAX_MESSAGE_BYTES, JournalRecord, MessageDecoder, encode
from transport.errors import FatalError, FencedError, MessageError
from transport.process.files import LockedError, is_locked, locked, replace, writing

_FRAME = struct.Struct("<II")
_SNAPSHOT = struct.Struct("<4sQI")
_MAGIC = b"SRS1"
_decoder = MessageDecoder(JournalRecord)

NO_CURSOR = "0-0"
LOCK_S = 30.0
"""How long a start waits for the writer before it: more than that one takes to flush and leave (``app.FLUSH_S``)."""
LOCK_POLL_S = 0.05


class JournalError(FatalError):
    """History is damaged: ``path`` at byte ``offset`` is not what was written there.

    torn: nothing whole follows in that file, as after a kill, or while it is being written.
    """

    def __init__(self, path: Path, offset: int, reason: str, *, torn: bool = False) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {reason}; put back a copy of it, or begin a new run")
        self.path = path
        self.offset = offset
        self.torn = torn


class JournalHeldError(FatalError):
    """Another orchestrator, ``holder``, writes this journal and does not leave."""

    def __init__(self, directory: Path, holder: str) -> None:
        super().__init__(
            f"process {holder} still writes {directory}: an orchestrator of this run that is stopped, or hangs. End it "
            f"(kill -9 {holder}), then continue with --resume"
        )
        self.holder = holder


class _Part(NamedTuple):
    """A segment or a snapshot. seq: its first event, or the one it was made after.  epoch: of its writer."""

    epoch: int
    seq: int
    path: Path


class _Segment(NamedTuple):
    """A segment as far as it counts. until: where the next one begins, and this one is void; None for the last."""

    first: int
    until: int | None
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a run left behind. snapshot: the state after event ``snapshot_seq``, None in a new directory.

    tail: the records after it, in order.  cursor, now_s: of the last applied event.  cut_bytes: of a torn tail.
    num_void: records of a writer that another one had replaced, which are left out.
    """

    snapshot: bytes | None
    snapshot_seq: int
    tail: tuple[JournalRecord, ...]
    cursor: str = NO_CURSOR
    now_s: float = 0.0
    cut_bytes: int = 0
    num_void: int = 0

    @property
    def seq(self) -> int:
        """Position of the last applied event, 0 when there is none."""
        return self.tail[-1].seq if self.tail else self.snapshot_seq


@asynccontextmanager
async def sole_writer(directory: Path, *, wait_s: float = LOCK_S) -> AsyncGenerator[None]:
    """Hold the lock of the journal in ``directory``, which is made if need be.

    Raises JournalHeldError: another process held it for ``wait_s``.  DirectoryError: it cannot be written.
    """
    deadline_s = asyncio.get_running_loop().time() + wait_s
    while True:
        try:
            lock = _lock(directory)
            break
        except LockedError as error:
            if asyncio.get_running_loop().time() > deadline_s:
                raise JournalHeldError(directory, error.holder) from None
            await asyncio.sleep(LOCK_POLL_S)
    try:
        yield
    finally:
        lock.close()


def _lock(directory: Path) -> IO[bytes]:
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        return locked(directory / "lock")


def is_written(directory: Path) -> bool:
    """Whether a living process holds the lock of ``directory``, a journal's or a run's: the run goes on."""
    return is_locked(directory / "lock")


def is_new(directory: Path) -> bool:
    """Whether there is no history in ``directory``."""
    return not _parts(directory, "snapshot-*.bin")


def newest_epoch(directory: Path) -> int:
    """The highest in which a process wrote there, 0 where none did."""
    found = (*_parts(directory, "segment-*.log"), *_parts(directory, "snapshot-*.bin"))
    return max((part.epoch for part in found), default=0)


class Journal:
    """Open with ``Journal.open``, under ``sole_writer``."""

    def __init__(self, directory: Path, next_seq: int, epoch: int) -> None:
        self._directory = directory
        self._next_seq = next_seq
        self._mark = f".e{epoch}" if epoch else ""
        self._file: FileIO | None = None  # unbuffered: what ``write`` returned for is with the operating system

    @classmethod
    def open(cls, directory: Path, *, epoch: int = 0) -> tuple[Journal, Recovered]:
        """Recover what is there (cutting what is torn or void) and go on behind it.

        epoch: of the writer, above all before it; 0 where there is no other, as in a simulation.
        Raises JournalError; FencedError: a process wrote in this epoch, or a later one.
        """
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        if 0 < epoch <= (newest := newest_epoch(directory)):
            raise FencedError("orchestrator", epoch, newest)
        recovered = recover(directory)
        journal = cls(directory, recovered.seq + 1, epoch)
        if epoch:
            with writing(directory):
                journal._segment()  # what another writer adds from here on is void
        return journal, recovered

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write records, in order, to the operating system.

        Raises: ValueError if one does not follow the last; DirectoryError: the disk is full, or may not be written.
        """
        frames: list[bytes] = []
        for seq, record in enumerate(records, self._next_seq):
            if record.seq != seq:
                raise ValueError(f"record {record.seq} does not follow {seq - 1}")
            payload = encode(record)
            frames.append(_FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
        if frames:
            with writing(self._directory):
                file, rest = self._segment(), memoryview(b"".join(frames))
                while rest:  # a raw file may take less than it is given
                    rest = rest[file.write(bytes(rest)) or 0 :]
            self._next_seq += len(frames)

    def snapshot(self, state: bytes, seq: int) -> None:
        """Keep ``state``, which is that after event ``seq``; records after it may be there already."""
        path = self._directory / f"snapshot-{seq:012d}{self._mark}.bin"
        with writing(self._directory):
            replace(path, _SNAPSHOT.pack(_MAGIC, seq, zlib.crc32(state)) + state)
        self.close()

    def close(self) -> None:
        """Flush the segment to the disk and close it; ``append`` begins another."""
        file, self._file = self._file, None
        if file is None:
            return
        with writing(self._directory):
            try:
                os.fsync(file.fileno())
            finally:
                file.close()

    def _segment(self) -> FileIO:
        if self._file is None:
            path = self._directory / f"segment-{self._next_seq:012d}{self._mark}.log"
            self._file = path.open("ab", buffering=0)
        return self._file


def recover(directory: Path) -> Recovered:
    """The newest whole snapshot and what follows it. Raises JournalError."""
    cut_bytes = _cut_torn_tail(directory)
    snapshot_seq, snapshot = newest_snapshot(directory)
    tail: list[JournalRecord] = []
    cursor, now_s = NO_CURSOR, 0.0
    for record in read_records(directory, from_seq=snapshot_seq):
        cursor, now_s = record.cursor, record.now_s
        if record.seq > snapshot_seq:
            tail.append(record)
    return Recovered(
        snapshot=snapshot,
        snapshot_seq=snapshot_seq,
        tail=tuple(tail),
        cursor=cursor,
        now_s=now_s,
        cut_bytes=cut_bytes,
        num_void=_num_void(directory),
    )


def first_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """The oldest snapshot, where a replay begins: (its seq, its state), or (0, None). Raises JournalError."""
    return next(all_snapshots(directory), (0, None))


def all_snapshots(directory: Path) -> Iterator[tuple[int, bytes]]:
    """(seq, state) of every snapshot, oldest first. Raises JournalError at a damaged one."""
    for part in _snapshots(directory):
        yield _read_snapshot(part.path)


def read_records(directory: Path, *, from_seq: int = 0) -> Iterator[JournalRecord]:
    """Records from ``from_seq`` on, in order, without a gap. Raises JournalError."""
    segments = _segments(directory)
    begin = max((place for place, segment in enumerate(segments) if segment.first <= from_seq), default=0)
    expected: int | None = None
    for segment in segments[begin:]:
        for offset, record in _frames(segment.path, segment.until):
            if expected is not None and record.seq != expected:
                raise JournalError(segment.path, offset, f"event {record.seq} stands where {expected} belongs")
            expected = record.seq + 1
            if record.seq >= from_seq:
                yield record


def newest_snapshot_before(directory: Path, num_records: int) -> tuple[int, bytes] | None:
    """(seq, state) of the newest snapshot with ``num_records`` or more behind it, None where the journal is shorter.

    Counted up to the last snapshot: what follows is some thousand records. Raises JournalError.
    """
    snapshots = _snapshots(directory)
    last = snapshots[-1].seq if snapshots else 0
    before = [part.path for part in snapshots if 0 < part.seq <= last - num_records]
    return _read_snapshot(before[-1]) if before else None


def read_whole_records(directory: Path, *, from_seq: int = 0) -> Iterator[JournalRecord]:
    """All records from ``from_seq`` on, for a reader that is not the writer: of a live run, or after a crash.

    A torn end of the last segment ends it: a write in progress, or one that a kill interrupted. Changes nothing. Raises
    JournalError for damage anywhere else.
    """
    segments = _segments(directory)
    try:
        yield from read_records(directory, from_seq=from_seq)
    except JournalError as error:
        if not error.torn or error.path not in {segment.path for segment in segments[-1:]}:
            raise


def _frames(path: Path, until: int | None = None) -> Iterator[tuple[int, JournalRecord]]:
    """(offset, record) of each record before event ``until``."""
    raw = path.read_bytes()
    offset = 0
    last = -1 if until is None else until - 1
    while offset < len(raw):
        end = _frame_end(raw, offset)
        if end is None:
            torn = not _holds_a_frame(raw, offset + 1)
            raise JournalError(path, offset, "a frame is cut short or its checksum does not hold", torn=torn)
        try:
            record = _decoder.decode(memoryview(raw)[offset + _FRAME.size : end])
        except MessageError as error:
            raise JournalError(path, offset, str(error)) from error
        if until is not None and record.seq >= until:
            return
        yield offset, record
        if record.seq == last:
            return
        offset = end


def _frame_end(raw: bytes, offset: int) -> int | None:
    """Where the frame at ``offset`` ends, None when it is not whole."""
    if offset + _FRAME.size > len(raw):
        return None
    length, checksum = _FRAME.unpack_from(raw, offset)
    end = offset + _FRAME.size + length
    whole = length > 0 and end <= len(raw) and zlib.crc32(memoryview(raw)[offset + _FRAME.size : end]) == checksum
    return end if whole else None


def _cut_torn_tail(directory: Path) -> int:
    """Cut the last segment behind its last whole frame. Returns how many bytes.

    Torn means that nothing whole follows; a bad frame with a whole one behind it is damage, and raises JournalError.
    """
    segments = _segments(directory)
    if not segments:
        return 0
    path = segments[-1].path
    raw = path.read_bytes()
    _, offset = _whole_frames(raw)
    if offset == len(raw):
        return 0
    if _holds_a_frame(raw, offset + 1):
        raise JournalError(path, offset, "a bad frame has whole ones behind it")
    os.truncate(path, offset)
    return len(raw) - offset


def _num_void(directory: Path) -> int:
    """Records that the last writer but one left behind the place where the last one began."""
    parts = _parts(directory, "segment-*.log")
    newest = parts[-1].epoch if parts else 0
    begun = min((part.seq for part in parts if part.epoch == newest), default=0)
    before = max((part.epoch for part in parts if part.epoch < newest), default=newest)
    its_own = [part for part in parts if part.epoch == before != newest]
    reaching = [part for part in its_own if part.seq < begun][-1:] + [part for part in its_own if part.seq >= begun]
    return sum(max(0, part.seq + _whole_frames(part.path.read_bytes())[0] - max(begun, part.seq)) for part in reaching)


def _whole_frames(raw: bytes) -> tuple[int, int]:
    """How many there are at the beginning of a segment, and where the last of them ends."""
    count = offset = 0
    while (end := _frame_end(raw, offset)) is not None:
        count, offset = count + 1, end
    return count, offset


def _holds_a_frame(raw: bytes, start: int) -> bool:
    """Whether a whole frame begins anywhere from ``start`` on. Lengths are bounded, so chance hits are checksummed."""
    return any(
        0 < int.from_bytes(raw[offset : offset + 4], "little") <= min(MAX_MESSAGE_BYTES, len(raw) - offset)
        and _frame_end(raw, offset) is not None
        for offset in range(start, len(raw) - _FRAME.size)
    )


def newest_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """The newest snapshot that is whole; an older one when the newest is damaged. JournalError when all are."""
    damage: JournalError | None = None
    for part in reversed(_snapshots(directory)):
        try:
            return _read_snapshot(part.path)
        except JournalError as error:
            damage = damage or error
    if damage is not None:
        raise damage
    return 0, None


def _read_snapshot(path: Path) -> tuple[int, bytes]:
    raw = path.read_bytes()
    if len(raw) < _SNAPSHOT.size:
        raise JournalError(path, 0, "the snapshot is cut short")
    magic, seq, checksum = _SNAPSHOT.unpack_from(raw)
    state = raw[_SNAPSHOT.size :]
    if magic != _MAGIC or zlib.crc32(state) != checksum:
        raise JournalError(path, 0, "not a snapshot, or its checksum does not hold")
    return seq, state


def _segments(directory: Path) -> list[_Segment]:
    """Those that count, in order: each up to where one begins that is newer, or of a newer writer."""
    segments: list[_Segment] = []
    until: int | None = None
    for part in reversed(_parts(directory, "segment-*.log")):
        if until is None or part.seq < until:
            segments.append(_Segment(part.seq, until, part.path))
            until = part.seq
    return segments[::-1]


def _snapshots(directory: Path) -> list[_Part]:
    """Those that count, in order: the newest of each place, and none from where a newer writer has begun."""
    segments = _parts(directory, "segment-*.log")
    kept: dict[int, _Part] = {}
    for part in _parts(directory, "snapshot-*.bin"):
        if not any(segment.epoch > part.epoch and segment.seq <= part.seq for segment in segments):
            kept[part.seq] = part
    return [kept[seq] for seq in sorted(kept)]


_NAME = re.compile(r"(?:segment|snapshot)-([0-9]{12})(?:[.]e([0-9]+))?[.](?:log|bin)")


def _parts(directory: Path, pattern: str) -> list[_Part]:
    """By epoch, then by place."""
    named = [(path, _NAME.fullmatch(path.name)) for path in directory.glob(pattern)]
    return sorted(_Part(int(name[2] or 0), int(name[1]), path) for path, name in named if name is not None)
