"""The prompt desk: reads the prompt source off the loop, keeps the prompts that are in flight, predicts their lengths.

Owns: the source's position in memory (its durable form is in the journal and in the trainer's checkpoint).
Never: decides which prompt goes where. Invariant: prompts arrive in the source's order, and one that the core may still
name can always be found again.
"""

from __future__ import annotations

import asyncio

import structlog

from orchestrator.runtime.intake import Arrival, Inbox
from orchestrator.runtime.prompts import Prompt, PromptSource
from ranker.protocol import LengthPredictor
from transport.messages import PromptRef, PromptsArrived, SlotOutcome
from transport.types import PromptId

log = structlog.get_logger(__name__)

MAX_CACHED = 4096
"""Prompts kept at hand; one that fell out is read from the source again."""


class Desk:
    """``request`` and ``prompt`` never wait; ``run`` reads."""

    def __init__(self, source: PromptSource, predictor: LengthPredictor) -> None:
        self._source = source
        self._predictor = predictor
        self._cache: dict[PromptId, Prompt] = {}
        self._requests: asyncio.Queue[int] = asyncio.Queue()

    def request(self, count: int) -> None:
        """Ask for up to ``count`` more prompts; they come as PromptsArrived."""
        self._requests.put_nowait(count)

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """A prompt that has arrived, from the cache or from the source. Raises KeyError for one that never existed."""
        cached = self._cache.get(prompt_id)
        return cached if cached is not None else self._source.lookup(prompt_id)

    def observe(self, outcome: SlotOutcome) -> None:
        """Let source and predictor learn how a slot ended."""
        self._source.observe(outcome)
        self._predictor.observe(outcome.prompt_id, outcome.response_tokens)

    async def run(self, inbox: Inbox) -> None:
        """Answer requests in order, forever."""
        while True:
            count = await self._requests.get()
            batch = await asyncio.to_thread(self._source.next, count)
            for prompt in batch.prompts:
                self._remember(prompt)
            ids = [prompt.prompt_id for prompt in batch.prompts]
            estimates = self._predictor.predict(ids, [prompt.text for prompt in batch.prompts])
            refs = tuple(
                PromptRef(
                    prompt_id=prompt.prompt_id,
                    prompt_tokens=len(prompt.prompt_ids),
                    predicted_tokens=estimate.mean_tokens,
                )
                for prompt, estimate in zip(batch.prompts, estimates, strict=True)
            )
            arrived = PromptsArrived(prompts=refs, source_positions=tuple(batch.positions), exhausted=batch.exhausted)
            await inbox.put(Arrival(arrived))

    def _remember(self, prompt: Prompt) -> None:
        self._cache[prompt.prompt_id] = prompt
        if len(self._cache) > MAX_CACHED:
            del self._cache[next(iter(self._cache))]
