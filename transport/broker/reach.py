"""Whether the broker answers this process, and one line in its log when it does not, and when it does again.

    exchange ──► sent ──► answered                     it is there
                      ├─► failed      refused, no name  ┐ since when, why: said after SAY_AFTER_S, once an outage
                      └─► late        no answer yet     ┘

An exchange that has no answer yet counts as well: a broker that is stopped, or whose packets are dropped, says nothing
for as long as a reply may take, which is longer than people should be left without a word.

Owns: since when the broker is away, why, and the two lines. Never: retries, or how long a call waits (redis_link.py).
Invariant: the answer to anything that was sent since an outage began ends it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

try:
    import structlog
except ImportError:  # inside an inference server
    structlog = None

SAY_AFTER_S = 2.5
"""Seconds after which an outage is said: a broker that is started again is often back by then. With a heartbeat each
second, every process says it within 4 s (measured: 3.5, `broker_away`)."""
LOOK_S = 0.25
"""Seconds between two looks while an exchange is open."""
MAX_LATE_S = 1.0
"""Seconds. A look that comes later than this says that this process stood still: replies may lie unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """An outage. seconds: since it began.  reason: in words.  until_s: seconds for which this process waits in all."""

    address: str
    seconds: float
    reason: str
    until_s: float

    def __str__(self) -> str:
        bound = f"waiting until {self.until_s:g} s"
        return f"broker {self.address} is away since {self.seconds:.0f} s ({self.reason}), {bound}"


class Reach:
    """Of one link to a broker. Used from one event loop."""

    def __init__(self, address: str, until_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """until_s: how long this process waits for a broker that is away, for what is said of it."""
        self._address = address
        self._until_s = until_s
        self._now_s = now_s
        self._number = itertools.count()
        self._open: dict[int, tuple[float, float]] = {}  # by exchange: when it was sent, when its answer is due
        self._vouched_s = now_s()  # when the newest exchange was sent that was answered: the broker was there then
        self._failing_s: float | None = None
        self._reason = ""
        self._said_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look_due_s = 0.0

    def sent(self, block_s: float = 0.0) -> int:
        """An exchange begins. block_s: for how long the broker may hold its answer back. Returns its number."""
        number, now_s = next(self._number), self._now_s()
        self._open[number] = now_s, now_s + block_s
        self._arm()
        return number

    def answered(self, number: int) -> None:
        """An answer to what was sent before an outage began may be all that still comes, and does not end it."""
        now_s = self._now_s()
        sent_s, _ = self._open.pop(number, (now_s, now_s))
        self._vouched_s = max(self._vouched_s, sent_s)
        if self._failing_s is not None and sent_s >= self._failing_s:
            self._failing_s = None
        if self._said_s is not None and sent_s >= self._said_s:
            seconds, self._said_s = now_s - self._said_s, None
            _say(f"broker {self._address} is back after {seconds:.0f} s", logging.INFO)

    def failed(self, number: int, error: BaseException) -> None:
        """It ended without a usable answer."""
        now_s = self._now_s()
        _, due_s = self._open.pop(number, (now_s, now_s))
        self._reason = reason_of(error)
        if self._failing_s is None:
            self._failing_s = min(due_s, now_s) if isinstance(error, TimeoutError) else now_s
        self._arm()

    def dropped(self, number: int) -> None:
        """Nobody waits for its answer any more, which says nothing of the broker."""
        self._open.pop(number, None)

    def away(self) -> Away | None:
        """None while it answers, or is silent for less than SAY_AFTER_S."""
        since_s = self._since_s()
        seconds = self._now_s() - since_s if since_s is not None else 0.0
        if since_s is None or seconds < SAY_AFTER_S:
            return None
        reason = self._reason if self._failing_s is not None else "no answer"
        return Away(address=self._address, seconds=seconds, reason=reason, until_s=self._until_s)

    def look(self) -> None:
        """Say once that it is away, as soon as it is."""
        away = self.away()
        if away is not None and self._said_s is None:
            self._said_s = self._since_s()
            _say(str(away), logging.WARNING)

    def close(self) -> None:
        self._open.clear()
        self._failing_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _since_s(self) -> float | None:
        """When the outage began; None: nothing is late. An exchange that a later one overtook is slow by itself."""
        late = (due_s for sent_s, due_s in self._open.values() if sent_s >= self._vouched_s)
        since_s = min(self._failing_s if self._failing_s is not None else math.inf, *late, math.inf)
        return since_s if since_s <= self._now_s() else None

    def _arm(self) -> None:
        if self._timer is None:
            self._look_due_s = self._now_s() + LOOK_S
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.on_timer)

    def on_timer(self) -> None:
        self._timer = None
        if self._now_s() - self._look_due_s <= MAX_LATE_S:
            self.look()
        if self._open or self._failing_s is not None:
            self._arm()


def reason_of(error: BaseException) -> str:
    """Why a broker is away, in words: the cause that its user can act on."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case socket.gaierror():
                return "name does not resolve"
            case ConnectionRefusedError():
                return "connection refused"
            case TimeoutError():
                return "no answer"
            case _:
                cause = cause.__cause__ or cause.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _say(text: str, level: int) -> None:
    """Into the log of this process; where it has none, as a warning of Python's logging, which goes to stderr."""
    if structlog is not None and structlog.is_configured():
        structlog.get_logger(__name__).log(level, text)
    else:
        logging.getLogger(__name__).log(level, text)
