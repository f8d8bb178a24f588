"""Errors of the ranker, each with what to do in its message.

FatalError (transport.errors)
└── RankerError
    ├── LengthLogError      a log of (prompt, length) pairs cannot be used; names the file and the line
    ├── RankerFileError     a stored ranker is damaged, foreign, too large or of another version
    └── RefitError          training in the background failed or ran past its deadline; the old model stays in use
"""

from __future__ import annotations

from transport.errors import FatalError


class RankerError(FatalError):
    """Root of this tree."""


class LengthLogError(RankerError):
    """A log of prompts and lengths cannot be used."""

    def __init__(self, problem: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.problem = problem
        self.where = where


class RankerFileError(RankerError):
    """A stored ranker cannot be used."""


class RefitError(RankerError):
    """No new model; the old one stays in use."""
