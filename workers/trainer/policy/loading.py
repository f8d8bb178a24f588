"""A model directory becomes the weights of one rank: each reads the slices that it holds, file by file.

    empty_module(dir)   the model without memory for its weights (torch's meta device)
      ...               the caller splits it over ranks, or does not: DTensors, plain tensors, a stage's own layers
    load_weights(m, dir)  memory for what this rank holds, filled from the directory's files

So a rank needs memory for its share and a few megabytes, whatever the size of the model. What is computed rather than
stored (the frequencies of rotary embeddings) is computed here, on every rank.

Owns: which tensor of a directory belongs to which parameter. Never: how a model is split. Invariant: afterwards every
parameter and buffer has the value that ``from_pretrained`` gives it, or ModelError was raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers.errors import ModelError, TensorFileError
from workers.models import check_model_dir, weight_files
from workers.trainer.policy.stored import StoredTensors
from workers.weights.adapters import is_adapter
from workers.weights.parts import Shard, shard_of

NOT_BUILT = (
    *(OSError, ValueError, RuntimeError, LookupError, ImportError),
    *(ArithmeticError, TypeError, AttributeError, StrictDataclassError),
)
"""What transformers raises for wrong values in config.json: it computes with some before it checks them."""


def empty_module(model_dir: Path, *, attention: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """The directory's model in float32 on the meta device, for evaluation (no dropout). Raises ModelError."""
    check_model_dir(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except NOT_BUILT as error:
        raise ModelError(f"cannot build a causal language model from {model_dir}: {error}") from error
    return cast(PreTrainedModel, module.eval())


def load_weights(module: PreTrainedModel, model_dir: Path, *, device: torch.device | None = None) -> None:
    """Give every parameter and buffer of ``module`` its value from ``model_dir``; memory alone to adapters.

    Args:    module: of this directory's model, on the meta device or not, its parameters plain or DTensors; a part of
             the model, such as a pipeline stage, if its parameters have their names in the whole. Tied ones stay tied.
             device: for what is on the meta device.
    Raises:  ModelError: the directory has not all tensors, or others than the module.
    """
    materialise(module, device or torch.device("cpu"))
    stored = open_weights(model_dir)
    try:
        stored.read(_wanted(module, model_dir, stored.shapes))
    except (OSError, TensorFileError) as error:
        raise ModelError(f"cannot read weights of {model_dir}: {error}") from error
    finally:
        stored.close()
    _compute_buffers(module)


def open_weights(model_dir: Path) -> StoredTensors:
    """The tensors of a model directory, for who closes them. Raises ModelError."""
    try:
        return StoredTensors.open(model_dir, weight_files(model_dir))
    except (OSError, TensorFileError) as error:
        raise ModelError(f"cannot read weights: {error}") from error


def _wanted(module: PreTrainedModel, model_dir: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shard]:
    """Stored name -> what the module holds of that tensor. Raises ModelError."""
    held = {names[0]: tensor for names, tensor in _stored_tensors(module)}
    return {stored: shard_of(held[name]) for name, stored in stored_names(module, model_dir, shapes).items()}


def stored_names(module: PreTrainedModel, model_dir: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Of every parameter and stored buffer that is no adapter, its (first) name -> that in ``model_dir``.

    shapes: of what is stored there.  Raises ModelError.
    """
    aliases = _aliases(module)
    found: dict[str, str] = {}
    for names, tensor in _stored_tensors(module):
        if is_adapter(names[0]):
            continue
        name = _stored_name(names, shapes, aliases, module.base_model_prefix)
        if name is None:
            raise ModelError(f"{model_dir} holds no tensor {names[0]}: it is not the whole model, or another one")
        if shapes[name] != tuple(tensor.shape):
            raise ModelError(
                f"{model_dir}: tensor {name} has shape {list(shapes[name])}, the model of config.json "
                f"{list(tensor.shape)}: they do not belong together"
            )
        found[names[0]] = name
    return found


def materialise(module: nn.Module, device: torch.device) -> None:
    """Replace every tensor on the meta device by one with memory on ``device``, its content undefined.

    ``nn.Module.to_empty`` does so, too, but unties what is tied.
    """
    replaced: dict[int, Tensor] = {}
    for owner in module.modules():
        for slots in (owner._parameters, owner._buffers):
            for name, tensor in slots.items():
                if tensor is not None and tensor.is_meta:
                    slots[name] = replaced.setdefault(id(tensor), _with_memory(tensor, device))  # type: ignore[assignment]


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    memory = torch.empty_like(tensor, device=device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _stored_tensors(module: nn.Module) -> Iterable[tuple[list[str], Tensor]]:
    """(all its names, tensor) of every parameter and persistent buffer, each once."""
    computed = {id(buffer) for owner, name in _computed_buffers(module) if (buffer := owner._buffers[name]) is not None}
    found: dict[int, tuple[list[str], Tensor]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) not in computed:
                found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return found.values()


def _aliases(module: PreTrainedModel) -> dict[str, str]:
    """Other name of a parameter that is tied in the whole model, for a part that holds one of the two."""
    tied: Any = module._tied_weights_keys
    if not module.config.tie_word_embeddings or not isinstance(tied, dict):
        return {}
    return tied | {source: name for name, source in tied.items()}


def _stored_name(
    names: list[str], stored: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], prefix: str
) -> str | None:
    """As what the tensor is stored. A directory that was saved without the head lacks the trunk's prefix."""
    candidates = names + [aliases[name] for name in names if name in aliases]
    bare = [name.removeprefix(f"{prefix}.") for name in candidates]
    return next((name for name in candidates + bare if name in stored), None)


def _computed_buffers(module: nn.Module) -> Iterable[tuple[nn.Module, str]]:
    """(owner, name) of each buffer that is in no file."""
    return [(owner, name) for owner in module.modules() for name in owner._non_persistent_buffers_set]


def _compute_buffers(module: PreTrainedModel) -> None:
    """Have transformers compute what is not stored, as ``from_pretrained`` does, and leave the rest alone."""
    for _, tensor in _stored_tensors(module):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    owners = {id(owner) for owner, _ in _computed_buffers(module)}
    for part in module.modules():
        part._is_hf_initialized = id(part) not in owners  # type: ignore[assignment]
    module.initialize_weights()
