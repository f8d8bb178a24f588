"""The text model: how long will responses be to a prompt that was not seen before? And its file.

    prompt --> features: TF-IDF of its words, what its surface shows, earlier lengths
           --> two gradient-boosted models --> score, which ranks
           --> calibration on validation prompts --> posterior, which can be believed

One model is of the mean log length (robust, the middle of the distribution), one of the mean length under a gamma
likelihood (the tail, which is what dispatch pays for); their weighted mean is the score. Lambdarank and tail
classifiers rank worse (docs/ranker.md).

A file comes from wherever the user got it. Its size is bounded before it is read, ranges are checked while it is
decoded, and trees before LightGBM sees them, so a damaged or hostile one is a RankerFileError; nothing is unpickled.

Source: ours, in the place of StreamRL sec. 5.2's fine-tuned LLM, which learns from the text alone at a thousand times
the cost.
"""

from __future__ import annotations

import math
import re
import statistics
import string
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import scipy.sparse
from msgspec import Meta
from numpy.typing import NDArray

from ranker.history import MAX_LOG_TOKENS, LengthHistory
from ranker.logs import PromptLengths, log_means, mean_tokens, split
from ranker.protocol import UNKNOWN_SAMPLE_SIGMA, LengthEstimate, RankerFileError
from ranker.quality import TAILS, RankQuality, evaluate, tail_recall
from transport.errors import DECODE_ERRORS
from transport.process.files import replace

if TYPE_CHECKING:
    import lightgbm
    from sklearn.feature_extraction.text import TfidfVectorizer

# --- what a prompt looks like -----------------------------------------------------------------------------------------

MAX_CHARS = 8_000  # of a prompt, half from its beginning and half from its end: documents repeat between them
MAX_TERMS = 2_000
MAX_TERM_CHARS = 40  # a longer "word" is encoded data
MIN_PROMPTS_WITH_TERM = 3
MAX_NUMBERS = 2_000
MAX_NUMBER = 1e9  # larger ones say nothing more than "large"
NUM_NUMBERS = 9
NUM_SURFACE = 12 + NUM_NUMBERS + len(string.punctuation)
BASE_COLUMNS = 4  # mean, longest, and spread of another policy's log lengths, and how many there are


class PromptFeatures:
    """Rows of features for prompts, each of its text alone, with a vocabulary that was fitted once."""

    def __init__(self, terms: Sequence[str], idf: Sequence[float]) -> None:
        """terms: the vocabulary, in the order of its columns.  idf: [len(terms)] inverse document frequencies."""
        self.terms = list(terms)
        self.idf = list(idf)
        self.num_columns = len(self.terms) + NUM_SURFACE + BASE_COLUMNS
        self._vectorizer = _vectorizer(vocabulary={term: column for column, term in enumerate(self.terms)})
        if self.terms:
            self._vectorizer.idf_ = np.asarray(self.idf, dtype=np.float32)

    @classmethod
    def fit(cls, texts: Sequence[str]) -> PromptFeatures:
        """Take the vocabulary from these prompts. [N >= 1]"""
        vectorizer = _vectorizer(max_features=MAX_TERMS, min_df=min(MIN_PROMPTS_WITH_TERM, len(texts)))
        try:
            vectorizer.fit([clipped(text) for text in texts])
        except ValueError:  # no word is in enough prompts: the surface has to do
            return cls((), ())
        columns = vectorizer.vocabulary_
        return cls(sorted(columns, key=columns.__getitem__), [float(value) for value in vectorizer.idf_])

    def rows(self, texts: Sequence[str], base_tokens: Sequence[Sequence[int]]) -> scipy.sparse.csr_matrix:
        """[N, num_columns] float32. base_tokens: [N] lengths of another policy's responses, () where there are none."""
        short = [clipped(text) for text in texts]
        parts = [scipy.sparse.csr_matrix(np.array([surface(text) for text in short], dtype=np.float32))]
        parts.append(scipy.sparse.csr_matrix(np.array([base(tokens) for tokens in base_tokens], dtype=np.float32)))
        if self.terms:
            parts.insert(0, self._vectorizer.transform(short))
        return scipy.sparse.csr_matrix(scipy.sparse.hstack(parts, format="csr", dtype=np.float32))


