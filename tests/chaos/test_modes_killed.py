"""The pipeline modes in real processes, with the emulated engine and the emulated trainer, both of which are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.live_run import EMULATED, LiveRun

pytestmark = pytest.mark.chaos

BATCHES = 12
REPLAY = (
    *EMULATED,
    f"run.batches={BATCHES}",
    "generation.workers=2",
    "emulated.time_scale=0.1",
    "emulated.transfer_s=1.0",
)
MODES = {
    "serial": ("pipeline.max_staleness=0", "pipeline.release=batch", "pipeline.update=barrier"),
    "mini_batch": ("pipeline.max_staleness=0", "pipeline.release=mini_batch", "pipeline.mini_batch_groups=3"),
    "enlarged": ("pipeline.max_staleness=1", "pipeline.rollout_batches=2", "pipeline.update=barrier"),
    "full_async": ("pipeline.max_staleness=1", "pipeline.update=barrier"),
    "staggered": ("pipeline.max_staleness=1", "pipeline.update=staggered"),
}


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode in ("full_async", "staggered") else pytest.mark.long) for mode in MODES],
)
def test_killed_workers_cost_a_mode_nothing(tmp_path: Path, mode: str):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(1 + 5 * n % 16) for n in range(16)))
    with LiveRun(tmp_path, *REPLAY, *MODES[mode], f"generation.lengths={lengths}") as run:
        run.wait_for_batch(1)
        run.kill("workers", "train")
        run.wait_for_batch(len(run.metrics()) + 2)
        run.kill("workers", "generate")
        assert run.wait_for_end() == 0, run.describe()
        lines = {line["batch"]: line for line in run.metrics()}
        assert set(lines) == set(range(BATCHES))
        assert {line["response_tokens_max"] for line in lines.values()} == {16}, "lengths are as forced"
        bound = 0 if mode in ("serial", "mini_batch") else 1
        assert max(line["staleness_max"] for line in lines.values()) <= bound
        audit = run.audit()
        assert audit.returncode == 0, audit.stdout
