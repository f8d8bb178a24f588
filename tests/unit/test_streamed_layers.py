"""A reference model whose layers come one by one gives what it gives as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.tiny_models import tiny_model
from workers.errors import ModelError
from workers.trainer.policy.streamed_layers import stream_layers

CPU = torch.device("cpu")


@torch.no_grad()
def logits(module: Any, seed: int) -> torch.Tensor:
    ids = torch.randint(90, (1, 12), generator=torch.Generator().manual_seed(seed))
    return module(input_ids=ids, use_cache=False).logits


def addresses(module: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in module.parameters()]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_passes_give_the_same_bits_and_leave_every_layer_where_it_was(family: str):
    whole = tiny_model(family, vocabulary=96, layers=3)
    streamed = copy.deepcopy(whole)
    stream_layers(streamed, CPU)
    before = addresses(streamed)
    for seed in range(3):
        assert torch.equal(logits(streamed, seed), logits(whole, seed))
        assert addresses(streamed) == before


def test_at_most_two_layers_are_away_from_the_host():
    module = tiny_model("qwen3", vocabulary=96, layers=4)
    stream_layers(module, CPU)
    before = addresses(module)
    layers = list(module.model.layers)  # pyright: ignore[reportArgumentType]
    away: list[int] = []

    def look(*_: Any) -> None:
        each = [addresses(layer)[0] not in before for layer in layers]
        away.append(sum(each))

    for layer in layers:
        layer.mlp.register_forward_hook(look)
    logits(module, 0)
    assert away == [1] * 4  # the one that computes; the next one's copy is not placed yet


def test_a_model_without_layers_is_refused():
    with pytest.raises(ModelError, match=r"scoring\.offload must be none"):
        stream_layers(nn.Linear(2, 2), CPU)
