"""Train a text model on a log and say how good it is: on prompts that neither training nor calibration has seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ranker.evaluate import RankQuality, evaluate
from ranker.lengths import PromptLengths, split
from ranker.model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """quality: on the test prompts.  seconds: CPU seconds of one thread for 1,000 prompts, to train and to score."""

    model: TextModel
    quality: RankQuality
    train_cpu_s_per_1000: float
    score_cpu_s_per_1000: float


def train(samples: Sequence[PromptLengths], seed: int = 0) -> Trained:
    """Split 7:2:1 by prompt, fit, calibrate, test. Training cost counts the prompts that it is fitted to."""
    parts = split(samples, seed)
    began_s = time.process_time()
    model = TextModel.fit(parts.train, parts.validation, seed)
    trained_s = time.process_time()
    estimates = model.predict([s.text for s in parts.test], [s.base_tokens for s in parts.test])
    scored_s = time.process_time()
    return Trained(
        model=model,
        quality=evaluate(estimates, parts.test),
        train_cpu_s_per_1000=1000 * (trained_s - began_s) / len(parts.train),
        score_cpu_s_per_1000=1000 * (scored_s - trained_s) / len(parts.test),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean over splits, and the standard deviation between them."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.deviation:.3f}"


def spread(results: Sequence[RankQuality], figure: Callable[[RankQuality], float]) -> Spread:
    """One figure over several splits. [N >= 1]"""
    values = [figure(result) for result in results]
    return Spread(statistics.fmean(values), statistics.pstdev(values))
