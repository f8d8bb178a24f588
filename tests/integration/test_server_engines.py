"""The engines that are servers, on the real ones: what they compute, and under which weights.

One server of a kind for the module, without a tokenizer, on a random model. ``SGLANG_VENV`` and ``VLLM_VENV`` say where
they are.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.fakes import sglang_servers, vllm_servers
from tests.fakes.redis_servers import free_port
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
from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model, two_phase_logprobs
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import LoraSettings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, WeightIdentity
from transport.errors import PeerUnavailableError
from transport.process.clock import MonotonicClock
from transport.tensors.base import host_id
from workers.commands.build import adapted_model
from workers.errors import WeightsMismatchError
from workers.generation.engine import ABORTED_UNSTARTED, Completion, EngineFailure, StopStrings, serving
from workers.generation.server.client import SampleRequest, ServerClient, ServerSettings
from workers.generation.server.engine import KINDS, ServerEngine
from workers.generation.server.loader import LoadOrder
from workers.generation.server.upkeep import PACKAGES, hold
from workers.generation.server.vllm import CUTS_THE_TAIL
from workers.models import character_tokenizer
from workers.weights.adapters import A, B
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

pytestmark = pytest.mark.timeout(400)

STARTUP_S = 240.0
SLOTS = 16
CONTEXT = 2048
HEAD_DIM = 32
"""vLLM computes no smaller ones on a CPU."""
ENGINES = [
    pytest.param("sglang", marks=[pytest.mark.sglang, sglang_servers.needs_sglang]),
    pytest.param("vllm", marks=vllm_servers.needs_vllm),
]


@dataclass(kw_only=True)
class Served:
    """A server that runs elsewhere, as far as engines know. model: what it is started with.  other: of its shape.
    block: tokens of a prompt that its cache shares at a time.
    """

    kind: str
    directory: Path
    block: int
    model: PreTrainedModel = field(default_factory=lambda: tiny_model(seed=1, max_context=CONTEXT, head_dim=HEAD_DIM))
    other: PreTrainedModel = field(default_factory=lambda: tiny_model(seed=2, max_context=CONTEXT, head_dim=HEAD_DIM))
    url: str = ""

    def settings(self, *, slots: int = SLOTS) -> ServerSettings:
        return ServerSettings(
            directory=self.directory,
            log=self.directory / "log",
            url=self.url,
            slots=slots,
            dtype="float32",
            max_context=CONTEXT,
            startup_s=STARTUP_S,
        )

    def engine(self, *, slots: int = SLOTS) -> ServerEngine:
        return ServerEngine(KINDS[self.kind], self.settings(slots=slots), MonotonicClock())


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    is_vllm = request.param == "vllm"
    made = Served(kind=request.param, directory=tmp_path_factory.mktemp("model"), block=128 if is_vllm else 1)
    made.model.save_pretrained(made.directory)
    port, settings, kind = free_port(), made.settings(), KINDS[made.kind]
    command = vllm_servers.command() if is_vllm else sglang_servers.command()
    with settings.log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *kind.arguments(settings), "--port", str(port)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, **kind.environment, "PYTHONPATH": str(PACKAGES)},
        )
    made.url = f"http://127.0.0.1:{port}"
    try:
        _wait_healthy(f"{made.url}/health", process, settings.log)
        yield made
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
async def engine(served: Served) -> AsyncIterator[ServerEngine]:
    """Serving ``served.model`` as OLD."""
    made = served.engine()
    try:
        await made.start()
        await made.load_weights(OLD, weights_of(served.model))
        yield made
    finally:
        await made.close()


# --- samples ----------------------------------------------------------------------------------------------------------


async def test_logprobs_are_those_of_a_full_forward_at_any_temperature(engine: ServerEngine, served: Served) -> None:
    prompts = {f"0/{n}": prompt(n) for n in range(3)}
    asked = [request(g, p, temperature=t) for (g, p), t in zip(prompts.items(), (0.0, 1.0, 0.6), strict=True)]
    found = await completions(engine, *asked)
    for one in asked:
        completion = found[one.group_id, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (24, FinishReason.LENGTH)
        assert spans_of(completion) == [(0, 24, OLD)]
        assert_logprobs(served.model, one.prompt_ids, completion, one.sampling.temperature or 1.0)


async def test_logprobs_are_of_the_whole_distribution_or_a_cut_tail_is_refused(
    engine: ServerEngine, served: Served
) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, ignore_eos=True)
    engine.submit(request("0/0", prompt(1), sampling=sampling))
    async with asyncio.timeout(60):
        (result,) = await engine.results()
    if served.kind == "vllm":
        assert isinstance(result, EngineFailure)
        assert (result.reason, result.retryable) == (CUTS_THE_TAIL, False)
    else:
        assert isinstance(result, Completion)
        assert_logprobs(served.model, prompt(1), result, 0.8)


async def test_a_group_computes_its_prompt_once(engine: ServerEngine, served: Served) -> None:
    prompt_tokens = 265
    before = engine.load().cached_tokens
    found = await completions(engine, request("0/0", prompt(7, prompt_tokens), samples=4, temperature=1.0))
    shared = (prompt_tokens - 1) // served.block * served.block  # all but the last token, in whole blocks
    assert engine.load().cached_tokens - before == 3 * shared
    assert len({one.response_ids.tobytes() for one in found.values()}) == 4, "each sample is its own"


async def test_each_sample_ends_at_its_limit_or_stop_token(engine: ServerEngine) -> None:
    limited = await completions(engine, request("0/0", prompt(3), samples=3, limits=(2, 9, 5)))
    assert [len(limited["0/0", n].response_ids) for n in range(3)] == [2, 9, 5]
    stop = int(limited["0/0", 1].response_ids[4])
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(stop,))
    stopped = (await completions(engine, request("0/1", prompt(3), sampling=sampling)))["0/1", 0]
    first = limited["0/0", 1].response_ids.tolist().index(stop)
    assert stopped.response_ids.tolist() == limited["0/0", 1].response_ids[: first + 1].tolist()
    assert stopped.finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(
    engine: ServerEngine, served: Served
) -> None:
    """And leaves what was sampled before as it was; the server gets its slot back long before the limit."""
    sampling = SamplingParams(max_new_tokens=300, temperature=0.0)
    asked = [request(f"0/{number}", prompt(number), sampling=sampling) for number in range(3)]
    free = await completions(engine, *asked)
    third, fourth = free["0/0", 0].response_ids[2:4].tolist()
    stops = StopStrings([f"{third} {fourth} "], lambda ids: "".join(f"{token} " for token in ids))
    engine.sender.stops = stops  # its directory has no tokenizer that it could take them from
    for key, found in (await completions(engine, *asked)).items():
        whole = free[key].response_ids.tolist()
        end = stops.end(whole)
        assert found.response_ids.tolist() == whole[:end]
        assert found.finish_reason is (free[key].finish_reason if end is None else FinishReason.STOP)
        assert spans_of(found) == [(0, len(found.response_ids), OLD)]
        assert_logprobs(served.model, prompt(int(key[0][-1])), found, 1.0)
    assert stops.end(free["0/0", 0].response_ids.tolist()) in (2, 3, 4)
    forced = await completions(engine, request("1/0", prompt(0), tokens=24))
    assert len(forced["1/0", 0].response_ids) == 24, "a length that is forced is not cut"


async def test_the_longest_prediction_runs_first(served: Served) -> None:
    engine = served.engine(slots=1)
    async with serving(engine):
        await engine.load_weights(OLD, weights_of(served.model))
        for number, priority in enumerate((5.0, 1.0, 9.0)):
            engine.submit(request(f"0/{number}", prompt(number), tokens=3, priority=priority))
        found = list(await collected(engine, 3))
        assert found == [("0/0", 0), ("0/2", 0), ("0/1", 0)], "the first was alone when it came"


async def test_an_abort_keeps_what_was_sampled_and_stops_no_other(engine: ServerEngine) -> None:
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
    assert (waiting.group_id, waiting.reason) == ("2/13", ABORTED_UNSTARTED)
    assert (stopped.group_id, stopped.finish_reason) == ("1/1", FinishReason.ABORT)
    assert 0 < len(stopped.response_ids) < 400
    assert len(stopped.logprobs) == len(stopped.response_ids)
    others = await collected(engine, 15)
    assert {len(one.response_ids) for one in others.values()} == {400}


async def test_sglang_alone_aborts_by_the_beginning_of_an_id(served: Served) -> None:
    """Why no id of ours may be the beginning of another."""
    client = KINDS[served.kind].client(served.url, served.settings(), "")
    await client.open()
    plain, other = _Sample(client, "r1"), _Sample(client, "r12")
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(plain.run())
            group.create_task(other.run())
            await plain.started.wait()
            await other.started.wait()
            await client.abort("r1")
    finally:
        await client.close()
    assert plain.reason == "abort"
    assert other.reason == ("abort" if served.kind == "sglang" else "length")


class _Sample:
    """One that no engine asks for. reason: why it ended."""

    def __init__(self, client: ServerClient, rid: str) -> None:
        self._client = client
        self._rid = rid
        self.started = asyncio.Event()
        self.reason = ""

    async def run(self) -> None:
        sample = SampleRequest(
            rid=self._rid,
            prompt=msgspec.Raw(b"[5,6]"),
            label="x",
            sampling=SamplingParams(max_new_tokens=1000, temperature=0.0, ignore_eos=True),
            max_new_tokens=1000,
            seed=0,
        )
        async for chunk in self._client.generate(sample):
            self.started.set()
            self.reason = chunk.finish_reason


# --- weights ----------------------------------------------------------------------------------------------------------


async def test_adapters_alone_are_served_on_the_model_of_the_directory(served: Served, tmp_path: Path) -> None:
    """Each version's are added to the base, whatever the server held: also one of other weights."""
    lora = LoraSettings(rank=2, alpha=6.0)
    served.model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    complete = adapted_model(tmp_path, lora, trust_remote_code=False)
    engine = ServerEngine(KINDS[served.kind], served.settings(), MonotonicClock(), complete=complete)
    linear = {n: p for n, p in served.model.named_parameters() if "_proj" in n}
    async with serving(engine):
        for seed in (1, 2):
            identity = WeightIdentity(epoch=2, version=seed, digest="cc")  # of no other test: KV is kept by it
            random = torch.Generator().manual_seed(seed)
            adapters: dict[str, torch.Tensor] = {}
            model = copy.deepcopy(served.model)
            for name, weight in linear.items():
                layer = name.removesuffix(".weight")
                down, up = (
                    torch.randn(shape, generator=random) / 8 for shape in ((2, weight.shape[1]), (len(weight), 2))
                )
                adapters |= {layer + A: down, layer + B: up}
                model.get_parameter(name).data += 3.0 * up @ down
            await engine.load_weights(identity, adapters)
            found = await completions(engine, request("0/0", prompt(seed)))
            assert spans_of(found["0/0", 0]) == [(0, 24, identity)]
            assert_logprobs(model, prompt(seed), found["0/0", 0], 1.0)
        halves = {name: one for name, one in adapters.items() if name.endswith(A)}
        with pytest.raises(WeightsMismatchError, match="not adapters alone"):
            await engine.load_weights(identity, halves)


