"""A function run by several trainer ranks at once, each in a process of its own, over gloo; models split over them."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from tests.fakes.preloaded import preloaded
from transport.contracts.training_memory import Layout
from workers.trainer.policy.parallel import DATA, TENSOR, SingleRank, shard_over_data, split_tensors
from workers.trainer.policy.ranks import RankGroup

LIMIT_S = 240.0
"""They are done within seconds on an idle machine."""
OTHERS_S = 5.0
"""For what the others say once one has failed."""


def run_layout(
    layout: Layout, work: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0, limit_s: float = LIMIT_S
) -> list[Any]:
    """What ``work(ranks, *arguments)``, a function of a module, returns on each rank.

    timeout_s: of a collective.  limit_s: of each rank's answer.
    Raises RuntimeError: a rank failed, or did not end; it says what each said.
    """
    if layout.num_ranks == 1:
        return [work(SingleRank(), *arguments)]
    context = preloaded()
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        processes = [
            context.Process(target=_run, args=(rank, layout, store, timeout_s, answers, work, arguments), daemon=True)
            for rank in range(layout.num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            found: dict[int, Any] = {}
            errors: dict[int, str] = {}
            with suppress(Empty):
                while len(found) + len(errors) < len(processes):
                    # One that fails takes the others with it, which may speak first.
                    rank, error, answer = answers.get(timeout=OTHERS_S if errors else limit_s)
                    (errors if error else found)[rank] = error or answer
            if len(found) == len(processes):
                return [found[rank] for rank in range(layout.num_ranks)]
            silent = {rank: process.exitcode for rank, process in enumerate(processes) if rank not in found | errors}
            said = "\n".join(f"rank {rank}: {error}" for rank, error in errors.items())
            raise RuntimeError(f"ranks of {layout} failed; without a word, by their exit codes: {silent}\n{said}")
        finally:
            for process in processes:
                process.kill()
                process.join()


def _run(
    rank: int, layout: Layout, store: str, timeout_s: float, answers: Any, work: Callable[..., Any], arguments: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        there = FileStore(store, layout.num_ranks)
        ranks = RankGroup(rank, layout, there, device=torch.device("cpu"), timeout_s=timeout_s)
        answers.put((rank, "", work(ranks, *arguments)))
    except BaseException as error:
        answers.put((rank, f"{error!r}\n{traceback.format_exc()}", None))
        raise


def shard(module: PreTrainedModel, *, data: int, tensor: int) -> None:
    """Split a model as a trainer does, over all ranks of the process group, which may be those of another layout."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=(DATA, TENSOR))
    if tensor > 1:
        split_tensors(module, mesh[TENSOR])
    if data > 1:
        shard_over_data(module, module.model.layers, mesh[DATA], None)
