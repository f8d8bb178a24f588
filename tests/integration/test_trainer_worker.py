"""The trainer on an in-memory run: what it tells, what it refuses, and that it goes on exactly from a checkpoint."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.explicit_ids import append_at
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.trainer_run import DigestPublisher, TrainerRun, close_of, round_of, tiny_settings
from tests.fakes.training import make_groups
from transport.broker import keys
from transport.broker.base import Commit, Entry, GroupWrite
from transport.contracts.ledger import newest_checkpoint
from transport.contracts.messages import (
    CheckpointSaved,
    RoundDone,
    RowsMissing,
    StepDone,
    TrainerReady,
    WeightManifest,
    manifest_decoder,
)
from transport.contracts.settings import DataPart, DataSettings, LivenessSettings, ModelSettings, PipelineSettings
from transport.contracts.types import Column, RunName
from transport.errors import FencedError, SegmentSpaceError
from transport.rows.columns import RowStore, encode_array
from workers.errors import CheckpointError, PublicationError, ResumeMismatchError, RoundsError, RunFilesError
from workers.models import prepare_model
from workers.trainer import placing
from workers.trainer.checkpoint import (
    CheckpointStore,
    check_base_model,
    check_fingerprint,
    fingerprint,
    newest_model,
)
from workers.trainer.learner import PromptGroup
from workers.trainer.policy.export import Exporter
from workers.trainer.policy.stored import StoredTensors


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> TrainerRun:
    return TrainerRun(model_dir, tmp_path / "run", tiny_settings())


async def train(run: TrainerRun, batches: Sequence[int], *, checkpoint_after: int = -1) -> dict[int, str]:
    """Send batches and the end, train them, return the digest of each version."""
    for batch in batches:
        await run.send_batch(batch, checkpoint=batch == checkpoint_after)
    await run.finish()
    publisher = DigestPublisher()
    await run.trainer(publisher).run()
    return publisher.digests


async def test_a_batch_is_told_from_ready_to_saved(run: TrainerRun) -> None:
    digests = await train(run, [0, 1])
    ready, *rest = await run.events()
    assert isinstance(ready, TrainerReady)
    assert (ready.weights.version, ready.weights.epoch, ready.weights.digest) == (0, 1, digests[0])
    kinds = [type(event) for event in rest]
    assert kinds == [RoundDone, RoundDone, StepDone, RoundDone, RoundDone, StepDone, CheckpointSaved]
    step = rest[2]
    assert isinstance(step, StepDone)
    assert (step.batch, step.weights.version, step.weights.digest) == (0, 1, digests[1])
    assert (step.num_rows, step.num_tokens) == (9, 34)
    assert step.metrics["grad_norm"] > 0
    assert step.metrics["skipped_nonfinite"] == 0
    assert {
        "loss",
        "lr",
        "entropy",
        "computed_tokens",
        "logprob_mismatch",
        "train_s",
        "wait_s",
        "publish_s",
        "publish_wait_s",
    } <= step.metrics.keys()
    assert len(set(digests.values())) == 3
    manifests = [manifest_decoder.decode(e.entry.payload) for e in await run.broker.read(keys.WEIGHTS, "0-0", count=9)]
    assert [manifest.weights.version for manifest in manifests] == [0, 1, 2]


class HeldPublisher(DigestPublisher):
    """Version 1 comes when ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def publish(self, epoch: int, version: int, *arguments: Any, **options: Any) -> WeightManifest:
        if version == 1:
            assert self.go.wait(60)
        return super().publish(epoch, version, *arguments, **options)


async def test_a_version_is_published_beside_the_next_batch_and_told_before_it(run: TrainerRun, tmp_path: Path) -> None:
    """The rounds of the second batch are trained while version 1 is still read; it is what the first step made."""
    expected = await train(TrainerRun(run.model_dir, tmp_path / "alone", run.settings), [0, 1])
    for batch in range(2):
        await run.send_batch(batch)
    await run.finish()
    publisher = HeldPublisher()
    trainer = run.trainer(publisher)
    task = asyncio.create_task(trainer.run())
    async with asyncio.timeout(60):
        while trainer.activity().counters["rounds"] < 4 or trainer.activity().doing != "publishing":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    before = await run.events()
    publisher.go.set()
    await task
    assert [type(event) for event in before] == [TrainerReady, RoundDone, RoundDone]
    kinds = [type(event) for event in (await run.events())[1:]]
    assert kinds == [RoundDone, RoundDone, StepDone, RoundDone, RoundDone, StepDone, CheckpointSaved]
    assert publisher.digests == expected
    steps = [event.metrics for event in await run.told(StepDone) if isinstance(event, StepDone)]
    assert steps[0]["publish_wait_s"] == 0 < steps[1]["publish_wait_s"] <= steps[0]["publish_s"]