async def test_an_update_in_flight_aborts_and_recomputes_nothing(engine: ServerEngine, served: Served) -> None:
    prompts = {f"0/{n}": prompt(n) for n in range(SLOTS)}
    for group, ids in prompts.items():
        engine.submit(request(group, ids, tokens=300))
    await until_running(engine, SLOTS)
    await engine.load_weights(NEW, weights_of(served.other))
    found = await collected(engine, SLOTS)
    assert engine.sender.recomputed == 0
    for group, ids in prompts.items():
        completion = found[group, 0]
        assert (len(completion.response_ids), completion.finish_reason) == (300, FinishReason.LENGTH)
        (start, switch, first), (_, end, last) = spans_of(completion)
        assert (start, end, first, last) == (0, 300, OLD, NEW)
        expected = two_phase_logprobs(served.model, served.other, ids, completion.response_ids, switch)
        np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


async def test_a_prompt_after_an_update_is_computed_under_the_new_weights(engine: ServerEngine, served: Served) -> None:
    """While a sample of the same prompt runs on from the old weights' KV, which is in the server's cache."""
    ids = prompt(5, served.block + 60)
    engine.submit(request("0/0", ids, tokens=1500))
    await until_running(engine, 1)
    await engine.load_weights(NEW, weights_of(served.other))
    engine.submit(request("1/0", ids, tokens=16))
    found = await collected(engine, 2)
    assert [span[2] for span in spans_of(found["0/0", 0])] == [OLD, NEW], "it ran when the weights changed"
    after = found["1/0", 0]
    assert spans_of(after) == [(0, 16, NEW)]
    assert_logprobs(served.other, ids, after, 1.0)
    of_old = full_logprobs(served.model, ids, after.response_ids)
    assert np.abs(of_old - after.logprobs).max() > 0.1, "the test could tell"


