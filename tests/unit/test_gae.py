"""GAE against its definition, its two ends, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from workers.algorithms.gae import gae


def tensors(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (0.5, 0.5), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_it_is_the_sum_of_discounted_errors_of_the_critic(gamma: float, lam: float, length: int) -> None:
    rewards, values = tensors(length, length)
    error = rewards - values
    error[:-1] += gamma * values[1:]
    expected = [sum((gamma * lam) ** (k - t) * error[k] for k in range(t, length)) for t in range(length)]
    advantages, returns = gae(rewards, values, gamma, lam)
    assert torch.allclose(advantages, torch.stack([torch.as_tensor(one) for one in expected]), atol=1e-12)
    assert torch.allclose(returns, advantages + values)


def test_without_trust_in_the_critic_it_is_the_return_less_the_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.25, 0.5, 0.75])
    advantages, returns = gae(rewards, values, 1.0, 1.0)
    assert torch.equal(returns, torch.ones(3))
    assert torch.equal(advantages, torch.tensor([0.75, 0.5, 0.25]))


def test_a_perfect_critic_leaves_nothing_and_no_gradient_passes() -> None:
    rewards = torch.tensor([0.0, 0.0, 2.0])
    values = torch.full((3,), 2.0, requires_grad=True)
    advantages, returns = gae(rewards, values, 1.0, 0.7)
    assert not advantages.any()
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert advantages.dtype == values.dtype


def test_a_response_without_tokens_has_none() -> None:
    assert [len(one) for one in gae(torch.zeros(0), torch.zeros(0), 1.0, 0.95)] == [0, 0]


@pytest.mark.parametrize(
    ("rewards", "values", "gamma", "lam", "says"),
    [
        (torch.zeros(3), torch.zeros(2), 1.0, 1.0, r"\[3\] and \[2\]"),
        (torch.zeros(1, 3), torch.zeros(1, 3), 1.0, 1.0, "vectors"),
        (torch.zeros(2), torch.zeros(2), 1.1, 1.0, "1.1"),
        (torch.zeros(2), torch.zeros(2), 1.0, -0.1, "-0.1"),
        (torch.tensor([0.0, float("nan")]), torch.zeros(2), 1.0, 1.0, "finite"),
        (torch.zeros(2), torch.tensor([0.0, float("inf")]), 1.0, 1.0, "finite"),
    ],
)
def test_what_means_nothing_is_refused(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        gae(rewards, values, gamma, lam)
