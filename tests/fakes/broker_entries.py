"""Entries, groups and rows by name, as the broker's contract is told with."""

from __future__ import annotations

from collections.abc import Sequence

from transport.broker import keys
from transport.broker.base import Append, Delivery, Entry, GroupWrite, LogEntry, RowWrite
from transport.contracts.types import Column, GroupId, RowId

IDS, LOGPROBS, REWARD = Column.RESPONSE_IDS, Column.ROLLOUT_LOGPROBS, Column.REWARD
LEASE_S = 0.05
"""Soon over, and long enough to renew in."""
QUEUE = "plans:generate-0.1"


def entry(name: str, payload: bytes = b"") -> Entry:
    return Entry(fields={"name": name}, payload=payload)


def names(entries: Sequence[LogEntry] | Sequence[Delivery]) -> list[str]:
    return [found.entry.fields["name"] for found in entries]


def group(group_id: str, size: int = 2, columns: dict[Column, bytes] | None = None) -> GroupWrite:
    return GroupWrite(group_id=GroupId(group_id), size=size, columns=columns or {Column.PROMPT_TEXT: b"2+2="})


def row(row_id: str, *appends: Append, **columns: bytes) -> RowWrite:
    named = {Column(name): value for name, value in columns.items()}
    return RowWrite(row_id=RowId(row_id), columns=named or {IDS: b"\x00\xff"}, on_insert=appends)


def told(name: str) -> Append:
    return Append(stream=keys.EVENTS, entry=entry(name))
