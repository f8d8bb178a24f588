"""Samples at an inference server: each is sent, in a task of its own, and what becomes of it is delivered.

    push ─► queue ─► gate ─► one request a sample, as many as the server runs at once ─► delivery, as each sample ends
                └◄─ sent again: withdrawn for an update, or at a server that was lost

Only as many are sent as the server runs at once, so that the order of admission stays ours, and so that few wait there
when new weights come: a prompt that waits at the server would find the old weights' cache. Of a group one sample goes
first; once it has started, the group's prompt is in the server's cache, and the others take it from there. Nothing is
sent while the gate is closed, nor from the first connection that is cut or refused until the server answers again, or
another one is up. A sample fails only when it was at two servers when they were lost.

Owns: the queue, those tasks, how many samples fit, the labels of weights that are known. Never: weights; the server's
life. Invariant: a sample is in one place, and leaves it once; it is sent under the label of what the server holds, and
every token of a completion is of weights that are known.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from transport.rows.partial import NOTHING, Beginning, clipped, joined
from workers.errors import ServerAnswerError, ServerUnavailableError, ServerUnreachableError
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    BASE_WEIGHTS,
    NO_STOPS,
    Completion,
    EngineFailure,
    EngineLoad,
    GenerationRequest,
    Progress,
    ResultQueue,
    SampleKey,
)
from workers.generation.server.client import BASE_LABEL, CHUNK_AT_END, Chunk, SampleRequest, ServedSpan
from workers.generation.server.upkeep import ServerUpkeep

MAX_SENDINGS = 2
"""A sample that was at two servers when they were lost may be why."""
MAX_STRIKES = 8
"""Broken answers in a row, after which a server is as good as lost."""
SETTLE_S = 0.5
"""Before an update, for what was just sent to start: a few decode steps."""
STOP_TOKENS = 32
"""Between two looks for a stop string: as many may be generated in vain; SGLang says all tokens again in each chunk."""
STREAM_TOKENS = 4
"""Between two chunks of a sample whose tokens are wanted as they come, for the same reason."""
PARTIAL_TOKENS = 256
"""Between two chunks of a sample whose tokens are kept: a few seconds of a large model, and with SGLang, which says all
tokens again in each, 80 chunks of 10,000 tokens on average for one of 20,000."""
STUCK_S = 3.0
"""A sample that has not started by then waits for memory: prompts take less."""
KNOWN_LABELS = 256
"""Versions that a running sample may have begun with."""


@dataclass(slots=True, kw_only=True, eq=False)
class QueuedGroup:
    """prompt: its token ids as JSON.  waiting: samples not sent.  leader: the sample that computes the prompt now.
    cached: label of the weights under which the server has computed it.  losses: per sample, sendings that came to
    nothing.
    """

    request: GenerationRequest
    prompt: msgspec.Raw
    order: tuple[float, int]
    queued_at_s: float
    waiting: list[int]
    leader: int | None = None
    cached: str = ""
    losses: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True, kw_only=True, eq=False)
class SentSample:
    """A sample at the server. rid: of this sending.  label: weights at that time.  withdrawn: called back to be sent
    anew.  aborted: called off for good.  ends_at: tokens with which a stop string ends it; what the server adds is cut.
    latest: its last chunk.
    """

    group: QueuedGroup
    sample: int
    rid: str
    label: str
    queued_at_s: float
    sent_at_s: float
    started_at_s: float | None = None
    withdrawn: bool = False
    aborted: bool = False
    ends_at: int | None = None
    latest: Chunk = field(default_factory=lambda: Chunk(token_ids=[]))

    @property
    def begun(self) -> Beginning:
        """What it goes on from: to the server, the end of its prompt."""
        return self.group.request.begun.get(self.sample, NOTHING)

    def failure(self, reason: str, *, retryable: bool = True) -> EngineFailure:
        return self.group.request.failure((self.sample,), reason, retryable=retryable)


@dataclass(slots=True)
class SampleQueue:
    """What waits and what is sent. token: begins every rid, so that workers of one server cannot mean each other's."""

    token: str
    sent: dict[str, SentSample] = field(default_factory=dict[str, SentSample])
    _groups: list[QueuedGroup] = field(default_factory=list[QueuedGroup])
    _serial: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.waiting) for group in self._groups)

    @property
    def num_started(self) -> int:
        return sum(1 for sample in self.sent.values() if sample.started_at_s is not None)

    def push(self, request: GenerationRequest, now_s: float) -> None:
        """Queue a group: higher priorities first, then as they came."""
        group = QueuedGroup(
            request=request,
            prompt=msgspec.Raw(msgspec.json.encode(request.prompt_ids.tolist())),
            order=(-request.priority, next(self._serial)),
            queued_at_s=now_s,
            waiting=list(request.samples),
        )
        bisect.insort(self._groups, group, key=lambda group: group.order)

    def next(self, label: str, now_s: float) -> SentSample | None:
        """The sample to send next under weights ``label``; it counts as sent from now on. None: none may go now."""
        ready = (group for group in self._groups if group.waiting and (group.cached == label or group.leader is None))
        if (group := next(ready, None)) is None:
            return None
        sample = group.waiting.pop(0)
        if group.cached != label:
            group.leader = sample
        if not group.waiting:
            self._groups.remove(group)
        group_id, attempt = group.request.key
        # The server aborts every rid that begins with the one it is given: the closing sign makes none a prefix.
        rid = f"{self.token}:{group_id}:{attempt}:{sample}:{next(self._serial)};"
        self.sent[rid] = SentSample(
            group=group, sample=sample, rid=rid, label=label, queued_at_s=group.queued_at_s, sent_at_s=now_s
        )
        return self.sent[rid]

    def started(self, sent: SentSample, now_s: float) -> None:
        """Its first token came: its prompt is in the server's cache, under the label it was sent with."""
        sent.started_at_s = now_s
        if sent.group.leader == sent.sample:
            sent.group.leader = None
            sent.group.cached = sent.label

    def ended(self, sent: SentSample) -> None:
        """It is no longer at the server."""
        del self.sent[sent.rid]
        if sent.group.leader == sent.sample:
            sent.group.leader = None

    def back(self, sent: SentSample) -> None:
        """It waits again, before what came after it."""
        self.ended(sent)
        if sent.group not in self._groups:
            bisect.insort(self._groups, sent.group, key=lambda group: group.order)
        sent.group.waiting.insert(0, sent.sample)

    def forget_cached(self) -> None:
        """The server has started anew: it has no prompt of ours."""
        for group in (*self._groups, *(sent.group for sent in self.sent.values())):
            group.cached = ""

    def take_out(self, keys: Collection[tuple[GroupId, int]]) -> list[EngineFailure]:
        """Waiting samples of these (group, attempt)s leave, as failures."""
        taken = [group for group in self._groups if group.request.key in keys]
        self._groups = [group for group in self._groups if group.request.key not in keys]
        return [group.request.failure(group.waiting, ABORTED_UNSTARTED) for group in taken]


