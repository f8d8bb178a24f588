"""The critic worker: values every sample, and is trained on the same rounds as the policy, beside it.

    tasks:values ─► ValuesTask ─► its newest weights, in a pass ─► VALUES, VALUE_WEIGHTS       (a scoring task)
                                        ▲
    rounds ─► RoundsReader ─► value loss, step, checkpoint ─► CriticReported                   (as the trainer worker)

Both take turns on one thread, so the weights need no way to travel: the process that trains them serves them, on a GPU
of its own. The reader, the ledger, checkpoints and their resumption are the trainer worker's, under another role, with
a cursor and a directory of their own.

Owns: when a sample may be valued. Never: advantages (the scoring worker's), what is trained (the log). Invariants: a
sample of batch b is valued by a version >= b - pipeline.max_staleness, as it may be generated, so a critic that lags
holds generation back rather than value with old weights; what a version needs was valued before, so nothing waits for
itself. A killed critic goes on from its checkpoint, under a new epoch; rows that its ledger holds are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from transport.broker.base import Broker, Commit, RowWrite
from transport.contracts.ledger import critic_checkpoints_place
from transport.contracts.messages import (
    CheckpointSaved,
    CloseMiniBatch,
    CriticReported,
    Event,
    StepDone,
    TrainerReady,
    WeightManifest,
)
from transport.contracts.settings import EmulatedSettings, Settings
from transport.contracts.types import Column, RowId, WeightIdentity, WorkerId, batch_of, is_evaluation
from transport.process import faults
from transport.process.clock import Clock
from transport.rows.columns import RowStore, encode_array
from transport.tensors.base import host_id
from workers.leases.announce import StepAnnouncer
from workers.leases.lifecycle import Activity
from workers.scoring.tasks import Unit, read_sample, sample_passes
from workers.scoring.worker import TaskConsumer
from workers.trainer.learner import EmulatedLearner, Learner, PromptGroup
from workers.trainer.worker import TrainerWorker, saved_event

log = structlog.get_logger(__name__)

ROLE = "critic"
AT_ONCE = 1 << 16
"""Samples that are held at once. One that waits for a version holds nothing but its lease; were they few, the sample
that this version needs could stand behind them."""


class ValueLearner(Learner, Protocol):
    """A learner of one rank that also values samples."""

    def values(self, groups: Sequence[PromptGroup]) -> Mapping[RowId, NDArray[np.float32]]:
        """Of each row, [its tokens] float32: the return that is expected before each."""
        ...


def unpublished(epoch: int, version: int) -> Callable[[], WeightManifest]:
    """The manifest of weights that nobody pulls: their name alone."""
    weights = WeightIdentity(epoch=epoch, version=version)
    return lambda: WeightManifest(weights=weights, tensors=(), total_bytes=0, sources=(), host=host_id())


class EmulatedCritic(EmulatedLearner):
    """Takes the time of training, and none for values, which are 0."""

    def __init__(self, costs: EmulatedSettings, sleep: Callable[[float], None]) -> None:
        super().__init__(costs, None, sleep)

    def values(self, groups: Sequence[PromptGroup]) -> Mapping[RowId, NDArray[np.float32]]:
        rows = [row for group in groups for row in group.samples]
        return {row.row_id: np.zeros(len(row.response_ids), np.float32) for row in rows}

    def publication(self, epoch: int, version: int) -> Callable[[], WeightManifest]:
        return unpublished(epoch, version)


class CriticAnnouncer(StepAnnouncer):
    """Says what a trainer says, as the critic's; of rounds and weights nothing."""

    async def announce_manifest(self, manifest: WeightManifest) -> None:
        pass

    async def announce_event(self, event: Event, **fields: str | int) -> None:
        if isinstance(event, TrainerReady | StepDone | CheckpointSaved):
            await super().announce_event(event, **fields)

    def _told(self, event: Event) -> Event:
        assert isinstance(event, TrainerReady | StepDone | CheckpointSaved)  # see above
        return CriticReported(worker_id=self._worker_id, report=event)


