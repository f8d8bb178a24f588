"""Adapters beside a frozen base: what is trained, saved, resumed, published and written at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orchestrator.config.load import resolve
from tests.fakes.parallel_ranks import run_layout
from tests.fakes.sharded import STEPS, Training, errors, resumed
from tests.fakes.tiny_models import tiny_model
from tests.fakes.trainer_run import DigestPublisher, TrainerRun, tiny_settings
from transport.broker import keys
from transport.contracts.llms import from_config
from transport.contracts.messages import TrialRows, manifest_decoder
from transport.contracts.settings import GenerationSettings, LoraSettings
from transport.contracts.training_memory import Layout, state_bytes
from transport.contracts.training_memory import Training as MemoryOf
from transport.contracts.types import WeightIdentity
from transport.process.clock import MonotonicClock
from workers.commands.build import adapted_model
from workers.commands.check import check_workers
from workers.errors import ModelError, ResumeMismatchError, WeightsMismatchError
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.server.client import ServerSettings
from workers.generation.server.engine import KINDS, ServerEngine
from workers.models import character_tokenizer, prepare_model, weight_files
from workers.trainer.policy.lora import adapted_layers, initialise
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import SingleRank
from workers.weights.adapters import AdaptedWeights, Merging, is_adapter
from workers.weights.parts import shard_of
from workers.weights.pull import WeightPuller

LORA = LoraSettings(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


def lora_run(model_dir: Path, run_dir: Path, lora: LoraSettings = LORA, **trainer: object) -> TrainerRun:
    return TrainerRun(model_dir, run_dir, tiny_settings(lora=lora, **trainer))


async def train(run: TrainerRun, batches: Sequence[int]) -> dict[int, str]:
    """Send batches and the end, train them, return the digest of each version."""
    for batch in batches:
        await run.send_batch(batch)
    await run.finish()
    publisher = DigestPublisher()
    await run.trainer(publisher).run()
    return publisher.digests


@pytest.fixture(scope="module")
def trained(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run of three batches."""
    directory = tmp_path_factory.mktemp("trained")
    asyncio.run(train(lora_run(model_dir, directory), range(3)))
    return directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None] % 60).logits


# --- training ---------------------------------------------------------------------------------------------------------


async def test_resuming_goes_on_exactly(model_dir: Path, tmp_path: Path) -> None:
    expected = await train(lora_run(model_dir, tmp_path / "whole"), range(4))
    parts = lora_run(model_dir, tmp_path / "parts")
    first = await train(parts, range(2))
    second = await train(parts, range(2, 4))
    assert first == {version: expected[version] for version in range(3)}
    assert second == {version: expected[version] for version in range(2, 5)}
    assert len(set(expected.values())) == 5


def test_a_base_is_frozen_and_takes_no_more_than_it_computes_with() -> None:
    policy = PolicyModel(tiny_model(), dtype=torch.bfloat16, temperature=1.0, lora=LORA)
    base = {name: p for name, p in policy.module.named_parameters() if "lora" not in name}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in base.values())
    assert all(".lora_" in name for name in policy.masters)
    assert {master.dtype for master in policy.masters.values()} == {torch.float32}
    assert policy.gradient.numel() == sum(master.numel() for master in policy.masters.values())


@pytest.mark.parametrize(
    ("dtype", "targets"), [(torch.bfloat16, ["all-linear"]), (torch.float32, ["q_proj", "down_proj"])]
)
def test_what_a_rank_holds_is_what_is_predicted(dtype: torch.dtype, targets: list[str]) -> None:
    module = tiny_model(layers=4)
    lora = LoraSettings(rank=4, targets=targets)
    policy = PolicyModel(module, dtype=dtype, temperature=1.0, lora=lora)
    base, masters = (sum(one.nbytes for one in held.values()) for held in (policy.published, policy.masters))
    copies = sum(one.nbytes for one in module.parameters() if one.dtype == torch.bfloat16 and one.requires_grad)
    held = base + masters + policy.gradient.nbytes + 2 * masters + copies  # AdamW has two moments
    predicted = MemoryOf(tokens=64, compute_bytes=dtype.itemsize, lora_rank=4, lora_targets=tuple(targets))
    llm = from_config("tiny", module.config.to_dict())
    assert state_bytes(llm, Layout(), predicted) == pytest.approx(held, rel=0.01)


