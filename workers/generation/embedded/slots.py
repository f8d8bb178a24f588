"""Continuous batching over KV slots: the synchronous core of the embedded engine, and a sample's life inside it.

Owns: the slots, the order of a step, the draw of each token. Never: threads, asyncio, the broker.
Invariant: every submitted sample comes out exactly once, as a Completion or in an EngineFailure; running samples occupy
slots [0, n); a prompt's KV is used under the weights that made it, and under no others. The number drawn for a token
depends on (seed, sample, position) alone, so neither batch neighbours, slot numbers nor a restart change it; what
remains of a neighbour is the rounding of a GEMM of another shape.

    submit ─► waiting ─► step: admit, one forward pass, draw, hand out what ended, close the gaps
                 ▲         │ the prompt of a new group is computed once and written to all its slots
                 │         └ if they were too few, it is kept for the group's other samples
                 └──────── retracted: the slots outgrow ``kv_tokens``

Where memory does not hold all slots at their longest, samples start and are retracted by the rules of
``ContinuousBatching``, its model, each counted like the longest, as memory is padded. A retracted one waits again with
what it has, before what came after it, and is computed again as if that were of its prompt; it keeps its place in
time, tokens, logprobs and weights, and is not one that another engine began.

Where ``Drafting`` says so, a slot computes several tokens in one pass: its last one, and what a draft says comes after
it. Each is drawn as ever, from the policy's logits with the number of its position, and while it is what the draft
said, the logits behind it count, too. What was computed behind the first other token is overwritten by the next steps.
So a sample gets the tokens that it gets without drafts, sooner.

A turn that may be continued (``GenerationRequest.keep``) leaves its KV behind when it frees its slot. The sample's next
turn takes it again under the same weights, and what was added since is fed beside the others' steps, as much at once as
a deepest draft would be: as much arithmetic as its prefill, no pass of its own, and nothing of what was there before.

Source: ours; continuous batching as in Orca (OSDI 2022), prompts and decode tokens in one pass as in Sarathi-Serve
(OSDI 2024). Re-computing the prompts of partly admitted groups took 23% of the time on long-tailed lengths.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transport.contracts.continuous_batching import has_room, is_full, num_drafted
from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from transport.rows.partial import NOTHING, Beginning, clipped
from workers.generation.embedded.drafts import NO_DRAFT, Draft, SaidBefore, Text
from workers.generation.embedded.forward import DecodeRuns, LoadedModel, PromptSegment, SlotKV, StepBatch
from workers.generation.embedded.step_cost import StepCost, measure_steps
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    NO_STOPS,
    Completion,
    GenerationRequest,
    Progress,
    Result,
    SampleKey,
    StopStrings,
)

BLOCK = 256
"""Vocabulary entries under one step of the coarse CDF: near the square root of 50k-150k tokens, so that the two
searches are about as long. Against one cumsum over the vocabulary this halves the time of a draw."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that passes BigCrush."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def stream_key(seed: int, sample: int) -> np.uint64:
    """The random stream of sample ``sample`` of a group seeded with ``seed`` (any int; taken modulo 2**64)."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, sample], dtype=np.uint64)
    return _mix(_mix(words[:1] + _GOLDEN) + (words[1:] + np.uint64(1)) * _GOLDEN)[0]


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per stream. keys: [B] of stream_key.  positions: [B] index of the token, from 0.

    Source: ours; SplitMix64 with the position as its counter. torch's generators have one stream each, and one
    generator per sample costs a Python call per sample and step.
    """
    words = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How to draw one token per row of a batch; all [B].

    temperature: 0 is greedy.  top_p in (0, 1], 1 is off.  top_k: 0 is off.  uniforms: in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    uniforms: NDArray[np.float64]

    def to(self, device: torch.device) -> PlacedDraw:
        """Before a step is computed: while a GPU computes, each copy waits for all of it."""

        def place(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        greedy = self.temperature == 0
        inverse = 1 / np.where(greedy, np.float32(1), self.temperature)
        cut = (self.top_p < 1) | (self.top_k > 0)
        return PlacedDraw(
            inverse=place(inverse[:, None]) if (inverse != 1).any() else None,
            greedy=place(greedy) if greedy.any() else None,
            cut=(place(np.flatnonzero(cut)), place(self.top_p[cut]), place(self.top_k[cut])) if cut.any() else None,
            uniforms=place(self.uniforms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDraw:
    """A Draw where the logits are. None: of no row.

    inverse: [B, 1] of the temperature, 1 where it is 0.  greedy: [B] bool.  cut: rows with top-p or top-k, theirs.
    """

    inverse: torch.Tensor | None
    greedy: torch.Tensor | None
    cut: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    uniforms: torch.Tensor


def sample_tokens(logits: torch.Tensor, draw: PlacedDraw) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw one token per row. A GPU is waited for once, at the end.

    Args:    logits: [B, V], any floating dtype.
    Returns: tokens [B] int32, and their logprobs [B] float32 under log_softmax(logits / temperature) over the whole
             vocabulary (temperature 0 counts as 1). A row whose logits are not finite has a logprob that is not finite;
             its token means nothing.
    Source:  order of the cuts as in transformers: top-k, renormalise, then top-p, keeping the token that crosses p.
    """
    # Times the inverse, not by the temperature: float32 comes out of one pass over bfloat16 logits.
    scaled = logits if draw.inverse is None else logits * draw.inverse
    weights = probs = torch.softmax(scaled, dim=-1, dtype=torch.float32)
    if draw.cut is not None:
        rows, top_p, top_k = draw.cut
        weights = probs.index_copy(0, rows, _truncate(probs[rows], top_p, top_k))
    tokens = _inverse_cdf(weights, draw.uniforms)
    if draw.greedy is not None:
        tokens = torch.where(draw.greedy, logits.argmax(-1), tokens)
    logprobs = probs.gather(1, tokens[:, None]).log().squeeze(1)
    drawn = torch.stack([tokens.to(torch.int32), logprobs.view(torch.int32)]).cpu().numpy()
    return drawn[0], drawn[1].view(np.float32)


def _truncate(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero what top-k and top-p cut off; [B, V]. Exactly k tokens stay; among equals the lower token id goes first. The
    likeliest always stays, also where ``top_p`` is so small that it is 0 here.
    """
    vocabulary = probs.shape[1]
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    p = top_p[:, None].double()
    ranked = ranked.masked_fill(torch.arange(vocabulary, device=probs.device) >= k, 0)
    mass = ranked.double().cumsum(-1)
    before = mass - ranked
    outside = (before > 0) & (before >= p * mass[:, -1:]) & (p < 1)
    return torch.zeros_like(probs).scatter_(1, order, ranked.masked_fill(outside, 0))


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at quantile ``uniforms`` of each row. weights: [B, V] >= 0, not necessarily summing to 1.

    Two searches: for the block, then within it. A token of weight zero is never drawn.
    """
    size = weights.shape[1]
    if padding := -size % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    block, rest = _search(blocks.sum(-1), uniforms[:, None], relative=True)
    inside = blocks[torch.arange(weights.shape[0], device=weights.device), block]
    offset, _ = _search(inside, rest[:, None], relative=False)
    return (block * BLOCK + offset).clamp_(max=size - 1)  # beyond the end only where no weight is a number


def _search(weights: torch.Tensor, target: torch.Tensor, *, relative: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative weight exceeds ``target`` [B, 1] (a share of the total when ``relative``).

    Returns: index [B], and what of the target lies inside that index [B]. The target is kept below the total, as the
    sum of a block and the sums inside it round differently.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(target * total if relative else target, below)
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    rest = target - (cumulative.gather(1, index) - weights.gather(1, index))
    return index.squeeze(1), rest.squeeze(1).clamp_(min=0)


MAX_PREFILL_TOKENS = 2048
"""Prompt tokens of one step (at least one prompt): bounds the activations and the pause of the running samples."""


MAX_DECODE_ROWS = 128
"""Slots times tokens of the slot that computes most: attention pads every slot to it, which no timed step shows."""


@dataclass(slots=True, kw_only=True)
class WaitingGroup:
    """A group with samples that have no slot. samples: those, in order.  order: of the first of them, among all that
    were submitted.  kept: of its prompt, once it was computed: keys and values, and the logits [1, V] of its last
    token.  begun: what its one sample goes on from, as if that were of the prompt.  retracted: that sample, if it ran
    here.
    """

    request: GenerationRequest
    samples: list[int]
    order: int
    queued_at_s: float
    kept: tuple[Sequence[torch.Tensor], torch.Tensor] | None = None
    begun: Beginning = NOTHING
    retracted: RunningSample | None = None

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """What is computed before its first draw."""
        prompt = self.request.prompt_ids
        return np.concatenate([prompt, self.begun.token_ids]) if len(self.begun) else prompt

    @property
    def input_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.begun)


class WaitingGroups:
    """Groups by priority, then in order of arrival; a started group comes before all others but what was retracted.

    So at most one group has a kept prompt, which bounds the memory. The price: up to ``group_size`` samples of a lower
    priority may go before a higher one that came later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WaitingGroup]] = []
        self.started: WaitingGroup | None = None

    def __bool__(self) -> bool:
        return bool(self.started or self._heap)

    def __iter__(self) -> Iterator[WaitingGroup]:
        """In no order."""
        return iter([*([self.started] if self.started else []), *(group for _, _, group in self._heap)])

    def push(self, group: WaitingGroup) -> None:
        heapq.heappush(self._heap, (*_place(group), group))

    def first(self) -> WaitingGroup | None:
        """The group to admit next."""
        if self.started is None:
            return self._heap[0][2] if self._heap else None
        return self._heap[0][2] if self._retracted_first() else self.started

    def _retracted_first(self) -> bool:
        return bool(
            self.started is not None
            and self._heap
            and self._heap[0][2].retracted is not None
            and self._heap[0][:2] < _place(self.started)
        )

    def take(self, count: int) -> list[int]:
        """Up to ``count`` samples of the first group, which is the started one while it has some left."""
        group = self.first()
        if group is None:
            raise ValueError("no group is waiting")
        if group is not self.started:
            heapq.heappop(self._heap)
        taken, group.samples = group.samples[:count], group.samples[count:]
        group.order += len(taken)
        if group.samples:
            self.started = group
        elif group is self.started:
            self.started = None
        return taken

    def remove(self, keys: Collection[tuple[GroupId, int]]) -> list[WaitingGroup]:
        """Take these (group, attempt)s out."""
        removed = [group for group in self if group.request.key in keys]
        if self.started in removed:
            self.started = None
        self._heap = [entry for entry in self._heap if entry[2].request.key not in keys]
        heapq.heapify(self._heap)
        return removed


def _place(group: WaitingGroup) -> tuple[float, int]:
    return -group.request.priority, group.order


KEPT_SHARE = 0.25
"""Tokens of turns that may be continued, over those of all slots: the oldest are dropped, and computed again."""

TurnKey = tuple[str | tuple[GroupId, int], int]
"""Whose turn: a conversation, or a group's attempt; sample."""


def turn_key(request: GenerationRequest, sample: int) -> TurnKey:
    return request.conversation or request.key, sample


@dataclass(frozen=True, slots=True)
class KeptTurn:
    """of: group and attempt.  token_ids: [T] those whose keys and values ``kv`` has, all of the present weights."""

    of: tuple[GroupId, int]
    token_ids: NDArray[np.int32]
    kv: Sequence[torch.Tensor]


class KeptTurns:
    """The KV of turns that wait for what is said to them, up to ``max_tokens`` tokens; the oldest go first.

    reused_tokens: of prompts, taken from here so far.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._turns: dict[TurnKey, KeptTurn] = {}
        self._tokens = 0
        self.reused_tokens = 0

    def put(self, key: TurnKey, turn: KeptTurn) -> None:
        self._remove(key)
        self._turns[key] = turn
        self._tokens += len(turn.token_ids)
        while self._tokens > self.max_tokens:
            self._remove(next(iter(self._turns)))

    def begins(self, request: GenerationRequest) -> KeptTurn | None:
        """The turn whose ids the prompt of a request begins with, if what comes behind them is no longer than they are:
        with many slots a step takes little of it, and a longer one would take more steps than it saves passes."""
        if len(request.samples) != 1:
            return None
        turn = self._turns.get(turn_key(request, request.samples[0]))
        ids = request.prompt_ids
        if turn is None or not len(turn.token_ids) < len(ids) <= 2 * len(turn.token_ids):
            return None
        return turn if np.array_equal(ids[: len(turn.token_ids)], turn.token_ids) else None

    def take(self, request: GenerationRequest, turn: KeptTurn) -> None:
        self.reused_tokens += len(turn.token_ids)
        self._remove(turn_key(request, request.samples[0]))

    def drop(self, keys: Collection[tuple[GroupId, int]]) -> None:
        for key in [one for one, turn in self._turns.items() if turn.of in keys]:
            self._remove(key)

    def clear(self) -> None:
        self._turns.clear()
        self._tokens = 0

    def _remove(self, key: TurnKey) -> None:
        if (turn := self._turns.pop(key, None)) is not None:
            self._tokens -= len(turn.token_ids)


@dataclass(slots=True, kw_only=True)
class RunningSample:
    """One sample in a slot. order: its place among all that were submitted.  limit: new tokens.  spans: (first token,
    weights), one more at each change of weights.  queued_s, admitted_at_s: at its first admission.  weights: at its
    last one.  unfed: last tokens of its prompt that no step has computed yet.  resumed: tokens that it went on from,
    when it came.  text: where drafts for it are looked up.
    """

    request: GenerationRequest
    sample: int
    order: int
    limit: int
    queued_s: float
    admitted_at_s: float
    weights: WeightIdentity
    unfed: int = 0
    resumed: int = 0
    text: Text | None = None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, WeightIdentity]] = field(default_factory=list[tuple[int, WeightIdentity]])

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Those that end it."""
        return () if self.request.sampling.ignore_eos else self.request.sampling.stop_token_ids

    def rest(self, most: int) -> list[int]:
        """Of its prompt, up to ``most`` tokens behind the one that the next step computes."""
        begin = len(self.request.prompt_ids) - self.unfed + 1
        return self.request.prompt_ids[begin : begin + most].tolist() if self.unfed > 1 else []

    @property
    def kv_tokens(self) -> int:
        """Tokens in its slot: the last drawn one is written by the next step."""
        return len(self.request.prompt_ids) - self.unfed + max(len(self.token_ids) - 1, 0)

    @property
    def context(self) -> int:
        """Those, and the last drawn one: what the limit of memory counts."""
        return len(self.request.prompt_ids) - self.unfed + len(self.token_ids)

    def waiting(self) -> WaitingGroup:
        """It waits again, with what it has; nothing while it is still fed what was said to it."""
        begun = NOTHING
        if self.token_ids:
            begun = Beginning(
                token_ids=np.array(self.token_ids, dtype=np.int32),
                logprobs=np.array(self.logprobs, dtype=np.float32),
                spans=self.version_spans(),
            )
        return WaitingGroup(
            request=self.request,
            samples=[self.sample],
            order=self.order,
            queued_at_s=self.admitted_at_s,
            begun=begun,
            retracted=self,
        )

    def add(self, token_id: int, logprob: float, weights: WeightIdentity) -> None:
        if not self.spans or self.spans[-1][1] != weights:
            self.spans.append((len(self.token_ids), weights))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def finish_reason(self, stops: StopStrings) -> FinishReason | None:
        """Why its last token ends it; None when it goes on."""
        sampling, before = self.request.sampling, len(self.token_ids) - 1
        if not sampling.ignore_eos and (
            self.token_ids[-1] in self.stop_token_ids
            or stops.end(self.token_ids, before)
            or self.request.stops.end(self.token_ids, before)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def version_spans(self) -> tuple[VersionSpan, ...]:
        ends = [start for start, _ in self.spans[1:]] + [len(self.token_ids)]
        return tuple(
            VersionSpan(start=start, end=end, weights=weights)
            for (start, weights), end in zip(self.spans, ends, strict=True)
        )

    def progress(self, start: int) -> Progress:
        """From its token ``start`` on, of which there are more."""
        return Progress(
            key=(*self.request.key, self.sample),
            start=start,
            token_ids=np.array(self.token_ids[start:], dtype=np.int32),
            logprobs=np.array(self.logprobs[start:], dtype=np.float32),
            spans=clipped(self.version_spans(), start, len(self.token_ids)),
        )

    def completion(self, reason: FinishReason, now_s: float) -> Completion:
        return Completion(
            group_id=self.request.group_id,
            sample=self.sample,
            attempt=self.request.attempt,
            response_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            spans=self.version_spans(),
            queued_s=self.queued_s,
            engine_s=now_s - self.admitted_at_s,
            resumed=self.resumed,
        )


SLOT = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("stream", np.uint64),
        ("prompt_tokens", np.int64),
        ("generated", np.int64),
        ("last_token", np.int64),
    ],
    align=True,
)
"""What a step needs to know of a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """max_tokens: drafted for a sample and step, at most.  step_s: seconds of a step by (tokens computed, context
    tokens of all slots, each as long as the longest).
    """

    said: SaidBefore
    max_tokens: int
    step_s: Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class _Admission:
    """Samples of ``group`` that enter ``slots`` in this step."""

    group: WaitingGroup
    slots: slice

    @property
    def count(self) -> int:
        return self.slots.stop - self.slots.start


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of the logits of a step. widths, starts: [n] how many a slot has, and its first.  slots, places: [R] whose
    each is, and its place there.
    """

    widths: NDArray[np.int64]
    starts: NDArray[np.int64]
    slots: NDArray[np.int64]
    places: NDArray[np.int64]

    @staticmethod
    def of(num_slots: int, ahead: Sequence[Sequence[int]]) -> _Rows:
        """ahead: of the first slots."""
        widths = np.array([1 + len(one) for one in ahead] + [1] * (num_slots - len(ahead)), np.int64)
        starts = widths.cumsum() - widths
        slots = np.repeat(np.arange(num_slots), widths)
        return _Rows(widths, starts, slots, np.arange(len(slots)) - starts[slots])


