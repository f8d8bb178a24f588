"""TRL as the reference for advantages and losses: its own trainer object, driven with pinned tensors.

For tests and benchmarks only; needs the ``bench`` extra. Nothing here reimplements a formula: rewards go into TRL's
``_generate_and_score_completions``, log-probabilities into its ``_compute_loss``.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.algorithms.loss import Objective
from workers.trainer.policy.packing import PromptGroup

VERSION = "1.16.0"


class TrlReference:
    """One GRPOTrainer of TRL over a small model directory. group_size: samples of a group."""

    def __init__(self, model_dir: Path, output_dir: Path, *, group_size: int, **config: Any) -> None:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # TRL's and its dependencies' deprecations are not ours to fix
            from datasets import Dataset
            from transformers import AutoModelForCausalLM
            from trl.trainer.grpo_config import GRPOConfig
            from trl.trainer.grpo_trainer import GRPOTrainer

            self._rewards: list[float] = []
            arguments = GRPOConfig(
                output_dir=str(output_dir),
                use_cpu=True,
                bf16=False,
                report_to=[],
                disable_tqdm=True,
                num_generations=group_size,
                per_device_train_batch_size=group_size,
                per_device_eval_batch_size=group_size,
                max_completion_length=2,
                **config,
            )
            self.trainer: Any = GRPOTrainer(
                model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),  # type: ignore[arg-type]
                reward_funcs=self._pinned_rewards,
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": ["1 + 1"] * group_size}),
            )
        self.trainer.model.eval()

    def _pinned_rewards(self, completions: Sequence[Any], **kwargs: Any) -> list[float]:
        return self._rewards

    def advantages(self, rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        """[groups, group_size] rewards -> advantages of the same shape, as TRL scores its own completions."""
        self._rewards = rewards.reshape(-1).tolist()
        self._as_it_came()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scored = self.trainer._generate_and_score_completions([{"prompt": "1 + 1"} for _ in self._rewards])
        return scored["advantages"].numpy().reshape(rewards.shape)

    def _as_it_came(self) -> None:
        """Without what ``loss`` has set for an objective."""
        self.trainer.use_vllm = self.trainer.vllm_importance_sampling_correction = False
        self.trainer.beta = 0.0

    def leave_one_out(self, rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same by its trainer of RLOO."""
        from trl.trainer.rloo_trainer import RLOOTrainer

        self._rewards = rewards.reshape(-1).tolist()
        self.trainer.reward_clip_range, self.trainer.normalize_advantages = None, False
        self._as_it_came()
        ours = self.trainer._generate

        def generate(prompts: list[str]) -> tuple[Any, Any, Any]:
            prompt_ids, completion_ids, _, completions, *_ = ours(prompts)  # that of GRPO says more
            return prompt_ids, completion_ids, completions

        self.trainer._generate = generate
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                asked = [{"prompt": "1 + 1"} for _ in self._rewards]
                scored = RLOOTrainer._generate_and_score_completions(self.trainer, asked)
        finally:
            self.trainer._generate = ours
        return scored["advantages"].numpy().reshape(rewards.shape)

    def distillation(self, padded: PaddedGroups, *, temperature: float = 1.0) -> Tensor:
        """TRL's on-policy distillation of sampled tokens to ``reference_logprobs``, without its weights by position."""
        from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

        model = self.trainer.model
        ids = torch.cat([padded.prompt_ids, padded.completion_ids], dim=1)
        mask = torch.cat([padded.prompt_mask, padded.completion_mask], dim=1)
        width = padded.completion_ids.shape[1]
        # as ``_compute_loss`` calls the model: without positions, so that left pads shift them in both
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=width + 1, use_cache=False).logits[:, :-1]
        settings = SimpleNamespace(
            model=model,
            temperature=temperature,
            iw_opd_gamma=0.0,
            iw_opd_epsilon=1e-8,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        labels = torch.where(padded.loss_mask.bool(), padded.completion_ids, -100)
        return IWOPDTrainer._compute_iw_opd_loss(
            settings, logits, padded.completion_ids, labels, padded.reference_logprobs
        )

    def loss(self, padded: PaddedGroups, objective: Objective) -> Tensor:
        """TRL's loss of the whole batch, with gradients to its model. Equal objectives, TRL's names for them."""
        trainer = self.trainer
        if objective.loss == "sequence_clip":
            return self._loss_of_sequences(padded, objective)
        by_aggregation = {"token_mean": "dapo", "sequence_mean": "grpo", "fixed_length": "dr_grpo"}
        trainer.loss_type = "cispo" if objective.loss == "cispo" else by_aggregation[objective.aggregation]
        trainer.importance_sampling_level = "sequence" if objective.loss == "gspo" else "token"
        trainer.max_completion_length = objective.max_length
        trainer.epsilon_low, trainer.epsilon_high = objective.clip_low, objective.clip_high
        if objective.loss == "cispo":
            trainer.epsilon_high += 1.0  # the bound itself
        trainer.beta = objective.kl_coef
        trainer.temperature = 1.0
        trainer.args.use_bias_correction_kl = False  # the plain k3 estimate
        trainer.current_gradient_accumulation_steps = 1
        recomputed = objective.old_logprobs == "recomputed"
        trainer.args.delta = objective.importance_cap or None if not recomputed else None
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = recomputed and objective.importance_cap > 0
        inputs = padded.trl_inputs()
        if trainer.use_vllm:
            difference = padded.old_logprobs - padded.rollout_logprobs
            ratio, cap = difference.exp(), objective.importance_cap
            kept = ratio.clamp(max=cap) if objective.importance == "truncate" else ratio.masked_fill(ratio > cap, 0.0)
            inputs["importance_sampling_ratio"] = kept
        inputs["old_per_token_logps"] = padded.old_logprobs if recomputed else padded.rollout_logprobs
        return trainer._compute_loss(trainer.model, inputs)

    def _loss_of_sequences(self, padded: PaddedGroups, objective: Objective) -> Tensor:
        """As its trainer of RLOO has it, whose loss knows no KL, no mask of tools and no correction of the engine's."""
        from trl.trainer.rloo_trainer import RLOOTrainer

        inputs = padded.trl_inputs()
        old = padded.old_logprobs if objective.old_logprobs == "recomputed" else padded.rollout_logprobs
        inputs["old_logps"] = (old * padded.completion_mask).sum(1)
        self.trainer.epsilon_low, self.trainer.epsilon_high = objective.clip_low, objective.clip_high
        return RLOOTrainer._compute_loss(self.trainer, self.trainer.model, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedGroups:
    """The usual layout: prompts padded on the left to [B, P], completions on the right to [B, C]."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor
    reference_logprobs: Tensor

    def trl_inputs(self) -> dict[str, Tensor]:
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "advantages": self.advantages,
            "ref_per_token_logps": self.reference_logprobs,
            "tool_mask": self.loss_mask,
            "num_items_in_batch": self.loss_mask.sum(),
        }


def pad_groups(groups: Sequence[PromptGroup]) -> PaddedGroups:
    """Every sample a row of its own, all rows of one length. Missing columns are the rollout's logprobs."""
    rows = [(group.prompt_ids, sample) for group in groups for sample in group.samples]
    width_p = max(len(prompt) for prompt, _ in rows)
    width_c = max(len(sample.response_ids) for _, sample in rows)

    def left(values: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.stack([np.pad(v, (width_p - len(v), 0)) for v in values]))

    def right(values: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.stack([np.pad(v, (0, width_c - len(v))) for v in values]))

    def logprobs(name: str) -> Tensor:
        columns = [getattr(sample, name) for _, sample in rows]
        return right([s.rollout_logprobs if c is None else c for c, (_, s) in zip(columns, rows, strict=True)])

    masks = [np.ones(len(s.response_ids), np.uint8) if s.loss_mask is None else s.loss_mask for _, s in rows]
    return PaddedGroups(
        prompt_ids=left([p for p, _ in rows]).long(),
        prompt_mask=left([np.ones(len(p), np.int64) for p, _ in rows]),
        completion_ids=right([s.response_ids for _, s in rows]).long(),
        completion_mask=right([np.ones(len(s.response_ids), np.int64) for _, s in rows]),
        loss_mask=right(masks).long(),
        advantages=torch.tensor([s.advantage for _, s in rows]),
        rollout_logprobs=logprobs("rollout_logprobs"),
        old_logprobs=logprobs("old_logprobs"),
        reference_logprobs=logprobs("reference_logprobs"),
    )
