"""A whole run on the real SGLang server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.live_run import LiveRun
from tests.fakes.sglang_servers import command, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(400)]

EXACT = 1e-3


def test_a_run_learns_from_samples_of_sglang_as_from_the_embedded_engine(tmp_path: Path) -> None:
    """With weights never apart, what is left of the mismatch is the two implementations."""
    settings = [
        'generation.engine="sglang"',
        f"generation.server_command={json.dumps(list(command()))}",
        "pipeline.max_staleness=0",
        "run.batches=8",
    ]
    with LiveRun(tmp_path, *settings) as run:
        assert run.wait_for_end(timeout_s=360) == 0, run.describe()
        lines = run.metrics()
        rewards = [line["reward"] for line in lines]
        assert len(lines) == 8
        assert sum(rewards[-2:]) > 2 * sum(rewards[:2]), f"it learns: {rewards}"
        assert max(line["logprob_mismatch_max"] for line in lines) < EXACT
        assert {line["staleness"] for line in lines} == {0.0}
        assert run.audit().returncode == 0
        assert "Uvicorn running" in (run.run_dir / "logs" / "sglang-generate-0.log").read_text(errors="replace")
        assert not run.survivors(), "no server outlives the run"
