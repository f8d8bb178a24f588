"""What every worker process does besides its work: join, hold its lease, stop when asked. And leases on entries.

    connect ── settings ── incarnation ── build the worker ──┬── worker.run()      ends: the run is over
                                                             ├── heartbeat loop    forever: lease + state of the run
                                                             └── signal            first: stop; the lease is ended

    waiting in a queue ──► held: claimed here, renewed while in work ──► acknowledged with its effect, or rejected
          ▲                          │
          └── the lease ran out: this process died, hung or was cut off; another consumer reclaims the entry

Invariant: a worker whose lease cannot be renewed keeps working (the broker may only be restarting) until the broker was
away for ``outage_s``. An entry is handed out once by ``Leases``; one whose lease went to another consumer is reported
as lost, once, and is not held any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec
import structlog

from transport.broker import keys
from transport.broker.base import Ack, Append, Broker, Delivery
from transport.broker.events import event_entry
from transport.contracts.messages import STARTING, WorkerLost, WorkerStatus, encode
from transport.contracts.settings import LivenessSettings, Settings
from transport.contracts.types import PROTOCOL_VERSION, WeightIdentity, WorkerId, WorkerKind
from transport.errors import DECODE_ERRORS, BrokerUnavailableError, FatalError, ProtocolMismatchError, TransientError
from transport.process.clock import Clock
from transport.process.files import LockedError, locked, private_directory, run_directory, writing
from transport.process.gpus import taken_gpus
from transport.process.programs import ending_signals
from transport.tensors.base import host_id

log = structlog.get_logger(__name__)

RENEWALS_PER_LEASE = 3
BEATS_TIMED = 8
"""Two renewals may be lost before a lease is."""


class Leases:
    """Of ``consumer`` on ``queue``. Used from one event loop; ``keep`` runs beside the rest.

    lease_s: an entry that its holder did not renew for so long may be reclaimed.  max_deliveries: an entry that was
    delivered so often is moved to the dead letters instead; None: this consumer reclaims nothing.
    report: gets a line on what was lost or moved there; the log does by default.
    """

    def __init__(
        self,
        broker: Broker,
        queue: str,
        consumer: str,
        clock: Clock,
        *,
        lease_s: float,
        max_deliveries: int | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._consumer = consumer
        self._clock = clock
        self._lease_s = lease_s
        self._max_deliveries = max_deliveries
        self._report = report or log.warning
        self._held: dict[str, None] = {}  # an ordered set
        self._reclaim_due_s = self._renewed_s = clock.now_s()

    async def claim(self, count: int, *, wait_s: float) -> list[Delivery]:
        """Up to ``count`` entries that are held from now on: reclaimed ones, else new ones, for which it waits.

        Nothing is awaited between the broker's answer and the return, so a caller that lists what it holds misses none.
        """
        found = await self._reclaim(count) or await self._broker.claim(
            self._queue, self._consumer, count=count, wait_s=wait_s
        )
        fresh = [delivery for delivery in found if delivery.entry_id not in self._held]
        self._held.update(dict.fromkeys(delivery.entry_id for delivery in fresh))
        return fresh

    async def _reclaim(self, count: int) -> list[Delivery]:
        """Entries whose holder stopped renewing; looked for twice a lease."""
        if self._max_deliveries is None or self._clock.now_s() < self._reclaim_due_s:
            return []
        self._reclaim_due_s = self._clock.now_s() + self._lease_s / 2
        taken, dead = await self._broker.reclaim(
            self._queue, self._consumer, idle_s=self._lease_s, max_deliveries=self._max_deliveries, count=count
        )
        for letter in dead:
            self._report(f"{self._queue}: entry {letter.entry_id} is given up: {letter.reason}")
        return taken

    async def keep(self, on_lost: Callable[[Collection[str]], Awaitable[None]]) -> None:
        """Renew what is held, forever. on_lost: stops the work on these entries: another consumer has them."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            if lost := await self.renew():
                await on_lost(lost)

    async def renew(self) -> list[str]:
        """Renew what is held. Returns the entries that were lost; those acknowledged meanwhile are not among them."""
        renewed_s, asked = self._clock.now_s(), list(self._held)
        kept = set(await self._broker.renew(self._queue, self._consumer, asked)) if asked else set[str]()
        self._renewed_s = renewed_s
        lost = [entry_id for entry_id in asked if entry_id not in kept and entry_id in self._held]
        if lost:
            self._report(f"{self._queue}: the leases on {len(lost)} entries are lost")
            self.release(lost)
        return lost

    async def lost(self, entry_ids: Collection[str], *, ask: bool = False) -> list[str]:
        """Those that are not held any more. The broker is asked when this process may have slept through a lease."""
        if entry_ids and (ask or self._clock.now_s() - self._renewed_s > self._lease_s):
            await self.renew()
        return [entry_id for entry_id in entry_ids if entry_id not in self._held]

    def acks(self, entry_ids: Iterable[str]) -> list[Ack]:
        """For the commit of their effect, after which they are ``release``d."""
        return [Ack(queue=self._queue, entry_id=entry_id) for entry_id in entry_ids]

    async def reject(self, delivery: Delivery, reason: str, *, appends: Sequence[Append] = ()) -> None:
        """Move an entry to the dead letters, in one step with ``appends``."""
        await self._broker.reject(delivery, reason, appends=appends)
        self.release([delivery.entry_id])

    def release(self, entry_ids: Iterable[str]) -> None:
        """Renew these no longer: they are acknowledged, lost, or given back."""
        for entry_id in entry_ids:
            self._held.pop(entry_id, None)

    async def others_left(self) -> bool:
        """Whether the queue has an entry that is not held here: waiting, or held by another consumer."""
        return await self._broker.length(self._queue) > len(self._held)


