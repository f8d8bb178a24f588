"""Whether the policy fits on the devices of its ranks, asked before anything is loaded, and the layout that is "auto".

Never: bytes of a model, which are ``transport/contracts/training_memory.py``. Invariant: every rank of equal devices
and settings gets the same answer, because it follows from what a device has, not from what is free at the moment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch

from transport.contracts.llms import UnknownModelError, from_config
from transport.contracts.settings import ParallelSettings, Settings
from transport.contracts.training_memory import (
    USABLE_SHARE,
    DoesNotFitError,
    Layout,
    LayoutError,
    layout_of_run,
)
from transport.process.files import read_json
from transport.process.gpus import gpu_share
from workers.errors import ModelError
from workers.trainer.policy.model import choose_dtype

log = structlog.get_logger(__name__)

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Bytes that the processes of a container may have together, or "max"."""


def fit_layout(
    model_dir: Path, settings: Settings, device: torch.device, *, memory_bytes: float | None = None
) -> Layout:
    """How the ranks share the model, as ``trainer.parallel`` says.

    Args:   memory_bytes: that this rank may use; None: of its device, see ``usable_bytes``.
    Raises: ModelError: the layout does not divide the model, or the model does not fit; the message says what would.
    """
    trainer, on_gpu = settings.trainer, device.type == "cuda"
    try:
        llm = from_config(model_dir.name, read_json(model_dir / "config.json", dict[str, Any]))
    except UnknownModelError as error:
        log.warning("cannot say how much memory the model takes", reason=str(error))
        return _data_ranks(trainer.num_ranks, trainer.parallel)
    usable = usable_bytes(device, trainer.num_ranks, os.environ) if memory_bytes is None else memory_bytes
    size = choose_dtype(trainer.dtype, device).itemsize
    try:
        return layout_of_run(llm, settings, trainer.num_ranks, usable, compute_bytes=size, on_gpu=on_gpu)
    except (LayoutError, DoesNotFitError) as error:
        raise ModelError(str(error)) from error


def usable_bytes(device: torch.device, ranks: int, environ: Mapping[str, str]) -> float:
    """Of ``device``, what one of ``ranks`` may plan with: all ranks of a machine share its host memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory * min(USABLE_SHARE, gpu_share(environ))
    limit = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else "max"
    total = min(float(psutil.virtual_memory().total), float("inf" if limit == "max" else limit))
    return total * USABLE_SHARE / int(environ.get("LOCAL_WORLD_SIZE", ranks))


def _data_ranks(ranks: int, parallel: ParallelSettings) -> Layout:
    """Of a model of unknown shape: "auto" is one rank wherever layers would be split."""
    tensor = 1 if parallel.tensor == "auto" else parallel.tensor
    pipeline = 1 if parallel.pipeline == "auto" else parallel.pipeline
    return Layout(data=ranks // tensor // pipeline, tensor=tensor, pipeline=pipeline)
