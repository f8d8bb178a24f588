"""The SGLang engine on the real server: what it computes, and under which weights.

One server for the module, without a tokenizer, on a random model. ``SGLANG_VENV`` says where SGLang is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
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
from tests.fakes.sglang_servers import command, needs_sglang
from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model, two_phase_logprobs
from transport.clock import MonotonicClock
from transport.errors import PeerUnavailableError
from transport.types import FinishReason, GroupId, SamplingParams
from workers.errors import WeightsMismatchError
from workers.generation.engine import Completion, EngineFailure
from workers.generation.sglang import SglangEngine
from workers.generation.sglang_http import NEVER, GenerateBody, SamplingBody, SglangClient
from workers.generation.sglang_server import PACKAGES, free_port
from workers.generation.sglang_upkeep import SglangSettings
from workers.generation.sglang_weights import HeldWeights, OrderDesk, hold
from workers.generation.weights import WeightPuller
from workers.trainer.publish import WeightPublisher

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(300)]

STARTUP_S = 240.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, PreTrainedModel, Path]:
    """What the server is started with, another one of its shape, and the directory of the first."""
    first, second = tiny_model(seed=1, max_context=2048), tiny_model(seed=2, max_context=2048)
    directory = tmp_path_factory.mktemp("model")
    first.save_pretrained(directory)
    return first, second, directory


@pytest.fixture(scope="module")
def url(
    models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server that runs elsewhere, as far as the engine knows."""
    port = free_port()
    made_of = SglangSettings(directory=models[2], log=Path(), slots=16, dtype="float32")
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command(), *made_of.arguments(), "--port", str(port)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(PACKAGES)},
        )
    try:
        _wait_healthy(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)


