"""A process that lives and does nothing is ended, so that it is started again."""

from __future__ import annotations

import socket
from collections.abc import Collection

import pytest

from orchestrator.launch.processes import SILENCES, Liveness
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_broker import FillingBroker, MemoryServer
from transport.broker import keys
from transport.contracts.messages import STARTING, WorkerStatus, encode
from transport.contracts.settings import LivenessSettings
from transport.contracts.types import RunName, WorkerId, WorkerKind
from transport.errors import BrokerFullError, BrokerUnavailableError

STARTUP_S, SILENCE_S = 10.0, 5.0
DEADLINES = LivenessSettings(startup_s=STARTUP_S, lease_s=SILENCE_S / SILENCES)


class FakeProcesses:
    """Children by name; one that is ended comes back as another process."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self.ended: list[str] = []
        self.remote: set[str] = set()
        self.waiting: set[str] = set()

    def pids(self) -> dict[str, int]:
        return dict(self._pids)

    def elsewhere(self) -> Collection[str]:
        return self.remote

    def pending(self) -> Collection[str]:
        return self.waiting

    def end(self, name: str) -> None:
        self.ended.append(name)
        self._pids[name] += 100


class World:
    def __init__(self, **pids: int) -> None:
        self.clock = ManualClock()
        self.server = MemoryServer(self.clock)
        self.broker = FillingBroker(self.server, RunName("r"))
        self.processes = FakeProcesses(**pids)
        self.life = Liveness(self.broker, self.processes, self.clock, DEADLINES)

    async def beat(self, pid: int, *, doing: str = "waiting", host: str = "") -> None:
        status = WorkerStatus(
            worker_id=WorkerId(f"score-0.{pid}"),
            kind=WorkerKind.SCORE,
            host=host or socket.gethostname(),
            pid=pid,
            protocol=1,
            doing=doing,
        )
        await self.broker.beat(status.worker_id, encode(status), ttl_s=1.5)

    async def look_for(self, seconds: float) -> list[str]:
        """A look every second. Returns who was ended."""
        ended: list[str] = []
        for _ in range(int(seconds)):
            ended += await self.life.look()
            self.clock.advance(1.0)
        return ended


async def test_a_worker_that_never_comes_is_ended_once_and_its_successor_gets_as_long():
    world = World(score=7)
    assert await world.look_for(11) == []
    assert await world.look_for(1) == ["score"]
    assert await world.look_for(10) == []
    assert await world.look_for(1) == ["score"]


async def test_a_worker_that_beats_lives_until_it_falls_silent():
    world = World(score=7)
    for _ in range(30):
        await world.beat(7)
        assert await world.look_for(1) == []
    assert await world.look_for(5) == [], "its lease runs 1.5 s on"
    assert await world.look_for(2) == ["score"]
    assert await world.look_for(9) == [], "the next process has its whole start"


@pytest.mark.parametrize("lease", [{"doing": STARTING}, {"host": "elsewhere"}], ids=["still starts", "of another host"])
async def test_what_is_no_sign_of_life(lease: dict[str, str]):
    world = World(score=7)
    for _ in range(12):
        await world.beat(7, **lease)
        await world.look_for(1)
    assert world.processes.ended == ["score"]


async def test_an_orchestrator_lives_while_its_status_is_fresh():
    world = World(orchestrator=3)
    for _ in range(30):
        await world.broker.put_meta(keys.STATUS, b"{}", ttl_s=1.5)
        assert await world.look_for(1) == []
    assert await world.look_for(7) == ["orchestrator"]


async def test_an_outage_of_the_broker_is_nobodys_silence():
    world = World(score=7)
    await world.look_for(5)
    world.server.down = True
    with pytest.raises(BrokerUnavailableError):
        await world.life.look()
    world.clock.advance(60.0)
    world.server.down = False
    assert await world.look_for(6) == []
    assert await world.look_for(3) == ["score"]


async def test_a_full_broker_takes_no_leases_and_that_is_nobodys_silence():
    world = World(score=7)
    await world.look_for(5)
    world.broker.full = True
    for _ in range(60):
        with pytest.raises(BrokerFullError):
            await world.life.look()
        world.clock.advance(1.0)
    world.broker.full = False
    assert await world.look_for(6) == []
    assert await world.look_for(3) == ["score"]


async def test_one_that_has_not_begun_is_not_silent_and_one_elsewhere_is_known_by_its_name():
    world = World(**{"score-0": 7})
    world.processes.remote, world.processes.waiting = {"score-0"}, {"score-0"}
    assert await world.look_for(30) == []
    world.processes.waiting.clear()
    assert await world.look_for(10) == []
    for _ in range(20):
        await world.beat(999, host="another")
        assert await world.look_for(1) == []
    assert await world.look_for(8) == ["score-0"]
