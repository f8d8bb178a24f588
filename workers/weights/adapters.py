"""Low-rank adapters and their base as one weight: W + (alpha / rank) B A, of all of W or of what is held of it.

    base.q_proj.weight [out, in]    base.q_proj.lora_A.weight [rank, in]    base.q_proj.lora_B.weight [out, rank]

Owns: the names of adapters, and the sum that they mean, for who trains, writes or serves them. Never: training.
Source: Hu et al. 2021 (arXiv 2106.09685); names as in peft's files, without its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from transport.contracts.settings import LoraSettings
from workers.errors import WeightsMismatchError
from workers.weights.parts import Shard, shard_of

if TYPE_CHECKING:
    import torch

A, B = ".lora_A.weight", ".lora_B.weight"
"""What follows the name of the adapted layer in the names of its two matrices."""


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


def adapted_weights(names: Iterable[str]) -> list[str]:
    """The weights that these adapters stand beside. Raises WeightsMismatchError: one is no adapter, or half of one."""
    found = sorted(names)
    layers = [name.removesuffix(A) for name in found if name.endswith(A)]
    if sorted(layer + half for layer in layers for half in (A, B)) != found:
        raise WeightsMismatchError(f"the new weights are not adapters alone, each of two matrices: {found[:4]}")
    return [f"{layer}.weight" for layer in layers]


class Merging:
    """Weights of the base with their adapters added, one at a time, at least in fp32. adapters: by name, each whole."""

    def __init__(self, adapters: Mapping[str, torch.Tensor], lora: LoraSettings) -> None:
        self._adapters = adapters
        self._scale = lora.alpha / lora.rank if lora.rank else 0.0

    @classmethod
    def of(cls, masters: Mapping[str, torch.Tensor], lora: LoraSettings) -> Merging:
        """As they are now. All ranks that share a master call it."""
        return cls({name: _whole(master) for name, master in masters.items() if is_adapter(name)}, lora)

    def __call__(self, name: str, weight: Shard) -> torch.Tensor:
        """What is held of a weight, with its adapter if it has one. name: of the weight."""
        layer = name.removesuffix(".weight")
        down, up = self._adapters.get(layer + A), self._adapters.get(layer + B)
        if down is None or up is None:
            return weight.local
        import torch  # here, because an emulated trainer has none

        (row, column), (rows, columns) = weight.start, weight.local.shape
        summing = torch.promote_types(weight.local.dtype, torch.float32)
        added = up.detach()[row : row + rows] @ down.detach()[:, column : column + columns]
        return added.mul_(self._scale).add_(weight.local.to(summing))


def _whole(master: Any) -> torch.Tensor:
    return (master.full_tensor() if hasattr(master, "placements") else master).detach()  # as a DTensor has


def check_adapters(
    adapters: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]], lora: LoraSettings
) -> list[str]:
    """``adapted_weights`` of these. shapes: of the base's.  Raises WeightsMismatchError: they do not fit."""
    names = adapted_weights(adapters)
    for name in names:
        down, up = (tuple(adapters[name.removesuffix(".weight") + half].shape) for half in (A, B))
        fits = name in shapes and (up[0], down[1]) == tuple(shapes[name])
        if not fits or down[0] != lora.rank or up[1] != lora.rank:
            raise WeightsMismatchError(
                f"the new adapters do not fit the model: {name} with {down} and {up}, trainer.lora.rank {lora.rank}"
            )
    return names


class AdaptedWeights(Mapping[str, "torch.Tensor"]):
    """The weights that adapters change, each made when it is asked for: for a model that serves both as one.

    base: as it was before any adapter.  Raises WeightsMismatchError: they do not fit.
    """

    def __init__(
        self, base: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], lora: LoraSettings
    ) -> None:
        self._base = base
        self._names = check_adapters(adapters, {name: tensor.shape for name, tensor in base.items()}, lora)
        self._merging = Merging(adapters, lora)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._merging(name, shard_of(self._base[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
