"""One model of a directory: trainer, engine and servers read the same tensors of it, or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Lfm2Config, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from tests.fakes.tiny_models import tiny_model
from workers.errors import ModelError
from workers.models import ModelFacts, changing_rope, character_tokenizer, check_kind, check_model_dir, check_rope
from workers.trainer.policy.loading import check_stored, empty_module
from workers.trainer.policy.model import empty_policy, load_module
from workers.weights.names import names_in_files
from workers.weights.pull import Renamed

Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 with a tokenizer."""
    transformers_logging.disable_progress_bar()
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    tiny_model().save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(copytree(saved, tmp_path / "model"))


def edit(directory: Path, change: Callable[[Tensors], Tensors], **config: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    named = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(named | config))


def check(directory: Path) -> list[str]:
    check_model_dir(directory)
    return check_stored(empty_module(directory), directory)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {one: tensor for one, tensor in tensors.items() if one != name}


def with_one(name: str, like: str, scale: float = 1.0) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensors[like].clone() * scale}


@pytest.mark.parametrize(
    ("change", "config", "problem"),
    [
        (with_one(HEAD, EMBEDDING, 2), {}, r"lm_head\.weight are one tensor .* set tie_word_embeddings to false"),
        (with_one(HEAD, EMBEDDING, 2), {"tie_word_embeddings": False}, ""),
        (with_one(HEAD, EMBEDDING), {}, ""),
        (lambda tensors: tensors, {"tie_word_embeddings": False}, "no tensor lm_head.weight: config.json says tie"),
        (without(NORM), {}, "no tensor model.norm.weight: it is not the whole model"),
        (
            with_one("model.layers.2.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
            {},
            "holds 1 tensor that a Qwen3",
        ),
        (
            with_one("model.layers.0.self_attn.q_proj.bias", NORM),
            {},
            "does not have, and that would be left out: model.l",
        ),
        (with_one("lm_head.bias", NORM), {}, "left out: lm_head.bias"),
        (with_one("model.layers.0.self_attn.rotary_emb.inv_freq", NORM), {}, ""),
        (lambda tensors: {f"_orig_mod.{name}": one for name, one in tensors.items()}, {}, "Save the model itself"),
        (lambda tensors: {name.removeprefix("model."): one for name, one in tensors.items()}, {}, ""),
        (
            lambda tensors: {n.replace("q_proj", "q_proj.base_layer"): t for n, t in tensors.items()},
            {},
            "merge_and_unload",
        ),
        (with_one("norm.weight", NORM), {}, "holds model.norm.weight 2 times"),
        (lambda tensors: {**tensors, NORM: tensors[NORM].to(torch.float8_e4m3fn)}, {}, "stored as float8_e4m3fn"),
        (lambda tensors: {**tensors, NORM: tensors[NORM].to(torch.int8)}, {}, "stored as int8"),
        (
            lambda tensors: tensors,
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantised weights \(quantization_config in config.json: fp8\)",
        ),
    ],
)
def test_a_directory_that_readers_would_read_otherwise_is_refused(
    directory: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any], problem: str
):
    edit(directory, change, **config)
    if problem:
        with pytest.raises(ModelError, match=problem):
            check(directory)
    else:
        assert check(directory) == []


def test_a_part_of_another_model_is_left_out_with_a_remark(directory: Path):
    edit(directory, with_one("v_head.weight", NORM))
    (said,) = check(directory)
    assert "1 tensor of" in said
    assert "v_head.weight" in said


