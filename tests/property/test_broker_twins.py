"""The in-memory broker and the Redis one give equal results on any sequence of operations."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fakes.explicit_ids import append_at
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.redis_servers import ServerProcess, find_binary
from tests.property.exploring import SEED
from transport.broker import keys
from transport.broker.base import Ack, Append, Broker, Commit, Delivery, Entry, Fence, GroupWrite, RowWrite
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import RedisBroker
from transport.contracts.types import Column, GroupId, RunName, TaskSpec, group_id, row_id
from transport.errors import FencedError

TASKS = (
    TaskSpec(name="reward", unit="sample", reads=frozenset({Column.RESPONSE_IDS})),
    TaskSpec(name="advantages", unit="group", reads=frozenset({Column.REWARD, Column.RESPONSE_IDS})),
)
QUEUES = ("queue", keys.tasks("reward"), keys.tasks("advantages"))
ROW_COLUMNS = (Column.RESPONSE_IDS, Column.REWARD, Column.ROLLOUT_LOGPROBS)
_runs = itertools.count()

small = st.integers(0, 2)
payloads = st.binary(max_size=3)
entries = st.builds(Entry, fields=st.dictionaries(st.sampled_from(["a", "b"]), st.text(max_size=3)), payload=payloads)
appends = st.lists(st.builds(Append, stream=st.sampled_from(["events", "metrics"]), entry=entries), max_size=2)
groups = st.builds(
    GroupWrite,
    group_id=st.builds(group_id, small, small),
    size=st.integers(1, 3),
    columns=st.fixed_dictionaries({Column.PROMPT_TEXT: payloads}),
)
rows = st.builds(
    RowWrite,
    row_id=st.builds(row_id, st.builds(group_id, small, small), small),
    columns=st.dictionaries(st.sampled_from(ROW_COLUMNS), payloads, min_size=1),
    on_insert=appends,
)


@dataclass(frozen=True)
class Write:
    """A commit whose acks name deliveries by their number, because the twins' automatic ids differ."""

    commit: Commit
    acks: tuple[int, ...]
    epoch: int | None


@dataclass(frozen=True)
class Call:
    """One call by name, with what it needs."""

    name: str
    queue: str
    consumer: str
    count: int
    number: int
    entry: Entry
    group_id: GroupId


writes = st.builds(
    Write,
    commit=st.builds(Commit, groups=st.lists(groups, max_size=2), rows=st.lists(rows, max_size=3), appends=appends),
    acks=st.lists(st.integers(0, 5), max_size=2).map(tuple),
    epoch=st.none() | small,
)
calls = st.builds(
    Call,
    name=st.sampled_from(
        [
            *("append", "append_at", "enqueue", "claim", "renew", "reclaim", "reject", "trim", "drop", "delete"),
            *("epoch", "retry", "forget"),
        ]
    ),
    queue=st.sampled_from(QUEUES),
    consumer=st.sampled_from(["c0", "c1"]),
    count=st.integers(1, 3),
    number=st.integers(0, 5),
    entry=entries,
    group_id=st.builds(group_id, small, small),
)


