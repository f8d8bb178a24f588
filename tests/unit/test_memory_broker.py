"""The knobs of the in-memory broker: what tests of everything else rely on."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker.base import ZERO_ID, Commit, Entry, GroupWrite
from transport.contracts.types import Column, GroupId, RunName
from transport.errors import BrokerUnavailableError

HELLO = Entry(fields={"name": "hello"})
GROUP = Commit(groups=[GroupWrite(group_id=GroupId("0/0"), size=1, columns={Column.PROMPT_TEXT: b"abc"})])


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(ManualClock())


@pytest.fixture
def broker(server: MemoryServer) -> MemoryBroker:
    return MemoryBroker(server, RunName("r"))


@pytest.mark.parametrize("after_effect", [False, True])
async def test_calls_fail_before_or_after_their_effect(
    server: MemoryServer, broker: MemoryBroker, after_effect: bool
) -> None:
    server.fail_next(2, after_effect=after_effect)
    for _ in range(2):
        with pytest.raises(BrokerUnavailableError):
            await broker.append("log", HELLO)
    assert await broker.length("log") == 2 * after_effect
    server.down = True
    with pytest.raises(BrokerUnavailableError):
        await broker.append("log", HELLO)
    server.down = False
    assert await broker.length("log") == 2 * after_effect


async def test_restart_that_lost_its_tail(server: MemoryServer, broker: MemoryBroker) -> None:
    first = await broker.append("log", HELLO)
    on_disk = server.snapshot()
    boot_id = (await broker.info()).boot_id
    await broker.append("log", HELLO)
    await broker.commit(GROUP)
    server.restore(on_disk)
    assert (await broker.info()).boot_id != boot_id
    assert await broker.last_id("log") == first
    assert await broker.retained_bytes() == 0
    await broker.commit(GROUP)
    server.restore()
    assert await broker.retained_bytes() == 3


async def test_readers_that_wait_do_not_wake_each_other(server: MemoryServer, broker: MemoryBroker) -> None:
    readings = [asyncio.create_task(broker.read("log", ZERO_ID, count=1, wait_s=20.0)) for _ in range(3)]
    for _ in range(10):
        await asyncio.sleep(0)
    looks = 0
    look = server.run_state

    def counted(run: RunName) -> object:
        nonlocal looks
        looks += 1
        return look(run)

    server.run_state = counted  # type: ignore[method-assign]
    for _ in range(100):
        await asyncio.sleep(0)
    assert looks == 0
    await broker.append("log", HELLO)
    assert all(len(found) == 1 for found in await asyncio.gather(*readings))


async def test_automatic_ids_ascend_although_the_clock_stands_still(broker: MemoryBroker) -> None:
    assert [await broker.append("log", HELLO) for _ in range(3)] == ["0-1", "0-2", "0-3"]
