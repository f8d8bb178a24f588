"""The real vLLM for tests, where VLLM_VENV names an environment that has it and in which it runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VENV = os.environ.get("VLLM_VENV", "")

needs_vllm = pytest.mark.skipif(not VENV, reason="VLLM_VENV does not name an environment with vLLM in it")


def command() -> tuple[str, ...]:
    """How to start the real server; the engine adds the model, the port and what it needs."""
    python = str(Path(VENV) / "bin" / "python")
    launch = ["env", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1"]
    return (*launch, python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager")
