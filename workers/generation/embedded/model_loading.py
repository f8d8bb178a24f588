"""Loads the policy of an engine from a Hugging Face directory.

Owns: the model's dtype, device and limits. Never: fetches or converts (``workers/models/resolve.py``
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

from workers.errors import ModelError
from workers.generation.embedded.forward import Forward, FusedForward, can_fuse
from workers.generation.embedded.hf_forward import ModuleForward
from workers.models.resolve import check_model_dir
from workers.weights.pull import shown_names

CPU_MAX_CONTEXT = 2048
"""Tokens; the default limit on a CPU, where longer samples take minutes and KV memory competes with everything else."""


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
    if resolved.type == "cuda" and not (resolved.index or 0) < torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise ModelError(f"generation.device is {device!r}, but torch sees {num_gpus} GPUs here: use auto or cpu")
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
        names = shown_names(missing)
        raise ModelError(f"{directory} lacks weights of its model: {names}; copy or save the model again")
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
