"""Tensors of a checkpoint: a Hugging Face directory, or one safetensors file.

Owns: which files are read. Invariant: safetensors only; nothing that could run code is opened.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from workers.errors import CheckpointRefusedError


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, mapped from their files. Raises CheckpointRefusedError: there are none, or they cannot be read."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointRefusedError(f"{path} has no *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointRefusedError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors
