"""Prompts whose response lengths follow from their text, for tests that train a ranker in a second."""

from __future__ import annotations

import random

from ranker.logs import PromptLengths

FAMILIES = {
    "Sort these numbers in ascending order:": 40,
    "Explain to a child the meaning of:": 300,
    "Prove carefully, step by step, a claim about:": 1500,
    "Answer yes or no about:": 8,
}
"""Tokens of a typical response per kind of task; more numbers in the prompt make it longer."""


def synthetic_lengths(count: int, seed: int = 0, samples: int = 4, noise: float = 0.2) -> list[PromptLengths]:
    """Lognormal samples around a level that family and size of the prompt set."""
    draw = random.Random(seed)
    prompts: list[PromptLengths] = []
    for index in range(count):
        family, typical = draw.choice(list(FAMILIES.items()))
        numbers = [draw.randrange(1000) for _ in range(draw.randrange(1, 12))]
        level = typical * len(numbers) ** 0.5
        tokens = tuple(max(1, round(level * draw.lognormvariate(0.0, noise))) for _ in range(samples))
        text = f"{family} {' '.join(map(str, numbers))} (question {index})"
        prompts.append(PromptLengths(prompt_id=f"p{index}", text=text, tokens=tokens))
    return prompts
