"""What other programs take of this machine while something is measured on it.

Owns: that share. Never: what is measured. Linux only; elsewhere nothing is known, and nothing is said.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

LIMIT = 0.1
"""Of the machine; beyond it a measurement is theirs, too."""
STAT = Path("/proc/stat")


class OtherPrograms:
    """From its making on. Our processes count once they have ended and were waited for."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._busy_s = machine_busy_s()
        self._own_s = own_s()

    def share(self) -> float:
        """Of the CPU time that the machine had, 0 to 1; 0 where it cannot be told."""
        others_s = machine_busy_s() - self._busy_s - (own_s() - self._own_s)
        had_s = (time.monotonic() - self._started_s) * (os.cpu_count() or 1)
        return max(0.0, others_s / had_s)


def machine_busy_s() -> float:
    """CPU seconds that anything has used on this machine; 0 where it cannot be told."""
    if not STAT.is_file():
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """CPU seconds of this process, of its children that have ended, and of theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
