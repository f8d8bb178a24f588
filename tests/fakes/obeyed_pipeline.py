"""``PipelineState`` and what its commands leave in the world, checked as a reader of the streams would.

Now and then an event is also told to a state restored from a snapshot: it must decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.model.outbox import CommandId, entry_id
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from transport.contracts.messages import (
    AbortRollouts,
    AdmitGroups,
    CloseMiniBatch,
    Command,
    ComputePlan,
    DispatchGroups,
    DropRows,
    EvaluationOutcome,
    Event,
    FinishRun,
    FinishTraining,
    GroupPlan,
    LoadWeights,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
    TrainRound,
)
from transport.contracts.types import (
    GroupId,
    RowId,
    WeightIdentity,
    WorkerId,
    is_evaluation,
    row_id,
)

HELD_OUT = 5
"""Held-out problems."""
RESTORE_EVERY = 5
"""Events between two such checks: often enough to meet every kind of state, and rare enough to be quick."""


@dataclass
class FakeWorker:
    """A generation worker: plans it holds with the weights they began under, weights it serves and is to load."""

    weights: WeightIdentity | None = None
    to_load: WeightIdentity | None = None
    plans: dict[GroupId, tuple[GroupPlan, WeightIdentity]] = field(default_factory=dict)
    cursor: str = "0-0"
    capacity: int = 0


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
        self.told: list[Event] = []
        self.unscored: list[GroupId] = []
        self.admitted: set[GroupId] = set()
        self.dropped: set[GroupId] = set()
        self.outcomes: dict[GroupId, SlotOutcome] = {}
        self.log: list[tuple[CommandId, Command]] = []
        self.trainer = FakeTrainer()
        self.checkpoints = [(0, CommandId(0, 0))]
        self.finished, self.failed = "", False

    @property
    def saved(self) -> tuple[int, CommandId]:
        """(version, cursor) of the newest checkpoint; the first one is the base model."""
        return self.checkpoints[-1]

    def tell(self, event: Event) -> list[Command]:
        restored = PipelineState.restore(self.state.snapshot()) if self.state.seq % RESTORE_EVERY == 0 else None
        commands = self.state.handle(event, self.now_s)
        if restored is not None:
            assert restored.handle(event, self.now_s) == commands, "a restored state decides otherwise"
            assert restored.snapshot() == self.state.snapshot()
        self.state.check_invariants()
        self.told = [*self.told[-20:], event]
        for number, command in enumerate(commands):
            self._obey(CommandId(self.state.seq, number), command)
        return commands

    def _obey(self, command_id: CommandId, command: Command) -> None:
        match command:
            case RequestPrompts():
                self.requests.append(command)
            case ComputePlan():
                self.plan_requests.append(command)
            case RequestHeldOutPrompts():
                self.held_out_asked = True
            case EvaluationOutcome():
                self._check_evaluation(command)
            case AdmitGroups():
                self.sizes |= {group.group_id: group.group_size for group in command.groups}
                self.admitted |= {group.group_id for group in command.groups if not is_evaluation(group.group_id)}
            case DispatchGroups():
                self._take_plan(command_id, command)
            case AbortRollouts():
                self._abort(command)
            case LoadWeights():
                if command.worker_id in self.workers:
                    self._check_load(command)
                    self.workers[command.worker_id].to_load = command.weights
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

    def _take_plan(self, command_id: CommandId, command: DispatchGroups) -> None:
        (plan,) = command.plans
        worker = self.workers[command.worker_id]
        assert not self.state.paused, "dispatched during a pause"
        assert plan.group_id in self.sizes
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
        worker.plans[plan.group_id] = (plan, worker.weights)
        worker.cursor = entry_id(*command_id)

    def _check_evaluating(self, worker_id: WorkerId, worker: FakeWorker) -> None:
        """A problem goes to a worker that serves the pin and is not told to load; never to more slots than are its."""
        current = self.state.evaluation()
        assert current is not None
        assert worker.weights == current.weights, "asked of other weights than the pinned ones"
        assert worker.to_load is None, "asked of a worker that is on its way to newer weights"
        share = max(1, int(worker.capacity * self.state.settings.eval_budget))
        allowed = share if current.newer_s is None else max(share, worker.capacity)
        asked = sum(map(is_evaluation, worker.plans)) + 1
        assert asked <= allowed, f"{worker_id} answers {asked} problems at once, {allowed} of its slots are for them"

    def _check_load(self, command: LoadWeights) -> None:
        """The pin is kept in service while an answer under it is being generated."""
        evaluating = [group_id for group_id in self.workers[command.worker_id].plans if is_evaluation(group_id)]
        assert not evaluating, f"told to load {command.weights} in the middle of {evaluating}"

    def _check_evaluation(self, outcome: EvaluationOutcome) -> None:
        """Each number once, in order; nothing is left of it; short of all problems only with a reason."""
        assert outcome.number == len(self.evaluations)
        assert outcome.answered == outcome.problems or outcome.reason
        assert outcome.answered <= outcome.problems == HELD_OUT
        left = [group_id for group_id in self.sizes if group_id.startswith(f"eval{outcome.number}/")]
        assert set(left) <= self.dropped, "rows of an evaluation are left"
        self.evaluations.append(outcome)

    def _abort(self, command: AbortRollouts) -> None:
        worker = self.workers.get(command.worker_id, FakeWorker())
        for group_id, attempt in zip(command.group_ids, command.attempts, strict=True):
            if group_id in worker.plans and worker.plans[group_id][0].attempt <= attempt:
                del worker.plans[group_id]

    def _drop(self, command: DropRows) -> None:
        """What was trained may go once a checkpoint contains the batch that it was sent in, whatever its id says."""
        rounds = [c for _, c in self.log if isinstance(c, TrainRound) and c.batch < self.saved[0]]
        in_checkpoint = set(groups_of(rounds))
        for group_id in command.group_ids:
            if is_evaluation(group_id) or group_id in in_checkpoint:
                continue
            assert self.outcomes[group_id].outcome != "trained", f"{group_id} is dropped too early"
        self.dropped |= set(command.group_ids)

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
