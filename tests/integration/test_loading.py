"""Weights that are read slice by slice are those of from_pretrained, on one rank and on several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fakes.parallel_ranks import run_layout, shard
from tests.fakes.tiny_models import tiny_model
from transport.contracts.training_memory import Layout
from workers.errors import ModelError
from workers.models import character_tokenizer, random_model
from workers.trainer.policy.loading import empty_module, load_weights
from workers.trainer.policy.parallel import Ranks

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def save(directory: Path, family: str = "qwen3", *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(family, tied=tied).to(dtype).save_pretrained(directory, max_shard_size="20KB")
    character_tokenizer().save_pretrained(directory)
    return directory


def assert_same(module: PreTrainedModel, directory: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours, theirs = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (module, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        found = ours[name].full_tensor() if isinstance(ours[name], DTensor) else ours[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), name
    if dist.is_initialized():
        return
    with torch.inference_mode():
        assert torch.equal(module(IDS).logits, expected.eval()(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2"])
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_equal_to_from_pretrained(tmp_path: Path, family: str, tied: bool, dtype: torch.dtype):
    save(tmp_path, family, tied=tied, dtype=dtype)
    module = empty_module(tmp_path, attention="sdpa")
    assert all(tensor.is_meta for tensor in module.parameters())
    load_weights(module, tmp_path)
    assert_same(module, tmp_path)
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) is tied


def test_random_model(tmp_path: Path):
    random_model("qwen3-tiny")(tmp_path)
    module = empty_module(tmp_path, attention="sdpa")
    load_weights(module, tmp_path)
    assert_same(module, tmp_path)


def test_scaled_rotary_embeddings_are_computed(tmp_path: Path):
    """The frequencies are in no file; a model that has the default ones with a scaled configuration is wrong."""
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    scaled = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    config["rope_parameters"] = scaled
    (tmp_path / "config.json").write_text(json.dumps(config))
    module = empty_module(tmp_path, attention="sdpa")
    load_weights(module, tmp_path)
    assert_same(module, tmp_path)


def test_a_part_of_the_model_takes_its_own(tmp_path: Path):
    """A last pipeline stage has a head of its own, which the directory stores as the embedding that it is tied to."""
    save(tmp_path, tied=True)
    module = empty_module(tmp_path, attention="sdpa")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    module.model.layers = torch.nn.ModuleDict({"1": module.model.layers[1]})
    del module.model.embed_tokens
    load_weights(module, tmp_path)
    parameters, expected = dict(module.named_parameters()), dict(whole.named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in parameters
    assert len(parameters) < len(expected)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name]), name


def test_files_without_the_trunks_prefix(tmp_path: Path):
    save(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for path in tmp_path.glob("model*"):
        path.unlink()
    bare = {name.removeprefix("model."): p.detach().clone() for name, p in expected.named_parameters()}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    module = empty_module(tmp_path, attention="sdpa")
    load_weights(module, tmp_path)
    assert_same(module, tmp_path)


@pytest.mark.parametrize("trouble", ["missing", "shape", "cut"])
def test_other_tensors_are_refused(tmp_path: Path, trouble: str):
    tiny_model().save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    module = empty_module(tmp_path, attention="sdpa")
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if trouble == "missing":
        del tensors[name]
    if trouble == "shape":
        tensors[name] = tensors[name][1:].clone()
    save_file(tensors, path, {"format": "pt"})
    if trouble == "cut":
        path.write_bytes(path.read_bytes()[:-4])
    said = {"missing": f"holds no tensor {name}", "shape": f"{name} has shape", "cut": "should have .* bytes and has"}
    with pytest.raises(ModelError, match=said[trouble]):
        load_weights(module, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-model"},
        {"model_type": "vit"},
        {"hidden_act": "nope"},
        {"num_hidden_layers": "two"},
        {"layer_types": ["full_attention"]},
        {"num_attention_heads": 0},
        {"hidden_size": -3},
    ],
    ids=str,
)
def test_a_configuration_that_no_model_can_be_built_from_is_named(tmp_path: Path, changes: dict[str, object]):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=f"cannot build a causal language model from {tmp_path}: "):
        empty_module(tmp_path)


# --- several ranks ----------------------------------------------------------------------------------------------------


def load_on_rank(ranks: Ranks, directory: Path, layouts: Sequence[tuple[int, int]]) -> None:
    for data, tensor in layouts:
        module = empty_module(directory, attention="sdpa")
        shard(module, data=data, tensor=tensor)
        load_weights(module, directory)
        assert_same(module, directory)
        embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        assert (embedding is head) is module.config.tie_word_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_takes_its_slices(tmp_path: Path, tied: bool):
    """With 97 words and 2 key heads, most tensors do not divide by the ranks."""
    directory = save(tmp_path / "model", tied=tied)
    run_layout(Layout(data=4), load_on_rank, directory, [(4, 1), (2, 2)])
