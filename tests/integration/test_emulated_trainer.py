"""The emulated trainer: it tells, publishes, saves and resumes like any trainer; its time is what it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.trainer_run import TrainerRun, tiny_settings
from transport.broker import keys
from transport.contracts.ledger import newest_checkpoint
from transport.contracts.messages import (
    CheckpointSaved,
    RoundDone,
    StepDone,
    TrainerReady,
    WeightManifest,
    manifest_decoder,
)
from transport.contracts.settings import EmulatedSettings
from transport.contracts.types import GroupId, RowId, WorkerId
from transport.process.clock import MonotonicClock
from workers.generation.emulated import EmulatedLink
from workers.trainer.learner import EmulatedLearner, PromptGroup, TrainingSample
from workers.trainer.worker import TrainerWorker
from workers.weights.publish import WeightPublisher

COSTS = EmulatedSettings(time_scale=0.5, round_s=1.0, train_token_s=0.1, optimizer_s=3.0)
ROWS, TOKENS = 9, 34
"""Of a batch that ``TrainerRun.send_batch`` sends in two rounds."""


@pytest.fixture
def run(tmp_path: Path) -> TrainerRun:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text("{}")
    return TrainerRun(model_dir, tmp_path / "run", tiny_settings(engine="emulated"))


async def train(run: TrainerRun) -> list[float]:
    """Train what was sent. Returns the seconds that the learner took, one after another."""
    run.incarnation += 1
    slept: list[float] = []
    await asyncio.to_thread(run.run_dir.mkdir, exist_ok=True)
    learner = EmulatedLearner(COSTS, WeightPublisher("emulated-test", run.run_dir), slept.append)
    worker = TrainerWorker(
        run.broker,
        run.settings,
        WorkerId(f"train-0.{run.incarnation}"),
        run.model_dir,
        run.run_dir,
        learner,
        MonotonicClock(),
    )
    await worker.run()
    return slept


async def manifests(run: TrainerRun) -> list[WeightManifest]:
    entries = await run.broker.read(keys.WEIGHTS, "0-0", count=9)
    return [manifest_decoder.decode(entry.entry.payload) for entry in entries]


async def test_it_takes_the_time_it_is_told(run: TrainerRun):
    await run.send_batch(0)
    await run.finish()
    slept = await train(run)
    assert len(slept) == 3
    assert sum(slept[:2]) == pytest.approx(0.5 * (2 * 1.0 + 0.1 * TOKENS))
    assert slept[2] == pytest.approx(0.5 * 3.0)


async def test_it_tells_what_a_trainer_tells_and_goes_on_from_its_checkpoint(run: TrainerRun):
    await run.send_batch(0, checkpoint=True)
    await run.finish()
    await train(run)
    await run.send_batch(1)
    await run.finish()
    await train(run)
    kinds = [type(event) for event in await run.events()]
    batch = [RoundDone, RoundDone, StepDone]
    again = [TrainerReady, StepDone, *batch, CheckpointSaved]
    assert kinds == [TrainerReady, *batch, CheckpointSaved, CheckpointSaved, *again]
    found = newest_checkpoint(run.run_dir / "checkpoints")
    assert found is not None
    ledger = found[1]
    assert {key: len(rows) for key, rows in ledger.rows().items()} == {(0, 0): ROWS, (1, 0): ROWS}
    published = [(one.weights.epoch, one.weights.version) for one in await manifests(run)]
    assert published == [(1, 0), (1, 1), (2, 1), (2, 2)]


async def test_a_trainer_stays_until_its_last_word_is_heard_and_says_it_again_to_a_broker_that_lost_it(run: TrainerRun):
    await run.broker.put_meta(keys.STATE, keys.STATE_RUNNING)
    await run.send_batch(0)
    await run.finish()
    before = run.server.snapshot()
    training = asyncio.create_task(train(run))
    await run.until_told(CheckpointSaved)
    run.server.restore(before)
    await run.until_told(CheckpointSaved)
    assert [type(event) for event in await run.told(StepDone, CheckpointSaved)] == [StepDone, CheckpointSaved]
    assert not training.done()
    await run.broker.put_meta(keys.STATE, keys.STATE_FINISHED)
    await training


async def test_it_compares_logprobs_where_it_is_told_to(run: TrainerRun):
    learner = EmulatedLearner(COSTS, None, lambda seconds: None, compares=True)

    def trained(*logprobs: float, mask: list[int] | None = None) -> dict[str, float]:
        row = TrainingSample(
            row_id=RowId("0/0/0"),
            response_ids=np.zeros(len(logprobs), np.int32),
            rollout_logprobs=np.array(logprobs, np.float32),
            advantage=1.0,
            loss_mask=None if mask is None else np.array(mask, np.uint8),
        )
        group = PromptGroup(group_id=GroupId("0/0"), prompt_ids=np.ones(2, np.int32), samples=[row])
        learner.accumulate([group])
        return learner.close(batch=0, num_rows=1, num_tokens=len(logprobs))

    assert trained(-1.0, -1.2)["logprob_mismatch"] == pytest.approx(0.1)
    assert trained(-1.0, -1.0)["logprob_mismatch"] == 0.0, "each batch by itself"
    assert trained(-1.3, 0.0, mask=[1, 0])["logprob_mismatch"] == pytest.approx(0.3), (
        "what was not sampled says nothing"
    )
    assert "logprob_mismatch" not in learner.close(batch=0, num_rows=0, num_tokens=0)


async def test_a_version_is_there_only_after_its_journey(run: TrainerRun):
    publisher = WeightPublisher("emulated-link", run.run_dir)
    run.run_dir.mkdir()
    learner = EmulatedLearner(COSTS, publisher, lambda seconds: None)
    try:
        clock = MonotonicClock()
        link = EmulatedLink(0.5)
        manifest = learner.publication(1, 1)()
        started_s = clock.now_s()
        with link.pull(manifest) as tensors:
            assert tensors == {}
        assert clock.now_s() - started_s >= 0.5
        with EmulatedLink(0.0, computes=True).pull(manifest) as tensors:
            assert tensors["version"].tolist() == [1], "a real engine behind it computes with what came"
    finally:
        learner.retract()


def test_workers_of_a_replay_import_no_torch():
    """Or they would take seconds to start."""
    modules = (
        "workers.commands.build, workers.generation.emulated, workers.generation.emulated, workers.generation.worker, "
        "workers.trainer.learner, workers.weights.publish, workers.trainer.worker"
    )
    code = f"import sys; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=90, check=False).returncode == 0
