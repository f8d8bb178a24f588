"""A generation worker with the real engine, rows and weights: from a plan to rows a trainer can use."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model
from transport.broker import keys
from transport.broker.base import ZERO_ID, Commit, Entry, GroupWrite
from transport.contracts.messages import (
    GroupPlan,
    LoadWeights,
    RolloutFinished,
    WeightsFailed,
    WeightsLoaded,
    WorkerReported,
    encode,
    event_decoder,
)
from transport.contracts.settings import Settings
from transport.contracts.types import Column, PromptId, RunName, WorkerId, group_id, row_id
from transport.process.clock import MonotonicClock
from transport.rows.columns import decode_array, encode_array
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.worker import GenerationWorker
from workers.models import random_model
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

ME = WorkerId("generate-0.1")
GROUP_SIZE = 3
SETTINGS = msgspec.convert(
    {
        "pipeline": {"group_size": GROUP_SIZE},
        "sampling": {"max_new_tokens": 20},
        "generation": {"slots": 4, "dtype": "float32", "max_context": 128},
    },
    Settings,
)


@pytest.fixture
def publisher(tmp_path):
    publisher = WeightPublisher("generation-test", tmp_path)
    yield publisher
    publisher.close()


@pytest.fixture
async def broker(tmp_path):
    random_model("qwen3-tiny")(tmp_path)  # for its tokenizer
    tiny_model(seed=0).save_pretrained(tmp_path)
    broker, clock = MemoryBroker(MemoryServer(), RunName("test")), MonotonicClock()
    engine = EmbeddedEngine(SETTINGS.generation, tmp_path, clock)
    worker = GenerationWorker(broker, engine, SETTINGS, ME, WeightPuller(), clock, stop_token_ids=(1,))
    task = asyncio.create_task(worker.run())
    await events(broker, WorkerReported, 1)  # transformers patches torch while it loads: make no model meanwhile
    yield broker
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def load(broker, publisher, version, model):
    manifest = publisher.publish(1, version, dict(model.named_parameters()), torch.float32)
    await broker.append(keys.WEIGHTS, Entry(payload=encode(manifest)))
    await broker.append(keys.control(ME), Entry(payload=encode(LoadWeights(worker_id=ME, weights=manifest.weights))))
    return manifest.weights


async def events(broker, kind, count):
    found, cursor = [], ZERO_ID
    async with asyncio.timeout(60):
        while len(found) < count:
            for entry in await broker.read(keys.EVENTS, cursor, count=100, wait_s=1):
                cursor = entry.entry_id
                event = event_decoder.decode(entry.entry.payload)
                found += [event] if isinstance(event, kind) else []
    return found


async def test_every_sample_of_every_plan_is_a_row_under_the_weights_it_says(broker, publisher):
    model = tiny_model(seed=1)
    weights = await load(broker, publisher, 0, model)
    await events(broker, WeightsLoaded, 1)
    prompts = [np.random.default_rng(slot).integers(2, VOCAB, 5 + slot).astype(np.int32) for slot in range(6)]
    for slot, prompt in enumerate(prompts):
        columns = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, prompt)}
        await broker.commit(Commit(groups=[GroupWrite(group_id=group_id(0, slot), size=GROUP_SIZE, columns=columns)]))
        plan = GroupPlan(
            group_id=group_id(0, slot),
            batch=0,
            prompt_id=PromptId(str(slot)),
            samples=tuple(range(GROUP_SIZE)),
            group_size=GROUP_SIZE,
            predicted_tokens=10,
            priority=0,
        )
        await broker.enqueue(keys.plans(ME), Entry(payload=encode(plan)))
    finished = await events(broker, RolloutFinished, len(prompts) * GROUP_SIZE)
    assert {event.newest for event in finished} == {event.oldest for event in finished} == {weights}
    assert await broker.pending(keys.plans(ME)) == []
    for slot, prompt in enumerate(prompts):
        rows = await broker.read_rows([row_id(group_id(0, slot), i) for i in range(GROUP_SIZE)], list(Column))
        for row in rows:
            response = decode_array(Column.RESPONSE_IDS, row[Column.RESPONSE_IDS])
            logprobs = decode_array(Column.ROLLOUT_LOGPROBS, row[Column.ROLLOUT_LOGPROBS])
            assert len(response) == 20 or response[-1] == 1
            assert np.abs(full_logprobs(model, prompt, response) - logprobs).max() < 1e-4


async def test_weights_of_another_model_are_refused_by_name_and_those_after_them_load(broker, publisher):
    await load(broker, publisher, 0, tiny_model("llama"))
    (failed,) = await events(broker, WeightsFailed, 1)
    assert "q_norm" in failed.reason
    good = await load(broker, publisher, 1, tiny_model(seed=1))
    loaded = await events(broker, WeightsLoaded, 1)
    assert loaded[-1].weights == good
