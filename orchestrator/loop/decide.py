"""The one place where events meet the state: apply, write down, then act.

Owns: the order of events and their sequence numbers. Never: I/O other than the journal. Invariant: no command leaves
before the event that caused it is in the journal; a recorded journal replayed gives the same commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import structlog

from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import core_settings
from orchestrator.core.state import PipelineState
from orchestrator.errors import EventFailedError
from orchestrator.journal import Journal, Recovered
from orchestrator.loop.execute import Executor, Issued, stream_entry
from orchestrator.loop.intake import Arrival, Inbox
from transport.broker import keys
from transport.broker.base import ZERO_ID, Broker, Entry, LogEntry, parse_entry_id
from transport.contracts.messages import (
    Command,
    DropRows,
    Event,
    JournalRecord,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
    SpawnWorkers,
    TrimRounds,
    group_plan_decoder,
    trainer_command_decoder,
    worker_command_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import WorkerId
from transport.errors import MessageError
from transport.process import faults
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

SNAPSHOT_EVERY = 20_000
"""Records between snapshots: replaying so many takes about 0.3 s, and each snapshot waits for the disk."""
READ_COUNT = 512
KEPT_ENTRIES = 256
"""Of a log whose newest entries count: more than a reader looks back, few enough to read in ``redis-cli``."""


def recover_state(settings: Settings, journal: Journal, recovered: Recovered) -> tuple[PipelineState, list[Issued]]:
    """The state after the last journaled event, and what has to be carried out (again): harmless where it already was.

    Stream entries are those that the state calls outstanding; of the tail's other commands, those that free or report.
    The state before the first event is kept too, so that the whole history can be replayed; so is the one at which a
    resumed run changed its settings.
    """
    if recovered.snapshot is None:
        state = PipelineState(core_settings(settings))
        journal.snapshot(state.snapshot(), seq=0)
    else:
        state = PipelineState.restore(recovered.snapshot)
    again: list[Issued] = []
    for record in recovered.tail:
        commands = state.handle(record.event, record.now_s)
        again += [
            (CommandId(record.seq, index), command)
            for index, command in enumerate(commands)
            if isinstance(command, DropRows | TrimRounds | SlotOutcome)
        ]
    wanted = core_settings(settings)
    if state.pipeline.configured != wanted:
        state = PipelineState.restore(state.snapshot(), settings=wanted)
        journal.snapshot(state.snapshot(), state.seq)
    return state, [*restated(state), *again]


def restated(state: PipelineState) -> list[Issued]:
    """What is sent again to a broker that lost its tail: all that is outstanding, where the rounds log begins, and how
    many workers were asked for.

    Without the last two, entries that came back would stand before a gap, and the next request would start too many.
    """
    freed, spawned = state.pipeline.retention.freed.cursor, state.pipeline.elastic.spawned
    again: list[Command] = [TrimRounds(cursor=freed.entry)] if freed.seq else []
    if spawned:
        again.append(SpawnWorkers(total=spawned, reason="asked for before a restart"))
    return [*state.outstanding(), *((CommandId(state.seq, 0), command) for command in again)]


async def take_out_foreign(broker: Broker, state: PipelineState) -> list[str]:
    """Delete each stream of the orchestrator's own that holds, or held, an entry that this run never wrote: what is
    outstanding on it is restated, as to a broker that lost it. Returns a sentence for each.

    For a start, before any worker reads. An entry is foreign if its id is beyond the journal, if nothing was commanded
    under it, or if its content is another than what was commanded.
    """
    freed, expected = state.pipeline.retention.freed.cursor, dict[str, dict[str, Entry]]()
    for command_id, command in state.outstanding():
        if (placed := stream_entry(command)) is not None:
            expected.setdefault(placed[0], {})[command_id.entry] = placed[1]
    own = (keys.ROUNDS, keys.plans(WorkerId("")), keys.control(WorkerId("")))
    said: list[str] = []
    for stream in [name for name in await broker.streams() if name.startswith(own)]:
        last = await broker.last_id(stream)
        foreign = [last] if parse_entry_id(last)[0] > state.seq else []
        after, commanded = ZERO_ID, expected.get(stream, {})
        while not foreign and (entries := await broker.read(stream, after, count=READ_COUNT)):
            after = entries[-1].entry_id
            foreign = [entry.entry_id for entry in entries if _is_foreign(stream, entry, commanded, freed.entry)][:1]
        if foreign:
            await broker.delete_stream(stream)
            log.warning("a stream held an entry that this run never wrote", stream=stream, entry=foreign[0])
            said.append(
                f"stream {stream} held entry {foreign[0]}, which this run never wrote: the stream is written again "
                "from the journal; keep others away from the broker"
            )
    return said


def _is_foreign(stream: str, entry: LogEntry, commanded: Mapping[str, Entry], freed: str) -> bool:
    """Whether it is not what was commanded. Rounds are outstanding until they are freed; a plan or a control command
    that is not outstanding any more is judged by whether it can be read.
    """
    decode = trainer_command_decoder.decode
    if stream != keys.ROUNDS:
        is_plan = stream.startswith(keys.plans(WorkerId("")))
        decode = group_plan_decoder.decode if is_plan else worker_command_decoder.decode
    try:
        held = decode(entry.entry.payload)
    except MessageError:
        return True
    if entry.entry_id in commanded:
        return held != decode(commanded[entry.entry_id].payload)
    return stream == keys.ROUNDS and parse_entry_id(freed) < parse_entry_id(entry.entry_id)


class Decider:
    """Feeds the state and passes its commands on."""

    def __init__(
        self,
        state: PipelineState,
        journal: Journal,
        executor: Executor,
        trimmer: Trimmer,
        clock: Clock,
        cursor: str,
        *,
        observe: Callable[[Event, Sequence[Command], float], None],
        on_events: Callable[[Sequence[Event]], None] = lambda _: None,
        since_snapshot: int = 0,
    ) -> None:
        """cursor: id of the last entry of the events log that was applied.  since_snapshot: records that a start had to
        replay, so that one that often dies makes snapshots, too.  observe: called with each event, its
        commands and the time, before they are written down.  on_events: with the events that were written down."""
        self.state = state
        self._journal = journal
        self._executor = executor
        self._clock = clock
        self.cursor = cursor
        self._trimmer = trimmer
        self._observe = observe
        self._on_events = on_events
        self._since_snapshot = since_snapshot

    def restate(self) -> None:
        """Submit again what was commanded and is not confirmed; the prompt server, in this process, lost nothing."""
        ours = RequestPrompts | RequestHeldOutPrompts
        self._executor.restate(issued for issued in restated(self.state) if not isinstance(issued[1], ours))

    async def run(self, inbox: Inbox) -> None:
        """Apply what arrives, some 10 ms of deciding at once, forever. Raises EventFailedError."""
        while True:
            arrivals = [await inbox.get()]
            while len(arrivals) < 512 and not inbox.empty():
                arrivals.append(inbox.get_nowait())
            self._apply(arrivals)
            if self._since_snapshot >= SNAPSHOT_EVERY:
                await self.snapshot()
            await asyncio.sleep(0)

    def _apply(self, arrivals: Sequence[Arrival]) -> None:
        """Decide on each, write all down, act. One write a batch: the journal is flushed before any command leaves."""
        records: list[JournalRecord] = []
        issued: list[Issued] = []
        for arrival in arrivals:
            self.cursor = arrival.cursor or self.cursor
            record = JournalRecord(
                seq=self.state.seq + 1, now_s=self._clock.now_s(), event=arrival.event, cursor=self.cursor
            )
            records.append(record)
            try:
                commands = self.state.handle(record.event, record.now_s)
            except Exception as error:  # what is half changed goes with this process: the journal knows nothing of it
                raise EventFailedError(record.event, arrival.cursor or "", error) from error
            self._observe(record.event, commands, record.now_s)
            issued += [(CommandId(record.seq, index), command) for index, command in enumerate(commands)]
        faults.point("orchestrator.applied")
        self._journal.append(records)
        faults.point("orchestrator.journaled")
        self._since_snapshot += len(records)
        self._executor.submit(issued)
        self._on_events([record.event for record in records])

    async def snapshot(self) -> None:
        """Snapshot once everything decided so far is carried out: what lies before it is never looked at again."""
        seq, state, cursor = self.state.seq, self.state.snapshot(), self.cursor
        await self._executor.drained()
        self._journal.snapshot(state, seq)
        self._since_snapshot = 0
        await self._trimmer.trim(cursor, self.state.pipeline.fleet.ids())


class Trimmer:
    """Frees what nothing reads again, so that the broker does not grow with the length of a run.

        events             up to the snapshot before the last: the journal has them, on the disk
        weights, routes    all but the newest: only the newest version is ever loaded
        control            the same: a load replaces those before
        plans, control     of workers that were gone at the last two snapshots: their groups went to others long ago

    It frees at most what was superfluous at the snapshot before, so that a slow reader still finds it. Rounds are
    trimmed by the core's own command, below the oldest checkpoint. Invariant: what a restart of any process reads is
    kept.
    """

    def __init__(self, broker: Broker, safe: str = "") -> None:
        """safe: the last entry of the events log that the newest snapshot contains; "" where nothing is known of it."""
        self._broker = broker
        self._safe = safe
        self._gone: set[str] = set()

    async def trim(self, cursor: str, workers: Collection[WorkerId]) -> None:
        """After a snapshot. cursor: last entry of the events log that is in the journal.  workers: that count now."""
        if self._safe:
            await self._broker.trim(keys.EVENTS, self._safe)
        self._safe = cursor
        own = {stream for worker in workers for stream in (keys.plans(worker), keys.control(worker))}
        begins = (keys.plans(WorkerId("")), keys.control(WorkerId("")))  # the names of workers' streams
        streams = await self._broker.streams()
        gone = {stream for stream in streams if stream.startswith(begins) and stream not in own}
        for stream in sorted(gone & self._gone):
            await self._broker.delete_stream(stream)
        self._gone = gone
        control = [keys.control(worker) for worker in workers]
        for log in (keys.WEIGHTS, keys.ROUTES, *control):
            if streams.get(log, 0) > 2 * KEPT_ENTRIES:
                newest = await self._broker.tail(log, count=KEPT_ENTRIES + 1)
                await self._broker.trim(log, newest[0].entry_id)
