"""Processes on this machine: children of this one, which the kernel ends with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.launch.launchers.base import ProcessSpec
from transport.process.programs import ending_with_this_process


class LocalLauncher:
    is_local = True

    async def open(self, *, resume: bool) -> None:
        """This machine is there."""

    async def start(self, spec: ProcessSpec, output: Path) -> asyncio.subprocess.Process:
        return await start_child(spec.argv, spec.env, output)

    async def pending(self) -> Mapping[str, str]:
        return {}

    async def close(self) -> None:
        """Children are ended by who started them."""


async def start_child(argv: Sequence[str], env: Mapping[str, str], output: Path) -> asyncio.subprocess.Process:
    """Start ``argv`` with ``env`` over this process's own environment, both its outputs appended to ``output``."""
    with output.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to pass on
            preexec_fn=ending_with_this_process(),
        )
