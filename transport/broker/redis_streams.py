"""The broker on Redis >= 7.0 or Valkey >= 7.2: streams, hashes, and one Lua script for each atomic step.

Owns: the run's keys. Never: sees a redis-py object (redis_link.py does), decides when to send again.
Invariant: whatever is sent through the link may be sent twice: it reads, overwrites, or goes through ``_once``.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from math import ceil
from typing import TypeVar, cast

import msgspec

from transport.broker import keys
from transport.broker.base import (
    PAYLOAD,
    Append,
    Block,
    Commit,
    CommitResult,
    DeadLetter,
    Delivery,
    Entry,
    Fence,
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
    entry_from_fields,
    parse_entry_id,
    without_blocks,
)
from transport.broker.ownership import describe, of_another_run
from transport.broker.reach import Away
from transport.broker.redis_link import Command, RedisLink, Reply, ReplyError, ScriptCall, Tls
from transport.contracts.settings import BrokerSettings
from transport.contracts.types import USER_PREFIX, Column, GroupId, RowId, RunName, TaskSpec, WorkerId, parse_row_id
from transport.errors import BrokerRejectedError, BrokerUnavailableError, FencedError, TailLostError

BULKY_BYTES = 1024  # where the values of a row have more on average, each is sent on its own
NUM_SLOTS = 32  # writes of one process that may be under way at once; each slot costs the server one small key
COMMANDS = (
    *("ping", "info", "role", "eval", "evalsha", "exists", "del", "unlink", "get", "set", "incrby", "decrby"),
    *("hget", "hset", "hsetnx", "hmget", "hgetall", "hdel", "hexists", "hincrby", "hkeys", "hstrlen"),
    *("sadd", "srem", "smembers", "xadd", "xlen", "xrange", "xrevrange", "xread", "xreadgroup", "xack", "xclaim"),
    *("xdel", "xtrim", "xpending", "xgroup|create", "xinfo|stream", "xinfo|groups", "time"),
)
"""All that a run sends, its scripts included; what the access list of its user has to allow (docs/broker.md)."""
_NO_RUN, _OTHER_RUN = "NORUN", "OTHERRUN"
NO_RUN_POLL_S = 0.05
"""Before the first repetition of a call for which the broker holds no run; the pause doubles up to a second."""
FORGOTTEN_AT_ONCE = 1000
_NO_GROUP = ("NOGROUP", "UNBLOCKED")
"""The queue is not there (any more): it was never written to, or was deleted while a claim waited on it."""

ROWS_PER_ROUND_TRIP = 256  # HMGETs in one pipeline: they hide the round trip, and bound what the server buffers
ROWS_FOR_SCRIPT = 16  # from so many on, a script reads them in one command, as long as they are small
ROWS_PER_SCRIPT = 1024  # some 3 ms in which others wait
MAX_SMALL_BYTES = 1024 * 1024

_lengths_decoder = msgspec.msgpack.Decoder(list[int])
_T = TypeVar("_T")
_Name = TypeVar("_Name", bound=str)
_Fields = list[bytes]


class _Session:
    """A client's numbered slots, which make its writes safe to send again (see ``once`` in scripts/prelude.lua).

    One call at a time is in a slot, and its numbers ascend. ``client`` is unique to this object, so that a restarted
    process starts a new session.
    """

    def __init__(self) -> None:
        self.client = uuid.uuid4().hex[:12]
        self._numbers = [0] * NUM_SLOTS
        self._free = [*reversed(range(NUM_SLOTS))]
        self._available = asyncio.Semaphore(NUM_SLOTS)

    @asynccontextmanager
    async def next_call(self) -> AsyncGenerator[tuple[int, int]]:
        """A slot, which is taken until the block ends, and a number that was never used in it."""
        async with self._available:
            slot = self._free.pop()
            self._numbers[slot] += 1
            try:
                yield slot, self._numbers[slot]
            finally:
                self._free.append(slot)


class RedisBroker:
    """One run on one server. See base.py for the contract; ``connect`` makes one that was checked."""

    def __init__(self, link: RedisLink, run: RunName) -> None:
        self.run = run
        self.run_id = ""
        self._claim: RunClaim | None = None
        self._link = link
        self._prefix = keys.full(run, "")
        self._session = _Session()

    async def close(self) -> None:
        await self._link.close()

    def away(self) -> Away | None:
        return self._link.away()

    @property
    def _group(self) -> str:
        """The consumer group of this run's queues, as in prelude.lua."""
        return f"{keys.WORKERS_GROUP}-{self.run_id}" if self.run_id else keys.WORKERS_GROUP

    # -- how requests are sent
    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _once(self, script: str, request: ScriptCall, fence: Fence | None = None) -> Reply:
        """Run a script whose effect happens once, however often the link has to send it."""
        if fence is not None:
            request.body["fence"] = [fence.role, fence.epoch]
        async with self._session.next_call() as (slot, number):
            key = keys.session(self.run, self._session.client, slot)
            try:
                return await self._script(script, key, number, request)
            except ReplyError as error:
                if fence is not None and error.code == "FENCED":
                    current, owner = int(error.message.split()[-1]), await self.owner()
                    newest = describe(owner) if owner is not None else ""
                    raise FencedError(fence.role, fence.epoch, current, newest) from None
                if error.code == "TAILLOST":
                    raise TailLostError(f"broker {self._link.address}: {error.message}") from None
                raise

    async def _again(self, script: str, **body: object) -> Reply:
        """Run a script that may run any number of times."""
        return await self._script(script, self._prefix, 0, ScriptCall(body))

    async def _script(self, script: str, key: str, number: int, request: ScriptCall) -> Reply:
        return await self._of_this_run(
            lambda: self._link.script(script, key, self._prefix, number, request, run_id=self.run_id)
        )

    async def _read(self, commands: Sequence[Command], *, block_s: float = 0.0) -> list[Reply]:
        """Reads in one round trip. They count only if this run has the name at their end.

        block_s: for which the server may hold its answer back.
        """
        if not self.run_id:
            return await self._link.pipeline(commands, block_s=block_s)

        async def read() -> list[Reply]:
            *replies, held = await self._link.pipeline(
                [*commands, ("HGET", self._key(keys.OWNER), "run_id")], block_s=block_s
            )
            if held != self.run_id.encode():
                raise ReplyError(self._link.address, _NO_RUN if held is None else _OTHER_RUN)
            return replies

        return await self._of_this_run(read)

    async def _of_this_run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """``call``, again as soon as the broker holds this run: it lost its data, and one that claimed the run does so
        again at once, others wait for that.

        Raises: OtherRunError: the name is another run's.  BrokerUnavailableError: after ``outage_s``.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s, pause_s = now_s() + self._link.outage_s, NO_RUN_POLL_S
        while True:
            try:
                return await call()
            except ReplyError as error:
                if error.code == _OTHER_RUN:
                    raise of_another_run(self.run, await self.owner(), self.run_id) from None
                if error.code != _NO_RUN:
                    raise
            if self._claim is not None:
                await self._hold(self._claim)
            elif now_s() > deadline_s:
                lost = f"it holds no run named {self.run!r}: it lost its data, and the run was not resumed since"
                raise BrokerUnavailableError(self._link.address, lost)
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    async def _blocking(self, read: Command, streams: Command, wait_s: float, queue: str = "") -> list[LogEntry]:
        """Repeat a blocking read until it gives something or ``wait_s`` is over, in pieces shorter than a time-out.

        queue: opened when it is not there, also when it went away in between.
        """
        now_s = asyncio.get_running_loop().time
        deadline_s = now_s() + wait_s
        while True:
            block_ms = ceil(1000 * min(deadline_s - now_s(), self._link.max_block_s))  # BLOCK 0 would never end
            block = ("BLOCK", block_ms) if block_ms > 0 else ()
            try:
                command: Command = (*read, *block, "STREAMS", *streams)
                # the group of a queue carries the run's id: of another run's queue nothing is read
                read_all = self._link.pipeline if queue else self._read
                (reply,) = await read_all([command], block_s=max(0, block_ms) / 1000)
            except ReplyError as error:
                if not queue or error.code not in _NO_GROUP:
                    raise
                await self._again("open_queue", queue=queue)
                continue
            if reply:
                return _log_entries(cast("list[tuple[bytes, list[tuple[bytes, _Fields]]]]", reply)[0][1])
            if now_s() >= deadline_s:
                return []

    # -- who answers, who may write
    async def server_facts(self) -> dict[str, str]:
        """What the server says of itself (INFO server and memory)."""
        replies = await self._link.pipeline([("INFO", "server"), ("INFO", "memory")])
        lines = [line for reply in replies for line in cast("bytes", reply).decode().splitlines()]
        return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}

    async def info(self) -> ServerInfo:
        facts = await self.server_facts()
        name = facts.get("server_name", "redis")
        version = facts.get("valkey_version") or facts["redis_version"]
        uptime_s = float(facts["uptime_in_seconds"])
        boot_id = facts["run_id"]
        if self.run_id:
            (since_ms,) = await self._read([("HGET", self._key(keys.OWNER), "since_ms")])
            boot_id += f".{cast('bytes | None', since_ms) or b''!r}"
        return ServerInfo(version=f"{name} {version}", boot_id=boot_id, address=self._link.address, uptime_s=uptime_s)

    async def owner(self) -> RunOwner | None:
        found, alive = await self._link.pipeline(
            [("HGETALL", self._key(keys.OWNER)), ("GET", self._key(keys.OWNER_ALIVE))]
        )
        flat = [value.decode() for value in cast("list[bytes]", found)]
        held = dict(zip(flat[::2], flat[1::2], strict=True))
        if not held:
            return None
        since_ms = held.pop("since_ms", "")
        claim = msgspec.convert(held, RunClaim)
        is_live = alive == claim.start.encode()
        return RunOwner(claim=claim, age_s=await self._age_s(int(since_ms)) if since_ms else None, is_live=is_live)

    async def _age_s(self, since_ms: int) -> float | None:
        try:
            seconds, microseconds = cast("list[bytes]", await self._link.command("TIME"))
        except BrokerRejectedError:  # an access list of an earlier version
            return None
        return max(0.0, int(seconds) + int(microseconds) / 1e6 - since_ms / 1e3)

    async def hold_run(self, claim: RunClaim, *, after: str = "") -> None:
        await self._hold(claim, after)
        self.run_id, self._claim = claim.run_id, claim

    async def _hold(self, claim: RunClaim, after: str = "") -> None:
        request = ScriptCall({"claim": msgspec.to_builtins(claim), "after": after})
        try:
            await self._link.script("hold_run", self._prefix, self._prefix, 0, request, run_id=claim.run_id)
        except ReplyError as error:
            if error.code != _OTHER_RUN:
                raise
            raise of_another_run(self.run, await self.owner(), claim.run_id) from None

    async def leave_run(self) -> None:
        if self._claim is not None:
            request = ScriptCall({"start": self._claim.start})
            await self._link.script("leave_run", self._prefix, self._prefix, 0, request, run_id=self.run_id)

    async def forget_run(self) -> None:
        if self._claim is None:
            return
        await self._hold(self._claim)  # ours still
        owner, cursor = self._key(keys.OWNER), b"0"
        while True:
            reply = await self._link.command("SCAN", cursor, "MATCH", f"{self._prefix}*", "COUNT", FORGOTTEN_AT_ONCE)
            cursor, found = cast("tuple[bytes, list[bytes]]", reply)
            if gone := [name for name in found if name != owner.encode()]:
                await self._link.command("UNLINK", *gone)
            if cursor == b"0":
                break
        self.run_id, self._claim = "", None
        await self._link.command("UNLINK", owner)

    async def join_run(self, run_id: str = "") -> str:
        if not run_id:
            found = await self._link.command("HGET", self._key(keys.OWNER), "run_id")
            run_id = cast("bytes", found or b"").decode()
        self.run_id = run_id
        return run_id

    async def acquire_epoch(self, role: str, *, at_least: int = 0) -> int:
        request = ScriptCall({"role": role, "at_least": at_least})
        if self._claim is not None:
            request.body["claim"] = msgspec.to_builtins(self._claim)
        return cast("int", await self._once("acquire_epoch", request))

    async def next_incarnation(self, name: str) -> int:
        return cast("int", await self._once("next_incarnation", ScriptCall({"name": name})))

    # -- logs
    async def append(self, log: str, entry: Entry, *, fence: Fence | None = None) -> str:
        ((added,),) = await self._append([StreamWrite(stream=log, entries=[("*", entry)])], fence)
        return added.decode()

    async def append_many(
        self, writes: Sequence[StreamWrite], *, fence: Fence | None = None, mark: Mark | None = None
    ) -> list[int]:
        check_writes(writes)
        return [sum(added != b"" for added in of_stream) for of_stream in await self._append(writes, fence, mark)]

    async def _append(
        self, writes: Sequence[StreamWrite], fence: Fence | None = None, mark: Mark | None = None
    ) -> list[list[bytes]]:
        """Per write the ids of its entries, empty for those that were there."""
        request = ScriptCall()
        if mark is not None:
            request.body["mark"] = [mark.after, mark.now]
        request.body["streams"] = [
            [write.stream, int(write.is_queue), [[id_, _fields(request, entry)] for id_, entry in write.entries]]
            for write in writes
        ]
        return cast("list[list[bytes]]", await self._once("append", request, fence))

    async def read(self, log: str, after: str, *, count: int, wait_s: float = 0.0) -> list[LogEntry]:
        return await self._blocking(("XREAD", "COUNT", count), (self._key(log), after), wait_s)

    async def tail(self, log: str, *, count: int) -> list[LogEntry]:
        (reply,) = await self._read([("XREVRANGE", self._key(log), "+", "-", "COUNT", count)])
        return _log_entries(cast("list[tuple[bytes, _Fields]]", reply))[::-1]

    async def last_id(self, stream: str) -> str:
        return cast("bytes", await self._again("last_id", stream=stream)).decode()

    async def length(self, stream: str) -> int:
        (length,) = await self._read([("XLEN", self._key(stream))])
        return cast("int", length)

    async def trim(self, stream: str, upto: str) -> int:
        parse_entry_id(upto)
        return cast("int", await self._once("trim", ScriptCall({"stream": stream, "upto": upto})))

    async def delete_stream(self, stream: str) -> None:
        await self._again("delete_stream", stream=stream, task="")

    # -- work queues
    async def enqueue(self, queue: str, entry: Entry) -> str:
        ((added,),) = await self._append([StreamWrite(stream=queue, entries=[("*", entry)], is_queue=True)])
        return added.decode()

    async def claim(self, queue: str, consumer: str, *, count: int, wait_s: float = 0.0) -> list[Delivery]:
        command = ("XREADGROUP", "GROUP", self._group, consumer, "COUNT", count)
        entries = await self._blocking(command, (self._key(queue), ">"), wait_s, queue)
        return [Delivery(queue=queue, entry_id=entry.entry_id, entry=entry.entry) for entry in entries]

    async def renew(self, queue: str, consumer: str, entry_ids: Sequence[str]) -> list[str]:
        held = await self._again("renew", queue=queue, consumer=consumer, ids=list(entry_ids))
        return [entry_id.decode() for entry_id in cast("list[bytes]", held)]

    async def reclaim(
        self, queue: str, consumer: str, *, idle_s: float, max_deliveries: int, count: int
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        request = ScriptCall({"queue": queue, "consumer": consumer, "idle_ms": ceil(1000 * idle_s)})
        request.body.update(max_deliveries=max_deliveries, count=count)
        reply = await self._once("reclaim", request)
        taken, dead = cast("tuple[list[tuple[bytes, int, _Fields]], list[tuple[bytes, _Fields]]]", reply)
        deliveries = [
            Delivery(queue=queue, entry_id=raw_id.decode(), entry=entry_from_fields(flat), deliveries=number)
            for raw_id, number, flat in taken
        ]
        return deliveries, [dead_letter(raw_id.decode(), entry_from_fields(flat)) for raw_id, flat in dead]

    async def reject(self, delivery: Delivery, reason: str, *, appends: Sequence[Append] = ()) -> None:
        request = ScriptCall({"queue": delivery.queue, "id": delivery.entry_id, "reason": reason})
        request.body["appends"] = _appends(request, appends)
        await self._once("reject", request)

    async def pending(self, queue: str, *, count: int = 100) -> list[Pending]:
        try:
            (reply,) = await self._read([("XPENDING", self._key(queue), self._group, "-", "+", count)])
        except ReplyError as error:
            if error.code not in _NO_GROUP:
                raise
            await self._read([])  # is there no such queue, or is it another run's?
            return []
        return [
            Pending(entry_id=raw_id.decode(), consumer=consumer.decode(), idle_s=idle_ms / 1000, deliveries=number)
            for raw_id, consumer, idle_ms, number in cast("list[tuple[bytes, bytes, int, int]]", reply)
        ]

    async def dead_letters(self, *, count: int = 100) -> list[DeadLetter]:
        (reply,) = await self._read([("XRANGE", self._key(keys.DEAD), "-", "+", "COUNT", count)])
        letters = _log_entries(cast("list[tuple[bytes, _Fields]]", reply))
        return [dead_letter(letter.entry_id, letter.entry) for letter in letters]

    async def retry_dead(self, letter_id: str) -> str | None:
        parse_entry_id(letter_id)
        return cast("bytes", await self._once("retry_dead", ScriptCall({"id": letter_id}))).decode() or None

    async def drop_dead(self, letter_id: str) -> bool:
        parse_entry_id(letter_id)
        return await self._once("drop_dead", ScriptCall({"id": letter_id})) == 1

    # -- the atomic step, rows
    async def declare_tasks(self, tasks: Sequence[TaskSpec]) -> None:
        check_tasks(tasks)
        await self._again("declare_tasks", replace=1, tasks=_specs(tasks))

    async def add_user_task(self, task: TaskSpec) -> None:
        check_tasks([task], of_user=True)
        await self._again("declare_tasks", replace=0, tasks=_specs([task]))

    async def remove_user_task(self, name: str) -> None:
        check_task_name(name, of_user=True)
        await self._again("delete_stream", stream=keys.tasks(name), task=name)

    async def commit(self, commit: Commit) -> CommitResult:
        check_commit(commit)
        if any(_is_bulky(block) for block in commit.blocks):
            commit = without_blocks(commit)
        request = ScriptCall()
        request.body["groups"] = [
            [keys.group(self.run, group.group_id), group.size, _columns(request, group.columns)]
            for group in commit.groups
        ]
        request.body["rows"] = [self._row(request, row) for row in commit.rows]
        request.body["blocks"] = [_block(request, block) for block in commit.blocks]
        request.body["if_held"] = int(commit.if_held)
        request.body["acks"] = [[ack.queue, ack.entry_id] for ack in commit.acks]
        request.body["appends"] = _appends(request, commit.appends)
        reply = cast("tuple[int, list[int]]", await self._once("commit", request, commit.fence))
        return CommitResult(inserted=tuple(won == 1 for won in reply[1]), retained_bytes=reply[0])

    def _row(self, request: ScriptCall, row: RowWrite) -> list[object]:
        group_id, sample = parse_row_id(row.row_id)
        row_key, group_key = keys.row(self.run, row.row_id), keys.group(self.run, group_id)
        columns, on_insert = _columns(request, row.columns), _appends(request, row.on_insert)
        return [row_key, group_key, row.row_id, group_id, sample, columns, on_insert]

    # whatever these send may be sent any number of times
    async def read_rows(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """In one command where they are small, else in few round trips."""
        for row_id in row_ids:
            parse_row_id(row_id)
        found = await self._read_small(row_ids, columns) if columns and len(row_ids) >= ROWS_FOR_SCRIPT else []
        rest = row_ids[len(found) :]
        rows = await self._read_hashes([keys.row(self.run, row_id) for row_id in rest], columns)
        await self._add_shared(rest, columns, rows)
        return found + rows

    async def _read_small(self, row_ids: Sequence[RowId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        """The first of these rows, all of them when they are small (locators of storage units are)."""
        found: list[dict[Column, bytes]] = []
        for part in _parts(row_ids, ROWS_PER_SCRIPT):
            reply = await self._again("read_rows", rows=part, columns=list(columns), max_bytes=MAX_SMALL_BYTES)
            number, lengths, values = cast("tuple[int, bytes, bytes]", reply)
            found += _cut_rows(columns, _lengths_decoder.decode(lengths), values)
            if number < len(part):
                break
        return found

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
        hashes = [keys.group(self.run, group_id) for group_id in group_ids]
        of_group = dict(zip(group_ids, await self._read_hashes(hashes, ["size", *fields]), strict=True))
        for row, group_id, sample in lacking:
            found = of_group[group_id]
            if sample < int(found.get("size", 0)):
                for name, column in fields.items():
                    if name in found:
                        row.setdefault(column, found[name])

    async def read_groups(self, group_ids: Sequence[GroupId], columns: Sequence[Column]) -> list[dict[Column, bytes]]:
        return await self._read_hashes([keys.group(self.run, group_id) for group_id in group_ids], columns)

    async def _read_hashes(self, hashes: Sequence[str], names: Sequence[_Name]) -> list[dict[_Name, bytes]]:
        if not names:
            return [{} for _ in hashes]
        found: list[dict[_Name, bytes]] = []
        for part in _parts(hashes, ROWS_PER_ROUND_TRIP):
            replies = await self._read([("HMGET", key, *names) for key in part])
            for reply in cast("list[list[bytes | None]]", replies):
                pairs = zip(names, reply, strict=True)
                found.append({name: value for name, value in pairs if value is not None})
        return found

    async def has_groups(self, group_ids: Sequence[GroupId]) -> list[bool]:
        found: list[bool] = []
        for part in _parts(group_ids, ROWS_PER_ROUND_TRIP):
            replies = await self._read([("EXISTS", keys.group(self.run, group_id)) for group_id in part])
            found += [reply == 1 for reply in replies]
        return found

    async def withdraw_rows(self, withdrawals: Sequence[Withdrawal]) -> list[bool]:
        request = ScriptCall()
        request.body["rows"] = [
            [
                keys.row(self.run, one.row_id),
                keys.group(self.run, group_id),
                keys.row(self.run, RowId(f"{group_id}/")),
                one.column,
                request.blob(one.value),
                _appends(request, one.on_withdrawn),
            ]
            for one in withdrawals
            for group_id, _ in (parse_row_id(one.row_id),)
        ]
        withdrawn = cast("list[int]", await self._once("withdraw_rows", request))
        return [went == 1 for went in withdrawn]

    async def drop_groups(self, group_ids: Sequence[GroupId]) -> int:
        groups = [
            [keys.group(self.run, group_id), keys.row(self.run, RowId(f"{group_id}/")), keys.partial(group_id)]
            for group_id in group_ids
        ]
        return cast("int", await self._once("drop_groups", ScriptCall({"groups": groups})))

    async def retained_bytes(self) -> int:
        (found,) = await self._read([("GET", self._key(keys.RETAINED_BYTES))])
        return int(cast("bytes | None", found) or 0)

    # -- leases of workers, settings
    async def beat(self, worker_id: WorkerId, status: bytes, *, ttl_s: float) -> None:
        request = ScriptCall({"worker": worker_id, "ttl_ms": ceil(1000 * ttl_s)})
        request.body["status"] = request.blob(status)
        await self._script("beat", self._prefix, 0, request)

    async def leases(self) -> dict[WorkerId, bytes]:
        flat = cast("list[bytes]", await self._again("leases"))
        return {WorkerId(name.decode()): status for name, status in zip(flat[::2], flat[1::2], strict=True)}

    async def end_lease(self, worker_id: WorkerId) -> None:
        await self._again("beat", worker=worker_id, ttl_ms=0)

    async def put_meta(self, name: str, value: bytes, *, ttl_s: float | None = None) -> None:
        request = ScriptCall({"name": name, "ttl_ms": 0 if ttl_s is None else ceil(1000 * ttl_s)})
        request.body["value"] = request.blob(value)
        await self._script("put_meta", self._prefix, 0, request)

    async def get_meta(self, name: str) -> bytes | None:
        (found,) = await self._read([("GET", keys.meta(self.run, name))])
        return cast("bytes | None", found)

    async def streams(self) -> dict[str, int]:
        flat = await self._again("streams")
        names, lengths = cast("list[bytes]", flat)[::2], cast("list[int]", flat)[1::2]
        return dict(sorted((name.decode(), length) for name, length in zip(names, lengths, strict=True)))


def _fields(request: ScriptCall, entry: Entry) -> list[object]:
    """Name, value, name, value, ... with the payload by reference. An entry has at least one field."""
    check_entry(entry)
    flat: list[object] = [part for pair in entry.fields.items() for part in pair]
    if entry.payload or not flat:
        flat += [PAYLOAD, request.blob(entry.payload)]
    return flat


def _specs(tasks: Iterable[TaskSpec]) -> list[list[str]]:
    return [[task.name, msgspec.json.encode(task, order="sorted").decode()] for task in tasks]


def _appends(request: ScriptCall, appends: Iterable[Append]) -> list[object]:
    return [[append.stream, _fields(request, append.entry)] for append in appends]


def _columns(request: ScriptCall, columns: Mapping[Column, bytes]) -> list[object]:
    return [part for column, value in columns.items() for part in (column, request.blob(value))]


def _is_bulky(block: Block) -> bool:
    """Whether joining its values and cutting them apart would cost more than naming each; the first row shows it.

    Shared ones are never written out: each would be sent for every row.
    """
    if block.shared:
        return False
    first_row = [value for values in block.columns.values() for value in values[:1]]
    return sum(len(piece) for value in first_row for piece in value) > BULKY_BYTES * len(first_row)


def _block(request: ScriptCall, block: Block) -> dict[str, object]:
    """All values in one: a thousand arguments would cost more than the copy does."""
    values = [b"".join(value) for value in block.values()]
    return {
        "groups": list(block.group_ids),
        "size": block.size,
        "columns": list(block.columns),
        "shared": block.shared,
        "values": request.blob(b"".join(values)),
        "lengths": [len(value) for value in values],
    }


def _log_entries(raw: Iterable[tuple[bytes, _Fields]]) -> list[LogEntry]:
    return [LogEntry(entry_id=raw_id.decode(), entry=entry_from_fields(flat)) for raw_id, flat in raw]


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


# --- a server that may be used ----------------------------------------------------------------------------------------

MIN_REDIS = (7, 0)
MIN_VALKEY = (7, 2)  # the first Valkey; it continues Redis 7.2


async def connect(
    settings: BrokerSettings,
    run: RunName,
    *,
    url: str | None = None,
    password: str | None = None,
    outage_s: float | None = None,
    bear_s: float | None = None,
) -> RedisBroker:
    """A broker whose server answered and was checked.

    url, password: instead of those in ``settings`` (an embedded server's, or STREAMRL_BROKER_PASSWORD, which only a
    process's ``__main__`` reads); a password inside the URL wins.  outage_s: instead of ``settings.outage_s``.
    bear_s: how long this process waits for a broker that is away, where that is longer: it says so.
    Raises: BrokerUnavailableError when nothing answered for ``outage_s``; BrokerRejectedError, at once, for a password
            that is refused, TLS that does not fit, a server that is too old or may evict keys.
    """
    link = RedisLink(
        url or settings.url,
        key=keys.full(run, ""),
        password=settings.password if password is None else password,
        tls=Tls(settings.tls_ca, settings.tls_cert, settings.tls_key),
        outage_s=settings.outage_s if outage_s is None else outage_s,
        bear_s=bear_s,
    )
    broker = RedisBroker(link, run)
    try:
        check_server(await broker.server_facts(), link.address)
    except BaseException:
        await broker.close()
        raise
    return broker


def check_server(facts: Mapping[str, str], address: str) -> None:
    """Raises BrokerRejectedError that says what to change. facts: INFO server and memory."""
    is_valkey = "valkey_version" in facts
    name, minimum = ("Valkey", MIN_VALKEY) if is_valkey else ("Redis", MIN_REDIS)
    version = facts.get("valkey_version" if is_valkey else "redis_version", "")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < minimum:
        raise BrokerRejectedError(
            f"broker {address} is {name} {version or 'of unknown version'}: use Redis >= 7.0 or Valkey >= 7.2"
        )
    policy = facts.get("maxmemory_policy", "")
    if policy != "noeviction":  # also without a limit: one set later would evict queues silently
        raise BrokerRejectedError(
            f"broker {address} may evict keys (maxmemory-policy is {policy or 'unknown'}): "
            "run `redis-cli config set maxmemory-policy noeviction`, and put it into the server's configuration"
        )
