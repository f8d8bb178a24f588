"""Seeded models of what the simulator does not run: lengths, speeds, faults.

Owns: numbers. Never: the order of things (``engine.py``). Invariant: everything follows from the seed and the ids, so a
sample has the same length whoever generates it, and when.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from transport.types import PromptId, RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Response lengths: lognormal over prompts, and again over the samples of a prompt, cut at the limit.

    The long tail of RL rollouts: median 4.5K, sigma 0.8, cut at 20K fit StreamRL's 72B workload. ``sample_sigma`` is
    what a perfect ranker of prompts still cannot know. Source: ours.
    """

    median_tokens: float = 200.0
    prompt_sigma: float = 0.7
    sample_sigma: float = 0.4
    max_tokens: int = 1000
    seed: int = 0

    def predicted_tokens(self, prompt: PromptId) -> float:
        """What a perfect ranker says of a prompt: the median of its samples."""
        return self.median_tokens * math.exp(self._draw(prompt, self.prompt_sigma))

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        """Response length of a row, tokens, in [1, max_tokens]."""
        length = self.predicted_tokens(prompt) * math.exp(self._draw(row, self.sample_sigma))
        return min(self.max_tokens, max(1, round(length)))

    def _draw(self, name: str, sigma: float) -> float:
        return random.Random(f"{self.seed}/{name}").gauss(0.0, sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """How long things take, seconds.

    A decode step of ``n`` samples takes ``step_s + n * sample_step_s``: memory-bound at first, then compute-bound
    (StreamRL fig. 6 right). The trainer takes ``round_s`` a round plus ``token_s`` a token of its busiest rank.
    """

    step_s: float = 0.02
    sample_step_s: float = 0.0005
    dispatch_s: float = 0.005
    scoring_s: float = 0.05
    round_s: float = 0.05
    token_s: float = 0.0002
    optimizer_s: float = 0.5
    publish_s: float = 0.1
    load_s: float = 0.2
    checkpoint_s: float = 0.3
    prompts_s: float = 0.01
    heartbeat_s: float = 1.0

    def decode_step_s(self, num_samples: int) -> float:
        """One token of each of ``num_samples`` samples."""
        return self.step_s + num_samples * self.sample_step_s

    def train_round_s(self, busiest_rank_tokens: int) -> float:
        """Forward and backward of one round."""
        return self.round_s + busiest_rank_tokens * self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultModel:
    """What goes wrong. A mean time of 0 means never; ``until_s`` ends all faults, so that every run can end.

    worker_loss_s, trainer_loss_s: mean seconds between kills.  detect_s: until the loss is known.  restart_s: until a
    replacement joins.  row_loss: chance that a row has vanished when the trainer asks for it.
    rollout_failure: chance that a dispatched group fails at once.  repeat: chance that an event is told twice.
    """

    worker_loss_s: float = 0.0
    trainer_loss_s: float = 0.0
    detect_s: float = 3.0
    restart_s: float = 2.0
    row_loss: float = 0.0
    rollout_failure: float = 0.0
    repeat: float = 0.0
    until_s: float = 300.0
    seed: int = 0
