"""Continuous batching as a model: what decodes in one instance, when the next thing happens there, and what it costs.

One model for the simulator, the forecasts of elasticity and the emulated engine. Owns: slots, waiting samples and the
KV cache of one instance, in whole decode steps. Never: a clock, an event loop, messages, decisions. Invariant: equal to
a loop over every token step; everything changes at the boundary between two steps.

    submit ──► waiting (priority, then arrival) ──admit: slots, KV──► running (heap by end step) ──► ended
                  ▲                                                      │
                  └──── retracted: the KV cache is full ─────────────────┘

    decode step   fixed + max(weights, batch * gemm) + batch * sample + context * kv
                  memory-bound while the weights dominate, compute-bound beyond; every context token is read once a step
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from transport.contracts.types import GroupId, Struct, WeightIdentity

HEADROOM_TOKENS = 256
"""Free KV tokens that admission leaves for each running sample, so that few of them are retracted soon.
Source: SGLang's estimate of new tokens, in its simplest form."""
STEP_ROUNDING = 1e-6  # decode steps; a boundary that is this near is now


# --- the rules of a KV cache that does not hold all slots, of this model and of the embedded engine alike


def is_full(samples: int, held_tokens: float, kv_tokens: float) -> bool:
    """Whether one of the running samples has to be retracted before the next step; one alone always runs.

    held_tokens: that they hold now; the step adds one to each.  kv_tokens: that the cache holds.
    """
    return samples > 1 and held_tokens + samples > kv_tokens


def has_room(samples: int, held_tokens: float, kv_tokens: float, max_context: float = math.inf) -> bool:
    """Whether a sample may start; the first one always may.

    samples, held_tokens: running with it, and what they would hold.  max_context: tokens that none of them outgrows.
    """
    return samples == 1 or min(held_tokens + HEADROOM_TOKENS * samples, max_context * samples) <= kv_tokens


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients of one generation instance, seconds.

    Source: StreamRL sec. 5.1 and fig. 6 (flat, then linear in the batch). Ours: the context, which it leaves out.
    """

    fixed_s: float  # of every step (scheduling, launches, latency of collectives)
    weights_s: float = 0.0  # reading the weights once
    gemm_sample_s: float = 0.0  # arithmetic of one sample's token; hidden behind the weights until it outgrows them
    sample_s: float = 0.0  # what a sample adds in any case (bytes of collectives, sampling)
    kv_token_s: float = 0.0  # reading the keys and values of one token of context
    prefill_token_s: float = 0.0  # arithmetic of a prompt token
    kv_capacity_tokens: float = math.inf  # tokens of context that fit, all samples together
    padded: bool = False  # what is read, and held, is the context of so many samples as long as the longest

    def scaled(self, factor: float) -> DecodeCost:
        """Every second of it ``factor`` times as long."""
        seconds = {name: factor * getattr(self, name) for name in self.__struct_fields__ if name.endswith("_s")}
        return msgspec.structs.replace(self, **seconds)

    def limited(self, kv_tokens: int) -> DecodeCost:
        """Where memory holds so many tokens, each sample like the longest, as our engines do; 0: as it is."""
        if not kv_tokens:
            return self
        return msgspec.structs.replace(self, kv_capacity_tokens=float(kv_tokens), padded=True)

    def held_tokens(self, samples: float, tokens: float, longest: float) -> float:
        """What so many samples take of the KV cache: ``tokens`` of context together, each ``longest`` at most."""
        return samples * longest if self.padded else tokens

    def step_s(self, batch: float, context_tokens: float) -> float:
        """One decode step of ``batch`` samples that hold ``context_tokens`` at its start."""
        arithmetic_s = batch * self.gemm_sample_s
        bound_s = arithmetic_s if arithmetic_s > self.weights_s else self.weights_s
        return self.fixed_s + bound_s + batch * self.sample_s + context_tokens * self.kv_token_s

    def steps_s(self, batch: float, context_tokens: float, steps: float) -> float:
        """``steps`` steps of a constant batch, whose context grows by ``batch`` tokens a step.

        For whole ``steps`` it is the sum of ``step_s(batch, context_tokens + i * batch)``, i = 0 .. steps-1; between
        them it interpolates.
        """
        grown = batch * steps * (steps - 1) * 0.5
        return steps * self.step_s(batch, context_tokens) + grown * self.kv_token_s

    def steps_in(self, batch: float, context_tokens: float, seconds: float) -> float:
        """How many steps of a constant batch pass in ``seconds``: the inverse of ``steps_s``."""
        quadratic = 0.5 * batch * self.kv_token_s
        linear = self.step_s(batch, context_tokens) - quadratic
        return 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * quadratic * seconds)) if seconds > 0 else 0.0

    def steady_step_s(self, tokens_per_s: float, context_per_s: float) -> float:
        """A step of an instance that is sent so many response tokens, and context to read for them, every second.

        It decodes as many samples at once as keep up (Little): n = tokens_per_s * step. The larger fixed point of the
        two sides of the roof; infinite where it cannot keep up. Source: ours.
        """
        read = tokens_per_s * self.sample_s + context_per_s * self.kv_token_s
        computed = read + tokens_per_s * self.gemm_sample_s
        if computed >= 1:
            return math.inf
        return max((self.fixed_s + self.weights_s) / (1 - read), self.fixed_s / (1 - computed))

    def prefill_s(self, tokens: float) -> float:
        """One prefill of ``tokens`` prompt tokens, during which nothing is decoded."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + max(self.weights_s, tokens * self.prefill_token_s)


