"""The embedded engine as its worker sees it: a thread, a real model directory, asyncio around it."""

import asyncio
import gc
import json
import threading

import numpy as np
import pytest
import torch
from torch._utils import _get_device_index
from transformers import PreTrainedModel

from tests.fakes.tiny_models import VOCAB, full_logprobs, tiny_model
from transport.contracts.settings import GenerationSettings
from transport.contracts.types import FinishReason, GroupId, SamplingParams, WeightIdentity
from transport.process import gpus
from transport.process.clock import MonotonicClock
from workers.errors import EngineCrashedError, ModelError, WeightsMismatchError
from workers.generation.embedded.engine import EmbeddedEngine, check_memory, load_model
from workers.generation.embedded.slots import SlotDecoder
from workers.generation.engine import EngineFailure, GenerationRequest
from workers.models import check_model_dir, choose_device, random_model, stop_token_ids

V1 = WeightIdentity(epoch=1, version=1)


@pytest.fixture
def directory(tmp_path):
    random_model("qwen3-tiny")(tmp_path)  # for its tokenizer; the weights are replaced by ones a test can tell apart
    tiny_model().save_pretrained(tmp_path)
    check_model_dir(tmp_path)
    return tmp_path


@pytest.fixture
async def engine(directory):
    engine = EmbeddedEngine(GenerationSettings(slots=4, dtype="float32", max_context=256), directory, MonotonicClock())
    yield engine
    await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine") and thread.is_alive()]


def request(slot, *, samples=(0, 1, 2), new_tokens=12, prompt_tokens=9):
    rng = np.random.default_rng(slot)
    return GenerationRequest(
        group_id=GroupId(f"0/{slot}"),
        prompt_ids=rng.integers(2, VOCAB, prompt_tokens).astype(np.int32),
        samples=samples,
        sampling=SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, seed=slot),
    )


async def collect(engine, count):
    results = []
    async with asyncio.timeout(60):
        while len(results) < count:
            results += await engine.results()
    return results


async def test_groups_come_out_sample_by_sample_with_their_logprobs(engine):
    info = await engine.start()
    assert (info.capacity, info.max_context, info.vocab_size) == (4, 256, VOCAB)
    requests = {each.group_id: each for each in (request(slot, new_tokens=5 + 5 * slot) for slot in range(4))}
    for each in requests.values():
        engine.submit(each)
    assert engine.load().running + engine.load().waiting == 12
    results = await collect(engine, 12)
    model = tiny_model()
    for result in results:
        assert result.queued_s >= 0
        assert result.engine_s > 0
        expected = full_logprobs(model, requests[result.group_id].prompt_ids, result.response_ids)
        assert np.abs(expected - result.logprobs).max() < 1e-4
    load = engine.load()
    assert (load.running, load.waiting, load.tokens) == (0, 0, 3 * (5 + 10 + 15 + 20))
    assert load.busy_s > 0


async def test_new_weights_reach_running_samples_and_mark_their_spans(engine):
    await engine.start()
    asked = request(0, samples=(0,), new_tokens=240)
    engine.submit(asked)
    new = {name: tensor.detach() for name, tensor in tiny_model(seed=1).named_parameters()}
    await engine.load_weights(V1, new)
    engine.submit(request(1, samples=(0,), new_tokens=4))
    first, second = sorted(await collect(engine, 2), key=lambda result: result.group_id)
    assert first.spans[-1].weights == V1
    assert [span.weights for span in second.spans] == [V1]
    expected = full_logprobs(tiny_model(seed=1), request(1).prompt_ids, second.response_ids)
    assert np.abs(expected - second.logprobs).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(3)}), "unknown: extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight \(3,\) instead of"),
    ],
)
async def test_weights_that_do_not_fit_are_named_and_change_nothing(engine, change, said):
    await engine.start()
    tensors = {name: tensor.detach().clone() for name, tensor in tiny_model(seed=1).named_parameters()}
    change(tensors)
    with pytest.raises(WeightsMismatchError, match=said):
        await engine.load_weights(V1, tensors)
    engine.submit(request(0))
    for result in await collect(engine, 3):
        assert [span.weights.version for span in result.spans] == [0]
        expected = full_logprobs(tiny_model(), request(0).prompt_ids, result.response_ids)
        assert np.abs(expected - result.logprobs).max() < 1e-4


