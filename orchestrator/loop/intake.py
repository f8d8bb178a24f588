"""What turns the outside into events: the events log, the clock, leases, the broker's memory, and people.

Owns: the loops that read, and how long each worker has been silent. Never: decides; whatever they see goes into the
inbox, or onto the events log, as an event. Invariant: the events log is read in order and each entry enters the inbox
once, with the cursor that follows it; one that is not an event, or on which the core once failed, never does: it is
logged, and kept among the dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import msgspec
import structlog

from orchestrator.config.rules import violations
from orchestrator.config.run_directory import RunDir
from orchestrator.config.schema import FIELDS, expected_type, nearest, to_toml
from orchestrator.core.model.settings import CHANGEABLE
from orchestrator.errors import ConfigError, EventFailedError
from transport.broker import keys
from transport.broker.base import MAX_DEAD_LETTERS, Broker, Commit, Entry, Fence, buried
from transport.contracts.ledger import checkpoint_dirs, checkpoints_place, critic_checkpoints_place
from transport.contracts.messages import (
    STARTING,
    BrokerUsage,
    CheckpointRequested,
    Event,
    PauseRequested,
    ResumeRequested,
    RowsMissing,
    RunResumed,
    SettingChanged,
    StopRequested,
    Tick,
    TrialRows,
    WorkerJoined,
    WorkerLost,
    WorkerStatus,
    encode,
    event_decoder,
    worker_status_decoder,
)
from transport.contracts.settings import Settings, public
from transport.contracts.types import PROTOCOL_VERSION, Column, RowId, TaskSpec, WorkerId
from transport.contracts.user_files import ModelIdentity
from transport.errors import FencedError, MessageError, RunExistsError
from transport.process.clock import Clock
from transport.rows.run_rows import RETAINED, units_of

log = structlog.get_logger(__name__)

READ_COUNT = 512
GATHER_S, MAX_GATHER_S = 0.003, 0.008
"""For each event of a read, how long to wait before the next one, and at most. An event that comes alone is read at
once, and delays only those that follow it closely; where hundreds come a second, one read brings several: a round trip,
and one for the commands, cost more than deciding on what they bring."""
MAX_BURIED = 1000
"""Bad entries that one process keeps, because a writer of bad entries writes many. The others are only counted."""
MAX_EVIDENCE_BYTES = 16 * 1024
"""Kept of one bad entry: enough for any event."""


class Arrival(NamedTuple):
    """An event and, if it came from the events log, the cursor to go on from after it."""

    event: Event
    cursor: str | None = None


Inbox = asyncio.Queue[Arrival]
"""Bounded: when the core is behind, the events wait in the broker, where they are safe and can be seen."""


def new_inbox() -> Inbox:
    return asyncio.Queue(maxsize=4 * READ_COUNT)


async def read_events(broker: Broker, inbox: Inbox, cursor: str) -> None:
    """Forward the events log from ``cursor`` on, forever, except what is not an event or was buried before."""
    letters = await broker.dead_letters(count=MAX_DEAD_LETTERS)
    passed_over = {letter.entry_id for letter in letters if letter.queue == keys.EVENTS}
    num_buried = 0
    while True:
        entries = await broker.read(keys.EVENTS, cursor, count=READ_COUNT, wait_s=1.0)
        for entry in entries:
            cursor = entry.entry_id
            if cursor in passed_over:
                log.warning("skipped an event that is among the dead letters", entry=cursor)
                continue
            try:
                event = event_decoder.decode(entry.entry.payload)
            except MessageError as error:
                num_buried += 1
                log.warning("skipped an entry that is not an event", entry=cursor, error=str(error), so_far=num_buried)
                if num_buried <= MAX_BURIED:
                    await _bury(broker, cursor, entry.entry, str(error))
                continue
            await inbox.put(Arrival(event, cursor))
        if 0 < len(entries) < READ_COUNT:
            await asyncio.sleep(min(GATHER_S * len(entries), MAX_GATHER_S))


async def burying(deciding: Coroutine[Any, Any, None], broker: Broker) -> None:
    """``deciding``; if the core fails on an event of the log, bury that event, so that the next start skips it.

    Source: ours. The event did not reach the journal, so without this it would be read, and fail, at every start.
    """
    try:
        await deciding
    except EventFailedError as error:
        log.error("the core failed on an event", entry=error.entry_id, exc_info=error)
        if error.entry_id:
            entry = Entry(fields={"event": type(error.event).__name__}, payload=encode(error.event))
            await _bury(broker, error.entry_id, entry, str(error.__cause__))
        raise


async def _bury(broker: Broker, entry_id: str, entry: Entry, reason: str) -> None:
    """Put an entry of the events log among the dead letters; the log keeps it."""
    fields, room = dict[str, str](), MAX_EVIDENCE_BYTES
    for name, value in entry.fields.items():
        room -= len(name) + len(value)
        if room >= 0:
            fields[name] = value
    evidence = Entry(fields=fields, payload=entry.payload[:MAX_EVIDENCE_BYTES])
    await broker.append(keys.DEAD, buried(keys.EVENTS, entry_id, reason, evidence))


async def tick(inbox: Inbox) -> None:
    """Report to the core that time passes, forever."""
    while True:
        await asyncio.sleep(0.5)
        await inbox.put(Arrival(Tick()))


async def watch_usage(broker: Broker, fence: Fence, inbox: Inbox) -> None:
    """Report to the core how many bytes of rows the broker and the run's storage units retain, when that changes,
    forever.

    It asks in a fenced step, so that an orchestrator that was replaced learns of it soon, even with nothing to write.
    Raises FencedError.
    """
    last: BrokerUsage | None = None
    while True:
        retained = (await broker.commit(Commit(fence=fence))).retained_bytes
        in_units = sum(unit.counters.get(RETAINED, 0.0) for unit in units_of(await broker.leases()))
        usage = BrokerUsage(retained_bytes=retained, unit_bytes=int(in_units))
        if usage != last:
            await inbox.put(Arrival(usage))
            last = usage
        await asyncio.sleep(2.0)


# -- who is alive: leases in the broker. Silence counts only while the broker was reachable and took writes, so that
# neither its outage nor its being full ever costs a worker its place

RETURN_POLLS = 4
MAX_POLL_GAP_S = 3.0
"""A poll that comes later than this after the one before says that the broker (or this process) was away."""


class SilenceClock:
    """Seconds of observed silence per worker. Pure, so that its rule can be tested without a broker."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._silent_s: dict[WorkerId, float] = {}
        self._last_poll_s: float | None = None

    def poll(self, expected: Iterable[WorkerId], alive: Iterable[WorkerId], now_s: float) -> list[WorkerId]:
        """Workers whose observed silence has just passed the lease, in order of id.

        expected: workers that the core counts on.  alive: those whose lease is held at ``now_s``.
        """
        gap_s = 0.0 if self._last_poll_s is None else now_s - self._last_poll_s
        counted_s = gap_s if gap_s <= MAX_POLL_GAP_S else 0.0
        self._last_poll_s = now_s
        living = set(alive)
        silent = {worker: self._silent_s.get(worker, 0.0) + counted_s for worker in expected if worker not in living}
        lost = sorted(worker for worker, seconds in silent.items() if seconds > self._lease_s)
        self._silent_s = {worker: seconds for worker, seconds in silent.items() if worker not in lost}
        return lost


