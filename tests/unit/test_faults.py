"""A fault point kills once, at the pass it was told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from transport.process import faults

PROGRAM = """
import sys
from transport.process import faults
faults.arm(sys.argv[1])
for number in range(3):
    faults.point("score.claimed")
    print(number, flush=True)
"""


def run(specification: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, specification], capture_output=True, text=True, timeout=50)
    return done.returncode, done.stdout


def test_it_kills_at_the_nth_pass_and_only_once(tmp_path: Path):
    specification = f"score.claimed:2:{tmp_path / 'marker'}"
    assert run(specification) == (-signal.SIGKILL, "0\n")
    assert run(specification) == (0, "0\n1\n2\n")


def test_an_unknown_point_is_named():
    with pytest.raises(ValueError, match="there is no fault point 'nowhere'"):
        faults.arm("nowhere:1:/tmp/x")