SETTINGS_POLL_S = 0.2

T = TypeVar("T")


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is doing now, as it appears in its lease.

    capacity: samples it can run at once (generate).  running, waiting: samples.
    busy_s: cumulative seconds of useful work.  counters: cumulative numbers by name (samples, tokens, rounds, ...).
    kv_use: part of the KV memory in use, 0 to 1 (generate).  relay: where it passes weights on (generate).
    way: how its last weights came (generate).  unit: where it keeps columns (store).
    trouble: what is wrong while the worker goes on, for people; "" for nothing.
    """

    doing: str
    capacity: int = 0
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    weights: WeightIdentity | None = None
    counters: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    kv_use: float = 0.0
    relay: str = ""
    way: str = ""
    unit: str = ""
    trouble: str = ""


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
    """Wait for the orchestrator to publish the run's settings. This process is of that run from then on.

    Raises: OtherRunError: the name is that of another run than this process was started for.
    BrokerUnavailableError after ``timeout_s`` without settings; ProtocolMismatchError when they are of another schema
    than this program's.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if (raw := await _settings_of_run(broker)) is None:
                how = "start it with: streamrl-orchestrator serve --run NAME"
                log.info("waiting for the run's orchestrator", run=broker.run, at_most_s=timeout_s, hint=how)
            while raw is None:
                await asyncio.sleep(SETTINGS_POLL_S)
                raw = await _settings_of_run(broker)
    except TimeoutError:
        reason = f"run {broker.run!r} has no settings after {timeout_s:.0f} s; is its orchestrator running?"
        raise BrokerUnavailableError((await broker.info()).address, reason) from None
    try:
        return msgspec.msgpack.decode(raw, type=Settings)
    except DECODE_ERRORS as error:
        raise ProtocolMismatchError(
            f"the settings of run {broker.run!r} were written by another version of streamrl: {error}"
        ) from error


async def _settings_of_run(broker: Broker) -> bytes | None:
    """Settings of the run that has the name, which this process is of from then on; None as long as there are none."""
    raw = await broker.get_meta(keys.SETTINGS)
    if raw is None or broker.run_id or not await broker.join_run():
        return raw
    return await broker.get_meta(keys.SETTINGS)  # now compared


async def serve_worker(
    broker: Broker,
    kind: WorkerKind,
    index: int | None,
    build: WorkerFactory,
    clock: Clock,
    *,
    site: str = "",
    heartbeat_file: Path | None = None,
) -> bool:
    """Join run ``broker.run`` as worker ``<kind>-<index>``, work until the run is over or a signal comes, leave.

    index: None takes a number that no other worker had.  site: the datacenter that it is in.
    heartbeat_file: touched when the lease was renewed.
    Returns: whether its work is over; False when a signal came first.
    Raises: FatalError of the work itself; FencedError when a newer incarnation took over.
    """
    stopping = _stop_on_signal()  # before it waits: the first process of a container ignores what nobody handles
    fetching = asyncio.create_task(fetch_settings(broker, timeout_s=Settings().liveness.startup_s), name="settings")
    settings = await _first_of(fetching, stopping)
    if settings is None:
        return False
    worker_id = await (new_worker(broker, kind) if index is None else _incarnation(broker, f"{kind.value}-{index}"))
    structlog.contextvars.bind_contextvars(worker=worker_id)
    starting = asyncio.create_task(build(broker, settings, worker_id), name="start")
    lease = _Lease(broker, worker_id, kind, site, settings.liveness, clock, heartbeat_file)
    beating = asyncio.create_task(lease.keep(), name="heartbeat")
    try:
        worker = await _first_of(starting, stopping, beating)
        if worker is None:
            return not stopping.is_set()
        lease.worker = worker
        log.info("joined", kind=kind.value)
        await _first_of(asyncio.create_task(worker.run(), name="work"), stopping, beating)
        return not stopping.is_set()
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        with contextlib.suppress(TransientError, FatalError, TimeoutError):
            async with asyncio.timeout(1.0):
                await broker.end_lease(worker_id)
                if stopping.is_set():  # what it held goes to others at once, not when its lease would have run out
                    lost = WorkerLost(worker_id=worker_id, reason="it was told to leave", left=True)
                    await broker.append(keys.EVENTS, event_entry(lost, worker=worker_id))


