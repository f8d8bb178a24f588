"""Rows whose bulky columns live in storage units; the broker holds a locator in each one's place.

    write   bytes -> a segment of a unit;  then the broker's commit, with locators
    lost    a segment of which no insert won is freed
    read    locators from the broker, bytes from the segments that they name
    full    a unit takes what it has room for, the next unit of the ranking the rest; a write that finds no room frees
            what it had put
    drop    in the broker first (from then on no insert can win), then in every unit

The broker stays the only judge of what exists, so tasks, notices and first-insert-wins work unchanged. Bytes whose
writer died between the two steps of a write stay in their unit until their group is dropped; those that it was still
writing do not.

Owns: placement and the two-step write. Invariant: a locator in the broker points to bytes that were stored before it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, count, cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transport.broker.base import Block, Broker, Commit, CommitResult, Pieces, RowWrite
from transport.contracts.messages import MessageDecoder, encode
from transport.contracts.types import USER_PREFIX, Column, Count, GroupId, RowId, Struct, parse_row_id
from transport.errors import ChecksumError, FencedError, PeerUnavailableError
from transport.rows.columns import MAX_COLUMN_BYTES, ColumnBytes, RowStore, check_commit, sizes_of
from transport.rows.segments import Buffer, Range, ValueBytes, open_segment, read_segments, write_buffers
from transport.rows.units import Full, UnitClient
from transport.tensors.shm import SHARED_MEMORY

ALIGNMENT = 8  # of every value in a segment, so that arrays are read in place
UNIT_COLUMNS = frozenset(
    {
        *(Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.LOSS_MASK, Column.REFERENCE_LOGPROBS),
        *(Column.VALUES, Column.TOKEN_ADVANTAGES, Column.RETURNS),
    }
)
"""Columns that grow with the response. The run's others are a few bytes and stay in the broker."""
RANGES_PER_REQUEST = 1024  # its header names every one: some 60 bytes each, of the 1 MiB that a header may have
SHARED_BYTES = 64 * 1024  # for less, a file costs more than sending it


def aligned(nbytes: int) -> int:
    """What a value takes in a segment."""
    return nbytes + -nbytes % ALIGNMENT


class Locator(Struct, frozen=True, array_like=True, omit_defaults=False):
    """Stands in the broker in place of a value: where its bytes are.

    It is of one row's value, or of the values of all rows of a group, which lie one after another; then the broker
    keeps it once for the group (``base.Block.shared``). It is an array in MessagePack, because 64 bytes, which it
    mostly has on a unit of this host, are the most that the broker keeps in the compact form of a hash.

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


locator_decoder = MessageDecoder(Locator)


def in_unit(column: Column) -> bool:
    """Whether a column's bytes lie in a unit: those that grow with the response, and all of users."""
    return column in UNIT_COLUMNS or column.startswith(USER_PREFIX)


@dataclass(slots=True)
class _Parcel:
    """One column of a row or of a whole group, which goes to one unit together. at: where it went."""

    group_id: GroupId
    values: Sequence[Pieces]
    of_group: bool
    at: Locator | None = None

    @property
    def nbytes(self) -> int:
        """What it takes in a unit."""
        sizes = sizes_of(self.values)
        return aligned(sizes[0]) * len(self.values) if len(sizes) == 1 else sum(map(aligned, sizes))

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


