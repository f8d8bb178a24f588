"""Generalised advantage estimation: per-token advantages from per-token rewards and a critic's values.

Owns: the arithmetic of one sample. Never: a model, batches, padding, I/O.

Legend: T = tokens of a response that the policy chose, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantage of each token of one sample, and what its value should have been.

    Args:    rewards: [T] floating, what each token earned; one of the whole response is that of its last token.
             values: [T] floating, the critic's expected return before each token was chosen.
             gamma: factor by which what is one token later counts less, in [0, 1].
             lam: share of what came later that is believed rather than the critic, in [0, 1]: 1 is return - value,
             0 one step's error of the critic.
    Returns: (advantages, returns), each [T], of the dtype and device of ``values``, without a gradient. The response
             ends with its last token, after which the value is 0. returns = advantages + values: the critic's target.
    Raises:  ValueError: not vectors of one length, not finite, or a factor that is not in [0, 1].
    Source:  Schulman et al., arXiv 1506.02438 eq. 16, with the sum of discounted errors in its recursive form.
    """
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise ValueError(f"rewards and values are vectors of one length, not {[*rewards.shape]} and {[*values.shape]}")
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam are in [0, 1], not {gamma} and {lam}")
    if not (rewards.isfinite().all() and values.isfinite().all()):
        raise ValueError("rewards and values must be finite")
    values = values.detach()
    earned, expected = rewards.detach().tolist(), values.tolist()  # as numbers: a tensor a token took 50 times as long
    advantage, after = 0.0, 0.0
    advantages: list[float] = []
    for reward, value in zip(reversed(earned), reversed(expected), strict=True):
        advantage = reward + gamma * after - value + gamma * lam * advantage
        advantages.append(advantage)
        after = value
    advantages_T = torch.tensor(advantages[::-1], dtype=values.dtype, device=values.device)
    return advantages_T, advantages_T + values