def _vectorizer(**options: object) -> TfidfVectorizer:
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second, which a run without a model saves

    words = rf"(?u)\b\w{{2,{MAX_TERM_CHARS}}}\b"
    return TfidfVectorizer(sublinear_tf=True, token_pattern=words, dtype=np.float32, **options)  # pyright: ignore[reportArgumentType]


def clipped(text: str) -> str:
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]}\n{text[-half:]}"


def surface(text: str) -> list[float]:
    """[NUM_SURFACE] counts of a prompt that need no vocabulary."""
    lines, words = text.split("\n"), text.split()
    widths = [len(line) for line in lines]
    letters = sum(map(len, words))
    return [
        float(len(text)),
        float(len(words)),
        letters / max(1, len(words)),
        len(set(words)) / max(1, len(words)),
        float(len(lines)),
        float(max(widths)),
        statistics.fmean(widths),
        float(len(text) - letters),
        float(sum(map(str.isupper, text))),
        0.0 if text.isascii() else float(sum(character > "\x7f" for character in text)),
        float(len(zlib.compress(text.encode(errors="replace"), 1))),
        float(len(words[-1]) if words else 0),
        *numbers(text),
        *(float(text.count(mark)) for mark in string.punctuation),
    ]


def numbers(text: str) -> list[float]:
    """How many numbers a prompt names and how large they are: what scales most tasks."""
    written = re.findall(r"\d+", text)[:MAX_NUMBERS]
    if not written:
        return [0.0] * NUM_NUMBERS
    values = [min(float(digits), MAX_NUMBER) if len(digits) < 10 else MAX_NUMBER for digits in written]
    digits = float(sum(map(len, written)))
    return [
        *(float(len(values)), float(len(set(values))), digits, digits / len(values)),
        *(max(values), sum(values), statistics.fmean(values), values[0], values[-1]),
    ]


def base(tokens: Sequence[int]) -> list[float]:
    """[BASE_COLUMNS] another policy's lengths on this prompt; NaN, which trees treat as missing, where unknown."""
    if not tokens:
        return [float("nan")] * BASE_COLUMNS
    logs = np.log(np.maximum(np.asarray(tokens, dtype=np.float64), 1.0))
    spread = float(logs.std()) if len(tokens) > 1 else float("nan")
    return [float(logs.mean()), float(logs.max()), spread, float(len(tokens))]


# --- trees: out of LightGBM as plain arrays, and back after a check ---------------------------------------------------
# LightGBM reads its own text format without checking that a child exists or that a tree has no cycle: a hostile file
# could read foreign memory or never end. So a file holds arrays, which are checked to be trees over the known features,
# and the text that LightGBM gets is always written here. Only numerical splits occur (no categories, no linear leaves).
# The format is LightGBM's model text, version v4 (src/io/gbdt_model_text.cpp, src/io/tree.cpp).

MAX_TREES = 600  # scoring time grows with them
MAX_LEAVES = 4_096
DECISION_TYPES = frozenset({0, 2, 4, 6, 8, 10})
"""Bit 0 would be a categorical split; bit 1 the default direction, bits 2-3 how a missing value is treated."""
NAMES = ("split_feature", "threshold", "decision_type", "left_child", "right_child", "leaf_value")
"""Of the fields of a Tree in LightGBM's text."""


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """One tree of L leaves; its L-1 inner nodes come in any order, the root first."""

    features: list[int]  # [L-1], as are thresholds and decisions
    thresholds: list[float]
    decisions: list[int]
    left: list[int]  # [L-1] children, an inner node >= 0 or leaf ~i; right alike
    right: list[int]
    leaves: list[float]  # [L]


def read_booster(booster: lightgbm.Booster) -> list[Tree]:
    trees: list[Tree] = []
    for block in booster.model_to_string().split("\nTree=")[1:]:
        values = dict(line.split("=", 1) for line in takewhile(lambda line: "=" in line, block.splitlines()[1:]))
        trees.append(msgspec.convert([values.get(name, "").split() for name in NAMES], Tree, strict=False))
    return trees