class UnitRows(RowStore):
    """A RowStore over a broker and storage units, used from one event loop.

    units: addresses that new rows may go to; rows are read from whichever unit has them.
    directory: where this host's segments are.
    commit_bytes: values do not pass through the broker, but make one segment a unit: some ms of copying, in which the
    broker inserts what was copied before.
    """

    commit_bytes = 18 * 1024 * 1024

    def __init__(
        self, broker: Broker, units: Sequence[str], *, secret: bytes = b"", directory: Path = SHARED_MEMORY
    ) -> None:
        super().__init__(broker)
        self._secret = secret
        self._directory = directory
        self._units = list(dict.fromkeys(units))
        self._clients: dict[str, UnitClient] = {}
        self._undropped: dict[str, set[GroupId]] = {}

    def ranked_units(self, group_id: GroupId) -> list[str]:
        """The units in the order in which they are tried for a group (rendezvous hashing: a change moves the least)."""
        ranked_by = (f"{group_id} {address}".encode() for address in self._units)
        digests = [hashlib.blake2b(text, digest_size=8).digest() for text in ranked_by]
        return [address for _, address in sorted(zip(digests, self._units, strict=True))]

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        of_rows, of_blocks = _parcels(commit)
        parcels = list(chain(*of_rows, *of_blocks))
        try:
            await self._place(parcels)
            result = await self._broker.commit(_located(commit, of_rows, of_blocks))
        except (PeerUnavailableError, FencedError):  # nothing was inserted; after another error, it may have been
            await self._take_back([parcels], [False])
            raise
        if not all(result.inserted):
            located = list(of_rows)
            for block, parcels in zip(commit.blocks, of_blocks, strict=True):
                num_columns = len(block.columns)
                of_groups = [parcels[at : at + num_columns] for at in range(0, len(parcels), num_columns)]
                located += [of_group for of_group in of_groups for _ in range(block.size)]
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
        """Have a unit keep all parcels in one segment. Returns how much it has room for, if not for that."""
        buffers: list[Buffer] = []
        sizes = [parcel.lay_out(buffers) for parcel in parcels]
        group_ids = list({parcel.group_id for parcel in parcels})
        segment = self._write(client, group_ids, buffers) or client.put(group_ids, buffers)
        if isinstance(segment, Full):
            return segment
        offset = 0
        for parcel, nbytes in zip(parcels, sizes, strict=True):
            parcel.at = Locator(client.address, segment, offset, nbytes if parcel.of_group else nbytes[0])
            offset += parcel.nbytes
        return None

    def _write(self, client: UnitClient, group_ids: Sequence[GroupId], buffers: Sequence[Buffer]) -> str | Full:
        """Write a segment in shared memory. Returns its name; "" where the bytes must be sent instead; or how much the
        unit has room for."""
        total = sum(map(len, buffers))
        segment = client.allocate(group_ids, total) if total >= SHARED_BYTES else ""
        if not segment or isinstance(segment, Full):
            return segment
        try:
            with open_segment(segment, write=True, directory=self._directory) as fd:
                write_buffers(fd, buffers)
        except OSError:  # no room after all; or not a file that this process can open, though the host is the same
            client.drop(segments=[segment])
            return ""
        return segment if client.keep(segment) else ""

    async def _take_back(self, located: Sequence[Sequence[_Parcel]], inserted: Sequence[bool]) -> None:
        """Free the segments of which no insert won; what cannot be freed now goes with its groups.

        located: per row the parcels in which its values are.
        """
        held = [
            (parcel.at.unit, parcel.at.segment, won)
            for parcels, won in zip(located, inserted, strict=True)
            for parcel in parcels
            if parcel.at is not None
        ]
        needed = {segment for _, segment, won in held if won}
        for unit in {unit for unit, _, _ in held}:
            segments = {segment for held_by, segment, _ in held if held_by == unit} - needed
            try:
                await asyncio.to_thread(self._client(unit).drop, segments=sorted(segments))
            except PeerUnavailableError:
                continue

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """As RowStore. A column whose unit lost it is missing. Raises PeerUnavailableError: a unit does not answer."""
        rows = await self.read_views(row_ids, columns)
        return [{column: bytes(value) for column, value in row.items()} for row in rows]

    async def read_views(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, ColumnBytes]]:
        """As ``read_rows``, without a copy: values lie in one buffer, column by column, each aligned."""
        rows, _ = await self._read(row_ids, columns)
        return rows

    async def _read(
        self, row_ids: Sequence[RowId], columns: Sequence[Column]
    ) -> tuple[list[dict[Column, ColumnBytes]], list[Place]]:
        """(rows, what of them is lost)."""
        rows: list[dict[Column, ColumnBytes]] = [{**row} for row in await self._broker.read_rows(row_ids, columns)]
        by_unit = _by_unit(row_ids, rows, columns)
        fetched = await asyncio.gather(*(self._fetch(unit, held) for unit, held in by_unit.items()))
        lost = list(chain(*fetched))
        for place in chain(*by_unit.values()):
            place.row[place.column] = place.buffer.toreadonly()
        for place in lost:
            del place.row[place.column]
        return rows, lost

    async def _fetch(self, unit: str, places: Sequence[Place]) -> list[Place]:
        """As ``_get``, beside the loop."""
        return await asyncio.to_thread(self._get, unit, places)

    def _get(self, unit: str, places: Sequence[Place]) -> list[Place]:
        """Fill the buffers of one unit's values, through shared memory where possible. Returns those that are lost."""
        lost: list[Place] = []
        for some in _requests(self._map(places)):
            found = self._client(unit).read([place.at for place in some], [place.buffer for place in some])
            lost += [place for place, is_there in zip(some, found, strict=True) if not is_there]
        return lost

    def _map(self, places: Sequence[Place]) -> list[Place]:
        """Fill the buffers of values that are in this host's memory, though their unit be dead. Returns the others."""
        found = read_segments([place.at for place in places], [place.buffer for place in places], self._directory)
        return [place for place, is_there in zip(places, found, strict=True) if not is_there]

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