async def new_worker(broker: Broker, kind: WorkerKind) -> WorkerId:
    """A worker with a number that no worker of ``kind`` in the run has or had."""
    taken = {worker_id.rpartition(".")[0] for worker_id in await broker.leases()}
    while True:
        index = await broker.next_incarnation(f"{kind.value}-auto") - 1  # 0, 1, 2, ...: each number once
        worker_id = await _incarnation(broker, f"{kind.value}-{index}")
        if worker_id.endswith(".1") and f"{kind.value}-{index}" not in taken:
            return worker_id


async def _incarnation(broker: Broker, name: str) -> WorkerId:
    """The next process of the worker ``name``."""
    return WorkerId(f"{name}.{await broker.next_incarnation(name)}")


def free_rank(run_dir: Path) -> int:
    """The lowest rank that no other process with this directory has; ours until this process ends.

    Unlike a number of ``new_worker`` it comes back: ranks are numbered without a gap, also after one died.
    Raises: DirectoryError, ForeignError: ``run_dir`` cannot be written, or is another user's.
    """
    directory = run_dir / "rank-locks"
    with writing(run_dir):
        run_directory(run_dir)
        private_directory(directory)
        for rank in itertools.count():
            with contextlib.suppress(LockedError):
                _rank_locks.append(locked(directory / f"{rank}.lock"))
                return rank
    raise AssertionError("numbers do not end")


_rank_locks: list[IO[bytes]] = []
"""Open until this process ends."""


async def _first_of(work: asyncio.Task[T], stopping: asyncio.Event, *beating: asyncio.Task[None]) -> T | None:
    """The result of ``work``, or None when the run ended or a signal came first; ``work`` is then cancelled."""
    stop = asyncio.create_task(stopping.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({work, stop, *beating}, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            return work.result()
        for ended in done.intersection(beating):
            ended.result()
        return None
    finally:
        for task in (stop, work):
            task.cancel()
        await asyncio.gather(stop, work, return_exceptions=True)


def _stop_on_signal() -> asyncio.Event:
    """Set by whatever asks a process to end."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, stopping.set)
    return stopping


@dataclass(slots=True)
class _Lease:
    """Renews the lease and looks whether the run is over."""

    broker: Broker
    worker_id: WorkerId
    kind: WorkerKind
    site: str
    liveness: LivenessSettings
    clock: Clock
    heartbeat_file: Path | None
    worker: Worker | None = None

    async def _alive_during(self, beat: Coroutine[Any, Any, None]) -> None:
        """``beat``; while the broker is away, the heartbeat file is touched without it: this process waits, within
        ``broker.outage_s``, and who looks at the file would kill one that hangs.
        """
        beating = asyncio.create_task(beat, name="beat")
        try:
            while not (await asyncio.wait({beating}, timeout=self.liveness.heartbeat_s))[0]:
                if self.heartbeat_file and self.broker.away() is not None:
                    self.heartbeat_file.touch()
            beating.result()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def keep(self) -> None:
        """Beat until the run is over. Raises BrokerUnavailableError when the broker was away for too long."""
        started_s = since_s = self.clock.now_s()
        doing, trips_s = "", deque[float](maxlen=BEATS_TIMED)
        while True:
            activity = self.worker.activity() if self.worker else Activity(doing=STARTING)
            now_s = self.clock.now_s()
            if activity.doing != doing:
                doing, since_s = activity.doing, now_s
            status = WorkerStatus(
                worker_id=self.worker_id,
                kind=self.kind,
                host=socket.gethostname(),
                pid=os.getpid(),
                protocol=PROTOCOL_VERSION,
                host_id=host_id(),
                site=self.site,
                gpus=tuple(f"{gpu.uuid} {gpu.name}" for gpu in taken_gpus()),
                since_s=now_s - since_s,
                elapsed_s=now_s - started_s,
                round_trip_s=min(trips_s, default=0.0),
                **msgspec.structs.asdict(activity),
            )
            await self._alive_during(self.broker.beat(self.worker_id, encode(status), ttl_s=self.liveness.lease_s))
            if self.heartbeat_file:
                self.heartbeat_file.touch()
            asked_s = self.clock.now_s()
            state = await self.broker.get_meta(keys.STATE)
            trips_s.append(self.clock.now_s() - asked_s)
            if state == keys.STATE_FINISHED:
                log.info("the run is over")
                return
            await asyncio.sleep(self.liveness.heartbeat_s)