def _wait_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    pytest.fail(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")


@pytest.fixture
async def engine(
    url: str, models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path: Path
) -> AsyncIterator[SglangEngine]:
    """Serving ``models[0]`` as OLD."""
    made = SglangEngine(
        SglangSettings(directory=models[2], log=tmp_path / "log", url=url, slots=16, startup_s=60.0), MonotonicClock()
    )
    try:
        await made.start()
        await made.load_weights(OLD, weights_of(models[0]))
        yield made
    finally:
        await made.close()


# --- samples ----------------------------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_a_full_forward_at_any_temperature(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    prompts = {f"0/{n}": prompt(n) for n in range(3)}
    asked = [request(g, p, temperature=t) for (g, p), t in zip(prompts.items(), (0.0, 1.0, 0.6), strict=True)]
    found = await completions(engine, *asked)
    for one in asked:
        completion = found[one.group_id, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (24, FinishReason.LENGTH)
        assert spans_of(completion) == [(0, 24, OLD)]
        assert_logprobs(models[0], one.prompt_ids, completion, one.sampling.temperature or 1.0)


async def test_a_group_computes_its_prompt_once(engine: SglangEngine) -> None:
    before = engine.load().cached_tokens
    found = await completions(engine, request("0/0", prompt(7, 40), samples=4, temperature=1.0))
    assert engine.load().cached_tokens - before == 3 * 39, "all but the last token of three prompts"
    assert len({one.response_ids.tobytes() for one in found.values()}) == 4, "each sample is its own"


async def test_each_sample_ends_at_its_limit_or_stop_token(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    limited = await completions(engine, request("0/0", prompt(3), samples=3, limits=(2, 9, 5)))
    assert [len(limited["0/0", n].response_ids) for n in range(3)] == [2, 9, 5]
    stop = int(limited["0/0", 1].response_ids[4])
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(stop,))
    stopped = (await completions(engine, request("0/1", prompt(3), sampling=sampling)))["0/1", 0]
    first = limited["0/0", 1].response_ids.tolist().index(stop)
    assert stopped.response_ids.tolist() == limited["0/0", 1].response_ids[: first + 1].tolist()
    assert stopped.finish_reason is FinishReason.STOP


async def test_the_longest_prediction_runs_first(
    url: str, models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path: Path
) -> None:
    settings = SglangSettings(directory=models[2], log=tmp_path / "log", url=url, slots=1, startup_s=60.0)
    engine = SglangEngine(settings, MonotonicClock())
    try:
        await engine.start()
        await engine.load_weights(OLD, weights_of(models[0]))
        for number, priority in enumerate((5.0, 1.0, 9.0)):
            engine.submit(request(f"0/{number}", prompt(number), tokens=3, priority=priority))
        found = list(await collected(engine, 3))
        assert found == [("0/0", 0), ("0/2", 0), ("0/1", 0)], "the first was alone when it came"
    finally:
        await engine.close()


async def test_an_abort_keeps_what_was_sampled_and_stops_no_other(engine: SglangEngine) -> None:
    for group in ("1/1", "1/11", "11/1"):
        engine.submit(request(group, prompt(1), tokens=400))
    for number in range(14):
        engine.submit(request(f"2/{number}", prompt(2), tokens=400))
    await until_running(engine, 3)  # one of 17 waits until one of them has ended
    await engine.abort([(GroupId("1/1"), 0), (GroupId("2/13"), 0)])
    found: list[Completion | EngineFailure] = []
    async with asyncio.timeout(20):
        while len(found) < 2:
            found += await engine.results()
    waiting = next(one for one in found if isinstance(one, EngineFailure))
    stopped = next(one for one in found if isinstance(one, Completion))
    assert (waiting.group_id, waiting.reason) == ("2/13", "aborted before it started")
    assert (stopped.group_id, stopped.finish_reason) == ("1/1", FinishReason.ABORT)
    assert 0 < len(stopped.response_ids) < 400
    assert len(stopped.logprobs) == len(stopped.response_ids)
    others = await collected(engine, 15)
    assert {len(one.response_ids) for one in others.values()} == {400}


async def test_the_server_aborts_by_the_beginning_of_a_rid(url: str) -> None:
    """Why no rid of ours may be the beginning of another."""
    client = SglangClient(url, connections=4, request_s=60.0)
    await client.open()
    try:
        plain, other = (asyncio.create_task(_ended_by(client, rid)) for rid in ("r1", "r12"))
        await asyncio.sleep(0.5)  # until both run: the server tells nobody
        await client.abort("r1")
        assert [await plain, await other] == ["abort", "abort"]
    finally:
        await client.close()


async def _ended_by(client: SglangClient, rid: str) -> str:
    sampling = SamplingBody(
        max_new_tokens=1000, temperature=0.0, top_p=1.0, stop_token_ids=(), ignore_eos=True, stream_interval=NEVER
    )
    body = GenerateBody(
        rid=rid,
        input_ids=msgspec.Raw(b"[5,6]"),
        sampling_params=sampling,
        extra_key="x",
        stream=True,
        return_logprob=True,
    )
    reason = ""
    async for chunk in client.generate(body):
        if chunk.meta_info and chunk.meta_info.finish_reason:
            reason = chunk.meta_info.finish_reason.type
    return reason


# --- weights ----------------------------------------------------------------------------------------------------------


async def test_an_update_in_flight_aborts_and_recomputes_nothing(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    old, new, _ = models
    prompts = {f"0/{n}": prompt(n) for n in range(16)}
    for group, ids in prompts.items():
        engine.submit(request(group, ids, tokens=150))
    await until_running(engine, 16)
    await engine.load_weights(NEW, weights_of(new))
    found = await collected(engine, 16)
    assert engine.counters.recomputed == 0
    for group, ids in prompts.items():
        completion = found[group, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (150, FinishReason.LENGTH)
        (start, switch, first), (_, end, last) = spans_of(completion)
        assert (start, end, first, last) == (0, 150, OLD, NEW)
        expected = two_phase_logprobs(old, new, ids, completion.response_ids, switch)
        np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


async def test_a_prompt_after_an_update_is_computed_under_the_new_weights(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
) -> None:
    """While a sample of the same prompt runs on from the old weights' KV, which is in the server's cache."""
    old, new, _ = models
    ids = prompt(5, 60)
    engine.submit(request("0/0", ids, tokens=300))
    await until_running(engine, 1)
    await engine.load_weights(NEW, weights_of(new))
    after = (await completions(engine, request("1/0", ids, tokens=16)))["1/0", 0]
    assert engine.load().running == 1, "the other one still runs"
    assert spans_of(after) == [(0, 16, NEW)]
    assert_logprobs(new, ids, after, 1.0)
    assert np.abs(full_logprobs(old, ids, after.response_ids) - after.logprobs).max() > 0.1, "the test could tell"
    await collected(engine, 1)


async def test_published_weights_are_mapped_and_kept_when_their_trainer_is_gone(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path: Path
) -> None:
    publisher = WeightPublisher("sglangtest", tmp_path)
    try:
        manifest = publisher.publish(1, 2, weights_of(models[1]), torch.float32)
        with WeightPuller().pull(manifest) as tensors:
            held = hold(manifest.weights, tensors)
            await engine.load_weights(manifest.weights, tensors)
    finally:
        publisher.close()
    found = (await completions(engine, request("0/0", prompt(1))))["0/0", 0]
    assert_logprobs(models[1], prompt(1), found, 1.0)
    await engine.load_weights(OLD, weights_of(models[0]))
    desk = OrderDesk(engine.server.client, same_host=True)
    desk.vocab_size = VOCAB
    try:
        await desk.pass_on(held)  # the segment has no name any more
    finally:
        held.close()
    assert (await engine.server.client.model_info()).weight_version == str(manifest.weights)


async def test_a_server_elsewhere_pulls_from_the_trainer(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path], tmp_path: Path
) -> None:
    publisher = WeightPublisher("sglangtest", tmp_path)
    try:
        manifest = publisher.publish(1, 2, weights_of(models[1]), torch.float32)
        sources = tuple(source for source in manifest.sources if source.startswith("tcp://"))
        over_tcp = msgspec.structs.replace(manifest, sources=sources)
        desk = OrderDesk(engine.server.client, same_host=False)
        desk.vocab_size = VOCAB
        # A file that the server cannot see, as on another host: only the trainer's own address is left.
        await desk.pass_on(HeldWeights(weights=manifest.weights, manifest=over_tcp, fd=1_000_000))
    finally:
        publisher.close()
    assert (await engine.server.client.model_info()).weight_version == str(manifest.weights)
    with pytest.raises(PeerUnavailableError, match="cannot load"):
        await desk.pass_on(HeldWeights(weights=OLD, manifest=over_tcp, fd=1_000_000))
    assert (await engine.server.client.model_info()).weight_version == str(manifest.weights), "and nothing changed"


async def test_weights_of_another_model_leave_what_is_served(
    engine: SglangEngine, models: tuple[PreTrainedModel, PreTrainedModel, Path]
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
