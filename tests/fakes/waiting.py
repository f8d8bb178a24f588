"""Waiting for what other threads and processes do, for as long as a machine at load 8 may take and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from transport.tensors.base import Deadline

T = TypeVar("T")

LIMIT_S = 60.0


def until(look: Callable[[], T | None]) -> T:
    """What ``look`` gives once it gives something."""
    deadline = Deadline(LIMIT_S)
    while not (found := look()):
        assert deadline.remaining_s(), "in vain"
        time.sleep(0.02)
    return found