@pytest.mark.parametrize("names", [("lm_head.weight",), ("model.embed_tokens.weight",), None])
async def test_a_tied_head_may_come_under_either_name_or_both(engine, names):
    await engine.start()
    new = tiny_model(seed=1)
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    tensors = {
        name: tensor.detach()
        for name, tensor in new.named_parameters(remove_duplicate=False)
        if names is None or name not in tied or name in names
    }
    await engine.load_weights(V1, tensors)
    engine.submit(request(0, samples=(0,)))
    (result,) = await collect(engine, 1)
    assert np.abs(full_logprobs(new, request(0).prompt_ids, result.response_ids) - result.logprobs).max() < 1e-4


async def test_an_abort_returns_partial_tokens(engine):
    await engine.start()
    engine.submit(request(0, new_tokens=240))
    engine.submit(request(1, samples=(0,), new_tokens=1))
    await collect(engine, 1)  # it was admitted after the long ones, so they have drawn a token too
    await engine.abort([(GroupId("0/0"), 0)])
    results = await collect(engine, 3)
    assert sorted(result.sample for result in results) == [0, 1, 2]
    for result in results:
        assert result.finish_reason is FinishReason.ABORT
        assert 0 < len(result.response_ids) < 240
        expected = full_logprobs(tiny_model(), request(0).prompt_ids, result.response_ids)
        assert np.abs(expected - result.logprobs).max() < 1e-4
    assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_an_impossible_request_comes_out_as_a_failure_and_the_rest_goes_on(engine):
    await engine.start()
    engine.submit(request(0, prompt_tokens=250))
    engine.submit(request(1, samples=(0,)))
    failure, completion = await collect(engine, 2)
    assert isinstance(failure, EngineFailure)
    assert not failure.retryable
    assert completion.group_id == "0/1"


async def test_a_crash_of_the_thread_surfaces_from_every_wait_and_nowhere_else(engine, monkeypatch):
    elsewhere = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: elsewhere.append(context))
    await engine.start()

    def explode(self):
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(SlotDecoder, "step", explode)
    engine.submit(request(0))
    async with asyncio.timeout(60):
        with pytest.raises(EngineCrashedError, match="the device is on fire"):
            await engine.results()
        with pytest.raises(EngineCrashedError):
            await engine.abort([(GroupId("0/0"), 0)])
        with pytest.raises(EngineCrashedError):
            await engine.load_weights(V1, {})
        await engine.close()
    gc.collect()
    await asyncio.sleep(0)
    assert elsewhere == []


async def test_close_ends_the_thread_in_the_middle_of_work(engine):
    await engine.start()
    engine.submit(request(0, new_tokens=200))
    await engine.close()
    with pytest.raises(EngineCrashedError, match="was closed"):
        await engine.results()


def _remove(name):
    return lambda directory: (directory / name).unlink()


def _cut_weights(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop_a_tensor(directory):
    model = tiny_model()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(directory, state_dict=tensors)


def _edit_config(**changes):
    def edit(directory):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_remove("config.json"), "config.json is missing"),
        (_remove("model.safetensors"), "model.safetensors is missing"),
        (_cut_weights, "model.safetensors is broken"),
        (_drop_a_tensor, "lacks weights of its model: model.norm.weight"),
        (_edit_config(model_type="no-such-model"), "no-such-model"),
        (_edit_config(vocab_size=50), "cannot be loaded"),
        (
            _edit_config(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2),
            "full attention",
        ),
    ],
)
async def test_a_broken_model_directory_is_named(engine, directory, damage, said):
    damage(directory)
    with pytest.raises(ModelError, match=said) as raised:
        await engine.start()
    assert str(directory) in str(raised.value) or "full attention" in said


async def test_a_missing_model_directory_is_named(tmp_path):
    engine = EmbeddedEngine(GenerationSettings(), tmp_path / "nowhere", MonotonicClock())
    with pytest.raises(ModelError, match="nowhere does not exist"):
        await engine.start()
    await engine.close()


