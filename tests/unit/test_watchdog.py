"""No progress is named, then ends the run."""

from __future__ import annotations

import pytest
import structlog

from orchestrator.errors import StalledError
from orchestrator.runtime.watchdog import Watchdog
from transport.clock import ManualClock
from transport.messages import RoundDone, Tick

PROGRESS = RoundDone(round_id="1-0", num_rows=1, num_tokens=1, busy_s=0.1)


def test_time_alone_is_no_progress():
    clock = ManualClock()
    watchdog = Watchdog(10.0, clock)
    clock.advance(9.0)
    watchdog.observe(Tick())
    clock.advance(1.0)
    with pytest.raises(StalledError, match=r"no progress for 10 s: training waits for weights; .*--resume"):
        watchdog.check(lambda: "training waits for weights")


def test_it_warns_once_at_half_the_limit_and_again_after_progress():
    clock = ManualClock()
    watchdog = Watchdog(10.0, clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            clock.advance(6.0)
            watchdog.check(lambda: "scoring")
            watchdog.check(lambda: "scoring")
            watchdog.observe(PROGRESS)
    assert [entry["blocked"] for entry in logs] == ["scoring", "scoring"]
