"""How long responses are in simulation, drawn or recorded, and what a ranker predicts of them; a user's own lengths.

Invariants: a sample has the same length whichever worker generates it, when, and how often; no length of a user is
repaired.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Protocol

from orchestrator.errors import DataError
from ranker.protocol import RankerError
from transport.contracts.messages import PromptRef
from transport.contracts.types import PromptId, RowId, parse_row_id
from transport.contracts.user_files import Say, read_groups, warn
from transport.errors import LengthFileError


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
    group_size: int = 1,
    shared: float = 1.0,
) -> RecordedLengths:
    """Lognormal lengths, cut at the limit, and a ranker of a given quality.

    The default has the shape of StreamRL's Figure 7 (CodeMath prompts answered by DeepSeek-R1, at most 20K): most
    responses are a few thousand tokens, a few reach the limit. The paper prints no numbers; its three data sets are one
    another scaled by two and four (sec. 7), and so are ours. Source: median and sigma are ours, from that figure.

    group_size: samples of a prompt.  shared: of the variance of log lengths, what is the prompt's; the rest is each
    sample's own.  recall: share of the longest 20% that the ranker puts into its longest 20%; None: it knows the mean
    of each prompt. What it says is the posterior after it saw that mean with an error: the expected length, and the
    spread that is left.
    """
    chance = random.Random(f"lengths/{seed}")
    of_prompts, of_samples = sigma * math.sqrt(shared), sigma * math.sqrt(1.0 - shared)

    def group() -> Group:
        middle = chance.gauss(0.0, of_prompts)
        own = [chance.gauss(0.0, of_samples) if of_samples else 0.0 for _ in range(group_size)]
        return tuple(min(max_tokens, max(1, round(median_tokens * math.exp(middle + one)))) for one in own)

    lengths = [group() for _ in range(num_prompts)]
    error = 0.0 if recall is None else error_of_recall(recall, sigma=of_prompts)
    means = [fmean(group) for group in lengths]
    predicted, left = _posterior(means, math.log(median_tokens), of_prompts, error, chance)
    return RecordedLengths(
        lengths=lengths,
        questions=[question_tokens] * num_prompts,
        predicted=predicted,
        sigma=math.hypot(left, of_samples),
    )


def _posterior(
    lengths: Sequence[float], middle: float, sigma: float, error: float, chance: random.Random
) -> tuple[list[float], float]:
    """(expected lengths, spread of log lengths that is left) after each log length was seen with an ``error``.

    middle, sigma: mean and spread of the log lengths before.
    """
    trust = sigma * sigma / (sigma * sigma + error * error) if sigma else 0.0
    left = error * math.sqrt(trust)
    seen = [math.log(length) + chance.gauss(0.0, error) for length in lengths]
    return [math.exp(middle + trust * (one - middle) + left * left / 2) for one in seen], left


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


# -- a user's lengths


Group = tuple[int, ...]
"""Response lengths of one prompt's samples, tokens."""
UNIT_SIGMA = 0.8
"""Spread for which the error of a recall is looked up; it is proportional to the spread."""


def read_lengths(path: Path, group_size: int = 1, say: Say = warn) -> list[Group]:
    """Groups of lengths: a number a line, ``group_size`` lines a prompt; or JSON lines with ``output_tokens``.

    JSON lines are those of ``streamrl-orchestrator rank``: a prompt with one length or all of its samples'. Empty lines
    and what follows a ``#`` do not count; what is no length is skipped, and ``say`` hears of it.
    Raises: DataError: unreadable, empty, or too much in it is no length; names file and line.
    """
    logged = path.suffix == ".gz"
    with suppress(OSError):  # who reads it says why
        logged = logged or path.read_bytes()[:4096].lstrip().startswith(b"{")
    try:
        if logged:
            from ranker.logs import read_log  # here: numpy

            return [sample.tokens for sample in read_log(path, say=say)]
        return read_groups(path, group_size, say)
    except (LengthFileError, RankerError) as error:
        raise DataError(str(error)) from error


def representative(
    groups: Sequence[Group],
    *,
    batch: int,
    group_size: int,
    batches: int,
    prompt_tokens: int,
    recall: float | None,
    seed: int = 0,
) -> RecordedLengths:
    """``batches`` batches of ``batch`` prompts with ``group_size`` samples each, and what a ranker says of them.

    Every batch holds the same lengths, evenly spaced quantiles of ``groups``, in an order of its own, so that a few
    iterations say what many would. A group that was read with other than ``group_size`` samples gives them in a circle.
    recall: see ``long_tailed``; None: it knows each mean.
    """
    sized = [tuple(group[sample % len(group)] for sample in range(group_size)) for group in groups]
    ordered = sorted(sized, key=fmean)
    chosen = [ordered[int((place + 0.5) / batch * len(ordered))] for place in range(batch)]
    chance = random.Random(f"representative/{seed}")
    lengths = [group for _ in range(batches) for group in chance.sample(chosen, batch)]
    logs = [math.log(fmean(group)) for group in chosen]
    middle, sigma = fmean(logs), pstdev(logs)
    error = 0.0 if recall is None else error_of_recall(recall) * sigma / UNIT_SIGMA
    predicted, left = _posterior([fmean(group) for group in lengths], middle, sigma, error, chance)
    return RecordedLengths(
        lengths=lengths,
        questions=[prompt_tokens] * len(lengths),
        predicted=predicted,
        sigma=math.hypot(left, within(chosen)),
    )


def within(groups: Sequence[Group]) -> float:
    """Spread of log lengths among the samples of a prompt, root mean square over prompts."""
    spreads = [pstdev([math.log(tokens) for tokens in group]) for group in groups if len(group) > 1]
    return math.sqrt(fmean(spread * spread for spread in spreads)) if spreads else 0.0
