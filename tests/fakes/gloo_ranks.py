"""Ranks of a process group as processes of this machine, for what only several of them show."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

LIMIT_S = 250.0

COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
ROWS = {"o_proj", "down_proj"}


def run_ranks(directory: Path, world: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work(rank, *arguments)`` on each of ``world`` gloo ranks; it is a function of a module.

    directory: where they meet.  Raises AssertionError: one of them failed; what it says is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    meeting = directory / f"meeting-{len(list(directory.glob('meeting-*')))}"
    ranks = [
        context.Process(target=_run, args=(rank, world, meeting, work, arguments), daemon=True) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT_S)
        assert [process.exitcode for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run(rank: int, world: int, meeting: Path, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(meeting), world), rank=rank, world_size=world)
    work(rank, *arguments)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may hold up the interpreter's own end


def shard(module: PreTrainedModel, *, data: int, tensor: int) -> None:
    """Split a model as a trainer does: linear layers over ``tensor`` ranks, then everything over ``data`` ranks."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    for layer in module.model.layers:
        if tensor > 1:
            names = {name: name.rpartition(".")[2] for name, _ in layer.named_modules()}
            plan: dict[str, ParallelStyle] = {
                name: ColwiseParallel() for name, last in names.items() if last in COLUMNS
            }
            plan |= {name: RowwiseParallel() for name, last in names.items() if last in ROWS}
            parallelize_module(layer, mesh["tensor"], plan)
        if data > 1:
            fully_shard(layer, mesh=mesh["data"])
    if data > 1:
        fully_shard(module, mesh=mesh["data"])
