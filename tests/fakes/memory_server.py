"""What a server holds, as plain objects: the state behind ``MemoryBroker``, and the knobs that make it fail.

Owns: streams with their pending lists, groups with their rows, leases. Never: awaits anything but a change.
"""

from __future__ import annotations

import asyncio
import copy
from bisect import bisect_right
from dataclasses import dataclass, field

from transport.broker import keys
from transport.broker.base import (
    MAX_DEAD_LETTERS,
    ZERO_ID,
    DeadLetter,
    Entry,
    LogEntry,
    Pending,
    RunClaim,
    buried,
    dead_letter,
    parse_entry_id,
)
from transport.contracts.types import Column, GroupId, RunName, TaskSpec, WorkerId
from transport.errors import BrokerUnavailableError
from transport.process.clock import Clock, MonotonicClock


@dataclass(slots=True)
class Hold:
    """A consumer's lease on one entry."""

    consumer: str
    since_s: float
    deliveries: int


@dataclass(slots=True)
class Stream:
    """A log, or a work queue once it has a consumer group."""

    entries: list[LogEntry] = field(default_factory=list[LogEntry])
    last_id: str = ZERO_ID
    is_queue: bool = False
    delivered_id: str = ZERO_ID
    pending: dict[str, Hold] = field(default_factory=dict[str, Hold])

    def add(self, entry: Entry, entry_id: str | None, now_ms: int) -> str | None:
        """Append. Returns the id, None when an explicit one was already there."""
        last = parse_entry_id(self.last_id)
        if entry_id is not None and parse_entry_id(entry_id) <= last:
            return None
        major, minor = max((now_ms, 0), (last[0], last[1] + 1), (0, 1))
        self.last_id = entry_id if entry_id is not None else f"{major}-{minor}"
        self.entries.append(LogEntry(entry_id=self.last_id, entry=entry))
        return self.last_id

    def after(self, entry_id: str, count: int) -> list[LogEntry]:
        start = bisect_right(self.entries, parse_entry_id(entry_id), key=_order)
        return self.entries[start : start + count]

    def claim(self, consumer: str, count: int, now_s: float) -> list[LogEntry]:
        taken = self.after(self.delivered_id, count)
        for entry in taken:
            self.pending[entry.entry_id] = Hold(consumer, now_s, 1)
            self.delivered_id = entry.entry_id
        return taken

    def held_by(self, entry_id: str) -> str | None:
        hold = self.pending.get(entry_id)
        return hold.consumer if hold else None

    def expired(self, not_since_s: float, count: int) -> list[str]:
        """Ids of pending entries, oldest first, whose lease was last renewed at ``not_since_s`` or before."""
        ids = [entry_id for entry_id, hold in self.pending.items() if hold.since_s <= not_since_s]
        return sorted(ids, key=parse_entry_id)[:count]

    def hand_over(self, entry_id: str, consumer: str, now_s: float) -> LogEntry:
        self.pending[entry_id] = Hold(consumer, now_s, self.pending[entry_id].deliveries + 1)
        return self.entries[self._index(entry_id)]

    def free(self, entry_id: str) -> LogEntry:
        """End a delivery and remove its entry."""
        del self.pending[entry_id]
        return self.entries.pop(self._index(entry_id))

    def take_back(self, unit: str) -> None:
        """Remove the notices of a unit, delivered or not."""
        gone = {entry.entry_id for entry in self.entries if entry.entry.fields.get("unit") == unit}
        self.entries = [entry for entry in self.entries if entry.entry_id not in gone]
        self.pending = {entry_id: hold for entry_id, hold in self.pending.items() if entry_id not in gone}

    def trim(self, upto: tuple[int, int]) -> int:
        """Remove entries up to an id; of a queue only what was delivered and is not pending."""
        if self.is_queue:
            upto = min(upto, parse_entry_id(self.delivered_id))
        kept = [entry for entry in self.entries if _order(entry) > upto]
        if self.pending:
            oldest = min(parse_entry_id(entry_id) for entry_id in self.pending)
            kept = [entry for entry in self.entries if _order(entry) > upto or _order(entry) >= oldest]
        num_freed = len(self.entries) - len(kept)
        self.entries = kept
        return num_freed

    def list_pending(self, now_s: float) -> list[Pending]:
        holds = sorted(self.pending.items(), key=lambda item: parse_entry_id(item[0]))
        return [
            Pending(entry_id=entry_id, consumer=hold.consumer, idle_s=now_s - hold.since_s, deliveries=hold.deliveries)
            for entry_id, hold in holds
        ]

    def _index(self, entry_id: str) -> int:
        return bisect_right(self.entries, parse_entry_id(entry_id), key=_order) - 1


