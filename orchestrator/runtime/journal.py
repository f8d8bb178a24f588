"""The journal: every applied event in the order applied, and snapshots of the state between them.

Owns: files under one directory. Never: what an event means. Invariant: a record that ``append`` returned for survives
the death of this process; recovery gives the newest whole snapshot and exactly the records after it, or a named error.

    journal/
      snapshot-000000000000.bin    the state before the first event, then after event N
      segment-000000000001.log     frames from event 1 on; a new segment begins at every snapshot
    frame:    length u32 | crc32 u32 | MessagePack JournalRecord
    snapshot: b"SRS1" | seq u64 | crc32 u32 | the state's bytes; written beside, flushed, renamed

A crash can tear the last frames of the last segment: they are cut off, and their commands were never carried out,
because the journal is written first. Damage anywhere else is not a crash's doing and is never skipped. Source: ours.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from transport.errors import FatalError, MessageError
from transport.files import replace, writing
from transport.messages import MAX_MESSAGE_BYTES, JournalRecord, MessageDecoder, encode

_FRAME = struct.Struct("<II")
_SNAPSHOT = struct.Struct("<4sQI")
_MAGIC = b"SRS1"
_decoder = MessageDecoder(JournalRecord)

NO_CURSOR = "0-0"


class JournalError(FatalError):
    """History is damaged: ``path`` at byte ``offset`` is not what was written there."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"{path} is damaged at byte {offset}: {reason}")
        self.path = path
        self.offset = offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a run left behind. snapshot: the state after event ``snapshot_seq``, None in a new directory.

    tail: the records after it, in order.  cursor, now_s: of the last applied event.  cut_bytes: of a torn tail.
    """

    snapshot: bytes | None
    snapshot_seq: int
    tail: tuple[JournalRecord, ...]
    cursor: str = NO_CURSOR
    now_s: float = 0.0
    cut_bytes: int = 0

    @property
    def seq(self) -> int:
        """Position of the last applied event, 0 when there is none."""
        return self.tail[-1].seq if self.tail else self.snapshot_seq


class _File(Protocol):
    """A file opened unbuffered: what ``write`` returned for is with the operating system."""

    def write(self, data: bytes, /) -> int | None: ...
    def close(self) -> None: ...
    def fileno(self) -> int: ...


class Journal:
    """Open with ``Journal.open``. One process, one journal; not safe for two writers."""

    def __init__(self, directory: Path, next_seq: int, *, keep_history: bool) -> None:
        self._directory = directory
        self._next_seq = next_seq
        self._keep_history = keep_history
        self._file: _File | None = None

    @classmethod
    def open(cls, directory: Path, *, keep_history: bool = True) -> tuple[Journal, Recovered]:
        """Recover what is there (cutting a torn tail) and go on behind it.

        keep_history: False frees segments and snapshots that two newer snapshots make unnecessary; a replay then begins
        at the oldest snapshot. Raises JournalError.
        """
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        recovered = recover(directory)
        return cls(directory, recovered.seq + 1, keep_history=keep_history), recovered

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
                _write_whole(self._segment(), b"".join(frames))
            self._next_seq += len(frames)

    def snapshot(self, state: bytes, seq: int) -> None:
        """Keep ``state``, which is that after event ``seq``; records after it may be there already."""
        path = self._directory / f"snapshot-{seq:012d}.bin"
        with writing(self._directory):
            replace(path, _SNAPSHOT.pack(_MAGIC, seq, zlib.crc32(state)) + state)
        self.close()
        if not self._keep_history:
            _prune(self._directory)

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

    def _segment(self) -> _File:
        if self._file is None:
            path = self._directory / f"segment-{self._next_seq:012d}.log"
            self._file = path.open("ab", buffering=0)
        return self._file


def recover(directory: Path) -> Recovered:
    """The newest whole snapshot and what follows it. Raises JournalError."""
    cut_bytes = _cut_torn_tail(directory)
    snapshot_seq, snapshot = _newest_snapshot(directory)
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
    )


def first_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """The oldest snapshot, where a replay begins: (its seq, its state), or (0, None). Raises JournalError."""
    for path in _snapshots(directory):
        return _read_snapshot(path)
    return 0, None


def all_snapshots(directory: Path) -> Iterator[tuple[int, bytes]]:
    """(seq, state) of every snapshot, oldest first. Raises JournalError at a damaged one."""
    for path in _snapshots(directory):
        yield _read_snapshot(path)


def read_records(directory: Path, *, from_seq: int = 0) -> Iterator[JournalRecord]:
    """Records from ``from_seq`` on, in order, without a gap. Raises JournalError."""
    segments = _segments(directory)
    begin = max((place for place, path in enumerate(segments) if _number(path) <= from_seq), default=0)
    expected: int | None = None
    for path in segments[begin:]:
        for offset, record in _frames(path):
            if expected is not None and record.seq != expected:
                raise JournalError(path, offset, f"event {record.seq} stands where {expected} belongs")
            expected = record.seq + 1
            if record.seq >= from_seq:
                yield record


def newest_snapshot_before(directory: Path, num_records: int) -> tuple[int, bytes] | None:
    """(seq, state) of the newest snapshot with ``num_records`` or more behind it, None where the journal is shorter.

    Counted up to the last snapshot: what follows is some thousand records. Raises JournalError.
    """
    snapshots = _snapshots(directory)
    last = _number(snapshots[-1]) if snapshots else 0
    before = [path for path in snapshots if 0 < _number(path) <= last - num_records]
    return _read_snapshot(before[-1]) if before else None


def read_whole_records(directory: Path, *, from_seq: int = 0) -> Iterator[JournalRecord]:
    """All records from ``from_seq`` on, for a reader that is not the writer: of a live run, or after a crash.

    What cannot be read of the last segment ends it: as a rule a write in progress. Changes nothing. Raises JournalError
    for damage in an earlier segment.
    """
    try:
        yield from read_records(directory, from_seq=from_seq)
    except JournalError as error:
        if error.path != max(_segments(directory), default=None):
            raise


def _frames(path: Path) -> Iterator[tuple[int, JournalRecord]]:
    raw = path.read_bytes()
    offset = 0
    while offset < len(raw):
        end = _frame_end(raw, offset)
        if end is None:
            raise JournalError(path, offset, "a frame is cut short or its checksum does not hold")
        try:
            yield offset, _decoder.decode(memoryview(raw)[offset + _FRAME.size : end])
        except MessageError as error:
            raise JournalError(path, offset, str(error)) from error
        offset = end


def _frame_end(raw: bytes, offset: int) -> int | None:
    """Where the frame at ``offset`` ends, None when it is not whole."""
    if offset + _FRAME.size > len(raw):
        return None
    length, checksum = _FRAME.unpack_from(raw, offset)
    end = offset + _FRAME.size + length
    if length == 0 or end > len(raw) or zlib.crc32(memoryview(raw)[offset + _FRAME.size : end]) != checksum:
        return None
    return end


def _cut_torn_tail(directory: Path) -> int:
    """Cut the last segment behind its last whole frame. Returns how many bytes.

    Torn means that nothing whole follows; a bad frame with a whole one behind it is damage, and raises JournalError.
    """
    segments = _segments(directory)
    if not segments:
        return 0
    path, raw, offset = segments[-1], segments[-1].read_bytes(), 0
    while (end := _frame_end(raw, offset)) is not None:
        offset = end
    if offset == len(raw):
        return 0
    if _holds_a_frame(raw, offset + 1):
        raise JournalError(path, offset, "a bad frame has whole ones behind it")
    os.truncate(path, offset)
    return len(raw) - offset


def _holds_a_frame(raw: bytes, start: int) -> bool:
    """Whether a whole frame begins anywhere from ``start`` on. Lengths are bounded, so chance hits are checksummed."""
    for offset in range(start, len(raw) - _FRAME.size):
        length = int.from_bytes(raw[offset : offset + 4], "little")
        if 0 < length <= min(MAX_MESSAGE_BYTES, len(raw) - offset) and _frame_end(raw, offset) is not None:
            return True
    return False


def _newest_snapshot(directory: Path) -> tuple[int, bytes | None]:
    """The newest snapshot that is whole; an older one when the newest is damaged. JournalError when all are."""
    damage: JournalError | None = None
    for path in reversed(_snapshots(directory)):
        try:
            return _read_snapshot(path)
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


def _prune(directory: Path) -> None:
    """Keep the two newest snapshots, and the segments that recovery from the older of them reads."""
    snapshots, segments = _snapshots(directory), _segments(directory)
    for path in snapshots[:-2]:
        path.unlink()
    oldest = min((_number(path) for path in snapshots[-2:]), default=0)
    for path, following in pairwise(segments):
        if _number(following) <= oldest:
            path.unlink()


def _write_whole(file: _File, data: bytes) -> None:
    """A raw file may take less than it is given."""
    view = memoryview(data)
    while view:
        written = file.write(bytes(view)) or 0
        view = view[written:]


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.log"))


def _snapshots(directory: Path) -> list[Path]:
    return sorted(directory.glob("snapshot-*.bin"))


def _number(path: Path) -> int:
    return int(path.stem.partition("-")[2])
