"""Generation, evaluation and reference logprobs on a real GPU, against the same on a CPU. `make test-gpu`.

A GPU sums in another order, so a token may differ where the choice hangs on less than TIE. What was drawn is compared
up to the first token that differs; there, both tokens must be as good as each other by the CPU's own numbers.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from orchestrator.config.load import render, resolve
from orchestrator.prompts.source import write_held_out
from tests.fakes.decoding import (
    V0,
    V1,
    beginning_of,
    by_sample,
    check_logprobs,
    decoder_of,
    first_turns,
    next_turn,
    prompt_of,
    request,
    run_all,
)
from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from transport.contracts.settings import GenerationSettings, ScoringSettings, Settings, TrainerSettings
from transport.contracts.types import FinishReason
from transport.process import gpus
from transport.process.clock import MonotonicClock
from workers.commands.evaluate import Answer, evaluate_run
from workers.errors import ModelError
from workers.generation.embedded.drafts import SaidBefore
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.embedded.forward import FIRST_CAPACITY, KVShape, SlotKV
from workers.generation.embedded.slots import Drafting, Draw, sample_tokens, stream_key, uniforms
from workers.generation.embedded.step_cost import measure_steps
from workers.generation.engine import Completion, EngineFailure, GenerationRequest
from workers.models import choose_device, random_model
from workers.trainer.policy.model import reference_logprobs
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

NAME = "cuda"
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")
TIE = 1e-4
"""Of logprobs, or of the cumulative probability: a hundred times what float32 rounds these models' to."""
Dtype = Literal["float32", "bfloat16"]
Results = Mapping[Any, Completion]


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    """A copy there; ``model`` stays, to compare with."""
    return copy.deepcopy(model).to(DEVICE)


def next_logits(model: PreTrainedModel, ids: np.ndarray) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(ids).long()[None], use_cache=False).logits[0, -1].double()


def is_tie(model: PreTrainedModel, asked: GenerationRequest, sample: int, common: np.ndarray, one: int, other: int):
    """Whether rounding decides between two tokens after ``common``: equal logits, or a draw at the edge of both."""
    logits, temperature = next_logits(model, np.concatenate([asked.prompt_ids, common])), asked.sampling.temperature
    if not temperature:
        logprobs = logits.log_softmax(-1)
        return abs(float(logprobs[one] - logprobs[other])) < TIE
    key = np.array([stream_key(asked.sampling.seed, sample)])
    edge = float((logits / temperature).softmax(-1).cumsum(-1)[min(one, other)])
    return abs(edge - float(uniforms(key, np.array([len(common)]))[0])) < TIE


def check_same(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], found: Results, expected: Results, within: float
) -> None:
    """Tokens are the same, but for ties; logprobs of the same ones ``within``. model: on the CPU, in float32."""
    asked = {each.group_id: each for each in requests}
    assert found.keys() == expected.keys()
    compared = 0
    for key, theirs in expected.items():
        ours = found[key]
        differ = np.flatnonzero(ours.response_ids != theirs.response_ids)
        same = int(differ[0]) if len(differ) else len(theirs.response_ids)
        if len(differ):
            pair = int(ours.response_ids[same]), int(theirs.response_ids[same])
            assert is_tie(model, asked[key[0]], key[1], theirs.response_ids[:same], *pair), (key, same, pair)
        assert ours.logprobs[:same] == pytest.approx(theirs.logprobs[:same], abs=within)
        compared += same
    assert compared > 0.8 * sum(len(one.response_ids) for one in expected.values()), "ties cannot be that many"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    random_model("qwen3-small")(directory)
    return directory


