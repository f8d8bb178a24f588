"""Programs that run by themselves (tests/alone.py): their exit code, and what they leave behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import until

ALONE = (sys.executable, str(Path(__file__).parents[1] / "alone.py"))
STAYS = """
touch /dev/shm/streamrl-alone "$TMPDIR/file"
setsid sh -c 'trap "" TERM HUP INT; echo up > "$0"; sleep 1000' "$1" &
wait
"""
ENDINGS: dict[str, Callable[[psutil.Process, psutil.Process], None]] = {
    "it is killed": lambda _, alone: alone.kill(),
    "it is told to end": lambda _, alone: alone.terminate(),
    "who started it is killed": lambda starter, _: starter.kill(),
    "its group is killed": lambda starter, _: os.killpg(starter.pid, signal.SIGKILL),
}


@pytest.fixture(autouse=True)
def _needs_namespaces() -> None:
    inside = subprocess.run([*ALONE, "sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    if int(inside.stdout) > 2:
        pytest.skip("needs namespaces of processes and mounts: root with CAP_SYS_ADMIN")


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_of_a_program_that_is_killed(tmp_path: Path, ending: str):
    up = tmp_path / "up"
    starter = subprocess.Popen(
        ["sh", "-c", '"$@"; exit $?', "make", *ALONE, "sh", "-c", STAYS, "sh", up],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    until(up.exists)
    processes = psutil.Process(starter.pid).children(recursive=True)
    assert len(processes) >= 5, "it, the first of its namespace, the program, what that started, and its sleep"
    assert len([*tmp_path.glob("streamrl-tests-*/file")]) == 1
    assert not Path("/dev/shm/streamrl-alone").exists()
    ENDINGS[ending](psutil.Process(starter.pid), processes[0])
    until(lambda: not any(_lives(process) for process in processes))
    until(lambda: not [*tmp_path.glob("streamrl-tests-*")])
    starter.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("program", "code", "kept"),
    [("exit 0", 0, 0), ('touch "$TMPDIR/file"', 0, 0), ('touch "$TMPDIR/file"; exit 3', 3, 1), ("kill -9 $$", 137, 0)],
)
def test_the_code_is_the_programs_and_files_of_one_that_failed_stay(tmp_path: Path, program: str, code: int, kept: int):
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run([*ALONE, "sh", "-c", program], env=environ, capture_output=True, text=True)
    found = [*tmp_path.glob("streamrl-tests-*")]
    assert (ran.returncode, len(found)) == (code, kept), ran.stderr
    assert all(str(path) in ran.stdout for path in found)
