"""Low-rank adapters (LoRA): the base model is frozen, and each adapted layer adds a product of two small matrices.

    y = W x + (alpha / rank) B A x        W: [out, in] frozen.  A: [rank, in] random.  B: [out, rank] zero at first

    adapted_layers   which layers, by the names that the settings give
    attach           A and B beside each W, split over tensor ranks as W is
    initialise       their first values

The sum of the two, which engines get, is workers/weights/adapters.py.

Owns: which layers, shapes and first values of adapters. Never: gradients, files. Invariants: names
are those of peft's files without its prefix; whatever the layout, adapters begin with the same values; before the first
step the model is its base.
Source: Hu et al. 2021 (arXiv 2106.09685). Differs from peft: the layer stays what it is, so all other names stay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from transformers import PreTrainedModel

from transport.contracts.settings import LoraSettings
from transport.process.words import closest, did_you_mean
from workers.errors import ModelError
from workers.trainer.policy.parallel import recast
from workers.weights.adapters import A, B
from workers.weights.parts import Shard, shard_of

ALL_LINEAR = "all-linear"


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside its weight."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scale: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.lora_B(self.lora_A(input)) * self.lora_scale


# --- which layers -----------------------------------------------------------------------------------------------------


def adapted_layers(module: PreTrainedModel, lora: LoraSettings) -> list[str]:
    """Names of the layers that get an adapter: linear ones, but the output embedding; none where the rank is 0.

    module: may be on the meta device, and must not be split over ranks yet.
    Raises: ModelError: a target is the name, or the end of the name, of no layer; or the rank is larger than one of
            the layers allows.
    """
    if not lora.rank:
        return []
    linear = linear_layers(module)
    for target in lora.targets:
        if target != ALL_LINEAR and not any(_is_meant(name, target) for name in linear):
            known = short_names(linear)
            raise ModelError(
                f"trainer.lora.targets = {list(lora.targets)}: the model has no linear layer {target!r}"
                f"{did_you_mean(closest(target, [*known, ALL_LINEAR]))}; it has {', '.join(known)}, or take "
                f'"{ALL_LINEAR}"'
            )
    every = ALL_LINEAR in lora.targets
    adapted = [name for name in linear if every or any(_is_meant(name, target) for target in lora.targets)]
    _check_rank(module, adapted, lora.rank)
    return adapted


def _check_rank(module: PreTrainedModel, layers: Iterable[str], rank: int) -> None:
    """Raises ModelError: a product of ``rank`` inner dimensions has more of them than the smallest layer."""
    sides = {name: min(cast(nn.Linear, module.get_submodule(name)).weight.shape) for name in layers}
    name = min(sides, key=lambda one: sides[one], default="")
    if name and rank > sides[name]:
        raise ModelError(
            f"trainer.lora.rank = {rank} must be at most {sides[name]}, the smaller side of {name}: a larger adapter "
            "holds more than the layer itself; set a smaller rank, or leave that layer out of trainer.lora.targets"
        )


def linear_layers(module: PreTrainedModel) -> list[str]:
    head = cast(Any, module).get_output_embeddings()
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and part is not head]


def short_names(layers: Iterable[str]) -> list[str]:
    """The last words of their names, each once."""
    return sorted({name.rpartition(".")[2] for name in layers})


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


# --- beside the base --------------------------------------------------------------------------------------------------


def attach(module: PreTrainedModel, layers: Iterable[str], lora: LoraSettings) -> None:
    """Give each layer that is here an adapter in the dtype of its weight, its values undefined, and freeze the rest."""
    module.requires_grad_(False)
    here = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    for name in layers:
        if name in here:
            _adapt(here[name], lora)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            f"trainer.lora.targets = {list(lora.targets)} names no layer of one of the stages of "
            "trainer.parallel.pipeline: each needs one"
        )


def _adapt(layer: nn.Linear, lora: LoraSettings) -> None:
    weight = layer.weight
    down = nn.Linear(layer.in_features, lora.rank, bias=False, device="meta")
    up = nn.Linear(lora.rank, layer.out_features, bias=False, device="meta")
    for part, axis in ((down, 1), (up, 0)):
        part.weight = nn.Parameter(_split_as(weight, torch.empty_like(part.weight, dtype=weight.dtype), axis))
    layer.__class__ = AdaptedLinear  # not a module around it: hooks and names stay
    adapted = cast(AdaptedLinear, layer)
    adapted.lora_A, adapted.lora_B = down, up
    adapted.lora_scale = lora.alpha / lora.rank


def _split_as(weight: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """A matrix on the device of ``weight``, split where ``weight`` is split along ``axis``, which both share."""
    matrix = torch.empty_like(matrix, device=weight.device)
    if not isinstance(weight, DTensor):
        return matrix
    placements: list[Placement] = [one if one.is_shard(axis) else Replicate() for one in weight.placements]
    return distribute_tensor(matrix, weight.device_mesh, placements, src_data_rank=None)


def round_base(module: nn.Module, dtype: torch.dtype) -> None:
    """Have what is frozen in the dtype of the forward pass: nothing else is kept of it."""
    for parameter in list(module.parameters()):
        if not parameter.requires_grad and parameter.dtype != dtype:
            recast(parameter, dtype)


@torch.no_grad()
def initialise(parameters: Mapping[str, Tensor], seed: int) -> None:
    """First values, of what this rank holds: B is zero, A follows from its name, its shape and ``seed`` alone."""
    for name, parameter in parameters.items():
        if name.endswith(B):
            shard_of(parameter).local.zero_()
        elif name.endswith(A):
            mark = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(mark, "big"))
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)  # as peft
            shard = shard_of(parameter)
            shard.local.copy_(_box(whole, shard))


def _box(whole: Tensor, shard: Shard) -> Tensor:
    for axis, (start, extent) in enumerate(zip(shard.start, shard.local.shape, strict=True)):
        whole = whole.narrow(axis, start, extent)
    return whole
