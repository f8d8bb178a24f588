"""Entries as both brokers check and store them.

Owns: what an entry, a commit and an explicit id must look like. Never: I/O. The in-memory twin and the Redis broker
call the same checks, so that a call refused by one is refused by the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from transport.broker.base import (
    Append,
    Block,
    Commit,
    DeadLetter,
    Entry,
    GroupWrite,
    RowWrite,
    StreamWrite,
    parse_entry_id,
)
from transport.contracts.messages import MAX_MESSAGE_BYTES
from transport.contracts.types import USER_PREFIX, TaskSpec, is_user_name
from transport.errors import MessageError

PAYLOAD = "payload"
_RAW_PAYLOAD = PAYLOAD.encode()
_ESCAPED = "backslashreplace"
DEAD_PREFIX = "dead_"


def check_entry(entry: Entry) -> None:
    """Raises MessageError for an oversized payload, ValueError for a field that shadows it."""
    if len(entry.payload) > MAX_MESSAGE_BYTES:
        raise MessageError(
            f"payload of {len(entry.payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}: "
            "bulk bytes travel beside the streams"
        )
    if PAYLOAD in entry.fields:
        raise ValueError(f"the field name {PAYLOAD!r} is taken by the binary payload")


def check_ids(ids: Iterable[str]) -> None:
    """Raises ValueError unless explicit ids ascend from above 0-0."""
    last = (0, 0)
    for entry_id in ids:
        current = parse_entry_id(entry_id)
        if current <= last:
            raise ValueError(f"entry id {entry_id} is not above {last[0]}-{last[1]}")
        last = current


def check_writes(writes: Iterable[StreamWrite]) -> None:
    """Checks every entry, and that the ids of each stream ascend."""
    for write in writes:
        check_ids(entry_id for entry_id, _ in write.entries)
        for _, entry in write.entries:
            check_entry(entry)


def check_commit(commit: Commit) -> None:
    """Raises ValueError for a row without columns or a group without samples; checks every block and entry."""
    for group in commit.groups:
        if group.size < 1:
            raise ValueError(f"group {group.group_id} has size {group.size}")
    for row in commit.rows:
        if not row.columns:
            raise ValueError(f"row {row.row_id} is written without a column")
        _check_appends(row.on_insert)
    for block in commit.blocks:
        check_block(block)
    _check_appends(commit.appends)


def check_block(block: Block) -> None:
    """Raises ValueError for groups without samples, rows without columns, or columns of another number of values."""
    num_values = len(block.group_ids) * (1 if block.shared else block.size)
    lengths = {column: len(values) for column, values in block.columns.items()}
    if block.size < 1 or not lengths or set(lengths.values()) != {num_values}:
        raise ValueError(f"a block of {len(block.group_ids)} groups of {block.size} rows has columns of {lengths}")


def without_blocks(commit: Commit) -> Commit:
    """The same step, its blocks written out; their groups then come before all rows, which makes no difference."""
    written = [_as_writes(block) for block in commit.blocks]
    groups = [*commit.groups, *(group for groups, _ in written for group in groups)]
    rows = [*commit.rows, *(row for _, rows in written for row in rows)]
    return replace(commit, groups=groups, rows=rows, blocks=())


def _as_writes(block: Block) -> tuple[list[GroupWrite], list[RowWrite]]:
    """The groups and rows of a block, one by one."""
    columns = [[b"".join(value) for value in values] for values in block.of_rows().columns.values()]
    rows = [
        RowWrite(row_id=row_id, columns=dict(zip(block.columns, values, strict=True)))
        for row_id, *values in zip(block.row_ids(), *columns, strict=True)
    ]
    return [GroupWrite(group_id=group_id, size=block.size, columns={}) for group_id in block.group_ids], rows


def _check_appends(appends: Sequence[Append]) -> None:
    for append in appends:
        check_entry(append.entry)


def check_tasks(tasks: Sequence[TaskSpec], *, of_user: bool = False) -> None:
    """Raises ValueError for a task that reads nothing (it would be ready before any row), a name used twice, or a name
    that is not of its owner: users' tasks begin with ``x_`` and the run's do not."""
    for task in tasks:
        if not task.reads:
            raise ValueError(f"task {task.name} reads no column")
        check_task_name(task.name, of_user=of_user)
    if len({task.name for task in tasks}) != len(tasks):
        raise ValueError("two tasks have one name")


def check_task_name(name: str, *, of_user: bool) -> None:
    """Raises ValueError for a user's task under a name of the run's, or the other way round."""
    if of_user and not is_user_name(name):
        raise ValueError(f"task {name!r} is not a user's: its name begins with {USER_PREFIX!r}, then a-z, 0-9 or _")
    if not of_user and name.startswith(USER_PREFIX):
        raise ValueError(f"task {name!r} is a user's, and would outlive what declares it")


def entry_from_fields(flat: Sequence[bytes]) -> Entry:
    """Name, value, name, value, ... as a server gives them. Foreign bytes are shown escaped, never refused."""
    pairs = dict(zip(flat[::2], flat[1::2], strict=True))
    payload = pairs.pop(_RAW_PAYLOAD, b"")
    fields = {str(name, "utf-8", _ESCAPED): str(value, "utf-8", _ESCAPED) for name, value in pairs.items()}
    return Entry(fields=fields, payload=payload)


def buried(queue: str, entry_id: str, reason: str, entry: Entry) -> Entry:
    """``entry`` of ``queue`` as it stands among the dead letters; the twin of ``bury`` in prelude.lua."""
    said = {"dead_queue": queue, "dead_id": entry_id, "dead_reason": reason}
    return Entry(fields={**entry.fields, **said}, payload=entry.payload)


def dead_letter(letter_id: str, buried: Entry) -> DeadLetter:
    """What was ``buried`` as ``letter_id``, taken apart again."""
    said = {name: value for name, value in buried.fields.items() if name.startswith(DEAD_PREFIX)}
    fields = {name: value for name, value in buried.fields.items() if name not in said}
    return DeadLetter(
        letter_id=letter_id,
        entry_id=said.get("dead_id", ""),
        queue=said.get("dead_queue", ""),
        reason=said.get("dead_reason", ""),
        entry=Entry(fields=fields, payload=buried.payload),
    )