class SlotDecoder:
    """``slots`` samples at once over one model. Not thread-safe: one thread calls everything.

    weights: the identity of what the model's parameters hold; ``load_weights`` writes into them.
    kv_tokens: what its slots hold together, and turns that may be continued; 0: all slots, each ``max_context``. The
    prompt of a group that is partly admitted is kept beside it.
    tokens: drawn so far, of all samples.  prefill_tokens: of prompts, computed so far; a kept prompt costs none.
    drafted: tokens that were computed because a draft said so.  accepted: those of them that the policy drew.
    num_retracted: how often a sample gave up its slot for others.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: int,
        weights: WeightIdentity,
        clock: Clock,
        stops: StopStrings = NO_STOPS,
        kv_tokens: int = 0,
    ) -> None:
        """kv_tokens: at least a whole context, or 0."""
        like = next(iter(model.parameters.values()))
        self.slots, self.max_context, self.vocab_size = slots, model.max_context, model.vocab_size
        self.weights, self._stops = weights, stops
        self.tokens = self.prefill_tokens = self.drafted = self.accepted = self.num_retracted = 0
        self.drafting: Drafting | None = None
        """Whether, from where and how deep samples are drafted that begin from now on; set while none runs."""
        self._forward, self.parameters, self._clock = model.forward, model.parameters, clock
        self._device = like.device
        self.kv_tokens = kv_tokens if kv_tokens < slots * model.max_context else 0
        self._kv = SlotKV(
            model.forward.kv_shape,
            slots=slots,
            max_tokens=model.max_context,
            dtype=like.dtype,
            device=like.device,
            limit=self.kv_tokens,
        )
        self._waiting = WaitingGroups()
        self._num_submitted = 0
        kept = int(KEPT_SHARE * self._kv.limit)
        self._kept = KeptTurns(min(kept, self.kv_tokens - model.max_context) if self.kv_tokens else kept)
        self._running: list[RunningSample] = []
        self.told: list[Callable[[], None]] = []
        """What is to be called, on the loop, of samples whose tokens are wanted as they come."""
        self._table = np.zeros(slots, SLOT)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def reused_tokens(self) -> int:
        """Of prompts, whose KV an earlier turn had left."""
        return self._kept.reused_tokens

    @property
    def held_tokens(self) -> int:
        """Of the limit, that running samples take: each as much as the longest."""
        return len(self._running) * self._longest()

    def _longest(self, tokens: int = 0) -> int:
        """Context of the longest running sample, and of one with ``tokens`` beside them."""
        return max([tokens, *(sample.context for sample in self._running)])

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @torch.inference_mode()
    def measure_steps(self, max_drafted: int) -> StepCost:
        """What steps take here with so many drafted tokens a sample; before anything runs."""
        return measure_steps(self._forward, self._kv, self._clock, max_drafted=max_drafted)

    def submit(self, request: GenerationRequest) -> list[Result]:
        """Queue a group. A request that can never run comes back at once, as a failure that is not retryable."""
        reason = request.why_impossible(max_context=self.max_context, vocab_size=self.vocab_size)
        if reason:
            return [request.failure(request.samples, reason, retryable=False)]
        if request.keep and self.kv_tokens:  # from the first one on, turns have their part of a limited memory
            self._kv.limit = self.kv_tokens - self._kept.max_tokens
        for sample, begun in request.begun.items():
            self._queue(request, [sample], begun)
        if fresh := [sample for sample in request.samples if sample not in request.begun]:
            self._queue(request, fresh)
        return []

    def _queue(self, request: GenerationRequest, samples: list[int], begun: Beginning = NOTHING) -> None:
        order, now_s = self._num_submitted, self._clock.now_s()
        self._num_submitted += len(samples)
        self._waiting.push(WaitingGroup(request=request, samples=samples, order=order, queued_at_s=now_s, begun=begun))

    def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """As GenerationEngine.progress. A turn that may be continued is of an episode, which keeps its own."""
        found: list[Progress] = []
        retracted = [group.retracted for group in self._waiting if group.retracted is not None]
        for begun in (*self._running, *retracted):
            start = known.get((*begun.request.key, begun.sample), 0)
            if len(begun.token_ids) > start and not begun.request.keep:
                found.append(begun.progress(start))
        return found

    @torch.inference_mode()
    def abort(self, keys: Collection[tuple[GroupId, int]]) -> list[Result]:
        """Stop these (group, attempt)s: samples that have begun come out with what they have, others as a failure."""
        self._kept.drop(keys)
        waiting = self._waiting.remove(keys)
        results: list[Result] = [
            group.request.failure(group.samples, ABORTED_UNSTARTED) for group in waiting if group.retracted is None
        ]
        now_s = self._clock.now_s()
        stopped = [slot for slot, sample in enumerate(self._running) if sample.request.key in keys]
        left = [self._leave(slot) for slot in reversed(stopped)]
        for one in (*left, *(group.retracted for group in waiting if group.retracted is not None)):
            if one.token_ids:
                results.append(one.completion(FinishReason.ABORT, now_s))
            else:  # it was still fed what was said to it
                results.append(one.request.failure((one.sample,), ABORTED_UNSTARTED))
        return results

    @torch.inference_mode()
    def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` into the model, which then is ``weights``. Running samples go on from the KV they have.

        Their names and shapes have been checked (``weights.check_tensors``): here nothing may fail half-way.
        """
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
        self._forward.weights_changed()
        self.weights = weights
        self._kept.clear()
        if self._waiting.started is not None:
            self._waiting.started.kept = None

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Retract what does not fit, admit what does, draw a token for every running sample, or several, and return
        those that ended."""
        self._retract()
        self._continue()
        num_decode = len(self._running)
        admitted = self._admit()
        if not self._running:
            return []
        ahead = self._ahead(num_decode, admitted)
        rows = _Rows.of(len(self._running), ahead)
        slots = self._table[rows.slots]
        draw = Draw(
            temperature=slots["temperature"],
            top_p=slots["top_p"],
            top_k=slots["top_k"],
            uniforms=uniforms(slots["stream"], slots["generated"] + rows.places),
        ).to(self._device)
        logits = self._compute(num_decode, rows, ahead, admitted)
        token_ids, logprobs = (drawn.tolist() for drawn in sample_tokens(logits, draw))
        reasons: list[FinishReason | None] = []
        finite: list[bool] = []
        for slot, first in enumerate(rows.starts.tolist()):
            behind = ahead[slot] if slot < len(ahead) else ()
            last, reason = self._take(slot, token_ids[first:], logprobs[first:], behind)
            reasons.append(reason)
            finite.append(math.isfinite(logprobs[first + last]))
        return self._hand_out(reasons, finite)

    def _ahead(self, num_decode: int, admitted: Sequence[_Admission]) -> Sequence[Sequence[int]]:
        """What to compute behind the last token of each of the slots [0, num_decode): what is left of its prompt, or a
        draft; () where no slot has any.
        """
        if not num_decode:
            return ()
        deepest, each = MAX_DECODE_ROWS // num_decode - 1, self._kv.limit // len(self._running)
        # Of a prompt that is fed, its next token is not yet in the context.
        rests = [sample.rest(min(deepest, each - sample.context - 1)) for sample in self._running[:num_decode]]
        prompts = sum(one.group.input_tokens for one in admitted if one.group.kept is None)
        drafts = self._draft(num_decode, deepest, prompts + sum(map(len, rests)))
        if not drafts:
            return rests if any(rests) else ()
        return [rest or draft for rest, draft in zip(rests, drafts, strict=True)]

    def _draft(self, num_decode: int, deepest: int, beside: int) -> Sequence[Sequence[int]]:
        """Drafts of at most ``deepest`` tokens for the slots [0, num_decode), as far as they pay; none: ().

        beside: tokens that the step computes of prompts.
        """
        if (drafting := self.drafting) is None:
            return ()
        deepest, each = min(drafting.max_tokens, deepest), self._kv.limit // len(self._running)
        drafts: list[Draft] = []
        for sample in self._running[:num_decode]:
            left = sample.limit - len(sample.token_ids) - 1  # the last token is never computed
            most = 0 if sample.unfed else max(0, min(deepest, left, each - sample.context))
            drafts.append(drafting.said.draft(sample.text, most, sample.stop_token_ids) if sample.text else NO_DRAFT)
        worth = sorted(((chance, slot) for slot, one in enumerate(drafts) for chance in one.chances), reverse=True)
        if not worth:
            return ()
        longest = max(sample.kv_tokens for sample in self._running[:num_decode]) + 1
        count = num_drafted(
            lambda tokens, context: drafting.step_s(tokens + beside, context),
            num_decode,
            num_decode * longest,
            [chance for chance, _ in worth],
        )
        if not count:
            return ()
        self.drafted += count
        depths = Counter(slot for _, slot in worth[:count])
        return [one.token_ids[: depths[slot]] for slot, one in enumerate(drafts)]

    def _take(
        self, slot: int, token_ids: Sequence[int], logprobs: Sequence[float], ahead: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """A slot's sample gets what was drawn for it: once its prompt is fed, and then while it is what its draft said.

        ahead: what was computed behind its last token.  Returns the place of the last that counts in what was drawn,
        and why it ends the sample.
        """
        sample, row = self._running[slot], self._table[slot]
        fed = min(sample.unfed, 1 + len(ahead))
        sample.unfed -= fed
        if sample.unfed:  # what was drawn is not its next token: that is in its prompt
            row["last_token"] = sample.request.prompt_ids[-sample.unfed]
            row["generated"] += fed
            return fed - 1, None
        begin = max(0, fed - 1)
        draft = () if fed else ahead
        taken, reason = 0, None
        for token_id, logprob, said in zip(token_ids[begin:], logprobs[begin:], (*draft, None), strict=False):
            sample.add(token_id, logprob, self.weights)
            taken += 1
            if self.drafting is not None and sample.text is not None:
                self.drafting.said.add(sample.text, token_id)
            reason = sample.finish_reason(self._stops)
            if reason is not None or token_id != said or not math.isfinite(logprob):
                break
        end = begin + taken
        row["last_token"] = token_ids[end - 1]
        row["generated"] += end
        self.tokens += taken
        self.accepted += taken - 1
        if (tell := sample.request.on_tokens) is not None:
            first = len(sample.token_ids) - taken
            self.told.append(partial(tell, first, tuple(token_ids[begin:end]), tuple(logprobs[begin:end])))
        return end - 1, reason

    def _retract(self) -> None:
        """Those of which least is to be computed again wait again, until the others fit for one more step."""
        while self.kv_tokens and is_full(len(self._running), self.held_tokens, self._kv.limit):
            slot = min(
                range(len(self._running)),
                key=lambda slot: (self._running[slot].context, -self._running[slot].order),
            )
            self._waiting.push(self._leave(slot).waiting())
            self.num_retracted += 1

    def _room(self, tokens: int) -> int:
        """How many more samples of ``tokens`` tokens may start."""
        running, longest = len(self._running), self._longest(tokens)
        num = running
        while num < self.slots and has_room(num + 1, (num + 1) * longest, self._kv.limit, self.max_context):
            num += 1
        return num - running

    def _turn(self, group: WaitingGroup) -> KeptTurn | None:
        """What its prompt begins with, if that is kept."""
        return None if len(group.begun) else self._kept.begins(group.request)

    def _continue(self) -> None:
        """Give free slots to waiting turns whose beginning is kept; what is behind it is fed by the next steps."""
        while len(self._running) < self.slots and (group := self._waiting.first()) is not None:
            request, slot = group.request, len(self._running)
            if (turn := self._turn(group)) is None or not self._room(len(request.prompt_ids)):
                return
            order = group.order
            (sample,) = self._waiting.take(1)
            self._kept.take(request, turn)
            self._kv.reserve(self._longest(len(request.prompt_ids)), slot + 1, slot)
            self._kv.paste_prompt(slice(slot, slot + 1), turn.kv)
            unfed = len(request.prompt_ids) - len(turn.token_ids)
            last_token = int(request.prompt_ids[-unfed])
            # The position of a step is that of its token, and its draw is numbered from 0 where the prompt ends.
            self._enter(group, sample, order, generated=1 - unfed, last_token=last_token, unfed=unfed)

    def _enter(
        self, group: WaitingGroup, sample: int, order: int, *, generated: int = 0, last_token: int = 0, unfed: int = 0
    ) -> None:
        """The next free slot is this sample's."""
        request, now_s = group.request, self._clock.now_s()
        drawn, stream = request.sampling, stream_key(request.sampling.seed, sample)
        begun = group.begun
        generated += len(begun)
        entering = group.retracted or RunningSample(
            request=request,
            sample=sample,
            order=order,
            limit=request.limit(sample),
            queued_s=now_s - group.queued_at_s,
            admitted_at_s=now_s,
            weights=self.weights,
            resumed=len(begun),
            token_ids=begun.token_ids.tolist(),
            logprobs=begun.logprobs.tolist(),
            spans=[(span.start, span.weights) for span in begun.spans],
        )
        entering.weights, entering.unfed = self.weights, unfed
        if self.drafting is not None:
            prompt = request.prompt_ids
            entering.text = self.drafting.said.begin(prompt.tobytes(), prompt.tolist(), begun.token_ids.tolist())
        row = (drawn.temperature, drawn.top_p, drawn.top_k, stream, len(request.prompt_ids), generated, last_token)
        self._table[len(self._running)] = row
        self._running.append(entering)

    def _admit(self) -> list[_Admission]:
        """Give the free slots to waiting samples, a group at a time; they are running from now on."""
        admitted: list[_Admission] = []
        prefill_tokens = 0
        while len(self._running) < self.slots and (group := self._waiting.first()) is not None:
            prefill_tokens += group.input_tokens if group.kept is None else 0
            if self._turn(group) or (prefill_tokens > MAX_PREFILL_TOKENS and admitted):
                break
            if not (room := self._room(group.input_tokens)):
                break
            first, order = len(self._running), group.order
            for place, sample in enumerate(self._waiting.take(room)):
                self._enter(group, sample, order + place)
            admitted.append(_Admission(group, slice(first, len(self._running))))
        return admitted

    def _compute(
        self, num_decode: int, rows: _Rows, ahead: Sequence[Sequence[int]], admitted: Sequence[_Admission]
    ) -> torch.Tensor:
        """One forward pass. Returns logits of every running sample, and of what is ahead, in the order of ``rows``."""
        fresh = [admission for admission in admitted if admission.group.kept is None]
        batch = self._batch(num_decode, rows, ahead, fresh)
        prompts = [admission.group.input_tokens for admission in admitted]
        self._kv.reserve(max(batch.max_tokens, *prompts, 0), len(self._running), num_decode)
        for admission in admitted:
            if admission.group.kept is not None:
                self._kv.paste_prompt(admission.slots, admission.group.kept[0])
        logits = self._forward.run(batch, self._kv) if num_decode or fresh else None
        if logits is not None and not admitted:
            return logits
        parts: list[torch.Tensor] = [] if logits is None else [logits[: batch.num_decode]]
        row = batch.num_decode
        for admission in admitted:
            group = admission.group
            if group.kept is not None:
                parts.append(group.kept[1].expand(admission.count, -1))
                continue
            assert logits is not None
            of_prompt, row = logits[row : row + 1], row + 1
            parts.append(of_prompt.expand(admission.count, -1))
            if group.samples:  # they are still without a slot
                kv = self._kv.copy_prompt(admission.slots.start, len(group.request.prompt_ids))
                group.kept = kv, of_prompt.clone()
        return torch.cat(parts)

    def _batch(
        self, num_decode: int, rows: _Rows, ahead: Sequence[Sequence[int]], fresh: Sequence[_Admission]
    ) -> StepBatch:
        count = int(rows.widths[:num_decode].sum())
        running = self._table[rows.slots[:count]]
        positions = running["prompt_tokens"] + running["generated"] - 1 + rows.places[:count]
        decoded = running["last_token"]
        if ahead:
            decoded[rows.places[:count] > 0] = [token for one in ahead for token in one]
        tokens, places, segments, start = [decoded], [positions], list[PromptSegment](), count
        for admission in fresh:
            prompt = admission.group.input_ids.astype(np.int64)
            tokens.append(prompt)
            places.append(np.arange(len(prompt)))
            segments.append(PromptSegment(start=start, stop=start + len(prompt), slots=admission.slots))
            start += len(prompt)
        self.prefill_tokens += start - count
        return StepBatch(
            token_ids=torch.from_numpy(np.concatenate(tokens)).to(self._device),
            positions=torch.from_numpy(np.concatenate(places)).to(self._device),
            decode_slots=torch.from_numpy(rows.slots[:count]).to(self._device),
            max_tokens=int(positions.max()) + 1 if num_decode else 0,
            prompts=segments,
            runs=DecodeRuns.of(rows.widths[:num_decode], self._device) if ahead else None,
        )

    def _hand_out(self, reasons: Sequence[FinishReason | None], finite: Sequence[bool]) -> list[Result]:
        """Free the slots of the samples that ended. Per slot, why; and whether its last logprob was finite."""
        results: list[Result] = []
        now_s = self._clock.now_s()
        for slot in reversed(range(len(self._running))):
            sample, reason = self._running[slot], reasons[slot]
            if not finite[slot]:
                self._kv.clear(slot)  # a masked position still meets its value as 0 * value, and 0 * NaN is NaN
                left, why = self._leave(slot), f"logits are not finite under weights {self.weights}"
                results.append(left.request.failure((left.sample,), why))
            elif reason is not None:
                if sample.request.keep and sample.weights == self.weights:
                    ids = np.concatenate([sample.request.prompt_ids, np.array(sample.token_ids[:-1], np.int32)])
                    turn = KeptTurn(sample.request.key, ids, self._kv.copy_prompt(slot, len(ids)))
                    self._kept.put(turn_key(sample.request, sample.sample), turn)
                results.append(self._leave(slot).completion(reason, now_s))
        return results

    def _leave(self, slot: int) -> RunningSample:
        """Free ``slot``. The last running sample moves into it, so that slots [0, n) stay the running ones."""
        leaving, last = self._running[slot], self._running.pop()
        if self.drafting is not None and leaving.text is not None:
            self.drafting.said.end(leaving.text)
        if leaving is not last:
            self._running[slot] = last
            self._kv.move(len(self._running), slot, last.kv_tokens)
            self._table[slot] = self._table[len(self._running)]
        return leaving
