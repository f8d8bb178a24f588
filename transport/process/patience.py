"""An end to Python code that may loop for ever and that nobody of ours wrote, such as a model's chat template.

A thread that is shared by all callers raises ``TooLongError`` in the thread that takes too long. It ends code of Python
alone: a call into a library ends first.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOOK_S = 0.5


class TooLongError(BaseException):
    """Raised in the block of ``ended_after``. No ``except Exception`` of the code in it keeps it away."""


@dataclass(eq=False)
class _Watched:
    until_s: float
    thread_id: int = field(default_factory=threading.get_ident)
    ended: bool = False


class _Watch:
    """One thread while anything is watched, and none else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[_Watched] = set()
        self._looks = False

    def add(self, limit_s: float) -> _Watched:
        watched = _Watched(time.monotonic() + limit_s)
        with self._lock:
            self._watched.add(watched)
            if not self._looks:
                self._looks = True
                threading.Thread(target=self._look, name="watch for code that loops", daemon=True).start()
        return watched

    def remove(self, watched: _Watched) -> None:
        """After this nothing is raised any more."""
        with self._lock:
            self._watched.discard(watched)
            if watched.ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(watched.thread_id), None)

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                if not self._watched:
                    self._looks = False
                    return
                now_s = time.monotonic()
                late = {watched for watched in self._watched if watched.until_s <= now_s}
                self._watched -= late
                for watched in late:
                    watched.ended = True
                    error = ctypes.py_object(TooLongError)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(watched.thread_id), error)


_watch = _Watch()


@contextmanager
def ended_after(limit_s: float) -> Generator[None]:
    """Raises TooLongError in the block once it takes more than ``limit_s`` seconds, and never behind it."""
    watched = _watch.add(limit_s)
    try:
        yield
    finally:
        _watch.remove(watched)
