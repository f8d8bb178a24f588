"""Rows whose bulky columns live in storage units; the broker holds a locator in each one's place.

    write   bytes -> a unit, into a segment or under a key of this attempt;  then the broker's commit, with locators
    lost    an insert that did not win takes its own bytes back
    read    locators from the broker, bytes from the units that they name
    full    a unit takes what it has room for, the next unit of the ranking the rest; a write that finds no room frees
            what it had put
    drop    in the broker first (from then on no insert can win), then in every unit

On the unit's own host, bytes go through segments of shared memory, in one copy each way; few of them, and those of
other hosts, go over the unit's socket. So do those for which shared memory has no room: the unit then keeps them in its
own.

The broker stays the only judge of what exists, so tasks, notices and first-insert-wins work unchanged. Bytes whose
writer died between the two steps of a write stay in their unit until their group is dropped; those that it was still
writing do not.

Owns: placement and the two-step write. Invariant: a locator in the broker points to bytes that were stored before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, count, cycle
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from transport.broker.base import Block, Broker, Commit, CommitResult, Pieces, RowWrite
from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import USER_PREFIX, Column, Count, GroupId, RowId, Struct, parse_row_id
from transport.errors import ChecksumError, FencedError, PeerUnavailableError
from transport.rows.columns import MAX_COLUMN_BYTES, check_commit
from transport.rows.segments import Buffer, open_segment, read_segments, write_buffers
from transport.rows.units import Full, GroupParts, Part, Range, UnitClient, ValueBytes
from transport.rows.user_columns import ColumnBytes, sizes_of
from transport.tensors.manifest import checksum
from transport.tensors.shm import SHARED_MEMORY

T = TypeVar("T")

ALIGNMENT = 8
"""Of every value in a segment, so that arrays are read in place."""

UNIT_COLUMNS = frozenset({Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.LOSS_MASK, Column.REFERENCE_LOGPROBS})
"""Columns that grow with the response. The run's others are a few bytes and stay in the broker."""
ROWS_PER_REQUEST = 1024
"""The header of a request names every value: some 100 bytes each, of the 1 MiB that a header may have."""
SHARED_BYTES = 64 * 1024
"""For less, a file costs more than sending it."""
COMMIT_BYTES = 18 * 1024 * 1024
"""Of values that one commit carries. They do not pass through the broker, but make one segment a unit: some ms of
copying, in which the broker inserts what was copied before."""


def aligned(nbytes: int) -> int:
    """What a value takes in a segment."""
    return nbytes + -nbytes % ALIGNMENT


class SentLocator(Struct, frozen=True, kw_only=True):
    """Stands in the broker in place of what was sent to a unit: the value of a row, or of each row of a group."""

    unit: str
    name: str
    sizes: tuple[ValueBytes, ...]
    checksums: tuple[str, ...]

    def of(self, sample: int) -> Part:
        """The value of one row. Raises ChecksumError: the locator is of fewer."""
        place = sample if len(self.sizes) > 1 else 0
        if place >= min(len(self.sizes), len(self.checksums)):
            raise ChecksumError(f"a locator of {len(self.sizes)} values has none of sample {sample}")
        return Part(key=f"{self.name}:{place}", nbytes=self.sizes[place], checksum=self.checksums[place])


class SegmentLocator(Struct, frozen=True, array_like=True, omit_defaults=False):
    """As SentLocator, of what is in a segment.

    It is an array in MessagePack, because 64 bytes, which it mostly has on a unit of this host, are the most that the
    broker keeps in the compact form of a hash.

    nbytes: of the value; of a group's values a tuple, of one number where all have that size.
    """

    unit: str
    segment: str
    offset: Count
    nbytes: ValueBytes | tuple[ValueBytes, ...]

    def of(self, sample: int) -> Range:
        """The value of one row. Raises ChecksumError: the locator is of fewer."""
        sizes = self.nbytes
        if isinstance(sizes, int):
            return Range(segment=self.segment, offset=self.offset, nbytes=sizes)
        if len(sizes) == 1:
            return Range(segment=self.segment, offset=self.offset + sample * aligned(sizes[0]), nbytes=sizes[0])
        if sample >= len(sizes):
            raise ChecksumError(f"a locator of {len(sizes)} values has none of sample {sample}")
        before = sum(map(aligned, sizes[:sample]))
        return Range(segment=self.segment, offset=self.offset + before, nbytes=sizes[sample])


