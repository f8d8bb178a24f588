"""What the orchestrator asks of a length ranker. The decision core sees only the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LengthPredictor(Protocol):
    """Expected response length of a prompt, for dispatching the longest first."""

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[float]:
        """[N] expected response lengths, tokens, each > 0; only their order matters to dispatch."""
        ...

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Lengths that the prompt's samples turned out to have, tokens."""
        ...


class ConstantPredictor:
    """Every prompt is expected to be as long as any other: dispatch falls back to the order of admission."""

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens

    def predict(self, prompt_ids: Sequence[str], texts: Sequence[str]) -> list[float]:
        return [self._tokens] * len(prompt_ids)

    def observe(self, prompt_id: str, response_tokens: Sequence[int]) -> None:
        """Nothing to learn."""
