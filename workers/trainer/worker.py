"""The trainer worker: trains the rounds log, publishes each version, saves checkpoints.

    rounds ─► RoundsReader ─► Learner (one thread) ─► RoundDone
                              CloseMiniBatch: step ─► checkpoint
                                                └─► publish (a thread) ─► manifest on weights, StepDone
                              FinishTraining: last checkpoint, final model; end, unless more follows

Owns: the order of these effects. Never: decides what is trained. Invariants: a round comes out of the log only when all
its rows are there, so no rank ever waits for rows inside a collective; the cursor, the ledger and the weights of a
checkpoint belong together, because it is only saved between two batches; an effect that a killed trainer did not get to
report is done again by the next one, from its checkpoint, under a new epoch.

A version is published beside the rounds of the next batch, from the weights themselves: no step changes them before it
is done. What happens meanwhile is told after it, so that events keep their order.

The learner (learner.py) runs in a thread of its own, so that leases are renewed and the next round's rows come in
while it works: the queue of decoded rounds is short because those of a batch are released when the trainer has little
to do anyway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, assert_never

import msgspec
import structlog

from transport.broker import keys
from transport.broker.base import Broker, Fence
from transport.contracts.ledger import CheckpointMeta, Ledger, checkpoints_place
from transport.contracts.messages import (
    STARTING,
    CheckpointSaved,
    CloseMiniBatch,
    Event,
    FinishTraining,
    MessageDecoder,
    RoundDone,
    StepDone,
    TrainerReady,
    TrainRound,
    WeightManifest,
    damage_of,
)
from transport.contracts.settings import Settings
from transport.contracts.types import Column, RowId, WeightIdentity, WorkerId, row_id
from transport.errors import first_error
from transport.process import faults
from transport.process.clock import Clock
from transport.process.storage import Place
from transport.rows.columns import RowStore
from workers.errors import CheckpointError, PublicationError, RanksError, RoundsError
from workers.leases.announce import ROLE, StepAnnouncer
from workers.leases.lifecycle import Activity, BusyMeter
from workers.trainer.checkpoint import (
    Checkpoint,
    CheckpointStore,
    Saving,
    Written,
    check_fingerprint,
    fingerprint,
    mark_model,
)
from workers.trainer.learner import Learner, PieceDone, PromptGroup
from workers.trainer.rounds_reader import RoundsReader

log = structlog.get_logger(__name__)

STALLS = 2
"""A trainer whose orchestrator gives no sign of life for so many ``stall_s`` ends."""
DONE = "trainer-done"
"""Meta key: id of the last command that rank 0 has carried out, everything saved."""
DONE_POLL_S = 0.2
HEARD_S = 60.0  # without an orchestrator
PART = "trainer-part-{}"
"""Meta key of a rank but 0: PartDone, of the checkpoint that it wrote its part of last."""
STOP_S = 5.0
"""A trainer that is stopped waits so long for a checkpoint that is being written."""


class PartDone(msgspec.Struct, frozen=True):
    """token: of the attempt to save (checkpoint.Plan)."""

    token: str
    written: Written


part_decoder = MessageDecoder(PartDone)


T = TypeVar("T")
Publication = Callable[[], WeightManifest]


class TrainerWorker:
    """One rank of the trainer. Rank 0 publishes and reports; each computes, and saves what it holds.

    model_dir: the base model.  run_dir: gets ``checkpoints/`` and ``model/``.  learner: what is trained.
    rows: where columns live; the broker's own hashes by default.  rank: which of the ``trainer.ranks`` this is.
    checkpoints: where they are kept; those of the policy by default.

    role: of which there is one in a run.  kind: how its fault points begin.
    """

    role = ROLE
    kind = "train"

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
        checkpoints: Place | None = None,
    ) -> None:
        self._broker = broker
        self._rows = rows or RowStore(broker)
        self._settings = settings
        self._worker_id = worker_id
        self._run_dir = run_dir
        self._learner = learner
        self._clock = clock
        self._rank = rank
        self._stall_s = STALLS * settings.liveness.stall_s
        self._store = CheckpointStore(
            checkpoints or checkpoints_place(settings, run_dir), keep=settings.trainer.keep_checkpoints, rank=rank
        )
        self._fingerprint = fingerprint(settings, model_dir)
        self._thread = ThreadPoolExecutor(1, "learner")
        self._saver = ThreadPoolExecutor(1, "saver")
        self._publisher = ThreadPoolExecutor(1, "publisher")
        self._saving: asyncio.Task[None] | None = None
        self._publication: asyncio.Task[None] | None = None
        self._outbox: deque[tuple[Event, Mapping[str, str | int]]] = deque()
        """What is told after the version that is being published."""
        self._tasks: asyncio.TaskGroup | None = None
        self._fence = Fence(role=self.role, epoch=0)
        self._announcer: StepAnnouncer | None = None
        self._ledger = Ledger(version=0, cursor="0-0")
        self._source_position = ""
        self._weights: WeightIdentity | None = None
        self._open: tuple[int, int, int] | None = None
        self._checkpoint_due = False
        self._doing = STARTING
        self._trouble = ""  # why there is no newer checkpoint
        self._saved_version = 0  # of the newest checkpoint
        self._meter = BusyMeter(clock)
        self._stepped_s = 0.0  # of optimizer steps since the last RoundDone or StepDone
        self._batch = BatchTally(started_s=clock.now_s())
        self._counters = {"rounds": 0.0, "rows": 0.0, "tokens": 0.0, "refused": 0.0}

    async def run(self) -> None:
        """Train until the run is over.

        Raises: ModelError, ResumeMismatchError, RoundsError, CheckpointError (of the last one), FencedError, and the
        broker's errors when it stays away.
        """
        try:
            await self._start()
            reader = RoundsReader(
                self._broker,
                self._rows,
                self._clock,
                self._fence if self._rank == 0 else None,
                cursor=self._ledger.cursor,
                part=self._learner.data_rank,
                num_parts=self._learner.data_size,
                wanted=self._wanted(),
                parts=self._settings.algorithms.keys() - {""},
                stall_s=self._stall_s,
                age_decay=self._settings.algorithm.age_decay,
            )
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                helping = [group.create_task(beside) for beside in (reader.read(), *self._beside())]
                await self._work(reader)
                for task in helping:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None
        finally:
            self._thread.submit(self._leave)
            self._thread.shutdown(wait=False)
            self._saver.shutdown(wait=False)
            await asyncio.to_thread(self._learner.retract)  # not behind a round that takes longer than our grace

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        """What goes on while the log is read."""
        kept = [] if self._announcer is None else [self._announcer.keep()]
        return [self._learner.follow(), *kept]

    def _wanted(self) -> frozenset[Column]:
        """Columns without which a row is not whole, beside those of every row."""
        algorithms = self._settings.algorithms.values()
        wanted = {
            Column.REFERENCE_LOGPROBS: self._settings.has_reference,
            Column.REWARD: any(algorithm.selects_by_reward for algorithm in algorithms),
            Column.TOKEN_ADVANTAGES: self._settings.has_critic,
            Column.ROLLOUT_INFO: self._settings.algorithm.age_decay < 1,
        }
        return frozenset(column for column, needed in wanted.items() if needed)

    def _leave(self) -> None:
        self._publisher.shutdown()  # not while it still talks to the other ranks
        self._learner.leave()

    def activity(self) -> Activity:
        busy_s = self._meter.busy_s()
        return Activity(
            doing=self._doing,
            busy_s=busy_s,
            weights=self._weights,
            counters=dict(self._counters),
            trouble=self._trouble,
        )

    # -- start

    async def _start(self) -> None:
        """Load weights, take over the role, publish what we hold, say from where we read on."""
        await self._learner.join(self._broker, self._in_thread)
        if self._settings.trainer.num_ranks > 1:
            await self._in_thread(lambda: self._store.check_shared(self._learner.gather))
        checkpoint = await self._in_thread(self._load)
        known_epoch = checkpoint.meta.epoch if checkpoint else 0
        self._saved_version = checkpoint.meta.version if checkpoint else 0
        if self._rank == 0:
            epoch = await self._broker.acquire_epoch(self.role, at_least=known_epoch)
            self._fence = Fence(role=self.role, epoch=epoch)
            self._announcer = self._announcer_of()
        await self._publish(await self._publication_of(self._ledger.version))
        if self._announcer is not None:
            assert self._weights is not None  # just published
            cursor = self._ledger.cursor
            event = TrainerReady(
                worker_id=self._worker_id,
                weights=self._weights,
                cursor=cursor,
                dp_size=self._learner.data_size,
                damaged=self._store.damage_lines,
            )
            await self._announce(event, cursor=cursor, version=self._weights.version)
            await self._announcer.announce_steps(checkpoint.steps if checkpoint else ())
        log.info("trainer ready", weights=str(self._weights), cursor=self._ledger.cursor)

    def _announcer_of(self) -> StepAnnouncer:
        return StepAnnouncer(self._broker, self._worker_id, self._fence)

    def _load(self) -> Checkpoint | None:
        checkpoint = self._store.load_latest(self._learner.gather)
        if checkpoint is not None:
            check_fingerprint(checkpoint, self._fingerprint)
            self._ledger = checkpoint.ledger
            self._source_position = checkpoint.meta.source_position
        self._learner.load(checkpoint)
        return checkpoint

    # -- the log

    async def _work(self, reader: RoundsReader) -> None:
        """Carry out commands in the log's order; ends after FinishTraining, unless the run was resumed beyond it."""
        self._batch = BatchTally(started_s=self._clock.now_s())
        while True:
            self._doing = "waiting"
            entry_id, command, groups = await reader.queue.get()
            match command:
                case TrainRound():
                    await self._train(command, groups)
                case CloseMiniBatch():
                    await self._close(command, entry_id)
                case FinishTraining():
                    await self._finish(entry_id)
                    if await self._is_over(reader):
                        return
                case _ as unreachable:
                    assert_never(unreachable)

    async def _train(self, command: TrainRound, groups: Sequence[PromptGroup]) -> None:
        started_s = self._clock.now_s()
        self._meter.begin()
        self._doing, learn = "recording logprobs", self._learner.record_logprobs
        refused: tuple[RowId, ...] = ()
        if command.kind == "train":
            self._doing, learn = "training", self._learner.accumulate
            place = (command.batch, command.pass_index, command.mini_batch)
            if self._open not in (None, place):  # gradients of two mini-batches must not mix
                raise RoundsError(f"round {command.round_id} of {place} came before {self._open} was closed")
            self._open = place
            self._check_follows(command.batch)
            rows = [row_id(g.group_id, sample) for rank in command.ranks for g in rank for sample in g.samples]
            refused = self._ledger.add(command.pass_index, rows)  # of all ranks
        if refused:
            log.warning("rows were trained before; refused", round=command.round_id, rows=refused)
            kept = [replace(group, samples=[s for s in group.samples if s.row_id not in refused]) for group in groups]
            groups = [group for group in kept if group.samples]
        done: PieceDone = await self._in_thread(lambda: learn(groups))
        faults.point(f"{self.kind}.round_accumulated")
        busy_s = self._clock.now_s() - started_s
        self._meter.end()
        self._batch.busy_s += busy_s
        added = {"rounds": 1, "rows": done.num_rows, "tokens": done.num_tokens, "refused": len(refused)}
        for name, number in added.items():
            self._counters[name] += number
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

    async def _close(self, command: CloseMiniBatch, entry_id: str) -> None:
        """One optimizer step, unless nothing was left of the mini-batch; at the end of its batch, a version."""
        await self._until_told()
        self._doing = "stepping"
        started_s = self._clock.now_s()
        self._meter.begin()
        if command.num_rows:
            metrics = await self._in_thread(
                lambda: self._learner.close(
                    batch=command.batch,
                    num_rows=command.num_rows,
                    num_tokens=command.num_tokens,
                    num_batches=command.num_batches,
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

    def _check_follows(self, batch: int) -> None:
        """Raises RoundsError: the weights that ``batch`` is trained from are not those that this trainer holds."""
        version = self._ledger.version
        if batch == version:
            return
        problem = f"the rounds log goes on with batch {batch}, but the weights are of version {version}"
        raise RoundsError(problem + damage_of(self._store.damage_lines))

    async def _finish_batch(self, command: CloseMiniBatch, entry_id: str) -> None:
        self._check_follows(command.batch)
        faults.point(f"{self.kind}.stepped")
        self._learner.forget_logprobs()
        self._ledger.version, self._ledger.cursor = command.batch + 1, entry_id
        self._source_position = command.source_position
        assert self._tasks is not None  # it is running
        trained, stepped_s = self._batch, self._stepped_s
        now_s = self._clock.now_s()
        self._stepped_s, self._batch = 0.0, BatchTally(started_s=now_s)
        publication = await self._publication_of(self._ledger.version)
        publishing = self._publish_and_tell(publication, command.batch, trained, now_s, stepped_s)
        self._publication = self._tasks.create_task(publishing, name="publish")
        due = command.checkpoint or self._checkpoint_due  # the latter rank 0 alone knows
        if await self._in_thread(lambda: self._learner.agree(due)):
            await self._checkpoint()

    async def _finish(self, entry_id: str) -> None:
        """The last checkpoint contains the last command: a trainer that reads it knows that nothing is left.

        It is reported only when the final model is there too, because the run ends with it. The other ranks stay until
        then. Raises CheckpointError, RanksError.
        """
        started_s, saving = await self._begin_last(entry_id)
        if self._rank != 0:
            await self._write_part(saving)
            self._doing = "waiting for rank 0 to save"
            await self._outstay_rank_0(entry_id)
            return
        path = await self._commit(saving)
        saved = saved_event(saving, path, self._clock.now_s() - started_s)
        self._doing = "saving the model"
        await self._in_thread(lambda: self._save_final(path))
        await self._announce(saved, version=saved.weights.version, cursor=saved.cursor)
        await self._broker.put_meta(DONE, entry_id.encode())

    def _save_final(self, checkpoint: Place) -> None:
        """Raises CheckpointError."""
        model = self._run_dir / "model"
        self._learner.save_final(checkpoint, model)
        if model.is_dir():
            try:
                mark_model(model)
            except OSError as error:
                raise CheckpointError(model, 0, str(error)) from error

    async def _is_over(self, reader: RoundsReader) -> bool:
        """After FinishTraining, wait until the orchestrator has ended the run because of it; False: more follows.

        A broker that loses its tail now would lose the last event, and with it the line of the last batch. Without an
        orchestrator there is nothing to wait for: a resumed run announces it again.
        """
        self._doing = "waiting to be heard"
        if await self._broker.get_meta(keys.STATE) != keys.STATE_RUNNING:
            return True
        alone_s, heard_s = min(HEARD_S, self._stall_s / 2), self._clock.now_s()
        while await self._broker.get_meta(keys.STATE) != keys.STATE_FINISHED:
            now_s = self._clock.now_s()
            if not reader.queue.empty():  # that end was of a run that was resumed to go further
                return False
            if await reader.is_orchestrated():
                heard_s = now_s
            elif now_s - heard_s > alone_s:
                return True
            await asyncio.sleep(DONE_POLL_S)
        return True

    async def _begin_last(self, entry_id: str) -> tuple[float, Saving]:
        """(when it began, what is to be written) of a checkpoint that contains the last command."""
        await self._until_told()
        await self._settle()
        self._ledger.cursor = entry_id
        started_s = self._clock.now_s()
        return started_s, await self._begin_save()

    async def _outstay_rank_0(self, entry_id: str) -> None:
        """Until rank 0 has saved all there is up to ``entry_id``, or the run is over. Raises RanksError.

        Rank 0 may die while it saves; ``Learner.follow`` then has this rank start over.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                while await self._broker.get_meta(DONE) != entry_id.encode():
                    if await self._broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                        return
                    await asyncio.sleep(DONE_POLL_S)
        except TimeoutError:
            raise RanksError(f"rank 0 has not saved everything after {self._stall_s:.0f} s") from None

    async def _checkpoint(self) -> None:
        """Begin to save between two batches; the files are written while training goes on.

        A full disk does not stop the run: it is tried again after the next batch.
        """
        assert self._tasks is not None  # it is running
        await self._until_told()
        started_s = self._clock.now_s()
        await self._settle()
        try:
            saving = await self._begin_save()
        except CheckpointError as error:
            self._not_saved(error)
            return
        self._checkpoint_due = False
        stood_s = self._clock.now_s() - started_s
        self._saving = self._tasks.create_task(self._complete(saving, stood_s), name="save")

    async def _settle(self) -> None:
        """Until the checkpoint in work, if any, is in place, or is not to be. Raises CheckpointError: it hangs."""
        if self._saving is None:
            return
        self._doing = "waiting for the checkpoint before"
        await asyncio.wait({self._saving}, timeout=self._stall_s)
        if not self._saving.done():
            raise CheckpointError(self._run_dir, 0, f"the one before is not written after {self._stall_s:.0f} s")
        self._saving = None

    async def _complete(self, saving: Saving, stood_s: float) -> None:
        """Write and report. A trainer that is stopped meanwhile still does, if it does not take long."""
        work = asyncio.ensure_future(self._write_and_report(saving, stood_s))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=STOP_S)
            work.cancel()
            raise

    async def _write_and_report(self, saving: Saving, stood_s: float) -> None:
        if self._rank != 0:
            await self._write_part(saving)
            return
        try:
            path = await self._commit(saving)
        except CheckpointError as error:
            self._not_saved(error)
            return
        self._trouble, self._saved_version = "", saving.meta.version
        saved = saved_event(saving, path, stood_s)
        await self._announce(saved, version=saved.weights.version, cursor=saved.cursor)

    def _not_saved(self, error: CheckpointError) -> None:
        self._checkpoint_due = True
        log.error("no checkpoint; trying again after the next batch", error=str(error))
        since = f"since batch {self._saved_version}" if self._saved_version else "yet"
        self._trouble = f"no checkpoint {since}, tried again after each batch: {error}"

    async def _begin_save(self) -> Saving:
        """What is to be written. All ranks call it at the same place. Raises CheckpointError."""
        self._doing = "saving a checkpoint"
        meta = CheckpointMeta(
            version=self._ledger.version,
            epoch=self._fence.epoch,
            digest=self._weights.digest if self._weights else "",
            cursor=self._ledger.cursor,
            source_position=self._source_position,
            fingerprint=self._fingerprint,
            files={},
        )
        learner = self._learner
        steps = self._announcer.steps if self._announcer is not None else ()
        begin = partial(self._store.begin, learner.tensor_files, self._ledger, meta, steps, learner.gather)
        return await self._in_thread(begin)

    async def _write_part(self, saving: Saving) -> None:
        """As a rank but 0: write what it holds, and say so."""
        written = await self._in_saver(partial(self._store.write, saving))
        if written.problem:
            log.error("no checkpoint: this rank cannot write its part", rank=self._rank, error=written.problem)
        part = PartDone(token=saving.plan.token, written=written)
        await self._broker.put_meta(PART.format(self._rank), msgspec.msgpack.encode(part))

    async def _commit(self, saving: Saving) -> Place:
        """As rank 0: write, wait for the others, put it in place. Raises CheckpointError."""
        parts = {0: await self._in_saver(partial(self._store.write, saving))}
        parts |= await self._parts(saving)
        path = await self._in_saver(partial(self._store.commit, saving, parts))
        faults.point(f"{self.kind}.checkpoint_saved")
        return path

    async def _parts(self, saving: Saving) -> dict[int, Written]:
        """What the other ranks have said of this checkpoint: all of them, or those that did in time."""
        found: dict[int, Written] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.liveness.stall_s):
                while waited := set(range(1, saving.num_ranks)) - found.keys():
                    for rank in waited:
                        raw = await self._broker.get_meta(PART.format(rank))
                        part = part_decoder.decode(raw) if raw else None
                        if part is not None and part.token == saving.plan.token:
                            found[rank] = part.written
                    await asyncio.sleep(DONE_POLL_S if waited - found.keys() else 0)
        return found

    # -- out

    async def _publication_of(self, version: int) -> Publication:
        """The present weights as this version. All ranks call it at the same place."""
        epoch = self._fence.epoch
        return await self._in_thread(lambda: self._learner.publication(epoch, version))

    async def _publish(self, publication: Publication) -> None:
        """All ranks publish what they hold; rank 0 announces it."""
        manifest = await asyncio.get_running_loop().run_in_executor(self._publisher, publication)
        self._weights = manifest.weights
        if self._announcer is not None:
            await self._announcer.announce_manifest(manifest)

    async def _publish_and_tell(
        self, publication: Publication, batch: int, trained: BatchTally, trained_s: float, stepped_s: float
    ) -> None:
        """The version that a batch made, beside what is trained next; then what happened meanwhile is told, too.

        trained_s: when its last step was done.  stepped_s: of steps that no event has told of.
        """
        await self._publish(publication)
        faults.point(f"{self.kind}.published")
        assert self._weights is not None  # just published
        event = StepDone(
            batch=batch,
            weights=self._weights,
            num_rows=trained.num_rows,
            num_tokens=trained.num_tokens,
            metrics=trained.metrics(trained_s, publish_s=self._clock.now_s() - trained_s),
            stepped_s=stepped_s,
        )
        await self._tell(event, batch=batch, version=batch + 1)
        while self._outbox:
            event, fields = self._outbox.popleft()
            await self._tell(event, **fields)
        self._publication = None

    async def _until_told(self) -> None:
        """Until the version that is being published, if any, is, and all is told.

        Raises: what its publication raised.  PublicationError: it hangs.
        """
        if (publication := self._publication) is None:
            return
        started_s = self._clock.now_s()
        self._doing = "publishing"
        await asyncio.wait({publication}, timeout=self._stall_s)
        if not publication.done():
            raise PublicationError(f"version {self._ledger.version} is not published after {self._stall_s:.0f} s")
        publication.result()
        self._batch.publish_wait_s += self._clock.now_s() - started_s

    async def _announce(self, event: Event, **fields: str | int) -> None:
        """Announce an event, after the version that is being published, if any."""
        if self._publication is None:
            await self._tell(event, **fields)
        else:
            self._outbox.append((event, fields))

    async def _tell(self, event: Event, **fields: str | int) -> None:
        """Announce it now, if this rank reports for all."""
        if self._announcer is not None:
            await self._announcer.announce_event(event, **fields)

    async def _in_saver(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._saver, work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def saved_event(saving: Saving, path: Place, seconds: float) -> CheckpointSaved:
    meta = saving.meta
    weights = WeightIdentity(epoch=meta.epoch, version=meta.version, digest=meta.digest)
    return CheckpointSaved(weights=weights, cursor=meta.cursor, path=str(path), seconds=seconds)


OVER_STEPS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "skipped_nonfinite": sum,
    "computed_tokens": sum,
    "logprob_mismatch_max": max,
}
"""What a batch of several optimizer steps says of them; of all other numbers their mean."""


@dataclass(slots=True)
class BatchTally:
    """What the batch in training took so far. steps: metrics of each optimizer step.

    publish_wait_s: in which training stood still until the version before it was published.
    """

    started_s: float
    busy_s: float = 0.0
    publish_wait_s: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def metrics(self, now_s: float, *, publish_s: float) -> dict[str, float]:
        """Of the batch's optimizer steps, and where the seconds went. A number is there where a step has it.

        now_s: when its last step was done.  publish_s: from then on, until its version could be read.
        """
        names = dict.fromkeys(name for step in self.steps for name in step)
        means = {name: OVER_STEPS.get(name, fmean)([s[name] for s in self.steps if name in s]) for name in names}
        wait_s = max(0.0, now_s - self.started_s - self.busy_s - self.publish_wait_s)
        seconds = {"train_s": self.busy_s, "wait_s": wait_s, "publish_wait_s": self.publish_wait_s}
        return means | seconds | {"publish_s": publish_s}
