"""What every worker process does besides its work: join, hold its lease, stop when asked.

Invariant: a worker whose lease cannot be renewed keeps working (the broker may only be restarting) until the broker was
away for ``outage_s``.

    connect ── settings ── incarnation ── build the worker ──┬── worker.run()      ends: the run is over
                                                             ├── heartbeat loop    forever: lease + state of the run
                                                             └── signal            first: stop; the lease is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import STARTING, WorkerLost, WorkerStatus, encode
from transport.contracts.settings import LivenessSettings, Settings
from transport.contracts.types import PROTOCOL_VERSION, WeightIdentity, WorkerId, WorkerKind
from transport.errors import BrokerUnavailableError, FatalError, ProtocolMismatchError, TransientError
from transport.process.clock import Clock
from workers.leases.events import event_entry

log = structlog.get_logger(__name__)

SETTINGS_POLL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a worker is doing now, as it appears in its lease.

    capacity: samples it can run at once (generate).  running, waiting: samples.
    busy_s: cumulative seconds of useful work.  counters: cumulative numbers by name (samples, tokens, rounds, ...).
    kv_use: part of the KV memory in use, 0 to 1 (generate).
    """

    doing: str
    capacity: int = 0
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    weights: WeightIdentity | None = None
    counters: dict[str, float] = field(default_factory=dict[str, float])
    kv_use: float = 0.0


class BusyMeter:
    """Seconds during which at least one unit was in work, over all tasks of a worker.

    What is in work now counts up to now, so that a long unit does not look like idleness until its end.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy_s = 0.0
        self._since_s = 0.0
        self.in_work = 0

    def begin(self) -> None:
        if not self.in_work:
            self._since_s = self._clock.now_s()
        self.in_work += 1

    def end(self) -> None:
        self.in_work -= 1
        if not self.in_work:
            self._busy_s += self._clock.now_s() - self._since_s

    def busy_s(self) -> float:
        return self._busy_s + (self._clock.now_s() - self._since_s if self.in_work else 0.0)


class Worker(Protocol):
    """One kind of work. ``run`` returns when the run is over; ``activity`` is cheap and never blocks."""

    async def run(self) -> None: ...

    def activity(self) -> Activity: ...


WorkerFactory = Callable[[Broker, Settings, WorkerId], Coroutine[Any, Any, Worker]]


async def fetch_settings(broker: Broker, *, timeout_s: float) -> Settings:
    """Wait for the orchestrator to publish the run's settings.

    Raises: BrokerUnavailableError after ``timeout_s`` without settings; ProtocolMismatchError when they are of another
    schema than this program's.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if (raw := await broker.get_meta(keys.SETTINGS)) is None:
                log.info("waiting for the run's orchestrator", run=broker.run, at_most_s=timeout_s)
            while raw is None:
                await asyncio.sleep(SETTINGS_POLL_S)
                raw = await broker.get_meta(keys.SETTINGS)
    except TimeoutError:
        reason = f"run {broker.run!r} has no settings after {timeout_s:.0f} s; is its orchestrator running?"
        raise BrokerUnavailableError((await broker.info()).address, reason) from None
    try:
        return msgspec.msgpack.decode(raw, type=Settings)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatchError(
            f"the settings of run {broker.run!r} were written by another version of streamrl: {error}"
        ) from error


