"""Our programs as a person types them, from a directory of the test's; and a run's status, as curl gets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 150.0
"""Less than an integration test may take, so that its message names the command."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a process that finds our packages wherever it is started. more: over what this process has."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **(more or {})}


def orchestrator(
    *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``streamrl-orchestrator`` with ``arguments`` to its end. environ: as ``more`` of its environment."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=cwd,
        env=environment(environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def ask_status(run_dir: Path) -> dict[str, Any]:
    """What the orchestrator of a run answers to ``/status``. Raises OSError where nobody does."""
    address, key = ((run_dir / name).read_text().strip() for name in ("api.address", "api.secret"))
    request = Request(f"http://{address}/status", headers={"Authorization": f"Bearer {key}"})
    with urlopen(request, timeout=5.0) as answer:
        return json.load(answer)
