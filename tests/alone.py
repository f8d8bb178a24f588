"""A program by itself: ``python tests/alone.py PROGRAM WORD...`` runs it and leaves nothing behind, however it ends.

The program has processes, shared memory, mounts and temporary files of its own: two test sessions of one machine do not
meet, and when one of them is killed (it, its group, ``make`` above it, or its terminal) the kernel ends what it started
and its directory is removed. The directory of a session that failed is kept, and named. The exit code is the program's.

Where nobody may make namespaces (another user than root, another kernel than Linux) the program runs as it is.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_REC, MS_SLAVE = 0x4000, 0x80000
PR_SET_PDEATHSIG = 1
MOUNTS = (("proc", "/proc"), ("tmpfs", "/dev/shm"))


def main(command: Sequence[str]) -> int:
    if not unshare(CLONE_NEWPID | CLONE_NEWNS):
        os.execvp(command[0], command)
    directory = Path(tempfile.mkdtemp(prefix="streamrl-tests-"))
    first = os.fork()
    if first == 0:
        os._exit(_be_first(command, directory))
    _when_told_to_end(lambda: os.kill(first, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the program too
    return _exit_code(os.waitpid(first, 0)[1])


def unshare(namespaces: int) -> bool:
    """Enter ``namespaces`` of this process's own, that of mounts among them: what is mounted later no other sees.

    Processes and threads that it has already stay where they are. Returns: False where it may not.
    """
    if sys.platform != "linux" or _libc().unshare(namespaces) != 0:
        return False
    _libc().mount(b"none", b"/", None, MS_REC | MS_SLAVE, None)  # fails where / is no mount: then others see ours
    return True


def _be_first(command: Sequence[str], directory: Path) -> int:
    """Start the program, and take in whoever loses its parent, until the program ends; then end all of them.

    Returns: the program's exit code.
    """
    _when_told_to_end(_end_all)
    for kind, place in MOUNTS:
        if _libc().mount(b"tests", place.encode(), kind.encode(), 0, None) != 0:
            print(f"tests/alone.py: cannot mount {place}: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
            return 1
    program = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(directory)})
    os.setpgid(0, 0)  # who kills the program's group does not kill this process, which clears up
    while (ended := os.wait())[0] != program.pid:
        pass
    code = _exit_code(ended[1])
    _end_all()
    if 0 < code < 128 and any(directory.iterdir()):
        print(f"temporary files of the tests that failed: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _end_all() -> None:
    """Kill every process but this one, the first of its namespace."""
    with suppress(ProcessLookupError):  # nobody is left
        os.kill(-1, signal.SIGKILL)


def _when_told_to_end(act: Callable[[], None]) -> None:
    """Act when a signal asks for the end, and when this process's parent has ended, however it did."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: act())
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _exit_code(status: int) -> int:
    """As a shell gives it: 128 and the number of the signal for a program that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
