"""The objective: clips on the right side, corrections in place, sums that do not depend on how a batch is cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from workers.algorithms.advantage import STD_EPSILON
from workers.algorithms.loss import (
    LossMetrics,
    Objective,
    TokenBatch,
    k3_kl_N,
    loss_metrics,
    loss_sum,
    loss_terms,
    normaliser,
    policy_loss_N,
    reference_kl_N,
    token_weight,
)


def tokens_of(
    advantages: list[float],
    *,
    rollout: list[float] | None = None,
    old: list[float] | None = None,
    reference: list[float] | None = None,
) -> TokenBatch:
    def tensor(values: list[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values)

    count = len(advantages)
    return TokenBatch(
        rollout_logprobs_N=torch.tensor(rollout or [-1.0] * count),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.ones(count),
        old_logprobs_N=tensor(old),
        reference_logprobs_N=tensor(reference),
    )


def gradient_of(ratios: list[float], tokens: TokenBatch, objective: Objective) -> list[float]:
    """d loss / d logprob at logprobs that make these ratios against logprobs of -1."""
    logprobs_N = (torch.tensor(ratios).log() - 1.0).requires_grad_()
    policy_loss_N(logprobs_N, tokens, objective).sum().backward()
    assert logprobs_N.grad is not None
    return logprobs_N.grad.tolist()


def test_each_side_clips_at_its_own_bound_and_only_where_it_would_go_further() -> None:
    objective = Objective(clip_low=0.2, clip_high=0.28, importance_cap=0.0)
    ratios = [1.29, 1.27, 0.79, 0.81, 1.29, 0.79]
    gradient = gradient_of(ratios, tokens_of([1, 1, -1, -1, -1, 1]), objective)
    assert gradient == pytest.approx([0.0, -1.27, 0.0, 0.81, 1.29, -0.79], rel=1e-5)


def test_the_cap_bounds_the_side_that_clipping_leaves_open() -> None:
    tokens = tokens_of([-1, -1, 1])
    capped = gradient_of([2.1, 1.9, 2.1], tokens, Objective(importance_cap=2.0))
    assert capped == pytest.approx([0.0, 1.9, 0.0], rel=1e-5)
    assert gradient_of([2.1, 1.9, 2.1], tokens, Objective(importance_cap=0.0))[0] == pytest.approx(2.1)


def test_recomputed_old_logprobs_are_corrected_by_a_capped_constant() -> None:
    """old = -1 everywhere; the rollout said less (weight above 1, capped at 2) or more (weight below 1)."""
    tokens = tokens_of([1, 1, 1], rollout=[-1 - math.log(1.5), -3.0, -1 + math.log(2)], old=[-1.0] * 3)
    gradient = gradient_of([1.0, 1.0, 1.0], tokens, Objective(old_logprobs="recomputed", importance_cap=2.0))
    assert gradient == pytest.approx([-1.5, -2.0, -0.5], rel=1e-5)
    uncorrected = gradient_of([1.0, 1.0, 1.0], tokens, Objective(old_logprobs="recomputed", importance_cap=0.0))
    assert uncorrected == pytest.approx([-1.0] * 3)


def test_a_cap_below_the_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="importance_cap"):
        Objective(importance_cap=1.2, clip_high=0.2)
    Objective(importance_cap=1.2, clip_high=0.2, old_logprobs="recomputed")


def test_k3_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.5])
    assert k3_kl_N(policy, policy).tolist() == [0.0, 0.0, 0.0]
    assert (k3_kl_N(policy, policy + torch.tensor([0.3, -0.3, 1.0])) > 0).all()
    assert k3_kl_N(torch.zeros(1), torch.ones(1)).item() == pytest.approx(math.e - 2)


def test_kl_needs_the_reference_column() -> None:
    objective = Objective(kl_coef=0.1)
    with pytest.raises(ValueError, match="reference_logprobs"):
        loss_sum(torch.zeros(1), tokens_of([1.0]), objective, loss_terms(objective))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_parts_of_a_batch_sum_to_its_loss_and_metrics(aggregation: str) -> None:
    objective = Objective(kl_coef=0.1, aggregation=aggregation)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    logprobs_N, rollout_N, reference_N = -torch.rand(3, 20, generator=generator)
    tokens = TokenBatch(
        rollout_logprobs_N=rollout_N,
        advantages_N=torch.randn(20, generator=generator),
        weights_N=torch.tensor([token_weight(n, objective.aggregation) for n in (4, 16) for _ in range(n)]),
        reference_logprobs_N=reference_N,
    )
    terms = loss_terms(objective)
    whole = loss_sum(logprobs_N, tokens, objective, terms)
    pieces, metrics = torch.zeros(()), LossMetrics()
    for start, stop in ((0, 3), (3, 4), (4, 20)):
        part = tokens.slice(start, stop)
        loss = loss_sum(logprobs_N[start:stop], part, objective, terms)
        pieces, metrics = pieces + loss, metrics + loss_metrics(loss, logprobs_N[start:stop], part, objective)
    assert pieces.item() == pytest.approx(whole.item(), rel=1e-5)
    expected = loss_metrics(whole, logprobs_N, tokens, objective)
    assert metrics.to_vectors()[0] == pytest.approx(expected.to_vectors()[0], rel=1e-5)
    assert metrics.mismatch_max == expected.mismatch_max
    assert LossMetrics.from_vectors(*metrics.to_vectors()) == metrics


def test_metrics_count_what_the_clip_removed() -> None:
    ratios = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.0])
    tokens = tokens_of([1, -1, 1, -1, 1])
    metrics = loss_metrics(torch.zeros(()), ratios.log() - 1.0, tokens, Objective()).means()
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (0.2, 0.2)
    assert metrics["logprob_mismatch_max"] == pytest.approx(-math.log(0.7), rel=1e-5)
    assert metrics["computed_tokens"] == 5
    assert metrics["mismatch_tv"] == pytest.approx(4 * 0.3 / 2 / 5)
    assert metrics["mismatch_k3"] == pytest.approx((2 * (0.3 - math.log(1.3)) + 2 * (-0.3 - math.log(0.7))) / 5)


def test_normalisers() -> None:
    assert normaliser(Objective(), num_rows=3, num_tokens=40) == 40
    assert normaliser(Objective(aggregation="sequence_mean"), num_rows=3, num_tokens=40) == 3
    assert normaliser(Objective(aggregation="fixed_length", max_length=32), num_rows=3, num_tokens=40) == 96
    whitened = normaliser(Objective(advantage="batch_std"), num_rows=3, num_tokens=40, advantage_squares=8.0)
    assert whitened == pytest.approx(40 * (2.0 + STD_EPSILON))
    assert token_weight(8, "sequence_mean") == pytest.approx(1 / 8)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "sequence_clip", "cispo"])
@pytest.mark.parametrize("importance", ["truncate", "mask"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_floats_leaves_no_gradient_that_is_no_number(loss, importance, advantage) -> None:
    """A row of 2,000 tokens, each a little likelier than when it was sampled: the ratio of the whole is exp(100)."""
    count = 2000
    for each, old in ((0.05, None), (0.05, [-1.0] * count), (100.0, None), (100.0, [-1.0] * count)):
        tokens = replace(
            tokens_of([advantage] * count, rollout=[-1.0 - (old is not None) * 100.0] * count, old=old),
            row_N=torch.zeros(count, dtype=torch.int64),
        )
        logprobs_N = torch.full((count,), -1.0 + each).requires_grad_()
        objective = Objective(
            loss=loss, importance=importance, importance_cap=2.0, old_logprobs="recomputed" if old else "rollout"
        )
        policy_loss_N(logprobs_N, tokens, objective).sum().backward()
        assert logprobs_N.grad is not None
        assert logprobs_N.grad.isfinite().all()


@pytest.mark.parametrize(("cap", "weight"), [(0.0, 1.0), (2.0, 2.0), (4.0, 3.0)])
def test_the_reverse_kl_counts_what_other_weights_sampled_by_its_capped_ratio(cap: float, weight: float) -> None:
    tokens = tokens_of([0.0], rollout=[-1.0 - math.log(3.0)], reference=[-1.5])
    objective = Objective(rl_coef=0.0, kl_coef=1.0, kl_estimator="reverse", importance_cap=cap)
    logprobs_N = torch.tensor([-1.0], requires_grad=True)
    reference_kl_N(logprobs_N, tokens, objective).sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.item() == pytest.approx(0.5 * weight)
