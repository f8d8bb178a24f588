"""``streamrl-worker profile``: how long a live engine and a live trainer take for known amounts of work.

The engine is measured as its worker uses it, through the protocol of ``generation/engine.py``: a group of n samples
that are forced to the same length decodes as a constant batch. Two lengths of one group differ by decode steps alone,
so neither the prefill nor the hand-over is in their difference.

Owns: which amounts are measured. Never: coefficients. Source: StreamRL sec. 4.2 (profiles before the run); ours: how.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from transport.clock import MonotonicClock
from transport.measurements import DecodeRun, Measurements, PrefillRun, TrainRun
from transport.messages import WeightManifest
from transport.settings import Settings
from transport.types import GroupId, SamplingParams, row_id
from workers.errors import ModelError
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest
from workers.generation.weights import WeightPuller
from workers.trainer.samples import PromptGroup, TrainingSample

if TYPE_CHECKING:
    from workers.trainer.policy_learner import PolicyLearner

FIRST_TOKENS = 4
"""Of the shorter of two lengths: past the prefill and what the first step allocates."""
MOST_STEPS = 48
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
"""Of them, those that the engine has slots for."""
PROMPTS = (16, 96, 192, 320)
MOST_PASSES = 8
ENOUGH_S = 40.0
"""After one pass: with a large model that is all, with a small one there are several."""
REPEATS = 3
"""Of each of the trainer's measurements."""
TRAIN_SHAPES = (
    (1, 32, 2, 32),
    (1, 32, 4, 64),
    (1, 64, 4, 192),
    (2, 32, 4, 32),
    (2, 32, 4, 128),
    (4, 32, 4, 64),
    (4, 64, 4, 192),
    (8, 64, 4, 64),
    (8, 64, 4, 192),
)
"""(groups, prompt tokens, samples of each, response tokens) of a micro-batch; none is past ``micro_batch_tokens``."""
TOKEN_ID = 5
"""Exists in every vocabulary; which token it is does not change what computing it takes."""
Shape: TypeAlias = tuple[int, int, int]
TrainShape: TypeAlias = tuple[int, int, int, int]
ANSWER_S = 900.0
"""All batches together may take so long; a model of 135M on one core takes three minutes."""


def engine_of(settings: Settings, directory: Path) -> GenerationEngine:
    """The engine that ``generation.engine`` names, without a run around it."""
    generation = settings.generation
    if generation.engine == "replay":
        from workers.generation.replay import ReplayEngine

        return ReplayEngine(settings.replay, generation.slots, MonotonicClock())
    if generation.engine == "embedded":
        from workers.generation.embedded import EmbeddedEngine, EmbeddedSettings

        return EmbeddedEngine(EmbeddedSettings.of(generation, directory), MonotonicClock())
    from workers.build import ServerChoice, server_engine

    log = Path(tempfile.gettempdir()) / f"streamrl-profile-{generation.engine}-{os.getpid()}.log"
    choice = ServerChoice(
        url=generation.engine_url, command=(*generation.server_command,), args=(*generation.server_args,)
    )
    return server_engine(settings, directory, log, False, choice)


