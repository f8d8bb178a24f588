"""What the orchestrator asks of a length ranker, and the posterior that it gets. The decision core sees only numbers.

A response length is taken as lognormal: its logarithm is ``level of the prompt + noise of the sample``. The level is
uncertain before the prompt was seen (all samples of a group share that error), the noise is not known by anybody. The
two are kept apart because a group of G samples ends with its longest: noise lengthens it, an unknown level only makes
it uncertain. Standard library only, so that the core, the simulator and workers may read it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

UNKNOWN_LEVEL_SIGMA = 0.8
"""Spread of log length over prompts when nothing is known: reasoning workloads have 0.6 to 1.0."""
UNKNOWN_SAMPLE_SIGMA = 0.3
"""Spread of log length over samples of one prompt: the median over CASTILLO's models is 0.2 to 0.35."""
QUADRATURE_POINTS = 64
"""Of an expected maximum: within 0.3% of 4,096 points for up to 64 samples with sigma 0.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """Posterior of one prompt's response length.

    mean_tokens: expected length of one sample, tokens, > 0; sorting by it ranks the prompts.
    level_sigma: standard deviation of the prompt's level in log tokens, shared by all samples of a group; >= 0.
    sample_sigma: standard deviation of one sample around that level, log tokens; >= 0.
    observations: effective number of this prompt's own samples behind it; 0 = the text alone.
    """

    mean_tokens: float
    level_sigma: float
    sample_sigma: float
    observations: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.mean_tokens < math.inf):
            raise ValueError(f"an expected length is positive and finite, not {self.mean_tokens}")
        if not (0 <= self.level_sigma < math.inf and 0 <= self.sample_sigma < math.inf and self.observations >= 0):
            raise ValueError(f"spreads and observations are not negative: {self}")

    @property
    def log_sigma(self) -> float:
        """Standard deviation of the log length of one sample."""
        return math.hypot(self.level_sigma, self.sample_sigma)

    @property
    def log_median(self) -> float:
        """Logarithm of the median length."""
        return math.log(self.mean_tokens) - self.log_sigma**2 / 2

    def quantile(self, probability: float) -> float:
        """Length that one sample stays below with this probability (0 < probability < 1), tokens."""
        return math.exp(self.log_median + self.log_sigma * NormalDist().inv_cdf(probability))

    def group(self, size: int) -> GroupEstimate:
        """Expected mean and longest of ``size`` samples. Raises ValueError: size < 1."""
        scale = math.exp(self.log_median + self.level_sigma**2 / 2)
        longest = sum(math.exp(self.sample_sigma * z) for z in normal_maxima(size)) / QUADRATURE_POINTS
        return GroupEstimate(mean_tokens=self.mean_tokens, max_tokens=max(self.mean_tokens, scale * longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEstimate:
    """Expected mean and expected longest length of a group's samples, tokens. A cap on responses is the caller's."""

    mean_tokens: float
    max_tokens: float


@functools.lru_cache(maxsize=256)
def normal_maxima(size: int) -> tuple[float, ...]:
    """[QUADRATURE_POINTS] equally likely values of the largest of ``size`` standard normals.

    The largest is below z with probability cdf(z)**size, so its quantile p is inv_cdf(p ** (1 / size)).
    """
    if size < 1:
        raise ValueError(f"a group has at least one sample, not {size}")
    middles = ((point + 0.5) / QUADRATURE_POINTS for point in range(QUADRATURE_POINTS))
    return tuple(NormalDist().inv_cdf(middle ** (1 / size)) for middle in middles)


class LengthPredictor(Protocol):
    """Expected response lengths of prompts, for dispatching the longest first."""

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        """[N] posteriors, one a prompt; may take a second for thousands of prompts, so never on an event loop."""
        ...

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Lengths that one group of the prompt's samples turned out to have, tokens. Microseconds."""
        ...


class ConstantPredictor:
    """Every prompt is expected to be as long as any other: dispatch falls back to the order of admission."""

    def __init__(self, tokens: float) -> None:
        self._estimate = LengthEstimate(
            mean_tokens=tokens, level_sigma=UNKNOWN_LEVEL_SIGMA, sample_sigma=UNKNOWN_SAMPLE_SIGMA
        )

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        return [self._estimate] * len(prompt_ids)

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Nothing to learn."""