async def pass_on(engine: ServerEngine, weights: WeightIdentity, offered: WeightManifest, *, same_host: bool) -> None:
    """Have the server load what is offered, as if it ran on this host, or on another one."""
    client = engine.server.client
    order = LoadOrder(number=1, vocab_size=VOCAB, manifest=offered, verified=same_host)
    await client.update(order, str(weights), served=await client.label(), processes=1)


async def test_published_weights_are_mapped_and_kept_when_their_trainer_is_gone(
    engine: ServerEngine, served: Served, tmp_path: Path
) -> None:
    publisher = WeightPublisher("servedtest", tmp_path)
    try:
        manifest = publisher.publish(1, 2, weights_of(served.other), torch.float32)
        with WeightPuller().pull(manifest) as tensors:
            held = hold(manifest.weights, tensors)
            await engine.load_weights(manifest.weights, tensors)
    finally:
        publisher.close()
    found = (await completions(engine, request("0/0", prompt(1))))["0/0", 0]
    assert_logprobs(served.other, prompt(1), found, 1.0)
    await engine.load_weights(OLD, weights_of(served.model))
    try:
        # the segment has no name any more
        await pass_on(engine, held.weights, held.offer(same_host=True), same_host=True)
    finally:
        held.close()
    assert await engine.server.client.label() == str(manifest.weights)


