"""GPUs for each worker: which are allowed, which are there, which are free. The driver is a stand-in on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes.gpu_driver import FakeDriver
from transport.errors import GpuError
from transport.process import gpus

HOLD = """
import os, sys
from transport.process.gpus import take_gpus
take_gpus(sys.argv[1], each=int(sys.argv[2]), share=float(sys.argv[3]))
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
sys.stdin.read()
"""


def hold(wanted: str, *, each: int = 1, share: float = 1.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, wanted, str(each), str(share)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def held_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_worker_gets_a_gpu_of_its_own_and_a_dead_one_gives_it_back(driver: FakeDriver):
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


def test_ranks_that_are_started_together_get_a_gpu_each(driver: FakeDriver):
    driver(4)
    assert gpus.one_each("", 2) == ["0", "1"]
    assert gpus.one_each("1-3", 3) == ["1", "2", "3"]
    holder = hold("1")
    try:
        assert held_by(holder) == "GPU-0001"
        assert gpus.one_each("0-3", 2) == ["0", "2"]
        with pytest.raises(GpuError, match="--gpus 0-3 names 4, of which 3 are free"):
            gpus.one_each("0-3", 4)
    finally:
        holder.kill()
        holder.communicate()
    with pytest.raises(GpuError, match="each rank needs a GPU of its own, and --gpus 2 names 1"):
        gpus.one_each("2", 2)
    with pytest.raises(GpuError, match="no GPU 4 here"):
        gpus.one_each("3-4", 2)
    driver(0)
    assert gpus.one_each("", 2) == []


def test_a_gpu_that_is_not_there_is_named(driver: FakeDriver):
    driver(2)
    with pytest.raises(GpuError, match="no GPU 2, 3 here; nvidia-smi shows 2"):
        gpus.take_gpus("1-3")


def test_a_machine_without_gpus_says_what_to_look_for(driver: FakeDriver):
    driver(0)
    for wanted in ("0", "all"):
        with pytest.raises(GpuError, match=r"shows none.*Container Toolkit"):
            gpus.take_gpus(wanted)


@pytest.mark.parametrize("wanted", ["cuda", "1-", "0,,1", "-1"])
def test_what_are_no_numbers_is_refused(driver: FakeDriver, wanted: str):
    driver(2)
    with pytest.raises(GpuError, match="write numbers of GPUs"):
        gpus.take_gpus(wanted)


def test_locks_that_cannot_be_written_are_named(driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    driver(1)
    (tmp_path / "file").touch()
    monkeypatch.setenv(gpus.LOCKS_VARIABLE, str(tmp_path / "file" / "locks"))
    with pytest.raises(GpuError, match=f"set {gpus.LOCKS_VARIABLE}"):
        gpus.take_gpus("0")


def test_locks_lie_in_a_directory_that_no_other_user_enters(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In one for all users, whoever came first kept all others from every GPU."""
    driver(1)
    monkeypatch.delenv(gpus.LOCKS_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"streamrl-gpus-{os.geteuid()}"
    gpus.take_gpus("0")
    assert own.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in own.iterdir()] == ["GPU-0000.lock"]


def test_a_link_that_waits_where_the_locks_lie_is_not_followed(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver(1)
    target = tmp_path / "locks" / "elsewhere"
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "GPU-0000.lock").symlink_to(target)
    with pytest.raises(GpuError, match="cannot lock a GPU"):
        gpus.take_gpus("0")
    assert not target.exists()
    monkeypatch.delenv(gpus.LOCKS_VARIABLE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"streamrl-gpus-{os.geteuid()}").symlink_to(tmp_path / "locks")
    with pytest.raises(GpuError, match=r"is no directory .*set STREAMRL_GPU_LOCKS"):
        gpus.take_gpus("0")


def test_a_worker_takes_several_gpus_or_none(driver: FakeDriver):
    driver(3)
    first = hold("all", each=2)
    try:
        assert held_by(first) == "GPU-0000,GPU-0001"
        second = hold("all", each=2)
        _, words = second.communicate(timeout=50)
        assert "another worker holds some of them" in words
        third = hold("2")
        try:
            assert held_by(third) == "GPU-0002", "what the second could not use, it did not keep"
        finally:
            third.kill()
            third.communicate()
    finally:
        first.kill()
        first.communicate()


def test_a_gpu_is_shared_by_those_who_say_so(driver: FakeDriver):
    driver(1)
    sharing = [hold("0", share=0.45) for _ in range(2)]
    try:
        assert [held_by(worker) for worker in sharing] == ["GPU-0000"] * 2
        with pytest.raises(GpuError, match="another worker holds it"):
            gpus.take_gpus("0")
        assert gpus.free_gpus(gpus.list_gpus()) == []
        assert gpus.one_each("0", 1, share=0.45) == ["0"]
        with pytest.raises(GpuError, match="of which 0 are free"):
            gpus.one_each("0", 1)
    finally:
        for worker in sharing:
            worker.kill()
            worker.communicate()
    assert gpus.free_gpus(gpus.list_gpus()) == [0]


@pytest.mark.parametrize(
    ("shown", "uuids"),
    [
        (None, ["GPU-0000", "GPU-0001", "GPU-0002"]),
        ("2,0", ["GPU-0002", "GPU-0000"]),
        ("GPU-0001", ["GPU-0001"]),
        ("1,9,0", ["GPU-0001"]),
        ("", []),
        ("-1", []),
    ],
)
def test_what_cuda_hides_is_not_there(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, shown: str | None, uuids: list[str]
):
    driver(3)
    if shown is not None:
        monkeypatch.setenv(gpus.VISIBLE, shown)
    assert [gpu.uuid for gpu in gpus.list_gpus()] == uuids


def test_a_share_is_what_torch_and_servers_are_told(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    driver(1)
    monkeypatch.setenv(gpus.SHARE_VARIABLE, "1")
    gpus.take_gpus("0", share=0.45)
    assert gpus.gpu_share(os.environ) == 0.45


def test_a_lock_that_others_hold_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpus, "LOOK_S", 0.0)
    held = gpus._lock(tmp_path, "GPU-1", shared=False)
    assert held is not None
    before = os.listdir("/proc/self/fd")
    assert gpus._lock(tmp_path, "GPU-1", shared=True) is None
    assert os.listdir("/proc/self/fd") == before
    os.close(held)
    again = gpus._lock(tmp_path, "GPU-1", shared=True)
    assert again is not None
    os.close(again)
