"""A whole run on one GPU, which its trainer and its engine share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fakes.command_line import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


@pytest.mark.parametrize("more", [(), ("generation.drafts=4", "trainer.offload=optimizer")], ids=["plain", "aided"])
@pytest.mark.timeout(240)
def test_it_learns(more: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator", "run", "--preset", "tiny", "--plain", "--dir", str(tmp_path)]
    options = [part for one in more for part in ("--set", one)]
    run = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "GPU 0" in run.stdout
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    rewards = [
        line["reward"] for line in map(json.loads, metrics.read_text(encoding="utf-8").splitlines()) if "reward" in line
    ]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
