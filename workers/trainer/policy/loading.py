"""A model directory becomes the weights of one rank: each reads the slices that it holds, file by file.

    empty_module(dir)   the model without memory for its weights (torch's meta device)
      ...               the caller splits it over ranks, or does not: DTensors, plain tensors, a stage's own layers
    load_weights(m, dir)  memory for what this rank holds, filled from the directory's files

So a rank needs memory for its share and a few megabytes, whatever the size of the model. What is computed rather than
stored (the frequencies of rotary embeddings) is computed here, on every rank.

Owns: which tensor of a directory belongs to which parameter, and which directories are refused because a reader of them
would leave something out. Never: how a model is split. Invariant: afterwards every parameter and buffer has the value
that ``from_pretrained`` gives it, or ModelError was raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers.errors import ModelError, TensorFileError
from workers.models import check_model_dir, weight_files
from workers.trainer.policy.stored import StoredTensors
from workers.trainer.tensor_files import BLOCK_BYTES
from workers.weights.adapters import is_adapter
from workers.weights.names import names_read
from workers.weights.parts import Shard, shard_of
from workers.weights.pull import shown_names

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
    """(First) name of every parameter and stored buffer that is no adapter -> its name in ``model_dir``.

    shapes: of what is stored there.  Raises ModelError.
    """
    aliases = _aliases(module)
    sources = names_read(module, shapes).sources
    found: dict[str, str] = {}
    for names, tensor in _stored_tensors(module):
        if is_adapter(names[0]):
            continue
        name = _stored_name(names, sources, aliases, module.base_model_prefix)
        if name is None:
            raise ModelError(f"{model_dir} holds no tensor {names[0]}: {_why_missing(module, names[0], shapes)}")
        if shapes[name] != tuple(tensor.shape):
            raise ModelError(
                f"{model_dir}: tensor {name} has shape {list(shapes[name])}, the model of config.json "
                f"{list(tensor.shape)}: they do not belong together"
            )
        found[names[0]] = name
    return found


def _why_missing(module: PreTrainedModel, name: str, stored: Iterable[str]) -> str:
    """What is wrong with a directory without tensor ``name``, and what to do."""
    stored = sorted(stored)
    if unmerged := next((one for one in stored if ".lora_A." in one or ".base_layer." in one), None):
        return f"its adapters are not merged ({unmerged}): save the model after peft's merge_and_unload()"
    bare = name.removeprefix(f"{module.base_model_prefix}.")
    for ending in (f".{name}", f".{bare}"):
        if under := next((one for one in stored if one.endswith(ending)), None):
            prefix = under.removesuffix(ending)
            return (
                f"it is stored as {under}. Save the model itself, not what it is wrapped in ({prefix}), so that its "
                "tensors have the names that transformers gives them"
            )
    head = cast(Any, module).get_output_embeddings()
    if head is not None and any(one is head.weight for one in module.parameters()) and _is_name_of(module, name, head):
        return (
            "config.json says tie_word_embeddings = false, so the model has an output embedding of its own: set it to "
            "true if the model is tied, else copy or save the model again"
        )
    return "it is not the whole model, or another one"


def _is_name_of(module: nn.Module, name: str, owner: nn.Module) -> bool:
    return any(part is owner and name == f"{where}.weight" for where, part in module.named_modules())


def check_stored(module: PreTrainedModel, model_dir: Path) -> list[str]:
    """Whether every reader of ``model_dir`` makes the same model of it. module: the whole model, on the meta device.

    Returns: remarks, a sentence each: tensors that are left out, and are none of this model's.
    Raises:  ModelError: quantised or converted weights, one that is missing, of another shape, there twice, tied in
             config.json and stored apart, or left out though it belongs to a part of the model.
    """
    stored = open_weights(model_dir)
    try:
        return _check_stored(module, model_dir, stored)
    except (OSError, TensorFileError) as error:
        raise ModelError(f"cannot read weights of {model_dir}: {error}") from error
    finally:
        stored.close()


def _check_stored(module: PreTrainedModel, model_dir: Path, stored: StoredTensors) -> list[str]:
    family, name = module.config.model_type, type(module).__name__
    if quantised := getattr(module.config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            f"{model_dir} holds quantised weights (quantization_config in config.json: {method}), which are not "
            "trained: name the model that they were made of, or save it dequantised"
        )
    read = names_read(module, stored.shapes)
    if read.converted:
        raise ModelError(
            f"{model_dir}: transformers changes tensors of {family} as it loads them ({shown_names(read.converted)}), "
            "which the trainer does not do: use a model of another family"
        )
    tensors = list(_stored_tensors(module))
    names = {one for named, _ in tensors for one in named}
    for target, sources in read.sources.items():
        if target in names and len(sources) > 1:
            raise ModelError(f"{model_dir} holds {target} {len(sources)} times, as {', '.join(sources)}: remove one")
    of_module = stored_names(module, model_dir, stored.shapes)
    for where in of_module.values():
        if not stored.dtype(where).is_floating_point or stored.dtype(where).itemsize == 1:
            kind = str(stored.dtype(where)).removeprefix("torch.")
            raise ModelError(
                f"{model_dir}: {where} is stored as {kind}, so the weights are quantised, and are not trained: name "
                "the model that they were made of, or save it dequantised"
            )
    for named, _ in tensors:
        first, *others = [read.sources[one][0] for one in named if one in read.sources] or [""]
        for other in others:
            if not _is_equal(stored, first, other):
                raise ModelError(
                    f"{model_dir}: config.json says that {first} and {other} are one tensor (tie_word_embeddings), and "
                    "two that differ are stored: set tie_word_embeddings to false to keep both, or remove the one "
                    "that is not the model's"
                )
    return _left_out(module, name, model_dir, {one for one in read.sources if one not in names})


def _is_equal(stored: StoredTensors, one: str, other: str) -> bool:
    """Whether two stored tensors are equal, read a few megabytes at a time."""
    shape = stored.shapes[one]
    if stored.shapes[other] != shape:
        return False
    rows = max(1, BLOCK_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for row in range(0, shape[0], rows):
        pair = [torch.empty(min(rows, shape[0] - row), *shape[1:]) for _ in (one, other)]
        start = (row, *(0 for _ in shape[1:]))
        stored.read({name: Shard(part, start, shape) for name, part in zip((one, other), pair, strict=True)})
        if not torch.equal(*pair):
            return False
    return True


def _left_out(module: PreTrainedModel, name: str, model_dir: Path, unknown: set[str]) -> list[str]:
    """Remarks on stored tensors that ``module`` does not have. Raises ModelError: they belong to a part that it has."""
    buffers = {where.rpartition(".")[2] for where, _ in module.named_buffers()}  # frequencies that old files hold
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    rest = sorted(one for one in unknown if one.rpartition(".")[2] not in buffers)
    mere = [one for one in rest if any(pattern.search(one) for pattern in ignored)]
    parts = {where for where, _ in module.named_modules()} - {""}
    ours = [one for one in rest if one not in mere and one.partition(".")[0] in parts]
    if ours:
        raise ModelError(
            f"{model_dir} holds {_tensors(ours)} that a {name} of its config.json does not have, and that would be "
            f"left out: {shown_names(ours)}. Correct config.json (its number of layers, its biases), or save the model "
            "again with transformers"
        )
    if not rest:
        return []
    return [f"left out {_tensors(rest)} of {model_dir}, no part of {name}: {shown_names(rest)}"]


def _tensors(names: Sequence[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


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
    names: list[str], sources: Mapping[str, list[str]], aliases: Mapping[str, str], prefix: str
) -> str | None:
    """As what the tensor is stored. A directory that was saved without the head lacks the trunk's prefix."""
    candidates = names + [aliases[name] for name in names if name in aliases]
    bare = [name.removeprefix(f"{prefix}.") for name in candidates]
    return next((sources[name][0] for name in candidates + bare if name in sources), None)


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
