"""Time as an argument, so that tests and the simulator can bring their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...  # seconds since an arbitrary origin, which never run backwards


class MonotonicClock:
    """The machine's monotonic clock, continued from ``origin_s`` (a resumed run's clock does not restart at 0)."""

    def __init__(self, origin_s: float = 0.0) -> None:
        self._offset_s = origin_s - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s