class EngineProfile:
    """Measures one engine that has been started."""

    def __init__(self, engine: GenerationEngine, capacity: int, max_context: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._max_context = max_context
        self._numbers = itertools.count()

    async def seconds(self, prompt_tokens: int, lengths: Sequence[int]) -> float:
        """From the admission of a group with these forced lengths to its last end. Raises ModelError."""
        number = next(self._numbers)
        # Prompts differ, so that no engine answers one from its cache.
        prompt = np.full(prompt_tokens, TOKEN_ID, dtype=np.int32)
        prompt[: min(4, prompt_tokens)] = [1 + number % 7, 1 + number // 7 % 7, 1 + number // 49 % 7, 3][:prompt_tokens]
        request = GenerationRequest(
            group_id=GroupId(f"profile/{number}"),
            prompt_ids=prompt,
            samples=tuple(range(len(lengths))),
            sampling=SamplingParams(max_new_tokens=max(lengths), temperature=1.0, ignore_eos=True, seed=number),
            limits=tuple(lengths),
        )
        self._engine.submit(request)
        ended: list[Completion] = []
        while len(ended) < len(lengths):
            for result in await self._engine.results():
                if not isinstance(result, Completion):
                    raise ModelError(f"the engine could not answer a prompt of the profile: {result.reason}")
                ended.append(result)
        return max(completion.engine_s for completion in ended)

    async def runs(self) -> tuple[list[DecodeRun], list[PrefillRun]]:
        """Every batch with every prompt length that fits, and prompts alone.

        All are measured in turn, then all again while there is time, and the median of each counts: what else the
        machine does comes in bursts, and runs will meet it, too.
        """
        prompts = [tokens for tokens in PROMPTS if tokens + MOST_STEPS + FIRST_TOKENS <= self._max_context]
        batches = [batch for batch in BATCHES if batch <= self._capacity]
        long = FIRST_TOKENS + MOST_STEPS
        shapes = [(prompt, batch, tokens) for batch in batches for prompt in prompts for tokens in (FIRST_TOKENS, long)]
        shapes += [(prompt, 1, 1) for prompt in prompts]
        seconds = await self._medians(shapes)
        decode = [
            DecodeRun(
                batch=batch,
                context_tokens=float(batch * (prompt + FIRST_TOKENS)),
                steps=MOST_STEPS,
                seconds=max(1e-9, seconds[prompt, batch, long] - seconds[prompt, batch, FIRST_TOKENS]),
            )
            for batch in batches
            for prompt in prompts
        ]
        return decode, [PrefillRun(tokens=prompt, seconds=seconds[prompt, 1, 1]) for prompt in prompts]

    async def _medians(self, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Seconds of each (prompt tokens, samples, tokens of each)."""
        measured: dict[Shape, list[float]] = {shape: [] for shape in shapes}
        started_s = time.perf_counter()
        for passed in range(MOST_PASSES):
            if passed and time.perf_counter() - started_s > ENOUGH_S:
                break
            for shape in shapes:
                prompt, batch, tokens = shape
                measured[shape].append(await self.seconds(prompt, [tokens] * batch))
        return {shape: median(seconds) for shape, seconds in measured.items()}


def samples_of(shape: TrainShape, number: int) -> PromptGroup:
    """One of the groups to train, every sample with a gradient."""
    _, prompt_tokens, num_samples, response_tokens = shape
    group_id = GroupId(f"profile/{number}")
    responses: NDArray[np.int32] = np.full(response_tokens, TOKEN_ID, dtype=np.int32)
    return PromptGroup(
        group_id=group_id,
        prompt_ids=np.full(prompt_tokens, TOKEN_ID, dtype=np.int32),
        samples=[
            TrainingSample(
                row_id=row_id(group_id, sample),
                response_ids=responses,
                rollout_logprobs=np.full(response_tokens, -1.0, dtype=np.float32),
                advantage=1.0 if sample % 2 else -1.0,
            )
            for sample in range(num_samples)
        ],
    )


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def train_runs(learner: PolicyLearner, max_tokens: int) -> Iterator[TrainRun]:
    """Each shape of at most ``max_tokens``, in turn and again, the median of each; the first call warms up."""
    shapes = [shape for shape in TRAIN_SHAPES if tokens_of(shape) <= max_tokens] or [TRAIN_SHAPES[0]]
    batches = [[samples_of(shape, number) for number in range(shape[0])] for shape in shapes]
    learner.accumulate(batches[0])
    passes = [[timed(partial(learner.accumulate, batch)) for batch in batches] for _ in range(REPEATS)]
    for shape, seconds in zip(shapes, zip(*passes, strict=True), strict=True):
        groups, prompt, num_samples, response = shape
        yield TrainRun(
            tokens=tokens_of(shape),
            squared_tokens=float(groups * num_samples * (prompt + response) ** 2),
            seconds=median(seconds),
        )


def tokens_of(shape: TrainShape) -> int:
    """Packed: prompts once, and responses."""
    groups, prompt, num_samples, response = shape
    return groups * (prompt + num_samples * response)


def optimizer_runs(learner: PolicyLearner) -> Iterator[float]:
    """Ends of mini-batches."""
    group = samples_of(TRAIN_SHAPES[0], 0)
    for batch in range(REPEATS + 1):
        learner.accumulate([group])
        num_tokens = len(group.samples) * TRAIN_SHAPES[0][3]
        yield timed(partial(learner.close, batch=batch, num_rows=len(group.samples), num_tokens=num_tokens))


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


async def profile(settings: Settings, directory: Path, say: Callable[[str], None]) -> Measurements:
    """Measure the engine and the trainer that ``settings`` name. Raises ModelError."""
    engine = engine_of(settings, directory)
    try:
        info = await engine.start()
        say(f"decode steps of the {info.name} engine, {info.capacity} slots")
        measured = EngineProfile(engine, info.capacity, info.max_context)
        try:
            async with asyncio.timeout(ANSWER_S):
                await measured.seconds(PROMPTS[0], [FIRST_TOKENS])  # warms up
                decode, prefill = await measured.runs()
        except TimeoutError:
            raise ModelError(
                f"the batches of the profile took longer than {ANSWER_S:.0f} s: measure with fewer generation.slots"
            ) from None
        train, optimizer, publish, load = await _trained(settings, directory, engine, say)
    finally:
        await engine.close()
    return Measurements(
        model=settings.model.path,
        engine=info.name,
        host=socket.gethostname(),
        decode=decode,
        prefill=prefill,
        train=train,
        optimizer_s=optimizer,
        publish_s=publish,
        load_s=load,
    )


async def _trained(
    settings: Settings, directory: Path, engine: GenerationEngine, say: Callable[[str], None]
) -> tuple[list[TrainRun], list[float], list[float], list[float]]:
    """The trainer's part; nothing where the settings have no real one."""
    if settings.trainer.engine != "torch" or settings.generation.engine == "replay":
        return [], [], [], []
    from workers.trainer.policy_learner import PolicyLearner
    from workers.trainer.publish import WeightPublisher

    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        learner = PolicyLearner(settings, directory, WeightPublisher("profile", Path(scratch)))
        try:
            learner.load(None)
            say("micro-batches, optimizer steps and versions of the trainer")
            train, optimizer = (
                list(train_runs(learner, settings.trainer.micro_batch_tokens)),
                [*optimizer_runs(learner)],
            )
            publish: list[float] = []
            load: list[float] = []
            for version in range(1, REPEATS + 2):
                started_s = time.perf_counter()
                manifest = await asyncio.to_thread(learner.publish, 1, version)
                publish.append(time.perf_counter() - started_s)
                load.append(await load_seconds(engine, manifest))
        finally:
            learner.retract()
    return train, optimizer, publish, load
