"""Group advantages: their values, the zero of a group without signal, and equality with TRL."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from workers.algorithms.advantage import AdvantageKind, group_advantages, has_signal, overlong_penalty


def test_group_std_centres_and_scales() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0])
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    assert advantages.sum() == pytest.approx(0.0, abs=1e-6)


def test_mean_only_keeps_the_rewards_scale() -> None:
    assert group_advantages([1.0, 0.0, 0.5, 0.5], "mean_only") == pytest.approx([0.5, -0.5, 0.0, 0.0])


def test_rloo_compares_with_the_others() -> None:
    assert group_advantages([1.0, 0.0, 0.5], "rloo") == pytest.approx([0.75, -0.75, 0.0])


def test_a_response_near_its_limit_loses_reward_linearly() -> None:
    lost = overlong_penalty([10, 80, 90, 100, 120], max_tokens=100, share=0.2, penalty=2.0)
    assert lost.tolist() == [0.0, 0.0, -1.0, -2.0, -2.0]
    assert not overlong_penalty([100], max_tokens=100, share=0.0, penalty=2.0).any()


@pytest.mark.parametrize("size", [1, 3, 8, 64])
@pytest.mark.parametrize("kind", get_args(AdvantageKind))
def test_equal_rewards_give_exactly_zero_advantage(size: int, kind: str) -> None:
    rewards = np.full(size, 0.1, dtype=np.float32)  # its float32 mean is not always 0.1
    assert not has_signal(rewards)
    assert not group_advantages(rewards, kind).any()  # type: ignore[arg-type]


def test_rounding_of_summed_components_is_no_signal() -> None:
    assert not has_signal([0.1 + 0.2, 0.3])
    assert has_signal([0.1, 0.1, 0.1, 0.10001])


@pytest.mark.parametrize("rewards", [[], [[1.0, 2.0]], [1.0, float("nan")], [float("inf"), 1.0]])
def test_bad_rewards_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="reward"):
        group_advantages(rewards)
