"""The trainer worker: trains the rounds log, publishes each version, saves checkpoints.

    rounds ─► RoundsReader ─► Learner (one thread) ─► RoundDone
                              CloseMiniBatch: step ─► publish ─► manifest on weights, StepDone ─► checkpoint
                              FinishTraining: last checkpoint, final model, end

Owns: the order of these effects. Never: decides what is trained. Invariants: the cursor, the ledger and the weights of
a checkpoint belong together, because it is only saved between two batches; an effect that a killed trainer did not get
to report is done again by the next one, from its checkpoint, under a new epoch.

The learner (learner.py) runs in a thread of its own, so that leases are renewed and the next round's rows come in
while it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar, assert_never

import structlog

from transport.broker.base import Broker, Fence
from transport.contracts.ledger import Ledger
from transport.contracts.messages import (
    STARTING,
    CheckpointSaved,
    CloseMiniBatch,
    Event,
    FinishTraining,
    RoundDone,
    StepDone,
    TrainerReady,
    TrainRound,
)
from transport.contracts.settings import Settings
from transport.contracts.types import RowId, WeightIdentity, WorkerId, row_id
from transport.errors import first_error
from transport.process import faults
from transport.process.clock import Clock
from transport.rows.columns import BrokerRows, RowStore
from workers.errors import CheckpointError, RoundsError
from workers.leases.announce import ROLE, StepAnnouncer
from workers.leases.lifecycle import Activity, BusyMeter
from workers.trainer.checkpoint import Checkpoint, CheckpointMeta, CheckpointStore, check_fingerprint, fingerprint
from workers.trainer.learner import Learner, PieceDone, PromptGroup
from workers.trainer.meeting import DONE, leave_after_rank_0
from workers.trainer.rounds import Fetched, RoundsReader

log = structlog.get_logger(__name__)

CHECKPOINTS = "checkpoints"
FINAL_MODEL = "model"

STALLS = 2
"""A trainer whose orchestrator gives no sign of life for so many ``stall_s`` ends."""

T = TypeVar("T")


class TrainerWorker:
    """One rank of the trainer. Rank 0 publishes, reports and saves; the others only compute.

    model_dir: the base model.  run_dir: gets ``checkpoints/`` and ``model/``.  learner: what is trained.
    rows: where columns live; the broker's own hashes by default.  rank: which of the ``trainer.ranks`` this is.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        worker_id: WorkerId,
        model_dir: Path,
        run_dir: Path,
        learner: Learner,
        clock: Clock,
        *,
        rows: RowStore | None = None,
        rank: int = 0,
    ) -> None:
        self._broker = broker
        self._rows = rows or BrokerRows(broker)
        self._settings = settings
        self._worker_id = worker_id
        self._run_dir = run_dir
        self._learner = learner
        self._clock = clock
        self._rank = rank
        self._store = CheckpointStore(run_dir / CHECKPOINTS, keep=settings.trainer.keep_checkpoints)
        self._fingerprint = fingerprint(settings, model_dir)
        self._thread = ThreadPoolExecutor(1, "learner")
        self._fence = Fence(role=ROLE, epoch=0)
        self._announcer: StepAnnouncer | None = None
        self._ledger = Ledger()
        self._source_position = ""
        self._weights: WeightIdentity | None = None
        self._open: tuple[int, int, int] | None = None
        self._checkpoint_due = False
        self._doing = STARTING
        self._meter = BusyMeter(clock)
        self._stepped_s = 0.0  # of optimizer steps since the last RoundDone or StepDone
        self._batch = BatchTally(started_s=clock.now_s())
        self._counters = {"rounds": 0.0, "rows": 0.0, "tokens": 0.0, "refused": 0.0}

    async def run(self) -> None:
        """Train until FinishTraining.

        Raises: ModelError, ResumeMismatchError, RoundsError, CheckpointError (of the last one), FencedError, and the
        broker's errors when it stays away.
        """
        try:
            await self._start()
            reader = self._reader()
            async with asyncio.TaskGroup() as group:
                helping = [group.create_task(reader.read()), group.create_task(self._learner.follow())]
                if self._announcer is not None:
                    helping.append(group.create_task(self._announcer.keep()))
                await self._work(reader)
                for task in helping:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        finally:
            self._thread.submit(self._learner.leave)
            self._thread.shutdown(wait=False)
            await asyncio.to_thread(self._learner.retract)  # not behind a round that takes longer than our grace

    def activity(self) -> Activity:
        busy_s = self._meter.busy_s()
        return Activity(doing=self._doing, busy_s=busy_s, weights=self._weights, counters=dict(self._counters))

    # -- start

    async def _start(self) -> None:
        """Load weights, take over the role, publish what we hold, say from where we read on."""
        await self._learner.join(self._broker, self._in_thread)
        checkpoint = await self._in_thread(self._load)
        known_epoch = checkpoint.meta.epoch if checkpoint else 0
        if self._rank == 0:
            self._fence = Fence(role=ROLE, epoch=await self._broker.acquire_epoch(ROLE, at_least=known_epoch))
            self._announcer = StepAnnouncer(self._broker, self._worker_id, self._fence)
            await self._publish()
            assert self._weights is not None  # just published
            cursor = self._ledger.cursor
            event = TrainerReady(
                worker_id=self._worker_id,
                weights=self._weights,
                cursor=cursor,
                dp_size=self._learner.world_size,
                damaged=tuple(f"{path}: {reason}" for path, reason in self._store.damaged.items()),
            )
            await self._announce(event, cursor=cursor, version=self._weights.version)
            await self._announcer.announce_steps(checkpoint.steps if checkpoint else ())
        log.info("trainer ready", weights=str(self._weights), cursor=self._ledger.cursor)

    def _load(self) -> Checkpoint | None:
        checkpoint = self._store.load_latest()
        version = self._learner.agree(checkpoint.meta.version if checkpoint else 0)
        if checkpoint is not None:
            if checkpoint.meta.version != version:
                raise CheckpointError(checkpoint.path, 0, f"rank 0 goes on from version {version}")
            check_fingerprint(checkpoint, self._fingerprint)
            self._ledger = checkpoint.ledger
            self._source_position = checkpoint.meta.source_position
        self._learner.load(checkpoint)
        return checkpoint

    def _reader(self) -> RoundsReader:
        return RoundsReader(
            self._broker,
            self._rows,
            self._clock,
            self._fence if self._rank == 0 else None,
            cursor=self._ledger.cursor,
            rank=self._rank,
            world_size=self._learner.world_size,
            needs_reference=self._settings.algorithm.kl_coef > 0,
            stall_s=STALLS * self._settings.liveness.stall_s,
        )

    # -- the log

    async def _work(self, reader: RoundsReader) -> None:
        """Carry out commands in the log's order; ends after FinishTraining."""
        self._batch = BatchTally(started_s=self._clock.now_s())
        while True:
            self._doing = "waiting"
            fetched = await reader.queue.get()
            match fetched.command:
                case TrainRound() as command:
                    await self._train(command, fetched)
                case CloseMiniBatch() as command:
                    await self._close(command, fetched.entry_id)
                case FinishTraining():
                    await self._finish(fetched.entry_id)
                    return
                case _ as unreachable:
                    assert_never(unreachable)

    async def _train(self, command: TrainRound, fetched: Fetched) -> None:
        started_s = self._clock.now_s()
        self._meter.begin()
        refused: tuple[RowId, ...] = ()
        if command.kind == "train":
            self._doing = "training"
            refused = self._enter(command)
            done = await self._in_thread(lambda: self._learner.accumulate(without_rows(fetched.groups, refused)))
        else:
            self._doing = "recording logprobs"
            done = await self._in_thread(lambda: self._learner.record_logprobs(fetched.groups))
        faults.point("train.round_accumulated")
        busy_s = self._clock.now_s() - started_s
        self._meter.end()
        self._count(done, refused, busy_s)
        event = RoundDone(
            round_id=command.round_id,
            num_rows=done.num_rows,
            num_tokens=done.num_tokens,
            busy_s=busy_s,
            refused=refused,
            stepped_s=self._stepped_s,
        )
        self._stepped_s = 0.0
        await self._announce(event, round=command.round_id, rows=done.num_rows, tokens=done.num_tokens)

    def _enter(self, command: TrainRound) -> tuple[RowId, ...]:
        """Enter the rows of all ranks into the ledger. Returns those it knew: they are not trained again.

        Raises: RoundsError: an earlier mini-batch is still open, and gradients of two must not mix.
        """
        place = (command.batch, command.pass_index, command.mini_batch)
        if self._open not in (None, place):
            raise RoundsError(f"round {command.round_id} of {place} came before {self._open} was closed")
        self._open = place
        rows = [row_id(g.group_id, sample) for rank in command.ranks for g in rank for sample in g.samples]
        refused = self._ledger.add(command.pass_index, rows)
        if refused:
            log.warning("rows were trained before; refused", round=command.round_id, rows=refused)
        return refused

    def _count(self, done: PieceDone, refused: tuple[RowId, ...], busy_s: float) -> None:
        self._batch.busy_s += busy_s
        added = {"rounds": 1, "rows": done.num_rows, "tokens": done.num_tokens, "refused": len(refused)}
        for name, number in added.items():
            self._counters[name] += number

    async def _close(self, command: CloseMiniBatch, entry_id: str) -> None:
        """One optimizer step, unless nothing was left of the mini-batch; at the end of its batch, a version."""
        self._doing = "stepping"
        started_s = self._clock.now_s()
        self._meter.begin()
        if command.num_rows:
            metrics = await self._in_thread(
                lambda: self._learner.close(
                    batch=command.batch, num_rows=command.num_rows, num_tokens=command.num_tokens
                )
            )
            self._batch.steps.append(metrics)
        self._open = None
        self._batch.num_rows += command.num_rows
        self._batch.num_tokens += command.num_tokens
        stepped_s = self._clock.now_s() - started_s
        self._stepped_s += stepped_s
        self._batch.busy_s += stepped_s
        self._meter.end()
        if command.finishes_batch:
            await self._finish_batch(command, entry_id)

    async def _finish_batch(self, command: CloseMiniBatch, entry_id: str) -> None:
        if command.batch != self._ledger.version:
            raise RoundsError(
                f"batch {command.batch} was closed, but the weights are of version {self._ledger.version}"
            )
        faults.point("train.stepped")
        self._learner.forget_logprobs()
        self._ledger.version, self._ledger.cursor = command.batch + 1, entry_id
        self._source_position = command.source_position
        publish_started_s = self._clock.now_s()
        await self._publish()
        faults.point("train.published")
        now_s = self._clock.now_s()
        metrics = self._batch.metrics(now_s, publish_s=now_s - publish_started_s)
        if self._weights is not None:
            event = StepDone(
                batch=command.batch,
                weights=self._weights,
                num_rows=self._batch.num_rows,
                num_tokens=self._batch.num_tokens,
                metrics=metrics,
                stepped_s=self._stepped_s,
            )
            await self._announce(event, batch=command.batch, version=self._ledger.version)
        self._stepped_s = 0.0
        self._batch = BatchTally(started_s=now_s)
        if command.checkpoint or self._checkpoint_due:
            await self._checkpoint()

    async def _finish(self, entry_id: str) -> None:
        """The last checkpoint contains the last command: a trainer that reads it knows that nothing is left.

        It is reported only when the final model is there too, because the run ends with it. The other ranks stay until
        then. Raises CheckpointError, RanksError.
        """
        if self._rank != 0:
            self._doing = "waiting for rank 0 to save"
            limit_s = STALLS * self._settings.liveness.stall_s
            await leave_after_rank_0(self._broker, entry_id, limit_s=limit_s)
            return
        self._ledger.cursor = entry_id
        saved = await self._save()
        self._doing = "saving the model"
        await self._in_thread(lambda: self._learner.save_final(self._run_dir / FINAL_MODEL))
        await self._announce(saved, version=saved.weights.version, cursor=saved.cursor)
        await self._broker.put_meta(DONE, entry_id.encode())
        self._doing = "waiting to be heard"
        if self._announcer is not None:
            await self._announcer.until_read()

    async def _checkpoint(self) -> None:
        """Save between two batches. A full disk does not stop the run: it is tried again after the next batch."""
        if self._rank != 0:
            return
        try:
            saved = await self._save()
        except CheckpointError as error:
            self._checkpoint_due = True
            log.error("no checkpoint; trying again after the next batch", error=str(error))
            return
        self._checkpoint_due = False
        await self._announce(saved, version=saved.weights.version, cursor=saved.cursor)

    async def _save(self) -> CheckpointSaved:
        """Write a checkpoint. Returns what is to be reported of it. Raises CheckpointError."""
        assert self._weights is not None  # rank 0 published before it read anything
        assert self._announcer is not None
        steps = self._announcer.steps
        self._doing = "saving a checkpoint"
        started_s = self._clock.now_s()
        meta = CheckpointMeta(
            version=self._ledger.version,
            epoch=self._fence.epoch,
            digest=self._weights.digest,
            cursor=self._ledger.cursor,
            source_position=self._source_position,
            fingerprint=self._fingerprint,
            files={},
        )
        path = await self._in_thread(lambda: self._store.save(self._learner.tensor_files(), self._ledger, meta, steps))
        faults.point("train.checkpoint_saved")
        seconds = self._clock.now_s() - started_s
        return CheckpointSaved(weights=self._weights, cursor=meta.cursor, path=str(path), seconds=seconds)

    # -- out

    async def _publish(self) -> None:
        if self._announcer is None:
            return
        self._doing = "publishing"
        version, epoch = self._ledger.version, self._fence.epoch
        manifest = await self._in_thread(lambda: self._learner.publish(epoch, version))
        self._weights = manifest.weights
        await self._announcer.announce_manifest(manifest)

    async def _announce(self, event: Event, **fields: str | int) -> None:
        """Announce an event, if this rank reports for all."""
        if self._announcer is not None:
            await self._announcer.announce_event(event, **fields)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


OVER_STEPS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "skipped_nonfinite": sum,
    "computed_tokens": sum,
    "logprob_mismatch_max": max,
}
"""What a batch of several optimizer steps says of them; of all other numbers their mean."""


@dataclass(slots=True)
class BatchTally:
    """What the batch in training took so far. steps: metrics of each optimizer step."""

    started_s: float
    busy_s: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def metrics(self, now_s: float, *, publish_s: float) -> dict[str, float]:
        """Of the batch's optimizer steps, and where the seconds went. A number is there where a step has it."""
        names = dict.fromkeys(name for step in self.steps for name in step)
        means = {name: OVER_STEPS.get(name, fmean)([s[name] for s in self.steps if name in s]) for name in names}
        wait_s = max(0.0, now_s - self.started_s - self.busy_s - publish_s)
        return means | {"train_s": self.busy_s, "wait_s": wait_s, "publish_s": publish_s}


def without_rows(groups: Sequence[PromptGroup], refused: Collection[RowId]) -> Sequence[PromptGroup]:
    """The groups less some rows; a group that loses all of them is left out."""
    if not refused:
        return groups
    kept = [replace(group, samples=[s for s in group.samples if s.row_id not in refused]) for group in groups]
    return [group for group in kept if group.samples]
