"""Of figure ``agents``: what the endpoint costs, and whether it encodes anything twice.

Conversations, all of as many turns of as many tokens, are held with one embedded engine through the endpoint, by a
harness with OpenAI's client in a process of its own (agents_harness.py). Then the same turns, with the ids that the
first ones had, are asked of the engine alone; each turn of a conversation when the one before has ended. The two take
turns, each with an engine of its own. Each time of the engine alone is compared with the mean of the two beside it, so
that a neighbour who comes or goes weighs on both; the ratio is the median.

There are as many conversations as slots. So a slot is empty while an answer and the next request travel, which is what
an endpoint costs; and none waits for a slot. With twice as many, the order in which turns arrive decides the figure: a
later turn goes first, so one conversation may wait until the others end and be alone then. That was a third more steps
for the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import msgspec
import numpy as np

from transport.contracts.settings import EndpointSettings, GenerationSettings
from transport.contracts.types import GroupId, SamplingParams
from transport.process.clock import MonotonicClock
from workers.endpoint.engine import SessionEngine
from workers.endpoint.http import EndpointServer
from workers.environments.encoder import ObservationEncoder
from workers.generation.embedded.engine import EmbeddedEngine
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest, Result, serving
from workers.models import model_cache, prepare_model, random_model

SLOTS = SESSIONS = 8
TURNS, TURN_TOKENS = 3, 32
ROUNDS = 5
LIMIT_S = 1800.0
MODEL, KEY = "policy", "the-key-of-the-bench"
GROUP = GroupId("0/0")
GENERATION = GenerationSettings(slots=SLOTS, dtype="float32", max_context=512)


class Recorded:
    """An engine whose turns end at their limit alone, and which keeps each with its result, by sample."""

    def __init__(self, inner: EmbeddedEngine) -> None:
        self._inner = inner
        self.turns: dict[int, list[tuple[GenerationRequest, list[int]]]] = defaultdict(list)
        self._asked: dict[GroupId, GenerationRequest] = {}

    def submit(self, request: GenerationRequest) -> None:
        request = replace(request, sampling=msgspec.structs.replace(request.sampling, ignore_eos=True))
        self._asked[request.group_id] = request
        self._inner.submit(request)

    async def results(self) -> list[Result]:
        results = await self._inner.results()
        for result in results:
            if isinstance(result, Completion):
                turn = self._asked[result.group_id], result.response_ids.tolist()
                self.turns[result.sample].append(turn)
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def endpoint_costs(model: str) -> dict[str, float]:
    """model: as of ``model.path``; random ones say tokens that no text is encoded to."""
    with tempfile.TemporaryDirectory(prefix="streamrl-endpoint-") as name:
        if model.startswith("random:"):
            directory = Path(name) / "model"
            random_model(model.removeprefix("random:"))(directory)
        else:
            directory = await asyncio.to_thread(prepare_model, model, cache_dir=model_cache(os.environ))
        through_s, direct_s, tokens, retokenised = list[float](), list[float](), 0, 0
        for number in range(ROUNDS + 1):
            files = Path(name) / str(number)
            files.mkdir()
            recorded, rows, took_s = await _through_endpoint(directory, files)
            through_s.append(took_s)
            tokens = sum(len(ids) for turns in recorded.turns.values() for _, ids in turns)
            retokenised += sum(_retokenised(recorded.turns[row.sample], row) for row in rows)
            print(f"endpoint {took_s:.1f} s", flush=True)
            if number < ROUNDS:
                direct_s.append(await _directly(directory, recorded))
                print(f"direct {direct_s[-1]:.1f} s", flush=True)
        ratios = [alone_s / mean(both) for alone_s, both in zip(direct_s, itertools.pairwise(through_s), strict=True)]
        print("ratios", *(f"{ratio:.3f}" for ratio in ratios), flush=True)
    return {
        "endpoint_over_direct": round(median(ratios), 3),
        "endpoint_tokens_s": round(tokens / median(through_s), 1),
        "endpoint_policy_tokens": tokens,
        "endpoint_retokenised": retokenised,
    }


def _retokenised(turns: list[tuple[GenerationRequest, list[int]]], row: Completion) -> int:
    """Tokens of the policy that the row, or the prompt of a later turn, has otherwise than they were sampled."""
    wrong, start, sampled = 0, 0, [token for _, ids in turns for token in ids]
    stored: list[int] = []
    for segment in row.segments:
        if segment.kind == "policy":
            stored += row.response_ids[start : segment.end].tolist()
        start = segment.end
    wrong += sum(a != b for a, b in zip(sampled, stored, strict=False)) + abs(len(sampled) - len(stored))
    for (earlier, ids), (later, _) in itertools.pairwise(turns):
        begins = [*earlier.prompt_ids.tolist(), *ids]
        wrong += sum(a != b for a, b in zip(begins, later.prompt_ids.tolist(), strict=False))
    return wrong


async def _through_endpoint(directory: Path, files: Path) -> tuple[Recorded, list[Completion], float]:
    recorded = Recorded(EmbeddedEngine(GENERATION, directory, MonotonicClock()))
    encoder = ObservationEncoder.of(directory, templated=True)
    settings = EndpointSettings(max_turn_tokens=TURN_TOKENS)
    sampling = SamplingParams(max_new_tokens=400)
    engine = SessionEngine(
        cast("GenerationEngine", recorded), encoder, settings, MonotonicClock(), model=MODEL, sampling=sampling
    )
    engine.listener = server = EndpointServer(
        engine, host="127.0.0.1", port=0, key=KEY, address_file=files / "0.address", key_file=files / "key"
    )
    opening = np.array(encoder.ids(encoder.prompt([{"role": "user", "content": "x"}]))[:1], np.int32)
    async with asyncio.timeout(LIMIT_S), serving(engine):
        engine.submit(GenerationRequest(group_id=GROUP, prompt_ids=opening, samples=range(SESSIONS), sampling=sampling))
        took_s = await _played(server.base_url)
        rows: list[Completion] = []
        while len(rows) < SESSIONS:
            rows += [one for one in await engine.results() if isinstance(one, Completion)]
    return recorded, rows, took_s


async def _played(base_url: str) -> float:
    """Seconds that the conversations took a harness (agents_harness.py)."""
    given = ["-m", "benchmarks.agents_harness", base_url, MODEL, str(SESSIONS), str(TURNS)]
    harness = await asyncio.create_subprocess_exec(
        sys.executable, *given, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await harness.communicate(KEY.encode())
    finally:
        if harness.returncode is None:
            harness.kill()
            await harness.wait()
    if harness.returncode:
        raise SystemExit(f"the harness ended with exit code {harness.returncode}")
    return float(said.split()[-1])


async def _directly(directory: Path, recorded: Recorded) -> float:
    """Seconds for the same turns."""
    left = {sample: [request for request, _ in turns] for sample, turns in recorded.turns.items()}
    engine = EmbeddedEngine(GENERATION, directory, MonotonicClock())
    async with asyncio.timeout(LIMIT_S), serving(engine):
        began_s, running = time.perf_counter(), len(left)
        for turns in left.values():
            engine.submit(turns.pop(0))
        while running:
            for result in await engine.results():
                assert isinstance(result, Completion), result
                if turns := left[result.sample]:
                    engine.submit(turns.pop(0))
                else:
                    running -= 1
        return time.perf_counter() - began_s
