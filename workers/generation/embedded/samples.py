"""A sample's life inside the engine: waiting with its group, then running in a slot.

Owns: the order of admission and what is recorded of a running sample. Never: tensors of the model.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from transport.contracts.types import FinishReason, GroupId, VersionSpan, WeightIdentity
from workers.generation.embedded.kv import PromptKV
from workers.generation.embedded.sampling import Draw, stream_key, uniforms
from workers.generation.engine import Completion, EngineFailure, GenerationRequest


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
