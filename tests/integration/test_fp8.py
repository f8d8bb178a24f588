"""A real run with engines in fp8: what the trainer finds ends it, in every worker, and the run goes on without."""

from __future__ import annotations

import pytest

from tests.fakes.live_run import EMULATED, SUMS, LiveRun

BATCHES, OFF = 7, 0.2
FEW = (
    *EMULATED,
    *SUMS,
    "generation.kv_dtype=fp8",
    "generation.workers=2",
    "generation.fp8_mismatch_batches=2",
    "pipeline.max_staleness=0",
    "pipeline.groups_per_batch=4",
    f"run.batches={BATCHES}",
    "emulated.time_scale=0.1",
)


def test_a_run_gives_fp8_up_when_logprobs_are_off_and_goes_on(tmp_path):
    with LiveRun(tmp_path, *FEW, f"emulated.fp8_mismatch={OFF}") as run:
        assert run.wait_for_end() == 0, run.describe()
        lines = run.metrics()
        audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    found = [line["logprob_mismatch"] for line in lines]
    assert [line["fp8_off"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert found[:2] == pytest.approx([OFF, OFF], abs=1e-5)
    assert found[2:] == pytest.approx([0.0] * 5, abs=1e-6), "both workers were told with the version that they took"
    said = (tmp_path / "out.log").read_text()
    assert "warning: batch 2: logprobs of trainer and engine differ by 0.200 on average" in said
    assert "nothing is held in fp8 from version 2 on" in said
