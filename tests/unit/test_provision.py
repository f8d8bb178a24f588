"""Local processes as their supervisor sees them: what a failed one said, and that nothing waits for a hung thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.model.groups import STABLE_S
from orchestrator.errors import ChildFailedError, ExitCode, exit_code
from orchestrator.launch.launchers.base import ProcessSpec
from orchestrator.launch.processes import Children, Restarts
from tests.fakes.manual_clock import ManualClock
from transport.errors import DirectoryError

SAYS = "import sys; print({text!r}, file=sys.stderr); sys.exit({code})"


def program(text: str, code: int) -> ProcessSpec:
    return ProcessSpec(name="train-0", argv=[sys.executable, "-c", SAYS.format(text=text, code=code)])


async def test_an_error_of_ours_reaches_the_terminal_as_one_line(tmp_path: Path):
    with pytest.raises(ChildFailedError) as caught:
        await Children(tmp_path, max_restarts=0).keep(program("a warning\nerror: no room\n{}\n", 4))
    assert str(caught.value) == "train-0 exited with 4: no room"


async def test_a_full_disk_ends_the_run_with_an_exit_code_of_its_own(tmp_path: Path):
    code = exit_code(DirectoryError("cannot write journal: No space left on device"), is_child=True)
    assert code == ExitCode.UNWRITABLE
    with pytest.raises(ChildFailedError) as caught:
        await Children(tmp_path, max_restarts=9).keep(program("error: cannot write journal", code))
    assert exit_code(caught.value) == ExitCode.UNWRITABLE


async def test_what_a_former_life_said_is_not_said_again(tmp_path: Path):
    children = Children(tmp_path, max_restarts=0)
    for text, expected in (("error: old", "train-0 exited with 4: old"), ("", "train-0 exited with 4")):
        with pytest.raises(ChildFailedError) as caught:
            await children.keep(program(text, 4))
        assert str(caught.value) == expected


async def test_the_end_of_a_traceback_is_kept_for_a_bug(tmp_path: Path):
    with pytest.raises(ChildFailedError, match="ValueError: odd"):
        await Children(tmp_path, max_restarts=0).keep(program("Traceback\n  line\nValueError: odd", 1))


def test_a_worker_that_ends_by_error_does_not_wait_for_a_thread_that_hangs():
    """An engine that hangs is why it ends: waiting for its thread at exit would keep the process for ever."""
    source = (
        "import threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import workers.__main__ as program\n"
        "from workers.errors import EngineHungError\n"
        "def app():\n"
        "    ThreadPoolExecutor(1).submit(time.sleep, 600)\n"
        "    raise EngineHungError('it hangs')\n"
        "program.app = app\n"
        "program.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (1, "error: it hangs\n")


def test_deaths_that_are_far_apart_use_up_no_restarts():
    clock = ManualClock()
    restarts = Restarts(2, clock)
    for _ in range(20):
        restarts.started()
        clock.advance(STABLE_S + 1.0)
        assert restarts.died()
    assert restarts.pause_s == 0.0, "the first restart is free"
    for allowed in (True, False):
        restarts.started()
        clock.advance(STABLE_S - 1.0)
        assert restarts.died() is allowed