Locator: TypeAlias = SentLocator | SegmentLocator

_sent_decoder = MessageDecoder(SentLocator)
_segment_decoder = MessageDecoder(SegmentLocator)


def decode_locator(raw: bytes) -> Locator:
    """Raises MessageError for what is neither."""
    is_array = raw[:1] and raw[0] & 0xF0 == 0x90  # MessagePack's first byte of a short array
    return _segment_decoder.decode(raw) if is_array else _sent_decoder.decode(raw)


def in_unit(column: Column) -> bool:
    """Whether a column's bytes lie in a unit: those that grow with the response, and all of users."""
    return column in UNIT_COLUMNS or column.startswith(USER_PREFIX)


@dataclass(slots=True)
class _Parcel:
    """One column of a row or of a whole group, which goes to one unit together. name: of the row, or of the group, and
    this attempt.  at: where it went.
    """

    group_id: GroupId
    name: str
    values: Sequence[Pieces]
    of_group: bool
    at: Locator | None = None

    @property
    def nbytes(self) -> int:
        """What it takes in a unit, at most."""
        sizes = sizes_of(self.values)
        return aligned(sizes[0]) * len(self.values) if len(sizes) == 1 else sum(map(aligned, sizes))

    def put(self, unit: str) -> tuple[SentLocator, GroupParts, list[bytes]]:
        """What a put needs of it, and where it is then."""
        values = [b"".join(value) for value in self.values]
        sizes, checksums = tuple(map(len, values)), tuple(map(checksum, values))
        at = SentLocator(unit=unit, name=self.name, sizes=sizes, checksums=checksums)
        return at, GroupParts(group_id=self.group_id, parts=tuple(map(at.of, range(len(values))))), values

    def lay_out(self, buffers: list[Buffer]) -> tuple[int, ...]:
        """Add its values to ``buffers``, each aligned. Returns their sizes, one number where all are equal."""
        sizes = tuple(sizes_of(self.values))
        if not any(nbytes % ALIGNMENT for nbytes in sizes):
            buffers.extend(chain.from_iterable(self.values))
            return sizes
        for value, nbytes in zip(self.values, cycle(sizes), strict=False):
            buffers.extend(value)
            buffers.append(bytes(-nbytes % ALIGNMENT))
        return sizes


