"""A world around ``PipelineState`` that obeys its commands, and checks them as a reader of the streams would.

Each method is one thing that a worker, a scorer, the prompt source or the trainer does; who calls them in which order
is the test's business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

from orchestrator.core.dispatch.compute import compute_plan
from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.view import rows_reported
from tests.fakes.obeyed_pipeline import HELD_OUT, FakeTrainer, FakeWorker, ObeyedPipeline, groups_of
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    Command,
    CriticReported,
    FinishTraining,
    GroupPlan,
    GroupScored,
    HeldOutPromptsArrived,
    PartialGroup,
    PartialSample,
    PromptRef,
    PromptsArrived,
    RolloutFinished,
    RoundDone,
    RowsMissing,
    RunResumed,
    StepDone,
    Tick,
    TrainerReady,
    TrainRound,
    WeightsFailed,
    WeightsLoaded,
    WorkerJoined,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import (
    FinishReason,
    GroupId,
    PromptId,
    RowId,
    WeightIdentity,
    WorkerId,
    WorkerKind,
    batch_of,
    is_evaluation,
    parse_row_id,
    row_id,
)

PATIENCE = 100
"""Turns after which a world whose run has not ended lets time pass faster: what is waited for may be minutes away."""


def begun_of(
    plan: GroupPlan, sample: int, under: WeightIdentity, serves: WeightIdentity | None = None
) -> PartialSample:
    """What a sample has got. under: weights that the worker served when it began.  serves: that it serves now."""
    before = next((one for one in plan.partial if one.sample == sample), None)
    weights = [under, *([before.oldest, before.newest] if before else []), *([serves] if serves else [])]
    return PartialSample(sample=sample, oldest=min(weights), newest=max(weights))


class PipelineWorld(ObeyedPipeline):
    """Who tells the state what: prompt source, workers, scorers and trainer. prompts: how many the source has.
    metrics: that the trainer tells of each batch from now on.
    """

    def __init__(self, settings: CoreSettings, prompts: int = 1000) -> None:
        super().__init__(settings)
        self.num_prompts = prompts
        self.prompts_left, self.prompts_made = prompts, 0
        self.num_held_out = HELD_OUT
        self.num_joined = 0
        self.killed: list[tuple[str, int]] = []
        self.dp_size = 1
        self.metrics: dict[str, float] = {}

    @classmethod
    def ready(
        cls, settings: CoreSettings, *, workers: int = 1, capacity: int = 64, prompts: int = 1000, dp_size: int = 1
    ) -> Self:
        """Everyone has joined, version 0 is served, the first batches are generated."""
        world = cls(settings, prompts)
        world.start_trainer(dp_size)
        for worker_id in [world.join(capacity) for _ in range(workers)]:
            world.load(worker_id)
        world.answer_requests()
        return world

    # -- what prompt source, workers and scorers do

    def answer_requests(self) -> None:
        """Answer every request for prompts with as many."""
        while self.requests:
            self.answer_prompts(self.requests[0].count)

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

    def seek_source(self) -> None:
        self.prompts_made = int(self.state.pipeline.prompts.last_position or 0)
        self.prompts_left = self.num_prompts - self.prompts_made

    def answer_plan(self) -> None:
        """Answer the oldest request for a plan."""
        self.tell(compute_plan(self.plan_requests.pop(0), self.state.settings))

    def answer_held_out(self) -> None:
        """Name the held-out problems; asked again, they are told again."""
        self.held_out_asked = False
        prompts = [
            PromptRef(
                prompt_id=PromptId(f"h{i}"), prompt_tokens=2, predicted_tokens=5.0, eval_set="odd" if i % 2 else ""
            )
            for i in range(self.num_held_out)
        ]
        self.tell(HeldOutPromptsArrived(prompts=tuple(prompts)))

    def join(self, capacity: int = 4) -> WorkerId:
        self.num_joined += 1
        return self._enter(WorkerId(f"generate-{self.num_joined - 1}.1"), capacity)

    def _enter(self, worker_id: WorkerId, capacity: int) -> WorkerId:
        self.workers[worker_id] = FakeWorker(capacity=capacity)
        self.tell(WorkerJoined(worker_id=worker_id, kind=WorkerKind.GENERATE, capacity=capacity))
        return worker_id

    def lose_worker(self, worker_id: WorkerId, *, left: bool = False) -> None:
        """The worker is killed, or was asked to go by somebody, or does what it was commanded: it leaves."""
        worker = self.workers.pop(worker_id)
        if worker.drained:
            assert not worker.plans, "a worker that holds groups was commanded to leave"
        elif not left:
            self.killed.append((worker_id, worker.capacity))
        self.tell(WorkerLost(worker_id=worker_id, reason="gone", left=left or worker.drained))

    def resume(self) -> None:
        """The run is started again. Workers of one that was over had gone with it."""
        gone = list(self.workers) if self.finished else []
        for worker_id in gone:
            del self.workers[worker_id]
        self.finished = ""
        self.tell(RunResumed())
        for worker_id in gone:
            self.tell(WorkerLost(worker_id=worker_id, reason="the run was over", left=True))

    def supervise(self) -> None:
        """Start again who was killed, and start who was asked for."""
        while self.killed:
            worker_id, capacity = self.killed.pop()
            place, _, incarnation = worker_id.rpartition(".")
            self._enter(WorkerId(f"{place}.{int(incarnation) + 1}"), capacity)
        while self.num_spawned < self.spawn_total:
            self.num_spawned += 1
            self.join()

    def lose_tail(self, num_rows: int, num_plans: int, num_rounds: int, num_controls: int) -> None:
        """The broker comes back without what was written last: rows, plans, rounds that were not read, commands to
        workers. What was lost is written again, and rows that are gone are found out."""
        self._lose(num_rows, num_plans, num_rounds, num_controls)
        if missing := tuple(row for row in rows_reported(self.state.pipeline) if row not in self.rows):
            self.tell(RowsMissing(row_ids=missing))
        self.report_trainer()

    def _lose(self, num_rows: int, num_plans: int, num_rounds: int, num_controls: int) -> None:
        for row in list(self.rows)[len(self.rows) - num_rows :]:
            del self.rows[row]
            self.unscored = [group_id for group_id in self.unscored if group_id != parse_row_id(row)[0]]
        unread = [at for at, _ in self.unread()]
        rounds = unread[max(0, len(unread) - num_rounds) :]
        self.log = [(at, command) for at, command in self.log if at not in rounds]
        lost = [*rounds, *sorted(self.dispatched)[len(self.dispatched) - num_plans :]]
        for worker in self.workers.values():
            worker.queue = {at: plan for at, plan in worker.queue.items() if at not in lost}
            if num_controls and worker.to_load_id is not None:
                lost.append(worker.to_load_id)
                worker.to_load = worker.to_load_id = None
        self.restate(lost)

    def load(self, worker_id: WorkerId, *, fails: bool = False, permanent: bool = False) -> None:
        """The worker loads what it was told to."""
        worker = self.workers[worker_id]
        weights, worker.to_load, worker.to_load_id = worker.to_load, None, None
        assert weights is not None
        if fails:
            self.tell(WeightsFailed(worker_id=worker_id, weights=weights, reason="checksum", permanent=permanent))
            return
        if worker.weights is None or worker.weights < weights:
            worker.weights = weights
        self.tell(WeightsLoaded(worker_id=worker_id, weights=weights))

    def generate(self, *groups: str) -> None:
        """Whoever holds these groups ends all their samples, group by group."""
        for group in groups:
            for worker_id, worker in self.workers.items():
                while group in worker.plans:
                    self.finish_sample(worker_id, GroupId(group))

    def make_ready(self, *groups: str) -> None:
        """Generate and score these groups, in this order."""
        for group in groups:
            self.generate(group)
            self.score()

    def finish_sample(self, worker_id: WorkerId, group_id: GroupId, sample: int | None = None) -> None:
        """The worker ends one sample of a group it holds: the given one, or the first that is left."""
        worker = self.workers[worker_id]
        plan, oldest = worker.plans[group_id]
        left = [index for index in plan.samples if row_id(group_id, index) not in self.rows]
        if len(left) <= 1:
            del worker.plans[group_id]
        if left and group_id not in self.dropped:
            index = left[0] if sample is None else sample
            begun = begun_of(plan, index, oldest)
            self._insert(worker_id, group_id, index, begun.oldest, begun.newest)

    def _insert(
        self, worker_id: WorkerId, group_id: GroupId, sample: int, oldest: WeightIdentity, begun: WeightIdentity
    ) -> None:
        """begun: the newest weights of what the sample went on from."""
        row = row_id(group_id, sample)
        serves = self.workers[worker_id].weights
        assert serves is not None
        newest = max(serves, begun)
        self.rows[row] = 3 + sample
        self.oldest[row] = oldest
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

    def scorable(self) -> list[GroupId]:
        """Whole groups that a critic, if there is one, may value by now."""
        if not self.settings.critic:
            return self.unscored
        newest = self.critic.version + self.settings.max_staleness
        return [one for one in self.unscored if is_evaluation(one) or batch_of(one) <= newest]

    def score(self, *, signal: bool = True) -> None:
        """Score the group that has been whole for longest, of those that can be."""
        group_id = self.scorable()[0]
        self.unscored.remove(group_id)
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
        """What it holds, and that it has kept what its samples have got."""
        worker = self.workers[worker_id]
        partial_groups = [
            PartialGroup(
                group_id=group_id,
                attempt=plan.attempt,
                samples=tuple(begun_of(plan, sample, under, worker.weights) for sample in plan.samples),
            )
            for group_id, (plan, under) in worker.plans.items()
            if not is_evaluation(group_id)
        ]
        self.tell(
            WorkerReported(
                worker_id=worker_id,
                held=tuple(worker.plans),
                plans_cursor=worker.cursor,
                partial=tuple(partial_groups),
            )
        )

    # -- what the trainer does

    def start_trainer(self, dp_size: int = 1, *, damaged: bool = False) -> None:
        """A trainer of the next epoch starts from the newest checkpoint; damaged: from the one before it."""
        if damaged:
            self.checkpoints.pop()
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
            self.tell(StepDone(batch=command.batch, weights=weights, num_rows=1, num_tokens=1, metrics=self.metrics))
        if command.checkpoint:
            self._save(weights, at)

    def _save(self, weights: WeightIdentity, at: CommandId) -> None:
        if self.saved[0] == weights.version and len(self.checkpoints) > 1:
            self.checkpoints.pop()  # the same weights again
        self.checkpoints.append((weights.version, at))
        self.tell(CheckpointSaved(weights=weights, cursor=at.entry, path="somewhere"))

    # -- what the critic does

    def start_critic(self, *, damaged: bool = False) -> None:
        """A critic of the next epoch starts from its newest checkpoint; damaged: from the one before it."""
        if damaged:
            self.critic_checkpoints.pop()
        version, cursor = self.critic_checkpoints[-1]
        self.critic = FakeTrainer(self.critic.epoch + 1, version, cursor)
        self.report_critic()

    def report_critic(self) -> None:
        """It says where it is: when it starts, and after a broker came back that may have lost its reports."""
        self._critic_says(lambda worker_id, weights: TrainerReady(worker_id=worker_id, weights=weights))

    def _critic_says(
        self, report: Callable[[WorkerId, WeightIdentity], TrainerReady | StepDone | CheckpointSaved]
    ) -> None:
        worker_id = WorkerId(f"critic-0.{self.critic.epoch}")
        weights = WeightIdentity(epoch=self.critic.epoch, version=self.critic.version)
        self.tell(CriticReported(worker_id=worker_id, report=report(worker_id, weights)))

    def critic_unread(self) -> list[tuple[CommandId, Command]]:
        return [(at, command) for at, command in self.log if at > self.critic.cursor]

    def train_critic(self, *, silent: bool = False) -> None:
        """As ``train``, of what the trainer may long have taken."""
        at, command = self.critic_unread()[0]
        critic = self.critic
        if isinstance(command, TrainRound):
            size = self.settings.group_size
            rows = [row_id(group_id, sample) for group_id in groups_of([command]) for sample in range(size)]
            if gone := tuple(row for row in rows if row not in self.rows):
                self.tell(RowsMissing(row_ids=gone))
                return
            for row in rows:
                entry = (row, command.kind, command.pass_index)
                ledger = critic.ledger.setdefault(command.batch, set())
                assert entry not in ledger, f"{row} is trained twice by the critic"
                ledger.add(entry)
        critic.cursor = at
        saves = isinstance(command, FinishTraining)
        if isinstance(command, CloseMiniBatch) and command.finishes_batch:
            assert command.batch == critic.version, "batches are trained in order"
            critic.version += 1
            saves = command.checkpoint
            if not silent:
                done = partial(StepDone, batch=command.batch, num_rows=1, num_tokens=1)
                self._critic_says(lambda _, weights: done(weights=weights))
        if saves:
            if self.critic_checkpoints[-1][0] == critic.version and len(self.critic_checkpoints) > 1:
                self.critic_checkpoints.pop()  # the same weights again
            self.critic_checkpoints.append((critic.version, at))
            self._critic_says(lambda _, weights: CheckpointSaved(weights=weights, cursor=at.entry, path="somewhere"))

    # -- a world without further faults

    def run_to_end(self, max_turns: int = 300) -> None:
        """Everyone works until the run ends. Raises AssertionError if it does not."""
        for number in range(max_turns):
            if self.finished:
                return
            self.now_s += 0.0 if number < PATIENCE else 10.0
            self.turn()
        raise AssertionError(f"the run hangs: {self.state.view()}")

    def turn(self) -> None:
        """Everyone does all they can once."""
        self.now_s += 1.0
        if self.trainer.epoch:
            self.report_trainer()
        else:
            self.start_trainer()
        if self.settings.critic:
            self.report_critic() if self.critic.epoch else self.start_critic()
        self.supervise()
        for worker_id in [worker_id for worker_id, worker in self.workers.items() if worker.drained]:
            self.lose_worker(worker_id)
        view = self.state.view()
        elastic = self.settings.scaling is not None and view.trained_version > 0  # then the run asks for workers itself
        if not elastic and not view.workers:
            self.join()
        self.answer_requests()
        while self.plan_requests:
            self.answer_plan()
        if self.held_out_asked:
            self.answer_held_out()
        for worker_id in list(self.workers):
            self._work(worker_id)
        while self.scorable():
            self.score()
        for _ in range(len(self.unread())):
            self.train()
        for _ in range(len(self.critic_unread()) if self.settings.critic else 0):
            self.train_critic()
        self.tell(Tick())

    def _work(self, worker_id: WorkerId) -> None:
        worker = self.workers[worker_id]
        if worker.to_load is not None:
            self.load(worker_id)
        while worker.queue and worker.weights is not None:
            worker.claim()
        for group_id in list(worker.plans):
            while group_id in worker.plans:
                self.finish_sample(worker_id, group_id)
        self.report(worker_id)
