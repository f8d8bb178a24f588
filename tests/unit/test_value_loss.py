"""The critic's loss against a plain loop of its formula, and against TRL's expression of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.algorithms.value_loss import ValueMetrics, value_loss_N, value_metrics


def columns(tokens: int = 257) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, those that were recorded, returns), on both sides of the clip."""
    random = np.random.default_rng(3)
    values, old, returns = (torch.from_numpy(random.normal(size=tokens)) for _ in range(3))
    return values, old, returns


def plain_loss(value: float, old: float, target: float, clip: float) -> float:
    error = (value - target) ** 2
    if clip:
        clipped = min(max(value, old - clip), old + clip)
        error = max(error, (clipped - target) ** 2)
    return 0.5 * error


@pytest.mark.parametrize("clip", [0.0, 0.2, 5.0])
def test_each_token_is_what_a_plain_loop_says(clip: float):
    values, old, returns = columns()
    found = value_loss_N(values, old, returns, clip)
    expected = [plain_loss(*each, clip) for each in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_it_is_the_loss_of_trl():
    """As TRL's PPOTrainer computes it, with vf_coef 1: half the mean of the larger error."""
    values, old, returns = columns()
    clipped = torch.clamp(values, old - 0.2, old + 0.2)
    theirs = 0.5 * torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    assert value_loss_N(values, old, returns, 0.2).mean().item() == pytest.approx(theirs.item(), abs=1e-12)


def test_a_value_that_left_the_clip_towards_its_return_has_no_gradient():
    values = torch.tensor([0.5, -0.5, 0.5, 0.1], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, -1.0, 0.0, 1.0])
    value_loss_N(values, old, returns, 0.2).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, 0.5, -0.9])


def test_metrics_of_pieces_are_those_of_the_whole():
    values, old, returns = columns()
    loss = value_loss_N(values, old, returns, 0.2)

    def of(part: slice) -> ValueMetrics:
        return value_metrics(loss[part].sum(), values[part], old[part], returns[part], 0.2, num_rows=1)

    whole, pieces = of(slice(None)).means(), (of(slice(0, 100)) + of(slice(100, None))).means()
    assert pieces == pytest.approx(whole)
    errors = (returns - values).numpy()
    assert whole["explained_variance"] == pytest.approx(1 - errors.var() / returns.numpy().var())
    assert whole["value_loss"] == pytest.approx(loss.mean().item())
    assert 0 < whole["value_clip_fraction"] < 1


def test_nothing_was_trained_and_returns_that_agree():
    assert ValueMetrics().means() == {}
    agreeing = value_metrics(torch.tensor(1.0), torch.zeros(3), torch.zeros(3), torch.ones(3), 0.2, num_rows=1)
    assert "explained_variance" not in agreeing.means()