class Player:
    """Plays operations on one broker and says what it sees in words that do not depend on automatic ids."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._deliveries: list[Delivery] = []

    async def play(self, operation: Write | Call) -> object:
        if isinstance(operation, Write):
            return await self._write(operation)
        return await getattr(self, f"_{operation.name}")(operation)

    async def _write(self, write: Write) -> object:
        acks = [Ack(queue=held.queue, entry_id=held.entry_id) for held in map(self._delivery, write.acks) if held]
        fence = None if write.epoch is None else Fence(role="trainer", epoch=write.epoch)
        try:
            return await self._broker.commit(replace(write.commit, acks=acks, fence=fence))
        except FencedError as error:
            return error.current_epoch

    def _delivery(self, number: int) -> Delivery | None:
        return self._deliveries[-1 - number] if number < len(self._deliveries) else None

    async def _append(self, call: Call) -> object:
        return await self._broker.append("events", call.entry) is not None

    async def _append_at(self, call: Call) -> object:
        return await append_at(self._broker, "rounds", call.entry, f"{call.number + 1}-{call.count}")

    async def _enqueue(self, call: Call) -> object:
        return await self._broker.enqueue("queue", call.entry) is not None

    async def _claim(self, call: Call) -> object:
        claimed = await self._broker.claim(call.queue, call.consumer, count=call.count)
        self._deliveries += claimed
        return [(delivery.entry, delivery.deliveries) for delivery in claimed]

    async def _renew(self, call: Call) -> object:
        held = self._delivery(call.number)
        return held and len(await self._broker.renew(held.queue, call.consumer, [held.entry_id]))

    async def _reclaim(self, call: Call) -> object:
        taken, dead = await self._broker.reclaim(
            call.queue, call.consumer, idle_s=0, max_deliveries=call.number + 1, count=call.count
        )
        self._deliveries += taken
        said = [(letter.queue, letter.reason, letter.entry) for letter in dead]
        return [(delivery.entry, delivery.deliveries) for delivery in taken], said

    async def _reject(self, call: Call) -> object:
        held = self._delivery(call.number)
        return held and await self._broker.reject(held, "bad", appends=[Append(stream="events", entry=call.entry)])

    async def _letter(self, number: int) -> str:
        letters = await self._broker.dead_letters()
        return letters[number].letter_id if number < len(letters) else "1-1"

    async def _retry(self, call: Call) -> object:
        return await self._broker.retry_dead(await self._letter(call.number)) is not None

    async def _forget(self, call: Call) -> object:
        return await self._broker.drop_dead(await self._letter(call.number))

    async def _trim(self, call: Call) -> object:
        upto = await self._broker.last_id(call.queue)
        return await self._broker.trim("rounds", f"{call.number}-9"), await self._broker.trim(call.queue, upto)

    async def _drop(self, call: Call) -> object:
        return await self._broker.drop_groups([call.group_id])

    async def _delete(self, call: Call) -> object:
        return await self._broker.delete_stream(call.queue if call.number == 0 else "metrics")

    async def _epoch(self, call: Call) -> object:
        return await self._broker.acquire_epoch("trainer", at_least=call.number % 2)

    async def look(self) -> object:
        """Everything that can be read."""
        broker = self._broker
        samples = [row_id(group_id(batch, slot), n) for batch in range(3) for slot in range(3) for n in range(3)]
        pending = {queue: await broker.pending(queue) for queue in QUEUES}
        return {
            "rows": await broker.read_rows(samples, ROW_COLUMNS),
            "groups": await broker.read_groups([group_id(b, s) for b in range(3) for s in range(3)], list(Column)),
            "bytes": await broker.retained_bytes(),
            "streams": await broker.streams(),
            "logs": {
                name: [e.entry for e in await broker.tail(name, count=99)] for name in ("events", "metrics", *QUEUES)
            },
            "rounds": await broker.read("rounds", "0-0", count=99),
            "pending": {
                queue: [(held.consumer, held.deliveries) for held in found] for queue, found in pending.items()
            },
            "dead": [(letter.queue, letter.reason, letter.entry) for letter in await broker.dead_letters()],
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    binary = find_binary("valkey")
    assert binary is not None
    made = ServerProcess(binary, tmp_path_factory.mktemp("valkey"))
    made.wait_listening()
    yield made
    made.kill()


async def compare(url: str, operations: list[Write | Call]) -> None:
    run = RunName(f"twins-{next(_runs)}")
    real = RedisBroker(RedisLink(url), run)
    twins = [Player(MemoryBroker(MemoryServer(), run)), Player(real)]
    try:
        for broker in (twins[0]._broker, real):
            await broker.declare_tasks(TASKS)
        for operation in operations:
            expected, found = [await twin.play(operation) for twin in twins]
            assert found == expected, operation
        expected, found = [await twin.look() for twin in twins]
        assert found == expected
    finally:
        await real.close()


@seed(SEED)
@settings(max_examples=150, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(writes | calls, max_size=40))
def test_twins_agree(server: ServerProcess, operations: list[Write | Call]) -> None:
    asyncio.run(compare(server.url, operations))