async def serve_worker(
    broker: Broker,
    kind: WorkerKind,
    index: int | None,
    build: WorkerFactory,
    clock: Clock,
    *,
    heartbeat_file: Path | None = None,
) -> bool:
    """Join run ``broker.run`` as worker ``<kind>-<index>``, work until the run is over or a signal comes, leave.

    index: None takes a free number.  heartbeat_file: touched whenever the lease was renewed.
    Returns: whether its work is over; False when a signal came first.
    Raises: FatalError of the work itself; FencedError when a newer incarnation took over.
    """
    settings = await fetch_settings(broker, timeout_s=Settings().liveness.startup_s)
    name = f"{kind.value}-{await free_index(broker, kind) if index is None else index}"
    worker_id = WorkerId(f"{name}.{await broker.next_incarnation(name)}")
    structlog.contextvars.bind_contextvars(worker=worker_id)
    stopping = _stop_on_signal()
    starting = asyncio.create_task(build(broker, settings, worker_id), name="start")
    lease = _Lease(broker, worker_id, kind, settings.liveness, clock, heartbeat_file)
    beating = asyncio.create_task(lease.keep(), name="heartbeat")
    try:
        worker = await _first_of(starting, beating, stopping)
        if worker is None:
            return not stopping.is_set()
        lease.worker = worker
        log.info("joined", kind=kind.value)
        await _first_of(asyncio.create_task(worker.run(), name="work"), beating, stopping)
        return not stopping.is_set()
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with contextlib.suppress(TransientError, FatalError, TimeoutError):
            async with asyncio.timeout(1.0):
                await broker.end_lease(worker_id)
                if stopping.is_set():
                    await _say_goodbye(broker, worker_id)


async def free_index(broker: Broker, kind: WorkerKind) -> int:
    """A number that no live worker of ``kind`` has, and that no other worker gets here."""
    taken = {worker_id.rpartition(".")[0] for worker_id in await broker.leases()}
    while True:
        index = await broker.next_incarnation(f"{kind.value}-auto") - 1  # 0, 1, 2, ...: each number once
        if f"{kind.value}-{index}" not in taken:
            return index


async def _say_goodbye(broker: Broker, worker_id: WorkerId) -> None:
    """What it held goes to others at once, instead of when its lease would have run out."""
    lost = WorkerLost(worker_id=worker_id, reason="it was told to leave", left=True)
    await broker.append(keys.EVENTS, event_entry(lost, worker=worker_id))


async def _first_of(work: asyncio.Task[T], beating: asyncio.Task[None], stopping: asyncio.Event) -> T | None:
    """The result of ``work``, or None when the run ended or a signal came first; ``work`` is then cancelled."""
    stop = asyncio.create_task(stopping.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({work, beating, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            return work.result()
        if beating in done:
            beating.result()
        return None
    finally:
        for task in (stop, work):
            task.cancel()
        await asyncio.gather(stop, work, return_exceptions=True)


def _stop_on_signal() -> asyncio.Event:
    """Set by whatever asks a process to end. A terminal that is closed does, too, unless nohup says otherwise."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
        loop.add_signal_handler(number, stopping.set)
    return stopping


class _Lease:
    """Renews the lease and looks whether the run is over."""

    def __init__(
        self,
        broker: Broker,
        worker_id: WorkerId,
        kind: WorkerKind,
        liveness: LivenessSettings,
        clock: Clock,
        heartbeat_file: Path | None = None,
    ) -> None:
        self.worker: Worker | None = None
        self._broker = broker
        self._worker_id = worker_id
        self._kind = kind
        self._liveness = liveness
        self._clock = clock
        self._started_s = clock.now_s()
        self._doing = ""
        self._since_s = self._started_s
        self._heartbeat_file = heartbeat_file

    async def keep(self) -> None:
        """Beat until the run is over. Raises BrokerUnavailableError when the broker was away for too long."""
        while True:
            await self._broker.beat(self._worker_id, encode(self._status()), ttl_s=self._liveness.lease_s)
            if self._heartbeat_file:
                self._heartbeat_file.touch()
            if await self._broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                log.info("the run is over")
                return
            await asyncio.sleep(self._liveness.heartbeat_s)

    def _status(self) -> WorkerStatus:
        activity = self.worker.activity() if self.worker else Activity(doing=STARTING)
        now_s = self._clock.now_s()
        if activity.doing != self._doing:
            self._doing, self._since_s = activity.doing, now_s
        return WorkerStatus(
            worker_id=self._worker_id,
            kind=self._kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            protocol=PROTOCOL_VERSION,
            doing=activity.doing,
            since_s=now_s - self._since_s,
            capacity=activity.capacity,
            running=activity.running,
            waiting=activity.waiting,
            weights=activity.weights,
            busy_s=activity.busy_s,
            elapsed_s=now_s - self._started_s,
            counters=activity.counters,
            kv_use=activity.kv_use,
        )