async def test_a_publication_that_hangs_ends_the_trainer_by_name(run: TrainerRun) -> None:
    run.settings = msgspec.structs.replace(run.settings, liveness=LivenessSettings(stall_s=0.5))
    await run.broker.put_meta(keys.STATUS, b"{}")
    for batch in range(2):
        await run.send_batch(batch)
    publisher = HeldPublisher()
    try:
        with pytest.raises(PublicationError, match=r"version 1 is not published after 1 s"):
            await run.trainer(publisher).run()
    finally:
        publisher.go.set()
    assert [type(event) for event in await run.events()] == [TrainerReady, RoundDone, RoundDone]


class FullPublisher(DigestPublisher):
    """There is room for version 0 only."""

    def publish(self, epoch: int, version: int, *arguments: Any, **options: Any) -> WeightManifest:
        if version > 0:
            raise SegmentSpaceError(1000, "/dev/shm is full")
        return super().publish(epoch, version, *arguments, **options)


async def test_a_publication_that_fails_ends_the_trainer_and_tells_of_no_version(run: TrainerRun) -> None:
    await run.send_batch(0)
    await run.broker.put_meta(keys.STATUS, b"{}")
    async with asyncio.timeout(60):
        with pytest.raises(SegmentSpaceError, match=r"/dev/shm is full"):
            await run.trainer(FullPublisher()).run()
    assert [type(event) for event in await run.events()] == [TrainerReady, RoundDone, RoundDone]


async def test_resuming_goes_on_exactly(model_dir: Path, tmp_path: Path) -> None:
    whole = TrainerRun(model_dir, tmp_path / "whole", tiny_settings())
    expected = await train(whole, range(6))
    parts = TrainerRun(model_dir, tmp_path / "parts", tiny_settings())
    first = await train(parts, range(3))
    second = await train(parts, range(3, 6))
    assert first == {version: expected[version] for version in range(4)}
    assert second == {version: expected[version] for version in range(3, 7)}
    epochs = [event.weights.epoch for event in await parts.told(TrainerReady) if isinstance(event, TrainerReady)]
    assert epochs == [1, 2]


