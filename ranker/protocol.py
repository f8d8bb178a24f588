"""What the orchestrator asks of a length ranker, the posterior that it gets, and the errors of all of it.

A response length is taken as lognormal: its logarithm is ``level of the prompt + noise of the sample``. The level is
uncertain before the prompt was seen (all samples of a group share that error), the noise is not known by anybody. The
two are kept apart because a group of G samples ends with its longest: noise lengthens it, an unknown level only makes
it uncertain. It imports little, so that the orchestrator loads it quickly.

FatalError (transport.errors)
└── RankerError
    ├── LengthLogError      a log of (prompt, length) pairs cannot be used; names the file and the line
    ├── RankerFileError     a stored ranker is damaged, foreign, too large or of another version
    └── RefitError          training in the background failed or ran past its deadline; the old model stays in use
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from transport.errors import FatalError


class RankerError(FatalError):
    """Root of this tree."""


class LengthLogError(RankerError):
    def __init__(self, problem: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.problem = problem
        self.where = where


class RankerFileError(RankerError):
    """A stored ranker cannot be used."""


class RefitError(RankerError):
    """No new model; the old one stays in use."""


# --- lengths ----------------------------------------------------------------------------------------------------------

UNKNOWN_LEVEL_SIGMA = 0.8  # of log length over prompts when nothing is known: reasoning workloads have 0.6 to 1.0
UNKNOWN_SAMPLE_SIGMA = 0.3  # of log length over samples of one prompt: CASTILLO's models have a median of 0.2 to 0.35
QUADRATURE_POINTS = 64  # of an expected maximum: within 0.3% of 4,096 points for up to 64 samples with sigma 0.5


def checked(tokens: Sequence[int]) -> tuple[int, ...]:
    """Raises ValueError unless every length is a whole number >= 0; an empty response counts as one token."""
    lengths = tuple(int(length) for length in tokens)
    if any(length < 0 or length != given for length, given in zip(lengths, tokens, strict=True)):
        raise ValueError(f"response lengths are whole numbers of tokens, not {list(tokens)}")
    return tuple(max(1, length) for length in lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEstimate:
    """Posterior of one prompt's response length."""

    mean_tokens: float  # expected length of one sample, tokens, > 0; sorting by it ranks the prompts
    level_sigma: float  # standard deviation of the prompt's level in log tokens, shared by all samples of a group; >= 0
    sample_sigma: float  # standard deviation of one sample around that level, log tokens; >= 0
    observations: float = 0.0  # effective number of this prompt's own samples behind it; 0 = the text alone

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
    """[QUADRATURE_POINTS] equally likely values of the largest of ``size`` standard normals."""
    if size < 1:
        raise ValueError(f"a group has at least one sample, not {size}")
    middles = ((point + 0.5) / QUADRATURE_POINTS for point in range(QUADRATURE_POINTS))
    return tuple(NormalDist().inv_cdf(middle ** (1 / size)) for middle in middles)  # P(largest < z) = cdf(z)**size


class LengthPredictor(Protocol):
    """Expected response lengths of prompts, for dispatching the longest first."""

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[LengthEstimate]:
        """[N] posteriors, one a prompt; may take a second for thousands of prompts, so never on an event loop."""
        ...

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Lengths that one group of the prompt's samples turned out to have, tokens. Microseconds."""


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
