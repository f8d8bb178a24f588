"""Time as an argument, so that tests and the simulator can bring their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin."""
        ...


class MonotonicClock:
    """The machine's monotonic clock, continued from ``origin_s`` (a resumed run's clock does not restart at 0)."""

    def __init__(self, origin_s: float = 0.0) -> None:
        self._offset_s = origin_s - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s


class ManualClock:
    """A clock that moves only by ``advance``: for tests and the simulator."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
