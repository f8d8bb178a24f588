"""The one place where events meet the state: apply, write down, then act.

Owns: the order of events and their sequence numbers. Never: I/O other than the journal. Invariant: no command leaves
before the event that caused it is in the journal; a recorded journal replayed gives the same commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import core_settings
from orchestrator.core.state import PipelineState
from orchestrator.errors import EventFailedError
from orchestrator.journal import Journal, Recovered
from orchestrator.loop.execute import Executor, Issued
from orchestrator.loop.intake import Arrival, Inbox
from orchestrator.loop.trimming import Trimmer
from orchestrator.loop.watchdog import Watchdog
from orchestrator.observability.metrics import MetricsLog
from transport.contracts.messages import (
    DropRows,
    Event,
    JournalRecord,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
    TrimRounds,
)
from transport.contracts.settings import Settings
from transport.process import faults
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

MAX_BATCH = 512
"""Events applied before the loop breathes: about 10 ms of deciding."""
SNAPSHOT_EVERY = 20_000
"""Records between snapshots: replaying so many takes about 0.3 s, and each snapshot waits for the disk."""


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
    if state.configured != wanted:
        state = PipelineState.restore(state.snapshot(), settings=wanted)
        journal.snapshot(state.snapshot(), state.seq)
    return state, [*restated(state), *again]


def restated(state: PipelineState) -> list[Issued]:
    """What a broker that lost its tail has to be told again: all that is outstanding, and where the rounds log begins.

    Without the latter, entries that came back would stand before a gap.
    """
    begins = state.rounds_begin
    trims = [(CommandId(state.seq, 0), TrimRounds(cursor=begins))] if begins else []
    return [*state.outstanding(), *trims]


class Decider:
    """Feeds the state and passes its commands on."""

    def __init__(
        self,
        state: PipelineState,
        journal: Journal,
        executor: Executor,
        metrics: MetricsLog,
        watchdog: Watchdog,
        clock: Clock,
        cursor: str,
        trimmer: Trimmer,
        on_events: Callable[[Sequence[Event]], None] = lambda _: None,
    ) -> None:
        """trimmer: frees what snapshots make superfluous.  on_events: hears of events that are written down."""
        self._state = state
        self._journal = journal
        self._executor = executor
        self._metrics = metrics
        self._watchdog = watchdog
        self._clock = clock
        self._cursor = cursor
        self._trimmer = trimmer
        self._on_events = on_events
        self._since_snapshot = 0

    @property
    def cursor(self) -> str:
        """Id of the last entry of the events log that was applied."""
        return self._cursor

    def restate(self) -> None:
        """Submit again whatever was commanded and is not confirmed; the prompt desk, in this process, lost nothing."""
        ours = RequestPrompts | RequestHeldOutPrompts
        self._executor.restate(issued for issued in restated(self._state) if not isinstance(issued[1], ours))

    async def run(self, inbox: Inbox) -> None:
        """Apply what arrives, forever. Raises EventFailedError."""
        while True:
            arrivals = [await inbox.get()]
            while len(arrivals) < MAX_BATCH and not inbox.empty():
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
            self._cursor = arrival.cursor or self._cursor
            record = JournalRecord(
                seq=self._state.seq + 1, now_s=self._clock.now_s(), event=arrival.event, cursor=self._cursor
            )
            records.append(record)
            issued += self._decide(record, arrival.cursor or "")
        faults.point("orchestrator.applied")
        self._journal.append(records)
        faults.point("orchestrator.journaled")
        self._since_snapshot += len(records)
        self._executor.submit(issued)
        self._on_events([record.event for record in records])

    def _decide(self, record: JournalRecord, entry_id: str) -> list[Issued]:
        try:
            commands = self._state.handle(record.event, record.now_s)
        except Exception as error:  # what it has half changed goes with this process: the journal knows nothing of it
            raise EventFailedError(record.event, entry_id, error) from error
        self._watchdog.observe(record.event)
        self._metrics.observe(record.event, commands, record.now_s)
        return [(CommandId(record.seq, index), command) for index, command in enumerate(commands)]

    async def snapshot(self) -> None:
        """Snapshot once everything decided so far is carried out: what lies before it is never looked at again."""
        seq, state, cursor = self._state.seq, self._state.snapshot(), self._cursor
        await self._executor.drained()
        self._journal.snapshot(state, seq)
        self._since_snapshot = 0
        await self._trimmer.trim(cursor, self._state.worker_ids())
