"""A child process that ends with its parent, however the parent ends: the kernel ends it, not the parent's own code.

The signal is SIGKILL, because no other one ends a stopped child: one that was stopped while its supervisor died went on
writing into the resumed run. No clean-up in the child is lost by that: leases run out, unlocked shared memory is swept
by others, and files are whole at every moment.

Owns: the request to the kernel. Invariant: a parent that died before the request was made ends the child, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # here: little is safe to do after a fork


def ending_with_this_process() -> Callable[[], None] | None:
    """``preexec_fn`` of a child that the kernel ends with this process; None where it cannot (not Linux).

    The kernel watches the thread that starts the child: it must be one that lives as long as the process.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
