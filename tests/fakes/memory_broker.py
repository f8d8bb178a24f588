"""The broker's contract in this process, for tests and for benchmarks of one process.

Owns: the same behaviour as transport/broker/redis_streams.py (one contract suite runs over both), and knobs to make it
fail. Never: I/O, other clocks than the one it is given. Invariant: every step is synchronous between two awaits, hence
atomic. Leases and idle times follow the injected clock; ``wait_s`` follows the event loop, because a caller waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from tests.fakes.memory_server import Group, MemoryServer, RunState
from transport.broker import keys
from transport.broker.base import (
    ALIVE_S,
    ZERO_ID,
    Ack,
    Append,
    Commit,
    CommitResult,
    DeadLetter,
    Delivery,
    Entry,
    Fence,
    GroupWrite,
    LogEntry,
    Mark,
    Pending,
    RowWrite,
    RunClaim,
    RunOwner,
    ServerInfo,
    StreamWrite,
    Withdrawal,
    check_commit,
    check_entry,
    check_task_name,
    check_tasks,
    check_writes,
    dead_letter,
    parse_entry_id,
    without_blocks,
)
from transport.broker.ownership import describe, of_another_run
from transport.broker.reach import Away
from transport.contracts.types import USER_PREFIX, Column, GroupId, RowId, RunName, TaskSpec, WorkerId, parse_row_id
from transport.errors import BrokerFullError, BrokerUnavailableError, FencedError, TailLostError

__all__ = ["MemoryBroker", "MemoryServer"]


class MemoryBroker:
    """One run on a ``MemoryServer``; brokers that share the server share the run. See base.py for the contract."""

    def __init__(self, server: MemoryServer, run: RunName) -> None:
        self._server = server
        self._run = run
        self.outage: Away | None = None
        """What ``away`` answers."""
        self.run_id = ""
        self._claim: RunClaim | None = None

    @property
    def run(self) -> RunName:
        return self._run

    @contextmanager
    def _step(self, *, appends: bool = False) -> Generator[RunState]:
        """One call: fails before or after its effect when the server was told to. appends: wakes those who wait."""
        self._server.fail_before()
        state = self._server.run_state(self._run)
        if self.run_id:
            self._compare(state)
        yield state
        if appends:
            self._server.wake()
        self._server.fail_after()

    def _compare(self, state: RunState) -> None:
        """As guard.lua, without the wait for a run to come back."""
        if state.owner is None and self._claim is not None:
            self._take(state, self._claim, "")
        if state.owner is None:
            raise BrokerUnavailableError("memory", f"it holds no run named {self._run!r}")
        if state.owner.run_id != self.run_id:
            raise of_another_run(self._run, self._owner(state), self.run_id)

    def _owner(self, state: RunState) -> RunOwner | None:
        if state.owner is None:
            return None
        now_s, (start, until_s) = self._server.clock.now_s(), state.owner_alive
        is_live = start == state.owner.start and now_s < until_s
        return RunOwner(claim=state.owner, age_s=now_s - state.owner_since_s, is_live=is_live)

    def _take(self, state: RunState, claim: RunClaim, after: str) -> None:
        held = state.owner
        if held and (held.run_id != claim.run_id or held.start not in (claim.start, after)):
            raise of_another_run(self._run, self._owner(state), claim.run_id)
        now_s = self._server.clock.now_s()
        if held is None or held.start != claim.start:
            state.owner, state.owner_since_s = claim, now_s
        state.owner_alive = (claim.start, now_s + ALIVE_S)

    async def owner(self) -> RunOwner | None:
        return self._owner(self._server.run_state(self._run))

    async def hold_run(self, claim: RunClaim, *, after: str = "") -> None:
        await asyncio.sleep(0)
        self._take(self._server.run_state(self._run), claim, after)
        self.run_id, self._claim = claim.run_id, claim

    async def leave_run(self) -> None:
        state = self._server.run_state(self._run)
        if self._claim is not None and state.owner_alive[0] == self._claim.start:
            state.owner_alive = ("", 0.0)

    async def forget_run(self) -> None:
        if self._claim is not None:
            self._take(self._server.run_state(self._run), self._claim, "")
            self._server.forget(self._run)
            self.run_id, self._claim = "", None

    async def join_run(self, run_id: str = "") -> str:
        held = self._server.run_state(self._run).owner
        self.run_id = run_id or (held.run_id if held else "")
        return self.run_id

    # -- who answers, who may write
    def away(self) -> Away | None:
        return self.outage

    async def info(self) -> ServerInfo:
        with self._step() as state:
            boot_id = f"{self._server.boot_id}.{state.owner_since_s if self.run_id else ''}"
            return ServerInfo(version="memory", boot_id=boot_id, address="memory")

    async def acquire_epoch(self, role: str, *, at_least: int = 0) -> int:
        await asyncio.sleep(0)
        if self._claim is not None:
            self._take(self._server.run_state(self._run), self._claim, "")
        with self._step() as state:
            state.epochs[role] = max(state.epochs.get(role, 0), at_least) + 1
            return state.epochs[role]

    async def next_incarnation(self, name: str) -> int:
        with self._step() as state:
            state.incarnations[name] = state.incarnations.get(name, 0) + 1
            return state.incarnations[name]

    def _check_fence(self, state: RunState, fence: Fence | None) -> None:
        if fence is None:
            return
        current = state.epochs.get(fence.role, 0)
        if fence.epoch < current:
            owner = self._owner(state)
            raise FencedError(fence.role, fence.epoch, current, describe(owner) if owner else "")
        state.epochs[fence.role] = fence.epoch

    # -- logs
    async def append(self, log: str, entry: Entry, *, fence: Fence | None = None) -> str:
        return await self._append(log, entry, fence, queue=False)

    async def _append(self, name: str, entry: Entry, fence: Fence | None, *, queue: bool) -> str:
        check_entry(entry)
        await asyncio.sleep(0)
        with self._step(appends=True) as state:
            self._check_fence(state, fence)
            stream = state.stream(name)
            stream.is_queue = stream.is_queue or queue
            return stream.add(entry, None, self._server.now_ms()) or ""

    async def append_many(
        self, writes: Sequence[StreamWrite], *, fence: Fence | None = None, mark: Mark | None = None
    ) -> list[int]:
        check_writes(writes)
        await asyncio.sleep(0)
        with self._step(appends=True) as state:
            self._check_fence(state, fence)
            if mark is not None:
                _pass_mark(state, mark)
            return [self._write_stream(state, write) for write in writes]

    def _write_stream(self, state: RunState, write: StreamWrite) -> int:
        if not write.entries:
            return 0
        stream = state.stream(write.stream)
        stream.is_queue = stream.is_queue or write.is_queue
        added = [stream.add(entry, entry_id, self._server.now_ms()) for entry_id, entry in write.entries]
        return sum(entry_id is not None for entry_id in added)

    async def read(self, log: str, after: str, *, count: int, wait_s: float = 0.0) -> list[LogEntry]:
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            await asyncio.sleep(0)
            with self._step() as state:
                stream = state.streams.get(log)
                found = stream.after(after, count) if stream else []
            if found or not await self._server.changed_before(deadline_s):
                return found

    async def tail(self, log: str, *, count: int) -> list[LogEntry]:
        with self._step() as state:
            stream = state.streams.get(log)
            return stream.entries[-count:] if stream else []

    async def last_id(self, stream: str) -> str:
        with self._step() as state:
            found = state.streams.get(stream)
            return found.last_id if found else ZERO_ID

    async def length(self, stream: str) -> int:
        with self._step() as state:
            found = state.streams.get(stream)
            return len(found.entries) if found else 0

    async def trim(self, stream: str, upto: str) -> int:
        with self._step() as state:
            found = state.streams.get(stream)
            return found.trim(parse_entry_id(upto)) if found else 0

    async def delete_stream(self, stream: str) -> None:
        with self._step() as state:
            state.streams.pop(stream, None)

    # -- work queues
    async def enqueue(self, queue: str, entry: Entry) -> str:
        return await self._append(queue, entry, None, queue=True)

    async def claim(self, queue: str, consumer: str, *, count: int, wait_s: float = 0.0) -> list[Delivery]:
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while True:
            await asyncio.sleep(0)
            with self._step() as state:
                stream = state.stream(queue)
                stream.is_queue = True
                taken = stream.claim(consumer, count, self._server.clock.now_s())
            if taken or not await self._server.changed_before(deadline_s):
                return [_delivery(queue, entry, 1) for entry in taken]

    async def renew(self, queue: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        await asyncio.sleep(0)
        with self._step() as state:
            stream = state.streams.get(queue)
            held = [entry_id for entry_id in entry_ids if stream and stream.held_by(entry_id) == consumer]
            for entry_id in held:
                state.stream(queue).pending[entry_id].since_s = self._server.clock.now_s()
            return held

    async def reclaim(
        self, queue: str, consumer: str, *, idle_s: float, max_deliveries: int, count: int
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        await asyncio.sleep(0)
        taken: list[Delivery] = []
        dead: list[DeadLetter] = []
        with self._step(appends=True) as state:
            now_s = self._server.clock.now_s()
            stream = state.streams.get(queue)
            for entry_id in stream.expired(now_s - idle_s, count) if stream else []:
                hold = state.stream(queue).pending[entry_id]
                if hold.deliveries >= max_deliveries:
                    reason = f"delivered {hold.deliveries} times and never finished"
                    dead.append(state.bury(queue, entry_id, reason, self._server.now_ms()))
                else:
                    entry = state.stream(queue).hand_over(entry_id, consumer, now_s)
                    taken.append(_delivery(queue, entry, hold.deliveries + 1))
        return taken, dead

    async def reject(self, delivery: Delivery, reason: str, *, appends: Sequence[Append] = ()) -> None:
        for append in appends:
            check_entry(append.entry)
        await asyncio.sleep(0)
        with self._step(appends=True) as state:
            stream = state.streams.get(delivery.queue)
            if stream and delivery.entry_id in stream.pending:
                state.bury(delivery.queue, delivery.entry_id, reason, self._server.now_ms())
                self._append_all(state, appends)

    async def pending(self, queue: str, *, count: int = 100) -> list[Pending]:
        with self._step() as state:
            stream = state.streams.get(queue)
            now_s = self._server.clock.now_s()
            return stream.list_pending(now_s)[:count] if stream else []

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        with self._step() as state:
            stream = state.streams.get(keys.DEAD)
            found = stream.entries[:count] if stream else []
            return [dead_letter(entry.entry_id, entry.entry) for entry in found]

    async def retry_dead(self, letter_id: str) -> str | None:
        parse_entry_id(letter_id)
        await asyncio.sleep(0)
        with self._step(appends=True) as state:
            letter = state.letter(letter_id)
            if letter is None or not letter.queue:
                return None
            state.forget_letter(letter_id)
            stream = state.stream(letter.queue)
            stream.is_queue = True
            return stream.add(letter.entry, None, self._server.now_ms())

    async def drop_dead(self, letter_id: str) -> bool:
        parse_entry_id(letter_id)
        await asyncio.sleep(0)
        with self._step() as state:
            return state.forget_letter(letter_id)

    # -- the atomic step, rows
    async def declare_tasks(self, tasks: Sequence[TaskSpec]) -> None:
        check_tasks(tasks)
        with self._step() as state:
            of_users = (task for task in state.tasks if task.name.startswith(USER_PREFIX))
            state.tasks = (*tasks, *of_users)
            for task in tasks:
                state.stream(keys.tasks(task.name)).is_queue = True

    async def add_user_task(self, task: TaskSpec) -> None:
        check_tasks([task], of_user=True)
        with self._step() as state:
            state.tasks = (*(other for other in state.tasks if other.name != task.name), task)
            state.stream(keys.tasks(task.name)).is_queue = True

    async def remove_user_task(self, name: str) -> None:
        check_task_name(name, of_user=True)
        with self._step() as state:
            state.tasks = tuple(task for task in state.tasks if task.name != name)
            state.streams.pop(keys.tasks(name), None)

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        commit = without_blocks(commit)
        parsed = [parse_row_id(row.row_id) for row in commit.rows]
        await asyncio.sleep(0)
        with self._step(appends=True) as state:
            self._check_fence(state, commit.fence)
            if commit.if_held and not all(_is_pending(state, ack) for ack in commit.acks):
                return CommitResult(inserted=(False,) * len(commit.rows), retained_bytes=state.retained_bytes)
            for group in commit.groups:
                _insert_group(state, group)
            inserted = [self._insert_row(state, row, *ids) for row, ids in zip(commit.rows, parsed, strict=True)]
            self._acknowledge(state, commit.acks)
            self._append_all(state, commit.appends)
            return CommitResult(inserted=tuple(inserted), retained_bytes=state.retained_bytes)

    def _insert_row(self, state: RunState, write: RowWrite, group_id: GroupId, sample: int) -> bool:
        group = state.groups.get(group_id)
        if group is None or sample >= group.size:
            return False
        row = group.rows.get(sample, {})
        if any(column in row for column in write.columns):
            return False
        group.rows[sample] = {**row, **write.columns}
        state.retained_bytes += _num_bytes(write.columns)
        self._append_all(state, write.on_insert)
        for task in state.tasks:
            if task.reads <= group.rows[sample].keys() and sample not in group.ready.setdefault(task.name, set()):
                group.ready[task.name].add(sample)
                self._notify(state, task, write.row_id, group_id, group)
        return True

    def _notify(self, state: RunState, task: TaskSpec, row_id: RowId, group_id: GroupId, group: Group) -> None:
        """Put a notice on the task's queue when the row that just became ready completes a unit."""
        if task.unit == "group" and len(group.ready[task.name]) != group.size:
            return
        unit = row_id if task.unit == "sample" else group_id
        stream = state.stream(keys.tasks(task.name))
        stream.is_queue = True
        entry = Entry(fields={"task": task.name, "unit": unit, "group": group_id})
        stream.add(entry, None, self._server.now_ms())

    def _append_all(self, state: RunState, appends: Sequence[Append]) -> None:
        for append in appends:
            state.stream(append.stream).add(append.entry, None, self._server.now_ms())

    @staticmethod
    def _acknowledge(state: RunState, acks: Sequence[Ack]) -> None:
        for ack in acks:
            if _is_pending(state, ack):
                state.streams[ack.queue].free(ack.entry_id)

    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        parsed = [parse_row_id(row_id) for row_id in row_ids]
        with self._step() as state:
            groups = [(state.groups.get(group_id), sample) for group_id, sample in parsed]
            rows = [group.rows.get(sample, {}) if group else {} for group, sample in groups]
            return [_select(row, columns) for row in rows]

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        with self._step() as state:
            groups = [state.groups.get(group_id) for group_id in group_ids]
            return [_select(group.columns if group else {}, columns) for group in groups]

    async def has_groups(self, group_ids: Sequence[GroupId]) -> list[bool]:
        with self._step() as state:
            return [group_id in state.groups for group_id in group_ids]

    async def withdraw_rows(self, withdrawals: Sequence[Withdrawal]) -> list[bool]:
        await asyncio.sleep(0)
        with self._step() as state:
            return [self._withdraw(state, one, *parse_row_id(one.row_id)) for one in withdrawals]

    def _withdraw(self, state: RunState, one: Withdrawal, group_id: GroupId, sample: int) -> bool:
        group = state.groups.get(group_id)
        if group is None or group.rows.get(sample, {}).get(one.column) != one.value:
            return False
        before = group.num_bytes()
        for task in state.tasks:
            ready = group.ready.get(task.name, set())
            was_noticed = sample in ready and (task.unit == "sample" or len(ready) == group.size)
            ready.discard(sample)
            if was_noticed:
                unit = one.row_id if task.unit == "sample" else group_id
                state.stream(keys.tasks(task.name)).take_back(unit)
            if was_noticed and task.unit == "group":
                group.rows = {
                    other: {column: value for column, value in row.items() if column not in task.writes}
                    for other, row in group.rows.items()
                }
        del group.rows[sample]
        state.retained_bytes += group.num_bytes() - before
        self._append_all(state, one.on_withdrawn)
        return True

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        with self._step() as state:
            dropped = [state.groups.pop(group_id, None) for group_id in group_ids]
            for group_id in group_ids:
                state.streams.pop(keys.partial(group_id), None)
            freed = sum(group.num_bytes() for group in dropped if group)
            state.retained_bytes -= freed
            return freed

    async def retained_bytes(self) -> int:
        with self._step() as state:
            return state.retained_bytes

    # -- leases of workers, settings
    async def beat(self, worker_id: WorkerId, status: bytes, *, ttl_s: float) -> None:
        with self._step() as state:
            state.leases[worker_id] = (status, self._server.clock.now_s() + ttl_s)

    async def leases(self) -> dict[WorkerId, bytes]:
        with self._step() as state:
            now_s = self._server.clock.now_s()
            state.leases = {worker: lease for worker, lease in state.leases.items() if lease[1] > now_s}
            return {worker: status for worker, (status, _) in state.leases.items()}

    async def end_lease(self, worker_id: WorkerId) -> None:
        with self._step() as state:
            state.leases.pop(worker_id, None)

    async def put_meta(self, name: str, value: bytes, *, ttl_s: float | None = None) -> None:
        with self._step() as state:
            ends_s = float("inf") if ttl_s is None else self._server.clock.now_s() + ttl_s
            state.meta[name] = (value, ends_s)

    async def get_meta(self, name: str) -> bytes | None:
        with self._step() as state:
            value, ends_s = state.meta.get(name, (None, 0.0))
            return value if self._server.clock.now_s() < ends_s else None

    async def streams(self) -> dict[str, int]:
        with self._step() as state:
            return {name: len(stream.entries) for name, stream in state.streams.items()}

    async def close(self) -> None:
        """Nothing is held open."""


