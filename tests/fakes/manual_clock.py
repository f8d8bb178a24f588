"""A clock of which a test says how late it is."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only by ``advance``."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