def check_trees(trees: Sequence[Tree], num_features: int) -> None:
    """Raises RankerFileError unless every tree is one, over these features."""
    if not 1 <= len(trees) <= MAX_TREES:
        raise RankerFileError(f"a stored ranker has {len(trees)} trees, not 1 to {MAX_TREES}")
    for number, tree in enumerate(trees):
        if problem := _problem(tree, num_features):
            raise RankerFileError(f"tree {number} of the stored ranker: {problem}")


def _problem(tree: Tree, num_features: int) -> str | None:
    inner, leaves = len(tree.features), len(tree.leaves)
    if not 1 <= leaves <= MAX_LEAVES or inner != leaves - 1:
        return f"{leaves} leaves and {inner} inner nodes"
    if any(len(part) != inner for part in (tree.thresholds, tree.decisions, tree.left, tree.right)):
        return "its arrays differ in length"
    if not all(0 <= feature < num_features for feature in tree.features):
        return f"it asks for a feature that is not among {num_features}"
    if not DECISION_TYPES.issuperset(tree.decisions):
        return "a kind of split that is not used here"
    if not all(map(math.isfinite, tree.leaves)) or any(map(math.isnan, tree.thresholds)):
        return "a value that is not finite"
    if inner == 0:
        return None  # a single leaf, what LightGBM makes of equal targets
    is_child_once = sorted([*tree.left, *tree.right]) == [*range(-leaves, 0), *range(1, inner)]
    return None if is_child_once and _num_reached(tree) == inner else "its nodes do not form a tree"


def _num_reached(tree: Tree) -> int:
    """Inner nodes reached from the root; ends because no node is the child of two."""
    reached, open_nodes = 0, [0]
    while open_nodes:
        node = open_nodes.pop()
        reached += 1
        open_nodes.extend(child for child in (tree.left[node], tree.right[node]) if child >= 0)
    return reached


def write_booster(trees: Sequence[Tree], num_features: int) -> lightgbm.Booster:
    """A booster that predicts the sum of the trees. Raises RankerFileError as ``check_trees``."""
    check_trees(trees, num_features)
    lines = [
        "tree",
        "version=v4",
        "num_class=1",
        "num_tree_per_iteration=1",
        "label_index=0",
        f"max_feature_idx={num_features - 1}",
        "objective=regression",  # leaves are summed as they are: a link function is the caller's
        "feature_names=" + " ".join(f"f{index}" for index in range(num_features)),
        "feature_infos=" + " ".join(["none"] * num_features),
        "",
    ]
    for number, tree in enumerate(trees):
        lines += [f"Tree={number}", f"num_leaves={len(tree.leaves)}", "num_cat=0"]
        columns = zip(NAMES, msgspec.structs.astuple(tree), strict=True)
        lines += [f"{name}=" + " ".join(map(repr, values)) for name, values in columns if values]
        lines += ["is_linear=0", "shrinkage=1", "", ""]
    import lightgbm  # takes half a second, which a run without a text model saves

    return lightgbm.Booster(model_str="\n".join([*lines, "end of trees", ""]))


def raw_scores(booster: lightgbm.Booster, rows: object) -> NDArray[np.float64]:
    """[N] sum of the leaves, on one thread: the caller decides how many cores scoring may take."""
    return np.asarray(booster.predict(rows, raw_score=True, num_threads=1), dtype=np.float64)  # pyright: ignore[reportArgumentType]


# --- calibration: from a score to mean, spread of the level, spread of the samples ------------------------------------
# Learned from validation prompts, which the trees never saw: on training prompts residuals are too small.

MAX_BINS = 8
PROMPTS_PER_BIN = 40  # a standard deviation from 40 values is good to 11%
POOLED_WEIGHT = 20  # prompts that the spread over all bins counts for in each of them
MIN_REPEATED = 20
MIN_REPEATED_SHARE = 0.1
"""Prompts with several samples, below which the spread of samples is assumed: a few duplicates say nothing."""
SLOPES = (0.5, 1.5)  # a steeper or flatter line means that there was too little to fit it from
MIN_SIGMA, MAX_SIGMA = 0.02, 3.0

_Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
_Bins = Meta(min_length=1, max_length=MAX_BINS)
_Sigmas = Annotated[list[Annotated[float, Meta(ge=0, le=MAX_SIGMA)]], _Bins]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """log mean tokens = intercept + slope * score; spreads are interpolated between centers, in score."""

    intercept: _Finite
    slope: Annotated[float, Meta(gt=0, le=1e12)]  # positive, so that the rank stays
    centers: Annotated[list[_Finite], _Bins]  # [1..MAX_BINS], rising
    level_sigmas: _Sigmas
    sample_sigmas: _Sigmas

    def __post_init__(self) -> None:
        """Raises ValueError, which makes a file that holds it one that cannot be decoded."""
        if not len(self.centers) == len(self.level_sigmas) == len(self.sample_sigmas):
            raise ValueError("a calibration whose columns differ in length")
        if any(before > after for before, after in pairwise(self.centers)):
            raise ValueError("a calibration whose centers do not rise")

    def estimates(self, scores: NDArray[np.float64]) -> list[LengthEstimate]:
        """[N] posteriors of prompts with these scores."""
        means = np.exp(np.clip(self.intercept + self.slope * scores, 0.0, MAX_LOG_TOKENS))
        levels = np.interp(scores, self.centers, self.level_sigmas)
        noises = np.interp(scores, self.centers, self.sample_sigmas)
        return [
            LengthEstimate(mean_tokens=float(mean), level_sigma=float(level), sample_sigma=float(noise))
            for mean, level, noise in zip(means, levels, noises, strict=True)
        ]


