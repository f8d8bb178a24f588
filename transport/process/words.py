"""The name that a misspelt one most likely was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection

CUTOFF = 0.6
"""Least similarity of two names, from 0 to 1."""


def closest(word: str, known: Collection[str], *, cutoff: float = CUTOFF) -> str:
    """The most similar of ``known``, whatever its case; "" where none is close."""
    folded = {name.lower(): name for name in reversed([*known])}
    found = difflib.get_close_matches(word.lower(), [*folded], n=1, cutoff=cutoff)
    return folded[found[0]] if found else ""


def did_you_mean(name: str) -> str:
    """`` (did you mean NAME?)``; "" for no name."""
    return f" (did you mean {name}?)" if name else ""
