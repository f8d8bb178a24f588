"""What a process holds of this machine's memory, and the most of it while something goes on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


def used_bytes() -> int:
    """Anonymous memory of this process and, mapped or not, that of its files without a name."""
    with open("/proc/self/status") as file:
        anonymous = next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them, or closed meanwhile
            if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.stat(f"/proc/self/fd/{fd}")
                found[status.st_ino] = status.st_blocks * 512
    return anonymous + sum(found.values())


class Peak:
    """num_bytes: above what was used at the beginning."""

    def __init__(self) -> None:
        self._before, self.num_bytes = used_bytes(), 0

    def look(self) -> None:
        self.num_bytes = max(self.num_bytes, used_bytes() - self._before)


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    peak, done = Peak(), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak.look()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join()
        peak.look()
