"""Ranks that publish together, as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 30.0


@dataclass
class ThreadRank:
    """One of them (workers.weights.parts.TalkingRanks)."""

    rank: int
    said: list[bytes]
    barrier: threading.Barrier

    def gather(self, data: bytes) -> list[bytes]:
        self.said[self.rank] = data
        self.barrier.wait(WAIT_S)
        answers = list(self.said)
        self.barrier.wait(WAIT_S)
        return answers


def on_ranks(count: int, work: Callable[[ThreadRank], T]) -> Sequence[T | Exception]:
    """What each of ``count`` ranks returns, or raises."""
    said, barrier = [b""] * count, threading.Barrier(count)

    def run(rank: int) -> T | Exception:
        try:
            return work(ThreadRank(rank, said, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
