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
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transport.broker.base import Broker, Commit, CommitResult, RowWrite
from transport.errors import PeerUnavailableError
from transport.messages import MessageDecoder, encode
from transport.rows import check_commit
from transport.tensors.manifest import checksum
from transport.types import USER_PREFIX, Column, GroupId, RowId, Struct, parse_row_id
from transport.units import Part, UnitClient

UNIT_COLUMNS = frozenset({Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.LOSS_MASK, Column.REFERENCE_LOGPROBS})
"""Columns that grow with the response. The run's others are a few bytes and stay in the broker."""


class Locator(Struct, frozen=True, kw_only=True):
    """What stands in the broker in place of a column."""

    unit: str
    key: str
    nbytes: int
    checksum: str


_locator_decoder = MessageDecoder(Locator)


def in_unit(column: Column) -> bool:
    """Whether a column's bytes lie in a unit: those that grow with the response, and all of users."""
    return column in UNIT_COLUMNS or column.startswith(USER_PREFIX)


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
        stored = [await self._store(row) for row in commit.rows]
        rows = [replace(row, columns=columns) for row, columns in zip(commit.rows, stored, strict=True)]
        result = await self._broker.commit(replace(commit, rows=rows))
        for row, inserted in zip(rows, result.inserted, strict=True):
            if not inserted:
                await self._take_back(row)
        return result

    async def _store(self, row: RowWrite) -> Mapping[Column, bytes]:
        """Put the bulky columns of a row into a unit. Returns its columns with locators in their place."""
        attempt = uuid.uuid4().hex
        bulky = {column: raw for column, raw in row.columns.items() if in_unit(column)}
        if not bulky:
            return row.columns
        group_id, _ = parse_row_id(row.row_id)
        values = {f"{row.row_id}:{column}:{attempt}": raw for column, raw in bulky.items()}
        unit = await self._put(group_id, values)
        locators = {
            column: encode(Locator(unit=unit, key=key, nbytes=len(raw), checksum=checksum(raw)))
            for column, (key, raw) in zip(bulky, values.items(), strict=True)
        }
        return {**row.columns, **locators}

    async def _put(self, group_id: GroupId, values: Mapping[str, bytes]) -> str:
        """Store in the first unit that takes it. Returns that unit."""
        failures: list[str] = []
        for unit in self.ranked_units(group_id):
            try:
                await asyncio.to_thread(self._client(unit).put, group_id, values)
            except PeerUnavailableError as error:
                failures.append(str(error))
            else:
                return unit
        raise PeerUnavailableError("storage units", "; ".join(failures) or "there are none")

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
        for unit, parts in _by_unit(rows).items():
            values = await asyncio.to_thread(self._client(unit).get, [part for _, _, part in parts])
            for (index, column, _), value in zip(parts, values, strict=True):
                if value is None:
                    del rows[index][column]
                else:
                    rows[index][column] = value
        return rows

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