async def test_a_killed_trainer_replays_the_log_to_the_same_weights(run: TrainerRun, tmp_path: Path) -> None:
    """Killed after version 4 with a checkpoint at 2: versions 3 and 4 are trained again and come out the same."""
    for batch in range(4):
        await run.send_batch(batch, checkpoint=batch == 1)
    publisher = DigestPublisher()
    task = asyncio.create_task(run.trainer(publisher).run())
    await run.until_told(StepDone, 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await train(run, [4])
    assert min(again) == 2
    assert {v: again[v] for v in (2, 3, 4)} == {v: publisher.digests[v] for v in (2, 3, 4)}
    found = newest_checkpoint(run.run_dir / "checkpoints")
    assert found is not None
    ledger = found[1]
    assert {key: len(rows) for key, rows in ledger.rows().items()} == {(batch, 0): 9 for batch in range(5)}


async def test_an_end_that_stands_on_the_log_is_not_that_of_a_run_that_was_resumed_to_go_further(
    run: TrainerRun,
) -> None:
    """As when its newest checkpoint is damaged: the trainer reads from before that end."""
    await run.broker.put_meta(keys.STATE, keys.STATE_RUNNING)
    await run.send_batch(0)
    await run.finish()
    training = asyncio.create_task(run.trainer(DigestPublisher()).run())
    await run.until_told(CheckpointSaved)
    await run.send_batch(1)
    await run.finish()
    await run.until_told(CheckpointSaved, 2)
    assert not training.done()
    await run.broker.put_meta(keys.STATE, keys.STATE_FINISHED)
    await asyncio.wait_for(training, 60)
    steps = [event.weights.version for event in await run.events() if isinstance(event, StepDone)]
    assert steps == [1, 2]


async def test_who_starts_from_a_checkpoint_tells_its_steps_again(run: TrainerRun) -> None:
    """The broker was lost together with the trainer: nobody may have read of them."""
    await train(run, [0, 1])
    steps = await run.told(StepDone)
    run.broker = MemoryBroker(MemoryServer(), RunName("run"))
    await train(run, [2])
    ready, *again = await run.events()
    assert isinstance(ready, TrainerReady), "before its steps, which are then of a trainer that was replaced"
    assert again[:2] == steps
    assert [event.batch for event in again if isinstance(event, StepDone)] == [0, 1, 2]


async def test_a_row_that_the_ledger_knows_is_refused(model_dir: Path, tmp_path: Path) -> None:
    plain = TrainerRun(model_dir, tmp_path / "plain", tiny_settings())
    expected = await train(plain, [0])
    run = TrainerRun(model_dir, tmp_path / "twice", tiny_settings())
    groups = make_groups(seed=0, batch=0)
    await run.write_groups(groups)
    await run.write_rows(groups)
    await run.send(round_of(groups[:2], 0, 0), round_of(groups[1:], 0, 1), close_of(groups, 0))
    digests = await train(run, [])
    refused = [event.refused for event in await run.told(RoundDone) if isinstance(event, RoundDone)]
    assert refused == [(), ("0/1/0", "0/1/1")]
    assert digests[1] == expected[1]


async def test_rows_that_are_missing_are_asked_for_and_then_trained(run: TrainerRun) -> None:
    groups = make_groups(seed=0, batch=0)
    await run.write_groups(groups)
    await run.write_rows(groups[:2])
    await run.send(round_of(groups, 0, 0), close_of(groups, 0))
    await run.finish()
    publisher = DigestPublisher()
    task = asyncio.create_task(run.trainer(publisher).run())
    await run.until_told(RowsMissing)
    await run.write_rows(groups[2:])
    await task
    (missing,) = await run.told(RowsMissing)
    assert isinstance(missing, RowsMissing)
    assert missing.row_ids == tuple(sample.row_id for sample in groups[2].samples)
    assert 1 in publisher.digests


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
async def test_rows_that_came_back_with_other_lengths_are_normalised_by_what_they_are(
    model_dir: Path,
    tmp_path: Path,
    aggregation: Literal["token_mean", "sequence_mean"],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The log's numbers are of the rows that a broker lost; the gradient is that of a log with the right ones."""
    settings = tiny_settings()
    algorithm = msgspec.structs.replace(settings.algorithm, aggregation=aggregation)
    settings = msgspec.structs.replace(settings, algorithm=algorithm)
    lost, made_again = make_groups(seed=0), make_groups(seed=1, response_tokens=((9, 2, 5), (3, 8), (1, 1, 2, 6)))
    digests: list[dict[int, str]] = []
    for name, said in (("before", lost), ("after", made_again)):
        run = TrainerRun(model_dir, tmp_path / name, settings)
        await run.write_groups(made_again)
        await run.write_rows(made_again)
        await run.send(round_of(said, 0, 0), close_of(said, 0))
        digests.append(await train(run, []))
    assert digests[0] == digests[1]
    assert capsys.readouterr().out.count("normalised by what it held") == 1


async def test_an_empty_mini_batch_makes_a_version_without_a_step(run: TrainerRun) -> None:
    await run.send(close_of([], 0))
    digests = await train(run, [1])
    assert digests[0] == digests[1] != digests[2]


async def test_mini_batches_and_passes_step_several_times_a_version(model_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings(mini_batches=2, epochs=2)
    algorithm = msgspec.structs.replace(settings.algorithm, old_logprobs="recomputed")
    run = TrainerRun(model_dir, tmp_path, msgspec.structs.replace(settings, algorithm=algorithm))
    groups = make_groups(seed=0, batch=0)
    await run.write_groups(groups)
    await run.write_rows(groups)
    await run.send(round_of(groups, 0, 0, kind="logprobs"))
    for pass_index in range(2):
        for part, some in enumerate((groups[:2], groups[2:])):
            place = {"pass_index": pass_index, "mini_batch": part}
            last = (pass_index, part) == (1, 1)
            await run.send(round_of(some, 0, 1 + 2 * pass_index + part, **place))
            await run.send(close_of(some, 0, finishes_batch=last, **place))
    digests = await train(run, [])
    assert sorted(digests) == [0, 1]
    (step,) = await run.told(StepDone)
    assert isinstance(step, StepDone)
    assert step.num_rows == 18
    assert step.metrics["logprob_mismatch"] > 0
    found = newest_checkpoint(run.run_dir / "checkpoints")
    assert found is not None
    ledger = found[1]
    assert sorted(ledger.rows()) == [(0, 0), (0, 1)]


async def test_the_final_model_is_a_plain_directory(run: TrainerRun, model_dir: Path) -> None:
    await train(run, [0])
    directory = run.run_dir / "model"
    final = AutoModelForCausalLM.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert final.dtype == base.dtype
    assert final.config._attn_implementation == base.config._attn_implementation
    tokens = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], return_tensors="pt", return_dict=False, add_generation_prompt=True
    )
    difference = (final(tokens).logits - base(tokens).logits).abs().max()
    assert 0 < difference < 100
    assert not list(directory.glob("*.py"))


async def test_a_checkpoint_of_a_live_run_is_exported_in_either_dtype(
    run: TrainerRun, model_dir: Path, tmp_path: Path
) -> None:
    """The trainer still waits for batches; what it removes while it is read is read to its end."""
    await run.send_batch(0, checkpoint=True)
    task = asyncio.create_task(run.trainer(DigestPublisher()).run())
    await run.until_told(CheckpointSaved)
    checkpoints, out = run.run_dir / "checkpoints", tmp_path / "out"
    path, meta, weights = newest_model(checkpoints, 1, StoredTensors.open)
    check_base_model(path, meta, model_dir)
    Exporter(model_dir=model_dir).write(weights, out)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert (meta.version, exported.dtype) == (1, torch.float32)
    assert (out / "config.json").read_bytes() == (model_dir / "config.json").read_bytes()
    trained = load_file(checkpoints / "step-1" / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in exported.named_parameters())
    tokens = torch.arange(9)[None]
    Exporter(model_dir=model_dir, dtype="bfloat16").write(weights, tmp_path / "half")
    weights.close()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "half").chat_template
    assert (half.float()(tokens).logits - exported(tokens).logits).abs().max() < 0.1
    sizes = [(where / "model.safetensors").stat().st_size for where in (tmp_path / "half", out)]
    assert sizes[0] < 0.6 * sizes[1]

    def remove_and_load(path: Path, names: list[str]) -> StoredTensors:
        shutil.rmtree(path)
        return StoredTensors.open(path, names)

    with pytest.raises(RunFilesError, match=r"no whole checkpoint of version 2; there are those of 1 "):
        newest_model(checkpoints, 2, StoredTensors.open)
    with pytest.raises(RunFilesError, match=r"step-1: .*No such file.*a run saves one every"):
        newest_model(checkpoints, None, remove_and_load)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_after_a_broker_lost_its_tail_the_trainer_tells_again_what_counts(run: TrainerRun) -> None:
    await run.send_batch(0, checkpoint=True)
    before = run.server.snapshot()
    publisher = DigestPublisher()
    task = asyncio.create_task(run.trainer(publisher).run())
    await run.until_told(CheckpointSaved)
    run.server.restore(before)
    assert await run.events() == []
    await run.until_told(StepDone)
    await run.until_told(CheckpointSaved)
    kinds = [type(event) for event in await run.events()]
    assert kinds == [TrainerReady, RoundDone, StepDone, CheckpointSaved], "as it happened"
    (entry,) = await run.broker.read(keys.WEIGHTS, "0-0", count=9)
    assert manifest_decoder.decode(entry.entry.payload).weights.digest == publisher.digests[1]
    await run.send_batch(1)
    await run.finish()
    await task
    assert sorted(publisher.digests) == [0, 1, 2]


