"""A loss and advantages of one's own, see docs/algorithms.md: functions, and what each is a sum over.

--set algorithm.functions_path=docs/examples --set algorithm.loss=my_algorithm:loss
--set algorithm.advantage=my_algorithm:best_only (or my_algorithm:later_less, of each token)
"""

from __future__ import annotations

import numpy as np
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


def later_less(rewards, responses):
    """Less the mean of its group, and the less the later the token: half of it after 16. [G] rewards and responses of
    one group -> for each response [R], a number for each of its tokens."""
    advantages = rewards - rewards.mean()
    return [one * 0.5 ** (np.arange(len(its.token_ids)) / 16) for one, its in zip(advantages, responses, strict=True)]


later_less.additive = "responses"
later_less.per_token = True
