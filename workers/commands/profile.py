"""``streamrl-worker profile``: how long a live engine and a live trainer take for known amounts of work.

    the engine ──► the trainer, the engine idle ──► both at once

The engine is measured as its worker uses it, through the protocol of ``generation/engine.py``: a group of n samples
that are forced to the same length decodes as a constant batch. Two lengths of one group differ by decode steps alone,
so neither the prefill nor the hand-over is in their difference. A trainer that works beside an engine is a process of
its own, as in a run (``python -m workers.commands.profile MODEL_DIR``): it trains one micro-batch after another, writes
the seconds of each on a line, and ends with its standard input.

Owns: which amounts of work are measured, their order, and how long it may take. Never: coefficients.
Source: StreamRL sec. 4.2 (profiles before the run).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np

from transport.contracts.continuous_batching import DecodeRun, Measurements, PrefillRun, TrainRun, has_room
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import DEFAULT_CONTEXT, SERVER_ENGINES, Settings
from transport.contracts.types import GroupId, SamplingParams, row_id
from transport.process.programs import python_module, usable_cores
from transport.process.secret import ENGINE_KEY, read_secret
from workers.commands.build import ServerChoice, engine_of
from workers.errors import ModelError
from workers.generation.engine import Completion, EngineInfo, GenerationEngine, GenerationRequest, serving
from workers.models import choose_device
from workers.trainer.learner import PromptGroup, TrainingSample
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller

if TYPE_CHECKING:
    from workers.trainer.policy.policy_learner import PolicyLearner

ANSWER_S = 900.0
"""All batches together may take so long; a model of 135M on one core takes three minutes."""


async def profile(settings: Settings, directory: Path, say: Callable[[str], None]) -> Measurements:
    """Measure the engine and the trainer that ``settings`` name. Raises ModelError."""
    generation = settings.generation
    log = Path(tempfile.gettempdir()) / f"streamrl-profile-{generation.engine}-{os.getpid()}.log"
    server = ServerChoice(
        url=generation.engine_url,
        key=read_secret(os.environ, ENGINE_KEY) if generation.engine in SERVER_ENGINES else "",
        command=(*generation.server_command,),
        args=(*generation.server_args,),
    )
    undrafted = msgspec.structs.replace(generation, drafts=0)  # what a step takes is asked, and plans reckon drafts
    engine = engine_of(msgspec.structs.replace(settings, generation=undrafted), directory, log, False, server)
    async with serving(engine) as info:
        limit = min(info.max_context, generation.max_context or DEFAULT_CONTEXT)
        measured = EngineProfile(engine, info, limit, say)
        if not measured.prompts:
            needed = PROMPTS[0] + LONG_TOKENS
            raise ModelError(f"samples of {limit} tokens are too short to profile: {needed} are needed")
        say(f"the {info.name} engine decodes batches of up to {info.capacity}")
        async with _limited(ANSWER_S, "the batches of the profile", "fewer generation.slots"):
            await measured.seconds(((PROMPTS[0],), 1, FIRST_TOKENS))  # warms up
            decode, prefill = await measured.runs()
        found = Measurements(
            model=settings.model.path,
            engine=info.name,
            host=socket.gethostname(),
            config=json.loads((directory / "config.json").read_text()),
            kv_tokens=info.kv_tokens,
            kv_padded=info.kv_padded,
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
        embedded = generation.engine == "embedded"
        return msgspec.structs.replace(
            found,
            beside_training=decoding,
            beside_decoding=training,
            decode_share=_share_of_cores(generation.device, generation.threads) if embedded else 0.0,
            train_share=_share_of_cores(settings.trainer.device, settings.trainer.threads),
        )


def _share_of_cores(device: str, threads: int) -> float:
    """What a process that computes on ``device`` keeps busy of the cores that it may use; 0: a GPU computes."""
    return threads / usable_cores() if choose_device(device, "device").type == "cpu" else 0.0


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
    publish: list[float] = []
    load: list[float] = []
    with learner_of(settings, directory) as learner:
        say("the trainer: micro-batches, optimizer steps, versions")
        train = list(train_runs(learner, settings.trainer.micro_batch_tokens))
        optimizer = list(optimizer_runs(learner))
        for version in range(1, REPEATS + 2):
            started_s = time.perf_counter()
            manifest = await asyncio.to_thread(learner.publication(1, version))
            publish.append(time.perf_counter() - started_s)
            load.append(await load_seconds(engine, manifest))
    return msgspec.structs.replace(found, train=train, optimizer_s=optimizer, publish_s=publish, load_s=load)


# --- the engine -------------------------------------------------------------------------------------------------------

FIRST_TOKENS = 4
"""Of the shorter of two lengths: past the prefill and what the first step allocates."""
MOST_STEPS = 48
LONG_TOKENS = FIRST_TOKENS + MOST_STEPS
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
"""Of them, those that the engine has slots for."""
BESIDE_BATCH = 16
"""At most, for the company of the trainer."""
PROMPTS = (16, 96, 192, 320)
LONGER = 2.0
"""Beyond them each prompt is so many times the last, up to the longest sample of a run, where attention takes most. In
a few batches alone: their prefill takes longer than all the others together."""
MOST_PASSES = 16
SAID_EVERY = 10
ENOUGH_S = 40.0
"""After one pass: with a large model that is all, with a small one there are several."""
TOKEN_ID = 5
"""Exists in every vocabulary; which token it is does not change what computing it takes."""
Shape: TypeAlias = tuple[tuple[int, ...], int, int]
"""(tokens of each prompt, samples of all together, tokens of each sample). Prompts of different lengths show what the
shorter ones take beside the longer ones."""


class EngineProfile:
    """Measures one engine that has been started. say: hears of progress."""

    def __init__(
        self,
        engine: GenerationEngine,
        info: EngineInfo,
        max_context: int,
        say: Callable[[str], None],
    ) -> None:
        """max_context: tokens of the longest sample of a run."""
        self._engine, self._info = engine, info
        self._batches = [batch for batch in BATCHES if batch <= info.capacity]
        self._short = [tokens for tokens in PROMPTS if tokens + LONG_TOKENS <= max_context]
        self.prompts = self._short + longer_prompts(max_context)
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
        batches = self._decoded()
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

    def _decoded(self) -> list[tuple[tuple[int, ...], int]]:
        """(prompts, samples of all together): short prompts in every batch, long ones in three, where memory holds
        them."""
        short, mixed = [(tokens,) for tokens in self._short], (self._short[0], self._short[-1])
        few = sorted({self._batches[0], self._batches[len(self._batches) // 2], self._batches[-1]})
        wanted = [(prompts, batch) for batch in self._batches for prompts in (*short, mixed) if batch >= len(prompts)]
        wanted += [((tokens,), batch) for batch in few for tokens in self.prompts[len(self._short) :]]
        return [(prompts, batch) for prompts, batch in wanted if self._fits(prompts, batch)]

    def _fits(self, prompts: Sequence[int], batch: int) -> bool:
        """Whether memory holds the batch to its end; where it is padded, whether all of it is admitted at once."""
        kv_tokens = self._info.kv_tokens or float("inf")
        if self._info.kv_padded:
            return has_room(batch, batch * max(prompts), kv_tokens)
        return batch * (fmean(prompts) + LONG_TOKENS) <= kv_tokens

    async def beside(self) -> float:
        """Seconds of one batch, for comparisons with itself."""
        prompts = self.prompts[:1]
        batch = max(batch for batch in self._batches if batch <= BESIDE_BATCH and self._fits(prompts, batch))
        return await self.seconds(((*prompts,), batch, LONG_TOKENS))

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


def longer_prompts(max_context: int) -> list[int]:
    """Beyond PROMPTS, up to the one that fills a context of ``max_context`` tokens."""
    longest, prompts = max_context - LONG_TOKENS, list[int]()
    tokens = PROMPTS[-1] * LONGER
    while tokens < longest / LONGER:
        prompts.append(round(tokens))
        tokens *= LONGER
    return [*prompts, longest] if longest > PROMPTS[-1] else []


async def load_seconds(engine: GenerationEngine, manifest: WeightManifest) -> float:
    """A published version into the engine: pulled, checked, loaded."""
    started_s = time.perf_counter()
    opened = WeightPuller().pull(manifest)
    tensors = await asyncio.to_thread(opened.__enter__)
    try:
        await engine.load_weights(manifest.weights, tensors)
    finally:
        del tensors
        opened.__exit__(None, None, None)
    return time.perf_counter() - started_s


# --- the trainer ------------------------------------------------------------------------------------------------------

REPEATS = 3
"""Of each measurement, at most."""
TrainShape: TypeAlias = tuple[int, int, tuple[int, ...]]
TRAIN_SHAPES: tuple[TrainShape, ...] = (
    (1, 32, (32, 32)),
    (1, 32, (64, 64, 64, 64)),
    (1, 32, (16, 32, 64, 256)),
    (1, 64, (192, 192, 192, 192)),
    (2, 32, (32, 32, 32, 32)),
    (2, 32, (128, 128, 128, 128)),
    (2, 64, (64, 96, 160, 320)),
    (4, 32, (64, 64, 64, 64)),
    (4, 64, (192, 192, 192, 192)),
    (4, 32, (32, 64, 96, 320)),
    (8, 64, (64, 64, 64, 64)),
    (8, 64, (192, 192, 192, 192)),
)
"""(groups, prompt tokens, response tokens of each sample) of a micro-batch; none is past ``micro_batch_tokens``.
Samples of a group that differ in length show what attention takes for the shorter ones."""
BUSY_SHAPE: TrainShape = (2, 32, (128, 128, 128, 128))
"""Seconds for a model of 135M on one core: long enough to meet many decode steps, short enough to be repeated."""


@contextmanager
def learner_of(settings: Settings, directory: Path) -> Iterator[PolicyLearner]:
    """The trainer that ``settings`` name, loaded, without a run around it. directory: of the model."""
    from workers.algorithms.loss import Objective  # torch
    from workers.trainer.policy.policy_learner import PolicyLearner

    with tempfile.TemporaryDirectory(prefix="streamrl-profile-") as scratch:
        publisher = WeightPublisher("profile", Path(scratch))
        learner = PolicyLearner(settings, directory, publisher, objective=Objective())  # any takes as long
        try:
            learner.load(None)
            yield learner
        finally:
            learner.retract()


def micro_batch(shape: TrainShape) -> list[PromptGroup]:
    """The groups to train, every sample with a gradient."""
    num_groups, prompt_tokens, response_tokens = shape
    return [
        PromptGroup(
            group_id=GroupId(f"profile/{number}"),
            prompt_ids=np.full(prompt_tokens, TOKEN_ID, dtype=np.int32),
            samples=[
                TrainingSample(
                    row_id=row_id(GroupId(f"profile/{number}"), sample),
                    response_ids=np.full(tokens, TOKEN_ID, dtype=np.int32),
                    rollout_logprobs=np.full(tokens, -1.0, dtype=np.float32),
                    advantage=1.0 if sample % 2 else -1.0,
                )
                for sample, tokens in enumerate(response_tokens)
            ],
        )
        for number in range(num_groups)
    ]


def tokens_of(shape: TrainShape) -> int:
    """Packed: prompts once, and responses."""
    groups, prompt, responses = shape
    return groups * (prompt + sum(responses))


def timed(work: Callable[[], object]) -> float:
    """Seconds until it is done, also on a GPU, whose work goes on when the call has returned."""
    import torch

    started_s = time.perf_counter()
    work()
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):  # by this process
            torch.cuda.synchronize(index)
    return time.perf_counter() - started_s


def train_runs(learner: PolicyLearner, max_tokens: int) -> Iterator[TrainRun]:
    """Each shape of at most ``max_tokens``, in turn and again, the median of each; the first call warms up."""
    shapes = [shape for shape in TRAIN_SHAPES if tokens_of(shape) <= max_tokens] or [TRAIN_SHAPES[0]]
    batches = [micro_batch(shape) for shape in shapes]
    learner.accumulate(batches[0])
    started_s = time.perf_counter()
    passes: list[list[float]] = []
    while len(passes) < REPEATS and (not passes or time.perf_counter() - started_s < ENOUGH_S):
        passes.append([timed(partial(learner.accumulate, batch)) for batch in batches])
    for shape, seconds in zip(shapes, zip(*passes, strict=True), strict=True):
        groups, prompt, responses = shape
        yield TrainRun(
            tokens=tokens_of(shape),
            squared_tokens=float(groups * sum((prompt + response) ** 2 for response in responses)),
            padded_tokens=float(groups * len(responses) * (prompt + max(responses)) ** 2),
            seconds=median(seconds),
        )


def optimizer_runs(learner: PolicyLearner) -> Iterator[float]:
    """Ends of mini-batches."""
    groups, lengths = micro_batch(TRAIN_SHAPES[0]), TRAIN_SHAPES[0][2]
    for batch in range(REPEATS + 1):
        learner.accumulate(groups)
        yield timed(partial(learner.close, batch=batch, num_rows=len(lengths), num_tokens=sum(lengths)))


# --- both at once -----------------------------------------------------------------------------------------------------

TURNS = 3
MICRO_BATCHES = 3
"""Of a turn, at least; the one in which the other side begins or ends does not count."""
TURN_S = 1.5
LIMIT_S = 600.0
END_S = 60.0
"""A trainer finishes its micro-batch before it ends."""


class BusyTrainer:
    """A trainer that trains for ever, in a process of its own. Raises ModelError when it has ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.send_signal = process.send_signal

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
        *python_module("workers.commands.profile", str(directory)), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        await process.stdin.drain()
        yield BusyTrainer(process)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            try:
                await asyncio.wait_for(process.communicate(), END_S)
            except TimeoutError:
                process.kill()
                await process.communicate()


