"""What is computed again gives the same gradients, bit for bit, and is not kept."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.tiny_models import tiny_model
from tests.fakes.training import make_groups
from workers.errors import ModelError
from workers.trainer.policy import attention
from workers.trainer.policy.model import packed_logprobs, predictor_hidden
from workers.trainer.policy.packing import PackedBatch, pack
from workers.trainer.policy.recompute import Recompute, recompute_activations


def packed_model(family: str, mode: Recompute):
    module = tiny_model(family)
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module.set_attn_implementation(attention.ATTENTION)
    recompute_activations(module, mode)
    return module


def step(module, batch: PackedBatch) -> tuple[torch.Tensor, int]:
    """(gradients, bytes that the forward pass kept)."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    module.zero_grad(set_to_none=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = predictor_hidden(module, batch)
    hidden.backward(torch.linspace(-1, 1, hidden.numel()).view_as(hidden))
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert len(gradients) == len([*module.parameters()])
    return nn.utils.parameters_to_vector(gradients), sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_scores", [attention.MAX_SCORES, 0])
def test_gradients_are_the_same_bits(family: str, max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    batch = pack(make_groups(prompt_tokens=(50, 30, 90)), "token_mean", pad_to=256)
    expected, kept = step(packed_model(family, "none"), batch)
    for mode in ("selective", "whole"):
        module = packed_model(family, mode)
        assert [name for name, _ in module.named_parameters()] == [
            name for name, _ in tiny_model(family).named_parameters()
        ]
        gradients, less = step(module, batch)
        assert torch.equal(gradients, expected)
        assert less < 0.5 * kept  # what "selective" caches is kept by no hook


class Counter(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **kwargs or {})


def test_products_and_attention_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two layers with 7 products, 2 norms, and 3 blocks of attention: the prompt, the response on it and on itself.

    Nothing needs a layer's last product, so it is not made again.
    """
    monkeypatch.setattr(attention, "MAX_SCORES", 0)
    batch = pack(make_groups(prompt_tokens=(5,), response_tokens=((4,),)), "token_mean")
    counts: list[dict[str, int]] = []
    for mode in ("none", "selective", "whole"):
        module = packed_model("llama", mode)
        with Counter() as counter:
            step(module, batch)
        counts.append(counter.counts)
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    for name, of_two_layers in (("mm", (0, 12)), (kernel, (0, 6)), ("rsqrt", (4, 4))):
        none, *others = (count[name] for count in counts)
        assert tuple(other - none for other in others) == of_two_layers


def test_a_copy_computes_with_its_own_weights_and_logprobs_keep_nothing() -> None:
    module = packed_model("qwen3", "whole")
    batch = pack(make_groups(), "token_mean")
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(
        packed_logprobs(module, batch, 1.0), packed_logprobs(packed_model("qwen3", "none"), batch, 1.0)
    )
    assert packed_logprobs(other, batch, 1.0).tolist() == pytest.approx([-np.log(97)] * 34)


def test_a_model_without_layers_is_refused() -> None:
    recompute_activations(nn.Linear(2, 2), "none")
    with pytest.raises(ModelError, match=r"Linear has no layers .* trainer\.recompute must be none"):
        recompute_activations(nn.Linear(2, 2), "whole")
