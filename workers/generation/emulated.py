"""The emulated engine: continuous batching in real time, without a model.

It "generates" the length that each request forces, one token a decode step, at the speed of the hardware it stands for,
by the model that the simulator uses (``transport/contracts/continuous_batching.py``): what waits, what fills a slot and
when each sample ends is as it would be there. Everything around it is the real system.

    submit, abort, load_weights ─► the next boundary between two decode steps ─► results, the boundary after it

Never: a model, torch, the broker. Invariant: a sample has exactly its length, and a timer that is late makes no other
sample late. Costs as in StreamRL fig. 6 (right).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transport.contracts.continuous_batching import ContinuousBatching, DecodeCost, Drafts, Sample
from transport.contracts.llms import BF16, Fp8
from transport.contracts.messages import WeightManifest
from transport.contracts.settings import EMULATED_LOGPROB, EmulatedSettings
from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from transport.rows.partial import NOTHING, clipped, joined
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    BASE_WEIGHTS,
    Completion,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
)
from workers.weights.pull import PulledTensors, WeightPuller

if TYPE_CHECKING:
    import torch

MAX_CONTEXT = 1 << 20
VOCABULARY = 16
"""Tokens 0..15 exist in every vocabulary, and differ enough that rewards of a group do."""
STREAM_STEPS = 8
"""Decode steps between two looks at a sample whose tokens are wanted as they come."""


class EmulatedEngine:
    """A GenerationEngine (engine.py). slots: samples decoded together.  weights: served from the start."""

    def __init__(
        self,
        costs: EmulatedSettings,
        slots: int,
        clock: Clock,
        *,
        weights: WeightIdentity = BASE_WEIGHTS,
        drafts: int = 0,
        fp8: Fp8 = BF16,
        kv_tokens: int = 0,
        max_context: int = 0,
    ) -> None:
        """drafts: tokens drafted for a sample and step, at most, as deep as it pays.  fp8: logprobs are off by
        ``costs.fp8_mismatch``; how quick its hardware is with fp8, ``costs`` say.  kv_tokens: of context that its
        memory holds, each sample like the longest, prompts included; 0: all slots.  max_context: tokens that no
        sample outgrows; 0: there is no limit."""
        scale = costs.time_scale
        self._cost = DecodeCost(
            fixed_s=costs.step_s * scale,
            sample_s=costs.sample_step_s * scale,
            prefill_token_s=costs.prefill_token_s * scale,
        ).limited(kv_tokens)
        self._kv_tokens = kv_tokens
        self._load_s = costs.load_s * scale
        self._logprob = EMULATED_LOGPROB - (costs.fp8_mismatch if fp8 else 0.0)
        self._clock = clock
        self._batching = ContinuousBatching[GenerationRequest](self._cost, slots, max_context=max_context or math.inf)
        if drafts:
            self._batching.draft(Drafts(acceptance=costs.draft_acceptance, max_tokens=drafts), self._cost)
        self._batching.serve(weights)
        self._due_s, self._due_steps = math.inf, 0
        self._aborted: set[tuple[GroupId, int]] = set()
        self._arrived: tuple[WeightIdentity, asyncio.Future[None]] | None = None
        self._busy_s = 0.0
        self._tokens = 0
        self._results = ResultQueue()
        self._changed = asyncio.Event()

    async def start(self) -> EngineInfo:
        self._batching.at_s = self._clock.now_s()
        self._results.serving = asyncio.create_task(self._decode(), name="emulated")
        return EngineInfo(
            name="emulated",
            capacity=self._batching.slots,
            max_context=MAX_CONTEXT,
            vocab_size=VOCABULARY,
            kv_tokens=self._kv_tokens,
            kv_padded=self._cost.padded,
        )

    def submit(self, request: GenerationRequest) -> None:
        prompt_tokens = len(request.prompt_ids) if self._cost.prefill_token_s or self._kv_tokens else 0
        now_s = self._clock.now_s()
        for sample in request.samples:
            length = request.limit(sample)
            begun = request.begun.get(sample, NOTHING)
            spans = [(span.weights, span.end - span.start) for span in begun.spans]
            self._batching.submit(
                Sample(request, sample, prompt_tokens, length, now_s, generated=len(begun), spans=spans)
            )
        self._want_boundary()

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        self._aborted |= set(groups)
        self._want_boundary()

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        batching, found = self._batching, list[Progress]()
        steps = max(0, batching.steps_until(self._clock.now_s()) - 1) if batching.running else 0  # those that are done
        retracted = [(sample, sample.spans) for _, _, sample in batching.waiting if sample.admitted_s is not None]
        for sample, weights in (*batching.so_far(min(steps, (batching.next_steps() or 1) - 1)), *retracted):
            spans, request = version_spans(weights), sample.request
            key = (*request.key, sample.sample)
            start, end = known.get(key, 0), spans[-1].end if spans else 0
            if end > start:
                found.append(
                    Progress(
                        key=key,
                        start=start,
                        token_ids=_tokens(sample, end)[start:],
                        logprobs=np.full(end - start, self._logprob, dtype=np.float32),
                        spans=clipped(spans, start, end),
                    )
                )
        return found

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Decoding stands still for ``load_s``; running samples then go on under the new weights."""
        taken = asyncio.get_running_loop().create_future()
        self._arrived = weights, taken
        self._want_boundary()
        await self._results.until(taken)
        await asyncio.sleep(self._load_s)

    async def use_full_precision(self, reason: str) -> None:
        """Of what ends from now on the logprobs are right."""
        self._logprob = EMULATED_LOGPROB

    def load(self) -> EngineLoad:
        batching = self._batching
        running_s = max(0.0, min(self._clock.now_s(), self._due_s) - batching.at_s) if batching.running else 0.0
        return EngineLoad(
            running=len(batching.running),
            waiting=len(batching.waiting),
            busy_s=self._busy_s + running_s,
            tokens=self._tokens,
            kv_use=min(1.0, batching.held_tokens / self._kv_tokens) if self._kv_tokens else 0.0,
            retracted_samples=batching.num_retracted,
        )

    async def close(self) -> None:
        await self._results.end_serving()

    def _want_boundary(self) -> None:
        """Something waits for the end of the running step, unless a boundary is planned before it."""
        steps = self._batching.steps_until(self._clock.now_s())
        at_s = self._batching.boundary_s(steps)
        if at_s < self._due_s:
            self._due_s, self._due_steps = at_s, steps
            self._changed.set()

    async def _decode(self) -> None:
        """Pass every boundary at its time, forever."""
        while True:
            self._changed.clear()
            while self._due_s <= self._clock.now_s():
                self._pass_boundary()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(self._due_s) else self._due_s - self._clock.now_s()):
                    await self._changed.wait()

    def _pass_boundary(self) -> None:
        """Samples end, what was aborted leaves, weights are taken, slots are filled, the next boundary is planned."""
        batching = self._batching
        self._busy_s += self._due_s - batching.at_s if self._due_steps else 0.0
        for ended in batching.advance(self._due_steps, self._due_s):
            self._complete(ended, FinishReason.LENGTH)
        self._stop_aborted()
        if self._arrived is not None:
            (weights, taken), self._arrived = self._arrived, None
            batching.pause(self._load_s)
            batching.serve(weights)
            if not taken.done():
                taken.set_result(None)
        batching.admit()
        following = batching.next_steps()
        if following is not None and self._tell():
            following = min(following, STREAM_STEPS)
        self._due_steps = following or 0
        self._due_s = math.inf if following is None else batching.boundary_s(following)

    def _tell(self) -> bool:
        """What is there of samples whose tokens are wanted as they come. Returns whether there is one that runs."""
        streamed = [one for _, _, one in self._batching.running if one.request.on_tokens is not None]
        for one in streamed:
            self._tell_of(one, one.generated + self._batching.steps - one.start_step)
        return bool(streamed)

    def _tell_of(self, sample: Sample[GenerationRequest], tokens: int) -> None:
        if (tell := sample.request.on_tokens) is not None and tokens:
            tell(0, _tokens(sample, tokens).tolist(), [self._logprob] * tokens)

    def _stop_aborted(self) -> None:
        if not self._aborted:
            return
        for stopped in self._batching.remove(lambda request: request.key in self._aborted):
            if stopped.admitted_s is None:
                self._results.put(stopped.request.failure((stopped.sample,), ABORTED_UNSTARTED))
            else:
                self._complete(stopped, FinishReason.ABORT)
        self._aborted.clear()

    def _complete(self, ended: Sample[GenerationRequest], reason: FinishReason) -> None:
        self._tell_of(ended, ended.generated)
        request, admitted_s = ended.request, ended.admitted_s or 0.0
        resumed = len(request.begun.get(ended.sample, NOTHING))
        self._tokens += ended.generated - resumed
        completion = Completion(
            group_id=request.group_id,
            sample=ended.sample,
            attempt=request.attempt,
            response_ids=_tokens(ended, ended.generated),
            logprobs=np.full(ended.generated, self._logprob, dtype=np.float32),
            finish_reason=reason,
            spans=version_spans(ended.spans),
            queued_s=max(0.0, admitted_s - ended.submitted_s),
            engine_s=max(0.0, self._clock.now_s() - admitted_s),
            resumed=resumed,
        )
        self._results.put(completion)


