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

import msgspec

from ranker.errors import RankerFileError
from ranker.protocol import UNKNOWN_SAMPLE_SIGMA, LengthEstimate

MAX_PROMPTS = 200_000
"""About 60 MB; the prompt that was not seen for longest goes first."""
VISIT_KEEP = 0.6
"""With equal groups of G, history never counts for more than 2.5 G samples."""
NOISE_WEIGHT = 1.0
"""Degrees of freedom that the common noise counts for beside a prompt's own: 1 and 2 beat 4 and 10 on CASTILLO."""
NOISE_RATE = 0.02
SCALE_RATE = 0.02
SCALES = (0.25, 16.0)
DRIFT_STEP = 0.005
"""Standard deviation of the bias's own move between two groups: 4% in a batch of 64, 16% in one of 1,024."""
NEW_MODEL_VARIANCE = 1.0
SETTLED_VARIANCE = 0.01
"""Of the bias. Before it is known to 10%, its moves are our learning, not the policy's."""
MAX_SURPRISE = 3.0
"""Standard deviations that a residual counts for at most: one runaway response is not a trend."""
MIN_VARIANCE = 4e-4
MAX_LOG_TOKENS = math.log(1e9)


class PromptRecord(msgspec.Struct, array_like=True):
    """samples: effective number.  level: mean log length less the drift.  squares, freedom: of noise within groups."""

    samples: float
    level: float
    squares: float
    freedom: float


class StoredHistory(msgspec.Struct, frozen=True, kw_only=True):
    """A history as it is kept in a file; prompts in the order of their last visit."""

    bias: float
    bias_variance: float
    drift: float
    noise: float
    prior_scale: float
    groups: int
    prompts: dict[str, PromptRecord]


class LengthHistory:
    """Running lengths of prompts; every method takes microseconds."""

    def __init__(self) -> None:
        self.bias = 0.0
        self.drift = 0.0
        self.num_groups = 0
        self._bias_variance = NEW_MODEL_VARIANCE
        self._noise = UNKNOWN_SAMPLE_SIGMA**2
        self._prior_scale = 1.0
        self._prompts: dict[str, PromptRecord] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._prompts

    def rebase(self) -> None:
        """A new text model speaks from now on: what was learned about the old one's errors is void."""
        self.bias, self._bias_variance, self._prior_scale = 0.0, NEW_MODEL_VARIANCE, 1.0

    def posterior(self, prompt_id: str, prior: LengthEstimate) -> LengthEstimate:
        """Combine what the text model says with its bias and with what the prompt's own samples said."""
        level = prior.log_median + self.bias
        variance = max(prior.level_sigma**2 * self._prior_scale, MIN_VARIANCE)
        record = self._prompts.get(prompt_id)
        if record is None:
            return _lognormal(level, variance, prior.sample_sigma**2, 0.0)
        noise = self._noise_of(record)
        weight = variance / (variance + noise / record.samples)
        level += weight * (record.level + self.drift - level)
        return _lognormal(level, (1 - weight) * variance, noise, record.samples)

    def observe(self, prompt_id: str, tokens: Sequence[int], prior: LengthEstimate) -> None:
        """Learn one group's lengths, each >= 1. prior: what the text model says of the prompt."""
        mean, _ = _moments(tokens)
        self._learn_bias(mean, len(tokens), self.posterior(prompt_id, prior))
        self._learn_scale(mean, len(tokens), prior)
        self.seed(prompt_id, tokens)

    def seed(self, prompt_id: str, tokens: Sequence[int]) -> None:
        """Take lengths, each >= 1, for this prompt alone: they are another policy's and say nothing of the drift."""
        mean, squares = _moments(tokens)
        if len(tokens) > 1:
            rate = max(NOISE_RATE, 1 / (self.num_groups + 2))
            self._noise += rate * (max(squares / (len(tokens) - 1), MIN_VARIANCE) - self._noise)
        self.num_groups += 1
        self._record(prompt_id, mean - self.drift, len(tokens), squares)

    def _learn_bias(self, mean: float, num_samples: int, expected: LengthEstimate) -> None:
        """One step of a scalar Kalman filter; the residual is clipped."""
        error = max(expected.level_sigma**2 + expected.sample_sigma**2 / num_samples, MIN_VARIANCE)
        variance = self._bias_variance + DRIFT_STEP**2
        gain = variance / (variance + error)
        limit = MAX_SURPRISE * math.sqrt(variance + error)
        move = gain * min(max(mean - expected.log_median, -limit), limit)
        self.bias += move
        if self._bias_variance <= SETTLED_VARIANCE and expected.observations > 0:
            self.drift += move
        self._bias_variance = (1 - gain) * variance

    def _learn_scale(self, mean: float, num_samples: int, prior: LengthEstimate) -> None:
        claimed = max(prior.level_sigma**2, MIN_VARIANCE)
        surprise = (mean - prior.log_median - self.bias) ** 2 - self._noise / num_samples
        ratio = min(max(surprise, 0.0) / claimed, SCALES[1])
        self._prior_scale = min(max(self._prior_scale + SCALE_RATE * (ratio - self._prior_scale), SCALES[0]), SCALES[1])

    def _record(self, prompt_id: str, level: float, num_samples: int, squares: float) -> None:
        old = self._prompts.pop(prompt_id, PromptRecord(0.0, 0.0, 0.0, 0.0))
        kept = VISIT_KEEP * old.samples
        total = kept + num_samples
        self._prompts[prompt_id] = PromptRecord(
            samples=total,
            level=(kept * old.level + num_samples * level) / total,
            squares=VISIT_KEEP * old.squares + squares,
            freedom=VISIT_KEEP * old.freedom + num_samples - 1,
        )
        if len(self._prompts) > MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]

    def _noise_of(self, record: PromptRecord) -> float:
        return (record.squares + NOISE_WEIGHT * self._noise) / (record.freedom + NOISE_WEIGHT)

    def stored(self) -> StoredHistory:
        return StoredHistory(
            bias=self.bias,
            bias_variance=self._bias_variance,
            drift=self.drift,
            noise=self._noise,
            prior_scale=self._prior_scale,
            groups=self.num_groups,
            prompts=dict(self._prompts),
        )

    @classmethod
    def restore(cls, stored: StoredHistory) -> LengthHistory:
        """Raises RankerFileError: numbers that no history can have."""
        records = stored.prompts.values()
        plausible = (
            abs(stored.drift) < 20
            and abs(stored.bias) < 20
            and 0 < stored.bias_variance < 100
            and 0 < stored.noise < 100
            and SCALES[0] <= stored.prior_scale <= SCALES[1]
            and stored.groups >= 0
            and len(stored.prompts) <= MAX_PROMPTS
            and all(0 < r.samples < 1e9 and abs(r.level) < 50 for r in records)
            and all(0 <= r.squares < 1e9 and 0 <= r.freedom < 1e9 for r in records)
        )
        if not plausible:
            raise RankerFileError("the history of the stored ranker has impossible numbers")
        history = cls()
        history.bias, history._bias_variance = stored.bias, stored.bias_variance
        history.drift, history.num_groups = stored.drift, stored.groups
        history._noise, history._prior_scale = stored.noise, stored.prior_scale
        history._prompts = dict(stored.prompts)
        return history


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
