"""What of a training step is in a checkpoint: fp32 master weights, optimizer state, torch's random state.

Owns: which tensors, and how a step becomes again what it was. Never: the files around them (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.errors import CheckpointError
from workers.trainer.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, TensorFile
from workers.trainer.policy.step import TrainStep

RANDOM_STATE = "torch_random_state"


def tensor_files(step: TrainStep) -> dict[str, TensorFile]:
    """The files that ``restore`` reads."""
    contents = {MODEL_FILE: dict(step.policy.masters), OPTIMIZER_FILE: optimizer_tensors(step)}
    return {
        name: TensorFile(sum(tensor.nbytes for tensor in tensors.values()), partial(_write, tensors))
        for name, tensors in contents.items()
    }


def _write(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)


def optimizer_tensors(step: TrainStep) -> dict[str, Tensor]:
    """The optimizer's state by parameter name, and the random state. Nothing of a parameter that never stepped."""
    state = step.optimizer.state
    tensors = {
        f"{key}.{name}": torch.as_tensor(value)
        for name, parameter in step.policy.masters.items()
        for key, value in state.get(parameter, {}).items()
    }
    return tensors | {RANDOM_STATE: torch.get_rng_state()}


def restore(step: TrainStep, checkpoint: Checkpoint) -> None:
    """Make ``step`` what it was when it was saved, bit for bit.

    Raises: CheckpointError: the tensors are not those of this model.
    """
    weights = load_file(checkpoint.path / MODEL_FILE)
    saved = load_file(checkpoint.path / OPTIMIZER_FILE)
    masters = step.policy.masters
    wrong = sorted(weights.keys() ^ masters.keys()) or [n for n, p in masters.items() if weights[n].shape != p.shape]
    if wrong:
        raise CheckpointError(checkpoint.path, 0, f"its tensors are not those of this model: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(weights[name])
    torch.set_rng_state(saved.pop(RANDOM_STATE))
    for key, tensor in saved.items():
        kind, _, name = key.partition(".")
        step.optimizer.state[masters[name]][kind] = tensor.to(masters[name].device)
    step.policy.refresh()