class UnitRows:
    """A RowStore over a broker and storage units, used from one event loop.

    units: addresses that new rows may go to; rows are read from whichever unit has them.
    directory: where this host's segments are.
    """

    commit_bytes = COMMIT_BYTES

    def __init__(
        self, broker: Broker, units: Sequence[str], *, secret: bytes = b"", directory: Path = SHARED_MEMORY
    ) -> None:
        self._broker = broker
        self._secret = secret
        self._directory = directory
        self._units = list(dict.fromkeys(units))
        self._clients: dict[str, UnitClient] = {}
        self._undropped: dict[str, set[GroupId]] = {}

    def ranked_units(self, group_id: GroupId) -> list[str]:
        """The units in the order in which they are tried for a group (rendezvous hashing: a change moves the least)."""

        def weight(address: str) -> bytes:
            return hashlib.blake2b(f"{group_id} {address}".encode(), digest_size=8).digest()

        return sorted(self._units, key=weight)

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        attempt = uuid.uuid4().hex
        of_rows = [_parcels_of_row(row, attempt) for row in commit.rows]
        of_blocks = [_parcels_of_block(block.of_rows(), attempt) for block in commit.blocks]
        parcels = list(chain(*of_rows, *of_blocks))
        try:
            await self._place(parcels)
            rows = [_located_row(row, parcels) for row, parcels in zip(commit.rows, of_rows, strict=True)]
            blocks = [_located_block(block, parcels) for block, parcels in zip(commit.blocks, of_blocks, strict=True)]
            result = await self._broker.commit(replace(commit, rows=rows, blocks=blocks))
        except (PeerUnavailableError, FencedError):  # nothing was inserted; after another error, it may have been
            await self._take_back([_values_of(parcels)], [False])
            raise
        if not all(result.inserted):
            located = [_values_of(parcels) for parcels in of_rows]
            for block, parcels in zip(commit.blocks, of_blocks, strict=True):
                located += _values_of_rows(block, parcels)
            await self._take_back(located, result.inserted)
        return result

    async def _place(self, parcels: list[_Parcel]) -> None:
        """Put each parcel into the first unit of its group's ranking that takes it: all units at once.

        Raises PeerUnavailableError: no unit has room for some of them, or none answers.
        """
        rankings = {group_id: self.ranked_units(group_id) for group_id in {parcel.group_id for parcel in parcels}}
        failures: list[str] = []
        for rank in range(len(self._units)):
            by_unit: dict[str, list[_Parcel]] = {}
            for parcel in parcels:
                by_unit.setdefault(rankings[parcel.group_id][rank], []).append(parcel)
            puts = (asyncio.to_thread(self._put, unit, part) for unit, part in by_unit.items())
            failures += [failure for failure in await asyncio.gather(*puts) if failure]
            parcels = [parcel for parcel in parcels if parcel.at is None]
        if parcels:
            raise PeerUnavailableError("storage units", "; ".join(failures) or "there are none")

    def _put(self, unit: str, parcels: Sequence[_Parcel]) -> str:
        """Have a unit take what it has room for. Returns why not all of it, "" where it took all."""
        client, some, failure = self._client(unit), parcels, ""
        try:
            while some and (full := self._store(client, some)):
                failure = f"{unit} is full: it holds {full.retained_bytes} bytes"
                some = _fitting([parcel for parcel in some if parcel.at is None], full.free_bytes)
        except PeerUnavailableError as error:
            return str(error)
        return failure

    def _store(self, client: UnitClient, parcels: Sequence[_Parcel]) -> Full | None:
        """All parcels, or as many requests of them as a unit has room for."""
        shared = self._share(client, parcels)
        if shared is not None:
            return shared if isinstance(shared, Full) else None
        for some in _pieces(parcels, ROWS_PER_REQUEST):
            puts = [parcel.put(client.address) for parcel in some]
            full = client.put([groups for _, groups, _ in puts], [value for *_, values in puts for value in values])
            if full:
                return full
            for parcel, (at, *_) in zip(some, puts, strict=True):
                parcel.at = at
        return None

    def _share(self, client: UnitClient, parcels: Sequence[_Parcel]) -> str | Full | None:
        """Write parcels into a segment of a unit on this host. Returns its name; None where they must be sent instead;
        or how much the unit has room for."""
        buffers: list[Buffer] = []
        sizes = [parcel.lay_out(buffers) for parcel in parcels]
        total = sum(map(len, buffers))
        if total < SHARED_BYTES:
            return None
        segment = client.allocate(list({parcel.group_id for parcel in parcels}), total)
        if not segment or isinstance(segment, Full):
            return segment or None
        try:
            with open_segment(segment, write=True, directory=self._directory) as fd:
                write_buffers(fd, buffers)
        except OSError:  # no room after all; or not a file that this process can open, though the host is the same
            client.drop(segments=[segment])
            return None
        if not client.keep(segment):
            return None
        offset = 0
        for parcel, nbytes in zip(parcels, sizes, strict=True):
            parcel.at = SegmentLocator(client.address, segment, offset, nbytes if parcel.of_group else nbytes[0])
            of_each = nbytes * len(parcel.values) if len(nbytes) == 1 else nbytes
            offset += sum(map(aligned, of_each))
        return segment

    async def _take_back(self, located: Sequence[Sequence[_Value]], inserted: Sequence[bool]) -> None:
        """Free what inserts that lost had put; what cannot be freed now goes with its group.

        located: per row its values.  A segment is freed when all rows in it lost.
        """
        lost = [value for values, won in zip(located, inserted, strict=True) if not won for value in values]
        kept = [value for values, won in zip(located, inserted, strict=True) if won for value in values]
        needed = {at.segment for _, at in kept if isinstance(at, Range)}
        for unit in {unit for unit, _ in lost}:
            of_unit = [at for held_by, at in lost if held_by == unit]
            keys = [at.key for at in of_unit if isinstance(at, Part)]
            segments = {at.segment for at in of_unit if isinstance(at, Range)} - needed
            try:
                await asyncio.to_thread(self._client(unit).drop, keys=keys, segments=sorted(segments))
            except PeerUnavailableError:
                continue

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """As RowStore. A column whose unit lost it is missing. Raises PeerUnavailableError: a unit does not answer."""
        rows = await self.read_views(row_ids, columns)
        return [{column: bytes(value) for column, value in row.items()} for row in rows]

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        """As ``read_rows``, without the copy that makes ``bytes`` of each value.

        What came through shared memory lies in one buffer, column by column, each value aligned.
        """
        rows: list[dict[Column, ColumnBytes]] = [{**row} for row in await self._broker.read_rows(row_ids, columns)]
        held = list(_by_unit(row_ids, rows, columns).items())
        read = (asyncio.to_thread(self._get, unit, places) for unit, places in held)
        for (_, places), values in zip(held, await asyncio.gather(*read), strict=True):
            for place, value in zip(places, values, strict=True):
                if value is None:
                    del place.row[place.column]
                else:
                    place.row[place.column] = value
        return rows

    def _get(self, unit: str, places: Sequence[_Place]) -> list[ColumnBytes | None]:
        """What there is of one unit's values, through shared memory where that can be."""
        ranges = [(place.at, place.buffer) for place in places if isinstance(place.at, Range)]
        shared = [(at.segment, at.offset, at.nbytes) for at, _ in ranges]
        found = iter(read_segments(shared, [buffer for _, buffer in ranges], self._directory))
        is_read = [isinstance(place.at, Range) and next(found) for place in places]
        sent = iter(self._ask(unit, [place.at for place, was in zip(places, is_read, strict=True) if not was]))
        return [place.buffer.toreadonly() if was else next(sent) for place, was in zip(places, is_read, strict=True)]

    def _ask(self, unit: str, wanted: Sequence[Part | Range]) -> Iterator[bytes | None]:
        client = self._client(unit)
        parts = [at for at in wanted if isinstance(at, Part)]
        ranges = [at for at in wanted if isinstance(at, Range)]
        of_keys = (value for some in _pieces(parts, ROWS_PER_REQUEST) for value in client.get(some))
        of_ranges = (value for some in _requests(ranges) for value in client.read(some))
        return (next(of_keys) if isinstance(at, Part) else next(of_ranges) for at in wanted)

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._broker.read_groups(group_ids, columns)

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """As RowStore. A unit that does not answer gets these groups with the next drop."""
        freed = await self._broker.drop_groups(group_ids)
        for unit in {*self._units, *self._clients}:
            groups = self._undropped.pop(unit, set()) | set(group_ids)
            try:
                freed += await asyncio.to_thread(self._client(unit).drop, group_ids=sorted(groups))
            except PeerUnavailableError:
                self._undropped[unit] = groups
        return freed

    def _client(self, unit: str) -> UnitClient:
        if unit not in self._clients:
            self._clients[unit] = UnitClient(unit, secret=self._secret)
        return self._clients[unit]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _parcels_of_row(row: RowWrite, attempt: str) -> list[_Parcel]:
    """What of one row goes into a unit."""
    group_id, _ = parse_row_id(row.row_id)
    bulky = [raw for column, raw in row.columns.items() if in_unit(column)]
    return [_Parcel(group_id, f"{row.row_id}:{attempt}:{n}", [(raw,)], of_group=False) for n, raw in enumerate(bulky)]


