"""``streamrl-worker profile``: how long a live engine and a live trainer take for known amounts of work.

    engine.py ──► training.py, the engine idle ──► both at once

Owns: the order, and how long it may take. Never: coefficients. Source: StreamRL sec. 4.2 (profiles before the run).
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median

import msgspec

from transport.contracts.measurements import Measurements
from transport.contracts.settings import Settings
from transport.process.spawn import python_module
from workers.errors import ModelError
from workers.generation.engine import GenerationEngine, serving
from workers.profile.engine import FIRST_TOKENS, LONG_TOKENS, PROMPTS, EngineProfile, engine_of, load_seconds

ANSWER_S = 900.0
"""All batches together may take so long; a model of 135M on one core takes three minutes."""


async def profile(settings: Settings, directory: Path, say: Callable[[str], None]) -> Measurements:
    """Measure the engine and the trainer that ``settings`` name. Raises ModelError."""
    engine = engine_of(settings, directory)
    async with serving(engine) as info:
        measured = EngineProfile(engine, info.capacity, info.max_context, say)
        if not measured.prompts:
            needed = PROMPTS[0] + LONG_TOKENS
            raise ModelError(f"samples of {info.max_context} tokens are too short to profile: {needed} are needed")
        say(f"the {info.name} engine decodes batches of up to {info.capacity}")
        async with _limited(ANSWER_S, "the batches of the profile", "fewer generation.slots"):
            await measured.seconds(((PROMPTS[0],), 1, FIRST_TOKENS))  # warms up
            decode, prefill = await measured.runs()
        found = Measurements(
            model=settings.model.path,
            engine=info.name,
            host=socket.gethostname(),
            config=json.loads((directory / "config.json").read_text()),
            context_tokens=max(measured.prompts) + LONG_TOKENS,
            decode=decode,
            prefill=prefill,
        )
        if settings.trainer.engine != "torch" or settings.generation.engine == "emulated":
            return found  # there is no real trainer, or no engine that could take its weights
        found = await _with_trainer(found, settings, directory, engine, say)
        say("engine and trainer at once, then in turn")
        async with (
            _limited(LIMIT_S, "engine and trainer at once", "a smaller model"),
            busy_trainer(settings, directory) as trainer,
        ):
            decoding, training = await slowdowns(trainer, measured.beside)
        return msgspec.structs.replace(found, beside_training=decoding, beside_decoding=training)


@asynccontextmanager
async def _limited(seconds: float, what: str, instead: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ModelError(f"{what} took longer than {seconds:.0f} s: measure with {instead}") from None


async def _with_trainer(
    found: Measurements, settings: Settings, directory: Path, engine: GenerationEngine, say: Callable[[str], None]
) -> Measurements:
    """And what the trainer does, the engine idle."""
    from workers.profile.training import REPEATS, learner_of, optimizer_runs, train_runs

    publish: list[float] = []
    load: list[float] = []
    with learner_of(settings, directory) as learner:
        say("the trainer: micro-batches, optimizer steps, versions")
        train = list(train_runs(learner, settings.trainer.micro_batch_tokens))
        optimizer = list(optimizer_runs(learner))
        for version in range(1, REPEATS + 2):
            started_s = time.perf_counter()
            manifest = await asyncio.to_thread(learner.publish, 1, version)
            publish.append(time.perf_counter() - started_s)
            load.append(await load_seconds(engine, manifest))
    return msgspec.structs.replace(found, train=train, optimizer_s=optimizer, publish_s=publish, load_s=load)


# --- both at once -----------------------------------------------------------------------------------------------------

TURNS = 3
MICRO_BATCHES = 3
"""Of a turn, at least; the one in which the other side begins or ends does not count."""
TURN_S = 1.5
LIMIT_S = 600.0
END_S = 60.0
"""A trainer finishes its micro-batch before it ends."""

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
