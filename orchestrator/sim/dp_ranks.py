"""The data-parallel ranks of the simulated trainer: each reads the rounds log and does its part of a round alone.

Owns: when each rank is free. Never: the log. Invariant: ranks wait for one another only where a mini-batch is closed,
as live ones do (``workers/trainer/policy/parallel.py``): a rank with little in one round is ahead in the next.
"""

from __future__ import annotations

from collections.abc import Sequence


class Ranks:
    """free_s: when each is done with what it had. Rank 0 is the one that tells."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def start(self, now_s: float) -> None:
        """All of them begin anew."""
        self._free_s = [now_s] * len(self._free_s)

    def do(self, parts_s: Sequence[float], told_s: float, idle_s: float) -> float:
        """Each does its part of what was told at ``told_s``; one that was idle then takes ``idle_s`` longer.

        Returns when rank 0 is done.
        """
        for rank, seconds in enumerate(parts_s):
            free_s = self._free_s[rank]
            if seconds:
                self._free_s[rank] = seconds + (told_s + idle_s if free_s < told_s else free_s)
        return self._free_s[0]

    def meet(self, now_s: float, seconds: float) -> float:
        """All of them do something together, once the last is there. Returns when it is done."""
        end_s = max(now_s, *self._free_s) + seconds
        self._free_s = [end_s] * len(self._free_s)
        return end_s

    def delay(self, seconds: float) -> None:
        """What they do takes longer than was thought."""
        self._free_s = [free_s + seconds for free_s in self._free_s]
