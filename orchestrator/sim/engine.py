"""The simulator: an event heap and a virtual clock that drive the very state that decides live.

Owns: virtual time, and the log of what happened. Never: a decision; it imports the core's. Invariant: the same seeds
give a byte-identical log, whatever machine and hash seed it runs under.

    heap (time, order, action) ──► action: a simulated worker does something ──► event ──► PipelineState.handle
      ▲                                                                                        │ commands
      └────────── actors schedule what follows, as the cost model says ◄───────────────────────┘
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.dispatch import Order, Placement, least_loaded
from orchestrator.core.lpt import longest_first
from orchestrator.core.settings import CoreSettings
from orchestrator.core.state import CommandId, PipelineState
from orchestrator.sim.models import CostModel, FaultModel, LengthModel
from transport.clock import ManualClock
from transport.messages import Command, Event, FinishRun, JournalRecord, Tick, encode
from transport.types import RowId

Action: TypeAlias = Callable[[], None]
Obey: TypeAlias = Callable[[CommandId, Command], None]


class SimulationStalledError(Exception):
    """The simulated run did not end in time; the message names what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run.

    workers: generation workers of ``capacity`` samples each.  num_prompts: of the source.
    order, place: the dispatch policy.  max_s: virtual seconds after which the run counts as stalled.
    """

    core: CoreSettings
    workers: int = 2
    capacity: int = 16
    dp_size: int = 1
    num_prompts: int = 1_000_000
    lengths: LengthModel = field(default_factory=LengthModel)
    costs: CostModel = field(default_factory=CostModel)
    faults: FaultModel = field(default_factory=FaultModel)
    order: Order = longest_first
    place: Placement = least_loaded
    max_s: float = 1e6


@dataclass(slots=True)
class SimulationLog:
    """Every event with its commands, in order, and the virtual time at which the run was over.

    trainer_busy_s: seconds that the trainer computed.  tokens: of all rows that were generated.
    trained: rows of each batch in the surviving lineage of weights, in the order trained.
    """

    history: list[tuple[JournalRecord, list[Command]]] = field(default_factory=list)
    initial: bytes = b""
    end_s: float = 0.0
    finish_reason: str = ""
    trainer_busy_s: float = 0.0
    tokens: int = 0
    trained: dict[int, list[RowId]] = field(default_factory=dict)

    def as_bytes(self) -> bytes:
        """The whole log, MessagePack; equal logs have equal bytes."""
        return encode([(record, commands) for record, commands in self.history])

    def events_of(self, kind: type[Event]) -> list[JournalRecord]:
        return [record for record, _ in self.history if isinstance(record.event, kind)]

    def commands_of(self, kind: type[Command]) -> list[Command]:
        return [command for _, commands in self.history for command in commands if isinstance(command, kind)]


class Simulation:
    """Virtual time, the state, and the actors that do what it commands."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.clock = ManualClock()
        self.state = PipelineState(scenario.core, order=scenario.order, place=scenario.place)
        self.chance = random.Random(scenario.faults.seed)
        self.log = SimulationLog(initial=self.state.snapshot())
        self.finished = False
        self._heap: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0
        self._obeys: list[Obey] = []

    def attach(self, obey: Obey) -> None:
        """An actor hears every command."""
        self._obeys.append(obey)

    def after(self, seconds: float, action: Action) -> None:
        """Do ``action`` in ``seconds`` of virtual time; what is due together happens in the order it was asked for."""
        heapq.heappush(self._heap, (self.clock.now_s() + seconds, self._num_scheduled, action))
        self._num_scheduled += 1

    def tell(self, event: Event) -> None:
        """The state hears of ``event`` now, and sometimes twice."""
        self._apply(event)
        if self.strikes(self.scenario.faults.repeat):
            self._apply(event)

    def strikes(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        if probability <= 0 or self.clock.now_s() > self.scenario.faults.until_s:
            return False
        return self.chance.random() < probability

    def run(self) -> SimulationLog:
        """Until the run is over. Raises SimulationStalledError when it does not end within ``max_s``."""
        self._tick()
        while self._heap and not self.finished:
            at_s, _, action = heapq.heappop(self._heap)
            if at_s > self.scenario.max_s:
                raise SimulationStalledError(f"at {self.clock.now_s():.0f} s: {self.state.describe_wait()}")
            self.clock.advance(at_s - self.clock.now_s())
            action()
        self.log.end_s = self.clock.now_s()
        return self.log

    def _tick(self) -> None:
        self._apply(Tick())
        self.after(self.scenario.costs.heartbeat_s, self._tick)

    def _apply(self, event: Event) -> None:
        now_s = self.clock.now_s()
        commands = self.state.handle(event, now_s)
        seq = self.state.seq
        self.log.history.append((JournalRecord(seq=seq, now_s=now_s, event=event, cursor=f"{seq}-0"), commands))
        for number, command in enumerate(commands):
            if isinstance(command, FinishRun):
                self.finished, self.log.finish_reason = True, command.reason
            for obey in self._obeys:
                obey(CommandId(seq, number), command)
