"""Prompts with the lengths of their responses: what a ranker learns from, and the split that keeps it honest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPLIT = (0.7, 0.2, 0.1)
"""Train, validation, test. Source: StreamRL sec. 7.1, dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """One prompt and the lengths of its samples.

    tokens: one a sample, each >= 1.  base_tokens: lengths that another policy, usually the base model, gave the same
    prompt; () where there are none.
    """

    prompt_id: str
    text: str
    tokens: tuple[int, ...]
    base_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1 or min(self.base_tokens, default=1) < 1:
            raise ValueError(f"prompt {self.prompt_id}: lengths are positive and there is at least one")


def mean_tokens(samples: Sequence[PromptLengths]) -> NDArray[np.float64]:
    """[N] mean length of each prompt's samples, tokens: the truth that ranks are measured against."""
    return np.array([sum(sample.tokens) / len(sample.tokens) for sample in samples], dtype=np.float64)


def log_means(samples: Sequence[PromptLengths]) -> NDArray[np.float64]:
    """[N] mean of the log lengths of each prompt's samples."""
    return np.array([float(np.mean(np.log(sample.tokens))) for sample in samples], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Split:
    """Disjoint sets of prompts: all samples of a prompt are on one side."""

    train: list[PromptLengths]
    validation: list[PromptLengths]
    test: list[PromptLengths]


def shuffled(samples: Sequence[PromptLengths], seed: int) -> list[PromptLengths]:
    """The same samples in an order that depends on the seed alone."""
    order = list(samples)
    random.Random(seed).shuffle(order)
    return order


def checked(tokens: Sequence[int]) -> tuple[int, ...]:
    """Raises ValueError unless every length is a whole number >= 0; an empty response counts as one token."""
    lengths = tuple(int(length) for length in tokens)
    if any(length < 0 or length != given for length, given in zip(lengths, tokens, strict=True)):
        raise ValueError(f"response lengths are whole numbers of tokens, not {list(tokens)}")
    return tuple(max(1, length) for length in lengths)


def split(samples: Sequence[PromptLengths], seed: int) -> Split:
    """7:2:1 by prompt; the same seed and samples give the same split."""
    order = shuffled(samples, seed)
    first, second = round(SPLIT[0] * len(order)), round((SPLIT[0] + SPLIT[1]) * len(order))
    return Split(train=order[:first], validation=order[first:second], test=order[second:])
