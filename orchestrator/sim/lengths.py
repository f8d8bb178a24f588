"""How long responses are in simulation, drawn or recorded, and what a ranker predicts of them.

Invariant: a sample has the same length whichever worker generates it, when, and how often.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from transport.contracts.messages import PromptRef
from transport.contracts.types import PromptId, RowId, parse_row_id


class Lengths(Protocol):
    """Lengths of a workload. Prompts are named ``p0``, ``p1``, ..."""

    def prompt(self, index: int) -> PromptRef:
        """The prompt in this place, with what a ranker says of it."""
        ...

    def prompt_tokens(self, prompt: PromptId) -> int: ...

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        """Response length of a row."""
        ...


def prompt_id(index: int) -> PromptId:
    """Name of the prompt in this place."""
    return PromptId(f"p{index}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Response lengths: lognormal over prompts, and again over the samples of a prompt, cut at the limit.

    ``sample_sigma`` is what a perfect ranker of prompts still cannot know. Source: ours.
    """

    median_tokens: float = 200.0
    prompt_sigma: float = 0.7
    sample_sigma: float = 0.4
    max_tokens: int = 1000
    question_tokens: int = 50
    seed: int = 0

    def prompt(self, index: int) -> PromptRef:
        name = prompt_id(index)
        predicted = self.predicted_tokens(name)
        return PromptRef(prompt_id=name, prompt_tokens=self.question_tokens, predicted_tokens=predicted)

    def prompt_tokens(self, prompt: PromptId) -> int:
        return self.question_tokens

    def predicted_tokens(self, prompt: PromptId) -> float:
        """What a perfect ranker says of a prompt: the median of its samples."""
        return self.median_tokens * math.exp(self._draw(prompt, self.prompt_sigma))

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        """Response length of a row, tokens, in [1, max_tokens]."""
        length = self.predicted_tokens(prompt) * math.exp(self._draw(row, self.sample_sigma))
        return min(self.max_tokens, max(1, round(length)))

    def _draw(self, name: str, sigma: float) -> float:
        return random.Random(f"{self.seed}/{name}").gauss(0.0, sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLengths:
    """Lengths that are known in advance, as in StreamRL's evaluation (sec. 7): prompts take them in a circle.

    lengths: [prompts][samples] response tokens; a group takes its samples in a circle.  questions: [prompts] prompt
    tokens.  predicted: [prompts] what a ranker says, tokens.  sigma: the spread of their logarithm, by the ranker.
    """

    lengths: Sequence[Sequence[int]]
    questions: Sequence[int]
    predicted: Sequence[float]
    sigma: float = 0.0

    def prompt(self, index: int) -> PromptRef:
        place = index % len(self.lengths)
        return PromptRef(
            prompt_id=prompt_id(index),
            prompt_tokens=self.questions[place],
            predicted_tokens=self.predicted[place],
            predicted_sigma=self.sigma,
        )

    def prompt_tokens(self, prompt: PromptId) -> int:
        return self.questions[self._place(prompt)]

    def tokens(self, prompt: PromptId, row: RowId) -> int:
        samples = self.lengths[self._place(prompt)]
        return samples[0] if len(samples) == 1 else samples[parse_row_id(row)[1] % len(samples)]

    def _place(self, prompt: PromptId) -> int:
        return int(prompt[1:]) % len(self.lengths)


def long_tailed(
    num_prompts: int,
    *,
    seed: int,
    median_tokens: float = 4500.0,
    sigma: float = 0.8,
    max_tokens: int = 20_000,
    question_tokens: int = 500,
    recall: float | None = None,
) -> RecordedLengths:
    """Lognormal lengths, cut at the limit, one sample a prompt, and a ranker of a given quality.

    The default has the shape of StreamRL's Figure 7 (CodeMath prompts answered by DeepSeek-R1, at most 20K): most
    responses are a few thousand tokens, a few reach the limit. The paper prints no numbers; its three data sets are one
    another scaled by two and four (sec. 7), and so are ours. Source: median and sigma are ours, from that figure.

    recall: share of the longest 20% that the ranker puts into its longest 20%; None: it knows the lengths. What it says
    is the posterior after it saw the length with an error: the expected length, and the spread that is left.
    """
    chance = random.Random(f"lengths/{seed}")
    lengths = [
        min(max_tokens, max(1, round(median_tokens * math.exp(chance.gauss(0.0, sigma))))) for _ in range(num_prompts)
    ]
    error = 0.0 if recall is None else error_of_recall(recall, sigma=sigma)
    trust = sigma * sigma / (sigma * sigma + error * error)
    left = error * math.sqrt(trust)
    middle = math.log(median_tokens)

    def expected(length: int) -> float:
        seen = math.log(length) + chance.gauss(0.0, error)
        return math.exp(middle + trust * (seen - middle) + left * left / 2)

    return RecordedLengths(
        lengths=[(length,) for length in lengths],
        questions=[question_tokens] * num_prompts,
        predicted=[expected(length) for length in lengths],
        sigma=left,
    )


@lru_cache
def error_of_recall(recall: float, *, sigma: float = 0.8, tail: float = 0.2) -> float:
    """Spread of the error of log lengths at which a ranker finds this share of the longest ``tail``.

    Found by bisection on one large seeded draw; a ranker of recall 1 makes no error.
    """
    chance = random.Random("error_of_recall")
    logs = [chance.gauss(0.0, sigma) for _ in range(20_000)]
    errors = [chance.gauss(0.0, 1.0) for _ in range(len(logs))]
    low, high = 0.0, 8.0 * sigma
    for _ in range(30):
        middle = (low + high) / 2
        predicted = [log + middle * error for log, error in zip(logs, errors, strict=True)]
        low, high = (middle, high) if tail_recall(logs, predicted, tail) > recall else (low, middle)
    return (low + high) / 2


def tail_recall(lengths: Sequence[float], predicted: Sequence[float], tail: float) -> float:
    """Share of the longest ``tail`` of ``lengths`` among the longest ``tail`` of ``predicted``."""
    count = max(1, round(tail * len(lengths)))
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])[:count]
    ranked = sorted(range(len(predicted)), key=lambda index: -predicted[index])[:count]
    return len(set(longest) & set(ranked)) / count