class Newcomers:
    """Which leases are workers that the core does not count on yet. Pure, like SilenceClock."""

    def __init__(self) -> None:
        self._known: set[WorkerId] = set()
        self._polls: dict[WorkerId, int] = {}

    def poll(self, expected: Iterable[WorkerId], alive: Mapping[WorkerId, WorkerStatus]) -> list[WorkerStatus]:
        """Statuses of workers to be joined now, in order of id.

        A worker that the core once counted on and gave up must be seen RETURN_POLLS times in a row: the lease of one
        that has just died may still be in the answer.
        """
        counted = set(expected)
        self._known |= counted
        unknown = [worker for worker in sorted(alive) if worker not in counted and alive[worker].doing != STARTING]
        self._polls = {worker: self._polls.get(worker, 0) + 1 for worker in unknown}
        return [
            alive[worker] for worker in unknown if self._polls[worker] >= (RETURN_POLLS if worker in self._known else 1)
        ]


class Membership:
    """Polls the leases; keeps the last status of everyone for the status page."""

    def __init__(self, broker: Broker, lease_s: float, clock: Clock) -> None:
        self._broker = broker
        self._silence = SilenceClock(lease_s)
        self._newcomers = Newcomers()
        self._clock = clock
        self._decoded: dict[WorkerId, tuple[bytes, WorkerStatus | None]] = {}
        self.statuses: dict[WorkerId, WorkerStatus] = {}

    async def watch(self, inbox: Inbox, expected: Callable[[], Iterable[WorkerId]]) -> None:
        """Put WorkerJoined and WorkerLost into the inbox as leases come and go, forever. expected: the core's."""
        heard: set[WorkerId] = set()
        while True:
            await self._broker.put_meta(keys.TAKES_WRITES, b"")
            leases = await self._broker.leases()
            for worker, raw in leases.items():
                if self._decoded.get(worker, (b"",))[0] != raw:  # decoded when it changes: every few seconds, of many
                    self._decoded[worker] = (raw, _decoded(worker, raw))
            self._decoded = {worker: self._decoded[worker] for worker in leases}
            self.statuses = {worker: status for worker, (_, status) in self._decoded.items() if status is not None}
            counted = set(expected())
            heard |= self.statuses.keys()
            for status in self._newcomers.poll(counted, self.statuses):
                log.info("worker joined", worker=status.worker_id, capacity=status.capacity)
                joined = WorkerJoined(
                    worker_id=status.worker_id,
                    kind=status.kind,
                    capacity=status.capacity,
                    weights=status.weights,
                    host_id=status.host_id,
                    site=status.site,
                )
                await inbox.put(Arrival(joined))
            for worker in self._silence.poll(counted, self.statuses, self._clock.now_s()):
                if worker in heard:
                    log.warning("worker lost", worker=worker)
                    lost = WorkerLost(worker_id=worker, reason="its lease ran out")
                else:  # the core counts on it from the run's former start, and it ended with that
                    lost = WorkerLost(worker_id=worker, reason="it is of an earlier start", left=True)
                await inbox.put(Arrival(lost))
            await asyncio.sleep(0.5)


