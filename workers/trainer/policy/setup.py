"""Builds the training step of a run from its settings.

Owns: which settings become which part. Never: trains.
"""

from __future__ import annotations

from pathlib import Path

from transport.contracts.settings import AlgorithmSettings, Settings
from workers.algorithms.loss import Objective
from workers.trainer.policy.load import choose_device, choose_dtype, load_module
from workers.trainer.policy.model import PolicyModel
from workers.trainer.policy.parallel import GradientReducer
from workers.trainer.policy.step import TrainStep


def objective_of(settings: AlgorithmSettings) -> Objective:
    """The objective that the algorithm section names."""
    return Objective(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coef=settings.kl_coef,
        importance_cap=settings.importance_cap,
        aggregation=settings.aggregation,
        old_logprobs=settings.old_logprobs,
    )


def build_step(
    settings: Settings, model_dir: Path, *, reducer: GradientReducer | None = None, trust_remote_code: bool = False
) -> TrainStep:
    """Load the base model and make the step that trains it. Raises ModelError."""
    device = choose_device(settings.trainer.device)
    module = load_module(model_dir, device=device, trust_remote_code=trust_remote_code)
    policy = PolicyModel(
        module, dtype=choose_dtype(settings.trainer.dtype, device), temperature=settings.sampling.temperature
    )
    return TrainStep(policy, settings.trainer, objective_of(settings.algorithm), reducer)
