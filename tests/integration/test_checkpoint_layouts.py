"""A checkpoint of some ranks is gone on from by others: what they hold together is the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.fakes.parallel_ranks import run_layout, shard
from tests.fakes.saved_together import save_together
from tests.fakes.tiny_models import tiny_model
from transport.contracts.training_memory import Layout
from workers.models import character_tokenizer
from workers.trainer.checkpoint import CheckpointStore, alone
from workers.trainer.policy.export import Exporter
from workers.trainer.policy.loading import empty_module, load_weights
from workers.trainer.policy.parallel import Ranks
from workers.trainer.policy.stored import read_state, state_files

Optimizer = dict[str, dict[str, Tensor]]


def model_on_ranks(directory: Path, data: int, tensor: int) -> dict[str, Tensor]:
    """Masters as this rank has them."""
    module = empty_module(directory, attention="sdpa")
    if data * tensor > 1:
        shard(module, data=data, tensor=tensor)
    load_weights(module, directory)
    return dict(module.named_parameters())


def moments(masters: Mapping[str, Tensor]) -> Optimizer:
    """An optimizer's state after a step. Moments are of the local part, as those of an optimizer over local parts."""

    def local(tensor: Tensor) -> Tensor:
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

    return {
        name: {"step": torch.tensor(5.0), "exp_avg": local(p) * 2, "exp_avg_sq": local(p) ** 2}
        for name, p in masters.items()
    }


def save(ranks: Ranks, masters: Mapping[str, Tensor], optimizer: Optimizer, checkpoints: Path) -> Path | None:
    files = partial(state_files, masters, optimizer, rank=ranks.rank, gather=ranks.gather)
    return save_together(checkpoints, files, rank=ranks.rank, gather=ranks.gather)


def load(ranks: Ranks, masters: Mapping[str, Tensor], checkpoints: Path) -> Optimizer:
    checkpoint = CheckpointStore(checkpoints, keep=2, rank=ranks.rank).load_latest(ranks.gather)
    assert checkpoint is not None
    with torch.no_grad():
        for master in masters.values():
            (master.to_local() if isinstance(master, DTensor) else master).fill_(0.25)
    return read_state(checkpoint, masters, gather=ranks.gather)


def resume_elsewhere(ranks: Ranks, directory: Path, checkpoints: Path) -> None:
    """FSDP 4 -> FSDP 2 x TP 2, in the same processes."""
    masters = model_on_ranks(directory, 4, 1)
    save(ranks, masters, moments(masters), checkpoints / "fsdp")
    again = model_on_ranks(directory, 2, 2)
    expected = moments(again)
    wanted = {name: master.detach().clone() for name, master in again.items()}
    optimizer = load(ranks, again, checkpoints / "fsdp")
    for name, master in again.items():
        assert torch.equal(master.full_tensor(), wanted[name].full_tensor()), name
        for kind, state in expected[name].items():
            assert torch.equal(optimizer[name][kind], state), (kind, name)
    save(ranks, again, optimizer, checkpoints / "both")


def test_resumed_on_another_layout(tmp_path: Path) -> None:
    """FSDP 4 -> FSDP 2 x TP 2 -> one process. With 97 words and 2 key heads, tensors do not divide by the ranks."""
    directory, checkpoints = tmp_path / "model", tmp_path / "checkpoints"
    tiny_model(tied=True).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    run_layout(Layout(data=4), resume_elsewhere, directory, checkpoints)
    masters = model_on_ranks(directory, 1, 1)
    wanted = {name: master.detach().clone() for name, master in masters.items()}
    expected = moments(masters)
    checkpoint = CheckpointStore(checkpoints / "both", keep=2).load_latest()
    assert checkpoint is not None
    with torch.no_grad():
        for master in masters.values():
            master.zero_()
    optimizer = read_state(checkpoint, masters, gather=alone)
    for name, master in masters.items():
        assert torch.equal(master, wanted[name])
        assert {kind: torch.equal(value, expected[name][kind]) for kind, value in optimizer[name].items()} == {
            "step": True,
            "exp_avg": True,
            "exp_avg_sq": True,
        }
    for layout in ("fsdp", "both"):
        assert_each_element_once(checkpoints / layout / "step-3", wanted)
        Exporter(model_dir=directory).write_checkpoint(checkpoints / layout / "step-3", tmp_path / layout)
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / layout, dtype=torch.float32)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in exported.named_parameters())


def assert_each_element_once(checkpoint: Path, wanted: Mapping[str, Tensor]) -> None:
    """What several ranks hold is written by one; no rank writes more than half of the model."""
    sizes = []
    for path in sorted(checkpoint.glob("model-*")):
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
    total = sum(tensor.numel() for tensor in wanted.values())
    assert (len(sizes), sum(sizes)) == (4, total)
    assert max(sizes) < total / 2
