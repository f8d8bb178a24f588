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

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers.errors import ModelError, TensorFileError
from workers.models import check_model_dir
from workers.trainer.tensor_files import TensorReader

WHOLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
"""By the name of safetensors."""


def empty_module(model_dir: Path, *, attention: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The directory's model in float32 on the meta device, for evaluation (no dropout). Raises ModelError."""
    check_model_dir(model_dir)
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(f"cannot build a causal language model from {model_dir}: {error}") from error
    return cast(PreTrainedModel, module.eval())


def load_weights(module: PreTrainedModel, model_dir: Path, *, device: torch.device | None = None) -> None:
    """Give every parameter and buffer of ``module`` its value from ``model_dir``.

    Args:    module: of this directory's model, on the meta device or not, its parameters plain or DTensors; a part of
             the model, such as a pipeline stage, if its parameters have their names in the whole. Tied ones stay tied.
             device: for what is on the meta device.
    Raises:  ModelError: the directory has not all tensors, or others than the module.
    """
    materialise(module, device or torch.device("cpu"))
    files = _stored(model_dir)
    wanted: dict[str, dict[str, Tensor]] = {}
    aliases = _aliases(module)
    for names, tensor in _stored_tensors(module):
        stored = _stored_name(names, files, aliases, module.base_model_prefix)
        if stored is None:
            raise ModelError(f"{model_dir} holds no tensor {names[0]}: it is not the whole model, or another one")
        wanted.setdefault(files[stored], {})[stored] = tensor
    for file, tensors in wanted.items():
        _fill_from(model_dir / file, tensors)
    _compute_buffers(module)


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


def held(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(what this rank holds of ``tensor``, by reference, and where that begins in the whole)."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    local = cast(DTensor, tensor.detach()).to_local()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise ValueError(f"a shard of {tuple(local.shape)} where {tuple(tensor.placements)} means {tuple(shape)}")
    return local, tuple(start) if local.numel() else (0,) * tensor.ndim


@torch.no_grad()
def fill(target: Tensor, start: tuple[int, ...], reader: TensorReader, name: str) -> None:
    """Copy a region of a stored tensor into ``target``, a few megabytes at a time, cast to its dtype.

    target: any shape; a region of the stored tensor ``name``, which begins at ``start`` and lies within it.
    """
    if target.numel() == 0:
        return
    place = reader.places[name]
    rows = target.shape[0] if target.ndim else 1
    for row, count, raw in reader.blocks(name, start[0] if start else 0, rows):
        block = torch.frombuffer(raw, dtype=DTYPES[place.dtype]).view(count, *place.shape[1:])
        for dimension in range(1, target.ndim):
            block = block.narrow(dimension, start[dimension], target.shape[dimension])
        if target.ndim == 0:
            target.copy_(block[0])
        else:
            at = row - start[0]
            target[at : at + count].copy_(block)


def _fill_from(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ModelError: the file is broken, or a tensor has another shape there."""
    try:
        with path.open("rb", buffering=0) as file:
            reader = TensorReader(file, name=str(path))
            for name in sorted(tensors, key=lambda name: reader.places[name].data_offsets):
                tensor = tensors[name]
                if reader.places[name].shape != tuple(tensor.shape):
                    raise ModelError(
                        f"{path}: tensor {name} has shape {list(reader.places[name].shape)}, the model of config.json "
                        f"{list(tensor.shape)}: they do not belong together"
                    )
                fill(*held(tensor), reader, name)
    except (OSError, TensorFileError) as error:
        raise ModelError(f"cannot read weights: {error}") from error
    except KeyError as error:
        raise ModelError(f"{path} holds no tensor {error}, which the index promises") from error


def _stored(model_dir: Path) -> dict[str, str]:
    """Name of a tensor -> file that holds it. Raises ModelError."""
    index = model_dir / INDEX_FILE
    try:
        if index.is_file():
            return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        with (model_dir / WHOLE_FILE).open("rb", buffering=0) as file:
            return dict.fromkeys(TensorReader(file, name=str(model_dir / WHOLE_FILE)).places, WHOLE_FILE)
    except (OSError, TensorFileError, msgspec.MsgspecError) as error:
        raise ModelError(f"cannot read weights of {model_dir}: {error}") from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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


def _stored_name(names: list[str], stored: Mapping[str, str], aliases: Mapping[str, str], prefix: str) -> str | None:
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