def _tokens(sample: Sample[GenerationRequest], count: int) -> NDArray[np.int32]:
    """Its first ``count``: the same on whichever engine and attempt."""
    seed = (sample.request.sampling.seed, sample.sample)
    return np.random.default_rng(seed).integers(0, VOCABULARY, size=count, dtype=np.int32)


def version_spans(weights: Iterable[tuple[WeightIdentity, int]]) -> tuple[VersionSpan, ...]:
    """Of (weights, tokens) that follow one another."""
    spans: tuple[VersionSpan, ...] = ()
    for one, tokens in weights:
        start = spans[-1].end if spans else 0
        spans = joined(spans, (VersionSpan(start=start, end=start + tokens, weights=one),))
    return spans


# --- the link ---------------------------------------------------------------------------------------------------------


class EmulatedLink:
    """A Puller (workers/weights): a version comes as to any worker, passed on or not, and ``transfer_s`` later (ours).

    computes: the engine behind it is a real one, and gets the tensors.

    Not modelled: that a link is shared, or a version longer; ``transfer_s`` is the same for every worker.
    """

    def __init__(self, transfer_s: float, puller: WeightPuller | None = None, *, computes: bool = False) -> None:
        self._transfer_s = transfer_s
        self._computes = computes
        self._puller = puller or WeightPuller()
        self.way = ""

    @contextmanager
    def pull(
        self, manifest: WeightManifest, *, given_up: threading.Event | None = None, hurry: threading.Event | None = None
    ) -> Iterator[Mapping[str, torch.Tensor]]:
        """Wait for the version and check its bytes; an emulated engine gets nothing, as it computes nothing."""
        (given_up or threading.Event()).wait(self._transfer_s)
        bring = self._puller.pull if self._computes else self._puller.opened
        with bring(manifest, given_up=given_up, hurry=hurry) as found:
            self.way = self._puller.way
            yield found if isinstance(found, PulledTensors) else {}
