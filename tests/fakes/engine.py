"""A generation engine whose samples end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import numpy as np
import torch

from transport.contracts.types import FinishReason, GroupId, Segment, VersionSpan, WeightIdentity
from workers.generation.engine import (
    BASE_WEIGHTS,
    Completion,
    EngineFailure,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Progress,
    Result,
    SampleKey,
)


class FakeEngine:
    """Records what it is told. ``submitted`` wakes a test that waits for a request."""

    def __init__(self, capacity: int = 4) -> None:
        self.capacity = capacity
        self.requests: list[GenerationRequest] = []
        self.aborted: list[tuple[GroupId, int]] = []
        self.loaded: list[tuple[WeightIdentity, dict[str, torch.Tensor]]] = []
        self.load_error: Exception | None = None
        self.full_precision: list[str] = []
        self.closed = False
        self.got: list[Progress] = []
        self.submitted = asyncio.Condition()
        self.weights = BASE_WEIGHTS
        self._outbox: asyncio.Queue[Completion | EngineFailure | Exception] = asyncio.Queue()
        self._wakers: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        return EngineInfo(name="fake", capacity=self.capacity, max_context=100, vocab_size=50)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(request)
        waker = asyncio.create_task(self._wake())
        self._wakers.add(waker)
        waker.add_done_callback(self._wakers.discard)

    async def _wake(self) -> None:
        async with self.submitted:
            self.submitted.notify_all()

    async def wait_submitted(self, count: int) -> list[GenerationRequest]:
        async with asyncio.timeout(30), self.submitted:
            await self.submitted.wait_for(lambda: len(self.requests) >= count)
        return self.requests

    def finish(
        self,
        request: GenerationRequest,
        sample: int,
        *,
        reason: FinishReason = FinishReason.STOP,
        segments: tuple[Segment, ...] = (),
    ) -> None:
        """End one sample with as many tokens as its number says, plus one."""
        tokens = sample + 1
        completion = Completion(
            group_id=request.group_id,
            sample=sample,
            attempt=request.attempt,
            response_ids=np.arange(tokens, dtype=np.int32),
            logprobs=-np.arange(tokens, dtype=np.float32),
            finish_reason=reason,
            spans=(VersionSpan(start=0, end=tokens, weights=self.weights),),
            queued_s=0.5,
            engine_s=1.5,
            segments=segments,
        )
        self._outbox.put_nowait(completion)

    def give(self, completion: Completion) -> None:
        self._outbox.put_nowait(completion)

    def fail(self, request: GenerationRequest, samples: tuple[int, ...], *, retryable: bool = True) -> None:
        self._outbox.put_nowait(request.failure(samples, "out of luck", retryable=retryable))

    def crash(self, error: Exception) -> None:
        self._outbox.put_nowait(error)

    async def results(self) -> list[Result]:
        results = [await self._outbox.get()]
        while not self._outbox.empty():
            results.append(self._outbox.get_nowait())
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [result for result in results if not isinstance(result, Exception)]

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        self.aborted += groups

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """What the test put into ``got``, beyond what is known."""
        return [one for one in self.got if one.end > known.get(one.key, 0)]

    async def use_full_precision(self, reason: str) -> None:
        self.full_precision.append(reason)

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append((weights, {name: tensor.clone() for name, tensor in tensors.items()}))
        self.weights = weights

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, busy_s=0.0, tokens=0)

    async def close(self) -> None:
        self.closed = True
