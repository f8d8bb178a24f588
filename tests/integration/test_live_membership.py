"""Rolling membership and over-sampling in real processes: every row once, whatever batch it was admitted to."""

from __future__ import annotations

import pytest

from tests.fakes.live_run import EMULATED, LiveRun

BATCHES, GROUPS = 4, 6
FEW = (
    *EMULATED,
    "sampling.max_new_tokens=200",
    "trainer.micro_batch_tokens=4096",
    f"run.batches={BATCHES}",
    f"pipeline.groups_per_batch={GROUPS}",
    "pipeline.max_staleness=2",
    "emulated.time_scale=0.2",
)


@pytest.mark.parametrize("setting", ["pipeline.membership=rolling", "pipeline.oversampled_groups=3"])
def test_a_live_run_trains_full_batches_and_its_audit_finds_nothing(tmp_path, setting):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(tokens) for tokens in (200, 10, 12, 15, 20, 150, 8, 30)))
    with LiveRun(tmp_path, *FEW, f"generation.lengths={lengths}", setting) as run:
        assert run.wait_for_end() == 0, run.describe()
        assert len(run.metrics()) == BATCHES
        audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
