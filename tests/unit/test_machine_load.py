"""What other programs take of the machine: our own work is not theirs, and theirs is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import profile
from orchestrator.cli.profile import MachineLoad, machine_busy_s, own_s

BURN = "import time\nwhile time.process_time() < 0.3: pass"


def test_children_count_as_our_own_once_they_have_ended():
    busy_s, before_s = machine_busy_s(), own_s()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert own_s() - before_s > 0.25
    assert machine_busy_s() - busy_s > 0.2


def test_what_is_not_ours_is_theirs(monkeypatch: pytest.MonkeyPatch):
    now = {"busy": 10.0, "own": 5.0, "clock": 100.0}
    monkeypatch.setattr(profile, "machine_busy_s", lambda: now["busy"])
    monkeypatch.setattr(profile, "own_s", lambda: now["own"])
    monkeypatch.setattr(profile.time, "monotonic", lambda: now["clock"])
    monkeypatch.setattr(profile.os, "cpu_count", lambda: 2)
    others = MachineLoad()
    now.update(busy=16.0, own=8.0, clock=110.0)
    assert others.share() == pytest.approx(3.0 / 20.0)
    now.update(own=12.0)
    assert others.share() == 0.0, "rounding is no share"


def test_where_the_system_does_not_tell_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(profile, "STAT", tmp_path / "none")
    assert MachineLoad().share() == 0.0
