"""How a program of ours starts another: the beginning of its command line, and its end with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # here: little is safe to do after a fork


def python_module(module: str, *arguments: str) -> list[str]:
    """The command line of ``module`` in this interpreter.

    -P: nothing is imported from the working directory, where others may be able to write and a file that is called like
    a library would come before it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def ending_with_this_process() -> Callable[[], None] | None:
    """``preexec_fn`` of a child that the kernel ends with this process, however it ends; None where it cannot.

    The signal is SIGKILL, because no other one ends a stopped child: one that was stopped while its supervisor died
    went on writing into the resumed run. No clean-up in the child is lost by that: leases run out, unlocked shared
    memory is swept by others, and files are whole at every moment. The kernel watches the thread that starts the child:
    it must be one that lives as long as the process. A parent that died before the request was made ends the child.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
