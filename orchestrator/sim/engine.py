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

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import CommandId, PipelineState
from orchestrator.sim.colocated import SharedMachine
from orchestrator.sim.lengths import LengthModel, Lengths
from orchestrator.sim.log import SimulationLog
from orchestrator.sim.models import CostModel, FaultModel
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import Command, Event, FinishRun, JournalRecord, Tick, TrainerCommand
from transport.contracts.types import WorkerId

Action: TypeAlias = Callable[[], None]
Obey: TypeAlias = Callable[[CommandId, Command], None]


class SimulationStalledError(Exception):
    """The simulated run did not end in time; the message names what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run.

    workers: generation workers of ``capacity`` samples each.  decode: cost of a step on each worker, where they differ;
    empty: ``costs.decode`` on all.  num_prompts: of the source.
    max_s: virtual seconds after which the run counts as stalled.
    record: keep every event and command.  trace: keep what every instance and the trainer did when.
    """

    core: CoreSettings
    workers: int = 2
    capacity: int = 16
    decode: tuple[DecodeCost, ...] = ()
    dp_size: int = 1
    num_prompts: int = 1_000_000
    lengths: Lengths = field(default_factory=LengthModel)
    costs: CostModel = field(default_factory=CostModel)
    faults: FaultModel = field(default_factory=FaultModel)
    max_s: float = 1e6
    record: bool = True
    trace: bool = False

    def decode_cost(self, index: int) -> DecodeCost:
        """Of the worker in place ``index``."""
        return self.decode[index] if self.decode else self.costs.decode


class Simulation:
    """Virtual time, the state, and the actors that do what it commands."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.state = PipelineState(scenario.core)
        self.chance = random.Random(scenario.faults.seed)
        self.log = SimulationLog(initial=self.state.snapshot() if scenario.record else b"")
        self.finished = False
        self.shared = SharedMachine() if scenario.costs.shares_a_machine else None
        self._repeat = scenario.faults.repeat
        self._heap: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0
        self._obeys: dict[type[Command], Obey] = {}
        self._workers: dict[WorkerId, Obey] = {}

    def attach(self, obey: Obey, *kinds: type[Command]) -> None:
        """An actor hears commands of these kinds; a kind has one hearer."""
        self._obeys.update(dict.fromkeys(kinds, obey))

    def attach_worker(self, worker_id: WorkerId, obey: Obey) -> None:
        """A worker hears what is addressed to it."""
        self._workers[worker_id] = obey

    def detach_worker(self, worker_id: WorkerId) -> None:
        """Nobody hears what is addressed to this worker from now on."""
        del self._workers[worker_id]

    def after(self, seconds: float, action: Action) -> None:
        """Do ``action`` in ``seconds`` of virtual time; what is due together happens in the order it was asked for."""
        heapq.heappush(self._heap, (self.now_s + seconds, self._num_scheduled, action))
        self._num_scheduled += 1

    def at(self, at_s: float, action: Action) -> None:
        """Do ``action`` at this virtual time, now if it has passed."""
        heapq.heappush(self._heap, (at_s, self._num_scheduled, action))
        self._num_scheduled += 1

    def tell(self, event: Event) -> None:
        """The state hears of ``event`` now, and sometimes twice."""
        self._apply(event)
        if self._repeat and self.strikes(self._repeat):
            self._apply(event)

    def strikes(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        if probability <= 0 or self.now_s > self.scenario.faults.until_s:
            return False
        return self.chance.random() < probability

    def note_batch(self, worker_id: WorkerId, num_running: int) -> None:
        """A worker decodes so many samples from now on."""
        if self.scenario.trace:
            self.log.batches.append((self.now_s, worker_id, num_running))

    def note_training(self, began_s: float, command: TrainerCommand, seconds: float) -> None:
        """The trainer was busy with ``command`` for so long."""
        if self.scenario.trace:
            self.log.training.append((began_s, seconds, command))

    def run(self) -> SimulationLog:
        """Until the run is over. Raises SimulationStalledError when it does not end within ``max_s``."""
        self._tick()
        heap, max_s = self._heap, self.scenario.max_s
        while heap and not self.finished:
            at_s, _, action = heapq.heappop(heap)
            if at_s > max_s:
                raise SimulationStalledError(f"at {self.now_s:.0f} s: {self.state.describe_wait()}")
            if at_s > self.now_s:
                self.now_s = at_s
            self.log.num_actions += 1
            action()
        self.log.end_s = self.now_s
        return self.log

    def _tick(self) -> None:
        self._apply(Tick())
        self.after(self.scenario.costs.heartbeat_s, self._tick)

    def _apply(self, event: Event) -> None:
        commands = self.state.handle(event, self.now_s)
        seq = self.state.seq
        log = self.log
        log.num_events += 1
        if self.scenario.record:
            record = JournalRecord(seq=seq, now_s=self.now_s, event=event, cursor=f"{seq}-0")
            log.history.append((record, commands))
        for number, command in enumerate(commands):
            self._execute(CommandId(seq, number), command)

    def _execute(self, command_id: CommandId, command: Command) -> None:
        obey = self._obeys.get(type(command))
        if obey is None:
            worker_id = getattr(command, "worker_id", None)
            obey = self._workers.get(worker_id) if worker_id is not None else None
        if obey is not None:
            obey(command_id, command)
        elif isinstance(command, FinishRun):
            self.finished, self.log.finish_reason = True, command.reason
