"""What a generation engine is: one file implements it, the worker knows nothing else of an engine.

The worker submits groups, gets each sample the moment it ends, and has the engine take new weights.
An engine owns its device, its KV memory and its thread or server; it never talks to the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from transport.contracts.types import (
    MAX_TOP_K,
    FinishReason,
    GroupId,
    SamplingParams,
    Segment,
    VersionSpan,
    WeightIdentity,
)
from transport.rows.columns import loss_mask
from transport.rows.partial import Beginning
from workers.errors import EngineCrashedError, StreamError
from workers.models import load_detokenizer

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

BASE_WEIGHTS = WeightIdentity(epoch=0, version=0)
"""What a model directory holds before any trainer has published."""
ABORTED_UNSTARTED = "aborted before it started"
"""Reason of the failure of a sample that was waiting when its group was aborted."""


STOP_MARGIN = 8
"""Tokens looked at beyond the bytes of the longest string: the first may begin inside a character or lose a space."""


class StopStrings:
    """Where a response ends because its text holds one of ``generation.stop``, or of its request's own.

    The same for every engine.

    Servers run without a tokenizer: token ids in, token ids out. So strings are looked for here. A response ends with
    the token that completes the first stop string: the policy sampled that token, so it stays, with its logprob, and
    the text may hold a few characters more than the string; no token after it is part of the response.

    stop: none of them empty.  decode: the text of token ids, special tokens included."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._reach = max((len(one.encode()) for one in stop), default=0) + STOP_MARGIN  # a token has a byte or more

    @staticmethod
    def of(directory: Path, stop: Sequence[str]) -> StopStrings:
        """With the tokenizer of the model in ``directory``, read only where there is a string. Raises ModelError."""
        return StopStrings(stop, load_detokenizer(directory, special=True)) if stop else NO_STOPS

    def __bool__(self) -> bool:
        return bool(self._stop)

    def __or__(self, other: StopStrings) -> StopStrings:
        """Those of both, which are of one tokenizer."""
        if not other:
            return self
        return StopStrings((*self._stop, *other._stop), other._decode)

    def end(self, token_ids: Sequence[int], checked: int = 0) -> int | None:
        """How many tokens the response has if a string ends it; None if none does.

        checked: first tokens that are known to hold none.
        """
        for end in range(checked + 1, len(token_ids) + 1 if self._stop else 0):
            text = self._decode(token_ids[max(0, end - self._reach) : end])
            if any(one in text for one in self._stop):
                return end
        return None


