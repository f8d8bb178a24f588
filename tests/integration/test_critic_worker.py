"""The critic worker on an in-memory run: what it values when, what it is trained on, and what its death costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from orchestrator.loop.intake import scoring_tasks
from tests.fakes.trainer_run import TrainerRun, close_of, round_of, tiny_settings
from tests.fakes.training import make_groups
from transport.broker import keys
from transport.broker.base import Commit, RowWrite
from transport.contracts.ledger import checkpoint_dirs, critic_checkpoints_place, newest_checkpoint
from transport.contracts.messages import (
    CheckpointSaved,
    CriticReported,
    RowsMissing,
    StepDone,
    TrainerReady,
)
from transport.contracts.settings import AlgorithmSettings, CriticSettings, Settings
from transport.contracts.types import Column, GroupId, WorkerId, evaluation_id, row_id
from transport.errors import FencedError
from transport.process.clock import MonotonicClock
from transport.rows.columns import RowStore, decode_array, encode_array
from workers.critic.learner import CriticLearner
from workers.critic.worker import CriticWorker, EmulatedCritic
from workers.models import prepare_model
from workers.trainer.learner import PromptGroup


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


def settings_of(**trainer: object) -> Settings:
    return msgspec.structs.replace(
        tiny_settings(**trainer),
        algorithm=AlgorithmSettings(advantage="gae", importance_cap=0.0),
        critic=CriticSettings(lr=1e-2),
    )


@dataclass
class CriticRun(TrainerRun):
    """A run whose rounds a critic reads."""

    def critic(self) -> CriticWorker:
        self.incarnation += 1
        return CriticWorker(
            self.broker,
            self.settings,
            WorkerId(f"critic-0.{self.incarnation}"),
            self.model_dir,
            self.run_dir,
            CriticLearner(self.settings, self.model_dir),
            MonotonicClock(),
        )

    async def generate(self, groups: Sequence[PromptGroup]) -> None:
        """Samples as generation leaves them, for the critic to value."""
        await self.broker.declare_tasks(scoring_tasks(with_reference=False, with_critic=True))
        await self.write_groups(groups)
        for sample in (sample for group in groups for sample in group.samples):
            columns = {
                Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, sample.response_ids),
                Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, sample.rollout_logprobs),
            }
            await RowStore(self.broker).commit(Commit(rows=(RowWrite(row_id=sample.row_id, columns=columns),)))

    async def score(self, groups: Sequence[PromptGroup]) -> None:
        """What the advantages task would write."""
        for sample in (sample for group in groups for sample in group.samples):
            ones = np.ones(len(sample.response_ids), np.float32)
            columns = {Column.ADVANTAGE: ones[:1], Column.TOKEN_ADVANTAGES: ones, Column.RETURNS: ones}
            encoded = {column: encode_array(column, values) for column, values in columns.items()}
            await RowStore(self.broker).commit(Commit(rows=(RowWrite(row_id=sample.row_id, columns=encoded),)))

    async def values(self, groups: Sequence[PromptGroup]) -> list[Mapping[Column, bytes]]:
        """The rows, once all are valued."""
        rows = [sample.row_id for group in groups for sample in group.samples]
        async with asyncio.timeout(60):
            while True:
                read = await RowStore(self.broker).read_rows(rows, [Column.VALUES, Column.VALUE_WEIGHTS])
                if all(Column.VALUES in columns for columns in read):
                    return read
                await asyncio.sleep(0.02)

    async def until_reported(self, kind: type, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while len(await self.reports(kind)) < count:  # noqa: ASYNC110 nobody is woken
                await asyncio.sleep(0.02)

    async def reports(self, *kinds: type) -> list[TrainerReady | StepDone | CheckpointSaved]:
        events = [event for event in await self.events() if isinstance(event, CriticReported)]
        return [event.report for event in events if isinstance(event.report, kinds)]

    def ledger(self):
        found = newest_checkpoint(critic_checkpoints_place(self.settings, self.run_dir))
        assert found is not None
        return found[1]


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> CriticRun:
    return CriticRun(model_dir, tmp_path / "run", settings_of())


@asynccontextmanager
async def running(worker: CriticWorker) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def train_batch(run: CriticRun, batch: int, *, checkpoint: bool = False) -> list[PromptGroup]:
    """A whole batch, valued by the running critic, scored, and sent."""
    groups = make_groups(seed=batch, batch=batch)
    await run.generate(groups)
    await run.values(groups)
    await run.score(groups)
    await run.send(round_of(groups[:2], batch, 0), round_of(groups[2:], batch, 1))
    await run.send(close_of(groups, batch, finishes_batch=True, checkpoint=checkpoint))
    return groups


def versions_of(rows: Sequence[Mapping[Column, bytes]]) -> set[int]:
    return {int(decode_array(Column.VALUE_WEIGHTS, row[Column.VALUE_WEIGHTS])[1]) for row in rows}


async def test_samples_are_valued_and_the_same_rounds_trained(run: CriticRun) -> None:
    async with running(run.critic()):
        first = await train_batch(run, 0)
        await run.until_reported(StepDone)
        second = make_groups(seed=1, batch=1)
        await run.generate(second)
        valued = await run.values(second)
        await run.finish()
        await run.until_reported(CheckpointSaved)
    (ready,) = await run.reports(TrainerReady)
    assert (ready.weights.epoch, ready.weights.version) == (1, 0)
    (step,) = await run.reports(StepDone)
    assert isinstance(step, StepDone)
    assert step.metrics["value_loss"] == pytest.approx(0.5)  # of values 0 and returns 1
    assert {"return_mean", "value_mean", "value_clip_fraction", "grad_norm"} <= step.metrics.keys()
    assert versions_of(await run.values(first)) == {0}
    assert versions_of(valued) == {1}
    assert decode_array(Column.VALUES, valued[0][Column.VALUES]).any(), "it learnt something"
    assert run.ledger().rows() == {(0, 0): sorted(s.row_id for g in first for s in g.samples)}
    assert await run.broker.read(keys.WEIGHTS, "0-0", count=9) == [], "nobody serves the critic's weights"


async def test_a_sample_waits_for_a_version_that_is_not_too_old(run: CriticRun) -> None:
    """Those of batch 2 are in front of the one of batch 1 that version 1 needs."""
    assert run.settings.pipeline.max_staleness == 1
    async with running(run.critic()):
        later = make_groups(seed=2, batch=2)
        await run.generate(later)
        await train_batch(run, 0)
        valued = await run.values(later)
    assert versions_of(valued) == {1}


async def test_a_killed_critic_goes_on_from_its_checkpoint_and_trains_nothing_twice(
    run: CriticRun, model_dir: Path, tmp_path: Path
) -> None:
    other = CriticRun(model_dir, tmp_path / "other", run.settings)
    async with running(other.critic()):
        for batch in range(3):
            await train_batch(other, batch)
            await other.until_reported(StepDone, batch + 1)
        await other.finish()
        await other.until_reported(CheckpointSaved)
    async with running(run.critic()):
        await train_batch(run, 0, checkpoint=True)
        await run.until_reported(CheckpointSaved)
        await train_batch(run, 1)
        await run.until_reported(StepDone, 2)  # beyond its checkpoint: that is lost with it
    async with running(run.critic()):
        await run.until_reported(StepDone, 4)  # 0 is told again out of its checkpoint, 1 is trained again
        await train_batch(run, 2)
        await run.finish()
        await run.until_reported(CheckpointSaved, 2)
    readies = await run.reports(TrainerReady)
    assert [(one.weights.epoch, one.weights.version) for one in readies] == [(1, 0), (2, 1)]
    assert run.ledger().rows() == other.ledger().rows()
    ends = [checkpoint_dirs(critic_checkpoints_place(one.settings, one.run_dir))[0] for one in (run, other)]
    mine, theirs = (load_file(Path(str(end)) / "model.safetensors") for end in ends)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


async def test_it_stays_after_the_last_command_because_a_resumed_run_goes_on(run: CriticRun) -> None:
    await run.broker.put_meta(keys.STATE, keys.STATE_RUNNING)
    async with running(run.critic()):
        await run.finish()
        await run.until_reported(CheckpointSaved)
        await train_batch(run, 0)
        await run.until_reported(StepDone)
        await run.finish()
        await run.until_reported(CheckpointSaved, 2)
    assert run.ledger().version == 1


async def test_a_critic_that_was_replaced_is_refused(run: CriticRun) -> None:
    task = asyncio.create_task(run.critic().run())
    await run.until_reported(TrainerReady)
    await run.broker.acquire_epoch("critic", at_least=0)
    await train_batch(run, 0)
    with pytest.raises(FencedError):
        await task


async def test_a_trainer_and_a_critic_take_no_role_from_one_another(run: CriticRun) -> None:
    async with running(run.critic()):
        await run.until_reported(TrainerReady)
        assert await run.broker.acquire_epoch("trainer", at_least=0) == 1
        await train_batch(run, 0)
        await run.until_reported(StepDone)


async def test_rows_without_returns_are_asked_for(run: CriticRun) -> None:
    async with running(run.critic()):
        groups = make_groups()
        await run.generate(groups)
        await run.values(groups)
        await run.send(round_of(groups, 0, 0))
        await run.until_told(RowsMissing)


async def test_answers_of_an_evaluation_are_worth_nothing_and_wait_for_no_version(run: CriticRun) -> None:
    group = alone(evaluation_id(7, 0))
    async with running(run.critic()):
        await run.generate([group])
        (row,) = await run.values([group])
    assert not decode_array(Column.VALUES, row[Column.VALUES]).any()


def alone(group_id: GroupId) -> PromptGroup:
    (group,) = make_groups(response_tokens=((4,),), prompt_tokens=(5,))
    (sample,) = group.samples
    return replace(group, group_id=group_id, samples=[replace(sample, row_id=row_id(group_id, 0))])


async def test_an_emulated_critic_does_all_but_learn(run: CriticRun) -> None:
    worker = CriticWorker(
        run.broker,
        run.settings,
        WorkerId("critic-0.1"),
        run.model_dir,
        run.run_dir,
        EmulatedCritic(run.settings.emulated, lambda seconds: None),
        MonotonicClock(),
    )
    async with running(worker):
        groups = await train_batch(run, 0)
        await run.finish()
        await run.until_reported(CheckpointSaved)
        assert worker.activity().counters["values_done"] == 9.0
    assert run.ledger().rows() == {(0, 0): sorted(s.row_id for g in groups for s in g.samples)}
