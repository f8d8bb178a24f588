"""The engine's half of a profile: batches of constant size, prompts alone, versions that it takes.

It is measured as its worker uses it, through the protocol of ``generation/engine.py``: a group of n samples that are
forced to the same length decodes as a constant batch. Two lengths of one group differ by decode steps alone, so neither
the prefill nor the hand-over is in their difference.

Owns: which amounts of work the engine is given. Never: coefficients. Source: ours.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TypeAlias

import numpy as np

from transport.contracts.measurements import DecodeRun, PrefillRun
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, SamplingParams
from transport.process.clock import MonotonicClock
from transport.process.secret import ENGINE_KEY, read_secret
from workers.errors import ModelError
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest
from workers.weights.pull import WeightPuller

FIRST_TOKENS = 4
"""Of the shorter of two lengths: past the prefill and what the first step allocates."""
MOST_STEPS = 48
LONG_TOKENS = FIRST_TOKENS + MOST_STEPS
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
"""Of them, those that the engine has slots for."""
BESIDE_BATCH = 16
"""At most, for the company of the trainer."""
PROMPTS = (16, 96, 192, 320)
MOST_PASSES = 16
SAID_EVERY = 10
ENOUGH_S = 40.0
"""After one pass: with a large model that is all, with a small one there are several."""
TOKEN_ID = 5
"""Exists in every vocabulary; which token it is does not change what computing it takes."""
Shape: TypeAlias = tuple[tuple[int, ...], int, int]
"""(tokens of each prompt, samples of all together, tokens of each sample). Prompts of different lengths show what the
shorter ones take beside the longer ones."""


def engine_of(settings: Settings, directory: Path) -> GenerationEngine:
    """The engine that ``generation.engine`` names, without a run around it."""
    generation = settings.generation
    if generation.engine == "emulated":
        from workers.generation.emulated import EmulatedEngine

        return EmulatedEngine(settings.emulated, generation.slots, MonotonicClock())
    if generation.engine == "embedded":
        from workers.generation.embedded.engine import EmbeddedEngine, EmbeddedSettings

        return EmbeddedEngine(EmbeddedSettings.of(generation, directory), MonotonicClock())
    from workers.commands.build import ServerChoice, server_engine

    log = Path(tempfile.gettempdir()) / f"streamrl-profile-{generation.engine}-{os.getpid()}.log"
    choice = ServerChoice(
        url=generation.engine_url,
        key=read_secret(os.environ, ENGINE_KEY),
        command=(*generation.server_command,),
        args=(*generation.server_args,),
    )
    return server_engine(settings, directory, log, False, choice)


class EngineProfile:
    """Measures one engine that has been started. say: hears of progress."""

    def __init__(self, engine: GenerationEngine, capacity: int, max_context: int, say: Callable[[str], None]) -> None:
        self._engine = engine
        self._batches = [batch for batch in BATCHES if batch <= capacity]
        self.prompts = [tokens for tokens in PROMPTS if tokens + LONG_TOKENS <= max_context]
        self._say = say
        self._numbers = itertools.count()

    async def seconds(self, shape: Shape) -> float:
        """From the admission of the groups to the last end of a sample. Raises ModelError."""
        prompts, batch, tokens = shape
        for prompt_tokens in prompts:
            self._engine.submit(self._request(prompt_tokens, [tokens] * (batch // len(prompts))))
        ended: list[Completion] = []
        while len(ended) < batch // len(prompts) * len(prompts):
            for result in await self._engine.results():
                if not isinstance(result, Completion):
                    raise ModelError(f"the engine could not answer a prompt of the profile: {result.reason}")
                ended.append(result)
        return max(completion.engine_s for completion in ended)

    def _request(self, prompt_tokens: int, lengths: Sequence[int]) -> GenerationRequest:
        number = next(self._numbers)
        # Prompts differ, so that no engine answers one from its cache.
        prompt = np.full(prompt_tokens, TOKEN_ID, dtype=np.int32)
        prompt[: min(4, prompt_tokens)] = [1 + number % 7, 1 + number // 7 % 7, 1 + number // 49 % 7, 3][:prompt_tokens]
        return GenerationRequest(
            group_id=GroupId(f"profile/{number}"),
            prompt_ids=prompt,
            samples=tuple(range(len(lengths))),
            sampling=SamplingParams(max_new_tokens=max(lengths), temperature=1.0, ignore_eos=True, seed=number),
            limits=tuple(lengths),
        )

    async def runs(self) -> tuple[list[DecodeRun], list[PrefillRun]]:
        """Every batch with every prompt length that fits, and prompts alone.

        All are measured in turn, then all again while there is time, and the median of each counts: what else the
        machine does comes in bursts, and runs will meet it, too.
        """
        alone = [(tokens,) for tokens in self.prompts]
        mixed = (self.prompts[0], self.prompts[-1])
        batches = [(prompts, batch) for batch in self._batches for prompts in (*alone, mixed) if batch >= len(prompts)]
        shapes = [(prompts, batch, tokens) for prompts, batch in batches for tokens in (FIRST_TOKENS, LONG_TOKENS)]
        shapes += [(prompts, 1, 1) for prompts in alone]
        seconds = await self._medians(shapes)
        decode = [
            DecodeRun(
                batch=batch,
                context_tokens=batch * (fmean(prompts) + FIRST_TOKENS),
                padded_tokens=float(batch * (max(prompts) + FIRST_TOKENS)),
                steps=MOST_STEPS,
                seconds=max(1e-9, seconds[prompts, batch, LONG_TOKENS] - seconds[prompts, batch, FIRST_TOKENS]),
            )
            for prompts, batch in batches
        ]
        return decode, [PrefillRun(tokens=prompts[0], seconds=seconds[prompts, 1, 1]) for prompts in alone]

    async def beside(self) -> float:
        """Seconds of one batch, for comparisons with itself."""
        batch = max(batch for batch in self._batches if batch <= BESIDE_BATCH)
        return await self.seconds(((self.prompts[0],), batch, LONG_TOKENS))

    async def _medians(self, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Seconds of each."""
        measured: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        started_s = time.perf_counter()
        for passed in range(MOST_PASSES):
            if passed and time.perf_counter() - started_s > ENOUGH_S:
                break
            if passed:
                self._say(f"  all of them again ({passed + 1}), {time.perf_counter() - started_s:.0f} s so far")
            for done, shape in enumerate(shapes):
                if not passed and done % SAID_EVERY == 0:
                    spent_s = time.perf_counter() - started_s
                    self._say(f"  {done} of {len(shapes)} measured in {spent_s:.0f} s; batches of {shape[1]}")
                measured[shape].append(await self.seconds(shape))
        return {shape: median(seconds) for shape, seconds in measured.items()}


async def load_seconds(engine: GenerationEngine, manifest: WeightManifest) -> float:
    """A published version into the engine: pulled, checked, loaded."""
    started_s = time.perf_counter()
    puller = WeightPuller()
    opened = puller.pull(manifest)
    tensors = await asyncio.to_thread(opened.__enter__)
    try:
        await engine.load_weights(manifest.weights, tensors)
    finally:
        del tensors
        opened.__exit__(None, None, None)
    return time.perf_counter() - started_s
