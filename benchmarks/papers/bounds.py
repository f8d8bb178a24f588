"""The end of generation that no placement can beat which leaves a sample where it started."""

from __future__ import annotations

from collections.abc import Sequence

from transport.contracts.continuous_batching import DecodeCost


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
