"""``PipelineState`` and what its commands leave in the world, checked as a reader of the streams would.

Now and then an event is also sent to a state restored from a snapshot: it must decide the same. The orchestrator may
die at an event (``dies_at_next``) and recovers as the live one does: from the newest snapshot and the journal after it,
with everything outstanding carried out again. Entries of streams are appended once an id, as the broker does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from orchestrator.core.model.outbox import CommandId, parse_entry_id
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_invariants import check
from transport.contracts.messages import (
    AbortRollouts,
    AdmitGroups,
    CloseMiniBatch,
    Command,
    ComputePlan,
    DispatchGroups,
    DrainWorker,
    DropRows,
    EvaluationOutcome,
    Event,
    FinishRun,
    FinishTraining,
    GroupPlan,
    HeldOutPromptsArrived,
    LoadWeights,
    PlanComputed,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
    SpawnWorkers,
    TrainRound,
    TrimRounds,
)
from transport.contracts.types import (
    GroupId,
    RowId,
    WeightIdentity,
    WorkerId,
    batch_of,
    is_evaluation,
    parse_row_id,
    row_id,
)

HELD_OUT = 5
"""Held-out problems."""
RESTORE_EVERY = 5
"""Events between two such checks: often enough to meet every kind of state, and rare enough to be quick."""
SNAPSHOT_EVERY = 20
"""Events between two snapshots that a recovery may begin from."""

Death: TypeAlias = Literal["applied", "journaled"]
"""Where the orchestrator dies: its last event is not in the journal, or is and its commands were not carried out."""
_ASKED_FOR = PromptsArrived | HeldOutPromptsArrived | PlanComputed
"""Answers to what a recovered orchestrator asks for again; it hears of other events again from where they came."""
_ON_STREAMS = DispatchGroups | AbortRollouts | LoadWeights | DrainWorker | TrainRound | CloseMiniBatch | FinishTraining


@dataclass
class FakeWorker:
    """A generation worker: plans it holds with the weights they began under, weights it serves and is to load.

    queue: plans on its stream that it has not claimed.  drained: it was commanded to leave.
    """

    weights: WeightIdentity | None = None
    to_load: WeightIdentity | None = None
    to_load_id: CommandId | None = None
    plans: dict[GroupId, tuple[GroupPlan, WeightIdentity]] = field(default_factory=dict)
    queue: dict[CommandId, GroupPlan] = field(default_factory=dict)
    cursor: str = "0-0"
    capacity: int = 0
    drained: bool = False

    def claim(self) -> None:
        """Take the oldest plan off its stream; one that is in its hands already goes on, and one that asks for other
        samples of a group that it has joins them."""
        command_id = min(self.queue)
        plan = self.queue.pop(command_id)
        assert self.weights is not None
        held = self.plans.get(plan.group_id)
        if held is None or held[0].attempt < plan.attempt:
            under = self.weights
            if held is not None and not {*held[0].samples} & {*plan.samples}:
                plan, under = msgspec.structs.replace(plan, samples=(*held[0].samples, *plan.samples)), held[1]
            self.plans[plan.group_id] = (plan, under)
        self.cursor = max(self.cursor, command_id.entry, key=parse_entry_id)


@dataclass
class FakeTrainer:
    """Reads the rounds log. ledger: what it accumulated, by batch, in this life."""

    epoch: int = 0
    version: int = 0
    cursor: CommandId = field(default_factory=lambda: CommandId(0, 0))
    ledger: dict[int, set[tuple[RowId, str, int]]] = field(default_factory=dict)


class ObeyedPipeline:
    """Empty at first: no worker, no trainer."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.state = PipelineState(settings)
        self.now_s = 0.0
        self.requests: list[RequestPrompts] = []
        self.plan_requests: list[ComputePlan] = []
        self.held_out_asked = False
        self.evaluations: list[EvaluationOutcome] = []
        self.sizes: dict[GroupId, int] = {}
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.rows: dict[RowId, int] = {}
        self.oldest: dict[RowId, WeightIdentity] = {}
        self.loosest_staleness = settings.max_staleness
        self.told: list[Event] = []
        self.unscored: list[GroupId] = []
        self.admitted: set[GroupId] = set()
        self.dropped: set[GroupId] = set()
        self.outcomes: dict[GroupId, SlotOutcome] = {}
        self.log: list[tuple[CommandId, Command]] = []
        self.trainer = FakeTrainer()
        self.checkpoints = [(0, CommandId(0, 0))]
        self.critic = FakeTrainer()
        self.critic_checkpoints = [(0, CommandId(0, 0))]
        self.finished, self.failed = "", False
        self.claims_at_once = True
        self.dispatched: list[CommandId] = []
        self.spawn_total, self.num_spawned = 0, 0
        self.dies_at_next: Death | None = None
        self.carried_out: set[CommandId] = set()
        self._kept, self._journal = self.state.snapshot(), list[tuple[Event, float]]()

    @property
    def saved(self) -> tuple[int, CommandId]:
        """(version, cursor) of the newest checkpoint; the first one is the base model."""
        return self.checkpoints[-1]

    @property
    def saved_by_all(self) -> tuple[int, CommandId]:
        """What every reader of the rounds log has saved."""
        return min(self.saved, self.critic_checkpoints[-1]) if self.settings.critic else self.saved

    def tell(self, event: Event) -> list[Command]:
        dies, self.dies_at_next = self.dies_at_next, None
        restored = PipelineState.restore(self.state.snapshot()) if self.state.seq % RESTORE_EVERY == 0 else None
        commands = self.state.handle(event, self.now_s)
        if restored is not None:
            assert restored.handle(event, self.now_s) == commands, "a restored state decides otherwise"
            assert restored.snapshot() == self.state.snapshot()
        check(self.state.pipeline)
        self.told = [*self.told[-20:], event]
        if dies == "applied":
            self._recover()
            return [] if isinstance(event, _ASKED_FOR) else self.tell(event)
        self.loosest_staleness = max(self.loosest_staleness, self.state.settings.max_staleness)
        self._journal.append((event, self.now_s))
        if dies == "journaled":
            for command in commands:
                if isinstance(command, EvaluationOutcome | TrainRound):  # what does not depend on those before it
                    self._check(command)
            self._recover()
        else:
            for number, command in enumerate(commands):
                self._check(command)
                self._carry_out([(CommandId(self.state.seq, number), command)])
        self._check_freed(commands)
        if len(self._journal) >= SNAPSHOT_EVERY:
            self._kept, self._journal = self.state.snapshot(), []
        return commands

    # -- recovery

    def _recover(self) -> None:
        """An orchestrator starts where the journal ends, and carries out again what may not have been."""
        self.state = PipelineState.restore(self._kept)
        again: list[tuple[CommandId, Command]] = []
        for event, now_s in self._journal:
            commands = self.state.handle(event, now_s)
            again += [
                (CommandId(self.state.seq, number), command)
                for number, command in enumerate(commands)
                if isinstance(command, DropRows | TrimRounds | SlotOutcome)
            ]
        self.requests, self.plan_requests, self.held_out_asked = [], [], False
        self.seek_source()
        self._carry_out([*self.state.outstanding(), *again])

    def seek_source(self) -> None:
        """The prompt source of a new orchestrator goes on where the state says."""

    def restate(self, lost: Iterable[CommandId]) -> None:
        """The broker lost these commands' entries: everything outstanding is carried out again."""
        self.carried_out -= set(lost)
        ours = RequestPrompts | RequestHeldOutPrompts | ComputePlan
        self._carry_out(issued for issued in self.state.outstanding() if not isinstance(issued[1], ours))

    # -- what commands do

    def _carry_out(self, issued: Iterable[tuple[CommandId, Command]]) -> None:
        for command_id, command in list(issued):
            if command_id not in self.carried_out or not isinstance(command, _ON_STREAMS | SlotOutcome):
                self.carried_out.add(command_id)
                self._obey(command_id, command)

    def _obey(self, command_id: CommandId, command: Command) -> None:
        match command:
            case RequestPrompts():
                self.requests.append(command)
            case ComputePlan():
                self.plan_requests.append(command)
            case RequestHeldOutPrompts():
                self.held_out_asked = True
            case AdmitGroups():
                self.sizes |= {group.group_id: group.group_size for group in command.groups}
                self.admitted |= {group.group_id for group in command.groups if not is_evaluation(group.group_id)}
            case DispatchGroups() if command.worker_id in self.workers:
                worker = self.workers[command.worker_id]
                worker.queue[command_id] = command.plans[0]
                self.dispatched.append(command_id)
                if self.claims_at_once:
                    worker.claim()
            case AbortRollouts():
                self._abort(command)
            case LoadWeights() if command.worker_id in self.workers:
                worker = self.workers[command.worker_id]
                worker.to_load, worker.to_load_id = command.weights, command_id
            case DrainWorker() if command.worker_id in self.workers:
                self.workers[command.worker_id].drained = True
            case SpawnWorkers():
                self.spawn_total = command.total
            case TrainRound() | CloseMiniBatch() | FinishTraining():
                assert not self.log or self.log[-1][0] < command_id
                self.log.append((command_id, command))
                if isinstance(command, CloseMiniBatch):
                    self._check_close(command)
            case SlotOutcome():
                assert command.group_id not in self.outcomes, f"{command.group_id} ended twice"
                self.outcomes[command.group_id] = command
            case DropRows():
                self._drop(command)
            case FinishRun():
                self.finished, self.failed = command.reason, command.failed
            case _:
                pass

    def _abort(self, command: AbortRollouts) -> None:
        worker = self.workers.get(command.worker_id, FakeWorker())
        for group_id, attempt in zip(command.group_ids, command.attempts, strict=True):
            if group_id in worker.plans and worker.plans[group_id][0].attempt <= attempt:
                del worker.plans[group_id]
            worker.queue = {
                command_id: plan
                for command_id, plan in worker.queue.items()
                if plan.group_id != group_id or plan.attempt > attempt
            }

    def _drop(self, command: DropRows) -> None:
        """What was trained may go once a checkpoint contains the batch that it was sent in, whatever its id says."""
        rounds = [c for _, c in self.log if isinstance(c, TrainRound) and c.batch < self.saved_by_all[0]]
        in_checkpoint = set(groups_of(rounds))
        for group_id in command.group_ids:
            if is_evaluation(group_id) or group_id in in_checkpoint:
                continue
            assert self.outcomes[group_id].outcome != "trained", f"{group_id} is dropped too early"
        self.dropped |= set(command.group_ids)

    # -- what must hold of a command when it is decided

    def _check(self, command: Command) -> None:
        match command:
            case EvaluationOutcome():
                self._check_evaluation(command)
            case DispatchGroups() if command.worker_id in self.workers:
                self._check_dispatch(command)
            case LoadWeights() if command.worker_id in self.workers:
                self._check_load(command)
            case TrainRound():
                self._check_staleness(command)
            case _:
                pass

    def _check_dispatch(self, command: DispatchGroups) -> None:
        (plan,) = command.plans
        worker = self.workers[command.worker_id]
        assert not self.state.paused, "dispatched during a pause"
        assert not worker.drained, "dispatched to a worker that was commanded to leave"
        assert plan.group_id not in self.dropped
        assert worker.weights is not None
        assert worker.weights.epoch == self.trainer.epoch, "dispatched to weights of another epoch"
        if is_evaluation(plan.group_id):
            self._check_evaluating(command.worker_id, worker)
        else:
            assert plan.batch - worker.weights.version <= self.state.settings.max_staleness, (
                "staleness is past its bound"
            )
        assert all(row_id(plan.group_id, sample) not in self.rows for sample in plan.samples)

    def _check_staleness(self, command: TrainRound) -> None:
        """What is trained was sampled under weights that are not too old, wherever the batch it is trained in."""
        for group_id in groups_of([command]):
            for sample in range(self.settings.group_size):
                oldest = self.oldest.get(row_id(group_id, sample))
                began_for = command.batch
                if self.settings.defers:  # what it left to the next batch is as old as it was there
                    began_for = batch_of(group_id)
                    assert began_for in (command.batch - 1, command.batch), f"{group_id} is deferred twice"
                old = began_for - oldest.version if oldest is not None else 0
                assert old <= self.loosest_staleness, f"{group_id} is trained too late"

    def _check_evaluating(self, worker_id: WorkerId, worker: FakeWorker) -> None:
        """A problem goes to a worker that serves the pin and is not told to load; never to more slots than are its."""
        current = self.state.pipeline.evaluations.current
        assert current is not None
        assert worker.weights == current.weights, "asked of other weights than the pinned ones"
        assert worker.to_load is None, "asked of a worker that is on its way to newer weights"
        share = max(1, int(worker.capacity * self.state.settings.eval_budget))
        is_last = self.state.pipeline.evaluations.last_until_s is not None
        allowed = max(share, worker.capacity) if is_last or current.newer_s is not None else share
        answered = {parse_row_id(row)[0] for row in self.rows} | self.dropped  # one may be queued again by a lost tail
        held = {*worker.plans, *(plan.group_id for plan in worker.queue.values())} - answered
        asked = sum(map(is_evaluation, held))
        assert asked < allowed, f"{worker_id} answers {asked + 1} problems at once, {allowed} of its slots are for them"

    def _check_load(self, command: LoadWeights) -> None:
        """The pin is kept in service while an answer under it is being generated."""
        evaluating = [group_id for group_id in self.workers[command.worker_id].plans if is_evaluation(group_id)]
        assert not evaluating, f"told to load {command.weights} in the middle of {evaluating}"

    def _check_evaluation(self, outcome: EvaluationOutcome) -> None:
        """Each number once, in order; short of all problems only with a reason."""
        assert outcome.number == len(self.evaluations)
        assert outcome.answered == outcome.problems or outcome.reason
        assert outcome.answered <= outcome.problems == HELD_OUT
        told = Counter((answer.eval_set, answer.prompt_id) for answer in outcome.answers)
        problems = self.state.pipeline.evaluations.problems or ()
        named = Counter((one.eval_set, one.prompt_id) for one in problems if one.eval_set)
        assert told <= named, "an answer to no problem of a set, or a second one"
        assert outcome.reason or told == named
        self.evaluations.append(outcome)

    def _check_freed(self, commands: list[Command]) -> None:
        """Nothing is left of an evaluation that ended."""
        for outcome in commands:
            if isinstance(outcome, EvaluationOutcome):
                left = [group_id for group_id in self.sizes if group_id.startswith(f"eval{outcome.number}/")]
                assert set(left) <= self.dropped, "rows of an evaluation are left"

    def rounds_of(self, batch: int, kind: str = "train") -> list[TrainRound]:
        return [c for _, c in self.log if isinstance(c, TrainRound) and c.batch == batch and c.kind == kind]

    def closes(self) -> list[CloseMiniBatch]:
        return [command for _, command in self.log if isinstance(command, CloseMiniBatch)]

    def _check_close(self, close: CloseMiniBatch) -> None:
        """The normalisers are those of the rounds before it; every pass holds the same rows, each once."""
        place = (close.pass_index, close.mini_batch)
        rounds = self.rounds_of(close.batch)
        mine = groups_of([one for one in rounds if (one.pass_index, one.mini_batch) == place])
        assert len(set(mine)) == len(mine), "a group is twice in one mini-batch"
        assert close.num_rows == len(mine) * self.settings.group_size
        if not close.finishes_batch:
            return
        passes = range(self.settings.epochs)
        by_pass = [sorted(groups_of([one for one in rounds if one.pass_index == index])) for index in passes]
        assert all(groups == by_pass[0] for groups in by_pass)
        assert len(set(by_pass[0])) == len(by_pass[0]), "a group is trained in two mini-batches"
        assert close.short_by == self.settings.groups_per_batch - len(by_pass[0])
        recorded = sorted(groups_of(self.rounds_of(close.batch, "logprobs")))
        assert recorded == (by_pass[0] if self.settings.record_logprobs else [])


def groups_of(rounds: list[TrainRound]) -> list[GroupId]:
    """Groups in these rounds, in order, repeated if they are repeated."""
    return [rows.group_id for one in rounds for rank in one.ranks for rows in rank]
