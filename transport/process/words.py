"""Words of others: the name that a misspelt one was meant to be, and characters that no name has."""

from __future__ import annotations

import difflib
import unicodedata
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


def control_character(text: str) -> str:
    """The first line break of any kind, NUL, escape or other control character of ``text``; "" for none."""
    if text.isprintable():
        return ""
    return next((char for char in text if unicodedata.category(char) in ("Cc", "Zl", "Zp")), "")
