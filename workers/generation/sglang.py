"""The generation engine that is an SGLang server: started by this worker, or run elsewhere.

    submit ───────► queue ─► one request a sample, as many as the server runs at once ─► results, as each sample ends
    load_weights ─► gate closed ─► pause in place, load, label, continue ─► gate open
    watch ────────► the server died, hangs or forgot its weights ─► another one, with what it held ─► gate open

While the gate is closed nothing new is sent; what runs goes on, also through an update. Nothing is sent either from the
first connection that is cut or refused until the server answers again, or another one is up. When the server is lost,
its samples wait again and are sent to the next one; a sample fails only when that happens to it twice.

Owns: the gate, what is sent, which labels of weights are known. Never: the broker; the server's life (sglang_upkeep).
Invariant: a sample is sent only to a server that holds what was last loaded here, and every token of a completion is of
weights that were loaded here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from transport.clock import Clock
from transport.errors import PeerUnavailableError, first_error
from transport.types import FinishReason, GroupId, WeightIdentity
from workers.errors import (
    EngineCrashedError,
    EngineHungError,
    ServerAnswerError,
    ServerUnavailableError,
    ServerUnreachableError,
    WeightsMismatchError,
)
from workers.generation.engine import Completion, EngineFailure, EngineInfo, EngineLoad, GenerationRequest
from workers.generation.samples import impossible
from workers.generation.sglang_answers import BadAnswerError, completion, request_body
from workers.generation.sglang_http import BASE_LABEL, UPDATE_S, Chunk
from workers.generation.sglang_queue import SampleQueue, SentSample
from workers.generation.sglang_upkeep import ServerUpkeep, SglangSettings
from workers.generation.sglang_weights import HeldWeights, hold

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

BASE_WEIGHTS = WeightIdentity(epoch=0, version=0)
MAX_SENDINGS = 2
"""A sample that was at two servers when they were lost may be why."""
MAX_STRIKES = 8
"""Broken answers in a row, after which a server is as good as lost."""
POLL_S = 1.0
SETTLE_S = 0.5
"""Before an update, for what was just sent to start: a few decode steps."""
STUCK_S = 3.0
"""A sample that has not started by then waits for memory: prompts take less."""
KNOWN_LABELS = 256
"""Versions that a running sample may have begun with."""


@dataclass(slots=True, kw_only=True)
class SglangCounters:
    """Cumulative. recomputed: samples that an update sent again although they had started.  tokens: of ended samples.
    cached_tokens: of prompts, taken from the server's cache.
    """

    recomputed: int = 0
    tokens: int = 0
    cached_tokens: int = 0


class SglangEngine:
    """A GenerationEngine (engine.py). ``start`` before anything else, ``close`` at the end, also after an error."""

    name = "sglang"

    def __init__(self, settings: SglangSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.server = ServerUpkeep(settings, clock)
        self.counters = SglangCounters()
        self._queue = SampleQueue(secrets.token_hex(4))
        self._known = {BASE_LABEL: BASE_WEIGHTS}
        self._capacity = settings.slots
        self._fits = settings.slots
        self._gate = asyncio.Event()
        self._updating = asyncio.Lock()
        self._changing = asyncio.Lock()  # of the server: its weights, or the server itself
        self._lost = ""
        self._doubted = False
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self._strikes = 0
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._ready: list[Completion | EngineFailure] = []
        self._has_ready = asyncio.Event()
        self._busy_s = 0.0
        self._busy_since_s: float | None = None

    # --- the protocol -------------------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Bring the server up and check it. Raises ModelError; EngineCrashedError when it does not come up."""
        await self.server.open()
        await self.server.bring_up()
        self._capacity = min(self._settings.slots, self.server.info.max_running_requests or self._settings.slots)
        self._fits = self._capacity
        self._serving = asyncio.create_task(self._serve(), name="sglang")
        await self._until(self._gate.wait())
        return self.info

    @property
    def info(self) -> EngineInfo:
        """Once it was started."""
        model = self.server.model
        return EngineInfo(
            name=self.name, capacity=self._capacity, max_context=self.server.max_context, vocab_size=model.vocab_size
        )

    def submit(self, request: GenerationRequest) -> None:
        reason = impossible(request, max_context=self.server.max_context, vocab_size=self.server.model.vocab_size)
        if reason:
            samples, group_id = tuple(request.samples), request.group_id
            failure = EngineFailure(
                group_id=group_id, samples=samples, reason=reason, retryable=False, attempt=request.attempt
            )
            self._deliver(failure)
            return
        self._queue.push(request, self._clock.now_s())
        self._send()

    async def results(self) -> list[Completion | EngineFailure]:
        """At least one result. Raises EngineCrashedError when no server can be had any more."""
        await self._until(self._has_ready.wait())
        ready, self._ready = self._ready, []
        self._has_ready.clear()
        return ready

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        keys = frozenset(groups)
        self._deliver(*self._queue.take_out(keys))
        meant = [sent for sent in self._queue.sent.values() if sent.group.request.key in keys]
        for sent in meant:
            sent.aborted = True
        await self._call_off(meant)

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises WeightsMismatchError, PeerUnavailableError (the server cannot get them): it serves what it served."""
        held = await asyncio.to_thread(hold, weights, tensors)
        try:
            async with asyncio.timeout(UPDATE_S + self._settings.startup_s), self._updating:
                await self._until(self._update(held))
        except TimeoutError:
            raise EngineHungError(f"the server did not take {weights} in time") from None

    def load(self) -> EngineLoad:
        self._keep_time()
        sent = len(self._queue.sent)
        running = self._queue.num_started
        return EngineLoad(
            running=running,
            waiting=self._queue.num_waiting + sent - running,
            busy_s=self._busy_s,
            tokens=self.counters.tokens,
            capacity=self._fits,
            cached_tokens=self.counters.cached_tokens,
            kv_use=self.server.load.token_usage,
        )

    async def close(self) -> None:
        """End the server if it is ours; what still runs is dropped."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        await self.server.close()

    async def _until(self, awaited: Awaitable[object]) -> None:
        """Wait for ``awaited`` or for the end of the watch, whichever is first."""
        waiting = asyncio.ensure_future(awaited)
        try:
            if self._serving is None:
                raise ValueError("the engine was not started")
            await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
                return
            cause = None if self._serving.cancelled() else self._serving.exception()
            raise EngineCrashedError(str(cause) if cause else "the engine was closed") from cause
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    def _deliver(self, *results: Completion | EngineFailure) -> None:
        if results:
            self._ready += results
            self._has_ready.set()

    # --- the gate, and what passes it ---------------------------------------------------------------------------------

    @property
    def _may_send(self) -> bool:
        return self._gate.is_set() and not self._doubted and not self._lost

    def _send(self) -> None:
        """Send what the server has room for, each sample in a task of its own."""
        while self._may_send and len(self._queue.sent) < self._fits:
            sent = self._queue.next(self.server.label, self._clock.now_s())
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
        last = Chunk()
        try:
            async with aclosing(self.server.client.generate(request_body(sent, self.server.info))) as chunks:
                async for chunk in chunks:
                    last = chunk
                    if sent.started_at_s is None and chunk.output_ids:
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
            self._wake.set()
        finally:
            self._tasks.pop(sent.rid, None)
        self._moved.set()
        self._send()

    async def _started(self, sent: SentSample) -> None:
        self._queue.started(sent, self._clock.now_s())
        self._moved.set()
        self._send()
        if sent.aborted:  # the server may not have known it yet when it was told
            await self._call_off([sent])

    def _ended(self, sent: SentSample, chunk: Chunk) -> None:
        """The server is done with it, one way or another."""
        meta = chunk.meta_info
        assert meta is not None  # the client saw a finish_reason
        assert meta.finish_reason is not None
        stopped = meta.finish_reason.type == FinishReason.ABORT
        if stopped and not sent.aborted:
            if not sent.withdrawn:
                self._failed(sent, f"the server gave it up: {meta.finish_reason.message or 'no reason'}")
                return
            self.counters.recomputed += 1 if chunk.output_ids else 0
            self._queue.back(sent, lost=False)
            return
        if stopped and not chunk.output_ids:
            self._queue.ended(sent)
            self._deliver(sent.failure("aborted before it started"))
            return
        try:
            result = completion(sent, chunk, self._known, self._clock.now_s())
        except BadAnswerError as error:
            self._failed(sent, str(error), strike=True)
            return
        self._strikes = 0
        self.counters.tokens += len(result.response_ids)
        self.counters.cached_tokens += meta.cached_tokens
        self._queue.ended(sent)
        self._deliver(result)

    def _refused(self, sent: SentSample, error: ServerAnswerError) -> None:
        if error.is_refusal:
            self._queue.ended(sent)
            self._deliver(sent.failure(error.reason, retryable=False))
        else:
            self._failed(sent, str(error), strike=True)

    def _failed(self, sent: SentSample, reason: str, *, strike: bool = False, lost: bool = True) -> None:
        """Its sending came to nothing: it is sent once more, or it fails. lost: it was at the server."""
        if strike:
            self._strikes += 1
            if self._strikes >= MAX_STRIKES:
                self._lose(f"{MAX_STRIKES} broken answers in a row, the last: {reason}")
        losses = self._queue.back(sent, lost=lost)
        if sent.aborted or losses >= MAX_SENDINGS:
            self._queue.give_up(sent)
            self._deliver(sent.failure(reason))

    async def _call_off(self, meant: Sequence[SentSample]) -> None:
        """All at once: a server that hangs costs one deadline, and then the watch finds it lost."""

        async def abort(sent: SentSample) -> None:
            with contextlib.suppress(ServerUnavailableError, ServerAnswerError):
                await self.server.client.abort(sent.rid)

        await asyncio.gather(*(abort(sent) for sent in meant))

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _update(self, held: HeldWeights) -> None:
        """Have the server take ``held``, if need be the next server."""
        await self._gate.wait()
        self._gate.clear()
        self._remember(held.weights)
        try:
            async with self._changing:
                await self._settle()
                await self.server.pass_on(held)
        except (WeightsMismatchError, PeerUnavailableError):
            held.close()
            self._gate.set()
            raise
        except ServerAnswerError as error:
            held.close()
            self._lose(str(error))
            raise WeightsMismatchError(f"the server did not take {held.weights}: {error}") from error
        except ServerUnavailableError as error:
            self.server.keep(held)  # the next one gets it at once
            self._lose(str(error))
            await self._gate.wait()
        else:
            self._gate.set()
        self._send()

    def _remember(self, weights: WeightIdentity) -> None:
        self._known[str(weights)] = weights
        while len(self._known) > KNOWN_LABELS:
            del self._known[next(iter(self._known))]

    async def _settle(self) -> None:
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

    # --- watch --------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Watch the server until the engine is closed. Raises what no server can be had for."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._gate.set()
                await self._watch()
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            self._wake.clear()
            if not self._lost and self._gate.is_set():
                reason = await self.server.probe()
                if reason and self._gate.is_set():  # during an update it has other things to do
                    self._lose(reason)
                self._trust()
                self._fit()
            if self._lost:
                await self._replace()

    def _trust(self) -> None:
        """Send again when the server has answered and no connection was cut since it was asked."""
        if self._doubted and self.server.answers and not self._wake.is_set():
            self._doubted = False
            self._send()

    def _lose(self, reason: str) -> None:
        """The server is lost: nothing more is sent, and the watch brings up another one."""
        self._gate.clear()
        self._lost = self._lost or reason
        self._wake.set()

    async def _replace(self) -> None:
        """Another server for this one; its samples are sent to that."""
        reason, tasks = self._lost, list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sent in list(self._queue.sent.values()):
            self._failed(sent, f"the server was lost: {reason}")
        self._queue.forget_cached()
        async with self._changing:
            await self.server.replace(reason)
        self._lost, self._doubted, self._strikes = "", False, 0
        self._gate.set()
        self._send()

    def _fit(self) -> None:
        """Send no more than fits: where a sample cannot start, KV memory is short, whatever the slots."""
        started, now_s = self._queue.num_started, self._clock.now_s()
        unstarted = [sent.sent_at_s for sent in self._queue.sent.values() if sent.started_at_s is None]
        if unstarted and started and now_s - min(unstarted) > STUCK_S:
            self._fits = min(self._fits, started)
        elif not unstarted and self._fits < self._capacity:
            self._fits = min(self._capacity, self._fits + max(1, self._fits // 4))
            self._send()
