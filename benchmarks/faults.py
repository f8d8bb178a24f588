"""Faults that a run gets from outside, as its user's machine may give them: who is hit, and how.

Owns: the roles of a run's processes and the signals. Never: when a fault comes, or what must follow from it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from enum import StrEnum

import psutil

ROLES = {
    "broker": ("valkey-server",),
    "orchestrator": ("orchestrator", "serve"),
    "generate": ("workers", "generate"),
    "score": ("workers", "score"),
    "train": ("workers", "train"),
}
"""Role -> words of its command line. The supervisor is whom the caller started."""


class How(StrEnum):
    """Kill: a crash.  stop: a pause of some seconds, as of a machine that swaps.  term: asked to end."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"


SIGNALS = {How.KILL: signal.SIGKILL, How.STOP: signal.SIGSTOP, How.TERM: signal.SIGTERM}


def of_role(processes: Iterable[psutil.Process], role: str) -> list[psutil.Process]:
    """Those of ``processes`` that are of ``role``; none while it is just being started again."""
    return [process for process in processes if words_of(process).issuperset(ROLES[role])]


def words_of(process: psutil.Process) -> set[str]:
    """The words of its command line, programs without their directory; none of a process that is gone."""
    with contextlib.suppress(psutil.Error):
        return {word.rpartition("/")[2] for part in process.cmdline() for word in part.split()}
    return set()


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal a process. Returns whether it was still there; never another one that got its number."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