def _parcels(commit: Commit) -> tuple[list[list[_Parcel]], list[list[_Parcel]]]:
    """What goes into units: of each row, and of each block, all of whose columns do, because all are users'."""
    of_rows = [
        [
            _Parcel(group_id, [(raw,)], of_group=False)
            for group_id, _ in (parse_row_id(row.row_id),)
            for column, raw in row.columns.items()
            if in_unit(column)
        ]
        for row in commit.rows
    ]
    of_blocks = [
        [
            _Parcel(group_id, values[start : start + block.size], of_group=True)
            for group_id, start in zip(block.group_ids, count(step=block.size), strict=False)
            for values in block.columns.values()
        ]
        for block in map(Block.of_rows, commit.blocks)
    ]
    return of_rows, of_blocks


def _located(commit: Commit, of_rows: Sequence[list[_Parcel]], of_blocks: Sequence[list[_Parcel]]) -> Commit:
    """The commit as it goes into the broker: one locator for a value of a row, or for a column of a group."""
    rows: list[RowWrite] = []
    for row, parcels in zip(commit.rows, of_rows, strict=True):
        bulky = (column for column in row.columns if in_unit(column))
        located = zip(bulky, [encode(parcel.at) for parcel in parcels], strict=True)
        rows.append(replace(row, columns={**row.columns, **dict(located)}))
    blocks: list[Block] = []
    for block, parcels in zip(commit.blocks, of_blocks, strict=True):
        locators: list[Pieces] = [(encode(parcel.at),) for parcel in parcels]
        num_columns = len(block.columns)
        columns = {column: locators[n::num_columns] for n, column in enumerate(block.columns)}
        blocks.append(replace(block, columns=columns, shared=True))
    return replace(commit, rows=rows, blocks=blocks)


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


def _requests(places: Sequence[Place]) -> Iterator[list[Place]]:
    some: list[Place] = []
    total = 0
    for place in places:
        if some and (len(some) == RANGES_PER_REQUEST or total + place.at.nbytes > MAX_COLUMN_BYTES):
            yield some
            some, total = [], 0
        some.append(place)
        total += place.at.nbytes
    if some:
        yield some


class Place(NamedTuple):
    """A column of a row whose bytes are in a unit. locator: as the broker has it.  buffer: for the bytes."""

    row_id: RowId
    row: dict[Column, ColumnBytes]
    column: Column
    locator: bytes
    at: Range
    buffer: memoryview


def _by_unit(
    row_ids: Sequence[RowId], rows: Sequence[dict[Column, ColumnBytes]], columns: Sequence[Column]
) -> Mapping[str, list[Place]]:
    """Per unit what it holds of these rows, with room for it in one buffer."""
    locate = cache(locator_decoder.decode)  # rows of a group have one
    samples = [parse_row_id(row_id)[1] for row_id in row_ids]
    held = [
        (row_id, row, column, locator, at.unit, at.of(sample))
        for column in columns
        if in_unit(column)
        for row_id, row, sample in zip(row_ids, rows, samples, strict=True)
        if column in row
        for locator in (bytes(row[column]),)
        for at in (locate(locator),)
    ]
    sizes = [at.nbytes for *_, at in held]
    ends = list(accumulate(map(aligned, sizes)))
    whole = np.empty(ends[-1] if ends else 0, np.uint8).data  # numpy asks for huge pages, whose faults cost little
    result: dict[str, list[Place]] = {}
    for (row_id, row, column, locator, unit, at), size, start in zip(held, sizes, chain([0], ends), strict=False):
        place = Place(row_id, row, column, locator, at, whole[start : start + size])
        result.setdefault(unit, []).append(place)
    return result
