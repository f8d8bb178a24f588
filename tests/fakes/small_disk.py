"""Small file systems for tests to fill, which are gone with the process that tests, however it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FULL_DISK_BYTES = 24 * 2**20
"""Of a disk for tests to fill: enough for a server to start on."""


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A file system of its own of FULL_DISK_BYTES at ``directory``. Skips the test where nobody may mount one.

    It is seen by this process and what that starts alone (tests/conftest.py), so it is gone with them, however they
    end.
    """
    directory.mkdir(parents=True)
    options = ["-o", f"size={FULL_DISK_BYTES}"]
    if subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(directory)], capture_output=True).returncode:
        pytest.skip("needs to mount a small tmpfs: root with CAP_SYS_ADMIN")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """The disk is full to the last byte; room comes back at the end."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()
