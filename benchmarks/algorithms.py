"""Losses, advantages and streamed gradients of every algorithm against TRL's on the same tensors.

Figure ``algorithms``. Ragged groups of random tokens with masks, and a random Qwen3 of 78,208 parameters in float32.
TRL computes with its own trainer objects (``trl_reference.py``); what it has not, GAE, is a plain loop over its sum.

    <name>_error           the larger of two: |loss - TRL's|, over both kinds of old logprobs, and |advantage - TRL's|
    gae_error              of advantages and returns, float32, responses of up to 512 tokens
    ppo_error              the clipped loss with an advantage of its own for each token
    distill_error          on-policy distillation of sampled tokens
    parts_error            one batch of three parts, each with a loss of its own
    <name>_streamed_error  |gradient - whole| / |whole|: rounds out of order and in pieces against TRL's loss of the
                           whole padded batch in one backward pass

    python -m benchmarks.algorithms
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.trl_reference import TrlReference, pad_groups
from orchestrator.config.load import resolve
from tests.fakes.training import make_groups
from workers.algorithms.advantage import group_advantages
from workers.algorithms.gae import gae
from workers.algorithms.loss import Objective, OldLogprobs, normaliser
from workers.models import model_cache, prepare_model
from workers.trainer.policy.model import PolicyModel, load_module
from workers.trainer.policy.packing import PackedBatch, PromptGroup, pack, split_by_tokens
from workers.trainer.policy.policy_learner import objective_of

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
MIXED = ("grpo", "gspo", "cispo")
GROUP_SIZE = 8
PIECE_TOKENS = 16
OLD: tuple[OldLogprobs, ...] = ("rollout", "recomputed")
DISTILLED = Objective(rl_coef=0.0, kl_coef=1.0, kl_estimator="reverse", importance_cap=0.0)
"""TRL has no correction for samples of other weights there."""


def objective_named(name: str) -> Objective:
    """That of ``algorithm.name``; of RLOO what TRL's has, whose loss corrects nothing of the engine's."""
    objective = objective_of(resolve(None, [], [f"algorithm.name={name}"], {}).settings)
    return replace(objective, importance_cap=0.0) if name == "rloo" else objective


def pinned_groups(*, masked: bool, old: OldLogprobs) -> list[PromptGroup]:
    groups = make_groups(all_columns=True, masked=masked)
    if old == "recomputed":
        return groups
    return [replace(g, samples=[replace(s, old_logprobs=None) for s in g.samples]) for g in groups]


def size_of(objective: Objective, batch: PackedBatch) -> float:
    return normaliser(objective, num_rows=len(batch.row_ids), num_tokens=sum(batch.row_lengths))


class Against:
    """What is ours, and TRL's, of one model. tokens: changes what the objective is given of each packed piece."""

    def __init__(self, directory: Path, output: Path) -> None:
        self.policy = PolicyModel(
            load_module(directory, device=torch.device("cpu")), dtype=torch.float32, temperature=1.0
        )
        self.reference = TrlReference(directory, output, group_size=GROUP_SIZE)

    def errors(
        self,
        groups: Sequence[PromptGroup],
        objective: Objective,
        theirs: Tensor,
        given: Callable[[PackedBatch], PackedBatch] = lambda batch: batch,
    ) -> tuple[float, float]:
        """(of the loss, of the streamed gradient) against ``theirs``, TRL's loss of the whole batch."""
        self.reference.trainer.model.zero_grad()
        theirs.backward()
        parameters = self.reference.trainer.model.parameters()
        whole = nn.utils.parameters_to_vector(p.grad for p in parameters if p.grad is not None)
        scale = size_of(objective, pack(groups, objective.aggregation))
        self.policy.start_sum()
        loss = 0.0
        for part in (groups[2:], groups[:1], groups[1:2]):  # rounds come in the order of generation
            for piece in split_by_tokens(part, PIECE_TOKENS):
                loss += self.policy.backward([given(pack(piece, objective.aggregation))], objective).loss
        streamed = self.policy.gradient / scale
        return abs(loss / scale - theirs.item()), ((streamed - whole).norm() / whole.norm()).item()

    def algorithm(self, name: str) -> tuple[float, float]:
        objective = objective_named(name)
        found: list[tuple[float, float]] = []
        for old in OLD:
            asked = replace(objective, old_logprobs=old)
            groups = pinned_groups(masked=name != "rloo", old=old)
            found.append(self.errors(groups, asked, self.reference.loss(pad_groups(groups), asked)))
        losses, streamed = zip(*found, strict=True)
        return max(*losses, self.advantages(objective)), max(streamed)

    def advantages(self, objective: Objective) -> float:
        rewards = np.random.default_rng(2).random((32, GROUP_SIZE)).astype(np.float32)
        self.reference.trainer.scale_rewards = "none" if objective.advantage == "mean_only" else "group"
        ask = self.reference.leave_one_out if objective.advantage == "rloo" else self.reference.advantages
        ours = np.stack([group_advantages(group, objective.advantage) for group in rewards])
        return float(np.abs(ours - ask(rewards)).max())

    def ppo(self) -> tuple[float, float]:
        """With an advantage for each token, [B, C] in TRL's layout."""
        found: list[tuple[float, float]] = []
        for old in OLD:
            groups, objective = pinned_groups(masked=True, old=old), Objective(old_logprobs=old)
            rows = [row for group in groups for row in group.samples]
            random = np.random.default_rng(3)
            of_row = {row.row_id: random.normal(size=len(row.response_ids)).astype(np.float32) for row in rows}
            of_mask = {row.row_id: row.loss_mask for row in rows}

            def given(
                batch: PackedBatch, of_row: Any = of_row, of_mask: Any = of_mask
            ) -> PackedBatch:  # bound now: there is one for each kind of old logprobs
                chosen = [of_row[row][of_mask[row].astype(bool)] for row in batch.row_ids]
                tokens = replace(batch.tokens, advantages_N=torch.from_numpy(np.concatenate(chosen)))
                return replace(batch, tokens=tokens)

            width = max(len(row.response_ids) for row in rows)
            padded = [np.pad(of_row[row.row_id], (0, width - len(row.response_ids))) for row in rows]
            asked = replace(pad_groups(groups), advantages=torch.from_numpy(np.stack(padded)))
            found.append(self.errors(groups, objective, self.reference.loss(asked, objective), given))
        losses, streamed = zip(*found, strict=True)
        return max(losses), max(streamed)

    def parts(self) -> tuple[float, float]:
        """A batch whose groups have different losses, against the sum of TRL's of each group alone."""
        found: list[tuple[float, float]] = []
        for old in OLD:
            of_parts = {
                name: replace(objective_named(name), old_logprobs=old, aggregation="token_mean") for name in MIXED
            }
            objective = replace(of_parts[MIXED[0]], of_parts=of_parts)
            pinned = pinned_groups(masked=True, old=old)
            groups = [replace(group, part=name) for group, name in zip(pinned, MIXED, strict=True)]
            size = size_of(objective, pack(groups, objective.aggregation))
            theirs = torch.zeros(())
            for group in groups:
                one = objective.of(group.part)
                share = size_of(one, pack([group], one.aggregation)) / size
                theirs = theirs + share * self.reference.loss(pad_groups([group]), one)
            found.append(self.errors(groups, objective, theirs))
        losses, streamed = zip(*found, strict=True)
        return max(losses), max(streamed)

    def distilled(self) -> tuple[float, float]:
        """The gradient is compared, and as a loss its sum: advantages that hold a constant back have no other value."""
        groups = pinned_groups(masked=True, old="rollout")
        return self.errors(groups, DISTILLED, self.reference.distillation(pad_groups(groups)))


