"""The simulator: an event heap and a virtual clock that drive the very state that decides live.

Owns: virtual time, and the log of what happened. Never: a decision; it imports the core's. Invariant: the same seeds
give a byte-identical log, whatever machine and hash seed it runs under.

    heap (time, order, action) ──► action: a simulated worker does something ──► event ──► PipelineState.handle
      ▲                                                                                        │ commands
      └────────── actors schedule what follows, as the cost model says ◄───────────────────────┘
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.model.groups import NO_WORKER
from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from orchestrator.sim.costs import ALONE, Sharing, TrainCost
from orchestrator.sim.lengths import LengthModel, Lengths
from transport.contracts.continuous_batching import DecodeCost, Drafts
from transport.contracts.messages import Command, Event, FinishRun, JournalRecord, Tick, TrainerCommand
from transport.contracts.types import RowId, WeightIdentity, WorkerId

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
    partial_s: between two times that what running samples have got is kept for whoever goes on with them; 0: never.
    drafts: of the engines; None: they draft nothing.
    noise: spread by which a worker is slower than its cost, all its life, and each part of a round than the rank's.
    sharing: of a machine that engines and trainer share.
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
    partial_s: float = 0.0
    spawn_s: float = 10.0
    drafts: Drafts | None = None
    noise: float = 0.0
    sharing: Sharing = ALONE


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated run.

    workers: generation workers of ``capacity`` samples each.  decode: cost of a step on each worker, where they differ;
    empty: ``costs.decode`` on all.  max_context: tokens that no sample outgrows.  num_prompts: of the source.
    max_s: virtual seconds after which the run counts as stalled.
    record: keep every event and command.  trace: keep what every instance and the trainer did when.
    """

    core: CoreSettings
    workers: int = 2
    capacity: int = 16
    decode: tuple[DecodeCost, ...] = ()
    max_context: float = math.inf
    dp_size: int = 1
    num_prompts: int = 1_000_000
    lengths: Lengths = field(default_factory=LengthModel)
    costs: CostModel = field(default_factory=CostModel)
    faults: FaultModel = field(default_factory=FaultModel)
    max_s: float = 1e6
    record: bool = True
    trace: bool = False

    def decode_cost(self, index: int) -> DecodeCost:
        """Of the worker in place ``index``, as slow as it is."""
        cost = self.decode[index] if self.decode else self.costs.decode
        if not self.costs.noise:
            return cost
        return cost.scaled(slowdown(random.Random(f"noise/{self.faults.seed}/{index}"), self.costs.noise))


def slowdown(chance: random.Random, noise: float) -> float:
    """A factor of at least 1: what a cost model says is what nothing beats."""
    return math.exp(abs(chance.gauss(0.0, noise)))


@dataclass(slots=True)
class SimulationLog:
    """What a simulated run leaves behind.

    history: every event with its commands, in order, if recorded.  end_s: virtual time at which the run was over.
    num_events: that the state handled.  num_actions: of the event heap.
    trainer_busy_s: seconds that the trainer computed.  tokens: of all rows that were generated.
    sampled_tokens: by engines, in vain or not, but for what they had not finished at the end.
    trained: rows of each batch in the surviving lineage of weights, in the order trained.
    published_s: when each version was published, from 1.
    token_ages: how many trained tokens were sampled under weights that were so many versions behind when trained.
    batches: (when, worker, samples that decode from then on), if traced.  training: (when, seconds, what), if traced.
    """

    history: list[tuple[JournalRecord, list[Command]]] = field(default_factory=list)
    initial: bytes = b""
    end_s: float = 0.0
    finish_reason: str = ""
    num_events: int = 0
    num_actions: int = 0
    trainer_busy_s: float = 0.0
    tokens: int = 0
    sampled_tokens: int = 0
    trained: dict[int, list[RowId]] = field(default_factory=dict)
    published_s: list[float] = field(default_factory=list)
    token_ages: Counter[int] = field(default_factory=Counter)
    batches: list[tuple[float, WorkerId, int]] = field(default_factory=list)
    training: list[tuple[float, float, TrainerCommand]] = field(default_factory=list)

    def iteration_s(self, warm_up: int = 0, cool_down: int = 0) -> float:
        """Mean seconds from one version to the next, without the first ``warm_up`` and the last ``cool_down``.

        The first ones fill the pipeline; beside the last ones nothing else is generated any more.
        """
        begin_s = self.published_s[warm_up - 1] if warm_up else 0.0
        last = len(self.published_s) - cool_down
        return (self.published_s[last - 1] - begin_s) / (last - warm_up)

    @property
    def oldest_age(self) -> int:
        """Versions that the oldest trained token was behind."""
        return max(self.token_ages, default=0)

    @property
    def mean_age(self) -> float:
        """Versions that a trained token was behind, on average."""
        total = sum(self.token_ages.values())
        return sum(age * tokens for age, tokens in self.token_ages.items()) / total if total else 0.0