def calibrate(scores: NDArray[np.float64], samples: Sequence[PromptLengths]) -> Calibration:
    """Fit to scores of prompts that the scorer was not trained on. [N >= 1]"""
    truth, logs = mean_tokens(samples), log_means(samples)
    log_truth, variance = np.log(truth), float(scores.var())
    covariance = float(((scores - scores.mean()) * (log_truth - log_truth.mean())).mean())
    slope = min(max(covariance / variance, SLOPES[0]), SLOPES[1]) if variance else 1.0
    intercept = float(np.log(truth.sum()) - np.log(np.exp(slope * scores).sum()))
    residuals = logs - (intercept + slope * scores)
    num_bins = max(1, min(MAX_BINS, len(samples) // PROMPTS_PER_BIN))
    bins = np.array_split(np.argsort(scores, kind="stable"), num_bins)
    spread = _shrunk([float(residuals[part].var()) for part in bins], [len(part) for part in bins])
    shares = np.array([np.mean([1 / len(samples[index].tokens) for index in part]) for part in bins])
    noise = _sample_variances(samples, bins)
    if noise is None:  # one sample a prompt: what is level and what is noise cannot be told apart
        noise = np.minimum(UNKNOWN_SAMPLE_SIGMA**2, spread / 2)
    levels, noises = (
        np.clip(np.sqrt(np.maximum(variances, 0.0)), MIN_SIGMA, MAX_SIGMA).tolist()
        for variances in (spread - shares * noise, noise)
    )
    centers = [float(np.median(scores[part])) for part in bins]
    return Calibration(intercept=intercept, slope=slope, centers=centers, level_sigmas=levels, sample_sigmas=noises)


def _sample_variances(samples: Sequence[PromptLengths], bins: Sequence[NDArray[np.intp]]) -> NDArray[np.float64] | None:
    """Variance of log length within prompts, per bin; None where too few prompts have several samples."""
    known = [
        [float(np.var(np.log(samples[index].tokens), ddof=1)) for index in part if len(samples[index].tokens) > 1]
        for part in bins
    ]
    if sum(map(len, known)) < max(MIN_REPEATED, MIN_REPEATED_SHARE * len(samples)):
        return None
    return _shrunk([float(np.mean(values)) if values else 0.0 for values in known], [len(values) for values in known])


def _shrunk(variances: Sequence[float], counts: Sequence[int]) -> NDArray[np.float64]:
    """Pulled towards the variance over all bins."""
    counted, pooled = np.array(counts, dtype=np.float64), np.average(variances, weights=counts)
    return (np.array(variances) * counted + pooled * POOLED_WEIGHT) / (counted + POOLED_WEIGHT)


# --- the model --------------------------------------------------------------------------------------------------------

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
GAMMA_SHARE = 2 / 3  # of the score. The gamma model has the better tail on gym and CASTILLO, the log model on math
NUM_MORE_TREES = 40
UNCALIBRATED = Calibration(intercept=0.0, slope=1.0, centers=[0.0], level_sigmas=[1.0], sample_sigmas=[0.0])
MAX_MIN_LEAF = 10  # prompts in a leaf; fewer for small sets

_Trees = Annotated[list[Tree], Meta(min_length=1, max_length=MAX_TREES)]


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A text model as it is kept in a file."""

    terms: Annotated[list[Annotated[str, Meta(min_length=1, max_length=MAX_TERM_CHARS)]], Meta(max_length=MAX_TERMS)]
    idf: list[Annotated[float, Meta(gt=0, lt=1e6)]]
    log_trees: _Trees
    mean_trees: _Trees
    median_tokens: Annotated[float, Meta(gt=0, lt=1e9)]
    calibration: Calibration
    num_prompts: Annotated[int, Meta(ge=0)]  # trained on
    uses_base: bool  # most of them had another policy's lengths
    recall_20: Annotated[float, Meta(ge=0, le=1)]  # on validation prompts

    def __post_init__(self) -> None:
        if not len(self.idf) == len(self.terms) == len(set(self.terms)):
            raise ValueError("the vocabulary of the stored ranker is damaged")


class TextModel:
    """Posteriors of prompts from their text, and from another policy's lengths where they are known."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises RankerFileError: its trees are none."""
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
            terms=features.terms,
            idf=features.idf,
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
    import lightgbm  # see write_booster

    dataset = lightgbm.Dataset(rows, target, init_score=start, params={"verbosity": -1})
    return read_booster(lightgbm.train(parameters, dataset, num_trees))


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


# --- in a file --------------------------------------------------------------------------------------------------------

FORMAT = "streamrl-ranker"
VERSION = 1
MAX_BYTES = 256 * 1024 * 1024  # a text model takes 1 to 4 MB, a history of 200,000 prompts about 15


class StoredRanker(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds, as MessagePack: a text model, a history, or both.

    refits: how many models the run has trained so far; 0: ``rank train`` wrote it.
    """

    format: str = FORMAT
    version: int = VERSION
    model: StoredModel | None = None
    history: LengthHistory | None = None
    trusted: bool | None = None
    refits: Annotated[int, msgspec.Meta(ge=0)] = 0


def decode_ranker(content: bytes, where: str) -> StoredRanker:
    """Raises RankerFileError: not a ranker, one that cannot have been fitted, or one of another version."""
    try:
        ranker = msgspec.msgpack.decode(content, type=StoredRanker)
    except (*DECODE_ERRORS, UnicodeDecodeError) as error:
        raise RankerFileError(f"{where} is not a stored ranker: {error}") from error
    if ranker.format != FORMAT or ranker.version != VERSION:
        raise RankerFileError(
            f"{where} is a {ranker.format!r} of version {ranker.version}, not {FORMAT!r} {VERSION}: train it again"
        )
    if ranker.model is None and ranker.history is None:
        raise RankerFileError(f"{where} is not a stored ranker: it holds neither a model nor a history")
    return ranker


def read_ranker(path: Path) -> StoredRanker:
    """Raises RankerFileError: missing, too large, or as ``decode_ranker``."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RankerFileError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise RankerFileError(f"{path} has more than {MAX_BYTES >> 20} MiB: it is not a stored ranker")
    return decode_ranker(content, str(path))


def write_ranker(path: Path, ranker: StoredRanker) -> None:
    """Replace the file whole: a reader never sees half of it. Raises RankerFileError."""
    try:
        replace(path, msgspec.msgpack.encode(ranker))
    except OSError as error:
        raise RankerFileError(f"{path} cannot be written: {error.strerror}") from error