def _decoded(worker: WorkerId, raw: bytes) -> WorkerStatus | None:
    """None for one that is not of ours: named in the log, and never joined."""
    try:
        status = worker_status_decoder.decode(raw)
    except MessageError as error:
        log.warning("unreadable lease", worker=worker, error=str(error))
        return None
    if PROTOCOL_VERSION - 1 <= status.protocol <= PROTOCOL_VERSION:
        return status
    log.warning("worker of another protocol version", worker=worker, protocol=status.protocol)
    return None


# -- what the broker must hold of a run: written at the start, and made again after the broker was restarted. One that
# comes back from its append-only file holds a prefix of what it held. What the orchestrator had written beyond it is
# written again; rows that were reported to the core and are gone become RowsMissing; all else shows in the workers'
# next reports. Source: ours


def scoring_tasks(*, with_reference: bool, with_critic: bool = False) -> tuple[TaskSpec, ...]:
    """The tasks between a generated sample and a trainable one, in the order in which a sample usually meets them.

    A task is started by its columns, never by another task: add one by declaring it here.
    with_reference: logprobs of a frozen reference model are needed (kl_coef > 0).  with_critic: values are; advantages
    then wait for them too, so that a scored group is always trainable.
    Source: AsyncFlow sec. 3.1, 3.3.
    """
    responses = frozenset({Column.RESPONSE_IDS})
    rewards = frozenset({Column.REWARD, Column.REWARD_COMPONENTS})
    tasks = [TaskSpec(name="reward", unit="sample", reads=responses, writes=rewards)]
    scores, advantages = {Column.REWARD}, {Column.ADVANTAGE}
    if with_reference:
        logprobs = Column.REFERENCE_LOGPROBS
        tasks.append(TaskSpec(name="reference", unit="sample", reads=responses, writes=frozenset({logprobs})))
        scores.add(logprobs)
    if with_critic:
        values = frozenset({Column.VALUES, Column.VALUE_WEIGHTS})
        tasks.append(TaskSpec(name="values", unit="sample", reads=responses, writes=values))
        scores.add(Column.VALUES)
        advantages |= {Column.TOKEN_ADVANTAGES, Column.RETURNS}
    group = TaskSpec(name="advantages", unit="group", reads=frozenset(scores), writes=frozenset(advantages))
    return *tasks, group


