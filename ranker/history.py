"""What prompts turned out to be: running lengths of those seen, shrunk towards what their text says.

RL comes back to a prompt every epoch and samples it G times, and then its own lengths beat any text (recall at 10%:
0.85 against 0.55 on CASTILLO). But a few samples are noisy, and the policy changes:

- A prompt's level is a normal posterior: the text is the prior, its samples are observations with their own noise.
- Every visit multiplies what earlier visits count for by ``VISIT_KEEP``, so old lengths fade as the policy moves on.
- ``bias`` is how far log lengths are from what the texts say, a Kalman filter over groups: a prompt that was seen
  before says more about it than a new one. Once it has settled, what moves it on prompts seen before is the policy:
  ``drift`` adds that up. Levels are kept relative to the drift, so that a prompt of an epoch ago moves with the others.
- ``prior_scale`` is how much worse than it claims the text turned out to be; a useless text is soon not listened to.

Owns: these sums, bounded by MAX_PROMPTS. Never: texts. Source: ours (StreamRL sec. 5.2 retrains its LLM instead).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ranker.protocol import UNKNOWN_SAMPLE_SIGMA, LengthEstimate

MAX_PROMPTS = 200_000  # about 60 MB; the prompt that was not seen for longest goes first
VISIT_KEEP = 0.6  # with equal groups of G, history never counts for more than 2.5 G samples
NOISE_WEIGHT = 1.0  # degrees of freedom of the common noise beside a prompt's own: 1 and 2 beat 4 and 10 on CASTILLO
NOISE_RATE = 0.02
SCALE_RATE = 0.02
SCALES = (0.25, 16.0)
DRIFT_STEP = 0.005  # standard deviation of the bias's move between two groups: 4% in a batch of 64, 16% of 1,024
NEW_MODEL_VARIANCE = 1.0
SETTLED_VARIANCE = 0.01  # of the bias. Before it is known to 10%, its moves are our learning, not the policy's
MAX_SURPRISE = 3.0  # standard deviations that a residual counts for at most: one runaway response is not a trend
MIN_VARIANCE = 4e-4
MAX_LOG_TOKENS = math.log(1e9)

_Sum = Annotated[float, Meta(ge=0, lt=1e9)]
_Level = Annotated[float, Meta(gt=-20, lt=20)]
_Variance = Annotated[float, Meta(gt=0, lt=100)]


class PromptRecord(msgspec.Struct, frozen=True, array_like=True):
    """samples: effective number.  level: mean log length less the drift.  squares, freedom: of noise within groups."""

    samples: Annotated[float, Meta(gt=0, lt=1e9)]
    level: Annotated[float, Meta(gt=-50, lt=50)]
    squares: _Sum
    freedom: _Sum


class LengthHistory(msgspec.Struct, kw_only=True):
    """Running lengths of prompts, as they are kept in a file, too; every method takes microseconds."""

    bias: _Level = 0.0
    bias_variance: _Variance = NEW_MODEL_VARIANCE
    drift: _Level = 0.0
    noise: _Variance = UNKNOWN_SAMPLE_SIGMA**2
    prior_scale: Annotated[float, Meta(ge=SCALES[0], le=SCALES[1])] = 1.0
    groups: Annotated[int, Meta(ge=0)] = 0  # that were observed
    prompts: Annotated[dict[str, PromptRecord], Meta(max_length=MAX_PROMPTS)] = {}  # in the order of their last visit

    def rebase(self) -> None:
        """A new text model speaks from now on: what was learned about the old one's errors is void."""
        self.bias, self.bias_variance, self.prior_scale = 0.0, NEW_MODEL_VARIANCE, 1.0

    def posterior(self, prompt_id: str, prior: LengthEstimate) -> LengthEstimate:
        """Combine what the text model says with its bias and with what the prompt's own samples said."""
        level = prior.log_median + self.bias
        variance = max(prior.level_sigma**2 * self.prior_scale, MIN_VARIANCE)
        record = self.prompts.get(prompt_id)
        if record is None:
            return _lognormal(level, variance, prior.sample_sigma**2, 0.0)
        noise = (record.squares + NOISE_WEIGHT * self.noise) / (record.freedom + NOISE_WEIGHT)
        weight = variance / (variance + noise / record.samples)
        level += weight * (record.level + self.drift - level)
        return _lognormal(level, (1 - weight) * variance, noise, record.samples)

    def observe(self, prompt_id: str, tokens: Sequence[int], prior: LengthEstimate) -> None:
        """Learn one group's lengths, each >= 1. prior: what the text model says of the prompt."""
        mean, _ = _moments(tokens)
        # One step of a scalar Kalman filter; the residual is clipped.
        expected = self.posterior(prompt_id, prior)
        error = max(expected.level_sigma**2 + expected.sample_sigma**2 / len(tokens), MIN_VARIANCE)
        variance = self.bias_variance + DRIFT_STEP**2
        gain = variance / (variance + error)
        limit = MAX_SURPRISE * math.sqrt(variance + error)
        move = gain * min(max(mean - expected.log_median, -limit), limit)
        self.bias += move
        if self.bias_variance <= SETTLED_VARIANCE and expected.observations > 0:
            self.drift += move
        self.bias_variance = (1 - gain) * variance
        claimed = max(prior.level_sigma**2, MIN_VARIANCE)
        surprise = (mean - prior.log_median - self.bias) ** 2 - self.noise / len(tokens)
        ratio = min(max(surprise, 0.0) / claimed, SCALES[1])
        self.prior_scale = min(max(self.prior_scale + SCALE_RATE * (ratio - self.prior_scale), SCALES[0]), SCALES[1])
        self.seed(prompt_id, tokens)

    def seed(self, prompt_id: str, tokens: Sequence[int]) -> None:
        """Take lengths, each >= 1, for this prompt alone: they are another policy's and say nothing of the drift."""
        mean, squares = _moments(tokens)
        if len(tokens) > 1:
            rate = max(NOISE_RATE, 1 / (self.groups + 2))
            self.noise += rate * (max(squares / (len(tokens) - 1), MIN_VARIANCE) - self.noise)
        self.groups += 1
        old = self.prompts.pop(prompt_id, PromptRecord(0.0, 0.0, 0.0, 0.0))
        kept = VISIT_KEEP * old.samples
        total = kept + len(tokens)
        self.prompts[prompt_id] = PromptRecord(
            samples=total,
            level=(kept * old.level + len(tokens) * (mean - self.drift)) / total,
            squares=VISIT_KEEP * old.squares + squares,
            freedom=VISIT_KEEP * old.freedom + len(tokens) - 1,
        )
        if len(self.prompts) > MAX_PROMPTS:
            del self.prompts[next(iter(self.prompts))]


def _moments(tokens: Sequence[int]) -> tuple[float, float]:
    """Mean of the log lengths, and the sum of their squared distances from it."""
    logs = [math.log(length) for length in tokens]
    mean = math.fsum(logs) / len(logs)
    return mean, math.fsum((value - mean) ** 2 for value in logs)


def _lognormal(level: float, level_variance: float, noise: float, samples: float) -> LengthEstimate:
    log_mean = min(max(level + (level_variance + noise) / 2, 0.0), MAX_LOG_TOKENS)
    return LengthEstimate(
        mean_tokens=math.exp(log_mean),
        level_sigma=math.sqrt(level_variance),
        sample_sigma=math.sqrt(noise),
        observations=samples,
    )
