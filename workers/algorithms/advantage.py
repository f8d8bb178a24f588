"""Group-relative advantages: how much better a completion is than its siblings of the same prompt.

Owns: the arithmetic, in numpy, so that scoring workers need no torch. Never: I/O. Invariant: a group whose rewards are
all equal has exactly zero advantage, so it never moves the weights.

Legend: G = samples of one group (groups may differ in size).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["group_std", "mean_only", "rloo", "batch_std"]

STD_EPSILON = 1e-4
"""Added to the standard deviation; TRL's value, so that results compare."""
SPREAD_EPSILON = 1e-6
"""Rewards closer together than this are equal: sums of float32 components differ by rounding alone."""


def has_signal(rewards_G: ArrayLike) -> bool:
    """Whether a group carries a gradient: its rewards differ.

    Args:    rewards_G: [G] rewards of one group, finite.
    Returns: True when max - min exceeds SPREAD_EPSILON.
    Source:  ours. Judging by ``abs(advantage) > 1e-6`` does not work: eight float32 rewards of 0.1 have a mean that is
             off by one ulp, and dividing that by STD_EPSILON gave advantages of -7e-5.
    """
    rewards = _as_group(rewards_G)
    return bool(rewards.size) and float(rewards.max() - rewards.min()) > SPREAD_EPSILON


def group_advantages(rewards_G: ArrayLike, kind: AdvantageKind = "group_std") -> NDArray[np.float32]:
    """Advantage of each sample of one group.

    Args:    rewards_G: [G] rewards, finite, G >= 1.
             kind: "group_std" divides by the group's standard deviation (G - 1 degrees of freedom); "mean_only" does
             not, which removes the bias towards groups of low variance. "rloo": the baseline is the mean of the others,
             so it is G / (G - 1) times that. "batch_std": "mean_only", which the trainer divides by the deviation in
             its mini-batch when it closes: the loss is proportional to it, so rows need not wait for each other.
    Returns: [G] float32; all zero when the group has no signal (a group of one never has).
    Raises:  ValueError: empty, not one-dimensional, or not finite.
    Source:  GRPO (arXiv 2402.03300 sec. 4.1.2); mean_only from Dr. GRPO (arXiv 2503.20783); RLOO (arXiv 2402.14740);
             batch_std from REINFORCE++ with a group's baseline (arXiv 2501.03262). Equal to TRL 1.16's
             ``scale_rewards`` "group" and "none" wherever the rewards differ; where they do not, TRL's are rounding
             noise and ours are zero.
    """
    rewards = _as_group(rewards_G)
    if not has_signal(rewards):
        return np.zeros(rewards.shape, dtype=np.float32)
    centred = rewards - rewards.mean()
    if kind == "group_std":
        centred = centred / (rewards.std(ddof=1) + STD_EPSILON)
    elif kind == "rloo":
        centred = centred * rewards.size / (rewards.size - 1)
    return centred.astype(np.float32)


def estimator(kind: str) -> Callable[[ArrayLike], NDArray[np.float32]]:
    """``group_advantages`` of one kind. Raises ValueError for what is none."""
    known = {one: partial(group_advantages, kind=one) for one in get_args(AdvantageKind)}
    if kind not in known:
        raise ValueError(f"there is no advantage {kind!r}")
    return known[kind]


def overlong_penalty(num_tokens_G: ArrayLike, *, max_tokens: int, share: float, penalty: float) -> NDArray[np.float32]:
    """What responses that come near their limit lose: nothing before its last part, there linearly more.

    Args:    num_tokens_G: [G] of each response.  share: the last part of ``max_tokens``, in [0, 1]; 0: nothing is lost.
             penalty: at the limit.
    Returns: [G] in [-penalty, 0], to be added to rewards.
    Source:  soft overlong punishment of DAPO (arXiv 2503.14476 eq. 13).
    """
    tokens = np.asarray(num_tokens_G, dtype=np.float64)
    if not share * max_tokens:
        return np.zeros(tokens.shape, dtype=np.float32)
    begin = (1.0 - share) * max_tokens
    return (-penalty * np.clip((tokens - begin) / (share * max_tokens), 0.0, 1.0)).astype(np.float32)


def _as_group(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """float64, because the mean of equal float32 rewards is not always that reward."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards of one group are a non-empty vector, not of shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite: {rewards.tolist()}")
    return rewards
