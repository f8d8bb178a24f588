"""Continuous batching over KV slots: the synchronous core of the embedded engine, and a sample's life inside it.

Owns: the slots, and the order of a step. Never: threads, asyncio, the broker.
Invariant: every submitted sample comes out exactly once, as a Completion or in an EngineFailure; running samples occupy
slots [0, n); a prompt's KV is used under the weights that made it, and under no others.

    submit ─► waiting ─► step: admit, one forward pass, draw, hand out what ended, close the gaps
                           │ the prompt of a new group is computed once and written to all its slots
                           └ if they were too few, it is kept for the group's other samples

Source: ours; continuous batching as in Orca (OSDI 2022), prompts and decode tokens in one pass as in Sarathi-Serve
(OSDI 2024). Re-computing the prompts of partly admitted groups took 23% of the time on long-tailed lengths.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from transport.process.clock import Clock
from workers.generation.embedded.forward import Forward, PromptSegment, StepBatch
from workers.generation.embedded.kv import PromptKV, SlotKV
from workers.generation.embedded.sampling import Draw, sample_tokens, stream_key, uniforms
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    Completion,
    EngineFailure,
    GenerationRequest,
    Result,
)

MAX_PREFILL_TOKENS = 2048
"""Prompt tokens of one step (at least one prompt): bounds the activations and the pause of the running samples."""


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """A prompt already computed. logits: [1, V], of its last token."""

    kv: PromptKV
    logits: torch.Tensor


@dataclass(slots=True, kw_only=True)
class WaitingGroup:
    """A group with samples that have no slot yet. samples: those, in order.  kept: its prompt, once it was computed."""

    request: GenerationRequest
    samples: list[int]
    queued_at_s: float
    kept: KeptPrompt | None = None

    def failure(self, reason: str, *, retryable: bool) -> EngineFailure:
        """All its waiting samples, as a failure."""
        return self.request.failure(self.samples, reason, retryable=retryable)


class WaitingGroups:
    """Groups by priority, then in order of arrival; a started group comes before all others.

    So at most one group has a kept prompt, which bounds the memory. The price: up to ``group_size`` samples of a lower
    priority may go before a higher one that came later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, WaitingGroup]] = []
        self._order = itertools.count()
        self._started: WaitingGroup | None = None

    def __bool__(self) -> bool:
        return bool(self._started or self._heap)

    def push(self, group: WaitingGroup) -> None:
        heapq.heappush(self._heap, (-group.request.priority, next(self._order), group))

    def first(self) -> WaitingGroup | None:
        """The group to admit next; from now on it is the started one."""
        if self._started is None and self._heap:
            self._started = heapq.heappop(self._heap)[2]
        return self._started

    def take(self, count: int) -> list[int]:
        """Up to ``count`` samples of the started group; once it has none left, it is gone from here."""
        group = self.first()
        if group is None:
            raise ValueError("no group is waiting")
        taken, group.samples = group.samples[:count], group.samples[count:]
        if not group.samples:
            self._started = None
        return taken

    def forget_kept_prompt(self) -> None:
        """The weights have changed: what was computed of a prompt must not be used again."""
        if self._started is not None:
            self._started.kept = None

    def remove(self, keys: Collection[tuple[GroupId, int]]) -> list[WaitingGroup]:
        """Take these (group, attempt)s out."""
        removed = [group for group in self._all() if group.request.key in keys]
        if self._started in removed:
            self._started = None
        self._heap = [entry for entry in self._heap if entry[2].request.key not in keys]
        heapq.heapify(self._heap)
        return removed

    def _all(self) -> list[WaitingGroup]:
        return ([self._started] if self._started else []) + [group for _, _, group in self._heap]


@dataclass(slots=True, kw_only=True)
class RunningSample:
    """One sample in a slot. limit: new tokens.  spans: (first token, weights), one more at each change of weights."""

    request: GenerationRequest
    sample: int
    limit: int
    queued_s: float
    admitted_at_s: float
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, WeightIdentity]] = field(default_factory=list[tuple[int, WeightIdentity]])

    @property
    def kv_tokens(self) -> int:
        """Tokens in its slot: the last drawn one is written by the next step."""
        return len(self.request.prompt_ids) + max(len(self.token_ids) - 1, 0)

    def add(self, token_id: int, logprob: float, weights: WeightIdentity) -> None:
        if not self.spans or self.spans[-1][1] != weights:
            self.spans.append((len(self.token_ids), weights))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def finish_reason(self) -> FinishReason | None:
        """Why its last token ends it; None when it goes on."""
        sampling = self.request.sampling
        if not sampling.ignore_eos and self.token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def completion(self, reason: FinishReason, now_s: float) -> Completion:
        ends = [start for start, _ in self.spans[1:]] + [len(self.token_ids)]
        return Completion(
            group_id=self.request.group_id,
            sample=self.sample,
            attempt=self.request.attempt,
            response_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            spans=tuple(
                VersionSpan(start=start, end=end, weights=weights)
                for (start, weights), end in zip(self.spans, ends, strict=True)
            ),
            queued_s=self.queued_s,
            engine_s=now_s - self.admitted_at_s,
        )

    def failure(self, reason: str) -> EngineFailure:
        return self.request.failure((self.sample,), reason)


