"""Group-relative advantages: how much better a completion is than its siblings of the same prompt.

Owns: the arithmetic, in numpy, so that scoring workers need no torch. Never: I/O. Invariant: a group whose rewards are
all equal has exactly zero advantage, so it never moves the weights.

Legend: G = samples of one group (groups may differ in size).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageKind = Literal["group_std", "mean_only"]

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
             not, which removes the bias towards groups of low variance.
    Returns: [G] float32; all zero when the group has no signal (a group of one never has).
    Raises:  ValueError: empty, not one-dimensional, or not finite.
    Source:  GRPO (arXiv 2402.03300 sec. 4.1.2); mean_only from Dr. GRPO (arXiv 2503.20783). Equal to TRL 1.16's
             ``scale_rewards`` "group" and "none" wherever the rewards differ; where they do not, TRL's are rounding
             noise and ours are zero.
    """
    rewards = _as_group(rewards_G)
    if not has_signal(rewards):
        return np.zeros(rewards.shape, dtype=np.float32)
    centred = rewards - rewards.mean()
    if kind == "group_std":
        centred = centred / (rewards.std(ddof=1) + STD_EPSILON)
    return centred.astype(np.float32)


def _as_group(rewards_G: ArrayLike) -> NDArray[np.float64]:
    """float64, because the mean of equal float32 rewards is not always that reward."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards of one group are a non-empty vector, not of shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite: {rewards.tolist()}")
    return rewards