def _pass_mark(state: RunState, mark: Mark) -> None:
    if mark.after not in ("", state.mark):
        raise TailLostError(f"the broker holds mark {state.mark!r}, not {mark.after!r}")
    state.mark = mark.now


def _is_pending(state: RunState, ack: Ack) -> bool:
    stream = state.streams.get(ack.queue)
    return stream is not None and ack.entry_id in stream.pending


def _insert_group(state: RunState, write: GroupWrite) -> None:
    if write.group_id not in state.groups:
        state.groups[write.group_id] = Group(size=write.size, columns=dict(write.columns))
        state.retained_bytes += _num_bytes(write.columns)


def _num_bytes(columns: Mapping[Column, bytes]) -> int:
    return sum(len(value) for value in columns.values())


def _select(stored: dict[Column, bytes], columns: Sequence[Column]) -> dict[Column, bytes]:
    return {column: stored[column] for column in columns if column in stored}


def _delivery(queue: str, entry: LogEntry, deliveries: int) -> Delivery:
    return Delivery(queue=queue, entry_id=entry.entry_id, entry=entry.entry, deliveries=deliveries)


class FillingBroker(MemoryBroker):
    """One that answers while it is full, and takes no writes."""

    full = False

    async def put_meta(self, name: str, value: bytes, *, ttl_s: float | None = None) -> None:
        if self.full:
            raise BrokerFullError("here", "its memory")
        await super().put_meta(name, value, ttl_s=ttl_s)
