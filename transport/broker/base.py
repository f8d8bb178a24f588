"""The broker protocol and the delivery contract.

One ``Broker`` object is one run on one server. It offers two kinds of stream and one atomic step:

**Work queues** (dispatch plans, scoring tasks). A consumer group gives an entry to one consumer, which holds a lease on
it: ``claim`` starts the lease, ``renew`` continues it, ``commit(acks=...)`` ends it *together with the effect*. An
entry that was not renewed for ``idle_s`` is handed to the next caller of ``reclaim``; after ``max_deliveries`` it
goes to the dead-letter stream with its reason. Delivery is at-least-once; effects are once, because rows are inserted
once. An acknowledged or dead-lettered entry is freed, so the length of a queue is its backlog: waiting + pending.

**Logs** (events, rounds, weights, control). No group, no reclaim: every reader keeps a cursor. A log with one writer
takes explicit entry ids; an id that is not above the last one is *already there*, so a command executed twice is
appended once. ``trim`` frees what lies at or below a cursor and never touches pending entries of a queue.

**commit** is the one atomic step: insert rows (the first valid insert wins), append to logs if and only if the insert
won, acknowledge deliveries, and put a notice on a task's queue when a unit's inputs have become complete. All or
nothing. A group is written before its rows: a row whose group is not there (never written, or dropped) is refused, so
that a late insert cannot leak memory and no memory of dropped groups is needed; group ids are never used twice.

**Sent once.** A write whose connection was cut is sent again with the same number and the server answers with what it
did the first time, so an entry is appended once per call. Only when BrokerUnavailableError reaches the caller is it
unknown whether the write happened; calling again is then safe for rows and for explicit ids.

**One run a name**: the broker keeps the id of the run that has a name (``hold_run``, ``join_run``), and whatever a
process of a run sends is refused where the name is another run's (OtherRunError), in the step itself. Where no run has
the name, because the broker lost its data, a process waits until one that started the run has claimed it again.

**Fences**: a role (orchestrator, trainer) holds an epoch; a write that carries an older epoch raises FencedError. One
that carries a newer epoch than the broker knows (it lost its tail) restores it.

Errors: BrokerUnavailableError (retry), BrokerRejectedError, FencedError, OtherRunError; MessageError for a payload over
MAX_MESSAGE_BYTES, ValueError for a call that can never be right. Nothing blocks longer than its ``wait_s`` plus, when
the broker went away, the outage that the client waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from transport.broker.reach import Away
from transport.contracts.messages import MAX_MESSAGE_BYTES
from transport.contracts.types import (
    USER_PREFIX,
    Column,
    GroupId,
    RowId,
    RunName,
    TaskSpec,
    WorkerId,
    is_user_name,
    row_id,
)
from transport.errors import MessageError

MAX_DEAD_LETTERS = 10_000  # that are kept; each is a bug or a poisoned input: more would not be read
ZERO_ID = "0-0"  # before the first entry of any stream


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one stream entry holds: readable fields for people who look with redis-cli, and at most one binary field.

    The field name "payload" is taken by the binary one. A Struct, because one is made of every event that is read, and
    a frozen dataclass takes ten times as long to make.
    """

    fields: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    payload: bytes = b""


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a log. entry_id: ``<ms or event>-<index>``, comparable with parse_entry_id."""

    entry_id: str
    entry: Entry


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One claimed entry of a work queue."""

    queue: str
    entry_id: str
    entry: Entry
    deliveries: int = 1  # how often it was handed out


class Fence(msgspec.Struct, frozen=True, kw_only=True):
    """A role's right to write."""

    role: str
    epoch: int


class RunClaim(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run, as its broker knows it.

    run_id: made with the run's journal, equal at every start of it.  start: made at each start.  directory, host: where
    the run is, for people.  place: of this directory on this host, to compare.
    """

    run_id: str
    start: str
    directory: str
    host: str
    place: str


class RunOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The run that has a name on a broker. age_s: seconds since its newest start, by the broker's clock; None: unknown.
    is_live: it renewed its claim within the last ALIVE_S seconds."""

    claim: RunClaim
    age_s: float | None
    is_live: bool


ALIVE_S = 30.0
"""Time to live of a claim, renewed every few seconds: longer than a busy machine keeps a process waiting."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """An entry for a log (or a queue) that is appended inside a commit."""

    stream: str
    entry: Entry


class StreamWrite(msgspec.Struct, frozen=True, kw_only=True):
    """Entries for one stream under explicit ids, which ascend. is_queue: it is a work queue."""

    stream: str
    entries: Sequence[tuple[str, Entry]]
    is_queue: bool = False


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's only writer of commands notices that the broker lost what it wrote: each step leaves ``now``, and is
    refused when what the broker holds is not ``after``, left by the step before. after: "" where any will do.

    Without it, a new entry could enter a stream before the lost ones are written again, which would keep them out.
    """

    after: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWrite:
    """Columns of one row, written once and together.

    If the row already has any of these columns, nothing is written and ``on_insert`` is not appended. The same holds
    when its group is not there, or is smaller than this sample's index.
    """

    row_id: RowId
    columns: Mapping[Column, bytes]
    on_insert: Sequence[Append] = ()


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True):
    """A row that is to go while this column of it has this value.  on_withdrawn: appended if it went."""

    row_id: RowId
    column: Column
    value: bytes
    on_withdrawn: Sequence[Append] = ()