class Drafts(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: tokens are drafted on the host and verified together, so a step may give several.

    acceptance: chance that a drafted token is the one that is sampled, each by itself, in [0, 1].  max_tokens: drafted
    a step at most.  draft_s: of drafting for one step.  every_step: an engine that drafts ``max_tokens`` at every step,
    however large its batch, as SGLang and vLLM do; else as many as take least, as ours does.
    Source: Leviathan et al. 2023 for the tokens a step. Optimistic: acceptance is constant, and verification reads the
    keys and values once.
    """

    acceptance: float
    max_tokens: int = 8
    draft_s: float = 0.0
    every_step: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1 or self.max_tokens < 0 or self.draft_s < 0:
            raise ValueError(
                f"need 0 <= acceptance <= 1, max_tokens >= 0 and draft_s >= 0, got {self.acceptance}, "
                f"{self.max_tokens} and {self.draft_s}"
            )

    def tokens_a_step(self, depth: int) -> float:
        """Expected: 1 + a + a^2 + ... + a^depth."""
        return sum(self.acceptance**place for place in range(depth + 1))

    def costs(self, cost: DecodeCost) -> tuple[DecodeCost, ...]:
        """[max_tokens + 1] what one token of every sample takes, by the tokens that are drafted a step; 0: ``cost``.
        [1] with ``every_step``."""
        fewest = self.max_tokens if self.every_step else 0
        return tuple(self._cost(cost, depth) for depth in range(fewest, self.max_tokens + 1))

    def _cost(self, cost: DecodeCost, depth: int) -> DecodeCost:
        if not depth:
            return cost
        a_token = 1 / self.tokens_a_step(depth)
        return msgspec.structs.replace(
            cost,
            fixed_s=(cost.fixed_s + self.draft_s) * a_token,
            weights_s=cost.weights_s * a_token,
            gemm_sample_s=cost.gemm_sample_s * (depth + 1) * a_token,
            sample_s=cost.sample_s * (depth + 1) * a_token,
            kv_token_s=cost.kv_token_s * a_token,
        )


def cheapest(costs: Sequence[DecodeCost], batch: float, context_tokens: float) -> DecodeCost:
    """The cost of the depth at which a token takes least; of equal ones the fewest drafts. Off where drafts lose."""
    return min(costs, key=lambda cost: cost.step_s(batch, context_tokens))


def num_drafted(
    step_s: Callable[[float, float], float],
    batch: int,
    context_tokens: float,
    chances: Sequence[float],
    *,
    draft_s: float = 0.0,
) -> int:
    """How many drafted tokens a step verifies, of drafts that differ in what they are worth: the rule of ``cheapest``.

    Args:    step_s: seconds of a step by (tokens computed, context tokens), as ``DecodeCost.step_s``.  batch: samples
             that decode, >= 1.  chances: [N] of each drafted token, that it and all before it are right; none rises.
             draft_s: of drafting for one step.
    Returns: n: that the first n are verified takes the least seconds a token; of equal ones the fewest. 0 where drafts
             lose. Where a^1, ..., a^depth are the chances of every sample, n is batch times the depth of ``cheapest``.
    Source:  ours; Leviathan et al. 2023 for one chance.
    """
    best, least, tokens = 0, step_s(batch, context_tokens) / batch, float(batch)
    for drafted, chance in enumerate(chances, start=1):
        tokens += chance
        a_token = (draft_s + step_s(batch + drafted, context_tokens)) / tokens
        if a_token < least:
            best, least = drafted, a_token
    return best


class Request(Protocol):
    """What asks for samples: a ``GroupPlan`` of the simulator, a ``GenerationRequest`` of an engine. priority: higher
    is admitted first."""

    @property
    def group_id(self) -> GroupId: ...
    @property
    def priority(self) -> float: ...


R = TypeVar("R", bound=Request)


@dataclass(slots=True)
class Sample(Generic[R]):
    """One sample on an instance. spans: (weights, tokens) of what was generated."""

    request: R
    sample: int
    prompt_tokens: float
    length: int  # of its response, tokens
    submitted_s: float = 0.0
    generated: int = 0  # tokens it had at its last admission
    start_step: int = 0  # of the instance, then
    admitted_s: float | None = None  # at its first admission
    spans: list[tuple[WeightIdentity, int]] = field(default_factory=list[tuple[WeightIdentity, int]])

    @property
    def context(self) -> float:
        """Tokens to prefill when it is admitted."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True)
class ContinuousBatching(Generic[R]):
    """One instance.

    running: (end step, order, sample).  waiting: (-priority, order, sample).  weights: (first step, weights) of each
    version served.  drafted: costs by depth of drafts, of which the cheapest for what runs is taken at every change;
    empty: nothing is drafted, and ``cost`` holds.  undrafted: where there are drafts, the cost of prompts.  prefilled:
    running samples of each group; they share one prefill of their prompt.  max_context: tokens that no sample outgrows.
    """

    cost: DecodeCost
    slots: int
    at_s: float = 0.0  # a boundary, which lies ahead during a prefill or a pause
    prompts_cached: bool = False  # no prompt is prefilled; a forecast of decoding alone
    steps: int = 0  # decode steps done at ``at_s``
    context: float = 0  # of the running samples together, tokens
    running: list[tuple[int, int, Sample[R]]] = field(default_factory=list[tuple[int, int, Sample[R]]])
    waiting: list[tuple[float, int, Sample[R]]] = field(default_factory=list[tuple[float, int, Sample[R]]])
    weights: list[tuple[int, WeightIdentity]] = field(default_factory=list[tuple[int, WeightIdentity]])
    prefilled: dict[GroupId, int] = field(default_factory=dict[GroupId, int])
    drafted: Sequence[DecodeCost] = ()
    undrafted: DecodeCost | None = None
    max_context: float = math.inf
    num_submitted: int = 0
    num_retracted: int = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def draft(self, drafts: Drafts, cost: DecodeCost) -> None:
        """From the next change on. cost: of a step without drafts."""
        self.drafted, self.undrafted = drafts.costs(cost), cost

    def submit(self, sample: Sample[R]) -> None:
        """A sample waits for a slot. One that outgrows the KV cache decodes alone, as if it fitted."""
        heapq.heappush(self.waiting, (-sample.request.priority, self.num_submitted, sample))
        self.num_submitted += 1

    # -- time

    def next_steps(self) -> int | None:
        """Steps until the next end, or until the KV cache is full; None when nothing runs."""
        running = self.running
        if not running:
            return None
        steps = running[0][0] - self.steps
        room = self.cost.kv_capacity_tokens - self.held_tokens
        if room < steps * len(running) and len(running) > 1:
            steps = max(0, int(room // len(running)))
        return steps

    def boundary_s(self, steps: int) -> float:
        """When ``steps`` more steps are done."""
        return self.at_s + self.cost.steps_s(len(self.running), self.held_tokens, steps)

    def steps_until(self, now_s: float) -> int:
        """Steps to the first boundary that is not before ``now_s``; while nothing runs, any time is a boundary."""
        if now_s <= self.at_s:
            return 0
        if not self.running:
            self.at_s = now_s
            return 0
        done = self.cost.steps_in(len(self.running), self.held_tokens, now_s - self.at_s)
        return math.ceil(done - STEP_ROUNDING)

    @property
    def held_tokens(self) -> float:
        """In the KV cache, which the next step reads; one more for each sample and step, padded or not."""
        return self.cost.held_tokens(len(self.running), self.context, self._longest())

    def _longest(self) -> float:
        """Context of the longest running sample, where it matters."""
        if not self.cost.padded:
            return 0.0
        return max((self.steps + sample.context - sample.start_step for _, _, sample in self.running), default=0.0)

    def advance(self, steps: int, now_s: float) -> list[Sample[R]]:
        """``steps`` steps were done, and it is ``now_s``. Returns the samples that ended, in order of admission."""
        running = self.running
        self.steps += steps
        self.context += steps * len(running)
        self.at_s = now_s
        ended: list[Sample[R]] = []
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
        kv_tokens = self.cost.kv_capacity_tokens
        while is_full(len(self.running), self.held_tokens, kv_tokens):
            self._retract()
        prefill = 0.0
        longest = self._longest()
        while self.waiting and len(self.running) < self.slots:
            samples, entering = len(self.running) + 1, self.waiting[0][2].context
            longest = max(longest, entering)
            held = self.cost.held_tokens(samples, self.context + entering, longest)
            if not has_room(samples, held, kv_tokens, self.max_context):
                break
            _, order, sample = heapq.heappop(self.waiting)
            prefill += self._start(sample, order)
        self.at_s += (self.undrafted or self.cost).prefill_s(prefill)
        if self.drafted:
            self.cost = cheapest(self.drafted, len(self.running), self.held_tokens)

    def remove(self, wanted: Callable[[R], bool]) -> list[Sample[R]]:
        """Stop the samples of these requests, running or waiting, and return them."""
        stopped = [entry[2] for entry in self.waiting if wanted(entry[2].request)]
        self.waiting = [entry for entry in self.waiting if not wanted(entry[2].request)]
        heapq.heapify(self.waiting)
        for entry in [entry for entry in self.running if wanted(entry[2].request)]:
            self.running.remove(entry)
            self._leave(entry[2])
            stopped.append(entry[2])
        heapq.heapify(self.running)
        return stopped

    def holds(self, group_id: GroupId) -> bool:
        """Whether a sample of the group waits or runs."""
        return any(entry[2].request.group_id == group_id for entry in (*self.waiting, *self.running))

    def so_far(self, steps: int) -> list[tuple[Sample[R], list[tuple[WeightIdentity, int]]]]:
        """Running samples and the spans of what they have after ``steps`` more steps, before which none ends."""
        return [
            (sample, [*sample.spans, *self._since_admission(sample, self.steps + steps)])
            for _, _, sample in self.running
        ]

    def _since_admission(self, sample: Sample[R], until: int) -> list[tuple[WeightIdentity, int]]:
        """Spans of what it generated before step ``until``."""
        since_load: list[tuple[WeightIdentity, int]] = []
        for first_step, weights in reversed(self.weights):
            begin = first_step if first_step > sample.start_step else sample.start_step
            if until > begin:
                since_load.append((weights, until - begin))
                until = begin
            if first_step <= sample.start_step:
                break
        return since_load[::-1]

    def _start(self, sample: Sample[R], order: int) -> float:
        """Give it a slot. Returns the tokens to prefill."""
        group_id = sample.request.group_id
        sharing = self.prefilled.get(group_id, 0)
        self.prefilled[group_id] = sharing + 1
        sample.start_step = self.steps
        if sample.admitted_s is None:
            sample.admitted_s = self.at_s
        heapq.heappush(self.running, (self.steps + sample.length - sample.generated, order, sample))
        self.context += sample.context
        return sample.generated if sharing or self.prompts_cached else sample.context

    def _leave(self, sample: Sample[R]) -> None:
        """It holds no slot from now on: note what it generated, and under which weights."""
        sample.spans.extend(self._since_admission(sample, self.steps))
        sample.generated += self.steps - sample.start_step
        self.context -= sample.context
        sharing = self.prefilled.pop(sample.request.group_id) - 1
        if sharing:
            self.prefilled[sample.request.group_id] = sharing

    def _retract(self) -> None:
        """One sample gives up its cache and waits again; its tokens stay. Source: SGLang's retraction.

        The one of which least would be prefilled again, but for the steps done so far, which all share; of equal ones
        the later.
        """
        lost = [(sample.context - sample.start_step, -order) for _, order, sample in self.running]
        _, order, sample = self.running.pop(lost.index(min(lost)))
        heapq.heapify(self.running)
        self._leave(sample)
        heapq.heappush(self.waiting, (-sample.request.priority, order, sample))
        self.num_retracted += 1


class _Forecast(NamedTuple):
    group_id: GroupId = GroupId("")
    priority: float = 0.0


def finish_times(
    cost: DecodeCost, lengths: Sequence[float], *, prompt_tokens: float = 0.0, max_running: int
) -> list[float]:
    """When each sample ends on one instance: they start in the order given, as soon as there is a slot and memory.

    Args:    lengths: [N] response tokens, each > 0, in the order of starting (longest first, if that is the policy).
             prompt_tokens: of every sample; their prefill is left out.  max_running: slots, >= 1.
    Returns: [N] seconds from now.
    Raises:  ValueError: no slot, or a length that is not positive.
    Source:  StreamRL sec. 5.3 (scheduling order). Ours: exact, with the context that grows.
    """
    if max_running < 1:
        raise ValueError(f"need at least one slot, got {max_running}")
    if not all(length > 0 for length in lengths):
        raise ValueError("lengths must be positive")
    batching = ContinuousBatching[_Forecast](cost, max_running, prompts_cached=True)
    request = _Forecast()
    for place, length in enumerate(lengths):
        batching.submit(Sample(request, place, prompt_tokens, math.ceil(length)))
    ends = [0.0] * len(lengths)
    while not batching.idle:
        batching.admit()
        steps = batching.next_steps() or 0
        for ended in batching.advance(steps, batching.boundary_s(steps)):
            ends[ended.sample] = batching.at_s
    return ends


# --- what `streamrl-worker profile` measures and the orchestrator fits: seconds of known work -------------------------


class DecodeRun(Struct, frozen=True, kw_only=True):
    """``steps`` decode steps of a constant batch."""

    batch: int
    context_tokens: float  # of all its samples together, at the first step
    padded_tokens: float  # if all were as long as the longest of them
    steps: int
    seconds: float


class PrefillRun(Struct, frozen=True, kw_only=True):
    """One prompt computed, nothing else running."""

    tokens: int
    seconds: float


class TrainRun(Struct, frozen=True, kw_only=True):
    """One micro-batch, forward and backward."""

    tokens: int  # prompts once, and responses
    squared_tokens: float  # sum over samples of the square of prompt and response together
    padded_tokens: float  # if all were as long as the longest of their group
    seconds: float


class Measurements(Struct, frozen=True, kw_only=True):
    """One machine, one model. Lists are empty where there was nothing to measure."""

    model: str
    engine: str
    host: str
    config: dict[str, Any]  # the model's Hugging Face configuration
    context_tokens: int  # of the longest sample that was decoded
    kv_tokens: int = 0  # of context that the engine says its memory holds; 0: every sample has room of its own
    kv_padded: bool = False  # there each sample takes as much as the longest
    decode: list[DecodeRun]
    prefill: list[PrefillRun]
    train: list[TrainRun] = msgspec.field(default_factory=list[TrainRun])
    optimizer_s: list[float] = msgspec.field(default_factory=list[float])  # end of a mini-batch
    publish_s: list[float] = msgspec.field(default_factory=list[float])  # a version, from the trainer to shared memory
    load_s: list[float] = msgspec.field(default_factory=list[float])  # that version into an engine, checked
    # seconds of decode runs while the trainer computed in a process of its own, over seconds without it
    beside_training: list[float] = msgspec.field(default_factory=list[float])
    # of micro-batches while an engine decoded, over seconds without it
    beside_decoding: list[float] = msgspec.field(default_factory=list[float])
    # of the host's cores, what one worker, and one rank, compute on at once; 0: on none of them, or not measured beside
    decode_share: float = 0.0
    train_share: float = 0.0
