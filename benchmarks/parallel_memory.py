"""Memory of long samples and of recomputed activations: figures of the bench ``parallel``.

    memory_16k_over_8k     of a step with one sample of 16K tokens, over one of 8K: 2 is linear, 4 would be square
    memory_32k_over_16k    the same of the longest samples
    checkpointing_share    of a step with trainer.recompute = "whole", over one with "none"

Each is the peak of live tensor bytes during a step, less what is there between two steps (weights, their gradients and
the optimizer's moments), as torch's memory tracker counts it on a CPU: counted, not timed. The models are small, with
the proportions of Qwen3: an MLP three times as wide as the residual stream, two query heads a key head.

    python -m benchmarks.parallel_memory
"""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.parallel_predicted import Case, measure

LONG = Case(family="qwen3", dtype="float32", layers=2, hidden=128, mlp=384, words=2048, samples=1, prompt_tokens=512)
DEEP = Case(family="qwen3", layers=12, words=2048)


def step_bytes(case: Case) -> int:
    """Of one step, states subtracted."""
    measured = measure(case)
    return measured.peak - measured.states


def of_tokens(num_tokens: int) -> int:
    """Of a step with one sample."""
    return step_bytes(replace(LONG, response_tokens=num_tokens - LONG.prompt_tokens))


def checkpointing_share() -> float:
    return step_bytes(replace(DEEP, recompute="whole")) / step_bytes(DEEP)


def selective_share() -> float:
    return step_bytes(replace(DEEP, recompute="selective")) / step_bytes(DEEP)


def figures() -> dict[str, float]:
    of_8k, of_16k, of_32k = (of_tokens(tokens) for tokens in (8192, 16_384, 32_768))
    return {
        "memory_16k_over_8k": of_16k / of_8k,
        "memory_32k_over_16k": of_32k / of_16k,
        "checkpointing_share": checkpointing_share(),
        "selective_share": selective_share(),
    }


if __name__ == "__main__":
    print(json.dumps({name: round(value, 3) for name, value in figures().items()}))
