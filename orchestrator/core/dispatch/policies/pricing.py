"""What samples cost an instance, as a sum: the closed form that planning is fast by.

Owns: the price of a sample and of a set. Never: exact ends (``finish_times``). Invariant: for samples that all run at
once the price of a set is the exact end of its longest.

    end of a set = steps * base + what each sample adds to the steps it is in + arithmetic that outgrows the weights
    steps        = the longest length, or more where slots run out
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.core.dispatch.problem import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """One instance.

    base_s: of a step, whatever is in it.  sample_s: what a sample adds to a step.  token_s: what a context token adds.
    free: samples whose arithmetic hides behind the weights.  gemm_s: of each sample beyond those, a step.
    max_running, kv_tokens: its own limit of samples, and the context that memory has room for.
    hand_s, hand_steps: what is in hand adds to every plan: work, and the steps that its longest sample still takes.
    """

    base_s: float
    sample_s: float
    token_s: float
    free: int
    gemm_s: float
    max_running: int
    kv_tokens: float
    prompt_tokens: float
    hand_s: float = 0.0
    hand_steps: float = 0.0

    @property
    def rate(self) -> tuple[float, float]:
        """Instances of equal rate charge every sample the same work."""
        return self.sample_s, self.token_s

    def slots(self, samples: int, tokens: float) -> float:
        """How many of these run at once, each with room for its whole context."""
        context = samples * self.prompt_tokens + tokens
        if context <= self.kv_tokens:
            return self.max_running
        return max(1.0, min(self.max_running, self.kv_tokens * samples / context))

    def work_s(self, length: float, squared: float) -> float:
        """What a sample adds over its life. length, squared: of its tokens, the mean of each."""
        return length * self.sample_s + self.token_s * (self.prompt_tokens * length + (squared - length) / 2)

    def end_s(
        self, longest: float, work_s: float, samples: int, tokens: float, *, beyond: float = 0.0, last: float = 0.0
    ) -> float:
        """When a set is done, longest first.

        tokens: of all.  last: of the sample that starts last.
        beyond: tokens of all but the ``free`` longest, needed where there are more than those: at every step, the
        samples there beyond ``free`` are as many as there are such samples that long.
        More samples than slots is list scheduling: every slot is busy until the last one starts.
        """
        steps = longest
        slots = self.slots(samples, tokens)
        if samples > slots:
            steps = max(longest, tokens / slots + last * (1 - 1 / slots))
            beyond = tokens * max(0.0, 1 - self.free / slots)
        return self.base_s * max(steps, self.hand_steps) + self.hand_s + work_s + self.gemm_s * beyond


def price(instance: Instance, prompt_tokens: float) -> Pricing:
    """Prices of ``instance``."""
    cost = instance.cost
    priced = Pricing(
        base_s=cost.fixed_s + cost.weights_s,
        sample_s=cost.sample_s,
        token_s=cost.kv_token_s,
        free=int(cost.weights_s / cost.gemm_sample_s) if cost.gemm_sample_s > 0 else instance.max_running,
        gemm_s=cost.gemm_sample_s,
        max_running=instance.max_running,
        kv_tokens=cost.kv_capacity_tokens,
        prompt_tokens=prompt_tokens,
    )
    if not instance.in_hand:
        return priced
    hand_s = sum(priced.work_s(left, left * left) for left in instance.in_hand)
    return replace(priced, hand_s=hand_s, hand_steps=max(instance.in_hand))
