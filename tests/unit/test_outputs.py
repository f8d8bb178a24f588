"""Files that a user asked for and that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli import profile
from orchestrator.config.run_directory import journal_of
from orchestrator.errors import ConfigError, check_out, writing_out
from transport.contracts.settings import Settings


def test_a_file_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path):
    path = tmp_path / "none" / "report.html"
    with pytest.raises(ConfigError, match=r"--out: .*report\.html cannot be written: No such"), writing_out(path):
        path.write_text("x")
    with writing_out(tmp_path):
        check_out(tmp_path / "new.json")


def test_what_takes_minutes_says_so_before_it_begins(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot be written: .*none is no directory"):
        profile.main(Settings(), tmp_path / "none" / "profile")


def test_a_directory_without_a_run_is_called_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no run"):
        journal_of(tmp_path)
