"""Losses and advantages as users write them, good and bad, named ``tests.fakes.algorithms:<function>``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def reinforce(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return -tokens.advantages_N * logprobs


reinforce.additive = "tokens"  # type: ignore[attr-defined]


def clipped(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    """PPO's clip, as ours has it without a cap."""
    ratio = torch.exp(logprobs - tokens.rollout_logprobs_N)
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -torch.minimum(ratio * tokens.advantages_N, bounded * tokens.advantages_N)


clipped.additive = "tokens"  # type: ignore[attr-defined]


def row_mean(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    """The mean of its row's logprobs at each token: over responses, and no more."""
    rows = tokens.row_N
    sums = torch.zeros(int(rows.max()) + 1).index_add(0, rows, logprobs)
    return -tokens.advantages_N * (sums / rows.bincount())[rows]


row_mean.additive = "responses"  # type: ignore[attr-defined]


def says_tokens_and_looks_at_rows(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return row_mean(logprobs, tokens, objective)


says_tokens_and_looks_at_rows.additive = "tokens"  # type: ignore[attr-defined]


def whitens(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    advantages = tokens.advantages_N
    return -(advantages - advantages.mean()) * logprobs


whitens.additive = "responses"  # type: ignore[attr-defined]


def says_nothing(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return -tokens.advantages_N * logprobs


def mean_of_all(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return reinforce(logprobs, tokens, objective).mean()


mean_of_all.additive = "tokens"  # type: ignore[attr-defined]


def divides_by_nothing(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return -tokens.advantages_N / tokens.advantages_N.abs() * logprobs


divides_by_nothing.additive = "tokens"  # type: ignore[attr-defined]


def breaks_down_in_a_run(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    """All is well with a few tokens."""
    return -tokens.advantages_N * logprobs / (len(logprobs) <= 64)


breaks_down_in_a_run.additive = "responses"  # type: ignore[attr-defined]


def louder_in_a_run(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return -tokens.advantages_N * logprobs * max(1.0, len(logprobs) / 64)


louder_in_a_run.additive = "responses"  # type: ignore[attr-defined]


def no_finite_gradient(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    """A loss of numbers, whose root has an infinite slope where nothing has changed."""
    return (logprobs - tokens.rollout_logprobs_N).abs().sqrt()


no_finite_gradient.additive = "tokens"  # type: ignore[attr-defined]


def detached(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    return -tokens.advantages_N * logprobs.detach()


detached.additive = "tokens"  # type: ignore[attr-defined]


def raises(logprobs: Tensor, tokens: Any, objective: Any) -> Tensor:
    raise KeyError("no such column")


raises.additive = "tokens"  # type: ignore[attr-defined]


def numbers(logprobs: Tensor, tokens: Any, objective: Any) -> Any:
    return logprobs.tolist()


numbers.additive = "tokens"  # type: ignore[attr-defined]


def two_parameters(logprobs: Tensor, tokens: Any) -> Tensor:
    return logprobs


two_parameters.additive = "tokens"  # type: ignore[attr-defined]


# -- advantages


def best_only(rewards: Any) -> Any:
    """1 for the best of a group, 0 for the others."""
    return (rewards == rewards.max()).astype(float)


best_only.additive = "responses"  # type: ignore[attr-defined]


def of_groups(rewards: Any) -> Any:
    return rewards - rewards.mean()


of_groups.additive = "batch"  # type: ignore[attr-defined]

seen: list[float] = []


def running_mean(rewards: Any) -> Any:
    """Less the mean of all rewards so far: not of its group alone."""
    seen.extend(rewards)
    return rewards - np.mean(seen)


running_mean.additive = "responses"  # type: ignore[attr-defined]


def one_number(rewards: Any) -> Any:
    return rewards.mean()


one_number.additive = "responses"  # type: ignore[attr-defined]


def no_deviation(rewards: Any) -> Any:
    with np.errstate(all="ignore"):
        return (rewards - rewards.mean()) / rewards.std()


no_deviation.additive = "responses"  # type: ignore[attr-defined]


# -- advantages of tokens


def later_less(rewards: Any, responses: Any) -> Any:
    """The group's advantage, half as much at each token after the first."""
    centred = rewards - rewards.mean()
    return [one * 0.5 ** np.arange(len(response.token_ids)) for one, response in zip(centred, responses, strict=True)]


later_less.additive, later_less.per_token = "responses", True  # type: ignore[attr-defined]


def forgets_one(rewards: Any, responses: Any) -> Any:
    return later_less(rewards, responses)[1:]


forgets_one.additive, forgets_one.per_token = "responses", True  # type: ignore[attr-defined]


def chosen_alone(rewards: Any, responses: Any) -> Any:
    """A number for each token that the policy chose, and none for the others."""
    return [np.ones(int(response.chosen.sum())) for response in responses]


chosen_alone.additive, chosen_alone.per_token = "responses", True  # type: ignore[attr-defined]


def last_is_nan(rewards: Any, responses: Any) -> Any:
    return [np.where(np.arange(len(r.token_ids)) == len(r.token_ids) - 1, np.nan, 0.0) for r in responses]


last_is_nan.additive, last_is_nan.per_token = "responses", True  # type: ignore[attr-defined]


def words(rewards: Any, responses: Any) -> Any:
    return [["much"] * len(response.token_ids) for response in responses]


words.additive, words.per_token = "responses", True  # type: ignore[attr-defined]


def takes_responses(rewards: Any, responses: Any) -> Any:
    """It does not say that it is of tokens."""
    return later_less(rewards, responses)


takes_responses.additive = "responses"  # type: ignore[attr-defined]


def counts_calls(rewards: Any, responses: Any) -> Any:
    seen.append(0.0)
    return [np.full(len(response.token_ids), float(len(seen))) for response in responses]


counts_calls.additive, counts_calls.per_token = "responses", True  # type: ignore[attr-defined]
