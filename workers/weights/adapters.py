"""Low-rank adapters and their base as one weight: W + (alpha / rank) B A, of all of W or of what is held of it.

    base.q_proj.weight [out, in]    base.q_proj.lora_A.weight [rank, in]    base.q_proj.lora_B.weight [out, rank]

Owns: the names of adapters, and the sum that they mean, for who trains, writes or serves them; the base in its files,
for who serves and does not keep it. Never: training.
Source: Hu et al. 2021 (arXiv 2106.09685); names as in peft's files, without its prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transport.contracts.settings import LoraSettings
from workers.errors import ModelError, WeightsMismatchError
from workers.models import weight_files
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


class StoredWeights(Mapping[str, "torch.Tensor"]):
    """The weights of a model directory, each read when it is asked for, while the context is open.

    Raises ModelError: a file is missing, or is broken.
    """

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in (directory / name for name in weight_files(directory)):
                try:
                    file: Any = self._stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ModelError(f"{path} cannot be read: {error}") from error
                self._files |= dict.fromkeys(file.keys(), file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> StoredWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files = {}
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class AdaptedWeights(Mapping[str, "torch.Tensor"]):
    """The weights that adapters change, each made when it is asked for: for a model that serves both as one.

    base: as it was before any adapter.  whole: those that they do not change, too.  cast: what floating-point ones are
    made of it.  Raises WeightsMismatchError: they do not fit.
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        adapters: Mapping[str, torch.Tensor],
        lora: LoraSettings,
        *,
        whole: bool = False,
        cast: torch.dtype | None = None,
    ) -> None:
        self._base = base
        self._cast = cast
        changed = adapted_weights(adapters)
        for name in changed:
            down, up = (tuple(adapters[name.removesuffix(".weight") + half].shape) for half in (A, B))
            fits = name in base and (up[0], down[1]) == tuple(base[name].shape)
            if not fits or down[0] != lora.rank or up[1] != lora.rank:
                raise WeightsMismatchError(
                    f"the new adapters do not fit the model: {name} with {down} and {up}, trainer.lora.rank {lora.rank}"
                )
        self._names = list(base) if whole else changed
        self._merging = Merging(adapters, lora)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = self._merging(name, shard_of(self._base[name]))
        return weight.to(self._cast) if self._cast and weight.is_floating_point() else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
