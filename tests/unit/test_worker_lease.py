"""A worker's lease says who it is and where: the host whose memory it can share, and the site it was told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from tests.fakes.gpu_driver import FakeDriver
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_server import MemoryServer
from transport.broker import keys
from transport.broker.base import Broker
from transport.broker.reach import Away
from transport.contracts.messages import encode, worker_status_decoder
from transport.contracts.settings import Settings
from transport.contracts.types import RunName, WorkerId, WorkerKind
from transport.process.gpus import take_gpus
from transport.tensors.base import host_id
from workers.leases.lifecycle import Activity, serve_worker


class Idle:
    """A worker with nothing to do, ``at_work`` once it was begun."""

    def __init__(self) -> None:
        self.at_work = asyncio.Event()

    async def run(self) -> None:
        self.at_work.set()
        await asyncio.Event().wait()

    def activity(self) -> Activity:
        return Activity(doing="waiting")


async def test_a_worker_says_where_it_is_until_the_run_is_over(driver: FakeDriver):
    driver(2)
    take_gpus("1")
    broker, idle = MemoryBroker(MemoryServer(), RunName("r")), Idle()
    defaults = Settings()
    liveness = msgspec.structs.replace(defaults.liveness, heartbeat_s=0.1)
    await broker.put_meta(keys.SETTINGS, encode(msgspec.structs.replace(defaults, liveness=liveness)))

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Idle:
        return idle

    serving = asyncio.create_task(serve_worker(broker, WorkerKind.SCORE, 3, build, ManualClock(), site="east"))
    async with asyncio.timeout(30):
        await idle.at_work.wait()
        (lease,) = (await broker.leases()).values()
        status = worker_status_decoder.decode(lease)
        await broker.put_meta(keys.STATE, keys.STATE_FINISHED)
        assert await serving
    assert status.worker_id == "score-3.1"
    assert (status.host, status.host_id, status.site) == (socket.gethostname(), host_id(), "east")
    assert status.gpus == ("GPU-0001 H100",)
    assert await broker.leases() == {}


class SilentBroker(MemoryBroker):
    """Takes no lease until ``answers``."""

    def __init__(self) -> None:
        super().__init__(MemoryServer(), RunName("r"))
        self.answers = asyncio.Event()

    async def beat(self, worker_id: WorkerId, status: bytes, *, ttl_s: float) -> None:
        await self.answers.wait()
        await super().beat(worker_id, status, ttl_s=ttl_s)


async def test_a_worker_that_waits_for_its_broker_is_not_taken_for_one_that_hangs(tmp_path: Path):
    """A container's health check kills what does not touch the file."""
    broker, idle, file = SilentBroker(), Idle(), tmp_path / "heartbeat"
    defaults = Settings()
    liveness = msgspec.structs.replace(defaults.liveness, heartbeat_s=0.1)
    await broker.put_meta(keys.SETTINGS, encode(msgspec.structs.replace(defaults, liveness=liveness)))

    async def build(broker: Broker, settings: Settings, worker_id: WorkerId) -> Idle:
        return idle

    working = serve_worker(broker, WorkerKind.SCORE, 3, build, ManualClock(), heartbeat_file=file)
    serving = asyncio.create_task(working)
    async with asyncio.timeout(30):
        await idle.at_work.wait()
        for _ in range(30):
            await asyncio.sleep(0.01)
        assert not file.exists(), "it is silent, and its broker is not known to be away"
        broker.outage = Away(address="redis:6379", seconds=5.0, reason="no answer", until_s=60.0)
        while not file.exists():  # noqa: ASYNC110 a file wakes no task
            await asyncio.sleep(0.01)
        broker.answers.set()
        await broker.put_meta(keys.STATE, keys.STATE_FINISHED)
        assert await serving