def shard(directory: Path, *, names: Callable[[list[str]], dict[str, str]], keep: bool = False) -> None:
    """Two files and an index. names: tensor names -> what the index says.  keep: the single file, too."""
    tensors = load_file(directory / "model.safetensors")
    ordered = sorted(tensors)
    save_file({name: tensors[name] for name in ordered[:5]}, directory / "a.safetensors")
    save_file({name: tensors[name] for name in ordered[4 if keep is None else 5 :]}, directory / "b.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names(ordered)}))
    if not keep:
        (directory / "model.safetensors").unlink()


def right(ordered: list[str]) -> dict[str, str]:
    return {name: "a.safetensors" if index < 5 else "b.safetensors" for index, name in enumerate(ordered)}


def test_the_files_of_a_directory_are_the_same_to_every_reader(saved: Path, tmp_path: Path):
    def fresh(name: str) -> Path:
        return Path(copytree(saved, tmp_path / name))

    shard(good := fresh("good"), names=right)
    assert check(good) == []
    shard(both := fresh("both"), names=right, keep=True)
    with pytest.raises(ModelError, match=r"both model\.safetensors and model\.safetensors\.index"):
        check_model_dir(both)
    shard(twice := fresh("twice"), names=right, keep=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match=r"is in a\.safetensors and in b\.safetensors"):
        check_model_dir(twice)
    shard(absent := fresh("absent"), names=lambda ordered: right(ordered) | {"gone.weight": "a.safetensors"})
    with pytest.raises(ModelError, match=r"names gone\.weight, which is in none of its files"):
        check_model_dir(absent)
    beside = fresh("beside")
    save_file({NORM: torch.ones(32)}, beside / "old.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is in model\.safetensors and in old\.safetensors"):
        check_model_dir(beside)
    (adapter := fresh("adapter") / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds adapters of peft"):
        check_model_dir(adapter.parent)


@pytest.mark.parametrize("rows", [97, 40])
def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes(directory: Path, rows: int):
    edit(directory, lambda tensors: tensors, vocab_size=rows)
    if rows == 97:
        check_kind(directory)
        return
    with pytest.raises(ModelError, match=r"tokenizer of .* has 64 tokens, the last of them .* has 40 rows"):
        check_kind(directory)


# --- names, mixtures, kinds of layers ---------------------------------------------------------------------------------


def test_a_renamed_model_is_trained_as_transformers_reads_it(tmp_path: Path):
    with torch.random.fork_rng(devices=[]):
        AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL)).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    assert {"embed_out.weight"} <= load_file(tmp_path / "model.safetensors").keys()
    module = load_module(tmp_path, device=torch.device("cpu"))
    names = names_in_files(module, (name for name, _ in module.named_parameters()))
    assert {name: where for name, where in names.items() if name != where} == {HEAD: "embed_out.weight"}
    module.set_attn_implementation("eager")
    ids = torch.arange(4, 40)[None]
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids).logits
        assert torch.allclose(module(ids).logits, theirs, atol=1e-5)
    renamed = Renamed({HEAD: torch.ones(2), "a": torch.zeros(3)}, names)
    assert {name: tuple(tensor.shape) for name, tensor in renamed.items()} == {"embed_out.weight": (2,), "a": (3,)}
    assert dict(renamed.shapes()) == {"embed_out.weight": (2,), "a": (3,)}


def test_a_mixture_of_experts_is_refused_by_its_name(tmp_path: Path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, **experts)).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"qwen3_moe is a mixture of experts .* use a dense model"):
        empty_policy(tmp_path)


def test_a_layer_that_reads_its_neighbour_is_found_wherever_it_stands(tmp_path: Path):
    """The first two layers are honest, and so were the small weights that it was once tried with."""
    kinds = ["full_attention", "full_attention", "full_attention", "conv"]
    sizes = SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 2}
    AutoModelForCausalLM.from_config(Lfm2Config(**sizes, layer_types=kinds)).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be trained packed: .* \(its layers of kind conv\)"):
        empty_policy(tmp_path)


# --- ropes ------------------------------------------------------------------------------------------------------------

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_parameters": LONG}, 64),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 96}, 96),
        ({"rope_scaling": {"type": "longrope"}}, 512),
        ({"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}}, 64),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": ["odd"]}, None),
    ],
)
def test_a_rope_that_changes_is_refused_where_a_sample_may_reach_the_change(rope: dict[str, Any], limit: int | None):
    config = {"model_type": "phi3", "max_position_embeddings": 512, **rope}
    found = changing_rope(config)
    assert (found and found.limit) == limit
    check_rope(config, limit or 10**6)
    if limit:
        with pytest.raises(ModelError, match=rf"set generation\.max_context = {limit} or less"):
            check_rope(config, limit + 1)


def test_a_rope_that_servers_stretch_otherwise_is_refused_with_them():
    config = {"model_type": "x", "max_position_embeddings": 512, "rope_scaling": {"type": "dynamic"}}
    with pytest.raises(ModelError, match="always stretched by SGLang and vLLM"):
        check_rope(config, 512, served=True)
    assert ModelFacts(model_type="x", vocab_size=1, max_context=1).rope is None
