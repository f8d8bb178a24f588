"""Loads the policy of an engine from a Hugging Face directory, and says which tensors may replace it.

Owns: the model's dtype, device and limits; the check of new weights. Never: fetches or converts (``workers/models.py``
prepares the directory). Invariant: a model that loads has every one of its weights from the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from workers.errors import ModelError, WeightsMismatchError
from workers.generation.forward import Forward, FusedForward, can_fuse
from workers.generation.hf_forward import ModuleForward
from workers.models import check_model_dir

CPU_MAX_CONTEXT = 2048
"""Tokens; the default limit on a CPU, where longer samples take minutes and KV memory competes with everything else."""
SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """parameters: the model's tensors by each of their names (a tied tensor has two); writing to them changes it."""

    forward: Forward
    parameters: Mapping[str, torch.Tensor]
    max_context: int
    vocab_size: int


def resolve_device(device: str) -> torch.device:
    """``auto`` is cuda when there is one, else cpu. Raises ModelError for a device that this machine has not."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"generation.device {device!r} is not a device: use auto, cpu or cuda") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"generation.device is {device!r}, but torch sees no GPU here: use auto or cpu")
    return resolved


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int = 0,
    trust_remote_code: bool = False,
    fused: bool = True,
) -> LoadedModel:
    """Load a causal language model for generation.

    Args:   max_context: tokens of prompt + response; 0: what the model allows, at most CPU_MAX_CONTEXT on a CPU.
            fused: use FusedForward where it can compute the model; False is for comparing the two.
    Raises: ModelError: directory or file missing, broken, of a kind that cannot run here; it says which and what to do.
    """
    check_model_dir(directory)
    model = _read(directory, dtype, trust_remote_code).to(device).eval()
    limit = _max_context(model, device, max_context)
    forward = FusedForward(model, max_context=limit) if fused and can_fuse(model) else ModuleForward(model)
    return LoadedModel(
        forward=forward,
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        max_context=limit,
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )


def _read(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{directory} cannot be loaded as a causal language model: {reason}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{directory} lacks weights of its model: {_names(missing)}; copy or save the model again")
    return model


def _max_context(model: Any, device: torch.device, asked: int) -> int:
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or CPU_MAX_CONTEXT)
    if asked > allowed:
        raise ModelError(f"generation.max_context is {asked}, but the model allows {allowed} tokens")
    return asked or (min(allowed, CPU_MAX_CONTEXT) if device.type == "cpu" else allowed)


def check_memory(model: LoadedModel, slots: int) -> None:
    """Check that KV memory of ``slots`` full slots fits now, not in the middle of a run. Raises ModelError."""
    parameter = next(iter(model.parameters.values()))
    needed = model.forward.kv_shape.num_bytes(slots, model.max_context, parameter.dtype)
    if parameter.device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(parameter.device)
    else:
        available = psutil.virtual_memory().available
    if needed > available:
        raise ModelError(
            f"{slots} slots of {model.max_context} tokens need {needed / 1e9:.1f} GB of KV memory, and "
            f"{available / 1e9:.1f} GB are free: lower generation.slots or generation.max_context"
        )


def check_tensors(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that ``tensors`` can replace all ``parameters``; a tied tensor may come under any or all of its names.

    Raises: WeightsMismatchError naming what is missing, unknown, or of another shape.
    """
    given = {id(parameters[name]) for name in tensors if name in parameters}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    unknown = [name for name in tensors if name not in parameters]
    misshaped = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(parameters[name].shape)}"
        for name, tensor in tensors.items()
        if name in parameters and tensor.shape != parameters[name].shape
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    if any(problems.values()):
        found = "; ".join(f"{kind}: {_names(names)}" for kind, names in problems.items() if names)
        raise WeightsMismatchError(f"the new weights do not fit the model: {found}")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
