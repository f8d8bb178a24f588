"""The endpoint of real runs, with the agents that docs/endpoint.md shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.observability.samples import SAMPLES, read_samples
from tests.fakes.agents import leased
from tests.fakes.command_line import REPOSITORY
from tests.fakes.live_run import EMULATED, LiveRun

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
PATIENT = ("endpoint.max_session_s=310.0", "pipeline.rollout_timeout_s=320.0", "liveness.stall_s=400.0")
"""A first sample waits until uv has installed what verifiers' harness needs."""
VERIFIERS = os.environ.get("STREAMRL_VERIFIERS_PYTHON", "")
"""Interpreter of an environment with verifiers and uv in it."""
PLAYED_S = 300.0
"""For four samples, with the packages that uv installs the first time."""


@contextmanager
def agent(*command: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A process as a reader of the docs starts it: it finds none of our packages."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


@contextmanager
def calls_of(run: LiveRun) -> Iterator[httpx.Client]:
    """What a run's key opens at its first worker."""
    address = run.run_dir / "endpoint" / "0.address"
    run.wait_until(address.exists, "an address")
    headers = {"authorization": f"Bearer {(run.run_dir / 'endpoint.key').read_text()}"}
    with httpx.Client(base_url=f"http://{address.read_text().strip()}/v1", headers=headers, timeout=60) as calls:
        yield calls


def forked(calls: httpx.Client, **leasing: object) -> dict[str, Any]:
    """Lease a sample, ask twice with other histories, and end it. Returns what the end was answered."""
    work = leased(calls, **leasing)
    for text in ("One", "Two"):
        asked = {"model": work["model"], "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        calls.post(f"{work['session_url']}/chat/completions", json=asked).raise_for_status()
    ended = calls.post(f"/sessions/{work['id']}/end", json={"reward": float(work["sample"])})
    return ended.raise_for_status().json()


@pytest.mark.chaos
def test_all_branches_of_a_session_are_trained_as_one_row_and_once(tmp_path: Path) -> None:
    with LiveRun(tmp_path, *ENDPOINT, 'endpoint.branches="all"', "run.batches=1") as run:
        with calls_of(run) as calls:
            ended = [forked(calls) for _ in range(4)]
        assert run.wait_for_end() == 0, run.describe()
        assert [(one["branches"], one["dropped_tokens"]) for one in ended] == [(2, 0)] * 4
        (line,) = run.metrics()
        assert line["tokens_trained"] == sum(one["policy_tokens"] for one in ended)
        assert line["samples_trained"] == 4
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout


@pytest.mark.chaos
def test_samples_of_prompts_that_agents_bring_are_shown_with_these(tmp_path: Path) -> None:
    with LiveRun(tmp_path, *ENDPOINT, "run.batches=1") as run:
        with calls_of(run) as calls:
            for number in range(2):
                own = {"id": f"z{number}", "question": f"MY OWN QUESTION {number}?"}
                for _ in range(2):
                    forked(calls, prompt=own)
        assert run.wait_for_end() == 0, run.describe()
        shown = read_samples(run.run_dir / SAMPLES)
        assert shown
        for sample in shown:
            assert sample["question"] in ("MY OWN QUESTION 0?", "MY OWN QUESTION 1?")
            assert (sample["prompt"], sample["expected"]) == (sample["question"], "")


@pytest.mark.skipif(not VERIFIERS, reason="STREAMRL_VERIFIERS_PYTHON names no Python with verifiers and uv")
@pytest.mark.parametrize("kind", ["single_turn", "tool"])
def test_tasks_of_verifiers_are_played_and_trained(tmp_path: Path, kind: str) -> None:
    script = str(REPOSITORY / "docs/examples/endpoint_verifiers.py")
    with LiveRun(tmp_path, *ENDPOINT, *EMULATED, *PATIENT, "run.batches=1") as run:
        run.wait_until(lambda: (run.run_dir / "endpoint" / "0.address").exists(), "an address")
        with agent(VERIFIERS, script, str(run.run_dir), kind, "4", cwd=tmp_path) as process:
            try:
                said, _ = process.communicate(timeout=PLAYED_S)
            except subprocess.TimeoutExpired as late:
                pytest.fail(f"verifiers played no 4 samples within {PLAYED_S:.0f} s: {late.stdout!r}\n{run.describe()}")
            assert process.returncode == 0, said
            assert said.count("'sealed': True") == 4, said
            assert run.wait_for_end() == 0, run.describe() + said
        assert len(run.metrics()) == 1
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout
