"""Rows and groups out of the server's hashes: in one command where they are small, else in few round trips.

Owns: how they are read. Never: writes. Invariant: whatever is sent here may be sent any number of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, cast

import msgspec

from transport.broker import keys
from transport.broker.lua import Request
from transport.broker.redis_link import RedisLink
from transport.types import USER_PREFIX, Column, GroupId, RowId, RunName, parse_row_id

ROWS_PER_ROUND_TRIP = 256
"""HMGETs in one pipeline: enough to hide the round trip, few enough to bound what the server buffers."""
ROWS_FOR_SCRIPT = 16
"""From so many rows on, a script reads them in one command, as long as they are small."""
ROWS_PER_SCRIPT = 1024
"""Some 3 ms in which others wait."""
MAX_SMALL_BYTES = 1024 * 1024

_lengths_decoder = msgspec.msgpack.Decoder(list[int])
_T = TypeVar("_T")
_Name = TypeVar("_Name", bound=str)


class RowReader:
    """Of one run. Its methods are those of Broker (base.py)."""

    def __init__(self, link: RedisLink, run: RunName) -> None:
        self._link = link
        self._run = run
        self._prefix = keys.full(run, "")

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        for row_id in row_ids:
            parse_row_id(row_id)
        found = await self._read_small(row_ids, columns) if columns and len(row_ids) >= ROWS_FOR_SCRIPT else []
        rest = row_ids[len(found) :]
        rows = await self._read_hashes([keys.row(self._run, row_id) for row_id in rest], columns)
        await self._add_shared(rest, columns, rows)
        return found + rows

    async def _add_shared(
        self, row_ids: Sequence[RowId], columns: Sequence[Column], rows: Sequence[dict[Column, bytes]]
    ) -> None:
        """Fill in what rows have together with all of their group, as far as a group has them."""
        fields = {f"{keys.SHARED_PREFIX}{column}": column for column in columns if column.startswith(USER_PREFIX)}
        lacking = [
            (row, *parse_row_id(row_id))
            for row_id, row in zip(row_ids, rows, strict=True)
            if any(column not in row for column in fields.values())
        ]
        group_ids = list(dict.fromkeys(group_id for _, group_id, _ in lacking))
        hashes = [keys.group(self._run, group_id) for group_id in group_ids]
        of_group = dict(zip(group_ids, await self._read_hashes(hashes, ["size", *fields]), strict=True))
        for row, group_id, sample in lacking:
            found = of_group[group_id]
            if sample < int(found.get("size", 0)):
                for name, column in fields.items():
                    if name in found:
                        row.setdefault(column, found[name])

    async def _read_small(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """The first of these rows, all of them when they are small (locators of storage units are)."""
        found: list[dict[Column, bytes]] = []
        for part in _parts(row_ids, ROWS_PER_SCRIPT):
            body: dict[str, object] = {"rows": part, "columns": list(columns), "max_bytes": MAX_SMALL_BYTES}
            reply = await self._link.script("read_rows", self._prefix, self._prefix, 0, Request(body))
            number, lengths, values = cast("tuple[int, bytes, bytes]", reply)
            found += _cut_rows(columns, _lengths_decoder.decode(lengths), values)
            if number < len(part):
                break
        return found

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._read_hashes([keys.group(self._run, group_id) for group_id in group_ids], columns)

    async def _read_hashes(self, hashes: Sequence[str], names: Sequence[_Name]) -> list[dict[_Name, bytes]]:
        if not names:
            return [{} for _ in hashes]
        found: list[dict[_Name, bytes]] = []
        for part in _parts(hashes, ROWS_PER_ROUND_TRIP):
            replies = await self._link.pipeline([("HMGET", key, *names) for key in part])
            for reply in cast("list[list[bytes | None]]", replies):
                pairs = zip(names, reply, strict=True)
                found.append({name: value for name, value in pairs if value is not None})
        return found


def _cut_rows(columns: Sequence[Column], lengths: Sequence[int], values: bytes) -> list[dict[Column, bytes]]:
    """Rows from their values joined. lengths: per row and column, -1 for none."""
    found: list[dict[Column, bytes]] = []
    start = 0
    for first in range(0, len(lengths), len(columns)):
        row: dict[Column, bytes] = {}
        for column, length in zip(columns, lengths[first : first + len(columns)], strict=True):
            if length >= 0:
                row[column] = values[start : start + length]
                start += length
        found.append(row)
    return found


def _parts(items: Sequence[_T], size: int) -> Iterable[Sequence[_T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