async def test_the_trainer_that_was_replaced_can_tell_nothing_more(run: TrainerRun) -> None:
    await run.send_batch(0)
    publisher = DigestPublisher()
    task = asyncio.create_task(run.trainer(publisher).run())
    await run.until_told(StepDone)
    await run.broker.acquire_epoch("trainer")
    await run.send_batch(1)
    with pytest.raises(FencedError):
        await task


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": ModelSettings(path="another")}, "model.path"),
        ({"data": DataSettings(task="leg_counting")}, "data.task"),
        ({"pipeline": PipelineSettings(group_size=16, groups_per_batch=3)}, "pipeline.group_size"),
    ],
)
async def test_another_model_data_set_or_group_size_is_no_resume(
    run: TrainerRun, change: dict[str, object], named: str
) -> None:
    await train(run, [0])
    run.settings = msgspec.structs.replace(run.settings, **change)
    with pytest.raises(ResumeMismatchError, match=named):
        await run.trainer(DigestPublisher()).run()


async def test_a_checkpoint_of_version_0_1_is_gone_on_from(run: TrainerRun) -> None:
    """It has no steps file, and knows no setting that came later: it was taken for another run's."""
    await train(run, [0])
    for checkpoint in (run.run_dir / "checkpoints").iterdir():
        meta = json.loads((checkpoint / "meta.json").read_text())
        for later in ("data.config", "data.split", "data.revision"):
            del meta["fingerprint"][later]
        del meta["files"]["steps.msgpack"], meta["checksum"]
        (checkpoint / "steps.msgpack").unlink()
        (checkpoint / "meta.json").write_text(json.dumps(meta))
    found = CheckpointStore(run.run_dir / "checkpoints", keep=2).load_latest()
    assert found is not None
    assert found.meta.version == 1
    check_fingerprint(found, fingerprint(run.settings, run.model_dir))
    other = msgspec.structs.replace(run.settings, data=DataSettings(revision="other"))
    with pytest.raises(ResumeMismatchError, match=r'data\.revision: "" in the checkpoint, "other" now'):
        check_fingerprint(found, fingerprint(other, run.model_dir))