async def keep_reconciled(
    broker: Broker,
    inbox: Inbox,
    rows_reported: Callable[[], Sequence[RowId]],
    rows_scored: Callable[[], Sequence[RowId]],
    restore: Callable[[], Awaitable[None]],
) -> None:
    """Watch for a broker of another boot, forever; ``restore`` then writes what the orchestrator had written.

    Rows are looked for once at the start too: the broker may have lost them while no orchestrator ran.

    rows_reported, rows_scored: rows whose response, and whose advantage, was reported to the core, and that are not
    trained.
    """
    boot_id: str | None = None
    while True:
        current = (await broker.info()).boot_id
        if current != boot_id:
            if boot_id is not None:
                log.warning("the broker was restarted; reconciling")
                await restore()
            boot_id = current
            missing = {
                *await rows_without(broker, rows_reported(), Column.ROLLOUT_INFO),
                *await rows_without(broker, rows_scored(), Column.ADVANTAGE),
            }
            if missing:
                log.warning("the broker lost rows; they are generated again", rows=len(missing))
                await inbox.put(Arrival(RowsMissing(row_ids=tuple(sorted(missing)))))
        await asyncio.sleep(1.0)


async def rows_without(broker: Broker, rows: Sequence[RowId], column: Column) -> list[RowId]:
    """Those of ``rows`` that do not hold ``column``."""
    missing: list[RowId] = []
    for start in range(0, len(rows), 512):
        some = rows[start : start + 512]
        found = await broker.read_rows(some, (column,))
        missing += [row for row, columns in zip(some, found, strict=True) if column not in columns]
    return missing


async def check_new(broker: Broker, rundir: RunDir, settings: Settings) -> None:
    """A run without a journal begins, so nothing of its name may be there yet. Raises RunExistsError."""
    if await broker.get_meta(keys.STATE) is not None:
        raise RunExistsError(
            f"the broker already holds a run named {broker.run!r}, and it is not the one in {rundir.path}: "
            "choose another --name"
        )
    places = [checkpoints_place(settings, rundir.path)]
    places += [critic_checkpoints_place(settings, rundir.path)] if settings.has_critic else []
    for checkpoints in places:
        if await asyncio.to_thread(checkpoint_dirs, checkpoints):
            raise RunExistsError(
                f"{checkpoints} holds checkpoints, but {rundir.journal} nothing that says how they came to be: put "
                "the journal back, or start a run of another --name from a model directory (model.path)"
            )


