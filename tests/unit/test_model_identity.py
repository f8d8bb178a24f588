"""Which differences between two model directories keep a worker out of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.contracts.messages import WorkerLost, encode, event_decoder
from transport.contracts.settings import Settings
from transport.contracts.types import RunName, WorkerId
from transport.contracts.user_files import ModelIdentity, identify_model
from transport.errors import FatalError
from workers.commands.build import check_model, with_critic_model
from workers.errors import ModelError, ModelMismatchError

CONFIG = {"model_type": "qwen3", "vocab_size": 3, "transformers_version": "5.0", "dtype": "float32"}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
    "added_tokens": [],
}


def directory(path: Path, config: dict[str, Any] = CONFIG, tokenizer: dict[str, Any] = TOKENIZER) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_copies_of_one_model_are_the_same(tmp_path: Path):
    saved_again = {**CONFIG, "transformers_version": "6.1", "dtype": "bfloat16"}
    reordered = dict(reversed({**TOKENIZER, "truncation": {"max_length": 8}}.items()))
    first = identify_model(directory(tmp_path / "a"))
    assert identify_model(directory(tmp_path / "b", saved_again, reordered)) == first
    assert first.differs_in(first) == ""


def test_another_vocabulary_or_shape_is_another_model(tmp_path: Path):
    first = identify_model(directory(tmp_path / "a"))
    swapped = {**TOKENIZER, "model": {"type": "BPE", "vocab": {"a": 1, "b": 0}}}
    assert identify_model(directory(tmp_path / "b", tokenizer=swapped)).differs_in(first) == "tokenizer"
    assert identify_model(directory(tmp_path / "c", {**CONFIG, "vocab_size": 4})).differs_in(first) == "config.json"
    both = identify_model(directory(tmp_path / "d", {**CONFIG, "vocab_size": 4}, swapped))
    assert both.differs_in(first) == "tokenizer and config.json"


def test_what_is_not_there_is_not_compared(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert identify_model(tmp_path / "empty").differs_in(identify_model(directory(tmp_path / "a"))) == ""


def test_a_damaged_file_is_named(tmp_path: Path):
    path = directory(tmp_path / "a") / "tokenizer.json"
    path.write_text("{")
    with pytest.raises(FatalError, match=r"tokenizer\.json: not the JSON that belongs here"):
        identify_model(tmp_path / "a")


async def test_a_worker_of_another_model_is_refused_by_name_and_the_run_hears_of_it(tmp_path: Path):
    broker = MemoryBroker(MemoryServer(), RunName("run"))
    worker = WorkerId("generate-3.1")
    own = directory(tmp_path / "own")
    await check_model(broker, worker, own)  # no orchestrator has said what the run's is
    await broker.put_meta(keys.MODEL, encode(identify_model(own)))
    await check_model(broker, worker, own)
    await broker.put_meta(keys.MODEL, encode(ModelIdentity(config="", tokenizer="123456789abc")))
    with pytest.raises(ModelMismatchError, match=r"generate-3\.1 is refused: the tokenizer of .*own differs"):
        await check_model(broker, worker, own)
    (entry,) = await broker.tail(keys.EVENTS, count=2)
    event = event_decoder.decode(entry.entry.payload)
    assert isinstance(event, WorkerLost)
    assert event.worker_id == worker
    assert "refused" in event.reason


async def test_a_critic_may_be_another_model_but_not_of_another_tokenizer(tmp_path: Path):
    broker = MemoryBroker(MemoryServer(), RunName("run"))
    await broker.put_meta(keys.MODEL, encode(identify_model(directory(tmp_path / "a"))))
    larger = directory(tmp_path / "larger", {**CONFIG, "hidden_size": 4096})
    await check_model(broker, WorkerId("critic-0.1"), larger, tokenizer_alone=True)
    swapped = {**TOKENIZER, "model": {"type": "BPE", "vocab": {"a": 1, "b": 0}}}
    other = directory(tmp_path / "other", tokenizer=swapped)
    with pytest.raises(ModelMismatchError, match=r"the tokenizer of .*other differs .* critic\.model"):
        await check_model(broker, WorkerId("critic-0.1"), other, tokenizer_alone=True)
    (entry,) = await broker.read(keys.EVENTS, "0-0", count=9)
    lost = event_decoder.decode(entry.entry.payload)
    assert isinstance(lost, WorkerLost)
    assert "critic.model" in lost.reason


async def test_a_run_without_a_critic_refuses_one(tmp_path: Path):
    async def make(*_: Any) -> Any:
        raise AssertionError("it was made")

    build = with_critic_model(directory(tmp_path / "a"), False, make)
    broker = MemoryBroker(MemoryServer(), RunName("run"))
    with pytest.raises(ModelError, match="has no critic"):
        await build(broker, Settings(), WorkerId("critic-0.1"))