def test_adapters_change_nothing_before_they_are_trained() -> None:
    module = tiny_model()
    before = logits(module)
    PolicyModel(module, dtype=torch.float32, temperature=1.0, lora=LORA)
    assert torch.equal(logits(module), before)


def test_first_values_depend_on_the_seed_and_the_name() -> None:
    name, other = "a.lora_A.weight", "b.lora_A.weight"
    found = [{one: torch.ones(4, 8) for one in (name, other)} for _ in range(3)]
    for parameters, seed in zip(found, (0, 0, 1), strict=True):
        initialise(parameters, seed)
    assert torch.equal(found[0][name], found[1][name])
    assert not torch.equal(found[0][name], found[0][other])
    assert not torch.equal(found[0][name], found[2][name])


# --- which layers -----------------------------------------------------------------------------------------------------


@cache
def module() -> Any:
    return tiny_model()


@pytest.mark.parametrize(
    ("targets", "count"),
    [(["all-linear"], 14), (["q_proj"], 2), (["q_proj", "mlp.up_proj"], 4), (["model.layers.1.self_attn.q_proj"], 1)],
)
def test_layers_by_the_ends_of_their_names(targets: list[str], count: int) -> None:
    assert len(adapted_layers(module(), LoraSettings(rank=1, targets=targets))) == count


@pytest.mark.parametrize("target", ["query", "proj", "lm_head", "embed_tokens"])
def test_a_target_that_matches_nothing_says_which_there_are(target: str) -> None:
    wanted = (
        rf"trainer\.lora\.targets = \['q_proj', '{target}'\]: the model has no linear layer '{target}'"
        r"( \(did you mean \S+\?\))?; it has "
        r'down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or take "all-linear"'
    )
    with pytest.raises(ModelError, match=wanted):
        PolicyModel(
            tiny_model(), dtype=torch.float32, temperature=1.0, lora=LoraSettings(rank=1, targets=["q_proj", target])
        )


def test_a_rank_beyond_a_layer_is_refused_with_the_bound() -> None:
    smallest = min(
        min(module().get_submodule(name).weight.shape) for name in adapted_layers(module(), LoraSettings(rank=1))
    )
    adapted_layers(module(), LoraSettings(rank=smallest))
    with pytest.raises(ModelError, match=rf"lora.rank = {smallest + 1} must be at most {smallest}, the smaller"):
        adapted_layers(module(), LoraSettings(rank=smallest + 1))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (LoraSettings(rank=100_000), r"trainer\.lora\.rank = 100000 must be at most 32"),
        (LoraSettings(rank=4, targets=["qproj"]), r"no linear layer 'qproj' \(did you mean q_proj\?\)"),
    ],
)
def test_adapters_that_cannot_be_are_said_before_a_run_begins(lora: LoraSettings, said: str) -> None:
    settings = resolve("tiny", [], [], {}).settings
    trainer = msgspec.structs.replace(settings.trainer, lora=lora)
    with pytest.raises(ModelError, match=said):
        check_workers(msgspec.structs.replace(settings, trainer=trainer), TrialRows(rows=[]))


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_checkpoints_hold_adapters_alone(trained: Path) -> None:
    checkpoint = trained / "checkpoints" / "step-3"
    names = load_file(checkpoint / "model.safetensors").keys()
    assert names
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    moments = load_file(checkpoint / "optimizer.safetensors").keys() - {"torch_random_state"}
    assert {name.partition(".")[2] for name in moments} == names


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (LoraSettings(rank=8, alpha=8.0), r"trainer\.lora\.rank: 4 in the checkpoint, 8 now"),
        (LoraSettings(rank=4, alpha=4.0), r"trainer\.lora\.alpha: 8\.0 in the checkpoint, 4\.0 now"),
        (LoraSettings(rank=4, alpha=8.0, targets=["q_proj"]), r'targets: \["all-linear"\] in the checkpoint, \["q_pro'),
        (LoraSettings(), r"trainer\.lora\.rank: 4 in the checkpoint, not set now"),
    ],
    ids=["rank", "alpha", "targets", "off"],
)
async def test_a_checkpoint_of_other_adapters_is_refused(
    model_dir: Path, trained: Path, now: LoraSettings, named: str
) -> None:
    with pytest.raises(ResumeMismatchError, match=named):
        await lora_run(model_dir, trained, now).trainer(DigestPublisher()).run()


