"""A directory that cannot be written says why, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator.runtime.rundir import RunDir
from transport.errors import DirectoryError
from transport.files import writing


def test_a_full_disk_asks_for_space(tmp_path: Path):
    with pytest.raises(DirectoryError, match="No space left on device; free some space"), writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "log"))


def test_a_run_directory_below_a_file_is_named(tmp_path: Path):
    (tmp_path / "runs").touch()
    with pytest.raises(DirectoryError, match=f"Not a directory; let user {os.getuid()} write there"):
        RunDir(tmp_path / "runs" / "mine").claim("", resume=False)
