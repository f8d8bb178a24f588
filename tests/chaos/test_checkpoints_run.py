"""Checkpoints that are damaged, or whose saving is cut off at its worst moment: the run goes on from what is there."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.fakes.live_run import BATCHES, EMULATED, QUICK, LiveRun, check_whole
from transport.contracts.ledger import checkpoint_dirs

pytestmark = pytest.mark.chaos


def test_a_flipped_byte_in_the_newest_checkpoint_costs_batches_and_not_the_run(tmp_path: Path):
    with LiveRun(tmp_path, *QUICK, "run.batches=16") as run:
        run.wait_for_batch(9)
        run.interrupt(signal.SIGKILL)
        run.wait_for_end()
        run.wait_until_gone()
        newest = checkpoint_dirs(run.run_dir / "checkpoints")[0]
        weights = newest / "model.safetensors"
        raw = bytearray(weights.read_bytes())
        raw[len(raw) // 2] ^= 1
        weights.write_bytes(raw)
        run.start("--resume")
        check_whole(run, batches=16)
        told = rf"damaged checkpoint, going on from version \d+: {re.escape(str(newest.relative_to(tmp_path)))}"
        assert re.search(told, run.output)


@pytest.mark.parametrize(
    ("faults", "settings"),
    [({"train.checkpoint_placed": 4}, EMULATED), pytest.param({"train.model_removed": 1}, (), marks=pytest.mark.long)],
    ids=["checkpoint", "model"],
)
def test_a_kill_between_the_steps_of_the_last_save_is_made_good(
    tmp_path: Path, faults: dict[str, int], settings: tuple[str, ...]
):
    """The last version is saved twice, the second time with the end of the log: the first must not be lost before."""
    with LiveRun(tmp_path, *QUICK, *settings, "liveness.max_restarts=0", faults=faults) as run:
        assert run.wait_for_end() != 0
        assert run.died_at() == set(faults)
        run.wait_until_gone()
        names = [path.name for path in checkpoint_dirs(run.run_dir / "checkpoints")]
        assert names[0].startswith(f"step-{BATCHES}")
        run.start("--resume")
        assert run.wait_for_end() == 0, run.describe()
        assert run.audit().returncode == 0
        assert (run.run_dir / "model").exists() or settings