async def test_a_checkpoint_of_full_training_is_refused(model_dir: Path, tmp_path: Path) -> None:
    await train(TrainerRun(model_dir, tmp_path, tiny_settings()), [0])
    with pytest.raises(ResumeMismatchError, match=r"trainer\.lora\.rank: not set in the checkpoint, 4 now"):
        await lora_run(model_dir, tmp_path).trainer(DigestPublisher()).run()


def test_a_checkpoint_is_gone_on_from_by_other_ranks(tmp_path: Path) -> None:
    """One process -> two data ranks -> one process; three inner dimensions do not divide."""
    training = Training(lora_rank=3)
    expected = resumed(SingleRank(), training, range(STEPS), tmp_path / "whole")
    resumed(SingleRank(), training, range(2), tmp_path / "parts")
    run_layout(Layout(data=2), resumed, training, range(2, 4), tmp_path / "parts")
    last = resumed(SingleRank(), training, range(4, STEPS), tmp_path / "parts")
    assert expected.moved > 1e-3
    update = {name: after - expected.before[name] for name, after in last.after.items()}
    found = replace(last, losses=[*expected.losses[:4], *last.losses], update=update)
    assert max(errors([found], expected)) <= 1e-9


# --- what is given away -----------------------------------------------------------------------------------------------


def moved(policy: PolicyModel) -> PolicyModel:
    """As if it had been trained."""
    generator = torch.Generator().manual_seed(1)
    for master in policy.masters.values():
        master.data.add_(torch.randn(master.shape, generator=generator) * 0.1)
    policy.refresh()
    return policy


def test_published_weights_are_the_policy_in_a_plain_model() -> None:
    policy = moved(PolicyModel(tiny_model(), dtype=torch.float32, temperature=1.0, lora=LORA))
    merging = policy.merging()
    weights = {name: merging(name, shard_of(tensor)) for name, tensor in policy.published.items()}
    plain = tiny_model(seed=5)
    assert weights.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()
    base = logits(tiny_model())
    assert (logits(policy.module) - base).abs().max() > 0.1
    assert (logits(plain) - logits(policy.module)).abs().max() < 1e-4


def test_a_weight_without_an_adapter_is_handed_on_as_it_is() -> None:
    weight = torch.ones(3)
    assert Merging({}, LORA)("model.norm.weight", shard_of(weight)).data_ptr() == weight.data_ptr()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers so
def test_the_final_model_is_merged_and_its_adapter_is_read_by_peft(model_dir: Path, trained: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'streamrl[bench]'")
    merged = AutoModelForCausalLM.from_pretrained(trained / "model")
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    before = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, trained / "model" / "adapter")
    adapters = load_file(trained / "checkpoints" / "step-3" / "model.safetensors")
    read = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in adapted.named_parameters()}
    assert all(torch.equal(read[name], tensor) for name, tensor in adapters.items())
    assert (logits(merged) - before).abs().max() > 1e-2
    assert (logits(merged) - logits(adapted)).abs().max() < 1e-4


def test_an_adapter_directory_says_what_it_is(model_dir: Path, trained: Path) -> None:
    found = json.loads((trained / "model" / "adapter" / "adapter_config.json").read_text())
    assert (found["peft_type"], found["r"], found["lora_alpha"]) == ("LORA", 4, 8.0)
    assert found["base_model_name_or_path"] == str(model_dir)
    assert found["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


# --- adapters alone, for an engine that serves both as one ------------------------------------------------------------


def adapters_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in policy.masters.items()}