async def test_a_server_elsewhere_pulls_from_the_trainer(engine: ServerEngine, served: Served, tmp_path: Path) -> None:
    publisher = WeightPublisher("servedtest", tmp_path)
    try:
        manifest = publisher.publish(1, 2, weights_of(served.other), torch.float32)
        sources = tuple(source for source in manifest.sources if source.startswith("tcp://"))
        # A file that the server cannot see, as on another host: only the trainer's own address is left.
        unseen = f"shm://{host_id()}/proc/{os.getpid()}/fd/1000000@1"
        offered = msgspec.structs.replace(manifest, sources=(unseen, *sources))
        await pass_on(engine, manifest.weights, offered, same_host=False)
    finally:
        publisher.close()
    assert await engine.server.client.label() == str(manifest.weights)
    with pytest.raises(PeerUnavailableError, match="cannot load"):
        await pass_on(engine, OLD, offered, same_host=False)
    assert await engine.server.client.label() == str(manifest.weights), "and nothing changed"


async def test_weights_of_another_model_leave_what_is_served(engine: ServerEngine, served: Served) -> None:
    tensors = dict(weights_of(served.other))
    dropped = tensors.pop("model.norm.weight")
    with pytest.raises(WeightsMismatchError, match=r"missing: model\.norm\.weight"):
        await engine.load_weights(NEW, tensors)
    with pytest.raises(WeightsMismatchError, match=r"of another shape: model\.norm\.weight"):
        await engine.load_weights(NEW, tensors | {"model.norm.weight": dropped[:-1]})
    found = (await completions(engine, request("0/0", prompt(1))))["0/0", 0]
    assert spans_of(found) == [(0, 24, OLD)]
    assert_logprobs(served.model, prompt(1), found, 1.0)
