"""Advantages, losses and gradients equal TRL's on the same tensors. Skipped, loudly, without the ``bench`` extra."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.trl_reference import VERSION, TrlReference, pad_groups
from orchestrator.config.load import resolve
from tests.fakes.training import make_groups
from transport.contracts.settings import Algorithm
from workers.algorithms.advantage import group_advantages
from workers.algorithms.loss import Objective, OldLogprobs, normaliser
from workers.models import prepare_model
from workers.trainer.policy.model import PolicyModel, load_module
from workers.trainer.policy.packing import pack
from workers.trainer.policy.policy_learner import objective_of

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'streamrl[bench]'")
pytestmark = [
    pytest.mark.skipif(trl.__version__ != VERSION, reason=f"the reference is TRL {VERSION}, not {trl.__version__}"),
    pytest.mark.filterwarnings("ignore"),  # what TRL and its dependencies deprecate
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model("random:qwen3-tiny", cache_dir=tmp_path_factory.mktemp("models"), say=lambda line: None)


@pytest.fixture(scope="module")
def reference(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> TrlReference:
    return TrlReference(model_dir, tmp_path_factory.mktemp("trl"), group_size=8)


def test_advantages_equal(reference: TrlReference) -> None:
    rewards = np.random.default_rng(0).choice([0.0, 0.1, 1.0], size=(6, 8)).astype(np.float32)
    ours = np.stack([group_advantages(group) for group in rewards])
    differs = np.ptp(rewards, axis=1) > 0
    assert differs.sum() >= 4
    theirs = reference.advantages(rewards)
    assert np.abs(ours - theirs)[differs].max() <= 1e-6
    reference.trainer.scale_rewards = "none"
    mean_only = np.stack([group_advantages(group, "mean_only") for group in rewards])
    assert np.abs(mean_only - reference.advantages(rewards)).max() <= 1e-6
    reference.trainer.scale_rewards = "group"


OF_TOKENS = [Objective(aggregation=one, clip_high=0.28) for one in ("token_mean", "sequence_mean")]
TAUGHT = {"distill": ["algorithm.teacher=any"]}
NAMED = [
    objective_of(resolve(None, [], [f"algorithm.name={name}", *TAUGHT.get(name, ())], {}).settings)
    for name in get_args(Algorithm)
    if name != "sft"  # it needs data of its own; the loss is that of rft
]
OF_REWARDS = [objective for objective in NAMED if objective.rl_coef]
MASKED = Objective(old_logprobs="recomputed", importance="mask", importance_cap=1.2)


@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
@pytest.mark.parametrize("old_logprobs", ["rollout", "recomputed"])
@pytest.mark.parametrize("objective", [*OF_TOKENS, *OF_REWARDS, MASKED], ids=repr)
def test_loss_and_gradient_equal(
    reference: TrlReference, model_dir: Path, objective: Objective, old_logprobs: OldLogprobs, kl_coef: float
) -> None:
    if objective is MASKED and old_logprobs == "rollout":
        pytest.skip("TRL has no mask there")
    objective = replace(objective, old_logprobs=old_logprobs, kl_coef=kl_coef)
    by_sequences = objective.loss == "sequence_clip"
    if by_sequences:  # all that TRL's has
        objective = replace(objective, kl_coef=0.0, importance_cap=0.0)
    groups = make_groups(all_columns=True, masked=not by_sequences)
    if old_logprobs == "rollout":
        groups = [replace(g, samples=[replace(s, old_logprobs=None) for s in g.samples]) for g in groups]
    policy = PolicyModel(load_module(model_dir, device=torch.device("cpu")), dtype=torch.float32, temperature=1.0)
    batch = pack(groups, objective.aggregation)
    scale = normaliser(
        replace(objective, advantage="group_std"), num_rows=len(batch.row_ids), num_tokens=sum(batch.row_lengths)
    )
    ours = policy.backward([batch], objective).loss / scale
    theirs = reference.loss(pad_groups(groups), objective)
    assert ours == pytest.approx(theirs.item(), abs=1e-6)
    reference.trainer.model.zero_grad()
    theirs.backward()
    expected = nn.utils.parameters_to_vector(p.grad for p in reference.trainer.model.parameters())
    assert ((policy.gradient / scale - expected).norm() / expected.norm()).item() < 1e-5


def test_leave_one_out_equals(reference: TrlReference) -> None:
    rewards = np.random.default_rng(0).random((6, 8)).astype(np.float32)
    ours = np.stack([group_advantages(group, "rloo") for group in rewards])
    assert np.abs(ours - reference.leave_one_out(rewards)).max() <= 1e-6


def test_distillation_equals(reference: TrlReference, model_dir: Path) -> None:
    groups = make_groups(all_columns=True, masked=True)
    groups = [replace(g, samples=[replace(s, old_logprobs=None) for s in g.samples]) for g in groups]
    distill = next(objective for objective in NAMED if objective.kl_estimator == "reverse")
    objective = replace(distill, importance_cap=0.0)  # TRL corrects nothing there
    policy = PolicyModel(load_module(model_dir, device=torch.device("cpu")), dtype=torch.float32, temperature=1.0)
    batch = pack(groups, objective.aggregation)
    scale = normaliser(objective, num_rows=len(batch.row_ids), num_tokens=sum(batch.row_lengths))
    ours = policy.backward([batch], objective).loss / scale
    theirs = reference.distillation(pad_groups(groups))
    assert ours == pytest.approx(theirs.item(), abs=1e-6)
    reference.trainer.model.zero_grad()
    theirs.backward()
    expected = nn.utils.parameters_to_vector(p.grad for p in reference.trainer.model.parameters())
    assert ((policy.gradient / scale - expected).norm() / expected.norm()).item() < 1e-5
