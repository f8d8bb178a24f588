"""A loss and an advantage of one's own, see docs/algorithms.md: functions, and what each is a sum over.

--set algorithm.functions_path=docs/examples --set algorithm.loss=my_algorithm:loss
--set algorithm.advantage=my_algorithm:best_only
"""

from __future__ import annotations

import torch


def loss(logprobs, tokens, objective):
    """REINFORCE with an importance ratio that is cut at 2. [N] tokens -> [N], neither weighted nor averaged."""
    ratio = torch.exp(logprobs - tokens.rollout_logprobs_N).detach().clamp(max=2.0)
    return -ratio * tokens.advantages_N * logprobs


loss.additive = "tokens"


def best_only(rewards):
    """The best of a group against the others. [G] rewards of one group -> [G] advantages."""
    best = (rewards == rewards.max()).astype(float)
    return best - best.mean()


best_only.additive = "responses"
