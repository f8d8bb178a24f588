"""How much slower an engine and a trainer are while both work, where they share a machine's cores and memory.

Owns: the trainer's process, which is held (SIGSTOP) while the engine is measured alone, so that both are measured in
turn under the same load. Never: what either does. Source: ours; StreamRL's stages have GPUs of their own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

import msgspec

from transport.contracts.settings import Settings
from transport.process.spawn import python_module
from workers.errors import ModelError

TURNS = 3
MICRO_BATCHES = 3
"""Of a turn, at least; the one in which the other side begins or ends does not count."""
TURN_S = 1.5
LIMIT_S = 600.0
END_S = 60.0
"""A trainer that is told to end finishes its micro-batch first."""

Decode = Callable[[], Awaitable[float]]
"""Decodes a batch; its seconds."""


class BusyTrainer:
    """A trainer that trains for ever, in a process of its own. Raises ModelError when it has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def hold(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def micro_batch_s(self) -> float:
        """Seconds of the next micro-batch that ends."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ModelError("the trainer that was measured beside the engine has ended; see above")
        return float(line)

    async def forget(self) -> None:
        """What has ended by now, and what is being trained, began in the company of something else."""
        with suppress(TimeoutError):
            while True:
                await asyncio.wait_for(self.micro_batch_s(), timeout=0.001)
        await self.micro_batch_s()


@asynccontextmanager
async def busy_trainer(settings: Settings, directory: Path) -> AsyncIterator[BusyTrainer]:
    """Start it, and end it. directory: of the model."""
    process = await asyncio.create_subprocess_exec(
        *python_module("workers.profile.training", str(directory)), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        await process.stdin.drain()
        yield BusyTrainer(process)
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            await asyncio.wait_for(process.communicate(), END_S)
        except TimeoutError:
            process.kill()
            await process.communicate()


async def slowdowns(trainer: BusyTrainer, decode: Decode) -> tuple[list[float], list[float]]:
    """(decode seconds beside the trainer over without it, micro-batches beside decoding over without it), of each turn.

    Raises ModelError when the trainer ends, TimeoutError.
    """
    decoding: list[float] = []
    training: list[float] = []
    await trainer.micro_batch_s()  # it has loaded its model, and warmed up
    await decode()
    for _ in range(TURNS):
        beside_s, trained_s = await _together(trainer, decode)
        trained_alone_s = await _training_alone(trainer)
        trainer.hold()
        alone_s = median([await decode() for _ in beside_s])
        trainer.go_on()
        decoding.append(median(beside_s) / alone_s)
        training.append(trained_s / trained_alone_s)
    return decoding, training


async def _together(trainer: BusyTrainer, decode: Decode) -> tuple[list[float], float]:
    """(seconds of every batch, median of micro-batches), while both go on."""
    decoded: list[float] = []
    trained: list[float] = []
    started_s = time.perf_counter()

    async def train() -> None:
        await trainer.forget()
        while len(trained) < MICRO_BATCHES or time.perf_counter() - started_s < TURN_S:
            trained.append(await trainer.micro_batch_s())

    async with asyncio.TaskGroup() as group:
        training = group.create_task(train(), name="trainer beside the engine")
        while not training.done():
            decoded.append(await decode())
    return decoded, median(trained)


async def _training_alone(trainer: BusyTrainer) -> float:
    """Median seconds of micro-batches, with an idle engine."""
    await trainer.forget()
    return median([await trainer.micro_batch_s() for _ in range(MICRO_BATCHES)])
