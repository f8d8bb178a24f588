"""The endpoint of real runs, with the agents that docs/endpoint.md shows."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.command_line import REPOSITORY, environment
from tests.fakes.live_run import LiveRun

ENDPOINT = (
    "endpoint.enabled=true",
    "endpoint.silence_s=20.0",
    "endpoint.max_session_s=100.0",
    "pipeline.rollout_timeout_s=120.0",
    "liveness.lease_s=4.0",
    "liveness.stall_s=280.0",
    "sampling.max_new_tokens=420",
    "pipeline.groups_per_batch=2",
    "pipeline.group_size=2",
    "eval.problems=0",
    "run.batches=2",
)
VERIFIERS = os.environ.get("STREAMRL_VERIFIERS_PYTHON", "")
"""Interpreter of an environment with verifiers and uv in it."""


@contextmanager
def agent(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


@pytest.mark.chaos
def test_the_documented_agent_trains_a_run_whose_worker_dies(tmp_path: Path) -> None:
    script = str(REPOSITORY / "docs/examples/endpoint_agent.py")
    with LiveRun(tmp_path, *ENDPOINT) as run, agent(sys.executable, script, str(run.run_dir), cwd=tmp_path) as process:
        said = [next(lines(process)) for _ in range(2)]
        run.kill("workers", "generate")
        assert run.wait_for_end() == 0, run.describe() + "".join(said)
        assert len(run.metrics()) == 2
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout
        assert "endpoint for agents http://127.0.0.1:" in run.output


@pytest.mark.skipif(not VERIFIERS, reason="STREAMRL_VERIFIERS_PYTHON names no Python with verifiers and uv")
@pytest.mark.parametrize("kind", ["single_turn", "tool"])
def test_tasks_of_verifiers_are_played_and_trained(tmp_path: Path, kind: str) -> None:
    script = str(REPOSITORY / "docs/examples/endpoint_verifiers.py")
    with LiveRun(tmp_path, *ENDPOINT, "run.batches=1") as run:
        run.wait_until(lambda: (run.run_dir / "endpoint" / "0.address").exists(), "an address")
        with agent(VERIFIERS, script, str(run.run_dir), kind, "4", cwd=tmp_path) as process:
            with contextlib.suppress(StopIteration):
                for line in lines(process):
                    assert "failed" not in line, line
            assert run.wait_for_end() == 0, run.describe()
        assert len(run.metrics()) == 1
