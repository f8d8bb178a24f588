"""A run where a driver shows GPUs: its workers take those that were dealt out to them, and give them back."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import ask_status, environment
from tests.fakes.gpu_driver import FakeDriver
from transport.process.gpus import free_gpus, list_gpus

LIMIT_S = 200.0


def status_of(run_dir: Path) -> dict[str, Any]:
    """What it answers; {} while it does not yet."""
    with suppress(OSError):
        return ask_status(run_dir)
    return {}


@pytest.mark.timeout(400)
def test_workers_hold_their_gpus_as_long_as_the_run_lives(driver: FakeDriver, tmp_path: Path):
    driver(3)
    run_dir = tmp_path / "runs" / "tiny"
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain", "--set", "run.batches=4000"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            deadline_s = time.monotonic() + LIMIT_S
            while (free := free_gpus(list_gpus())) or not (status := status_of(run_dir)):
                assert run.poll() is None, run.communicate()[0]
                assert time.monotonic() < deadline_s, f"free: {free}"
                time.sleep(0.2)
        finally:
            run.terminate()
            said, _ = run.communicate(timeout=60)
    for line in ("GPU 0  H100, 80 GiB  train-0", "GPU 1  H100, 80 GiB  generate-0", "GPU 2  H100, 80 GiB  generate-1"):
        assert line in said
    assert [(gpu["number"], gpu["workers"], gpu["share"]) for gpu in status["gpus"]] == [
        (0, ["train-0"], 1.0),
        (1, ["generate-0"], 1.0),
        (2, ["generate-1"], 1.0),
    ]
    assert free_gpus(list_gpus()) == [0, 1, 2]