async def slowdowns(trainer: BusyTrainer, decode: Callable[[], Awaitable[float]]) -> tuple[list[float], list[float]]:
    """(decode seconds beside the trainer over without it, micro-batches beside decoding over without it), of each turn.

    decode: decodes a batch; its seconds.  Raises ModelError when the trainer ends, TimeoutError.
    """
    decoding: list[float] = []
    training: list[float] = []
    await trainer.micro_batch_s()  # it has loaded its model, and warmed up
    await decode()
    for _ in range(TURNS):
        beside_s: list[float] = []
        async with asyncio.TaskGroup() as group:  # while both go on
            beside = group.create_task(_micro_batches(trainer, TURN_S), name="trainer beside the engine")
            while not beside.done():
                beside_s.append(await decode())
        trained_alone_s = await _micro_batches(trainer, 0.0)
        trainer.send_signal(signal.SIGSTOP)
        alone_s = median([await decode() for _ in beside_s])
        trainer.send_signal(signal.SIGCONT)
        decoding.append(median(beside_s) / alone_s)
        training.append(beside.result() / trained_alone_s)
    return decoding, training


async def _micro_batches(trainer: BusyTrainer, seconds: float) -> float:
    """The median of MICRO_BATCHES, or of more where ``seconds`` are longer."""
    trained: list[float] = []
    started_s = time.perf_counter()
    await trainer.forget()
    while len(trained) < MICRO_BATCHES or time.perf_counter() - started_s < seconds:
        trained.append(await trainer.micro_batch_s())
    return median(trained)


def main() -> None:
    """The process of a busy trainer: a micro-batch again and again, a line with its seconds each."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with learner_of(settings, Path(sys.argv[1])) as learner:
        batch = micro_batch(BUSY_SHAPE)
        while not ended.is_set():
            print(timed(partial(learner.accumulate, batch)), flush=True)


if __name__ == "__main__":
    main()