class SlotTable:
    """What a step needs to know of every slot, as columns. Rows [0, n) are the running samples."""

    def __init__(self, slots: int) -> None:
        self._temperature: NDArray[np.float32] = np.ones(slots, np.float32)
        self._top_p: NDArray[np.float32] = np.ones(slots, np.float32)
        self._top_k: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._streams: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._prompt_tokens: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._generated: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._last_token: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._columns = (
            self._temperature,
            self._top_p,
            self._top_k,
            self._streams,
            self._prompt_tokens,
            self._generated,
            self._last_token,
        )

    def enter(self, slot: int, request: GenerationRequest, sample: int) -> None:
        sampling = request.sampling
        row = (sampling.temperature, sampling.top_p, sampling.top_k, stream_key(sampling.seed, sample))
        for column, value in zip(self._columns, (*row, len(request.prompt_ids), 0, 0), strict=True):
            column[slot] = value

    def move(self, source: int, target: int) -> None:
        for column in self._columns:
            column[target] = column[source]

    def decode_inputs(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Last token and its position, of slots [0, count): what the next step reads."""
        return self._last_token[:count], self._prompt_tokens[:count] + self._generated[:count] - 1

    def draw(self, count: int) -> Draw:
        return Draw(
            temperature=self._temperature[:count],
            top_p=self._top_p[:count],
            top_k=self._top_k[:count],
            uniforms=uniforms(self._streams[:count], self._generated[:count]),
        )

    def record(self, token_ids: NDArray[np.int32]) -> None:
        """One token was drawn for each of the slots [0, len(token_ids))."""
        self._last_token[: len(token_ids)] = token_ids
        self._generated[: len(token_ids)] += 1


def token_array(tokens: Sequence[NDArray[np.int64]], device: torch.device) -> torch.Tensor:
    """One int64 tensor of all of them."""
    return torch.from_numpy(np.concatenate(tokens)).to(device)


@dataclass(slots=True, kw_only=True)
class DecoderCounters:
    """Cumulative. tokens: drawn, of all samples.  prefill_tokens: prompt tokens computed; a kept prompt costs none."""

    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Admission:
    """Samples of ``group`` that enter ``slots`` in this step."""

    group: WaitingGroup
    slots: slice

    @property
    def count(self) -> int:
        return self.slots.stop - self.slots.start


class SlotDecoder:
    """``slots`` samples at once over one model. Not thread-safe: one thread calls everything.

    parameters: the model's tensors by each of their Hugging Face names; ``load_weights`` writes into them.
    weights: the identity of what they hold now.
    """

    def __init__(
        self,
        forward: Forward,
        parameters: Mapping[str, torch.Tensor],
        *,
        slots: int,
        max_context: int,
        vocab_size: int,
        weights: WeightIdentity,
        clock: Clock,
    ) -> None:
        like = next(iter(parameters.values()))
        self.slots, self.max_context, self.vocab_size = slots, max_context, vocab_size
        self.weights = weights
        self.counters = DecoderCounters()
        self._forward, self.parameters, self._clock = forward, parameters, clock
        self._device = like.device
        self._kv = SlotKV(forward.kv_shape, slots=slots, max_tokens=max_context, dtype=like.dtype, device=like.device)
        self._waiting = WaitingGroups()
        self._running: list[RunningSample] = []
        self._table = SlotTable(slots)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(self, request: GenerationRequest) -> list[Result]:
        """Queue a group. A request that can never run comes back at once, as a failure that is not retryable."""
        group = WaitingGroup(request=request, samples=list(request.samples), queued_at_s=self._clock.now_s())
        reason = request.why_impossible(max_context=self.max_context, vocab_size=self.vocab_size)
        if reason:
            return [group.failure(reason, retryable=False)]
        self._waiting.push(group)
        return []

    def abort(self, keys: Collection[tuple[GroupId, int]]) -> list[Result]:
        """Stop these (group, attempt)s: running samples come out with what they have, waiting ones as a failure."""
        waiting = self._waiting.remove(keys)
        results: list[Result] = [group.failure(ABORTED_UNSTARTED, retryable=True) for group in waiting]
        now_s = self._clock.now_s()
        stopped = [slot for slot, sample in enumerate(self._running) if sample.request.key in keys]
        results += [self._leave(slot).completion(FinishReason.ABORT, now_s) for slot in reversed(stopped)]
        return results

    @torch.inference_mode()
    def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy ``tensors`` into the model, which then is ``weights``. Running samples go on from the KV they have.

        Their names and shapes have been checked (``weights.check_tensors``): here nothing may fail half-way.
        """
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)
        self.weights = weights
        self._waiting.forget_kept_prompt()

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Admit what fits, draw one token for every running sample, and return those that ended."""
        num_decode = len(self._running)
        admitted = self._admit()
        if not self._running:
            return []
        logits = self._compute(num_decode, admitted)
        token_ids, logprobs = sample_tokens(logits, self._table.draw(len(self._running)))
        self._table.record(token_ids)
        self.counters.steps += 1
        self.counters.tokens += len(token_ids)
        for sample, token_id, logprob in zip(self._running, token_ids.tolist(), logprobs.tolist(), strict=True):
            sample.add(token_id, logprob, self.weights)
        return self._hand_out(np.isfinite(logprobs).tolist())

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def _admit(self) -> list[_Admission]:
        """Give the free slots to waiting samples, a group at a time; they are running from now on."""
        admitted: list[_Admission] = []
        prefill_tokens = 0
        while len(self._running) < self.slots and (group := self._waiting.first()) is not None:
            prefill_tokens += len(group.request.prompt_ids) if group.kept is None else 0
            if prefill_tokens > MAX_PREFILL_TOKENS and admitted:
                break
            first = len(self._running)
            for sample in self._waiting.take(self.slots - first):
                self._enter(group, sample)
            admitted.append(_Admission(group, slice(first, len(self._running))))
        return admitted

    def _enter(self, group: WaitingGroup, sample: int) -> None:
        now_s = self._clock.now_s()
        self._table.enter(len(self._running), group.request, sample)
        self._running.append(
            RunningSample(
                request=group.request,
                sample=sample,
                limit=group.request.limit(sample),
                queued_s=now_s - group.queued_at_s,
                admitted_at_s=now_s,
            )
        )

    def _compute(self, num_decode: int, admitted: Sequence[_Admission]) -> torch.Tensor:
        """One forward pass. Returns the logits of every running sample, [n, V], in the order of the slots."""
        kept = [admission for admission in admitted if admission.group.kept is not None]
        fresh = [admission for admission in admitted if admission.group.kept is None]
        batch = self._batch(num_decode, fresh)
        prompts = [len(admission.group.request.prompt_ids) for admission in admitted]
        self._kv.reserve(max(batch.max_tokens, *prompts, 0), num_decode)
        # Only the started group can have a kept prompt, and it is admitted first: its slots precede the fresh ones.
        parts: list[torch.Tensor] = []
        for admission in kept:
            prompt = admission.group.kept
            assert prompt is not None
            self._kv.paste_prompt(admission.slots, prompt.kv)
            parts.append(prompt.logits.expand(admission.count, -1))
        if not num_decode and not fresh:
            return torch.cat(parts)
        logits = self._forward.run(batch, self._kv)
        if not admitted:
            return logits
        for row, admission in enumerate(fresh, start=num_decode):
            parts.append(logits[row : row + 1].expand(admission.count, -1))
            self._keep_prompt(admission, logits[row : row + 1])
        return torch.cat([logits[:num_decode], *parts])

    def _batch(self, num_decode: int, fresh: Sequence[_Admission]) -> StepBatch:
        token_ids, positions = self._table.decode_inputs(num_decode)
        tokens, places, segments, start = [token_ids], [positions], list[PromptSegment](), num_decode
        for admission in fresh:
            prompt = admission.group.request.prompt_ids.astype(np.int64)
            tokens.append(prompt)
            places.append(np.arange(len(prompt)))
            segments.append(PromptSegment(start=start, stop=start + len(prompt), slots=admission.slots))
            start += len(prompt)
        self.counters.prefill_tokens += start - num_decode
        return StepBatch(
            token_ids=token_array(tokens, self._device),
            positions=token_array(places, self._device),
            num_decode=num_decode,
            max_tokens=int(positions.max()) + 1 if num_decode else 0,
            prompts=segments,
        )

    def _keep_prompt(self, admission: _Admission, logits: torch.Tensor) -> None:
        """Keep a prompt just computed, if samples of its group are still without a slot."""
        group = admission.group
        if group.samples:
            prompt = self._kv.copy_prompt(admission.slots.start, len(group.request.prompt_ids))
            group.kept = KeptPrompt(prompt, logits.clone())

    def _hand_out(self, finite: Sequence[bool]) -> list[Result]:
        """Free the slots of the samples whose last token ended them. finite: per slot, whether its logprob was."""
        results: list[Result] = []
        now_s = self._clock.now_s()
        for slot in reversed(range(len(self._running))):
            reason = self._running[slot].finish_reason()
            if not finite[slot]:
                self._kv.clear(slot)  # a masked position still meets its value as 0 * value, and 0 * NaN is NaN
                results.append(self._leave(slot).failure(f"logits are not finite under weights {self.weights}"))
            elif reason is not None:
                results.append(self._leave(slot).completion(reason, now_s))
        return results

    def _leave(self, slot: int) -> RunningSample:
        """Free ``slot``. The last running sample moves into it, so that slots [0, n) stay the running ones."""
        leaving, last = self._running[slot], self._running.pop()
        if leaving is not last:
            self._running[slot] = last
            self._kv.move(len(self._running), slot, last.kv_tokens)
            self._table.move(len(self._running), slot)
        return leaving
