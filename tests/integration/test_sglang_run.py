"""A whole run on the real SGLang server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.live_run import LiveRun
from tests.fakes.sglang_servers import command, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(400)]

EXACT = 1e-3


def settings_of(engine: str) -> list[str]:
    if engine == "embedded":
        return []
    return [
        'generation.engine="sglang"',
        f"generation.server_command={json.dumps(list(command('--random-seed', '1')))}",
    ]


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_a_run_learns_with_either_engine(tmp_path: Path, engine: str) -> None:
    """With weights never apart, what is left of the mismatch is the two implementations."""
    with LiveRun(tmp_path, "pipeline.max_staleness=0", "run.batches=16", *settings_of(engine)) as run:
        assert run.wait_for_end(timeout_s=360) == 0, run.describe()
        lines = run.metrics()
        rewards = [line["reward"] for line in lines]
        assert len(lines) == 16
        assert sum(rewards[-4:]) > 1.25 * sum(rewards[:4]), f"it learns: {rewards}"
        assert max(line["logprob_mismatch_max"] for line in lines) < EXACT
        assert {line["staleness"] for line in lines} == {0.0}
        assert run.audit().returncode == 0
        print("curve", engine, [round(reward, 3) for reward in rewards])
        if engine == "sglang":
            log = run.run_dir / "logs" / "sglang-generate-0.log"
            assert "fired up" in log.read_text(errors="replace")
        run.wait_until_gone()  # no server outlives the run; the kernel takes a moment to end one
