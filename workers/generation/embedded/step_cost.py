"""What a step takes on this machine by the tokens it computes: measured at the start, where drafts are on.

Owns: which steps are timed, and what is between them. Never: whether a draft pays, which ``num_drafted`` says.
Source: ours. A fit of ``DecodeCost`` needs a profile; a dozen steps on the slots' own memory, before anything runs
there, show the same on any device, a knee where small products are badly cut included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from transport.process.clock import Clock
from workers.generation.embedded.forward import DecodeRuns, Forward, SlotKV, StepBatch

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens of a step, up to what the slots and their drafts can ask for. Beyond the last a step grows by the token on any
device, and 17 sizes up to 512 took SmolLM2 31 CPU seconds where these take 6."""
TIMES = 3
"""Of each size; the fastest counts: what else the machine does only adds."""
SHORT, LONG = 8, 96
"""Context of the timed steps, tokens: within what a slot holds at first."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """tokens: rising.  seconds: of a step that computes so many.  context_token_s: what a token of context adds."""

    tokens: Sequence[float]
    seconds: Sequence[float]
    context_token_s: float = 0.0

    def __call__(self, tokens: float, context_tokens: float) -> float:
        """Seconds of a step: between the measured ones on a line, beyond the last one on the last line."""
        sizes, seconds = self.tokens, self.seconds
        if len(sizes) == 1 or tokens <= sizes[0]:
            return seconds[0] + context_tokens * self.context_token_s
        after = min(bisect_left(sizes, tokens), len(sizes) - 1)
        slope = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1])
        return seconds[after] + slope * (tokens - sizes[after]) + context_tokens * self.context_token_s


def measure_steps(forward: Forward, kv: SlotKV, clock: Clock, *, max_drafted: int) -> StepCost:
    """Time steps of 1 to as many tokens as slots and drafts can ask for, where memory holds them. Nothing may run:
    slots are written over."""
    width = 1 + max_drafted
    most = min(kv.max_slots, kv.limit // (SHORT + width)) * width
    sizes = [size for size in SIZES if size <= most] or [1]
    seconds = np.maximum.accumulate([_fastest(forward, kv, clock, size, max_drafted, SHORT) for size in sizes])
    slots = max(1, min(kv.max_slots, 8, kv.limit // (LONG + 1)))
    longer = [_fastest(forward, kv, clock, slots, 0, context) for context in (SHORT, LONG)]
    return StepCost(sizes, seconds.tolist(), max(0.0, (longer[1] - longer[0]) / (slots * (LONG - SHORT))))


def _fastest(forward: Forward, kv: SlotKV, clock: Clock, tokens: int, max_drafted: int, context: int) -> float:
    """Drafts are as deep as may be, as they are in small batches."""
    device = kv.keys[0].device
    slots = min(kv.max_slots, -(-tokens // (1 + max_drafted)))
    widths = np.array([len(part) for part in np.array_split(np.arange(tokens), slots)])
    start = min(context, kv.max_tokens - int(widths.max()))
    positions = np.concatenate([np.arange(start, start + width) for width in widths])
    batch = StepBatch(
        token_ids=torch.ones(tokens, dtype=torch.int64, device=device),
        positions=torch.from_numpy(positions).to(device),
        decode_slots=torch.from_numpy(np.repeat(np.arange(slots), widths)).to(device),
        max_tokens=int(positions.max()) + 1,
        prompts=(),
        runs=DecodeRuns.of(widths, device) if slots < tokens else None,
    )
    kv.reserve(batch.max_tokens, slots, 0)
    seconds: list[float] = []
    for _ in range(TIMES):
        started_s = clock.now_s()
        forward.run(batch, kv).argmax().item()  # waits for the device
        seconds.append(clock.now_s() - started_s)
    return min(seconds)