def test_stop_tokens_are_what_the_model_directory_names(directory):
    assert stop_token_ids(directory) == (1, 3), "of the model, and of its tokenizer"
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert stop_token_ids(directory) == (1, 3, 7)
    _edit_config(eos_token_id=None)(directory)
    (directory / "generation_config.json").unlink()
    assert stop_token_ids(directory) == (3,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "cuda:7"}, "torch sees 0 GPUs here"),
        ({"device": "toaster"}, "not a device"),
        ({"max_context": 999}, "allows 256"),
        ({"slots": 10**9}, "lower generation.slots"),
    ],
)
async def test_impossible_engine_settings_are_named(directory, change, said):
    engine = EmbeddedEngine(GenerationSettings(**({"slots": 2} | change)), directory, MonotonicClock())
    with pytest.raises(ModelError, match=said):
        await engine.start()
    await engine.close()


# --- a GPU, of which torch's own bookkeeping stands in


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_share_of_a_gpu_is_set_however_the_device_is_named(monkeypatch, name, index):
    limited = []
    monkeypatch.setenv(gpus.SHARE_VARIABLE, "0.45")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: limited.append((share, _get_device_index(device))),
    )
    choose_device(name, "generation.device")
    assert limited == [(0.45, index)]


async def test_a_model_that_does_not_fit_into_memory_is_named(engine, monkeypatch):
    def refuse(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(PreTrainedModel, "to", refuse)
    with pytest.raises(
        ModelError, match=r"does not fit into the memory of cpu \(generation.device\): CUDA out of memory$"
    ):
        await engine.start()


def test_slots_have_to_fit_into_what_the_process_may_use_of_a_gpu(directory, monkeypatch):
    """Half of a GPU of 1 GB is its share, of which .1 GB is taken; others left it more than that."""
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    on_gpu = type("Parameter", (), {"device": torch.device("cuda", 0), "dtype": torch.float32})()
    parameters = {"model.norm.weight": on_gpu}
    object.__setattr__(model, "parameters", parameters)
    monkeypatch.setenv(gpus.SHARE_VARIABLE, "0.5")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (800_000_000, 1_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100_000_000)
    slot = model.forward.kv_shape.num_bytes(1, model.max_context, torch.float32)
    check_memory(model, 400_000_000 // slot)
    with pytest.raises(ModelError, match=r"0\.4 GB are free: set generation\.kv_tokens, or lower generation\.slots"):
        check_memory(model, 400_000_000 // slot + 1)
    check_memory(model, 400_000_000 // slot + 1, model.max_context)
    with pytest.raises(ModelError, match=r"0\.4 GB are free: lower generation\.kv_tokens or generation\.max_context"):
        check_memory(model, 10_000, 400_000_000 // slot * model.max_context)


async def test_memory_that_cannot_hold_one_sample_is_refused_at_the_start(directory):
    settings = GenerationSettings(slots=4, dtype="float32", max_context=256, kv_tokens=255)
    engine = EmbeddedEngine(settings, directory, MonotonicClock())
    with pytest.raises(ModelError, match=r"kv_tokens is 255, and one sample may take 256 tokens: raise it"):
        await engine.start()
    await engine.close()


async def test_an_engine_says_what_its_memory_holds_and_how_much_of_it_is_used(directory):
    settings = GenerationSettings(slots=4, dtype="float32", max_context=256, kv_tokens=600)
    engine = EmbeddedEngine(settings, directory, MonotonicClock())
    info = await engine.start()
    assert (info.capacity, info.kv_tokens, info.kv_padded) == (4, 600, True)
    engine.submit(request(0))
    most = 0
    results = []
    async with asyncio.timeout(60):
        while len(results) < 3:
            results += await engine.results()
            most = max(most, engine.load().running)
    assert {len(result.response_ids) for result in results} == {12}
    assert most <= 2, "two contexts fit"
    assert (engine.load().kv_use, engine.load().retracted_samples) == (0.0, 0)
    await engine.close()
