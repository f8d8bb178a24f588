"""What a prompt looks like to the text model: TF-IDF of its words, what its surface shows, and earlier lengths.

Owns: the vocabulary and the order of columns. Never: lengths of the model that is to be predicted. Invariant: the same
text gives the same row, whatever else is in the call, so prompts can be scored in any batches.

Source: ours. Words say which family of task a prompt belongs to, the surface (numbers, lines, brackets, how well it
compresses) how large this one is; the paper's small LLM learns both from the text alone at a thousand times the cost.
"""

from __future__ import annotations

import re
import statistics
import string
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import TfidfVectorizer

MAX_CHARS = 8_000
"""Of a prompt that are looked at, half from its beginning and half from its end: documents repeat between them."""
MAX_TERMS = 2_000
MAX_TERM_CHARS = 40
"""A longer "word" is encoded data."""
MIN_PROMPTS_WITH_TERM = 3
MAX_NUMBERS = 2_000
MAX_NUMBER = 1e9
"""Larger ones say nothing more than "large"."""

NUMBER = re.compile(r"\d+")
PUNCTUATION = string.punctuation
BASE_COLUMNS = 4
"""Mean, longest, and spread of another policy's log lengths, and how many there are."""


class PromptFeatures:
    """Rows of features for prompts, with a vocabulary that was fitted once."""

    def __init__(self, terms: Sequence[str], idf: Sequence[float]) -> None:
        """terms: the vocabulary, in the order of its columns.  idf: [len(terms)] inverse document frequencies."""
        self.terms = tuple(terms)
        self.idf = tuple(idf)
        self._vectorizer = _vectorizer(vocabulary={term: column for column, term in enumerate(self.terms)})
        if self.terms:
            self._vectorizer.idf_ = np.asarray(self.idf, dtype=np.float32)

    @classmethod
    def fit(cls, texts: Sequence[str]) -> PromptFeatures:
        """Take the vocabulary from these prompts. [N >= 1]"""
        min_prompts = min(MIN_PROMPTS_WITH_TERM, len(texts))
        vectorizer = _vectorizer(max_features=MAX_TERMS, min_df=min_prompts)
        try:
            vectorizer.fit([clipped(text) for text in texts])
        except ValueError:  # no word is in enough prompts: the surface has to do
            return cls((), ())
        columns = vectorizer.vocabulary_
        return cls(sorted(columns, key=columns.__getitem__), [float(value) for value in vectorizer.idf_])

    @property
    def num_columns(self) -> int:
        return len(self.terms) + NUM_SURFACE + BASE_COLUMNS

    def rows(self, texts: Sequence[str], base_tokens: Sequence[Sequence[int]]) -> scipy.sparse.csr_matrix:
        """[N, num_columns] float32. base_tokens: [N] lengths of another policy's responses, () where there are none."""
        short = [clipped(text) for text in texts]
        parts = [scipy.sparse.csr_matrix(np.array([surface(text) for text in short], dtype=np.float32))]
        parts.append(scipy.sparse.csr_matrix(np.array([base(tokens) for tokens in base_tokens], dtype=np.float32)))
        if self.terms:
            parts.insert(0, self._vectorizer.transform(short))
        return scipy.sparse.csr_matrix(scipy.sparse.hstack(parts, format="csr", dtype=np.float32))


def _vectorizer(**options: object) -> TfidfVectorizer:
    from sklearn.feature_extraction.text import TfidfVectorizer  # takes a second to import, see trees.write_booster

    words = rf"(?u)\b\w{{2,{MAX_TERM_CHARS}}}\b"
    return TfidfVectorizer(sublinear_tf=True, token_pattern=words, dtype=np.float32, **options)  # pyright: ignore[reportArgumentType]


def clipped(text: str) -> str:
    """The beginning and the end of a long prompt."""
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
        *(float(text.count(mark)) for mark in PUNCTUATION),
    ]


def numbers(text: str) -> list[float]:
    """How many numbers a prompt names and how large they are: what scales most tasks."""
    written = NUMBER.findall(text)[:MAX_NUMBERS]
    if not written:
        return [0.0] * NUM_NUMBERS
    values = [min(float(digits), MAX_NUMBER) if len(digits) < 10 else MAX_NUMBER for digits in written]
    digits = float(sum(map(len, written)))
    return [
        *(float(len(values)), float(len(set(values))), digits, digits / len(values)),
        *(max(values), sum(values), statistics.fmean(values), values[0], values[-1]),
    ]


NUM_NUMBERS = 9
NUM_SURFACE = 12 + NUM_NUMBERS + len(PUNCTUATION)


def base(tokens: Sequence[int]) -> list[float]:
    """[BASE_COLUMNS] another policy's lengths on this prompt; NaN, which trees treat as missing, where unknown."""
    if not tokens:
        return [float("nan")] * BASE_COLUMNS
    logs = np.log(np.maximum(np.asarray(tokens, dtype=np.float64), 1.0))
    spread = float(logs.std()) if len(tokens) > 1 else float("nan")
    return [float(logs.mean()), float(logs.max()), spread, float(len(tokens))]
