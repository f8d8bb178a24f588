"""Rolling membership, over-sampling, deferred tails in real processes: every row once, whatever batch it began for."""

from __future__ import annotations

import pytest

from tests.fakes.live_run import EMULATED, SUMS, LiveRun

BATCHES, GROUPS = 4, 6
FEW = (
    *EMULATED,
    *SUMS,
    "sampling.max_new_tokens=200",
    "trainer.micro_batch_tokens=4096",
    f"run.batches={BATCHES}",
    f"pipeline.groups_per_batch={GROUPS}",
    "pipeline.max_staleness=2",
    "emulated.time_scale=0.2",
)


def test_a_live_run_trains_full_batches_and_its_audit_finds_nothing(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(tokens) for tokens in (200, 10, 12, 15, 20, 150, 8, 30)))
    both = ("pipeline.membership=rolling", "pipeline.oversampled_groups=3")
    with LiveRun(tmp_path, *FEW, f"generation.lengths={lengths}", *both) as run:
        assert run.wait_for_end() == 0, run.describe()
        assert len(run.metrics()) == BATCHES
        audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr


@pytest.mark.chaos
@pytest.mark.parametrize("update", ["in_flight", "barrier"])
def test_deferred_tails_survive_the_death_of_their_workers_and_are_trained_once(tmp_path, update):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(str(tokens) for tokens in (200, 10, 12, 15, 20, 190, 8, 30, 9, 25)))
    defers = ("pipeline.oversampled_groups=3", "pipeline.oversampled_tail=defer", "generation.partial_s=0.2")
    paced = ("emulated.time_scale=1.0", "emulated.step_s=0.01", "pipeline.max_staleness=0", f"pipeline.update={update}")
    faults = {"generate.kept": 4}
    with LiveRun(tmp_path, *FEW, *paced, *defers, f"generation.lengths={lengths}", faults=faults) as run:
        assert run.wait_for_end() == 0, run.describe()
        assert run.died_at() == set(faults)
        lines = run.metrics()
        audit = run.audit()
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert len(lines) == BATCHES
    assert {line["groups_trained"] for line in lines} == {GROUPS}
    assert [line.get("groups_deferred", 0) for line in lines] == [0, 3, 3, 3]
    assert max(line["staleness_max"] for line in lines) <= 1
    assert not any("groups_filtered" in line for line in lines)
