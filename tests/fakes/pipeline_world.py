"""A world around ``PipelineState`` that obeys its commands, and checks them as a reader of the streams would.

Each method is one thing that a worker, a scorer, the prompt source or the trainer does; who calls them in which order
is the test's business. Now and then an event is also told to a state restored from a snapshot: it must decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.outbox import CommandId, entry_id
from orchestrator.core.settings import CoreSettings
from orchestrator.core.state import PipelineState
from transport.messages import (
    AbortRollouts,
    AdmitGroups,
    CheckpointSaved,
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
    GroupScored,
    HeldOutPromptsArrived,
    LoadWeights,
    PromptRef,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    RolloutFinished,
    RoundDone,
    RowsMissing,
    SlotOutcome,
    StepDone,
    Tick,
    TrainerReady,
    TrainRound,
    WeightsFailed,
    WeightsLoaded,
    WorkerJoined,
    WorkerReported,
)
from transport.types import (
    FinishReason,
    GroupId,
    PromptId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
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


class PipelineWorld:
    """prompts: how many the source has. The rest is empty at first: no worker, no trainer."""

    def __init__(self, settings: CoreSettings, prompts: int = 1000) -> None:
        self.settings = settings
        self.state = PipelineState(settings)
        self.now_s = 0.0
        self.prompts_left, self.prompts_made = prompts, 0
        self.requests: list[RequestPrompts] = []
        self.plan_requests: list[ComputePlan] = []
        self.held_out_asked, self.num_held_out = False, HELD_OUT
        self.evaluations: list[EvaluationOutcome] = []
        self.sizes: dict[GroupId, int] = {}
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.num_joined = 0
        self.rows: dict[RowId, int] = {}
        self.told: list[Event] = []
        self.unscored: list[GroupId] = []
        self.admitted: set[GroupId] = set()
        self.dropped: set[GroupId] = set()
        self.outcomes: dict[GroupId, SlotOutcome] = {}
        self.log: list[tuple[CommandId, Command]] = []
        self.trainer = FakeTrainer()
        self.saved = (0, CommandId(0, 0))
        self.dp_size = 1
        self.finished = ""

    # -- telling and obeying

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
                self.finished = command.reason
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

    # -- what prompt source, workers and scorers do

    def answer_prompts(self, count: int) -> None:
        """Answer the oldest request with ``count`` prompts, or what is left."""
        self.requests.pop(0)
        count = min(count, self.prompts_left)
        made = range(self.prompts_made, self.prompts_made + count)
        self.prompts_made += count
        self.prompts_left -= count
        prompts = [
            PromptRef(prompt_id=PromptId(f"p{i}"), prompt_tokens=2 + i % 3, predicted_tokens=5.0 + i % 7) for i in made
        ]
        positions = tuple(str(i + 1) for i in made)
        exhausted = self.prompts_left == 0
        self.tell(PromptsArrived(prompts=tuple(prompts), source_positions=positions, exhausted=exhausted))

    def answer_plan(self) -> None:
        """Answer the oldest request for a plan."""
        self.tell(compute_plan(self.plan_requests.pop(0), self.state.settings))

    def answer_held_out(self) -> None:
        """Name the held-out problems; asked again, they are told again."""
        self.held_out_asked = False
        prompts = [
            PromptRef(prompt_id=PromptId(f"h{i}"), prompt_tokens=2, predicted_tokens=5.0)
            for i in range(self.num_held_out)
        ]
        self.tell(HeldOutPromptsArrived(prompts=tuple(prompts)))

    def join(self, capacity: int = 4) -> WorkerId:
        worker_id = WorkerId(f"generate-{self.num_joined}.1")
        self.num_joined += 1
        self.workers[worker_id] = FakeWorker(capacity=capacity)
        self.tell(WorkerJoined(worker_id=worker_id, kind=WorkerKind.GENERATE, capacity=capacity))
        return worker_id

    def load(self, worker_id: WorkerId, *, fails: bool = False) -> None:
        """The worker loads what it was told to."""
        worker = self.workers[worker_id]
        weights, worker.to_load = worker.to_load, None
        assert weights is not None
        if fails:
            self.tell(WeightsFailed(worker_id=worker_id, weights=weights, reason="checksum"))
            return
        if worker.weights is None or worker.weights < weights:
            worker.weights = weights
        self.tell(WeightsLoaded(worker_id=worker_id, weights=weights))

    def finish_sample(self, worker_id: WorkerId, group_id: GroupId, sample: int | None = None) -> None:
        """The worker ends one sample of a group it holds: the given one, or the first that is left."""
        worker = self.workers[worker_id]
        plan, oldest = worker.plans[group_id]
        left = [index for index in plan.samples if row_id(group_id, index) not in self.rows]
        if len(left) <= 1:
            del worker.plans[group_id]
        if left and group_id not in self.dropped:
            self._insert(worker_id, group_id, left[0] if sample is None else sample, oldest)

    def _insert(self, worker_id: WorkerId, group_id: GroupId, sample: int, oldest: WeightIdentity) -> None:
        row = row_id(group_id, sample)
        newest = self.workers[worker_id].weights
        assert newest is not None
        self.rows[row] = 3 + sample
        if all(row_id(group_id, index) in self.rows for index in range(self.sizes[group_id])):
            self.unscored.append(group_id)
        self.tell(
            RolloutFinished(
                row_id=row,
                worker_id=worker_id,
                response_tokens=3 + sample,
                finish_reason=FinishReason.STOP,
                oldest=oldest,
                newest=newest,
                engine_s=1.0 if worker_id.startswith("generate-0") else 40.0,
            )
        )

    def score(self, *, signal: bool = True) -> None:
        """Score the group that has been whole for longest."""
        group_id = self.unscored.pop(0)
        rows = [self.rows.get(row_id(group_id, index)) for index in range(self.sizes[group_id])]
        if None not in rows and group_id not in self.dropped:
            lengths = tuple(row for row in rows if row is not None)
            rewards = tuple(float(index) for index in range(len(rows)))
            self.tell(GroupScored(group_id=group_id, rewards=rewards, response_tokens=lengths, signal=signal))

    def lose_row(self, row: RowId, group_id: GroupId) -> None:
        """The broker forgets a row, and somebody notices."""
        del self.rows[row]
        if group_id in self.unscored:
            self.unscored.remove(group_id)
        if group_id not in self.dropped:
            self.tell(RowsMissing(row_ids=(row,)))

    def report(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        self.tell(WorkerReported(worker_id=worker_id, held=tuple(worker.plans), plans_cursor=worker.cursor))

    # -- what the trainer does

    def start_trainer(self, dp_size: int = 1) -> None:
        """A trainer of the next epoch starts from the checkpoint."""
        version, cursor = self.saved
        self.trainer = FakeTrainer(self.trainer.epoch + 1, version, cursor)
        self.dp_size = dp_size
        self.report_trainer()

    def report_trainer(self) -> None:
        """The trainer says where it is: when it starts, and after a broker came back that may have lost its reports."""
        trainer = self.trainer
        weights = WeightIdentity(epoch=trainer.epoch, version=trainer.version)
        worker_id = WorkerId(f"train-0.{trainer.epoch}")
        cursor = self.saved[1].entry
        self.tell(TrainerReady(worker_id=worker_id, weights=weights, cursor=cursor, dp_size=self.dp_size))

    def unread(self) -> list[tuple[CommandId, Command]]:
        return [(at, command) for at, command in self.log if at > self.trainer.cursor]

    def train(self, *, silent: bool = False) -> None:
        """Take one entry of the log, or say which of its rows are missing. silent: reports are lost."""
        at, command = self.unread()[0]
        if isinstance(command, TrainRound):
            rows = [
                row_id(group_id, sample)
                for group_id in groups_of([command])
                for sample in range(self.settings.group_size)
            ]
            gone = tuple(row for row in rows if row not in self.rows)
            if gone:
                self.tell(RowsMissing(row_ids=gone))
                return
            self._accumulate(command, rows)
        self.trainer.cursor = at
        weights = WeightIdentity(epoch=self.trainer.epoch, version=self.trainer.version)
        if isinstance(command, TrainRound) and not silent:
            self.tell(RoundDone(round_id=command.round_id, num_rows=1, num_tokens=1, busy_s=0.1))
        if isinstance(command, CloseMiniBatch) and command.finishes_batch:
            self._step(command, at, silent)
        if isinstance(command, FinishTraining):
            self._save(weights, at)

    def _accumulate(self, command: TrainRound, rows: list[RowId]) -> None:
        ledger = self.trainer.ledger.setdefault(command.batch, set())
        for row in rows:
            entry = (row, command.kind, command.pass_index)
            assert entry not in ledger, f"{row} is trained twice"
            ledger.add(entry)

    def _step(self, command: CloseMiniBatch, at: CommandId, silent: bool) -> None:
        assert command.batch == self.trainer.version, "batches are trained in order"
        self.trainer.version += 1
        weights = WeightIdentity(epoch=self.trainer.epoch, version=self.trainer.version)
        if not silent:
            self.tell(StepDone(batch=command.batch, weights=weights, num_rows=1, num_tokens=1))
        if command.checkpoint:
            self._save(weights, at)

    def _save(self, weights: WeightIdentity, at: CommandId) -> None:
        self.saved = (weights.version, at)
        self.tell(CheckpointSaved(weights=weights, cursor=at.entry, path="somewhere"))

    # -- a world without further faults

    def run_to_end(self, max_turns: int = 300) -> None:
        """Everyone works until the run ends. Raises AssertionError if it does not."""
        for _ in range(max_turns):
            if self.finished:
                return
            self.turn()
        raise AssertionError(f"the run hangs: {self.state.view()}")

    def turn(self) -> None:
        """Everyone does all they can once."""
        self.now_s += 1.0
        if self.trainer.epoch:
            self.report_trainer()
        else:
            self.start_trainer()
        if not any(worker.fit for worker in self.state.view().workers):
            self.join()
        while self.requests:
            self.answer_prompts(self.requests[0].count)
        while self.plan_requests:
            self.answer_plan()
        if self.held_out_asked:
            self.answer_held_out()
        for worker_id in list(self.workers):
            self._work(worker_id)
        while self.unscored:
            self.score()
        for _ in range(len(self.unread())):
            self.train()
        self.tell(Tick())

    def _work(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        if worker.to_load is not None:
            self.load(worker_id)
        for group_id in list(worker.plans):
            while group_id in worker.plans:
                self.finish_sample(worker_id, group_id)
        self.report(worker_id)


def groups_of(rounds: list[TrainRound]) -> list[GroupId]:
    """Groups in these rounds, in order, repeated if they are repeated."""
    return [rows.group_id for one in rounds for rank in one.ranks for rows in rank]