class CriticWorker(TrainerWorker):
    """Values and trains until the run is over. The arguments: see TrainerWorker; model_dir: of the critic."""

    role = ROLE
    kind = "critic"

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        worker_id: WorkerId,
        model_dir: Path,
        run_dir: Path,
        learner: ValueLearner,
        clock: Clock,
        *,
        rows: RowStore | None = None,
    ) -> None:
        super().__init__(
            broker,
            settings,
            worker_id,
            model_dir,
            run_dir,
            learner,
            clock,
            rows=rows,
            checkpoints=critic_checkpoints_place(settings, run_dir),
        )
        self._values = learner
        self._stepped = asyncio.Event()
        self._consumer = TaskConsumer(
            broker,
            self._rows,
            "values",
            worker_id,
            ValuesTask(self._rows, worker_id, self._pass, self._until, settings.pipeline.max_staleness),
            clock=clock,
            meter=self._meter,
            lease_s=settings.scoring.lease_s,
            # No sample is why a critic dies: the supervisor's patience ends before the sample's
            max_attempts=settings.scoring.max_deliveries + settings.liveness.max_restarts,
            at_once=AT_ONCE,
        )

    def activity(self) -> Activity:
        activity = super().activity()
        activity.counters["values_done"] = float(self._consumer.done)
        return activity

    def _wanted(self) -> frozenset[Column]:
        return frozenset({Column.VALUES, Column.RETURNS})

    def _announcer_of(self) -> StepAnnouncer:
        return CriticAnnouncer(self._broker, self._worker_id, self._fence)

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._beside(), self._consumer.run()]

    async def _finish_batch(self, command: CloseMiniBatch, entry_id: str) -> None:
        await super()._finish_batch(command, entry_id)
        self._stepped.set()
        self._stepped = asyncio.Event()

    async def _finish(self, entry_id: str) -> None:
        """The last checkpoint contains the last command, like the trainer's. Raises CheckpointError."""
        started_s, saving = await self._begin_last(entry_id)
        path = await self._commit(saving)
        saved = saved_event(saving, path, self._clock.now_s() - started_s)
        await self._announce(saved, version=saved.weights.version, cursor=saved.cursor)

    async def _until(self, version: int) -> None:
        """Until so many batches are trained."""
        while self._ledger.version < version:
            await self._stepped.wait()

    async def _pass(self, groups: Sequence[PromptGroup]) -> dict[RowId, Valued]:
        """Value some samples, between two rounds. The version is that of before, so it is never told too new."""
        weights = WeightIdentity(epoch=self._fence.epoch, version=self._ledger.version)
        found = await self._in_thread(lambda: self._values.values(groups))
        return {row: (values, weights) for row, values in found.items()}


Valued = tuple[NDArray[np.float32], WeightIdentity]
"""([R] values, the weights that they are of)."""


class ValuesTask:
    """Values of one sample at a time; what arrives during one pass of the critic is the next pass.

    value: samples by group -> what they are worth, by row.  until: waits for a version.  max_lag: batches that it may
    be behind the sample's.
    """

    def __init__(
        self,
        rows: RowStore,
        worker_id: WorkerId,
        value: Callable[[Sequence[PromptGroup]], Coroutine[Any, Any, Mapping[RowId, Valued]]],
        until: Callable[[int], Coroutine[Any, Any, None]],
        max_lag: int,
    ) -> None:
        self._rows = rows
        self._worker_id = worker_id
        self._passes = sample_passes(value)
        self._until = until
        self._max_lag = max_lag

    async def __call__(self, unit: Unit) -> Commit:
        """Values of one row. Raises MessageError for columns that do not decode."""
        if not is_evaluation(unit.unit_id):
            await self._until(batch_of(unit.unit_id) - self._max_lag)
        group = await read_sample(self._rows, unit, self._worker_id)
        if isinstance(group, Commit):
            return group
        row_id = RowId(unit.unit_id)
        if is_evaluation(row_id):  # nobody trains it, and its advantages wait for values like all others
            values, weights = (
                np.zeros(len(group.samples[0].response_ids), np.float32),
                WeightIdentity(epoch=0, version=0),
            )
        else:
            values, weights = await self._passes.take(group)
        faults.point("critic.valued")
        columns = {
            Column.VALUES: encode_array(Column.VALUES, values),
            Column.VALUE_WEIGHTS: encode_array(Column.VALUE_WEIGHTS, [weights.epoch, weights.version]),
        }
        return Commit(rows=(RowWrite(row_id=row_id, columns=columns),))