def _located_row(row: RowWrite, parcels: Sequence[_Parcel]) -> RowWrite:
    """The row as it goes into the broker."""
    bulky = (column for column in row.columns if in_unit(column))
    located = (encode(parcel.at) for parcel in parcels)
    return replace(row, columns={**row.columns, **dict(zip(bulky, located, strict=True))})


def _parcels_of_block(block: Block, attempt: str) -> list[_Parcel]:
    """A block's values, group by group; all of its columns go into units, because all are users'."""
    return [
        _Parcel(group_id, f"{group_id}:{attempt}:{n}", values[start : start + block.size], of_group=True)
        for group_id, start in zip(block.group_ids, count(step=block.size), strict=False)
        for n, values in enumerate(block.columns.values())
    ]


def _located_block(block: Block, parcels: Sequence[_Parcel]) -> Block:
    """The block as it goes into the broker: one locator for a column of a group."""
    located: list[Pieces] = [(encode(parcel.at),) for parcel in parcels]
    num_columns = len(block.columns)
    columns = {column: located[n::num_columns] for n, column in enumerate(block.columns)}
    return replace(block, columns=columns, shared=True)


_Value: TypeAlias = tuple[str, Part | Range]
"""A value in a unit."""


def _fitting(parcels: Sequence[_Parcel], free_bytes: int) -> list[_Parcel]:
    """Those that a unit with so much room may take, in their order; never all of them, since it did not."""
    sizes = [parcel.nbytes for parcel in parcels]
    left = min(free_bytes, sum(sizes) - 1)
    some: list[_Parcel] = []
    for parcel, nbytes in zip(parcels, sizes, strict=True):
        if nbytes <= left:
            some.append(parcel)
            left -= nbytes
    return some