@dataclass(slots=True)
class Group:
    """A prompt group and its rows. ready: per task the samples that have all columns it reads."""

    size: int
    columns: dict[Column, bytes]
    rows: dict[int, dict[Column, bytes]] = field(default_factory=dict[int, dict[Column, bytes]])
    ready: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def num_bytes(self) -> int:
        rows = sum(len(value) for row in self.rows.values() for value in row.values())
        return rows + sum(len(value) for value in self.columns.values())


@dataclass(slots=True)
class RunState:
    """Everything under one run's keys."""

    streams: dict[str, Stream] = field(default_factory=dict[str, Stream])
    groups: dict[GroupId, Group] = field(default_factory=dict[GroupId, Group])
    tasks: tuple[TaskSpec, ...] = ()
    retained_bytes: int = 0
    mark: str = ""
    owner: RunClaim | None = None
    owner_since_s: float = 0.0
    owner_alive: tuple[str, float] = ("", 0.0)  # the start that is live, and until when
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    incarnations: dict[str, int] = field(default_factory=dict[str, int])
    leases: dict[WorkerId, tuple[bytes, float]] = field(default_factory=dict[WorkerId, tuple[bytes, float]])
    meta: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])

    def stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream())

    def bury(self, queue: str, entry_id: str, reason: str, now_ms: int) -> DeadLetter:
        """Move one pending entry to the dead letters."""
        letter = buried(queue, entry_id, reason, self.streams[queue].free(entry_id).entry)
        stream = self.stream(keys.DEAD)
        stream.add(letter, None, now_ms)
        del stream.entries[:-MAX_DEAD_LETTERS]
        return dead_letter(stream.last_id, letter)

    def letter(self, letter_id: str) -> DeadLetter | None:
        """The dead letter of this id, if it is there."""
        stream = self.streams.get(keys.DEAD, Stream())
        found = [entry.entry for entry in stream.entries if entry.entry_id == letter_id]
        return dead_letter(letter_id, found[0]) if found else None

    def forget_letter(self, letter_id: str) -> bool:
        """Take a dead letter out. Returns whether it was there."""
        stream = self.streams.get(keys.DEAD, Stream())
        before = len(stream.entries)
        stream.entries = [entry for entry in stream.entries if entry.entry_id != letter_id]
        return len(stream.entries) < before


class MemoryServer:
    """A server in this process, shared by any number of brokers and runs.

    Knobs for tests: ``fail_next`` (the next calls fail, before or after their effect), ``down`` (every call fails),
    ``snapshot`` and ``restore`` (a restart that lost its tail).
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.down = False
        self._runs: dict[RunName, RunState] = {}
        self._boots = 1
        self._waiters: set[asyncio.Future[None]] = set()
        self._failing_before = 0
        self._failing_after = 0

    @property
    def boot_id(self) -> str:
        return f"boot-{self._boots}"

    def run_state(self, run: RunName) -> RunState:
        return self._runs.setdefault(run, RunState())

    def forget(self, run: RunName) -> None:
        """All of ``run``, as a server that was emptied."""
        self._runs.pop(run, None)

    def now_ms(self) -> int:
        return int(self.clock.now_s() * 1000)

    def fail_next(self, calls: int = 1, *, after_effect: bool = False) -> None:
        """The next ``calls`` calls raise BrokerUnavailableError, before or after what they do."""
        if after_effect:
            self._failing_after = calls
        else:
            self._failing_before = calls

    def snapshot(self) -> dict[RunName, RunState]:
        """What is on disk now."""
        return copy.deepcopy(self._runs)

    def restore(self, snapshot: dict[RunName, RunState] | None = None) -> None:
        """Restart, with everything (None) or with what was on disk; the boot id changes."""
        if snapshot is not None:
            self._runs = copy.deepcopy(snapshot)
        self._boots += 1

    def fail_before(self) -> None:
        if self.down:
            raise BrokerUnavailableError("memory", "told to be down")
        if self._failing_before:
            self._failing_before -= 1
            raise BrokerUnavailableError("memory", "told to fail before the effect")

    def fail_after(self) -> None:
        if self._failing_after:
            self._failing_after -= 1
            raise BrokerUnavailableError("memory", "told to fail after the effect")

    def wake(self) -> None:
        """Something may have changed: those who wait look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed_before(self, deadline_s: float) -> bool:
        """True as soon as something may have changed, False at ``deadline_s`` of the event loop's clock."""
        loop = asyncio.get_running_loop()
        if loop.time() >= deadline_s:
            return False
        waiter = loop.create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True


def _order(entry: LogEntry) -> tuple[int, int]:
    return parse_entry_id(entry.entry_id)