async def test_an_engine_serves_its_base_with_the_newest_adapters(tmp_path: Path) -> None:
    """A second version is added to the base, not to the first."""
    base = tiny_model()
    base.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    policy = moved(PolicyModel(tiny_model(), dtype=torch.float32, temperature=1.0, lora=LORA))
    first = adapters_of(policy)
    second = adapters_of(moved(policy))
    merging = policy.merging()
    expected = {name: merging(name, shard_of(tensor)) for name, tensor in policy.published.items()}
    settings = GenerationSettings(slots=2, dtype="float32", max_context=64)
    engine = EmbeddedEngine(settings, tmp_path, MonotonicClock(), lora=LORA)
    await engine.start()
    try:
        for version, adapters in enumerate((first, second)):
            weights = WeightIdentity(epoch=1, version=version, digest="")
            await engine.load_weights(weights, adapters)
        assert engine._decoder is not None
        served = engine._decoder.parameters
        assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
        halves = {name: tensor for name, tensor in second.items() if name.endswith("lora_A.weight")}
        for wrong in (halves, expected, {name.replace("layers", "lays"): one for name, one in second.items()}):
            with pytest.raises(WeightsMismatchError):
                await engine.load_weights(weights, wrong)
        assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())
    finally:
        await engine.close()


def test_a_server_gets_the_model_of_the_directory_with_the_adapters(tmp_path: Path) -> None:
    """Whose weights are in several files; all of them, cast as its engine has them."""
    tiny_model().save_pretrained(tmp_path, max_shard_size="20KB")
    character_tokenizer().save_pretrained(tmp_path)
    assert len(weight_files(tmp_path)) > 1
    policy = moved(PolicyModel(tiny_model(), dtype=torch.float32, temperature=1.0, lora=LORA))
    merging = policy.merging()
    expected = {name: merging(name, shard_of(tensor)) for name, tensor in policy.published.items()}
    settings = ServerSettings(directory=tmp_path, log=tmp_path / "log", dtype="bfloat16")
    complete = adapted_model(tmp_path, LORA, trust_remote_code=False)
    engine = ServerEngine(KINDS["sglang"], settings, MonotonicClock(), complete=complete)
    weights = WeightIdentity(epoch=1, version=1, digest="")
    with (
        closing(engine._hold(weights, adapters_of(policy))) as held,
        WeightPuller().pull(held.offer(same_host=True)) as served,
    ):
        found = {name: one.tolist() for name, one in served.items()}
    assert found == {name: one.bfloat16().tolist() for name, one in expected.items()}
    halves = {name: one for name, one in adapters_of(policy).items() if name.endswith("lora_A.weight")}
    with pytest.raises(WeightsMismatchError, match="not adapters alone"):
        engine._hold(weights, halves)
    (tmp_path / weight_files(tmp_path)[-1]).unlink()
    with pytest.raises(ModelError, match=r"safetensors is missing: it holds weights"):
        engine._hold(weights, adapters_of(policy))


def test_adapters_of_another_rank_do_not_fit() -> None:
    name = "model.layers.0.mlp.up_proj"
    adapters = {f"{name}.lora_A.weight": torch.zeros(2, 8), f"{name}.lora_B.weight": torch.zeros(6, 2)}
    with pytest.raises(
        WeightsMismatchError, match=r"up_proj\.weight with \(2, 8\) and \(6, 2\), trainer\.lora\.rank 4"
    ):
        AdaptedWeights({f"{name}.weight": torch.zeros(6, 8)}, adapters, LORA)


async def test_a_trainer_publishes_adapters_alone_where_it_is_asked(model_dir: Path, tmp_path: Path) -> None:
    run = lora_run(model_dir, tmp_path, LoraSettings(rank=4, publish="adapters"))
    await train(run, [0])
    manifests = [manifest_decoder.decode(e.entry.payload) for e in await run.broker.read(keys.WEIGHTS, "0-0", count=9)]
    assert len(manifests) == 2
    for manifest in manifests:
        assert {spec.dtype for spec in manifest.tensors} == {"float32"}
        assert all(is_adapter(spec.name) for spec in manifest.tensors)
