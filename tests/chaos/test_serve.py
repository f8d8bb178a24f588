"""The control plane alone: workers come and go in mid-run, and two runs on one broker do not see each other.

Generation and training are emulated: what is tested is who joins, with which weights, and who hears of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.journal import read_records
from tests.fakes.redis_servers import ServerProcess, find_binary
from transport.messages import RolloutFinished, WeightsLoaded, WorkerLost

REPOSITORY = Path(__file__).parents[2]
QUICK = (
    "generation.engine=replay",
    "trainer.engine=emulated",
    "replay.time_scale=0.2",
    "liveness.lease_s=60.0",
    "trainer.checkpoint_every=1000",
)

pytestmark = pytest.mark.chaos


class Machine:
    """Processes that a person starts by hand, in one directory, against one broker."""

    def __init__(self, directory: Path, broker: str) -> None:
        self.directory = directory
        self.broker = broker
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--broker", self.broker],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        self.processes[name] = process
        return process

    def serve(self, run: str, *settings: str) -> subprocess.Popen[bytes]:
        arguments = [part for setting in (*QUICK, *settings) for part in ("--set", setting)]
        return self.start(f"serve-{run}", "orchestrator", "serve", "--preset", "tiny", "--run", run, *arguments)

    def join(self, run: str, kind: str, *arguments: str, index: int = 0) -> subprocess.Popen[bytes]:
        return self.start(f"{run}-{kind}-{index}", "workers", kind, "--run", run, "--index", str(index), *arguments)

    def status(self, run: str) -> dict[str, Any]:
        """Empty before there is one."""
        address = self.directory / "runs" / run / "api.address"
        if not address.exists():
            return {}
        try:
            with urllib.request.urlopen(f"http://{address.read_text().strip()}/status", timeout=5.0) as answer:
                return json.load(answer)
        except OSError:
            return {}

    def wait_until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            ended = {
                name: process.poll() for name, process in self.processes.items() if process.poll() not in (None, 143)
            }
            assert not ended, f"before {what}: {ended}\n{self.words()}"
            assert time.monotonic() < deadline_s, f"no {what} after {timeout_s:.0f} s\n{self.words()}"
            time.sleep(0.05)

    def words(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.directory.glob("*.log")))

    def finished(self, run: str) -> set[str]:
        """Generation workers that have finished a sample of the run, by name."""
        try:
            records = list(read_records(self.directory / "runs" / run / "journal", from_seq=1))
        except FileNotFoundError:
            return set()
        events = [record.event for record in records]
        return {event.worker_id for event in events if isinstance(event, RolloutFinished)}


@contextmanager
def machine(directory: Path) -> Iterator[Machine]:
    binary = find_binary("valkey")
    assert binary is not None
    server = ServerProcess(binary, directory / "broker", "--maxmemory-policy", "noeviction")
    server.wait_listening()
    place = Machine(directory, server.url)
    try:
        yield place
    finally:
        for process in place.processes.values():
            process.kill()
            process.wait()
        server.kill()


def test_workers_join_and_leave_in_mid_run(tmp_path: Path):
    with machine(tmp_path) as place:
        serve = place.serve("one", "run.batches=5000")
        other = place.serve("other", "run.batches=5000")
        place.join("one", "score", "--reward", "workers.scoring.toy_rewards:digit_share")
        place.join("one", "train")
        first = place.join("one", "generate")
        place.wait_until(lambda: place.status("one").get("trained_version", 0) >= 2, "two batches")

        place.join("one", "generate", index=1)
        place.wait_until(lambda: place.finished("one") == {"generate-0.1", "generate-1.1"}, "samples of both")

        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=30) == 143, place.words()
        place.wait_until(
            lambda: [worker["worker_id"] for worker in place.status("one")["generation"]] == ["generate-1.1"],
            "the first to be gone: it said goodbye, its lease would have lasted a minute",
            timeout_s=20.0,
        )
        trained = place.status("one")["trained_version"]
        place.wait_until(lambda: place.status("one")["trained_version"] >= trained + 2, "batches without the first")

        alone = place.status("other")
        assert (alone["workers"], alone["generation"], alone["trained_version"]) == ([], [], 0)
        assert not [stream for stream in alone["queues"] if stream.startswith(("plans:", "control:", "rounds"))]
        assert alone["wait"]["waits_for"] == "a trainer to join"

        drained = subprocess.run(
            [sys.executable, "-m", "orchestrator", "drain", "runs/one"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert drained.returncode == 0, drained.stderr + place.words()
        assert serve.wait(timeout=60) == 0, place.words()
        for name in ("one-score-0", "one-train-0", "one-generate-1"):
            assert place.processes[name].wait(timeout=30) == 0, place.words()
        assert list(tmp_path.glob("runs/one/checkpoints/step-*")), "the trainer writes where the orchestrator does"
        check_current_before_serving(tmp_path / "runs" / "one" / "journal", "generate-1.1")

        other.send_signal(signal.SIGTERM)
        assert other.wait(timeout=30) == 130, place.words()


def check_current_before_serving(journal: Path, worker_id: str) -> None:
    """The worker's first sample is of weights that it had loaded, and those were the newest when it joined."""
    events = [record.event for record in read_records(journal, from_seq=1)]
    mine = [event for event in events if getattr(event, "worker_id", "") == worker_id]
    loaded = next(event for event in mine if isinstance(event, WeightsLoaded))
    sampled = next(event for event in mine if isinstance(event, RolloutFinished))
    assert mine.index(loaded) < mine.index(sampled)
    assert sampled.oldest.version >= loaded.weights.version >= 2
    assert any(isinstance(event, WorkerLost) and event.worker_id == "generate-0.1" for event in events)


def test_serve_names_what_it_lacks(tmp_path: Path):
    def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "orchestrator", "serve", "--preset", "tiny", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    down = serve("--broker", "redis://127.0.0.1:1", "--run", "down")
    assert down.returncode == 1, down.stderr
    assert "127.0.0.1:1 is unavailable" in down.stderr
    open_door = serve("--broker", "redis://127.0.0.1:1", "--set", "api.host=0.0.0.0")
    assert open_door.returncode == 2
    assert "STREAMRL_SECRET" in open_door.stderr
    nothing = serve("--broker", "redis://127.0.0.1:1", "--run", "absent", "--resume")
    assert nothing.returncode == 2
    assert "there is no run to resume" in nothing.stderr
    half = serve("--broker", "redis://127.0.0.1:1", "--run-dir", "runs/x")
    assert half.returncode == 2
    assert "--run-dir needs --run and --model-dir" in half.stderr
