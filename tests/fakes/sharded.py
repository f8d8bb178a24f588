"""The same training by any number of ranks: five steps of uneven rounds, and how far they come from one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, Replicate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fakes.saved_together import save_together
from tests.fakes.tiny_models import in_float64, tiny_model
from tests.fakes.training import make_groups
from transport.contracts.settings import LoraSettings, TrainerSettings
from transport.contracts.training_memory import Layout
from workers.algorithms.loss import Objective
from workers.errors import RanksError
from workers.trainer.checkpoint import CheckpointStore
from workers.trainer.learner import PromptGroup
from workers.trainer.policy import attention
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import Ranks, RoundShape, local_part, place_of
from workers.trainer.policy.policy_learner import TrainStep
from workers.trainer.policy.ranks import RankGroup
from workers.trainer.policy.recompute import Recompute, recompute_activations
from workers.trainer.policy.stored import read_state, state_files

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Training:
    family: str = "qwen3"
    tied: bool = True
    layers: int = 4
    double: bool = True
    dtype: torch.dtype | None = None
    lr: float = 2e-3
    micro_batch_tokens: int = 24
    recompute: Recompute = "none"
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ("all-linear",)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    before: dict[str, np.ndarray] = field(default_factory=dict)
    after: dict[str, np.ndarray] = field(default_factory=dict)
    update: dict[str, np.ndarray] = field(default_factory=dict)
    moved: float = 0.0
    """Norm of the update over that of the weights before, of what this rank saw."""


def whole(tensor: Tensor) -> Tensor:
    """Gathered along one axis after another: full_tensor does the same for two of them, and warns of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def rounds_of(step: int) -> list[list[PromptGroup]]:
    """Three rounds, of three groups, one, and two."""
    groups = make_groups(
        seed=step,
        batch=step,
        prompt_tokens=(5, 3, 9, 4, 6, 2),
        response_tokens=((4, 1, 7), (2, 2), (6, 3, 1, 8), (9,), (3, 5), (12, 2)),
        logprob=-4.5,
    )
    return [groups[:3], groups[3:4], groups[4:]]


def train(ranks: Ranks, training: Training, *, steps: range = range(STEPS), checkpoints: Path | None = None) -> Trained:
    """steps: of the five, those that are taken here.  checkpoints: where to go on from the newest, and to save."""
    ALL_ATTENTION_FUNCTIONS[attention.ATTENTION] = attention.shared_prompt_attention
    module = tiny_model(training.family, tied=training.tied, vocabulary=96, layers=training.layers)
    if training.double:
        in_float64(module)
    module.set_attn_implementation(attention.ATTENTION)
    recompute_activations(module, training.recompute)
    dtype = training.dtype or module.dtype
    lora = LoraSettings(rank=training.lora_rank, alpha=8.0, targets=list(training.lora_targets))
    policy = PolicyModel(module, dtype=dtype, temperature=0.9, ranks=ranks, lora=lora)
    if ranks.layout.data == 1:  # FSDP gathers in it, from shards of masters
        assert {local_part(weight.detach()).dtype for weight in module.parameters()} == {dtype}
    settings = TrainerSettings(lr=training.lr, micro_batch_tokens=training.micro_batch_tokens, weight_decay=0.1)
    step = TrainStep(policy, settings, Objective())
    store = CheckpointStore(checkpoints, keep=2, rank=ranks.rank) if checkpoints else None
    if store is not None and (checkpoint := store.load_latest(ranks.gather)) is not None:
        step.restore(read_state(checkpoint, policy.masters, gather=ranks.gather))
    before = {name: whole(master.detach()).clone() for name, master in policy.masters.items()}
    trained = Trained()
    layout = ranks.layout
    part = place_of(layout, ranks.rank).data
    for batch in steps:
        rows = tokens = 0
        for groups in rounds_of(batch):
            rows += sum(len(group.samples) for group in groups)
            tokens += sum(one.num_loss_tokens for group in groups for one in group.samples)
            step.accumulate(groups[part :: layout.data])
        metrics = step.close(batch=batch, num_rows=rows, num_tokens=tokens)
        trained.losses.append(metrics["loss"])
        trained.norms.append(metrics["grad_norm"])
    if checkpoints is not None:
        files = partial(state_files, policy.masters, step.optimizer_state(), rank=ranks.rank, gather=ranks.gather)
        save_together(checkpoints, files, rank=ranks.rank, gather=ranks.gather, version=steps.stop)
    trained.before = {name: tensor.double().numpy() for name, tensor in before.items()}
    trained.after = {name: whole(master.detach()).double().numpy() for name, master in policy.masters.items()}
    trained.update = {name: trained.after[name] - trained.before[name] for name in trained.after}
    trained.moved = norm(trained.update.values()) / norm(trained.before.values())
    return trained


def resumed(ranks: Ranks, training: Training, steps: range, checkpoints: Path) -> Trained:
    """``train``, for what takes no names."""
    return train(ranks, training, steps=steps, checkpoints=checkpoints)


def train_all(ranks: Ranks, trainings: Sequence[Training], steps: range) -> list[Trained]:
    """One after another, so that processes start once."""
    return [train(ranks, training, steps=steps) for training in trainings]


def enter_with_other_rows(ranks: Ranks) -> str:
    """What a rank says whose peers have other rows."""
    try:
        ranks.agree_round(RoundShape(mark=ranks.rank, micro_batches=1, tokens=8))
    except RanksError as error:
        return str(error)
    return ""


def talk_beside(ranks: Ranks) -> list[bytes]:
    """What ranks say beside training, which the second says only once both have trained."""
    with ThreadPoolExecutor(1) as thread:
        say = partial(thread.submit, ranks.beside.gather, b"rank %d" % ranks.rank)
        early = say() if ranks.rank == 0 else None
        assert ranks.total(1.0) == ranks.layout.num_ranks
        return (early or say()).result()


def meet_with_another(rank: int, store: Path, layout: Layout, *, torch_version: str = "") -> str:
    """What a rank says that meets one with another ``layout``, as where ``auto`` finds less memory, or torch."""
    with patch.object(torch, "__version__", torch_version or torch.__version__):
        try:
            RankGroup(rank, layout, FileStore(str(store), 2), device=torch.device("cpu"), timeout_s=60.0)
        except RanksError as error:
            return str(error)
    return ""


def enter_talk_and_meet(ranks: Ranks, directory: Path) -> tuple[str, list[bytes], str, str]:
    said, beside = enter_with_other_rows(ranks), talk_beside(ranks)
    ranks.close()
    layout, version = (Layout(data=2), "1.0") if ranks.rank == 0 else (Layout(tensor=2), "2.0")
    return (
        said,
        beside,
        meet_with_another(ranks.rank, directory / "layouts", layout),
        meet_with_another(ranks.rank, directory / "versions", Layout(data=2), torch_version=version),
    )


def norm(arrays: Iterable[np.ndarray]) -> float:
    """Of all their elements together."""
    return float(np.sqrt(sum((array**2).sum() for array in arrays)))


def errors(found: list[Trained], expected: Trained) -> tuple[float, float]:
    """(relative error of the losses, of the update) of ranks against one process."""
    loss = max(abs(a - b) / abs(b) for one in found for a, b in zip(one.losses, expected.losses, strict=True))
    update: dict[str, np.ndarray] = {}
    for one in found:
        update |= one.update
    assert update.keys() == expected.update.keys(), update.keys() ^ expected.update.keys()
    differences = (update[name] - expected.update[name] for name in update)
    return loss, norm(differences) / norm(expected.update.values())