OnTokens: TypeAlias = "Callable[[int, Sequence[int], Sequence[float]], None]"
NO_STOPS = StopStrings((), lambda ids: "")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt group (or what is missing of it).

    prompt_ids: [P] int32.  samples: which sample indices to generate; each draws from its own stream of
    (sampling.seed, sample), so that a sample does not depend on which others run beside it.
    priority: higher is admitted first.
    limits: empty, or for each of ``samples`` its own limit of new tokens, at most sampling.max_new_tokens: with
    ignore_eos it replays recorded lengths exactly.
    prompt_text, entry: of the group, for an environment; not read by an engine.
    stops: beside those of ``generation.stop``.
    keep: its samples may be continued, so an engine may keep what it computed of them.  conversation: names whose turn
    it is, where each turn is a group of its own; "": that of the group's attempt.
    on_tokens: told on the engine's loop what is drawn of its one sample, as it comes: the place of the first of these
    tokens, ids, logprobs. They may be told again, from an earlier place on, where the sample is computed again.
    begun: by sample, what it goes on from: computed again as if it were of the prompt, and part of its response, with
    the logprobs and weights that it had. Shorter than the sample's limit, and no token of it ends the response.
    """

    group_id: GroupId
    prompt_ids: NDArray[np.int32]
    samples: Sequence[int]
    sampling: SamplingParams
    priority: float = 0.0
    attempt: int = 0
    limits: Sequence[int] = ()
    prompt_text: str = ""
    entry: bytes = b""
    stops: StopStrings = NO_STOPS
    keep: bool = False
    conversation: str = ""
    on_tokens: OnTokens | None = None
    begun: Mapping[int, Beginning] = field(default_factory=dict[int, Beginning])

    @property
    def key(self) -> tuple[GroupId, int]:
        """What ``abort`` calls it: an earlier attempt at the same group may still run."""
        return self.group_id, self.attempt

    def limit(self, sample: int) -> int:
        """New tokens that ``sample`` may have."""
        return self.limits[self.samples.index(sample)] if self.limits else self.sampling.max_new_tokens

    def why_impossible(self, *, max_context: int, vocab_size: int) -> str:
        """Why an engine of this size can never run it; empty when it can."""
        sampling, prompt = self.sampling, self.prompt_ids
        total = len(prompt) + sampling.max_new_tokens
        if len(prompt) == 0 or not self.samples:
            return "a request needs at least one prompt token and one sample"
        if total > max_context:
            return (
                f"a prompt of {len(prompt)} tokens + max_new_tokens {sampling.max_new_tokens} = {total} tokens "
                f"is over the engine's max_context of {max_context}"
            )
        if self.limits and (len(self.limits) != len(self.samples) or max(self.limits) > sampling.max_new_tokens):
            return "limits must be one for each sample, none above max_new_tokens"
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
            return f"prompt ids must lie in [0, {vocab_size})"
        if (
            min((sampling.max_new_tokens, *self.limits)) < 1
            or sampling.temperature < 0
            or not 0 <= sampling.top_k <= MAX_TOP_K
            or not 0 < sampling.top_p <= 1
        ):
            return f"sampling parameters are out of range: {sampling}"
        return ""

    def failure(self, samples: Sequence[int], reason: str, *, retryable: bool = True) -> EngineFailure:
        """These of its samples will not come."""
        return EngineFailure(
            group_id=self.group_id, samples=tuple(samples), reason=reason, retryable=retryable, attempt=self.attempt
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sample.

    response_ids: [R] int32, the stop token included.
    logprobs: [R] float32, of each sampled token under log_softmax(logits / temperature), before top-p and top-k cut the
    tail (temperature 0 counts as 1); the trainer computes the same, so that their ratio is the policies' ratio. 0 where
    nothing was sampled.
    spans: weights of each token, in order, covering [0, R).
    segments: who chose which tokens, in order, covering [0, R); none: the policy chose all.
    reward: what an environment gave, None where none did.
    branch_ends: of one that is several samples, where each ends in [0, R]; none: it is one.
    resumed: first tokens that it went on from, of an earlier attempt.
    """

    group_id: GroupId
    sample: int
    attempt: int
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    queued_s: float
    engine_s: float
    segments: tuple[Segment, ...] = ()
    reward: float | None = None
    branch_ends: tuple[int, ...] = ()
    resumed: int = 0

    @property
    def policy_ids(self) -> list[int]:
        """Of the tokens that the policy chose, which are what a reward judges."""
        ids = self.response_ids
        return (ids[loss_mask(self.segments).astype(bool)] if self.segments else ids).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Samples that will not come. retryable: a fresh attempt may succeed (an over-long prompt never will)."""

    group_id: GroupId
    samples: tuple[int, ...]
    reason: str
    retryable: bool
    attempt: int = 0


Result: TypeAlias = Completion | EngineFailure

SampleKey: TypeAlias = tuple[GroupId, int, int]
"""Group, attempt, sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a running sample has got: tokens [start, start + N) of its response.

    token_ids: [N] int32, N > 0.  logprobs: [N] float32.  spans: weights of each, in order, covering them.
    """

    key: SampleKey
    start: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[VersionSpan, ...]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """capacity: samples decoded together.  max_context: prompt + response, tokens.  vocab_size: tokens.
    kv_tokens: of context that memory holds for all samples together; 0: every sample has room of its own.
    kv_padded: there each sample takes as much as the longest.
    """

    name: str
    capacity: int
    max_context: int
    vocab_size: int
    kv_tokens: int = 0
    kv_padded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """running, waiting: samples.  busy_s: seconds spent computing.  tokens: generated so far (all samples).
    capacity: samples that fit now, where memory is shorter than slots; 0: all slots.  cached_tokens: of prompts, taken
    from a cache so far.  kv_use: part of the KV memory in use, 0 to 1.  drafted_tokens: computed so far because a draft
    said so.  accepted_tokens: those of them that were drawn.  retracted_samples: how often so far a sample gave up its
    slot because memory was full, and waited again.  trouble: what is wrong while it goes on, "" for nothing.
    """

    running: int
    waiting: int
    busy_s: float
    tokens: int
    capacity: int = 0
    cached_tokens: int = 0
    kv_use: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    retracted_samples: int = 0
    trouble: str = ""


class GenerationEngine(Protocol):
    """All methods are called on one asyncio loop; none blocks it for more than a few milliseconds."""

    async def start(self) -> EngineInfo:
        """Load the model. Raises ModelError (workers/errors.py) with what is missing or broken."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a group. What cannot run comes out of ``results`` as an EngineFailure."""
        ...

    async def results(self) -> list[Result]:
        """Wait for at least one result and return all that are there."""
        ...

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        """Stop these (group, attempt)s. Samples that have begun come out with finish_reason "abort" and their partial
        tokens, others in an EngineFailure: every submitted sample comes out exactly once.
        """
        ...

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """What samples that have begun have got beyond the first ``known`` tokens of each (of any other, all), as of
        now; nothing of one that is about to end, or that an environment takes part in.
        """
        ...

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take new weights between two decode steps; running samples go on from their KV.

        ``tensors`` may be views of shared memory: they are copied before this returns. From then on every new prompt
        is prefilled under the new weights: prompt KV is never reused across weight identities.
        """
        ...

    async def use_full_precision(self, reason: str) -> None:
        """Hold nothing in fp8 from now on, whatever the engine was started with; running samples go on. An engine that
        holds nothing in fp8 has nothing to do."""
        ...

    def load(self) -> EngineLoad: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def serving(engine: GenerationEngine) -> AsyncIterator[EngineInfo]:
    """Start ``engine``, and close it however the block, or the start, ends. Raises what ``start`` raises."""
    try:
        yield await engine.start()
    finally:
        await engine.close()


class ResultQueue:
    """Results on their way from an engine to its worker; all of it on one asyncio loop.

    Each result is taken once; what ends the serving of the engine ends every wait on it, by name.
    serving: what produces results, from the start of the engine to its close.
    """

    def __init__(self) -> None:
        self.serving: asyncio.Future[None] | None = None
        self._told: BaseException | None = None  # what ended it, once the log has that
        self._ready: list[Result] = []
        self._has_ready = asyncio.Event()

    def put(self, *results: Result) -> None:
        if results:
            self._ready += results
            self._has_ready.set()

    async def take(self) -> list[Result]:
        """All there are, at least one. Raises EngineCrashedError when serving has ended, after its last results."""
        await self.until(self._has_ready.wait())
        ready, self._ready = self._ready, []
        self._has_ready.clear()
        return ready

    async def until(self, awaited: Awaitable[object]) -> None:
        """Wait for ``awaited`` or for the end of serving, whichever is first; then ``awaited`` is over, if need be
        cancelled. Raises what it raises; EngineCrashedError: serving has ended.
        """
        waiting = asyncio.ensure_future(awaited)
        try:
            if self.serving is None:
                raise ValueError("the engine was not started")
            await asyncio.wait({waiting, self.serving}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                cause = None if self.serving.cancelled() else self.serving.exception()
                why = "the engine was closed" if cause is None else f"the engine ended: {cause!r}"
                if cause is not None and cause is not self._told and not isinstance(cause, StreamError):
                    self._told = cause
                    log.error("the engine ended", exc_info=cause)  # a bug: its traceback ends nowhere else
                raise EngineCrashedError(str(cause) if isinstance(cause, StreamError) else why) from cause
            waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def end_serving(self) -> None:
        """Cancel it, if it was started; what it still had to do is dropped, and how it ended is not raised."""
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.wait({self.serving})
