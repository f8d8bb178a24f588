"""One supervisor a directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.runtime.rundir import RunDir, newest_name, next_free_name
from transport.errors import RunExistsError


def test_a_live_run_keeps_others_out_and_says_who_it_is(tmp_path: Path):
    first, second = RunDir(tmp_path / "a"), RunDir(tmp_path / "a")
    first.create()
    first.lock()
    with pytest.raises(RunExistsError, match=rf"live \(process {os.getpid()}\)"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "a").write_text("")
    with pytest.raises(RunExistsError, match="is a file"):
        RunDir(tmp_path / "a").create()


def test_a_name_that_is_taken_is_numbered(tmp_path: Path):
    assert next_free_name(tmp_path, "a") == "a"
    assert newest_name(tmp_path, "a") == "a"
    for expected in ("a", "a-2", "a-3"):
        name = next_free_name(tmp_path, "a")
        assert name == expected
        RunDir(tmp_path / name).create()
        RunDir(tmp_path / name).config.write_text("")
    assert newest_name(tmp_path, "a") == "a-3"
