"""Samples at an inference server: each is sent, in a task of its own, and what becomes of it is delivered.

    push ─► queue ─► gate ─► one request a sample, as many as the server runs at once ─► delivery, as each sample ends
                └◄─ sent again: withdrawn for an update, or at a server that was lost

Nothing is sent while the gate is closed, nor from the first connection that is cut or refused until the server answers
again, or another one is up. A sample fails only when it was at two servers when they were lost.

Owns: the queue, those tasks, how many samples fit, the labels of weights that are known. Never: weights; the server's
life. Invariant: a sample is sent under the label of what the server holds; every token of a completion is of weights
that are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from workers.errors import ServerAnswerError, ServerUnavailableError, ServerUnreachableError
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    BASE_WEIGHTS,
    Completion,
    EngineLoad,
    GenerationRequest,
    ResultQueue,
)
from workers.generation.server.client import BASE_LABEL, Chunk, SampleRequest, ServedSpan
from workers.generation.server.queue import SampleQueue, SentSample
from workers.generation.server.upkeep import ServerUpkeep

MAX_SENDINGS = 2
"""A sample that was at two servers when they were lost may be why."""
MAX_STRIKES = 8
"""Broken answers in a row, after which a server is as good as lost."""
SETTLE_S = 0.5
"""Before an update, for what was just sent to start: a few decode steps."""
STUCK_S = 3.0
"""A sample that has not started by then waits for memory: prompts take less."""
KNOWN_LABELS = 256
"""Versions that a running sample may have begun with."""


@dataclass(slots=True, kw_only=True)
class SenderCounters:
    """Cumulative. recomputed: samples that an update sent again although they had started.  tokens: of ended samples.
    cached_tokens: of prompts, taken from the server's cache.
    """

    recomputed: int = 0
    tokens: int = 0
    cached_tokens: int = 0


class SampleSender:
    """Of one engine. capacity: samples at once.  lost: why the server is, "" while it is not.  wake: set when the
    server should be looked at.
    """

    def __init__(self, server: ServerUpkeep, results: ResultQueue, capacity: int, clock: Clock) -> None:
        self._server = server
        self._results = results
        self._clock = clock
        self.counters = SenderCounters()
        self.capacity = capacity
        self.lost = ""
        self.wake = asyncio.Event()
        self._queue = SampleQueue(secrets.token_hex(4))
        self._known = {BASE_LABEL: BASE_WEIGHTS}
        self._fits = capacity
        self._gate = asyncio.Event()
        self._doubted = False
        self._moved = asyncio.Event()
        self._strikes = 0
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    def push(self, request: GenerationRequest) -> None:
        self._queue.push(request, self._clock.now_s())
        self.send()

    async def abort(self, keys: Collection[tuple[GroupId, int]]) -> None:
        """As GenerationEngine.abort."""
        self._results.put(*self._queue.take_out(keys))
        meant = [sent for sent in self._queue.sent.values() if sent.group.request.key in keys]
        for sent in meant:
            sent.aborted = True
        await self._call_off(meant)

    def load(self) -> EngineLoad:
        self._keep_time()
        sent, running = len(self._queue.sent), self._queue.num_started
        return EngineLoad(
            running=running,
            waiting=self._queue.num_waiting + sent - running,
            busy_s=self._busy_s,
            tokens=self.counters.tokens,
            capacity=self._fits,
            cached_tokens=self.counters.cached_tokens,
            kv_use=self._server.kv_use,
        )

    # --- the gate -----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._gate.is_set()

    def start(self, group: asyncio.TaskGroup, capacity: int) -> None:
        """Open the gate; samples run in ``group``."""
        self._group = group
        self.capacity = self._fits = capacity
        self.open_gate()

    def open_gate(self) -> None:
        """The server holds what it has to."""
        self._gate.set()
        self.send()

    async def until_open(self) -> None:
        await self._gate.wait()

    async def close_gate(self) -> None:
        """Close the gate once it is open."""
        await self._gate.wait()
        self._gate.clear()

    def lose(self, reason: str) -> None:
        """The server is lost: nothing more is sent, and the engine brings up another one."""
        self._gate.clear()
        self.lost = self.lost or reason
        self.wake.set()

    async def withdraw(self) -> None:
        """The server was lost: what it had waits again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sent in list(self._queue.sent.values()):
            self._failed(sent, f"the server was lost: {self.lost}")
        self._queue.forget_cached()

    def renew(self) -> None:
        """Another server is up."""
        self.lost, self._doubted, self._strikes = "", False, 0
        self.open_gate()

    def trust(self) -> None:
        """Send again when the server has answered and no connection was cut since it was asked."""
        if self._doubted and self._server.answers and not self.wake.is_set():
            self._doubted = False
            self.send()

    def remember(self, weights: WeightIdentity) -> None:
        """Completions may name them from now on."""
        self._known[str(weights)] = weights
        while len(self._known) > KNOWN_LABELS:
            del self._known[next(iter(self._known))]

    async def settle(self) -> None:
        """Let what was sent start, and take back what cannot: waiting at the server, it would find the cache of the
        old weights, under which its prompt may be.
        """
        await self._until_moved(lambda: self._queue.num_started == len(self._queue.sent))
        stuck = [sent for sent in self._queue.sent.values() if sent.started_at_s is None]
        for sent in stuck:
            sent.withdrawn = True
        await self._call_off(stuck)
        await self._until_moved(lambda: not any(sent.withdrawn for sent in self._queue.sent.values()))

    async def _until_moved(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds``, or for SETTLE_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not holds():
                    self._moved.clear()
                    await self._moved.wait()

    # --- what passes it -----------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what the server has room for."""
        may_send = self._gate.is_set() and not self._doubted and not self.lost
        while may_send and len(self._queue.sent) < self._fits:
            sent = self._queue.next(self._server.label, self._clock.now_s())
            if sent is None:
                break
            assert self._group is not None  # the gate opens after the group has
            self._tasks[sent.rid] = self._group.create_task(self._run(sent), name=sent.rid)
        self._keep_time()

    def _keep_time(self) -> None:
        """Count the seconds in which samples were at the server."""
        now_s = self._clock.now_s()
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if self._queue.sent else None

    async def _run(self, sent: SentSample) -> None:
        """One sample, from its request to its result."""
        last = Chunk(token_ids=[])
        try:
            async with aclosing(self._server.client.generate(sample_request(sent))) as chunks:
                async for chunk in chunks:
                    last = chunk
                    if sent.started_at_s is None and chunk.token_ids:
                        await self._started(sent)
            self._ended(sent, last)
        except ServerAnswerError as error:
            self._refused(sent, error)
        except ServerUnreachableError as error:
            self._doubted = True  # until the watch's next look: at once, it would be asked all the time
            self._failed(sent, str(error), lost=False)
        except ServerUnavailableError as error:
            self._doubted = True
            self._failed(sent, str(error))
            self.wake.set()
        finally:
            self._tasks.pop(sent.rid, None)
        self._moved.set()
        self.send()

    async def _started(self, sent: SentSample) -> None:
        self._queue.started(sent, self._clock.now_s())
        self._moved.set()
        self.send()
        if sent.aborted:  # the server may not have known it yet when the abort came
            await self._call_off([sent])

    def _ended(self, sent: SentSample, chunk: Chunk) -> None:
        """The server is done with it, one way or another."""
        stopped = chunk.finish_reason == FinishReason.ABORT
        if stopped and not sent.aborted:
            if not sent.withdrawn:
                self._failed(sent, f"the server gave it up: {chunk.message or 'no reason'}")
                return
            self.counters.recomputed += 1 if chunk.token_ids else 0
            self._queue.back(sent, lost=False)
            return
        if stopped and not chunk.token_ids:
            self._queue.ended(sent)
            self._results.put(sent.failure(ABORTED_UNSTARTED))
            return
        try:
            result = completion(sent, chunk, self._known, self._clock.now_s())
        except BadAnswerError as error:
            self._failed(sent, str(error), strike=True)
            return
        self._strikes = 0
        self.counters.tokens += len(result.response_ids)
        self.counters.cached_tokens += chunk.cached_tokens
        self._queue.ended(sent)
        self._results.put(result)

    def _refused(self, sent: SentSample, error: ServerAnswerError) -> None:
        if error.is_refusal:
            self._queue.ended(sent)
            self._results.put(sent.failure(error.reason, retryable=False))
        else:
            self._failed(sent, str(error), strike=True)

    def _failed(self, sent: SentSample, reason: str, *, strike: bool = False, lost: bool = True) -> None:
        """Its sending came to nothing: it is sent once more, or it fails. lost: it was at the server."""
        if strike:
            self._strikes += 1
            if self._strikes >= MAX_STRIKES:
                self.lose(f"{MAX_STRIKES} broken answers in a row, the last: {reason}")
        losses = self._queue.back(sent, lost=lost)
        if sent.aborted or losses >= MAX_SENDINGS:
            self._queue.give_up(sent)
            self._results.put(sent.failure(reason))

    async def _call_off(self, meant: Sequence[SentSample]) -> None:
        """All at once: a server that hangs costs one deadline, and then the watch finds it lost."""

        async def abort(sent: SentSample) -> None:
            with contextlib.suppress(ServerUnavailableError, ServerAnswerError):
                await self._server.client.abort(sent.rid)

        await asyncio.gather(*(abort(sent) for sent in meant))

    def fit(self) -> None:
        """Send no more than fits: where a sample cannot start, KV memory is short, whatever the slots."""
        started, now_s = self._queue.num_started, self._clock.now_s()
        unstarted = [sent.sent_at_s for sent in self._queue.sent.values() if sent.started_at_s is None]
        if unstarted and started and now_s - min(unstarted) > STUCK_S:
            self._fits = min(self._fits, started)
        elif not unstarted and self._fits < self.capacity:
            self._fits = min(self.capacity, self._fits + max(1, self._fits // 4))
            self.send()


# --- a sample as a request, its last chunk as a completion ------------------------------------------------------------

SEED_BITS = 31
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class BadAnswerError(ValueError):
    """The last chunk of a sample contradicts itself; the message says how."""


def sample_request(sent: SentSample) -> SampleRequest:
    request = sent.group.request
    return SampleRequest(
        rid=sent.rid,
        prompt=sent.group.prompt,
        label=sent.label,
        sampling=request.sampling,
        max_new_tokens=request.limit(sent.sample),
        seed=_seed(request.sampling.seed, sent.sample),
        priority=request.priority,
    )


def _seed(seed: int, sample: int) -> int:
    """A stream of its own for each sample of a group."""
    return int(np.random.SeedSequence((seed, sample)).generate_state(1)[0]) >> (32 - SEED_BITS)


def completion(sent: SentSample, chunk: Chunk, known: dict[str, WeightIdentity], now_s: float) -> Completion:
    """known: weights by label. Raises BadAnswerError."""
    if chunk.finish_reason not in _REASONS:
        raise BadAnswerError("it says nothing of how the sample ended")
    started_at_s = now_s if sent.started_at_s is None else sent.started_at_s
    return Completion(
        group_id=sent.group.request.group_id,
        sample=sent.sample,
        attempt=sent.group.request.attempt,
        response_ids=np.array(chunk.token_ids, dtype=np.int32),
        logprobs=_logprobs(chunk),
        finish_reason=_REASONS[chunk.finish_reason],
        spans=_spans(chunk.spans, len(chunk.token_ids), _loaded(known, sent.label)),
        queued_s=started_at_s - sent.queued_at_s,
        engine_s=now_s - started_at_s,
    )


def _logprobs(chunk: Chunk) -> NDArray[np.float32]:
    if [token for _, token in chunk.logprobs] != chunk.token_ids:
        raise BadAnswerError(f"its {len(chunk.logprobs)} logprobs are not of its {len(chunk.token_ids)} tokens")
    logprobs = np.array([logprob for logprob, _ in chunk.logprobs], dtype=np.float32)  # None becomes NaN
    if not np.isfinite(logprobs).all():
        raise BadAnswerError("a logprob is not finite")
    return logprobs


def _loaded(known: dict[str, WeightIdentity], label: str) -> dict[str, WeightIdentity]:
    """A sample sent under weights of ours cannot have tokens of those that a server starts with: it was another one."""
    return {name: weights for name, weights in known.items() if label == BASE_LABEL or name != BASE_LABEL}


def _spans(served: Sequence[ServedSpan], tokens: int, known: dict[str, WeightIdentity]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    end = 0
    for span in served:
        if span.version not in known:
            raise BadAnswerError(f"its tokens are of weights {span.version!r}, which were never loaded")
        if span.start != end or span.end < span.start:
            raise BadAnswerError(f"its spans leave a gap at token {end}")
        end = span.end
        if span.end > span.start:
            spans.append(VersionSpan(start=span.start, end=span.end, weights=known[span.version]))
    if end != tokens or not tokens:
        raise BadAnswerError(f"its spans cover {end} of {tokens} tokens")
    return tuple(spans)
