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

from orchestrator.core.costs.cost_model import TrainCost
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import CommandId, PipelineState
from orchestrator.sim.lengths import LengthModel, Lengths
from orchestrator.sim.log import SimulationLog
from transport.contracts.continuous_batching import DecodeCost
from transport.contracts.messages import Command, Event, FinishRun, JournalRecord, Tick, TrainerCommand
from transport.contracts.types import WorkerId

SMALL_DECODE = DecodeCost(fixed_s=0.02, sample_s=0.0005)
SMALL_TRAIN = TrainCost(round_s=0.05, token_s=0.0002, optimizer_s=0.5)
"""Round figures of a small model, for runs whose order matters and whose seconds do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """How long things take, seconds.

    decode: a step of a worker, where workers do not differ.  train: a rank of the trainer.
    dispatch_s: of a plan on its way to a worker.  scoring_s: of a group.  publish_s: of the trainer, for every version.
    transfer_s: of a version on its way, while generation goes on.  load_s: of putting it into an engine between two
    steps.  switch_s: of colocated GPUs between the stages, paid by the trainer before and after every batch.
    spawn_s: until a worker that was asked for has joined.
    decode_beside, train_beside: decode steps and the trainer's work take so many times as long while both go on, where
    they share a machine.
    """

    decode: DecodeCost = SMALL_DECODE
    train: TrainCost = SMALL_TRAIN
    dispatch_s: float = 0.005
    scoring_s: float = 0.05
    publish_s: float = 0.1
    transfer_s: float = 0.1
    load_s: float = 0.1
    switch_s: float = 0.0
    checkpoint_s: float = 0.3
    prompts_s: float = 0.01
    heartbeat_s: float = 1.0
    spawn_s: float = 10.0
    decode_beside: float = 1.0
    train_beside: float = 1.0

    @property
    def shares_a_machine(self) -> bool:
        return (self.decode_beside, self.train_beside) != (1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """What goes wrong. A mean time of 0 means never; ``until_s`` ends all faults, so that every run can end.

    worker_loss_s, trainer_loss_s: mean seconds between kills.  detect_s: until the loss is known.  restart_s: until a
    replacement joins.  row_loss: chance that a row has vanished when the trainer asks for it.
    rollout_failure: chance that a dispatched group fails at once.  repeat: chance that an event is reported twice.
    """

    worker_loss_s: float = 0.0
    trainer_loss_s: float = 0.0
    detect_s: float = 3.0
    restart_s: float = 2.0
    row_loss: float = 0.0
    rollout_failure: float = 0.0
    repeat: float = 0.0
    until_s: float = 300.0
    seed: int = 0


Action: TypeAlias = Callable[[], None]
Execute: TypeAlias = Callable[[CommandId, Command], None]


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


@dataclass(slots=True)
class SharedMachine:
    """A machine that engines and trainer share: which of them work now, which decides how fast the others are.

    decoding: workers with running samples.  engines: called when the trainer begins or stops to work.  trainers: called
    when the first engine begins to decode, or the last one stops.
    """

    decoding: set[WorkerId] = field(default_factory=set[WorkerId])
    training: bool = False
    engines: list[Callable[[bool], None]] = field(default_factory=list[Callable[[bool], None]])
    trainers: list[Callable[[bool], None]] = field(default_factory=list[Callable[[bool], None]])

    def note_decoding(self, worker_id: WorkerId, decodes: bool) -> None:
        """A worker has samples that run, or has none."""
        before = bool(self.decoding)
        (self.decoding.add if decodes else self.decoding.discard)(worker_id)
        if before != bool(self.decoding):
            for changed in self.trainers:
                changed(not before)

    def note_training(self, trains: bool) -> None:
        """The trainer begins to work, or ends."""
        if trains != self.training:
            self.training = trains
            for changed in self.engines:
                changed(trains)


class Simulation:
    """Virtual time, the state, and the actors that do what it commands."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.state = PipelineState(scenario.core)
        self.chance = random.Random(scenario.faults.seed)
        self.log = SimulationLog(initial=self.state.snapshot() if scenario.record else b"")
        self.finished = False
        self.machine = SharedMachine() if scenario.costs.shares_a_machine else None
        self._repeat = scenario.faults.repeat
        self._heap: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0
        self._actors: dict[type[Command], Execute] = {}
        self._workers: dict[WorkerId, Execute] = {}

    def attach(self, execute: Execute, *kinds: type[Command]) -> None:
        """One actor executes commands of these kinds."""
        self._actors.update(dict.fromkeys(kinds, execute))

    def attach_worker(self, worker_id: WorkerId, execute: Execute) -> None:
        """A worker executes the commands that are addressed to it."""
        self._workers[worker_id] = execute

    def detach_worker(self, worker_id: WorkerId) -> None:
        """Commands that are addressed to this worker are lost from now on."""
        del self._workers[worker_id]

    def after(self, seconds: float, action: Action) -> None:
        """Do ``action`` in ``seconds`` of virtual time; what is due at one time happens in the order of these calls."""
        heapq.heappush(self._heap, (self.now_s + seconds, self._num_scheduled, action))
        self._num_scheduled += 1

    def at(self, at_s: float, action: Action) -> None:
        """Do ``action`` at this virtual time, now if it has passed."""
        heapq.heappush(self._heap, (at_s, self._num_scheduled, action))
        self._num_scheduled += 1

    def report(self, event: Event) -> None:
        """The state handles ``event`` now, and with the fault ``repeat`` sometimes twice."""
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
        execute = self._actors.get(type(command))
        if execute is None:
            worker_id = getattr(command, "worker_id", None)
            execute = self._workers.get(worker_id) if worker_id is not None else None
        if execute is not None:
            execute(command_id, command)
        elif isinstance(command, FinishRun):
            self.finished, self.log.finish_reason = True, command.reason
