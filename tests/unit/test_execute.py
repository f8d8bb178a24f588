"""Commands reach the broker in the order of their ids, also when it comes back without what was written last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.core.model.outbox import CommandId
from orchestrator.loop.execute import ENTRIES_PER_STEP, Executor, in_steps
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Commit, Entry, Fence, GroupWrite
from transport.contracts.messages import Command, DispatchGroups, DropRows, GroupPlan
from transport.contracts.types import Column, GroupId, PromptId, RunName, WorkerId

WORKER = WorkerId("generate-0.1")


class Nobody:
    """Neither reads prompts nor plans: these tests ask for neither."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")


def plan(seq: int) -> tuple[CommandId, Command]:
    plan = GroupPlan(
        group_id=GroupId(f"0/{seq}"),
        batch=0,
        prompt_id=PromptId("p"),
        group_size=1,
        samples=(0,),
        predicted_tokens=1.0,
        priority=1.0,
        attempt=1,
    )
    return CommandId(seq, 0), DispatchGroups(worker_id=WORKER, plans=(plan,))


@contextmanager
def running(executor: Executor) -> Iterator[None]:
    task = asyncio.create_task(executor.run())
    try:
        yield
    finally:
        task.cancel()


def executor_on(broker: MemoryBroker) -> Executor:
    fence = Fence(role="orchestrator", epoch=1)
    return Executor(broker, fence, Nobody(), Nobody(), lambda reason: None, last_seq=0)  # type: ignore[arg-type]


async def carried_out(executor: Executor, *issued: tuple[CommandId, Command]) -> None:
    executor.submit(issued)
    async with asyncio.timeout(30):
        await executor.drained()


async def plans_of(broker: MemoryBroker) -> list[str]:
    return [entry.entry_id for entry in await broker.read(keys.plans(WORKER), "0-0", count=99)]


async def test_a_new_plan_does_not_keep_out_those_that_the_broker_lost():
    server = MemoryServer()
    broker = MemoryBroker(server, RunName("run"))
    executor = executor_on(broker)
    with running(executor):
        empty = server.snapshot()
        await carried_out(executor, plan(5), plan(6))
        server.restore(empty)
        executor.submit([plan(9)])
        for _ in range(20):
            await asyncio.sleep(0)
        assert await plans_of(broker) == [], "it waits for those before it"
        executor.restate([plan(5), plan(6)])
        async with asyncio.timeout(30):
            await executor.drained()
        assert await plans_of(broker) == ["5-0", "6-0", "9-0"]
        await carried_out(executor, plan(10))
    assert await plans_of(broker) == ["5-0", "6-0", "9-0", "10-0"]


async def test_rows_that_were_freed_are_freed_again_when_they_come_back():
    server = MemoryServer()
    broker = MemoryBroker(server, RunName("run"))
    group = GroupId("0/0")
    await broker.commit(Commit(groups=[GroupWrite(group_id=group, size=1, columns={Column.PROMPT_TEXT: b"text"})]))
    executor = executor_on(broker)
    with running(executor):
        before = server.snapshot()
        await carried_out(executor, (CommandId(1, 0), DropRows(group_ids=(group,))))
        server.restore(before)
        assert await broker.retained_bytes() == 4
        executor.restate([])
        async with asyncio.timeout(30):
            await executor.drained()
        assert await broker.retained_bytes() == 0


def test_steps_are_bounded_and_keep_the_order_of_each_stream():
    many = {f"{seq}-0": Entry(fields={"seq": str(seq)}) for seq in range(1, ENTRIES_PER_STEP + 3)}
    steps = list(in_steps({keys.ROUNDS: many, keys.plans(WORKER): {"1-1": Entry()}}))
    assert [[(write.stream, len(write.entries), write.is_queue) for write in step] for step in steps] == [
        [(keys.ROUNDS, ENTRIES_PER_STEP, False)],
        [(keys.ROUNDS, 2, False), (keys.plans(WORKER), 1, True)],
    ]
    told = [
        entry_id for step in steps for write in step if write.stream == keys.ROUNDS for entry_id, _ in write.entries
    ]
    assert told == list(many)
