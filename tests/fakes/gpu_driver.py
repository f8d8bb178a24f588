"""A GPU driver for machines that have none: an ``nvidia-smi`` that shows as many as a test asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from transport.process import gpus


class FakeDriver:
    """First on PATH; the locks of its GPUs lie in the test's directory."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script = directory / "nvidia-smi"
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
        monkeypatch.setenv(gpus.LOCKS_VARIABLE, str(directory / "locks"))
        monkeypatch.setattr(gpus, "_taken", [])
        for variable in (gpus.VISIBLE, gpus.SHARE_VARIABLE):
            monkeypatch.setenv(variable, "")  # so that what a test sets does not outlive it
            monkeypatch.delenv(variable)

    def __call__(self, count: int) -> None:
        """Show ``count`` GPUs from now on."""
        lines = "".join(f"echo GPU-{number:04d}, H100, 81559\n" for number in range(count))
        self._script.write_text(f"#!/bin/sh\n{lines}")
        self._script.chmod(0o755)
