"""Rows whose bulky columns live in storage units; the broker holds a locator in each one's place.

    write   bytes -> a unit, under a key of this attempt;  then the broker's commit, with locators
    lost    an insert that did not win takes its own bytes back
    read    locators from the broker, bytes from the units they name
    drop    in the broker first (from then on no insert can win), then in every unit

The broker stays the only judge of what exists, so tasks, notices and first-insert-wins work unchanged. Bytes whose
writer died between the two steps of a write stay in their unit until their group is dropped.

Owns: placement and the two-step write. Invariant: a locator in the broker points to bytes that were stored before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from transport.broker.base import Broker, Commit, CommitResult, RowWrite
from transport.errors import PeerUnavailableError
from transport.messages import MessageDecoder, encode
from transport.rows import check_commit
from transport.tensors.manifest import checksum
from transport.types import USER_PREFIX, Column, GroupId, RowId, Struct, parse_row_id
from transport.units import GroupParts, Part, UnitClient

T = TypeVar("T")

UNIT_COLUMNS = frozenset({Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.LOSS_MASK, Column.REFERENCE_LOGPROBS})
"""Columns that grow with the response. The run's others are a few bytes and stay in the broker."""


class Locator(Struct, frozen=True, kw_only=True):
    """What stands in the broker in place of a column."""

    unit: str
    key: str
    nbytes: int
    checksum: str


ROWS_PER_REQUEST = 1024
"""The header of a request names every value: some 100 bytes each, of the 1 MiB that a header may have."""
_locator_decoder = MessageDecoder(Locator)


def in_unit(column: Column) -> bool:
    """Whether a column's bytes lie in a unit: those that grow with the response, and all of users."""
    return column in UNIT_COLUMNS or column.startswith(USER_PREFIX)


class _Bulky:
    """What of one row goes into a unit: parts and values belong together; ``unit`` is where they went."""

    def __init__(self, row: RowWrite, attempt: str) -> None:
        self.row = row
        self.group_id, _ = parse_row_id(row.row_id)
        self.unit = ""
        self._columns = [column for column in row.columns if in_unit(column)]
        self.values = [row.columns[column] for column in self._columns]
        self.parts = tuple(
            Part(key=f"{row.row_id}:{column}:{attempt}", nbytes=len(raw), checksum=checksum(raw))
            for column, raw in zip(self._columns, self.values, strict=True)
        )

    def stored(self) -> Mapping[Column, bytes]:
        """The row's columns as they go into the broker."""
        locators = {
            column: encode(Locator(unit=self.unit, key=part.key, nbytes=part.nbytes, checksum=part.checksum))
            for column, part in zip(self._columns, self.parts, strict=True)
        }
        return {**self.row.columns, **locators}


class UnitRows:
    """A RowStore over a broker and storage units, used from one event loop.

    units: addresses that new rows may go to; rows stay readable in units that were removed from the list.
    """

    def __init__(self, broker: Broker, units: Sequence[str], *, secret: bytes = b"") -> None:
        self._broker = broker
        self._secret = secret
        self._units = list(dict.fromkeys(units))
        self._clients: dict[str, UnitClient] = {}
        self._undropped: dict[str, set[GroupId]] = {}

    def add_unit(self, address: str) -> None:
        """Let new rows go to one more unit."""
        if address not in self._units:
            self._units.append(address)

    def remove_unit(self, address: str) -> None:
        """Send no new rows to a unit; its rows are read from it until their groups are dropped."""
        self._units.remove(address)

    def ranked_units(self, group_id: GroupId) -> list[str]:
        """The units in the order in which they are tried for a group (rendezvous hashing: a change moves the least)."""

        def weight(address: str) -> bytes:
            return hashlib.blake2b(f"{group_id} {address}".encode(), digest_size=8).digest()

        return sorted(self._units, key=weight)

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        rows = await self._store(commit.rows)
        result = await self._broker.commit(replace(commit, rows=rows))
        for row, inserted in zip(rows, result.inserted, strict=True):
            if not inserted:
                await self._take_back(row)
        return result

    async def _store(self, rows: Sequence[RowWrite]) -> list[RowWrite]:
        """Put the bulky columns of all rows into units. Returns the rows with locators in their place."""
        attempt = uuid.uuid4().hex
        bulky = [_Bulky(row, attempt) for row in rows]
        await self._place([one for one in bulky if one.parts])
        return [replace(one.row, columns=one.stored()) for one in bulky]

    async def _place(self, bulky: list[_Bulky]) -> None:
        """Put each row into the first unit of its group's ranking that takes it: one request a unit, all at once."""
        rankings = {one.group_id: self.ranked_units(one.group_id) for one in bulky}
        failures: list[str] = []
        for rank in range(len(self._units)):
            by_unit: dict[str, list[_Bulky]] = {}
            for one in bulky:
                by_unit.setdefault(rankings[one.group_id][rank], []).append(one)
            tried = list(by_unit.items())
            errors = await asyncio.gather(*(asyncio.to_thread(self._put, unit, part) for unit, part in tried))
            failures += [error for error in errors if error]
            bulky = [one for (_, part), error in zip(tried, errors, strict=True) if error for one in part]
        if bulky:
            raise PeerUnavailableError("storage units", "; ".join(failures) or "there are none")

    def _put(self, unit: str, bulky: Sequence[_Bulky]) -> str:
        """Returns why the unit did not take it, "" when it did."""
        client = self._client(unit)
        try:
            for some in _pieces(bulky, ROWS_PER_REQUEST):
                groups = [GroupParts(group_id=one.group_id, parts=one.parts) for one in some]
                client.put(groups, [value for one in some for value in one.values])
        except PeerUnavailableError as error:
            return str(error)
        for one in bulky:
            one.unit = unit
        return ""

    async def _take_back(self, row: RowWrite) -> None:
        """Free what an insert that lost had put; what cannot be freed now goes with its group."""
        for unit, parts in _by_unit([row.columns]).items():
            try:
                await asyncio.to_thread(self._client(unit).drop, keys=[part.key for _, _, part in parts])
            except PeerUnavailableError:
                continue

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """As RowStore. A column whose unit lost it is missing. Raises PeerUnavailableError: a unit does not answer."""
        rows = await self._broker.read_rows(row_ids, columns)
        held = list(_by_unit(rows).items())
        read = (asyncio.to_thread(self._get, unit, [part for _, _, part in parts]) for unit, parts in held)
        for (_, parts), values in zip(held, await asyncio.gather(*read), strict=True):
            for (index, column, _), value in zip(parts, values, strict=True):
                if value is None:
                    del rows[index][column]
                else:
                    rows[index][column] = value
        return rows

    def _get(self, unit: str, parts: Sequence[Part]) -> list[bytes | None]:
        client = self._client(unit)
        return [value for some in _pieces(parts, ROWS_PER_REQUEST) for value in client.get(some)]

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._broker.read_groups(group_ids, columns)

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """As RowStore. A unit that does not answer is told with the next drop."""
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


def _pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _by_unit(rows: Sequence[Mapping[Column, bytes]]) -> dict[str, list[tuple[int, Column, Part]]]:
    """Per unit what it holds of these rows: index of the row, column, and the value to ask for."""
    result: dict[str, list[tuple[int, Column, Part]]] = {}
    for index, row in enumerate(rows):
        for column, raw in row.items():
            if in_unit(column):
                at = _locator_decoder.decode(raw)
                part = Part(key=at.key, nbytes=at.nbytes, checksum=at.checksum)
                result.setdefault(at.unit, []).append((index, column, part))
    return result
