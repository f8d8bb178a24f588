"""One GPU for each worker: which are allowed, which are there, which are free. The driver is a stand-in on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workers.commands import build as gpus
from workers.errors import GpuError

HOLD = """
import os, sys
from workers.commands.build import take_gpu
take_gpu(sys.argv[1])
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an ``nvidia-smi`` that shows so many GPUs first on PATH, and the locks into this test's directory."""

    def show(count: int) -> None:
        script = tmp_path / "nvidia-smi"
        lines = "".join(f"echo GPU-{number:04d}\n" for number in range(count))
        script.write_text(f"#!/bin/sh\n{lines}")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv(gpus.LOCKS_VARIABLE, str(tmp_path / "locks"))
        monkeypatch.delenv(gpus.VISIBLE, raising=False)

    return show


def hold(wanted: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, wanted]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def held_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_worker_gets_a_gpu_of_its_own_and_a_dead_one_gives_it_back(driver):
    driver(3)
    workers = [hold("1-2") for _ in range(2)]
    try:
        assert {held_by(worker) for worker in workers} == {"GPU-0001", "GPU-0002"}
        third = hold("1,2")
        _, words = third.communicate(timeout=50)
        assert "another worker holds each of them" in words
        workers[0].kill()
        workers[0].communicate()
        workers.append(hold("1-2"))
        assert held_by(workers[-1]) in ("GPU-0001", "GPU-0002")
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_gpu_that_is_not_there_is_named(driver):
    driver(2)
    with pytest.raises(GpuError, match="no GPU 2, 3 here; nvidia-smi shows 2"):
        gpus.take_gpu("1-3")


def test_a_machine_without_gpus_says_what_to_look_for(driver):
    driver(0)
    for wanted in ("0", "all"):
        with pytest.raises(GpuError, match=r"shows none.*Container Toolkit"):
            gpus.take_gpu(wanted)


@pytest.mark.parametrize("wanted", ["cuda", "1-", "0,,1", "-1"])
def test_what_are_no_numbers_is_refused(driver, wanted: str):
    driver(2)
    with pytest.raises(GpuError, match="write numbers of GPUs"):
        gpus.take_gpu(wanted)


def test_locks_that_cannot_be_written_are_named(driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver(1)
    (tmp_path / "file").touch()
    monkeypatch.setenv(gpus.LOCKS_VARIABLE, str(tmp_path / "file" / "locks"))
    with pytest.raises(GpuError, match=f"set {gpus.LOCKS_VARIABLE}"):
        gpus.take_gpu("0")


def test_locks_lie_in_a_directory_that_no_other_user_enters(driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In one for all users, whoever came first kept all others from every GPU."""
    driver(1)
    monkeypatch.delenv(gpus.LOCKS_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"streamrl-gpus-{os.geteuid()}"
    gpus.take_gpu("0")
    assert own.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in own.iterdir()] == ["GPU-0000.lock"]


def test_a_link_that_waits_where_the_locks_lie_is_not_followed(driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver(1)
    target = tmp_path / "locks" / "elsewhere"
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "GPU-0000.lock").symlink_to(target)
    with pytest.raises(GpuError, match="cannot lock a GPU"):
        gpus.take_gpu("0")
    assert not target.exists()
    monkeypatch.delenv(gpus.LOCKS_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"streamrl-gpus-{os.geteuid()}").symlink_to(tmp_path / "locks")
    with pytest.raises(GpuError, match=r"is no directory .*set STREAMRL_GPU_LOCKS"):
        gpus.take_gpu("0")
