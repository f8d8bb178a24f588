"""Processes for launchers to start, and the settings of their run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from orchestrator.config.load import Resolved, resolve
from orchestrator.launch.launchers.base import Launcher, ProcessSpec, Resources
from transport.contracts.types import WorkerKind

WORKER = ProcessSpec(
    name="generate-1",
    argv=["worker", "generate"],
    env={"K": "v"},
    kind=WorkerKind.GENERATE,
    resources=Resources(cpus=2, memory_mib=512),
)
RANKS = ProcessSpec(
    name="train-0", argv=["worker", "train"], kind=WorkerKind.TRAIN, ranks=2, resources=Resources(gpus=1)
)


def configured(*overrides: str) -> Resolved:
    return resolve("tiny", [], ["run.name=mine", *overrides], {})


IMAGE = ("launcher.kind=kubernetes", "launcher.image=registry/streamrl:1", "tensors.host=0.0.0.0")

LIMIT_S = 60.0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 what another process or thread does wakes no task
            await asyncio.sleep(0.02)


L = TypeVar("L", bound=Launcher)


@asynccontextmanager
async def opened(launcher: L) -> AsyncIterator[L]:
    """Closed at the end, whatever a test found."""
    await launcher.open(resume=False)
    try:
        yield launcher
    finally:
        await launcher.close()
