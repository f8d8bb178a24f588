"""Prompts that wait for a slot, and how many more to ask for.

Owns: the queue between the prompt source and the batches. Never: the text of a prompt. Invariant: prompts leave in
the order in which they arrived; at most one request is open, so that a duplicate answer is recognised.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from transport.contracts.messages import PromptRef, PromptsArrived


class WaitingPrompt(NamedTuple):
    """A prompt, its place in the stream of all prompts, and the source's state after it."""

    prompt: PromptRef
    ordinal: int
    source_position: str


class PromptQueue(msgspec.Struct, kw_only=True):
    """Prompts read from the source and not yet bound to a slot.

    requested: of the open request, 0 when there is none.  last_position: the source's state after the last arrival.
    """

    waiting: list[WaitingPrompt] = msgspec.field(default_factory=list[WaitingPrompt])
    requested: int = 0
    num_arrived: int = 0
    last_position: str = ""
    exhausted: bool = False

    @property
    def ended(self) -> bool:
        """No prompt waits and none will come."""
        return self.exhausted and not self.waiting

    def arrive(self, event: PromptsArrived) -> bool:
        """Take an answer. Returns False for one that was taken before."""
        repeated = bool(event.source_positions) and event.source_positions[-1] == self.last_position != ""
        if not self.requested or repeated:
            return False
        for prompt, position in zip(event.prompts, event.source_positions, strict=True):
            self.waiting.append(WaitingPrompt(prompt, self.num_arrived, position))
            self.num_arrived += 1
            self.last_position = position
        self.requested = 0
        self.exhausted = event.exhausted
        return True

    def take(self, count: int) -> list[WaitingPrompt]:
        """The next ``count`` prompts, or as many as there are."""
        taken = self.waiting[:count]
        del self.waiting[:count]
        return taken