@pytest.fixture(scope="module")
def on_cpu(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@asynccontextmanager
async def started(directory: Path, device: str, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    wanted = {"slots": 6, "dtype": "float32", "max_context": 256, "device": device} | settings
    engine = EmbeddedEngine(GenerationSettings(**wanted), directory, MonotonicClock())
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def answers(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> dict[Any, Completion]:
    for each in requests:
        engine.submit(each)
    results: list[Any] = []
    async with asyncio.timeout(60):
        while len(results) < sum(len(each.samples) for each in requests):
            results += await engine.results()
    return by_sample(results)


def asked_of(temperature: float = 0.0) -> list[GenerationRequest]:
    """More samples than slots, of prompts of several lengths."""
    return [
        request(slot, prompt=prompt_of(5 + 6 * slot, slot) % 60 + 4, new_tokens=16 + slot, temperature=temperature)
        for slot in range(4)
    ]


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_tokens_in_float32_are_those_of_a_cpu(
    directory: Path, on_cpu: PreTrainedModel, temperature: float
) -> None:
    requests = asked_of(temperature)
    found = []
    for device in (NAME, "cpu"):
        async with started(directory, device) as engine:
            found.append(await answers(engine, requests))
            assert engine.load().busy_s > 0
    check_same(on_cpu, requests, found[0], found[1], 1e-4)
    check_logprobs(on_cpu, requests, found[0].values(), 1e-4)


async def test_logprobs_in_bfloat16_are_near_those_of_float32(directory: Path, on_cpu: PreTrainedModel) -> None:
    requests = asked_of(0.9)
    async with started(directory, NAME, dtype="bfloat16") as engine:
        found = await answers(engine, requests)
    check_logprobs(on_cpu, requests, found.values(), 5e-2)


async def test_slots_that_do_not_fit_are_refused_by_name(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"GB are free: lower generation\.slots"):
        async with started(directory, NAME, slots=10**8):
            pass


async def test_a_share_of_the_gpu_is_all_that_is_taken(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, total = torch.cuda.mem_get_info(DEVICE)
    monkeypatch.setenv(gpus.SHARE_VARIABLE, "0.05")
    try:
        device = choose_device("auto", "generation.device")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.06 * total), dtype=torch.uint8, device=device)
        slot = 2 * 6 * 4 * 32 * (256 + 32) * 4  # bytes of qwen3-small
        with pytest.raises(ModelError, match=r"GB are free: lower generation\.slots"):
            async with started(directory, NAME, slots=int(0.06 * total) // slot):
                pass
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_weights_come_out_of_shared_memory_that_goes_right_after(tmp_path: Path, dtype: Dtype) -> None:
    """Published from one model on the GPU, loaded into another there."""
    base, new = tiny_model(seed=0), tiny_model(seed=1)
    directory = tmp_path / "model"
    random_model("qwen3-tiny")(directory)  # for its tokenizer
    base.save_pretrained(directory)
    requests = [request(slot, new_tokens=10) for slot in range(2)]
    tensors = {name: parameter.detach() for name, parameter in on_gpu(new).named_parameters()}
    publisher = WeightPublisher("gpu-test", tmp_path)
    try:
        manifest = publisher.publish(1, 1, tensors, getattr(torch, dtype))
        mapped = tuple(source for source in manifest.sources if source.startswith("shm:"))
        manifest = msgspec.structs.replace(manifest, sources=mapped)
        async with started(directory, NAME) as engine:
            before = await answers(engine, requests)
            puller = WeightPuller()
            with puller.pull(manifest) as pulled:
                await engine.load_weights(manifest.weights, pulled)
                del pulled
            assert puller.way == "mapped"
            publisher.close()  # also the memory's name is gone
            after = await answers(engine, requests)
    finally:
        publisher.close()
    check_logprobs(base, requests, before.values())
    assert {span.weights for one in after.values() for span in one.spans} == {manifest.weights}
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    check_logprobs(new, requests, after.values())


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("qwen2", True), ("llama", True), ("olmo2", False)])
def test_logprobs_equal_a_full_forward_of_a_cpu(family: str, fused: bool) -> None:
    model = tiny_model(family)
    requests = [request(slot, new_tokens=8 + 5 * slot) for slot in range(3)]
    requests.append(request(3, temperature=0.6, top_p=0.9, top_k=20))
    check_logprobs(model, requests, run_all(decoder_of(on_gpu(model), slots=5, fused=fused), requests))


@pytest.mark.parametrize(("family", "fused"), [("qwen3", True), ("llama", True), ("olmo2", False)])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_with_drafts_every_sample_is_the_one_without(family: str, fused: bool, temperature: float) -> None:
    model = tiny_model(family)
    same = prompt_of(9)
    requests = [
        *(request(slot, prompt=same, samples=range(4), new_tokens=30, temperature=temperature) for slot in range(2)),
        request(2, new_tokens=17, temperature=temperature),
    ]
    plain = by_sample(run_all(decoder_of(on_gpu(model), slots=5, fused=fused), requests))
    decoder = decoder_of(on_gpu(model), slots=5, fused=fused)
    decoder.drafting = Drafting(said=SaidBefore(10_000), max_tokens=8, step_s=lambda tokens, context: 1.0)
    drafted = by_sample(run_all(decoder, requests))
    check_same(model, requests, drafted, plain, 1e-4)
    assert decoder.drafted > 0
    assert decoder.accepted > 0 or temperature


def test_steps_are_timed_until_the_gpu_is_done() -> None:
    decoder = decoder_of(on_gpu(tiny_model()), slots=8)
    cost = measure_steps(decoder._forward, decoder._kv, MonotonicClock(), max_drafted=3)
    assert list(cost.tokens) == [1, 2, 4, 8, 16, 32]
    assert min(cost.seconds) > 0
    requests = [request(0)]
    check_logprobs(tiny_model(), requests, run_all(decoder, requests))


def test_grown_slots_keep_what_they_hold() -> None:
    shape = KVShape(layers=2, heads=2, head_dim=8)
    kv = SlotKV(shape, slots=3, max_tokens=300, dtype=torch.float32, device=DEVICE)
    keys, values = (torch.randn(3, 2, 8, device=DEVICE) for _ in range(2))
    kv.append(1, torch.arange(3, device=DEVICE), torch.tensor([5, 5, 5], device=DEVICE), keys, values)
    kv.reserve(FIRST_CAPACITY + 1, 3, 3)
    kv.reserve(300, 3, 3)
    live_keys, live_values = kv.live(1, 3, 6)
    assert torch.equal(live_keys[..., 5], keys)
    assert torch.equal(live_values[:, :, 5], values)
    assert sum(t.nbytes for t in kv.keys + kv.values) == shape.num_bytes(3, 3 * 300, torch.float32)


def test_samples_longer_than_the_first_capacity_equal_a_full_forward() -> None:
    model = tiny_model()
    requests = [request(0, samples=(0,), new_tokens=180), request(1, samples=(0, 1), new_tokens=100)]
    check_logprobs(model, requests, run_all(decoder_of(on_gpu(model), slots=3), requests))


def test_logits_that_are_not_finite_fail_their_samples_and_poison_no_slot() -> None:
    model = tiny_model()
    decoder = decoder_of(on_gpu(model), slots=3)
    good = {name: tensor.clone() for name, tensor in decoder.parameters.items()}
    decoder.submit(request(0, samples=(0, 1), temperature=0.7, top_p=0.9))
    decoder.step()
    decoder.load_weights(V1, {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()})
    failures = decoder.step()
    assert sorted(sample for one in failures for sample in one.samples) == [0, 1]
    assert all(isinstance(one, EngineFailure) and "not finite" in one.reason for one in failures)
    decoder.load_weights(V0, good)
    again = request(1)
    check_logprobs(model, [again], run_all(decoder, [again]))


def test_a_sample_that_goes_on_elsewhere_is_the_one_that_was_not_interrupted() -> None:
    """Begun on the GPU and ended on a CPU, and the other way round."""
    model = tiny_model("llama")
    asked = request(0, new_tokens=12, temperature=0.8)
    for begins, ends in ((on_gpu(model), model), (model, on_gpu(model))):
        whole = by_sample(run_all(decoder_of(begins), [asked]))
        begun = {sample: beginning_of(whole["0/0", sample], tokens) for sample, tokens in ((0, 5), (2, 11))}
        again = by_sample(run_all(decoder_of(ends, slots=2), [replace(asked, begun=begun)]))
        check_same(model, [asked], again, whole, 1e-4)
        assert [again["0/0", sample].resumed for sample in range(3)] == [5, 0, 11]
        assert {one.finish_reason for one in again.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("fused", [True, False])
def test_a_later_turn_goes_on_from_the_kept_keys_and_values_of_the_earlier_one(fused: bool) -> None:
    model = tiny_model()
    decoder = decoder_of(on_gpu(model), fused=fused)
    asked, answered = first_turns(decoder, temperature=0.8)
    turns = [next_turn(asked, one, added=4 + one.sample) for one in answered.values()]
    prefilled = decoder.prefill_tokens
    found = by_sample(run_all(decoder, turns))
    assert decoder.prefill_tokens == prefilled
    assert decoder.reused_tokens > 0
    for turn in turns:
        check_logprobs(model, [turn], [found[turn.group_id, turn.samples[0]]])


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.0, 1, 0), (1, 1, 0), (0.7, 0.8, 0), (1.3, 0.6, 7)])
def test_draws_are_those_of_a_cpu(temperature: float, top_p: float, top_k: int) -> None:
    rows = 64
    logits = torch.randn(rows, 700, generator=torch.Generator().manual_seed(7)) * 2
    draw = Draw(
        temperature=np.full(rows, temperature, np.float32),
        top_p=np.full(rows, top_p, np.float32),
        top_k=np.full(rows, top_k, np.int64),
        uniforms=(np.arange(rows) + 0.5) / rows,
    )
    tokens, logprobs = sample_tokens(logits.to(DEVICE), draw.to(DEVICE))
    expected, theirs = sample_tokens(logits, draw.to(CPU))
    assert tokens.tolist() == expected.tolist()
    assert logprobs == pytest.approx(theirs, abs=1e-5)


