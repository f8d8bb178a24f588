"""compose/health.sh: what a container's health check makes of the heartbeat files of the ranks in it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from workers.__main__ import HEARTBEAT_VARIABLE, heartbeat_file

HEALTH = Path(__file__).parents[2] / "compose" / "health.sh"
NEVER_S = "1000000000"  # the script kills every process of its user after so long


@pytest.fixture
def heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(tmp_path / "heartbeat"))
    monkeypatch.setenv("STREAMRL_SILENT_S", NEVER_S)
    return tmp_path / "heartbeat"


def beat(index: int | None, *, ago_s: float) -> None:
    file = heartbeat_file(index)
    assert file is not None
    file.touch()
    os.utime(file, (time.time() - ago_s, time.time() - ago_s))


def healthy() -> bool:
    return subprocess.run(["bash", HEALTH, "worker"], capture_output=True, timeout=60).returncode == 0


CONTAINER = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
"""A process namespace of its own: what is killed in it is only what is in it."""
FRESH_S, SILENT_S = -3600.0, 3600.0


def test_a_container_is_as_healthy_as_the_rank_that_was_silent_longest(heartbeat: Path):
    beat(0, ago_s=FRESH_S)
    beat(1, ago_s=FRESH_S)
    assert healthy()
    beat(0, ago_s=SILENT_S)
    assert not healthy()
    beat(0, ago_s=FRESH_S)
    beat(1, ago_s=SILENT_S)
    assert not healthy()


def test_a_worker_without_a_number_has_a_file_too(heartbeat: Path):
    beat(None, ago_s=FRESH_S)
    assert healthy()
    beat(None, ago_s=SILENT_S)
    assert not healthy()


def test_a_worker_that_has_not_joined_yet_is_not_healthy_whatever_one_before_it_left(heartbeat: Path):
    beat(0, ago_s=FRESH_S)
    assert healthy()
    heartbeat_file(0)
    assert not healthy()


def test_what_a_container_left_before_it_was_started_again_ends_nothing(
    heartbeat: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its worker takes seconds to import what it needs, and touches no file meanwhile."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may make no process namespace")
    monkeypatch.setenv("STREAMRL_SILENT_S", "600")
    beat(0, ago_s=SILENT_S)
    looked = subprocess.run([*CONTAINER, "bash", HEALTH, "worker"], capture_output=True, timeout=60, text=True)
    assert (looked.returncode, looked.stdout, looked.stderr) == (1, "", "")
    monkeypatch.setenv("STREAMRL_SILENT_S", "-1")
    looked = subprocess.run([*CONTAINER, "bash", HEALTH, "worker"], capture_output=True, timeout=60, text=True)
    assert looked.stdout.endswith(" s: killed\n")


def test_where_nobody_looks_no_file_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    assert heartbeat_file(0) is None