async def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run: TrainerRun, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = await train(run, [0, 1], checkpoint_after=0)
    weights = run.run_dir / "checkpoints" / "step-2" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    publisher = DigestPublisher()
    await run.trainer(publisher).run()  # the end still stands on the log
    assert publisher.digests == {1: digests[1], 2: digests[2]}
    said = capsys.readouterr().out
    assert "step-2" in said
    assert "model.safetensors is not what was written" in said
    damaged = [event.damaged for event in await run.told(TrainerReady) if isinstance(event, TrainerReady)]
    assert damaged[0] == ()
    assert [text.endswith("step-2: model.safetensors is not what was written") for text in damaged[1]] == [True]


async def test_a_log_that_begins_after_what_the_weights_contain_is_not_trained(run: TrainerRun) -> None:
    await train(run, [0, 1])
    for path in (run.run_dir / "checkpoints").glob("*/meta.json"):
        path.write_text("{")
    await run.broker.trim(keys.ROUNDS, "4-0")  # what the checkpoints before this one contain
    told = r"goes on with batch 1, but the weights are of version 0; damaged checkpoints: .*step-2: .*put back a copy"
    with pytest.raises(RoundsError, match=told):
        await run.trainer(DigestPublisher()).run()
    assert len(await run.told(StepDone)) == 2, "of the first trainer"


async def test_a_full_disk_leaves_the_former_checkpoint_and_is_tried_again(
    run: TrainerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run.model_dir)
    free = [10**12, 1000, 10**12, 10**12]  # the second checkpoint finds no room

    monkeypatch.setattr(placing.shutil, "disk_usage", lambda path: usage._replace(free=free.pop(0)))
    for batch in range(3):
        await run.send_batch(batch, checkpoint=batch < 2)
    await train(run, [])
    saved = [event.weights.version for event in await run.told(CheckpointSaved) if isinstance(event, CheckpointSaved)]
    assert saved == [1, 3, 3]


