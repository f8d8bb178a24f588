"""The vLLM engine on the real server: what it computes, and under which weights.

``make test-vllm VLLM_VENV=DIR`` runs these; DIR is a virtual environment with a vLLM that runs on this machine. One
server for the module. What is the same as with SGLang (restarts, the watch) is tested there.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.fakes.served_samples import (
    EXACT,
    NEW,
    OLD,
    assert_logprobs,
    collected,
    completions,
    prompt,
    request,
    spans_of,
    until_running,
    weights_of,
)
from tests.fakes.tiny_models import full_logprobs, tiny_model, two_phase_logprobs
from transport.clock import MonotonicClock
from transport.types import FinishReason, GroupId, SamplingParams
from workers.errors import WeightsMismatchError
from workers.generation.engine import EngineFailure
from workers.generation.sglang_server import PACKAGES, free_port
from workers.generation.vllm import CUTS_THE_TAIL, VllmEngine, VllmSettings

VENV = os.environ.get("VLLM_VENV", "")
CONTEXT = 2048
BLOCK = 128
"""Tokens of a prompt that its cache shares at a time, on a CPU."""

if not VENV:
    pytest.skip("VLLM_VENV does not name an environment with vLLM in it: `make test-vllm`", allow_module_level=True)

pytestmark = [
    pytest.mark.timeout(400),
]


def command() -> tuple[str, ...]:
    python = str(Path(VENV) / "bin" / "python")
    launch = ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1"]
    return (*launch, python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedModel, Path]:
    """What the server is started with, another one of its shape, and the directory of the first."""
    first, second = (tiny_model(seed=seed, max_context=CONTEXT, head_dim=32) for seed in (1, 2))
    directory = tmp_path_factory.mktemp("model")
    first.save_pretrained(directory)
    return first, second, directory


@pytest.fixture(scope="module")
def url(
    models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server that runs elsewhere, as far as the engine knows."""
    port = free_port()
    made_of = VllmSettings(directory=models[2], log=Path(), slots=16, dtype="float32", max_context=CONTEXT)
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command(), *made_of.arguments(), "--port", str(port)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **made_of.environment, "PYTHONPATH": str(PACKAGES)},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


@pytest.fixture
async def engine(
    url: str, models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path: Path
) -> AsyncIterator[VllmEngine]:
    """Serving ``models[0]`` as OLD."""
    made = VllmEngine(
        VllmSettings(directory=models[2], log=tmp_path / "log", url=url, slots=16, startup_s=300.0, silence_s=60.0),
        MonotonicClock(),
    )
    try:
        await made.start()
        await made.load_weights(OLD, weights_of(models[0]))
        yield made
    finally:
        await made.close()