def counted(iterations: int) -> tuple[int, int]:
    """(how many at the start fill the pipeline, how many at the end empty it): they do not count."""
    warm_up = min(4, iterations // 2)
    return warm_up, min(2, (iterations - warm_up) // 3)


class SimulationStalledError(Exception):
    """The simulated run did not end in time; the message names what it waits for."""


@dataclass(slots=True)
class SharedMachine:
    """A machine that engines and trainer share: which of them work now, which decides how fast each is.

    One of each at once was measured (``decode_beside``, ``train_beside``). More of them than there are cores for take
    turns, each as much as any other.

    decoding: workers with running samples.  engines, trainers: called with how many times as long their work takes from
    now on, when that changes.
    """

    sharing: Sharing
    decoding: set[WorkerId] = field(default_factory=set[WorkerId])
    training: bool = False
    engines: list[Callable[[float], None]] = field(default_factory=list[Callable[[float], None]])
    trainers: list[Callable[[float], None]] = field(default_factory=list[Callable[[float], None]])

    def note_decoding(self, worker_id: WorkerId, decodes: bool) -> None:
        """A worker has samples that run, or has none."""
        if decodes != (worker_id in self.decoding):
            before = self._slowdowns()
            (self.decoding.add if decodes else self.decoding.discard)(worker_id)
            self._tell(before)

    def note_training(self, trains: bool) -> None:
        """The trainer begins to work, or ends."""
        if trains != self.training:
            before = self._slowdowns()
            self.training = trains
            self._tell(before)

    def _tell(self, before: tuple[float, float]) -> None:
        for was, slowdown, concerned in zip(before, self._slowdowns(), (self.engines, self.trainers), strict=True):
            if slowdown != was:
                for changed in concerned:
                    changed(slowdown)

    def _slowdowns(self) -> tuple[float, float]:
        """Seconds of an engine's and of the trainer's work now, over those alone."""
        engines, trains, sharing = len(self.decoding), self.training, self.sharing
        decode = self._turns(max(1, engines), trains) / self._turns(1, trains)
        train = self._turns(engines, True) / self._turns(min(1, engines), True)
        return decode * (sharing.decode_beside if trains else 1.0), train * (sharing.train_beside if engines else 1.0)

    def _turns(self, engines: int, trains: bool) -> float:
        """Seconds of work of so many at once, over those with cores for all."""
        return max(1.0, engines * self.sharing.decode_share + trains * self.sharing.train_share)


class Simulation:
    """Virtual time, the state, and the actors that do what it commands.

    workers: execute what is addressed to them.  published_s: when each version was, from when on workers bring it in.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.state = PipelineState(scenario.core)
        self.chance = random.Random(scenario.faults.seed)
        self.log = SimulationLog(initial=self.state.snapshot() if scenario.record else b"")
        self.finished = False
        self.machine = SharedMachine(scenario.costs.sharing) if scenario.costs.sharing != ALONE else None
        self._heap: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0
        self._actors: dict[type[Command], Execute] = {}
        self.workers: dict[WorkerId, Execute] = {}
        self.published_s: dict[WeightIdentity, float] = {}

    def attach(self, execute: Execute, *kinds: type[Command]) -> None:
        """One actor executes commands of these kinds."""
        self._actors.update(dict.fromkeys(kinds, execute))

    def after(self, seconds: float, action: Action) -> None:
        """Do ``action`` in ``seconds`` of virtual time; what is due at one time happens in the order of these calls."""
        self.at(self.now_s + seconds, action)

    def at(self, at_s: float, action: Action) -> None:
        """Do ``action`` at this virtual time, now if it has passed."""
        heapq.heappush(self._heap, (at_s, self._num_scheduled, action))
        self._num_scheduled += 1

    def report(self, event: Event) -> None:
        """The state handles ``event`` now, and with the fault ``repeat`` sometimes twice."""
        self._apply(event)
        if self.strikes(self.scenario.faults.repeat):
            self._apply(event)

    def strikes(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        if probability <= 0 or self.now_s > self.scenario.faults.until_s:
            return False
        return self.chance.random() < probability

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
        self.log.num_events += 1
        if self.scenario.record:
            record = JournalRecord(seq=seq, now_s=self.now_s, event=event, cursor=f"{seq}-0")
            self.log.history.append((record, commands))
        for number, command in enumerate(commands):
            kind, worker_id = type(command), getattr(command, "worker_id", NO_WORKER)
            execute = self._actors.get(kind) or self.workers.get(worker_id)
            if execute is not None:
                execute(CommandId(seq, number), command)
            elif isinstance(command, FinishRun):
                self.finished, self.log.finish_reason = True, command.reason
