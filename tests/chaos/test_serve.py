"""The control plane alone: workers come and go in mid-run, and two runs on one broker do not see each other.

Generation and training are emulated: what is tested is who joins, with which weights, and who hears of it.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.journal import read_records
from tests.fakes.command_line import orchestrator
from tests.fakes.machine import machine
from transport.contracts.messages import RolloutFinished, WeightsLoaded, WorkerLost

QUICK = (
    "run.batches=5000",
    "generation.engine=emulated",
    "trainer.engine=emulated",
    "emulated.time_scale=0.2",
    "liveness.lease_s=60.0",
    "trainer.checkpoint_every=1000",
)

pytestmark = pytest.mark.chaos


def test_workers_join_and_leave_in_mid_run(tmp_path: Path):
    with machine(tmp_path) as place:
        place.serve("one", "--preset", "tiny", settings=QUICK)
        other = place.serve("other", "--preset", "tiny", settings=QUICK)
        place.join("one", "score", "--reward", "workers.scoring.rewards:digit_share")
        place.join("one", "train")
        first = place.join("one", "generate")
        place.wait_until(lambda: place.status("one").get("trained_version", 0) >= 2, "two batches")

        place.join("one", "generate", index=1)
        place.wait_until(lambda: place.finished("one") == {"generate-0.1", "generate-1.1"}, "samples of both")

        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=30) == 143, place.words()
        place.wait_until(
            lambda: [worker["worker_id"] for worker in place.status("one").get("generation", [])] == ["generate-1.1"],
            "the first to be gone: it said goodbye, its lease would have lasted a minute",
            timeout_s=20.0,
        )
        trained = place.status("one")["trained_version"]
        place.wait_until(
            lambda: place.status("one").get("trained_version", 0) >= trained + 2, "batches without the first"
        )

        alone = place.status("other")
        assert (alone["workers"], alone["generation"], alone["trained_version"]) == ([], [], 0)
        assert not [stream for stream in alone["queues"] if stream.startswith(("plans:", "control:", "rounds"))]
        assert alone["wait"]["waits_for"] == "a trainer to join"

        said = (tmp_path / "serve-one.log").read_text()
        assert re.search(r"^batch +1/", said, re.MULTILINE), "a line a batch, as run prints"
        place.drain("one")
        for name in ("one-score-0", "one-train-0", "one-generate-1"):
            assert place.processes[name].wait(timeout=30) == 0, place.words()
        assert list(tmp_path.glob("runs/one/checkpoints/step-*")), "the trainer writes where the orchestrator does"
        assert (tmp_path / "runs" / "one" / "report.html").exists()
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
        return orchestrator("serve", "--preset", "tiny", *arguments, cwd=tmp_path)

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
