"""The Slurm of several nodes that ``sinfo`` reaches from here, if there is one."""

from __future__ import annotations

import shutil
import subprocess


def ask_slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def why_no_slurm() -> str:
    """ "" where there are two nodes or more that take jobs."""
    if not shutil.which("sinfo"):
        return "there is no Slurm on this machine"
    try:
        nodes = set(ask_slurm("sinfo", "-h", "-N", "-t", "idle,mixed,allocated", "-o", "%N").split())
    except (subprocess.SubprocessError, OSError) as error:
        return f"no Slurm answers: {error}"
    return "" if len(nodes) > 1 else f"Slurm has {len(nodes)} nodes that take jobs, two are needed"
