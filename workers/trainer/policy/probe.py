"""A small model of a policy's family, on which packing is tried: one layer of each kind, large weights.

A leak between samples hides behind small weights: at a deviation of .02 the convolutions of LFM2 change a neighbour's
logprobs by 1.4e-4, at .16 by 2 nats, while families that keep samples apart stay below 1e-6 at both.

Owns: which layers the small model has, and its weights. Never: the comparison (``model.check_packing``).
Invariant: every kind of layer that the whole model has is in the small one, or ModelError is raised.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from workers.errors import ModelError
from workers.trainer.policy.loading import NOT_BUILT

WORDS, WIDTH, HEADS, MIN_LAYERS = 64, 64, 4, 2
"""Vocabulary, largest width of an MLP, most heads, and fewest layers of the small model."""
DEVIATION = 0.16
"""Standard deviation of drawn weights with up to WIDTH inputs; with more inputs, what keeps the sums as large."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


def kinds_of_layers(module: PreTrainedModel) -> dict[str, int]:
    """Name of each kind of decoder layer -> index of the first layer of that kind.

    Two layers are of one kind if their modules have the same classes and the same switches: flags and words, and which
    of the numbers are absent (a layer without a window has None).
    """
    first: dict[tuple[object, ...], int] = {}
    layers = decoder_layers(module)
    for index, layer in enumerate(layers):
        first.setdefault(_signature(layer), index)
    types: Sequence[str] = getattr(module.config.get_text_config(), "layer_types", None) or ()
    named: dict[str, int] = {}
    for index in first.values():
        name = types[index] if index < len(types) else type(layers[index]).__name__
        named[name if name not in named else f"{name} {index}"] = index
    return named


def _signature(layer: nn.Module) -> tuple[object, ...]:
    found: list[object] = []
    for name, part in layer.named_modules():
        switches = {
            key: value if isinstance(value, bool | str) else value is None
            for key, value in vars(part).items()
            if isinstance(value, bool | str | int | float | None) and key != "training" and not key.startswith("_")
        }
        found.append((name, type(part).__name__, tuple(sorted(switches.items()))))
    return tuple(found)


def small_model(
    module: PreTrainedModel,
    layers: Sequence[int],
    *,
    attention: str,
    narrow: bool = True,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A model of the family with these layers of ``module``, drawn anew, in float64, for evaluation.

    Where a layer's kind follows from its number alone, the layers before it are in the small model, too.
    narrow: with few heads, and as wide as these; else as wide as ``module``, but for its MLPs.
    Raises ModelError: transformers builds no such model.
    """
    wanted = {_signature(decoder_layers(module)[index]) for index in layers}
    problem = "its kinds of layers do not fit into a small one"
    for chosen in (layers, range(max(layers) + 1)):
        try:
            small = AutoModelForCausalLM.from_config(
                _small_config(module.config, chosen, narrow=narrow),
                dtype=torch.float32,  # transformers makes it the default of all threads meanwhile
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            ).double()
        except NOT_BUILT as error:
            problem = str(error)
            continue
        if wanted <= {_signature(layer) for layer in decoder_layers(small)}:
            _draw(small)
            return cast(PreTrainedModel, small.eval())
    raise ModelError(f"{type(module).__name__} cannot be tried for packing: {problem}")


def _small_config(config: PreTrainedConfig, layers: Sequence[int], *, narrow: bool) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text = cast(Any, small.get_text_config())
    every = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == every:
            setattr(text, name, [value[index] for index in layers])
    text.num_hidden_layers, text.vocab_size = len(layers), WORDS
    if isinstance(width := getattr(text, "intermediate_size", None), int):
        text.intermediate_size = min(width, WIDTH)
    heads = text.num_attention_heads
    if narrow and heads > HEADS:
        head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
        of_keys = getattr(text, "num_key_value_heads", None) or heads
        text.num_attention_heads, text.num_key_value_heads = HEADS, max(1, HEADS * of_keys // heads)
        text.hidden_size = HEADS * head_width
    for part in (small, text):
        for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(part, token, None)
    return small


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    """The same values for the same shapes; no other random state is disturbed."""
    generator = torch.Generator().manual_seed(0)
    weights = {id(part.weight) for part in module.modules() if isinstance(getattr(part, "weight", None), nn.Parameter)}
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.ndim > 1 and id(parameter) in weights:
            inputs = max(parameter[0].numel(), WIDTH)
            parameter.copy_(noise * DEVIATION * math.sqrt(WIDTH / inputs))
        else:
            parameter.add_(noise * DEVIATION)


def chosen_layers(kinds: Mapping[str, int], num_layers: int) -> list[int]:
    """Indices of one layer of each kind, ascending, and of MIN_LAYERS layers at least where there are so many."""
    chosen = sorted(kinds.values())
    others = (index for index in range(num_layers) if index not in chosen)
    return sorted([*chosen, *(index for index, _ in zip(others, range(MIN_LAYERS - len(chosen)), strict=False))])
