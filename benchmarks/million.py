"""Part of the figure ``core``: the memory that deciding on a million rollouts takes.

No time passes in workers and trainer: whatever the core decides is answered at once, with 2,048 samples in flight, and
nothing is recorded. So the memory that grows is the core's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from orchestrator.core.model.outbox import CommandId
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    Command,
    DispatchGroups,
    Event,
    GroupPlan,
    GroupScored,
    LoadWeights,
    PromptRef,
    PromptsArrived,
    RequestPrompts,
    RolloutFinished,
    RoundDone,
    StepDone,
    Tick,
    TrainerReady,
    TrainRound,
    WeightsLoaded,
    WorkerJoined,
)
from transport.contracts.types import FinishReason, PromptId, WeightIdentity, WorkerId, WorkerKind, row_id

GROUP_SIZE = 8
GROUPS_PER_BATCH = 256
WORKERS, CAPACITY = 32, 64
TOKENS = 512
SAMPLES_PER_S = 500.0
TICK_S = 0.5
TRAINER = WorkerId("train-0.1")


@dataclass(frozen=True, slots=True)
class Memory:
    """MB of the process above what it had before the first event: at a tenth of the rollouts, and at most."""

    early_mb: float
    peak_mb: float


class InstantRun:
    """Workers and a trainer that answer at once; a sample ends when all before it have."""

    def __init__(self, num_batches: int) -> None:
        self._state = PipelineState(
            CoreSettings(
                num_batches=num_batches, groups_per_batch=GROUPS_PER_BATCH, group_size=GROUP_SIZE, max_staleness=1
            )
        )
        self._events: deque[Event] = deque()
        self._running: deque[tuple[WorkerId, GroupPlan]] = deque()
        self._serves: dict[WorkerId, WeightIdentity] = {}
        self._prompts = 0
        self._now_s = 0.0

    def rollouts(self) -> Iterator[int]:
        """Run to the end; after each group how many rollouts are finished."""
        self._tell(TrainerReady(worker_id=TRAINER, weights=version(0)))
        for index in range(WORKERS):
            self._tell(WorkerJoined(worker_id=worker(index), kind=WorkerKind.GENERATE, capacity=CAPACITY))
        finished, ticked_s = 0, 0.0
        while self._running:
            self._finish(*self._running.popleft())
            finished += GROUP_SIZE
            self._now_s += GROUP_SIZE / SAMPLES_PER_S
            if self._now_s - ticked_s >= TICK_S:
                self._tell(Tick())
                ticked_s = self._now_s
            yield finished

    def _finish(self, worker_id: WorkerId, plan: GroupPlan) -> None:
        weights = self._serves[worker_id]
        for sample in plan.samples:
            self._tell(
                RolloutFinished(
                    row_id=row_id(plan.group_id, sample),
                    worker_id=worker_id,
                    response_tokens=TOKENS,
                    finish_reason=FinishReason.STOP,
                    oldest=weights,
                    newest=weights,
                )
            )
        rewards = tuple(float(sample % 2) for sample in range(GROUP_SIZE))
        lengths = (TOKENS,) * GROUP_SIZE
        self._tell(GroupScored(group_id=plan.group_id, rewards=rewards, response_tokens=lengths, signal=True))

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        while self._events:
            commands = self._state.handle(self._events.popleft(), self._now_s)
            for number, command in enumerate(commands):
                self._answer(CommandId(self._state.seq, number), command)

    def _answer(self, command_id: CommandId, command: Command) -> None:
        match command:
            case RequestPrompts():
                self._events.append(self._read(command.count))
            case DispatchGroups():
                self._running.extend((command.worker_id, plan) for plan in command.plans)
            case LoadWeights():
                self._serves[command.worker_id] = command.weights
                self._events.append(WeightsLoaded(worker_id=command.worker_id, weights=command.weights))
            case TrainRound():
                self._events.append(RoundDone(round_id=command.round_id, num_rows=0, num_tokens=0, busy_s=0.0))
            case CloseMiniBatch() if command.finishes_batch:
                weights = version(command.batch + 1)
                self._events.append(StepDone(batch=command.batch, weights=weights, num_rows=0, num_tokens=0))
                if command.checkpoint:
                    self._events.append(CheckpointSaved(weights=weights, cursor=command_id.entry, path=""))
            case _:
                pass

    def _read(self, count: int) -> PromptsArrived:
        numbers = range(self._prompts, self._prompts + count)
        self._prompts += count
        prompts = (
            PromptRef(prompt_id=PromptId(str(number)), prompt_tokens=64, predicted_tokens=TOKENS) for number in numbers
        )
        return PromptsArrived(prompts=tuple(prompts), source_positions=tuple(map(str, numbers)))


def memory_of(num_rollouts: int) -> Memory:
    """Decide on so many rollouts, watching the memory of this process."""
    process = psutil.Process()
    before = process.memory_info().rss
    run = InstantRun(num_batches=num_rollouts // (GROUPS_PER_BATCH * GROUP_SIZE))
    early = peak = before
    for finished in run.rollouts():
        if finished % (GROUPS_PER_BATCH * GROUP_SIZE) == 0:
            peak = max(peak, process.memory_info().rss)
            if finished <= num_rollouts // 10:
                early = peak
    return Memory(early_mb=(early - before) / 1e6, peak_mb=(peak - before) / 1e6)


def worker(index: int) -> WorkerId:
    return WorkerId(f"generate-{index}.1")


def version(number: int) -> WeightIdentity:
    return WeightIdentity(epoch=1, version=number, digest=f"1.{number}")
