"""The emulated engine: continuous batching in real time, without a model.

It "generates" the length that each request forces, one token a decode step, at the speed of the hardware it stands for:
a step of ``n`` samples takes ``step_s + n * sample_step_s``, so what waits, what fills a slot and when each sample ends
is as it would be there. Everything around it is the real system.

    submit ─► waiting (priority, then arrival) ─► slots ─► one timer, for the next end of a sample ─► results

Owns: which samples hold a slot, and the passing of decode steps. Never: a model, torch, the broker. Invariant: between
two changes decode steps pass at a constant rate, so only the next end is waited for; a sample has exactly its length.
Source: ours, as ``orchestrator/sim/generation.py``; costs as in StreamRL fig. 6 (right).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transport.contracts.settings import EmulatedSettings
from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    BASE_WEIGHTS,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Result,
    ResultQueue,
)

if TYPE_CHECKING:
    import torch

MAX_CONTEXT = 1 << 20
VOCABULARY = 16
"""Tokens 0..15 exist in every vocabulary, and differ enough that rewards of a group do."""
LOGPROB = -1.0
"""Of every token: nobody trains on it."""
ROUNDING = 1e-6
"""Decode steps; a timer that wakes this early is on time."""


@dataclass(slots=True)
class _Sample:
    """A sample with a slot: it ends at decode step ``end_step`` of its engine. spans: (first token, weights)."""

    request: GenerationRequest
    sample: int
    length: int
    end_step: float
    queued_s: float
    started_s: float
    spans: list[tuple[int, WeightIdentity]]

    def tokens_at(self, step: float) -> int:
        """Tokens generated when the engine has done ``step`` steps."""
        return max(0, min(self.length, int(self.length - (self.end_step - step) + ROUNDING)))


@dataclass(slots=True)
class _Waiting:
    request: GenerationRequest
    sample: int
    queued_at_s: float


class ReplayEngine:
    """A GenerationEngine (engine.py). slots: samples decoded together.  weights: served from the start."""

    def __init__(
        self, costs: EmulatedSettings, slots: int, clock: Clock, *, weights: WeightIdentity = BASE_WEIGHTS
    ) -> None:
        self._costs = costs
        self._slots = slots
        self._clock = clock
        self._weights = weights
        self._waiting: list[tuple[float, int, _Waiting]] = []
        self._running: list[tuple[float, int, _Sample]] = []
        self._order = itertools.count()
        self._steps = 0.0
        self._at_s = 0.0
        self._stands_until_s = 0.0
        self._busy_s = 0.0
        self._tokens = 0
        self._results = ResultQueue()
        self._changed = asyncio.Event()

    async def start(self) -> EngineInfo:
        self._at_s = self._clock.now_s()
        self._results.serving = asyncio.create_task(self._decode(), name="emulated")
        return EngineInfo(name="emulated", capacity=self._slots, max_context=MAX_CONTEXT, vocab_size=VOCABULARY)

    def submit(self, request: GenerationRequest) -> None:
        queued_at_s = self._clock.now_s()
        for sample in request.samples:
            waiting = _Waiting(request, sample, queued_at_s)
            heapq.heappush(self._waiting, (-request.priority, next(self._order), waiting))
        self._changed.set()

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        self._pass_time()
        keys = frozenset(groups)
        for _, _, one in [entry for entry in self._waiting if entry[2].request.key in keys]:
            self._results.put(one.request.failure((one.sample,), ABORTED_UNSTARTED))
        self._waiting = [entry for entry in self._waiting if entry[2].request.key not in keys]
        for _, _, one in [entry for entry in self._running if entry[2].request.key in keys]:
            self._complete(one, one.tokens_at(self._steps), FinishReason.ABORT)
        self._running = [entry for entry in self._running if entry[2].request.key not in keys]
        heapq.heapify(self._waiting)
        heapq.heapify(self._running)
        self._changed.set()

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Decoding stands still for ``load_s``; running samples then go on under the new weights."""
        self._pass_time()
        self._stand(self._costs.load_s)
        self._weights = weights
        for _, _, one in self._running:
            one.spans.append((one.tokens_at(self._steps), weights))
        self._changed.set()
        await asyncio.sleep(self._costs.load_s * self._costs.time_scale)

    def load(self) -> EngineLoad:
        self._pass_time()
        return EngineLoad(
            running=len(self._running), waiting=len(self._waiting), busy_s=self._busy_s, tokens=self._tokens
        )

    async def close(self) -> None:
        if self._results.serving is not None:
            self._results.serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._results.serving

    # --- time ---------------------------------------------------------------------------------------------------------

    async def _decode(self) -> None:
        """End each sample at its time, fill the slots that it leaves, forever."""
        while True:
            self._changed.clear()
            self._pass_time()
            self._end_samples()
            self._fill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_next_end_s()):
                    await self._changed.wait()

    def _step_s(self) -> float:
        """Our seconds for one decode step of what runs now."""
        return (self._costs.step_s + len(self._running) * self._costs.sample_step_s) * self._costs.time_scale

    def _until_next_end_s(self) -> float | None:
        """None while nothing runs."""
        if not self._running:
            return None
        stands_s = max(0.0, self._stands_until_s - self._clock.now_s())
        return stands_s + max(0.0, self._running[0][0] - self._steps) * self._step_s()

    def _pass_time(self) -> None:
        """Do the decode steps since the last call; none past the end of a sample, which leaves its slot first."""
        now_s = self._clock.now_s()
        if not self._running:
            self._at_s = now_s
            return
        since_s, step_s = max(self._at_s, self._stands_until_s), self._step_s()
        if now_s <= since_s:
            return
        steps = min((now_s - since_s) / step_s, max(0.0, self._running[0][0] - self._steps))
        self._steps += steps
        self._busy_s += steps * step_s
        self._at_s = since_s + steps * step_s if self._due() else now_s

    def _due(self) -> bool:
        return bool(self._running) and self._running[0][0] <= self._steps + ROUNDING

    def _stand(self, seconds: float) -> None:
        """Nothing is decoded for so long (the emulated hardware's seconds)."""
        begins_s = max(self._stands_until_s, self._at_s)
        self._stands_until_s = begins_s + seconds * self._costs.time_scale

    # --- slots --------------------------------------------------------------------------------------------------------

    def _end_samples(self) -> None:
        """Let every sample go that has its tokens; a late timer makes none of the others late."""
        while self._due():
            while self._due():
                one = heapq.heappop(self._running)[2]
                self._complete(one, one.length, FinishReason.LENGTH)
            self._fill()
            self._pass_time()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            waiting = heapq.heappop(self._waiting)[2]
            request, length = waiting.request, waiting.request.limit(waiting.sample)
            if waiting.sample == request.samples[0]:
                self._stand(len(request.prompt_ids) * self._costs.prefill_token_s)
            now_s = self._clock.now_s()
            one = _Sample(
                request=request,
                sample=waiting.sample,
                length=length,
                end_step=self._steps + length,
                queued_s=now_s - waiting.queued_at_s,
                started_s=now_s,
                spans=[(0, self._weights)],
            )
            heapq.heappush(self._running, (one.end_step, next(self._order), one))

    def _complete(self, one: _Sample, tokens: int, reason: FinishReason) -> None:
        self._tokens += tokens
        completion = Completion(
            group_id=one.request.group_id,
            sample=one.sample,
            attempt=one.request.attempt,
            response_ids=_token_ids(one.request.sampling.seed, one.sample, tokens),
            logprobs=np.full(tokens, LOGPROB, dtype=np.float32),
            finish_reason=reason,
            spans=_spans(one.spans, tokens),
            queued_s=one.queued_s,
            engine_s=self._clock.now_s() - one.started_s,
        )
        self._results.put(completion)


def _token_ids(seed: int, sample: int, tokens: int) -> NDArray[np.int32]:
    """The same for a sample on whichever engine and attempt."""
    return np.random.default_rng((seed, sample)).integers(0, VOCABULARY, size=tokens, dtype=np.int32)


def _spans(starts: list[tuple[int, WeightIdentity]], tokens: int) -> tuple[VersionSpan, ...]:
    """Spans that cover ``[0, tokens)``: a version under which no token was sampled has none."""
    ends = [start for start, _ in starts[1:]] + [tokens]
    return tuple(
        VersionSpan(start=start, end=end, weights=weights)
        for (start, weights), end in zip(starts, ends, strict=True)
        if end > start
    )