# --- evaluation and scoring -------------------------------------------------------------------------------------------


def test_an_evaluation_answers_as_on_a_cpu(tmp_path: Path) -> None:
    told = []
    for device in (NAME, "cpu"):
        run_dir = tmp_path / device
        random_model("qwen3-tiny")(run_dir / "model")
        few = ["eval.problems=4", "sampling.max_new_tokens=24"]
        of_engine = [f'generation.device="{device}"', 'generation.dtype="float32"']
        resolved = resolve("tiny", [], [*few, *of_engine], {})
        (run_dir / "config.toml").write_text(render(resolved))
        write_held_out(resolved.settings, run_dir / "model", run_dir / "eval.jsonl")
        kept = run_dir / "answers.jsonl"
        reward = "workers.scoring.rewards:digit_share"
        figures = evaluate_run(run_dir, str(run_dir / "model"), cache_dir=run_dir, reward=reward, answers=kept)
        said = [msgspec.json.decode(line, type=Answer).response for line in kept.read_bytes().splitlines()]
        told.append((said, figures))
    assert len(told[0][0]) == 4
    same = sum(one == other for one, other in zip(told[0][0], told[1][0], strict=True))
    assert same >= 3, "one may meet a tie"
    if same == 4:
        assert told[0][1] == told[1][1]


@pytest.mark.parametrize("offload", ["none", "reference"])
def test_reference_logprobs_are_those_of_a_cpu(directory: Path, offload: Literal["none", "reference"]) -> None:
    groups = make_groups(prompt_tokens=(5, 3, 40), response_tokens=((4, 1, 7), (30, 2), (6, 3, 1, 8)))

    def logprobs(device: str, offload: Literal["none", "reference"]) -> dict[Any, np.ndarray]:
        settings = Settings(
            scoring=ScoringSettings(device=device, offload=offload), trainer=TrainerSettings(dtype="float32")
        )
        computed = reference_logprobs(directory, settings)
        computed(groups[:1])
        return computed(groups)  # once more: its layers come again

    expected, found = logprobs("cpu", "none"), logprobs(NAME, offload)
    assert found.keys() == expected.keys()
    for row, values in expected.items():
        assert found[row] == pytest.approx(values, abs=1e-3)
