"""The text model: how long will responses be to a prompt that was not seen before?

Two gradient-boosted models share the features of a prompt: one of the mean log length (robust, the middle of the
distribution) and one of the mean length under a gamma likelihood (the tail, which is what dispatch pays for). A
weighted mean of their scores ranks; a calibration on validation prompts turns it into a posterior. Lambdarank and tail
classifiers rank worse (docs/ranker.md).

Source: ours, in the place of StreamRL sec. 5.2's fine-tuned LLM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from ranker.calibration import Calibration, calibrate
from ranker.errors import RankerFileError
from ranker.features import MAX_TERM_CHARS, MAX_TERMS, PromptFeatures
from ranker.logs import PromptLengths, log_means, mean_tokens, split
from ranker.protocol import LengthEstimate
from ranker.quality import TAILS, RankQuality, evaluate, tail_recall
from ranker.trees import MAX_TREES, Tree, raw_scores, read_booster, write_booster

NUM_TREES = 200
TREES: dict[str, object] = {
    "learning_rate": 0.06,
    "num_leaves": 31,
    "feature_fraction": 0.3,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
    "max_bin": 63,
    "num_threads": 1,
    "force_col_wise": True,
    "deterministic": True,
    "verbosity": -1,
}
"""Tuned on split seeds 100-105; recall moves by less than its noise for 31 to 127 leaves and 120 to 300 trees."""
GAMMA_SHARE = 2 / 3
"""Of the score. The gamma model has the better tail on gym and CASTILLO, the log model on math."""
NUM_MORE_TREES = 40
UNCALIBRATED = Calibration(intercept=0.0, slope=1.0, centers=[0.0], level_sigmas=[1.0], sample_sigmas=[0.0])
MAX_MIN_LEAF = 10
"""Prompts in a leaf; fewer for small sets."""


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A text model as it is kept in a file.

    num_prompts: trained on.  uses_base: most of them had another policy's lengths.  recall_20: on validation prompts.
    """

    terms: list[str]
    idf: list[float]
    log_trees: list[Tree]
    mean_trees: list[Tree]
    median_tokens: float
    calibration: Calibration
    num_prompts: int
    uses_base: bool
    recall_20: float


class TextModel:
    """Posteriors of prompts from their text, and from another policy's lengths where they are known."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises RankerFileError: ``stored`` is not a model that was fitted here."""
        _check(stored)
        self.stored = stored
        self._features = PromptFeatures(stored.terms, stored.idf)
        self._log_booster = write_booster(stored.log_trees, self._features.num_columns)
        self._mean_booster = write_booster(stored.mean_trees, self._features.num_columns)

    @classmethod
    def fit(cls, train: Sequence[PromptLengths], validation: Sequence[PromptLengths], seed: int = 0) -> TextModel:
        """Learn from ``train`` [N >= 2], calibrate on ``validation`` [M >= 1]: other prompts."""
        features = PromptFeatures.fit([sample.text for sample in train])
        rows = _rows(features, train)
        median = float(np.median(mean_tokens(train)))
        fitted = StoredModel(
            terms=list(features.terms),
            idf=list(features.idf),
            log_trees=_boost(rows, log_means(train) - np.log(median), "regression", seed, NUM_TREES),
            mean_trees=_boost(rows, mean_tokens(train) / median, "gamma", seed, NUM_TREES),
            median_tokens=median,
            calibration=UNCALIBRATED,
            num_prompts=len(train),
            uses_base=2 * sum(bool(sample.base_tokens) for sample in train) > len(train),
            recall_20=0.0,
        )
        return cls(fitted)._calibrated(validation)

    def continued(
        self, train: Sequence[PromptLengths], validation: Sequence[PromptLengths], seed: int = 0
    ) -> TextModel:
        """Add trees for what these prompts show beyond what the model knows; calibrate anew.

        For few recent lengths, where fitting from scratch would forget the many that the model was trained on. After
        MAX_TREES only the calibration moves.
        """
        old = self.stored
        log_trees, mean_trees = old.log_trees, old.mean_trees
        if len(log_trees) + NUM_MORE_TREES <= MAX_TREES:
            rows = _rows(self._features, train)
            log_start, mean_start = raw_scores(self._log_booster, rows), raw_scores(self._mean_booster, rows)
            logs, means = log_means(train) - np.log(old.median_tokens), mean_tokens(train) / old.median_tokens
            log_trees = log_trees + _boost(rows, logs, "regression", seed, NUM_MORE_TREES, log_start)
            mean_trees = mean_trees + _boost(rows, means, "gamma", seed, NUM_MORE_TREES, mean_start)
        more = msgspec.structs.replace(old, log_trees=log_trees, mean_trees=mean_trees)
        return TextModel(more)._calibrated(validation)

    def _calibrated(self, validation: Sequence[PromptLengths]) -> TextModel:
        scores = self._scores(_rows(self._features, validation))
        recall = tail_recall(mean_tokens(validation), scores, TAILS[0])
        return TextModel(
            msgspec.structs.replace(self.stored, calibration=calibrate(scores, validation), recall_20=recall)
        )

    def predict(self, texts: Sequence[str], base_tokens: Sequence[Sequence[int]] | None = None) -> list[LengthEstimate]:
        """[N] posteriors. base_tokens: [N] as PromptLengths.base_tokens; they help only a model trained with them."""
        if not texts:
            return []
        rows = self._features.rows(texts, base_tokens if base_tokens is not None else [()] * len(texts))
        return self.stored.calibration.estimates(self._scores(rows))

    def _scores(self, rows: scipy.sparse.csr_matrix) -> NDArray[np.float64]:
        """[N] log length over the median, from both models; the gamma model's raw score is a logarithm."""
        logs, means = raw_scores(self._log_booster, rows), raw_scores(self._mean_booster, rows)
        return (1 - GAMMA_SHARE) * logs + GAMMA_SHARE * means


def _rows(features: PromptFeatures, samples: Sequence[PromptLengths]) -> scipy.sparse.csr_matrix:
    return features.rows([sample.text for sample in samples], [sample.base_tokens for sample in samples])


def _boost(
    rows: scipy.sparse.csr_matrix,
    target: NDArray[np.float64],
    objective: str,
    seed: int,
    num_trees: int,
    start: NDArray[np.float64] | None = None,
) -> list[Tree]:
    """Trees that fit the target on top of ``start``, raw scores; without it their own mean is in the first tree."""
    min_leaf = max(1, min(MAX_MIN_LEAF, len(target) // 20))
    parameters = {**TREES, "objective": objective, "seed": seed, "min_data_in_leaf": min_leaf}
    import lightgbm  # see trees.write_booster

    dataset = lightgbm.Dataset(rows, target, init_score=start, params={"verbosity": -1})
    return list(read_booster(lightgbm.train(parameters, dataset, num_trees)))


def _check(stored: StoredModel) -> None:
    if (
        len(stored.terms) != len(stored.idf)
        or len(stored.terms) > MAX_TERMS
        or len(set(stored.terms)) < len(stored.terms)
    ):
        raise RankerFileError("the vocabulary of the stored ranker is damaged")
    if any(not 0 < len(term) <= MAX_TERM_CHARS for term in stored.terms):
        raise RankerFileError("the vocabulary of the stored ranker has empty or endless terms")
    if not 0 <= stored.recall_20 <= 1 or stored.num_prompts < 0:
        raise RankerFileError("a figure of the stored ranker is out of range")
    if not all(0 < weight < 1e6 for weight in stored.idf) or not 0 < stored.median_tokens < 1e9:
        raise RankerFileError("a weight of the stored ranker is out of range")
    stored.calibration.check()


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