class SampleSender:
    """Of one engine. capacity: samples at once.  lost: why the server is, "" while it is not.  wake: set when the
    server should be looked at.  recomputed: samples that an update sent again although they had started.
    stops: strings that end a sample, which is looked at every STOP_TOKENS and then called off.
    keeps_partial: a sample says every PARTIAL_TOKENS what it has got.
    """

    def __init__(
        self,
        server: ServerUpkeep,
        results: ResultQueue,
        capacity: int,
        clock: Clock,
        *,
        keeps_partial: bool = False,
    ) -> None:
        self._server = server
        self._chunk_tokens = PARTIAL_TOKENS if keeps_partial else CHUNK_AT_END
        self._results = results
        self._clock = clock
        self.recomputed = self._tokens = self._cached_tokens = 0
        self.capacity = capacity
        self.stops = NO_STOPS
        self.lost = ""
        self._meant = False
        self.wake = asyncio.Event()
        self._queue = SampleQueue(secrets.token_hex(4))
        self._known = {BASE_LABEL: BASE_WEIGHTS}
        self._fits = capacity
        self.gate = asyncio.Event()
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

    def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """As GenerationEngine.progress, of what the last chunk of each sample said."""
        found: list[Progress] = []
        for sent in self._queue.sent.values():
            chunk, key = sent.latest, (*sent.group.request.key, sent.sample)
            start = known.get(key, 0)
            if sent.ends_at is not None or chunk.finish_reason or len(sent.begun) + len(chunk.token_ids) <= start:
                continue
            if not chunk.spans and sent.label != self._server.label:
                continue  # it went on under newer weights, and only its last chunk will say from where
            spans = chunk.spans or [ServedSpan(version=sent.label, start=0, end=len(chunk.token_ids))]
            try:
                whole = completion(
                    sent, replace(chunk, spans=spans, finish_reason=FinishReason.ABORT), self._known, 0.0
                )
            except BadAnswerError:
                continue  # its last chunk will tell
            found.append(
                Progress(
                    key=key,
                    start=start,
                    token_ids=whole.response_ids[start:],
                    logprobs=whole.logprobs[start:],
                    spans=clipped(whole.spans, start, len(whole.response_ids)),
                )
            )
        return found

    def load(self) -> EngineLoad:
        self._keep_time()
        sent, running = len(self._queue.sent), self._queue.num_started
        return EngineLoad(
            running=running,
            waiting=self._queue.num_waiting + sent - running,
            busy_s=self._busy_s,
            tokens=self._tokens,
            capacity=self._fits,
            cached_tokens=self._cached_tokens,
            kv_use=self._server.kv_use,
            trouble=self._server.trouble,
        )

    def start(self, group: asyncio.TaskGroup, capacity: int) -> None:
        """Open the gate; samples run in ``group``."""
        self._group = group
        self.capacity = self._fits = capacity
        self.open_gate()

    def open_gate(self) -> None:
        """The server holds what it has to."""
        self.gate.set()
        self.send()

    def lose(self, reason: str, *, meant: bool = False) -> None:
        """The server is lost: nothing more is sent, and the engine brings up another one. meant: nothing is wrong with
        it, so samples are not blamed for it."""
        self.gate.clear()
        if not self.lost:
            self.lost, self._meant = reason, meant
        self.wake.set()

    async def withdraw(self) -> None:
        """The server was lost: what it had waits again."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for sent in list(self._queue.sent.values()):
            self._failed(sent, f"the server was lost: {self.lost}", lost=not self._meant)
        self._queue.forget_cached()

    def renew(self) -> None:
        """Another server is up."""
        self.lost, self._meant, self._doubted, self._strikes = "", False, False, 0
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

    def send(self) -> None:
        """Send what the server has room for."""
        may_send = self.gate.is_set() and not self._doubted and not self.lost
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
            request = sent.group.request
            stops = NO_STOPS if request.sampling.ignore_eos else self.stops | request.stops
            tell, num_told = request.on_tokens, 0
            chunk_tokens = STREAM_TOKENS if tell is not None else STOP_TOKENS if stops else self._chunk_tokens
            asked = sample_request(sent, chunk_tokens)
            begun = sent.begun.token_ids.tolist()
            async with aclosing(self._server.client.generate(asked)) as chunks:
                async for chunk in chunks:
                    checked, last = len(begun) + len(last.token_ids), chunk
                    sent.latest = chunk
                    if sent.started_at_s is None and chunk.token_ids:
                        self._queue.started(sent, self._clock.now_s())
                        self._moved.set()
                        self.send()
                        if sent.aborted:  # the server may not have known it yet when the abort came
                            await self._call_off([sent])
                    end = stops.end(begun + chunk.token_ids, checked) if stops and sent.ends_at is None else None
                    if end is not None:
                        sent.ends_at = end - len(begun)
                        if not chunk.finish_reason:
                            await self._call_off([sent])  # and read on: only the last chunk says all of its weights
                    end = len(chunk.token_ids) if sent.ends_at is None else sent.ends_at
                    if tell is not None and end > num_told and len(chunk.logprobs) >= end:
                        logprobs = [logprob or 0.0 for logprob, _ in chunk.logprobs[num_told:end]]
                        tell(num_told, chunk.token_ids[num_told:end], logprobs)
                        num_told = end
            self._ended(sent, last)
        except ServerAnswerError as error:
            if 400 <= error.status < 500:
                self._queue.ended(sent)
                self._results.put(sent.failure(error.reason, retryable=False))
            else:
                self._failed(sent, str(error), strike=True)
        except ServerUnavailableError as error:
            never_sent = isinstance(error, ServerUnreachableError)
            self._doubted = True
            self._failed(sent, str(error), lost=not never_sent)
            if not never_sent:  # else at the watch's next look: at once, it would be asked all the time
                self.wake.set()
        finally:
            self._tasks.pop(sent.rid, None)
        self._moved.set()
        self.send()

    def _ended(self, sent: SentSample, chunk: Chunk) -> None:
        """The server is done with it, one way or another."""
        if sent.ends_at is not None:
            chunk = cut(chunk, sent.ends_at)
        stopped = chunk.finish_reason == FinishReason.ABORT
        if stopped and not sent.aborted:
            if not sent.withdrawn:
                self._failed(sent, f"the server gave it up: {chunk.message or 'no reason'}")
                return
            self.recomputed += 1 if chunk.token_ids else 0
            self._queue.back(sent)
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
        self._tokens += len(chunk.token_ids)
        self._cached_tokens += chunk.cached_tokens
        self._queue.ended(sent)
        self._results.put(result)

    def _failed(self, sent: SentSample, reason: str, *, strike: bool = False, lost: bool = True) -> None:
        """Its sending came to nothing: it is sent once more, or it fails. lost: it was at the server."""
        if strike:
            self._strikes += 1
            if self._strikes >= MAX_STRIKES:
                self.lose(f"{MAX_STRIKES} broken answers in a row, the last: {reason}")
        losses = sent.group.losses
        losses[sent.sample] = losses.get(sent.sample, 0) + lost
        if sent.aborted or losses[sent.sample] >= MAX_SENDINGS:
            self._queue.ended(sent)
            self._results.put(sent.failure(reason))
        else:
            self._queue.back(sent)

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


def sample_request(sent: SentSample, chunk_tokens: int = CHUNK_AT_END) -> SampleRequest:
    """Each sample of a group gets a stream of random numbers of its own, and another one where it goes on."""
    request, begun = sent.group.request, sent.begun
    words = (request.sampling.seed, sent.sample, *([len(begun)] if len(begun) else []))
    seed = np.random.SeedSequence(words).generate_state(1)[0]
    ids = [*request.prompt_ids.tolist(), *begun.token_ids.tolist()]
    return SampleRequest(
        rid=sent.rid,
        prompt=msgspec.Raw(msgspec.json.encode(ids)) if len(begun) else sent.group.prompt,
        label=sent.label,
        sampling=request.sampling,
        max_new_tokens=request.limit(sent.sample) - len(begun),
        seed=int(seed) >> (32 - SEED_BITS),
        priority=request.priority,
        chunk_tokens=chunk_tokens,
    )


def cut(chunk: Chunk, tokens: int) -> Chunk:
    """A last chunk without what came after a stop string."""
    return replace(
        chunk,
        token_ids=chunk.token_ids[:tokens],
        logprobs=chunk.logprobs[:tokens],
        spans=[
            ServedSpan(version=span.version, start=min(span.start, tokens), end=min(span.end, tokens))
            for span in chunk.spans
        ],
        finish_reason=FinishReason.STOP,
    )


def completion(sent: SentSample, chunk: Chunk, known: dict[str, WeightIdentity], now_s: float) -> Completion:
    """What it went on from, and ``chunk`` behind it. known: weights by label. Raises BadAnswerError."""
    if chunk.finish_reason not in _REASONS:
        raise BadAnswerError("it says nothing of how the sample ended")
    started_at_s = now_s if sent.started_at_s is None else sent.started_at_s
    if sent.label != BASE_LABEL:  # it cannot have tokens of the weights that a server starts with: it was another one
        known = {label: weights for label, weights in known.items() if label != BASE_LABEL}
    if [token for _, token in chunk.logprobs] != chunk.token_ids:
        raise BadAnswerError(f"its {len(chunk.logprobs)} logprobs are not of its {len(chunk.token_ids)} tokens")
    logprobs = np.array([logprob for logprob, _ in chunk.logprobs], dtype=np.float32)  # None becomes NaN
    if not np.isfinite(logprobs).all():
        raise BadAnswerError("a logprob is not finite")
    begun = sent.begun
    spans = [
        VersionSpan(start=len(begun) + span.start, end=len(begun) + span.end, weights=span.weights)
        for span in _spans(chunk.spans, len(chunk.token_ids), known)
    ]
    return Completion(
        group_id=sent.group.request.group_id,
        sample=sent.sample,
        attempt=sent.group.request.attempt,
        response_ids=np.concatenate([begun.token_ids, np.array(chunk.token_ids, dtype=np.int32)]),
        logprobs=np.concatenate([begun.logprobs, logprobs]),
        finish_reason=_REASONS[chunk.finish_reason],
        spans=joined(begun.spans, tuple(spans)),
        queued_s=started_at_s - sent.queued_at_s,
        engine_s=now_s - started_at_s,
        resumed=len(begun),
    )


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
