"""A fleet for the figure ``orchestrator``: any number of emulated workers and a trainer, in one process.

What an orchestrator sees of them is real: leases, claims, rows with their events, reports, loads, rounds that are
confirmed. What they would compute takes no time, but that samples last as long as they are told to. A group is scored
in the commit of its last sample, so between "finished" and "visible to the trainer" lies the orchestrator and nothing
else.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from transport.broker import keys
from transport.broker.base import ZERO_ID, Ack, Append, Broker, Commit, RowWrite
from transport.broker.events import event_entry
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    Event,
    FinishTraining,
    GroupScored,
    LoadWeights,
    RoundDone,
    StepDone,
    TrainerReady,
    TrainRound,
    WeightsLoaded,
    WorkerReported,
    WorkerStatus,
    encode,
    group_plan_decoder,
    trainer_command_decoder,
    worker_command_decoder,
)
from transport.contracts.types import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupId,
    VersionSpan,
    WeightIdentity,
    WorkerId,
    WorkerKind,
)
from workers.generation.engine import Completion
from workers.generation.worker import HeldPlan, HeldPlans, row_write

TOKENS = 16
RESPONSE = np.arange(TOKENS, dtype=np.int32)
LOGPROBS = np.full(TOKENS, -1.0, dtype=np.float32)
LEASE_S = 20.0
BEAT_S = 4.0
REPORT_S = 2.0
"""As a real worker (workers/generation/worker.py)."""
ROWS_PER_COMMIT = 64
AT_ONCE = 50
"""Workers whose queues are looked at together: requests in flight on one connection pool."""


@dataclass(slots=True)
class EmulatedWorker:
    """One generation worker: what it holds and serves."""

    worker_id: WorkerId
    capacity: int
    plans: HeldPlans = field(default_factory=HeldPlans)
    control: str = ZERO_ID
    weights: WeightIdentity | None = None


@dataclass(slots=True)
class Tally:
    """What was seen.

    latencies_s: per group of the batch in training, from its last sample's end until the trainer read it in a round.
    Groups of later batches wait for their batch's turn, whatever the orchestrator does.
    """

    samples: int = 0
    latencies_s: list[float] = field(default_factory=list[float])


class EmulatedFleet:
    """num_workers of ``capacity`` samples each; a sample lasts ``sample_s``, give or take half.

    poll_s: how often each worker looks for plans and commands.
    """

    def __init__(
        self, broker: Broker, num_workers: int, capacity: int, *, group_size: int, sample_s: float, poll_s: float
    ) -> None:
        self._broker = broker
        self._workers = [EmulatedWorker(WorkerId(f"generate-{i}.1"), capacity) for i in range(num_workers)]
        self._group_size = group_size
        self._sample_s = sample_s
        self._poll_s = poll_s
        self._chance = random.Random(0)
        self._order = itertools.count()
        self._running: list[tuple[float, int, EmulatedWorker, HeldPlan, int]] = []
        self._lengths: dict[GroupId, list[int]] = {}
        self._finished_s: dict[GroupId, float] = {}
        self._batch = 0
        self._changed = asyncio.Event()
        self.tally = Tally()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """Work until cancelled, or until the run is over."""
        await self._beat_once()
        async with asyncio.TaskGroup() as group:
            for loop in (self._beat(), self._poll(), self._finish(), self._report()):
                group.create_task(loop)
            await self._train()

    # --- leases and reports -------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._beat_once()

    async def _beat_once(self) -> None:
        await self._beat_as(WorkerId("train-0.1"), WorkerKind.TRAIN, 0)
        for some in parts(self._workers):
            await asyncio.gather(
                *(self._beat_as(worker.worker_id, WorkerKind.GENERATE, worker.capacity) for worker in some)
            )

    async def _beat_as(self, worker_id: WorkerId, kind: WorkerKind, capacity: int) -> None:
        status = WorkerStatus(
            worker_id=worker_id,
            kind=kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            protocol=PROTOCOL_VERSION,
            doing="decoding",
            capacity=capacity,
            elapsed_s=time.monotonic(),
        )
        await self._broker.beat(worker_id, encode(status), ttl_s=LEASE_S)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            for some in parts(self._workers):
                reports = [
                    WorkerReported(
                        worker_id=worker.worker_id,
                        held=worker.plans.group_ids,
                        plans_cursor=worker.plans.cursor,
                        weights=worker.weights,
                    )
                    for worker in some
                ]
                await self._tell(reports)

    async def _tell(self, events: Sequence[Event]) -> None:
        await self._broker.commit(
            Commit(appends=[Append(stream=keys.EVENTS, entry=event_entry(event)) for event in events])
        )

    # --- generation ---------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """Look for commands and plans, forever."""
        while True:
            started_s = time.monotonic()
            for some in parts(self._workers):
                await asyncio.gather(*(self._obey(worker) for worker in some))
                await asyncio.gather(*(self._claim(worker) for worker in some if worker.weights is not None))
            await asyncio.sleep(max(0.0, started_s + self._poll_s - time.monotonic()))

    async def _obey(self, worker: EmulatedWorker) -> None:
        entries = await self._broker.read(keys.control(worker.worker_id), worker.control, count=16)
        for entry in entries:
            worker.control = entry.entry_id
            command = worker_command_decoder.decode(entry.entry.payload)
            if isinstance(command, LoadWeights):
                worker.weights = command.weights
        if entries and worker.weights is not None:
            await self._tell([WeightsLoaded(worker_id=worker.worker_id, weights=worker.weights)])

    async def _claim(self, worker: EmulatedWorker) -> None:
        room = worker.capacity + self._group_size - worker.plans.num_samples
        if room <= 0:
            return
        count = -(-room // self._group_size)
        for delivery in await self._broker.claim(keys.plans(worker.worker_id), worker.worker_id, count=count):
            held = worker.plans.add(delivery.entry_id, group_plan_decoder.decode(delivery.entry.payload))
            self._lengths[held.plan.group_id] = [TOKENS] * held.plan.group_size
            for sample in held.plan.samples:
                ends_s = time.monotonic() + self._sample_s * self._chance.uniform(0.5, 1.5)
                heapq.heappush(self._running, (ends_s, next(self._order), worker, held, sample))
        self._changed.set()

    async def _finish(self) -> None:
        """End each sample at its time, forever."""
        while True:
            self._changed.clear()
            while self._running and self._running[0][0] <= time.monotonic():
                await self._commit()
            wait_s = self._running[0][0] - time.monotonic() if self._running else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _commit(self) -> None:
        """Write the rows of samples that have ended; with the last of a group its score and the ack."""
        rows: list[RowWrite] = []
        acks: list[Ack] = []
        appends: list[Append] = []
        while self._running and self._running[0][0] <= time.monotonic() and len(rows) < ROWS_PER_COMMIT:
            _, _, worker, held, sample = heapq.heappop(self._running)
            rows.append(row_write(completion(held, sample, worker.weights), held, worker.worker_id))
            held.to_come.discard(sample)
            if not held.to_come:
                acks.append(Ack(queue=keys.plans(worker.worker_id), entry_id=held.entry_id))
                appends.append(Append(stream=keys.EVENTS, entry=event_entry(self._scored(held.plan.group_id))))
                worker.plans.remove([held])
                if held.plan.batch == self._batch:
                    self._finished_s[held.plan.group_id] = time.monotonic()
        await self._broker.commit(Commit(rows=rows, acks=acks, appends=appends))
        self.tally.samples += len(rows)

    def _scored(self, group_id: GroupId) -> GroupScored:
        lengths = self._lengths.pop(group_id)
        rewards = tuple(float(index % 2) for index in range(len(lengths)))
        return GroupScored(group_id=group_id, rewards=rewards, response_tokens=tuple(lengths), signal=True)

    # --- training -----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Confirm every round at once; a batch makes a version, a checkpoint frees it."""
        epoch = await self._broker.acquire_epoch("trainer")
        await self._tell([TrainerReady(worker_id=WorkerId("train-0.1"), weights=version_of(epoch, 0))])
        cursor = ZERO_ID
        while True:
            entries = await self._broker.read(keys.ROUNDS, cursor, count=64, wait_s=1.0)
            read_s = time.monotonic()
            events: list[Event] = []
            for entry in entries:
                cursor = entry.entry_id
                match trainer_command_decoder.decode(entry.entry.payload):
                    case TrainRound() as command:
                        self._see(command, read_s)
                        events.append(RoundDone(round_id=command.round_id, num_rows=0, num_tokens=0, busy_s=0.0))
                    case CloseMiniBatch() as command if command.finishes_batch:
                        self._batch = command.batch + 1
                        weights = version_of(epoch, self._batch)
                        events.append(StepDone(batch=command.batch, weights=weights, num_rows=0, num_tokens=0))
                        if command.checkpoint:
                            events.append(CheckpointSaved(weights=weights, cursor=cursor, path=""))
                    case FinishTraining():
                        return
                    case _:
                        pass
            if events:
                await self._tell(events)

    def _see(self, command: TrainRound, read_s: float) -> None:
        for rows in itertools.chain(*command.ranks):
            finished_s = self._finished_s.pop(rows.group_id, None)
            if finished_s is not None:
                self.tally.latencies_s.append(read_s - finished_s)


def parts(workers: Sequence[EmulatedWorker]) -> Iterator[Sequence[EmulatedWorker]]:
    return (workers[start : start + AT_ONCE] for start in range(0, len(workers), AT_ONCE))


def version_of(epoch: int, version: int) -> WeightIdentity:
    return WeightIdentity(epoch=epoch, version=version, digest=f"{epoch}.{version}")


def completion(held: HeldPlan, sample: int, weights: WeightIdentity | None) -> Completion:
    assert weights is not None  # a worker without weights claims nothing
    return Completion(
        group_id=held.plan.group_id,
        sample=sample,
        attempt=held.plan.attempt,
        response_ids=RESPONSE,
        logprobs=LOGPROBS,
        finish_reason=FinishReason.STOP,
        spans=(VersionSpan(start=0, end=TOKENS, weights=weights),),
        queued_s=0.0,
        engine_s=0.0,
    )