def gae_by_definition(
    rewards: NDArray[np.float64], values: NDArray[np.float64], gamma: float, lam: float
) -> NDArray[np.float64]:
    """sum over l of (gamma lam)^l (r + gamma V' - V), a double loop over arXiv 1506.02438 eq. 16."""
    count = len(rewards)
    advantages = np.zeros(count)
    for start in range(count):
        for step in range(start, count):
            after = values[step + 1] if step + 1 < count else 0.0
            error = rewards[step] + gamma * after - values[step]
            advantages[start] += (gamma * lam) ** (step - start) * error
    return advantages


def gae_error() -> float:
    random, worst = np.random.default_rng(4), 0.0
    for length in (1, 2, 33, 512):
        for gamma, lam in ((1.0, 0.95), (0.99, 0.9), (0.9, 0.0)):
            rewards, values = random.normal(size=length) * (random.random(length) < 0.1), random.normal(size=length)
            rewards, values = rewards.astype(np.float32), values.astype(np.float32)
            expected = gae_by_definition(rewards.astype(np.float64), values.astype(np.float64), gamma, lam)
            advantages, returns = gae(torch.from_numpy(rewards), torch.from_numpy(values), gamma, lam)
            worst = max(worst, float(np.abs(advantages.numpy() - expected).max()))
            worst = max(worst, float(np.abs(returns.numpy() - expected - values).max()))
    return worst


def main() -> None:
    torch.set_num_threads(1)
    directory = prepare_model("random:qwen3-tiny", cache_dir=model_cache(os.environ))
    figures: dict[str, float] = {}

    def found(name: str, errors: tuple[float, float]) -> None:
        figures[f"{name}_error"], figures[f"{name}_streamed_error"] = errors
        print(f"{name}: {errors[0]:.1e}, streamed gradient {errors[1]:.1e} relative", flush=True)

    with tempfile.TemporaryDirectory() as output:
        against = Against(directory, Path(output))
        for name in NAMES:
            found(name, against.algorithm(name))
        found("ppo", against.ppo())
        found("distill", against.distilled())
        found("parts", against.parts())
    figures["gae_error"] = gae_error()
    print(f"gae: {figures['gae_error']:.1e}")
    print(json.dumps({name: float(f"{value:.3g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
