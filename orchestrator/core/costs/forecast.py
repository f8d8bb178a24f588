"""When samples end on one instance, exactly, and what follows for the trainer and for the best that is possible.

Owns: forecasts for lengths that are given. Never: where lengths come from, and who gets what. Invariant: between two
ends the batch is constant, so its steps are summed in closed form; the result equals the loop over single steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from orchestrator.core.costs.cost_model import DecodeCost


def finish_times(
    cost: DecodeCost, lengths: Sequence[float], *, prompt_tokens: float = 0.0, max_running: int
) -> list[float]:
    """When each sample ends under continuous batching: they start in the order given, as soon as there is a slot.

    Args:    lengths: [N] response tokens, each > 0, in the order of starting (longest first, if that is the policy).
             prompt_tokens: of every sample.  max_running: slots, >= 1; ``cost.kv_capacity_tokens`` may allow fewer:
             a sample starts when the final contexts of all that run fit, and in any case when nothing runs.
    Returns: [N] seconds from now.
    Raises:  ValueError: no slot, or a length that is not positive.
    Source:  StreamRL sec. 5.3 (scheduling order). Ours: exact, with the context that grows.
    """
    if max_running < 1:
        raise ValueError(f"need at least one slot, got {max_running}")
    if not all(length > 0 for length in lengths):
        raise ValueError("lengths must be positive")
    if len(lengths) <= max_running and sum(lengths) + len(lengths) * prompt_tokens <= cost.kv_capacity_tokens:
        return _all_at_once(cost, lengths, prompt_tokens)
    return _in_turn(cost, lengths, prompt_tokens, max_running)


def _all_at_once(cost: DecodeCost, lengths: Sequence[float], prompt_tokens: float) -> list[float]:
    """Everything starts now: samples end in the order of their lengths."""
    ends = [0.0] * len(lengths)
    now_s, steps, running = 0.0, 0.0, len(lengths)
    context = running * prompt_tokens
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        passing = lengths[index] - steps
        if passing > 0:
            now_s += cost.steps_s(running, context, passing)
            context += running * passing
            steps = lengths[index]
        ends[index] = now_s
        context -= prompt_tokens + steps
        running -= 1
    return ends


def _in_turn(cost: DecodeCost, lengths: Sequence[float], prompt_tokens: float, max_running: int) -> list[float]:
    """The next one starts when a slot and memory are free."""
    ends = [0.0] * len(lengths)
    running: list[tuple[float, int]] = []  # heap of (step at which it ends, index)
    now_s, steps, context, reserved, started = 0.0, 0.0, 0.0, 0.0, 0
    while running or started < len(lengths):
        while started < len(lengths) and len(running) < max_running:
            needs = prompt_tokens + lengths[started]
            if running and reserved + needs > cost.kv_capacity_tokens:
                break
            heapq.heappush(running, (steps + lengths[started], started))
            context, reserved, started = context + prompt_tokens, reserved + needs, started + 1
        passing = running[0][0] - steps
        now_s += cost.steps_s(len(running), context, passing)
        context += len(running) * passing
        steps = running[0][0]
        while running and running[0][0] <= steps:
            _, index = heapq.heappop(running)
            ends[index] = now_s
            context -= prompt_tokens + lengths[index]
            reserved -= prompt_tokens + lengths[index]
    return ends


def training_end_s(arrivals: Iterable[tuple[float, float]]) -> float:
    """When a trainer that takes work as it arrives has done it all.

    Args:    arrivals: (second at which it is there, seconds of training it takes), in any order.
    Returns: the largest, over all arrivals, of its second plus the work that arrives then or later: a queue with one
             server is idle only before that arrival and never after.
    Source:  ours; StreamRL sec. 4.1 (stream generation), whose end this is.
    """
    end_s, behind_s = 0.0, 0.0
    for at_s, work_s in sorted(arrivals, reverse=True):
        behind_s += work_s
        end_s = max(end_s, at_s + behind_s)
    return end_s


def bound_s(cost: DecodeCost, lengths: Sequence[float], num_instances: int, *, prompt_tokens: float = 0.0) -> float:
    """A time that no schedule of these samples on equal instances can beat that leaves a sample where it started.

    An instance whose longest sample has ``m`` tokens runs at least ``m`` steps, each with its fixed part, and every
    sample adds its own part once. So with a deadline T an instance takes samples worth ``T - m * fixed`` at most, and
    whoever fills instances with the longest samples first, cutting samples where an instance is full, needs the least:
    the samples above any length are then on the fewest instances. T is the smallest that suffices.

    It is at least the longest sample alone. Arithmetic beyond the weights is left out, which only lowers it.
    Source: ours. The bound of the papers, max(work / capacity, longest sample alone), ignores that a long sample shares
    its steps.
    """
    if not lengths or num_instances < 1:
        return 0.0
    fixed_s = cost.fixed_s + cost.weights_s
    longest = sorted(lengths, reverse=True)
    own = [length * cost.sample_s + _context_s(cost, length, prompt_tokens) for length in longest]
    low_s = longest[0] * fixed_s + max(own)
    high_s = longest[0] * fixed_s + sum(own)
    if _suffices(low_s, longest, own, fixed_s, num_instances):
        return low_s
    while high_s - low_s > 1e-6 * high_s:
        middle_s = (low_s + high_s) / 2
        if _suffices(middle_s, longest, own, fixed_s, num_instances):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _context_s(cost: DecodeCost, length: float, prompt_tokens: float) -> float:
    """Reading one sample's context over all of its steps."""
    return cost.kv_token_s * (prompt_tokens * length + length * (length - 1) / 2)


def _suffices(deadline_s: float, longest: list[float], own: list[float], fixed_s: float, num_instances: int) -> bool:
    """Whether filling instances with the longest first, samples cut where needed, is done by the deadline."""
    used, room_s = 0, 0.0
    for length, work_s in zip(longest, own, strict=True):
        while work_s > room_s:
            if used == num_instances:
                return False
            work_s -= room_s
            used, room_s = used + 1, max(0.0, deadline_s - length * fixed_s)
        room_s -= work_s
    return True
