"""The brokers that one contract suite runs over: the in-memory twin, the packaged Valkey, also for a user with only the
commands that are needed, the system's Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest
import redis

from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.redis_servers import ServerProcess, find_binary
from tests.fakes.stored_rows import new_unit
from transport.broker.base import Broker
from transport.broker.redis_link import RedisLink
from transport.broker.redis_streams import COMMANDS, RedisBroker
from transport.contracts.types import RunName
from transport.rows.unit_rows import UnitRows
from transport.rows.units import StorageUnit

_run_numbers = count()
LIMITED = "limited"
"""A user of the packaged Valkey who may send what a run sends, to a run's keys, and nothing else."""


class BrokerHarness:
    """Makes brokers of one kind, all on one server, and lets time pass for it."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.outage_s = 60.0  # of brokers that are opened from now on
        self._clock = ManualClock(1000.0)
        self._memory = MemoryServer(self._clock)
        self._opened: list[Broker] = []
        self._run = RunName(f"run-{next(_run_numbers)}")

    def open(self, run: RunName | None = None) -> Broker:
        """Another client, as another process would be one."""
        run = run or self._run
        made = (
            MemoryBroker(self._memory, run)
            if self.url is None
            else RedisBroker(RedisLink(self.url, outage_s=self.outage_s), run)
        )
        self._opened.append(made)
        return made

    @property
    def may_list(self) -> bool:
        """Whether the broker's user may list keys."""
        return LIMITED not in (self.url or "")

    async def lose(self) -> None:
        """The server loses all that it held of the run of ``open()``."""
        if self.url is None:
            self._memory.forget(self._run)
            return
        with redis.Redis.from_url(self.url.replace(f"{LIMITED}:word@", "")) as server:
            server.unlink(*server.scan_iter(f"streamrl:{{{self._run}}}:*"))

    async def elapse(self, seconds: float) -> None:
        """Let the server's clock pass ``seconds``; a real server has no other clock than the real one."""
        if self.url is None:
            self._clock.advance(seconds)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        for broker in self._opened:
            await broker.close()


@pytest.fixture(scope="session")
def server_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One server of each kind there is a binary for, for all tests of the session; every test has its own run."""
    binaries = {kind: find_binary(kind) for kind in ("valkey", "redis")}
    allowed = " ".join(f"+{name}" for name in COMMANDS)
    user = ["--user", *f"{LIMITED} on >word ~streamrl:* resetchannels -@all {allowed}".split()]
    servers = {
        kind: ServerProcess(binary, tmp_path_factory.mktemp(kind), *user) for kind, binary in binaries.items() if binary
    }
    try:
        for server in servers.values():
            server.wait_listening()
        urls = {kind: server.url for kind, server in servers.items()}
        if "valkey" in urls:
            urls[LIMITED] = urls["valkey"].replace("redis://", f"redis://{LIMITED}:word@")
        yield urls
    finally:
        for server in servers.values():
            server.kill()


def _url(kind: str, server_urls: dict[str, str]) -> str:
    if kind not in server_urls:
        pytest.skip(f"no {kind}-server on this machine: apt-get install {kind}-server")
    return server_urls[kind]


@pytest.fixture(params=["memory", "valkey", LIMITED, pytest.param("redis", marks=pytest.mark.redis)])
async def harness(request: pytest.FixtureRequest, server_urls: dict[str, str]) -> AsyncIterator[BrokerHarness]:
    made = BrokerHarness(None if request.param == "memory" else _url(request.param, server_urls))
    yield made
    await made.close()


@pytest.fixture
def broker(harness: BrokerHarness) -> Broker:
    return harness.open()


@pytest.fixture
def units() -> Iterator[list[StorageUnit]]:
    """Started by the tests that want them (``new_unit``), closed here."""
    started: list[StorageUnit] = []
    yield started
    for unit in started:
        unit.close()


@pytest.fixture
async def unit_rows(broker: Broker, units: list[StorageUnit]) -> AsyncIterator[UnitRows]:
    """Over one storage unit."""
    rows = UnitRows(broker, [new_unit(units)])
    yield rows
    rows.close()


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.redis)])
def server_url(request: pytest.FixtureRequest, server_urls: dict[str, str]) -> str:
    """A real server, for what only a real connection can show."""
    return _url(request.param, server_urls)


@pytest.fixture
def run_name() -> RunName:
    return RunName(f"run-{next(_run_numbers)}")
