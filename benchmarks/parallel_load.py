"""Host memory of one of 4 ranks while it loads a model: at most a share and a file, not the model.

    host_load_share    of the bench ``parallel``

A random Llama in 16 equal files is split by fully_shard over 4 gloo ranks, and each reads its slices. Measured is the
growth of a rank's resident memory at its highest (VmHWM, reset before), over the bytes of the fp32 model; file pages of
libraries that come in meanwhile are counted, too, so it is an upper bound of what is anonymous.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from workers.models import INDEX_FILE, character_tokenizer
from workers.trainer.policy.loading import empty_module, load_weights

RANKS = 4
FILES = 16
HIDDEN, LAYERS = 512, 16
LIMIT_S = 500.0


def write_model(directory: Path) -> int:
    """A model whose every layer is a file of its own. Returns: bytes of its parameters in fp32."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(FILES)]
    for name, parameter in module.named_parameters():
        layer = re.search(r"layers\.(\d+)\.", name)
        files[int(layer[1]) if layer else 0][name] = torch.randn(parameter.shape) * 0.02
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def resident(what: str) -> int:
    """A line of this process's status, bytes."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, what
    return int(found[1]) * 1024


def load(rank: int, directory: Path, meeting: Path, out: Connection) -> None:
    """Sends (bytes held, bytes that memory grew by at its highest)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(meeting), RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    module = empty_module(directory, attention="sdpa")
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it is now
    before = resident("VmRSS")
    load_weights(module, directory)
    peak = resident("VmHWM") - before
    held = sum(parameter.to_local().nbytes for parameter in module.parameters())
    out.send((held, peak))
    dist.barrier()
    os._exit(0)  # gloo's threads may hold up the interpreter's own end


def figures() -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "model"
        directory.mkdir()
        whole = write_model(directory)
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        arguments = (directory, Path(place) / "meeting")
        ranks = [
            context.Process(target=load, args=(rank, *arguments, out), daemon=True)
            for rank, (_, out) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        found = [end.recv() if end.poll(LIMIT_S) else (0, 0) for end, _ in pipes]
        for process in ranks:
            process.join(10)
            process.kill()
    return {
        "host_load_share": round(max(peak for _, peak in found) / whole, 4),
        "held_share": round(max(held for held, _ in found) / whole, 4),
        "model_bytes": whole,
        "files": FILES,
        "ranks": RANKS,
    }


if __name__ == "__main__":
    print(json.dumps(figures()))
