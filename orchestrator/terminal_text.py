"""Model output is hostile data: what of it may reach a terminal or a drawing."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` without control characters other than newline: model output may carry terminal escapes."""
    return "".join(char for char in text if char == "\n" or (char.isprintable()))