async def test_a_full_disk_at_the_end_says_what_it_takes(run: TrainerRun, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(run.model_dir)
    monkeypatch.setattr(placing.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"checkpoints/step-1 \(\d+ bytes needed\): only 1000 bytes are free"):
        await train(run, [0])
    assert not list((run.run_dir / "checkpoints").iterdir())


async def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(run: TrainerRun) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    await run.send_batch(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the weights have 313 KB
    try:
        with pytest.raises(CheckpointError, match=r"step-1 .*File too large"):
            await train(run, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((run.run_dir / "checkpoints").iterdir())


async def test_a_checkpoint_says_in_json_what_it_is(run: TrainerRun) -> None:
    await train(run, [0, 1])
    (directory,) = (run.run_dir / "checkpoints").iterdir()
    meta = json.loads((directory / "meta.json").read_text())
    assert (meta["version"], meta["cursor"], meta["source_position"]) == (2, "7-1", "after 1")
    assert json.loads(meta["fingerprint"]["data.task"]) == "chain_sum"


async def test_what_no_trainer_can_do_ends_it_by_name(run: TrainerRun) -> None:
    groups = make_groups(seed=0, batch=0)
    await run.write_groups(groups)
    await run.write_rows(groups)
    other = [replace(group, group_id=group.group_id.replace("0/", "1/")) for group in make_groups(seed=0, batch=1)]
    await run.write_groups(other)
    await run.write_rows(other)
    await run.send(round_of(groups, 0, 0), round_of(other, 1, 0))
    with pytest.raises(RoundsError, match="before"):
        await run.trainer(DigestPublisher()).run()


async def test_an_unreadable_round_ends_it_by_name(run: TrainerRun) -> None:
    await append_at(run.broker, keys.ROUNDS, Entry(payload=b"\xc1"), "1-1")
    with pytest.raises(RoundsError, match="1-1"):
        await run.trainer(DigestPublisher()).run()


async def test_silence_on_the_log_ends_it_by_name(run: TrainerRun) -> None:
    liveness = msgspec.structs.replace(run.settings.liveness, stall_s=0.5)
    run.settings = msgspec.structs.replace(run.settings, liveness=liveness)
    with pytest.raises(RoundsError, match="no command after 0-0"):
        await run.trainer(DigestPublisher()).run()


async def test_a_paused_run_is_waited_for_as_long_as_its_orchestrator_lives(run: TrainerRun) -> None:
    liveness = msgspec.structs.replace(run.settings.liveness, stall_s=0.1)
    run.settings = msgspec.structs.replace(run.settings, liveness=liveness)
    await run.broker.put_meta(keys.STATUS, b"{}")
    task = asyncio.create_task(run.trainer(DigestPublisher()).run())
    await run.until_told(TrainerReady)
    done, _ = await asyncio.wait({task}, timeout=3.0)  # several looks at a log on which nothing comes
    assert not done
    await run.send_batch(0)
    await run.finish()
    await task
    assert [event.batch for event in await run.told(StepDone) if isinstance(event, StepDone)] == [0]


async def test_rows_are_trained_with_what_their_part_has(model_dir: Path, tmp_path: Path) -> None:
    """Groups of part "a" are trained as a run of that loss alone trains them; the run's own holds for none of them."""

    async def weights_of(name: str, part: str, mix: dict[str, DataPart], **algorithm: object) -> str:
        settings = tiny_settings()
        chosen = msgspec.structs.replace(settings.algorithm, **algorithm)
        data = msgspec.structs.replace(settings.data, mix=mix)
        settings = msgspec.structs.replace(settings, algorithm=chosen, data=data)
        run = TrainerRun(model_dir, tmp_path / name, settings)
        groups = [replace(group, part=part) for group in make_groups()]
        await run.write_groups(groups)
        await run.write_rows(groups)
        await run.send(round_of(groups[:2], 0, 0), round_of(groups[2:], 0, 1), close_of(groups, 0))
        await run.finish()
        publisher = DigestPublisher()
        await run.trainer(publisher).run()
        return publisher.digests[1]

    mix = {"a": DataPart(loss="gspo", clip_low=0.03), "b": DataPart()}
    of_parts = [await weights_of(part, part, mix) for part in ("a", "b")]
    alone = [await weights_of("gspo", "", {}, loss="gspo", clip_low=0.03), await weights_of("plain", "", {})]
    assert of_parts == alone
    assert alone[0] != alone[1]


async def test_advantages_of_tokens_are_trained_where_rows_have_them(model_dir: Path, tmp_path: Path) -> None:
    def with_tokens(factor: float) -> list[PromptGroup]:
        """The first group alone has them: at each token ``factor`` times that before."""
        first, *others = make_groups()
        samples = [
            replace(one, advantages=(one.advantage * factor ** np.arange(len(one.response_ids))).astype(np.float32))
            for one in first.samples
        ]
        return [replace(first, samples=samples), *others]

    digests: list[str] = []
    for number, groups in enumerate((make_groups(), with_tokens(1.0), with_tokens(0.5))):
        run = TrainerRun(model_dir, tmp_path / str(number), tiny_settings())
        await run.write_groups(groups)
        await run.write_rows(groups)
        await run.send(round_of(groups, 0, 0), close_of(groups, 0))
        await run.finish()
        publisher = DigestPublisher()
        await run.trainer(publisher).run()
        digests.append(publisher.digests[1])
    assert digests[0] == digests[1] != digests[2]


async def test_tokens_of_older_weights_count_for_less_where_the_settings_say_so(
    model_dir: Path, tmp_path: Path
) -> None:
    """Of batch 1, by the version that sampled it, against advantages of which half is left."""
    batches = [make_groups(batch=batch) for batch in range(2)]
    halved = [
        replace(group, samples=[replace(one, advantage=one.advantage / 2) for one in group.samples])
        for group in batches[1]
    ]
    digests: list[str] = []
    for number, (decay, version, groups) in enumerate(
        [(1.0, 0, batches[1]), (0.5, 1, batches[1]), (0.5, 0, batches[1]), (1.0, 0, halved), (0.7, 0, batches[1])]
    ):
        settings = tiny_settings()
        algorithm = msgspec.structs.replace(settings.algorithm, age_decay=decay)
        run = TrainerRun(model_dir, tmp_path / str(number), msgspec.structs.replace(settings, algorithm=algorithm))
        for batch, (rows, of) in enumerate([(batches[0], 0), (groups, version)]):
            await run.write_groups(rows)
            await run.write_rows(rows, version=of)
            await run.send(round_of(rows, batch, 0), close_of(rows, batch))
        await run.finish()
        publisher = DigestPublisher()
        await run.trainer(publisher).run()
        digests.append(publisher.digests[2])
    whole, fresh, old, half, less = digests
    assert whole == fresh
    assert old == half
    assert len({whole, half, less}) == 3


async def test_a_prompt_of_which_no_part_can_be_read_is_named(model_dir: Path, tmp_path: Path) -> None:
    settings = tiny_settings()
    data = msgspec.structs.replace(settings.data, mix={"a": DataPart(loss="gspo")})
    run = TrainerRun(model_dir, tmp_path, msgspec.structs.replace(settings, data=data))
    (group, *_) = make_groups()
    columns = {
        Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, group.prompt_ids),
        Column.TASK_ENTRY: b'{"part": 7}',
    }
    written = GroupWrite(group_id=group.group_id, size=len(group.samples), columns=columns)
    await RowStore(run.broker).commit(Commit(groups=(written,)))
    await run.write_rows([group])
    await run.send(round_of([group], 0, 0))
    with pytest.raises(RoundsError, match="group 0/0 cannot be trained: the entry of a prompt names no part"):
        await run.trainer(DigestPublisher()).run()


async def test_weights_that_are_not_finite_are_never_stepped_to(run: TrainerRun) -> None:
    groups = make_groups(seed=0, batch=0)
    bad = replace(groups[0].samples[0], advantage=float(torch.finfo(torch.float32).max))
    groups[0] = replace(groups[0], samples=[bad, *groups[0].samples[1:]])
    await run.write_groups(groups)
    await run.write_rows(groups)
    await run.send(round_of(groups, 0, 0), close_of(groups, 0))
    digests = await train(run, [1])
    assert digests[0] == digests[1] != digests[2]
    first, second = [event.metrics for event in await run.told(StepDone) if isinstance(event, StepDone)]
    assert (first["skipped_nonfinite"], second["skipped_nonfinite"]) == (1, 0)
