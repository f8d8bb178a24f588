"""Where a response ends because its text holds one of ``generation.stop``: the same for every engine.

Servers run without a tokenizer: token ids in, token ids out. So strings are looked for here. A response ends with the
token that completes the first stop string: the policy sampled that token, so it stays, with its logprob, and the text
may hold a few characters more than the string; no token after it is part of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from workers.models import load_detokenizer

MARGIN = 8
"""Tokens looked at beyond the bytes of the longest string: the first may begin inside a character or lose a space."""


class StopStrings:
    """stop: none of them empty.  decode: the text of token ids, special tokens included."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._reach = max((len(one.encode()) for one in stop), default=0) + MARGIN  # a token has a byte or more

    @staticmethod
    def of(directory: Path, stop: Sequence[str]) -> StopStrings:
        """With the tokenizer of the model in ``directory``, read only where there is a string. Raises ModelError."""
        return StopStrings(stop, load_detokenizer(directory, special=True)) if stop else NO_STOPS

    def __bool__(self) -> bool:
        return bool(self._stop)

    def end(self, token_ids: Sequence[int], checked: int = 0) -> int | None:
        """How many tokens the response has if a string ends it; None if none does.

        checked: first tokens that are known to hold none.
        """
        for end in range(checked + 1, len(token_ids) + 1 if self._stop else 0):
            text = self._decode(token_ids[max(0, end - self._reach) : end])
            if any(one in text for one in self._stop):
                return end
        return None


NO_STOPS = StopStrings((), lambda ids: "")