async def test_logprobs_are_those_of_a_full_forward_at_any_temperature(
    engine: VllmEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    prompts = {f"0/{n}": prompt(n) for n in range(3)}
    asked = [request(g, p, temperature=t) for (g, p), t in zip(prompts.items(), (0.0, 1.0, 0.6), strict=True)]
    found = await completions(engine, *asked)
    for one in asked:
        completion = found[one.group_id, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (24, FinishReason.LENGTH)
        assert spans_of(completion) == [(0, 24, OLD)]
        assert_logprobs(models[0], one.prompt_ids, completion, one.sampling.temperature or 1.0)


async def test_a_group_computes_its_prompt_once(engine: VllmEngine) -> None:
    before = engine.load().cached_tokens
    found = await completions(engine, request("0/0", prompt(7, 2 * BLOCK + 9), samples=4, temperature=1.0))
    assert engine.load().cached_tokens - before == 3 * 2 * BLOCK
    assert len({one.response_ids.tobytes() for one in found.values()}) == 4, "each sample is its own"


async def test_each_sample_ends_at_its_limit_or_stop_token(engine: VllmEngine) -> None:
    limited = await completions(engine, request("0/0", prompt(3), samples=3, limits=(2, 9, 5)))
    assert [len(limited["0/0", n].response_ids) for n in range(3)] == [2, 9, 5]
    stop = int(limited["0/0", 1].response_ids[4])
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(stop,))
    stopped = (await completions(engine, request("0/1", prompt(3), sampling=sampling)))["0/1", 0]
    first = limited["0/0", 1].response_ids.tolist().index(stop)
    assert stopped.response_ids.tolist() == limited["0/0", 1].response_ids[: first + 1].tolist()
    assert stopped.finish_reason is FinishReason.STOP


async def test_what_it_has_no_logprobs_for_is_refused(engine: VllmEngine) -> None:
    sampling = SamplingParams(max_new_tokens=24, top_p=0.9)
    engine.submit(request("0/0", prompt(1), sampling=sampling))
    (failure,) = await engine.results()
    assert isinstance(failure, EngineFailure)
    assert (failure.reason, failure.retryable) == (CUTS_THE_TAIL, False)


async def test_an_abort_keeps_what_was_sampled_and_stops_no_other(engine: VllmEngine) -> None:
    for group in ("1/1", "1/11", "11/1"):
        engine.submit(request(group, prompt(1), tokens=400))
    await until_running(engine, 3)
    await engine.abort([(GroupId("1/1"), 0)])
    found = await collected(engine, 3)
    stopped = found["1/1", 0]
    assert stopped.finish_reason is FinishReason.ABORT
    assert 0 < len(stopped.response_ids) == len(stopped.logprobs) < 400
    assert {len(found[group, 0].response_ids) for group in ("1/11", "11/1")} == {400}


async def test_an_update_in_flight_aborts_and_recomputes_nothing(
    engine: VllmEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    old, new, _ = models
    prompts = {f"0/{n}": prompt(n) for n in range(16)}
    for group, ids in prompts.items():
        engine.submit(request(group, ids, tokens=300))
    await until_running(engine, 16)
    await engine.load_weights(NEW, weights_of(new))
    found = await collected(engine, 16)
    assert engine.counters.recomputed == 0
    for group, ids in prompts.items():
        completion = found[group, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (300, FinishReason.LENGTH)
        (start, switch, first), (_, end, last) = spans_of(completion)
        assert (start, end, first, last) == (0, 300, OLD, NEW)
        expected = two_phase_logprobs(old, new, ids, completion.response_ids, switch)
        np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


async def test_a_prompt_after_an_update_is_computed_under_the_new_weights(
    engine: VllmEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    """While a sample of the same prompt runs on from the old weights' KV, which is in the server's cache."""
    old, new, _ = models
    ids = prompt(5, BLOCK + 60)
    engine.submit(request("0/0", ids, tokens=1500))
    await until_running(engine, 1)
    await engine.load_weights(NEW, weights_of(new))
    engine.submit(request("1/0", ids, tokens=16))
    found = await collected(engine, 2)
    assert [span[2] for span in spans_of(found["0/0", 0])] == [OLD, NEW], "it ran when the weights changed"
    after = found["1/0", 0]
    assert spans_of(after) == [(0, 16, NEW)]
    assert_logprobs(new, ids, after, 1.0)
    assert np.abs(full_logprobs(old, ids, after.response_ids) - after.logprobs).max() > 0.1, "the test could tell"


async def test_weights_of_another_model_leave_what_is_served(
    engine: VllmEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    tensors = dict(weights_of(models[1]))
    dropped = tensors.pop("model.norm.weight")
    with pytest.raises(WeightsMismatchError, match=r"missing: model\.norm\.weight"):
        await engine.load_weights(NEW, tensors)
    with pytest.raises(WeightsMismatchError, match=r"of another shape: model\.norm\.weight"):
        await engine.load_weights(NEW, tensors | {"model.norm.weight": dropped[:-1]})
    found = (await completions(engine, request("0/0", prompt(1))))["0/0", 0]
    assert spans_of(found) == [(0, 24, OLD)]
    assert_logprobs(models[0], prompt(1), found, 1.0)
