"""A run where a driver shows GPUs: its workers take those that were dealt out to them, and give them back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.command_line import environment
from tests.fakes.gpu_driver import FakeDriver
from transport.process.gpus import free_gpus, list_gpus

LIMIT_S = 200.0


@pytest.mark.timeout(400)
def test_workers_hold_their_gpus_as_long_as_the_run_lives(driver: FakeDriver, tmp_path: Path):
    driver(3)
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain", "--set", "run.batches=4000"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while (free := free_gpus(list_gpus())) != [2]:
                assert run.poll() is None, run.communicate()[0]
                assert time.monotonic() < deadline_s, f"free: {free}"
                time.sleep(0.2)
        finally:
            run.terminate()
            said, _ = run.communicate(timeout=60)
    assert "GPU 0  H100, 80 GiB  train-0\nGPU 1  H100, 80 GiB  generate-0\nGPU 2  H100, 80 GiB  idle\n" in said
    assert "idle GPUs would be used with --set generation.workers=2" in said
    assert free_gpus(list_gpus()) == [0, 1, 2]
