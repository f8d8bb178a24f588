"""``streamrl-worker profile``: how long a live engine and a live trainer take for known amounts of work.

    engine.py ──► training.py, the engine idle ──► beside.py, both at once

Owns: the order, and how long it may take. Never: coefficients. Source: StreamRL sec. 4.2 (profiles before the run).
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from transport.contracts.measurements import Measurements
from transport.contracts.settings import Settings
from workers.errors import ModelError
from workers.generation.engine import GenerationEngine, serving
from workers.profile import beside
from workers.profile.beside import busy_trainer, slowdowns
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
            _limited(beside.LIMIT_S, "engine and trainer at once", "a smaller model"),
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