async def publish_run_metadata(
    broker: Broker,
    settings: Settings,
    trainer_epoch: int,
    model: ModelIdentity,
    trial: TrialRows | None = None,
    *,
    critic_epoch: int = 0,
) -> None:
    """Write what workers need in the broker beside entries and rows; again after it lost its tail, which may reach so
    far.

    trainer_epoch, critic_epoch: the highest that was reported, so that none later gets it once more.  model: what
    workers have.
    trial: what rewards are tried on; there before the settings, for which workers wait.
    """
    trains = settings.trainer.engine != "none"
    reference, critic = settings.has_reference, settings.has_critic
    await broker.declare_tasks(scoring_tasks(with_reference=reference, with_critic=critic) if trains else ())
    with suppress(FencedError):  # the broker knows a newer one
        await broker.commit(Commit(fence=Fence(role="trainer", epoch=trainer_epoch)))
    if settings.has_critic:
        with suppress(FencedError):
            await broker.commit(Commit(fence=Fence(role="critic", epoch=critic_epoch)))
    await broker.put_meta(keys.MODEL, encode(model))
    if trial is not None:
        await broker.put_meta(keys.TRIAL, encode(trial))
    await broker.put_meta(keys.SETTINGS, encode(public(settings)))
    await broker.put_meta(keys.STATE, keys.STATE_RUNNING)


async def was_resumed(broker: Broker, cursor: str) -> bool:
    """Whether an event that was not read yet says that the run goes on: then its former end is no end any more."""
    while entries := await broker.read(keys.EVENTS, cursor, count=READ_COUNT):
        if any(entry.entry.fields.get("event") == RunResumed.__name__ for entry in entries):
            return True
        cursor = entries[-1].entry_id
    return False


# -- requests of people: they travel on the events log, so they are neither lost nor reordered when the orchestrator is
# just being started again, and the journal shows them. What follows from one, the core decides

REQUESTS: Mapping[str, Callable[[], Event]] = {
    "pause": PauseRequested,
    "resume": ResumeRequested,
    "drain": lambda: StopRequested(reason="drained by request"),
    "checkpoint": CheckpointRequested,
}
"""Those without an argument."""


async def append_event(broker: Broker, event: Event, **fields: str) -> str:
    """Put ``event`` on the events log with readable fields. Returns the id of its entry."""
    entry = Entry(fields={"event": type(event).__name__, **fields}, payload=encode(event))
    entry_id = await broker.append(keys.EVENTS, entry)
    assert entry_id is not None  # only an id that we had chosen could be there already
    return entry_id


def change(settings: Settings, now: Mapping[str, object], num_admitted: int, key: str, value: object) -> SettingChanged:
    """The event that sets ``key``.

    Args:   settings: the run's configuration.  now, num_admitted: what was changed of it since, and the batches that
            were begun (``settings`` and ``num_admitted`` of the status).
    Raises: ConfigError: it cannot change while the run goes on, is of another type, breaks a rule of the settings, or
            comes too late.
    """
    if key not in CHANGEABLE:
        hint = f"{nearest(key, list(CHANGEABLE))}; these can: {', '.join(CHANGEABLE)}"
        raise ConfigError(f"{key} cannot change while a run goes on{hint}", key=key)
    wanted = settings
    for changed_key, changed_value in [*now.items(), (key, value)]:
        wanted = _with(wanted, changed_key, changed_value)
    for keys_of_rule, problem in violations(wanted):
        raise ConfigError(f"with {key} = {value}: {keys_of_rule[0]} {problem}", key=key)
    if key == "run.batches" and wanted.run.batches < num_admitted:
        raise ConfigError(
            f"run.batches must be at least {num_admitted}: so many batches are begun, and what is begun is trained; "
            "drain the run to end it sooner",
            key=key,
        )
    return SettingChanged(key=key, value=cast("int | float | str", value))


def _with(settings: Settings, key: str, value: object) -> Settings:
    section, _, name = key.partition(".")
    try:
        converted = msgspec.convert(value, FIELDS[key].type)
    except msgspec.ValidationError:
        shown = to_toml(value) if isinstance(value, int | float | str | bool) else str(value)
        raise ConfigError(f"{key} must be {expected_type(key)}, not {shown}", key=key) from None
    replaced = msgspec.structs.replace(getattr(settings, section), **{name: converted})
    return msgspec.structs.replace(settings, **{section: replaced})