class GroupWrite(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples of one group share, written once when it is admitted. size: samples in the group."""

    group_id: GroupId
    size: int
    columns: Mapping[Column, bytes]


Pieces: TypeAlias = Sequence[bytes | memoryview]
"""One value in pieces that follow one another, so that they need not be joined; each is a buffer of single bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """New groups with all their rows, which have the same columns: what many GroupWrites and RowWrites say, in less.

    size: rows of each group.  columns: per column its values, group by group: ``size`` a group, or, where they are
    ``shared``, one that every row of the group then has, so that the broker need not keep it for each.
    """

    group_ids: Sequence[GroupId]
    size: int
    columns: Mapping[Column, Sequence[Pieces]]
    shared: bool = False

    def row_ids(self) -> list[RowId]:
        return [row_id(group_id, sample) for group_id in self.group_ids for sample in range(self.size)]

    def of_rows(self) -> Block:
        """The same with a value for each row."""
        if not self.shared:
            return self
        columns = {name: [value for value in values for _ in range(self.size)] for name, values in self.columns.items()}
        return replace(self, columns=columns, shared=False)

    def values(self) -> Iterator[Pieces]:
        """Every value, row by row, or group by group where they are shared."""
        return (value for row in zip(*self.columns.values(), strict=True) for value in row)


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """End the lease on one delivery."""

    queue: str
    entry_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One atomic step. Everything in it happens, or nothing does.

    appends: appended in any case (unlike a row's ``on_insert``).
    if_held: nothing happens unless every delivery in ``acks`` is still pending: what was worked out from a row must not
    be written beside another one that took its place after the broker lost its tail.
    Order: groups, rows (each with its on_insert and the notices that it completes), blocks, acks, appends.
    """

    fence: Fence | None = None
    groups: Sequence[GroupWrite] = ()
    rows: Sequence[RowWrite] = ()
    blocks: Sequence[Block] = ()
    acks: Sequence[Ack] = ()
    appends: Sequence[Append] = ()
    if_held: bool = False


class CommitResult(msgspec.Struct, frozen=True, kw_only=True):
    inserted: tuple[bool, ...]  # per row of the commit, then per row of its blocks, whether its insert won
    retained_bytes: int  # of the run, afterwards


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered, not yet acknowledged entry of a work queue."""

    entry_id: str
    consumer: str
    idle_s: float
    deliveries: int


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that was given up, and the reason. The newest MAX_DEAD_LETTERS are kept."""

    letter_id: str  # among the dead letters, for ``retry_dead`` and ``drop_dead``
    entry_id: str  # in the queue it came from
    queue: str
    reason: str
    entry: Entry


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who answers."""

    version: str
    boot_id: str  # changes when the server restarts, and when it holds the caller's run anew
    address: str
    uptime_s: float = float("inf")


def parse_entry_id(entry_id: str) -> tuple[int, int]:
    """``"12-3"`` -> ``(12, 3)``, so that ids compare. Raises ValueError on anything else."""
    major, separator, minor = entry_id.partition("-")
    if not separator:
        raise ValueError(f"{entry_id!r} is not an entry id (number-number)")
    return int(major), int(minor)


class Broker(Protocol):
    """One run on one broker. Streams are named by the short names of ``keys.py`` (``plans:<worker>``, ``events``)."""

    @property
    def run(self) -> RunName: ...

    @property
    def run_id(self) -> str:
        """Id of the run that this process is of; "" before ``hold_run`` or ``join_run``: then nothing is compared."""
        ...

    # -- who answers, who may write
    def away(self) -> Away | None:
        """Since when and why the broker does not answer this process; None while it does. From memory, at once."""
        ...

    async def info(self) -> ServerInfo: ...
    async def owner(self) -> RunOwner | None:
        """The run that has this name here; None: no run has."""
        ...

    async def hold_run(self, claim: RunClaim, *, after: str = "") -> None:
        """Claim the name for a start of a run, or renew that claim; this process is of the run from now on.

        The name must be free, or held by this start, or by the start ``after`` of the same run. Where the broker loses
        its data later, this process claims the name again by itself.
        Raises: OtherRunError: another run, or another start of this one, has the name. Nothing was changed.
        """
        ...

    async def leave_run(self) -> None:
        """The start that this process claimed is not live any more. Its run keeps the name."""
        ...

    async def forget_run(self) -> None:
        """Remove all that the broker holds of the run that this process claimed; its name is free again.

        Raises BrokerRejectedError: the broker's user may not list keys (docs/broker.md): all of it is kept."""
        ...

    async def join_run(self, run_id: str = "") -> str:
        """This process is of the run ``run_id`` from now on; "": of the run that has the name now, if any has.

        Returns the id, "" where no run has the name (one of an earlier version, or a client's own): then nothing is
        compared."""
        ...

    async def acquire_epoch(self, role: str, *, at_least: int = 0) -> int:
        """Raise the role's epoch by one (and above ``at_least``) and return it; the former holder is fenced off.

        A process that claimed the run (``hold_run``) claims it again in the same step; one that joined it takes no
        epoch unless its run has the name. Raises OtherRunError.
        """
        ...

    async def next_incarnation(self, name: str) -> int: ...  # 1, 2, 3, ... for each process of this name in the run

    # -- logs
    async def append(self, log: str, entry: Entry, *, fence: Fence | None = None) -> str: ...  # the entry's id
    async def append_many(
        self, writes: Sequence[StreamWrite], *, fence: Fence | None = None, mark: Mark | None = None
    ) -> list[int]:
        """Append to several streams in one step. Returns per write how many of its entries were not there yet.

        Raises TailLostError, and appends nothing, when the broker does not hold ``mark.after``.
        """
        ...

    async def read(self, log: str, after: str, *, count: int, wait_s: float = 0.0) -> list[LogEntry]:
        """Entries after the cursor, oldest first; [] when none came within ``wait_s`` seconds."""
        ...

    async def tail(self, log: str, *, count: int) -> list[LogEntry]: ...  # the newest ones, oldest of them first
    async def last_id(self, stream: str) -> str:
        """Id of the last entry ever added (also if it was trimmed), ZERO_ID when there was none."""
        ...

    async def length(self, stream: str) -> int: ...
    async def trim(self, stream: str, upto: str) -> int:
        """Free entries with id <= ``upto``; in a work queue only what neither waits nor is held. Returns how many."""
        ...

    async def delete_stream(self, stream: str) -> None: ...

    # -- work queues
    async def enqueue(self, queue: str, entry: Entry) -> str: ...  # creates its consumer group; the entry's id
    async def claim(self, queue: str, consumer: str, *, count: int, wait_s: float = 0.0) -> list[Delivery]: ...
    async def renew(self, queue: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        """Continue the lease. Returns the ids that this consumer still holds: work on the others must stop."""
        ...

    async def reclaim(
        self, queue: str, consumer: str, *, idle_s: float, max_deliveries: int, count: int
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        """Take over entries whose lease ran out; those delivered ``max_deliveries`` times go to the dead letters.

        A caller that must report a dead letter in the same step asks for one delivery more here and calls ``reject``
        itself when ``delivery.deliveries`` is over its limit.
        """
        ...

    async def reject(self, delivery: Delivery, reason: str, *, appends: Sequence[Append] = ()) -> None:
        """Move one delivery to the dead letters with its reason, acknowledge it, append ``appends``: one step.

        Nothing happens when the delivery is not pending any more.
        """
        ...

    async def pending(self, queue: str, *, count: int = 100) -> list[Pending]: ...
    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]: ...  # the oldest ones, oldest first
    async def retry_dead(self, letter_id: str) -> str | None:
        """Put a dead letter back into its queue as a new entry, not delivered yet: one step.

        Returns the entry's id; None when there is no such letter (any more), and then nothing happens. Not for queues
        whose writer chooses the ids: the new entry's id would be above all of its own.
        """
        ...

    async def drop_dead(self, letter_id: str) -> bool: ...  # forget it; whether it was there

    # -- the atomic step, rows
    async def declare_tasks(self, tasks: Sequence[TaskSpec]) -> None:
        """Store the run's tasks in place of former ones; their notices go to the queue ``tasks:<name>``. Idempotent.
        Tasks of users stay.

        Declared before rows are written: a unit that was complete before is not noticed. A notice has the readable
        fields task, unit (row or group id) and group, and no payload; there is exactly one for each unit.
        """
        ...

    async def add_user_task(self, task: TaskSpec) -> None:
        """Store one user's task (``x_...``) beside all others, in place of a former one of its name. Idempotent."""
        ...

    async def remove_user_task(self, name: str) -> None: ...  # and its queue; nothing happens when there is none
    async def commit(self, commit: Commit) -> CommitResult: ...
    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """Per row the columns that exist; {} for a row that does not."""
        ...

    async def read_groups(
        self, group_ids: Sequence[GroupId], columns: Sequence[Column]
    ) -> list[dict[Column, bytes]]: ...
    async def has_groups(self, group_ids: Sequence[GroupId]) -> list[bool]: ...  # those that were not dropped
    async def withdraw_rows(self, withdrawals: Sequence[Withdrawal]) -> list[bool]:
        """Take rows out whose bytes are lost elsewhere, so that they can be inserted anew: per row whether it went.

        Notices of units that it had completed go with it, held or not, and so does what a group's task wrote into the
        others: what was worked out from lost bytes stands beside no new ones.
        """
        ...

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        """Free the groups and their rows; later inserts into them are refused. Returns the bytes freed."""
        ...

    async def retained_bytes(self) -> int: ...  # of all column values of groups and rows

    # -- leases of workers, settings
    async def beat(self, worker_id: WorkerId, status: bytes, *, ttl_s: float) -> None: ...
    async def leases(self) -> dict[WorkerId, bytes]: ...  # status of every worker whose lease is alive
    async def end_lease(self, worker_id: WorkerId) -> None: ...
    async def put_meta(self, name: str, value: bytes, *, ttl_s: float | None = None) -> None: ...
    async def get_meta(self, name: str) -> bytes | None: ...
    async def streams(self) -> dict[str, int]: ...  # length of every stream of the run, by its short name
    async def close(self) -> None: ...


def without_password(url: str) -> tuple[str, str]:
    """The URL as it may stand on a command line, which everybody on the host can read, and the password that it held.

    "" where it held none. The user's name stays. Raises ValueError for what is no URL.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    name, _, written = user.partition(":")
    query = parse_qsl(parts.query)
    password = dict(query).get("password") or unquote(written)
    if not password:
        return url, ""
    place = f"{name}@{host}" if name else host
    options = urlencode([(option, value) for option, value in query if option != "password"])
    # put together by hand: urlunsplit writes unix:/path for unix:///path
    return f"{parts.scheme}://{place}{parts.path}" + (f"?{options}" if options else ""), password


# --- what an entry, a commit and an explicit id must look like: both brokers refuse the same --------------------------

PAYLOAD = "payload"
_ESCAPED = "backslashreplace"


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
    for block in commit.blocks:
        check_block(block)
    for append in chain(commit.appends, *(row.on_insert for row in commit.rows)):
        check_entry(append.entry)


def check_block(block: Block) -> None:
    """Raises ValueError for groups without samples, rows without columns, or columns of another number of values."""
    num_values = len(block.group_ids) * (1 if block.shared else block.size)
    lengths = {column: len(values) for column, values in block.columns.items()}
    if block.size < 1 or not lengths or set(lengths.values()) != {num_values}:
        raise ValueError(f"a block of {len(block.group_ids)} groups of {block.size} rows has columns of {lengths}")


def without_blocks(commit: Commit) -> Commit:
    """The same step, its blocks written out; their groups then come before all rows, which makes no difference."""
    groups, rows = [*commit.groups], [*commit.rows]
    for block in commit.blocks:
        groups += [GroupWrite(group_id=group_id, size=block.size, columns={}) for group_id in block.group_ids]
        columns = [[b"".join(value) for value in values] for values in block.of_rows().columns.values()]
        rows += [
            RowWrite(row_id=row_id, columns=dict(zip(block.columns, values, strict=True)))
            for row_id, *values in zip(block.row_ids(), *columns, strict=True)
        ]
    return replace(commit, groups=groups, rows=rows, blocks=())


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
    payload = pairs.pop(PAYLOAD.encode(), b"")
    fields = {str(name, "utf-8", _ESCAPED): str(value, "utf-8", _ESCAPED) for name, value in pairs.items()}
    return Entry(fields=fields, payload=payload)


def buried(queue: str, entry_id: str, reason: str, entry: Entry) -> Entry:
    """``entry`` of ``queue`` as it stands among the dead letters; the twin of ``bury`` in prelude.lua."""
    said = {"dead_queue": queue, "dead_id": entry_id, "dead_reason": reason}
    return Entry(fields={**entry.fields, **said}, payload=entry.payload)


def dead_letter(letter_id: str, buried: Entry) -> DeadLetter:
    """What was ``buried`` as ``letter_id``, taken apart again."""
    said = {name: value for name, value in buried.fields.items() if name.startswith("dead_")}
    fields = {name: value for name, value in buried.fields.items() if name not in said}
    queue, entry_id, reason = (said.get(f"dead_{name}", "") for name in ("queue", "id", "reason"))
    entry = Entry(fields=fields, payload=buried.payload)
    return DeadLetter(letter_id=letter_id, entry_id=entry_id, queue=queue, reason=reason, entry=entry)
