"""Memory that holds a few of the slots: samples outgrow it in a real run, whose worker is killed then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.command_line import ask_status
from tests.fakes.live_run import EMULATED, LiveRun, check_whole

pytestmark = pytest.mark.chaos

BATCHES = 3
LITTLE = (
    f"run.batches={BATCHES}",
    "eval.problems=0",
    "ranker.kind=none",
    "sampling.max_new_tokens=400",
    "generation.slots=16",
    "generation.max_context=512",
    "generation.kv_tokens=1024",
)
"""Three samples start beside one another, and two of 400 tokens fit."""


def retracted(run: LiveRun) -> float:
    try:
        workers = ask_status(run.run_dir)["workers"]
    except OSError:  # it has not started yet
        return 0.0
    return sum(worker["counters"].get("retracted_samples", 0.0) for worker in workers)


@pytest.mark.parametrize("engine", [(), (*EMULATED, "emulated.time_scale=0.1")], ids=["embedded", "emulated"])
def test_a_run_in_little_memory_outlives_its_worker(tmp_path: Path, engine: tuple[str, ...]):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("380\n390\n400\n60\n")
    with LiveRun(tmp_path, *LITTLE, *engine, f"generation.lengths={lengths}") as run:
        run.wait_until(lambda: retracted(run) > 0, "sample that was retracted")
        run.kill("workers", "generate")
        check_whole(run, batches=BATCHES)
