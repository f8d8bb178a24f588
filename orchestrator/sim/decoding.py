"""Continuous batching, exact between changes: what decodes in one instance, and when the next thing happens in it.

Owns: slots, waiting samples and the KV cache of one instance, in whole decode steps. Never: the event heap, messages,
decisions. Invariant: equal to a loop over every token step; everything changes at the boundary between two steps.

    submit ──► waiting (priority, then arrival) ──admit: slots, KV──► running (heap by end step) ──► ended
                  ▲                                                      │
                  └──── retracted: the KV cache is full ─────────────────┘
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from orchestrator.core.costs.cost_model import DecodeCost
from transport.contracts.messages import GroupPlan
from transport.contracts.types import GroupId, WeightIdentity

HEADROOM_TOKENS = 256
"""Free KV tokens that admission leaves for each running sample, so that few of them are retracted soon.
Source: SGLang's estimate of new tokens, in its simplest form."""
ROUNDING = 1e-6
"""Decode steps; a boundary that is this near is now."""


class SampleTooLongError(ValueError):
    """A sample does not fit into the KV cache of an empty instance."""


@dataclass(slots=True)
class Sample:
    """One sample on an instance. length: of its response, tokens.  spans: (weights, tokens) of what was generated.

    start_step: of the instance, at its last admission.  generated: tokens it had then.  admitted_s: at its first one.
    """

    plan: GroupPlan
    sample: int
    prompt_tokens: int
    length: int
    generated: int = 0
    start_step: int = 0
    admitted_s: float | None = None
    spans: list[tuple[WeightIdentity, int]] = field(default_factory=list)

    @property
    def context(self) -> int:
        """Tokens to prefill when it is admitted."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class Decoding:
    """One instance. steps: decode steps done at ``at_s``, a boundary, which lies ahead during a prefill or a pause.

    context: tokens in the KV cache.  weights: (first step, weights) of each version served.  prefilled: running samples
    of each group; they share one prefill of their prompt.
    """

    cost: DecodeCost
    capacity: int
    at_s: float
    steps: int = 0
    context: int = 0
    running: list[tuple[int, int, Sample]] = field(default_factory=list)
    waiting: list[tuple[float, int, Sample]] = field(default_factory=list)
    weights: list[tuple[int, WeightIdentity]] = field(default_factory=list)
    prefilled: dict[GroupId, int] = field(default_factory=dict)
    num_submitted: int = 0
    num_retracted: int = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def submit(self, sample: Sample) -> None:
        """A sample waits for a slot."""
        if sample.prompt_tokens + sample.length > self.cost.kv_capacity_tokens:
            raise SampleTooLongError(
                f"{sample.plan.group_id}/{sample.sample} needs {sample.prompt_tokens + sample.length} tokens of KV "
                f"cache, the instance has {self.cost.kv_capacity_tokens:.0f}"
            )
        heapq.heappush(self.waiting, (-sample.plan.priority, self.num_submitted, sample))
        self.num_submitted += 1

    # -- time

    def next_steps(self) -> int | None:
        """Steps until the next end, or until the KV cache is full; None when nothing runs."""
        if not self.running:
            return None
        steps = self.running[0][0] - self.steps
        room = self.cost.kv_capacity_tokens - self.context
        if room < steps * len(self.running):
            steps = max(0, int(room // len(self.running)))
        return steps

    def boundary_s(self, steps: int) -> float:
        """When ``steps`` more steps are done."""
        return self.at_s + self.cost.steps_s(len(self.running), self._read_tokens(), steps)

    def steps_until(self, now_s: float) -> int:
        """Steps to the first boundary that is not before ``now_s``; while nothing runs, any time is a boundary."""
        if now_s <= self.at_s:
            return 0
        if not self.running:
            self.at_s = now_s
            return 0
        done = self.cost.steps_in(len(self.running), self._read_tokens(), now_s - self.at_s)
        return math.ceil(done - ROUNDING)

    def _read_tokens(self) -> int:
        """Context that the next step reads; it grows by one token a sample and step, padded or not."""
        if not self.cost.padded or not self.running:
            return self.context
        longest = self.steps + max(sample.context - sample.start_step for _, _, sample in self.running)
        return longest * len(self.running)

    def advance(self, steps: int, now_s: float) -> list[Sample]:
        """``steps`` steps were done, and it is ``now_s``. Returns the samples that ended, in order of admission."""
        running = self.running
        self.steps += steps
        self.context += steps * len(running)
        self.at_s = now_s
        ended: list[Sample] = []
        while running and running[0][0] <= self.steps:
            sample = heapq.heappop(running)[2]
            self._leave(sample)
            ended.append(sample)
        return ended

    def pause(self, seconds: float) -> None:
        """Nothing is decoded for a while: weights are loaded."""
        self.at_s += seconds

    def serve(self, weights: WeightIdentity) -> None:
        """Tokens from here on are sampled under ``weights``."""
        self.weights.append((self.steps, weights))

    # -- slots and the KV cache

    def admit(self) -> None:
        """Retract what the cache cannot hold for one more step, then fill free slots; prefill what was admitted."""
        while len(self.running) > 1 and self.context + len(self.running) > self.cost.kv_capacity_tokens:
            self._retract(self._youngest())
        prefill = 0
        while self.waiting and len(self.running) < self.capacity:
            sample = self.waiting[0][2]
            if self.running and not self._fits(sample):
                break
            _, order, _ = heapq.heappop(self.waiting)
            prefill += self._start(sample, order)
        self.at_s += self.cost.prefill_s(prefill)

    def remove(self, group_id: GroupId, attempt: int) -> bool:
        """Stop what is there of a group, up to this attempt. Returns whether none of it is left."""
        self.waiting = [one for one in self.waiting if not _is_of(one[2], group_id, attempt)]
        heapq.heapify(self.waiting)
        for entry in [one for one in self.running if _is_of(one[2], group_id, attempt)]:
            self.running.remove(entry)
            self._leave(entry[2])
        heapq.heapify(self.running)
        return not any(one[2].plan.group_id == group_id for one in (*self.waiting, *self.running))

    def _fits(self, sample: Sample) -> bool:
        headroom = HEADROOM_TOKENS * (len(self.running) + 1)
        return self.context + sample.context + headroom <= self.cost.kv_capacity_tokens

    def _start(self, sample: Sample, order: int) -> int:
        """Give it a slot. Returns the tokens to prefill."""
        group_id = sample.plan.group_id
        sharing = self.prefilled.get(group_id, 0)
        self.prefilled[group_id] = sharing + 1
        sample.start_step = self.steps
        if sample.admitted_s is None:
            sample.admitted_s = self.at_s
        heapq.heappush(self.running, (self.steps + sample.length - sample.generated, order, sample))
        self.context += sample.context
        return sample.generated if sharing else sample.context

    def _leave(self, sample: Sample) -> None:
        """It holds no slot from now on: note what it generated, and under which weights."""
        self._note_spans(sample)
        self.context -= sample.context
        sharing = self.prefilled.pop(sample.plan.group_id) - 1
        if sharing:
            self.prefilled[sample.plan.group_id] = sharing

    def _note_spans(self, sample: Sample) -> None:
        until = self.steps
        since_load: list[tuple[WeightIdentity, int]] = []
        for first_step, weights in reversed(self.weights):
            begin = first_step if first_step > sample.start_step else sample.start_step
            if until > begin:
                since_load.append((weights, until - begin))
                until = begin
            if first_step <= sample.start_step:
                break
        sample.spans.extend(reversed(since_load))
        sample.generated += self.steps - sample.start_step

    def _youngest(self) -> tuple[int, int, Sample]:
        """The running sample with the fewest tokens to prefill again: the cheapest to lose."""
        return min(self.running, key=_tokens_to_lose)

    def _retract(self, entry: tuple[int, int, Sample]) -> None:
        """It gives up its cache and waits again; its tokens stay. Source: SGLang's retraction."""
        self.running.remove(entry)
        heapq.heapify(self.running)
        self._leave(entry[2])
        heapq.heappush(self.waiting, (-entry[2].plan.priority, entry[1], entry[2]))
        self.num_retracted += 1


def _tokens_to_lose(entry: tuple[int, int, Sample]) -> tuple[int, int]:
    """What would be prefilled again, but for the steps done so far, which all share; of equal ones the later."""
    sample = entry[2]
    return sample.prompt_tokens + sample.generated - sample.start_step, -entry[1]


def _is_of(sample: Sample, group_id: GroupId, attempt: int) -> bool:
    return sample.plan.group_id == group_id and sample.plan.attempt <= attempt