def _values_of(parcels: Sequence[_Parcel]) -> list[_Value]:
    """All values that were placed."""
    return [_value(parcel, sample) for parcel in parcels if parcel.at for sample in range(len(parcel.values))]


def _value(parcel: _Parcel, sample: int) -> _Value:
    assert parcel.at is not None  # what was placed is somewhere
    return parcel.at.unit, parcel.at.of(sample)


def _values_of_rows(block: Block, parcels: Sequence[_Parcel]) -> list[list[_Value]]:
    """Per row of a block its values."""
    num_columns = len(block.columns)
    return [
        [_value(parcel, sample) for parcel in parcels[start : start + num_columns]]
        for start in range(0, len(parcels), num_columns)
        for sample in range(block.size)
    ]


def _pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _requests(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Ranges in requests of bounded number and size."""
    some: list[Range] = []
    total = 0
    for wanted in ranges:
        if some and (len(some) == ROWS_PER_REQUEST or total + wanted.nbytes > MAX_COLUMN_BYTES):
            yield some
            some, total = [], 0
        some.append(wanted)
        total += wanted.nbytes
    if some:
        yield some


class _Place(NamedTuple):
    """A column of a row whose bytes are in a unit. buffer: for what comes through shared memory."""

    row: dict[Column, ColumnBytes]
    column: Column
    at: Part | Range
    buffer: memoryview


def _by_unit(
    row_ids: Sequence[RowId], rows: Sequence[dict[Column, ColumnBytes]], columns: Sequence[Column]
) -> Mapping[str, list[_Place]]:
    """Per unit what it holds of these rows, with room for it in one buffer."""
    locate = cache(decode_locator)  # rows of a group have one
    samples = [parse_row_id(row_id)[1] for row_id in row_ids]
    held = [
        (row, column, at.unit, at.of(sample))
        for column in columns
        if in_unit(column)
        for row, sample in zip(rows, samples, strict=True)
        if column in row
        for at in (locate(bytes(row[column])),)
    ]
    sizes = [at.nbytes if isinstance(at, Range) else 0 for *_, at in held]
    ends = list(accumulate(map(aligned, sizes)))
    if any(not 0 <= size <= MAX_COLUMN_BYTES for size in sizes):
        raise ChecksumError("a locator names a value of an impossible size")
    whole = np.empty(ends[-1] if ends else 0, np.uint8).data  # numpy asks for huge pages, whose faults cost little
    result: dict[str, list[_Place]] = {}
    for (row, column, unit, at), size, start in zip(held, sizes, chain([0], ends), strict=False):
        result.setdefault(unit, []).append(_Place(row, column, at, whole[start : start + size]))
    return result
