"""The prompt server: reads the prompt source off the loop, keeps prompts in flight at hand, predicts their lengths.

Owns: the source's position in memory (its durable form is in the journal and in the trainer's checkpoint).
Never: decides which prompt goes where. Invariant: prompts arrive in the source's order, and one that the core may still
name can always be found again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from orchestrator.errors import DataError
from orchestrator.loop.intake import Arrival, Inbox
from orchestrator.prompts.source import Prompt, PromptSource
from ranker.protocol import LengthPredictor
from transport.contracts.messages import (
    HeldOutPromptsArrived,
    PromptRef,
    PromptsArrived,
    RequestHeldOutPrompts,
    RequestPrompts,
    SlotOutcome,
)
from transport.contracts.types import GroupId, PromptId, SamplingParams

HELD_OUT = "held out: "
"""Before the ids of held-out problems that the predictor hears: one of them may have the id of a prompt that is trained
on, and is no earlier visit of it."""
MAX_CACHED = 4096
"""Prompts kept at hand; one that fell out is read from the source again."""


class PromptServer:
    """``request``, ``prompt`` and ``observe`` never wait; ``run`` reads."""

    def __init__(
        self,
        source: PromptSource,
        predictor: LengthPredictor,
        *,
        held_out: PromptSource | None = None,
        sampling: Mapping[str, SamplingParams] | None = None,
        learnt: Collection[GroupId] = (),
        own_prompt: Callable[[GroupId], Awaitable[bytes | None]] | None = None,
    ) -> None:
        """held_out: the problems of evaluations, None for a run that makes none.  sampling: of each set of them.
        learnt: groups whose outcomes are reported again after a restart; the predictor had them before.
        own_prompt: the prompt that an agent brought for a group, if one did; None: agents bring none.
        """
        self._source = source
        self._held_out = held_out
        self._sampling = sampling or {}
        self._predictor = predictor
        self._learnt = frozenset(learnt)
        self._own_prompt = own_prompt
        self._cache: dict[PromptId, Prompt] = {}
        self._asked: asyncio.Queue[RequestPrompts | RequestHeldOutPrompts | SlotOutcome] = asyncio.Queue()

    def request(self, command: RequestPrompts | RequestHeldOutPrompts) -> None:
        """Ask for so many more prompts, or for the first so many held-out problems."""
        self._asked.put_nowait(command)

    def prompt(self, prompt_id: PromptId) -> Prompt:
        """A prompt that has arrived, from the cache or from the source. Raises KeyError for one that never existed."""
        cached = self._cache.get(prompt_id)
        return cached if cached is not None else self._source.lookup(prompt_id)

    def held_out_prompt(self, prompt_id: PromptId) -> Prompt:
        """A held-out problem that has arrived. Raises DataError when it is none any more."""
        try:
            if self._held_out is not None:
                return self._held_out.lookup(prompt_id)
        except KeyError:
            pass
        raise DataError(f"{prompt_id} is not among the held-out problems: eval.* or the data has changed since it was")

    def observe(self, outcome: SlotOutcome) -> None:
        """Source and predictor hear how a slot ended, unless its group answered a prompt that an agent brought: what
        came of that says nothing of the data's prompt. Where agents may bring some, ``run`` looks that up first, and
        what it has not looked up when the process ends is not learnt.
        """
        if self._own_prompt is None:
            self._learn(outcome)
        else:
            self._asked.put_nowait(outcome)

    def _learn(self, outcome: SlotOutcome) -> None:
        self._source.observe(outcome)
        if outcome.group_id not in self._learnt:
            self._predictor.observe(outcome.prompt_id, outcome.response_tokens)

    async def run(self, inbox: Inbox) -> None:
        while True:
            match await self._asked.get():
                case RequestPrompts(count=count):
                    await inbox.put(Arrival(await self._read(count)))
                case RequestHeldOutPrompts(count=count):
                    await inbox.put(Arrival(await self._name_held_out(count)))
                case SlotOutcome() as outcome:
                    if self._own_prompt is None or await self._own_prompt(outcome.group_id) is None:
                        self._learn(outcome)

    async def _read(self, count: int) -> PromptsArrived:
        batch = await asyncio.to_thread(self._source.next, count)
        for prompt in batch.prompts:
            self._cache[prompt.prompt_id] = prompt
            if len(self._cache) > MAX_CACHED:
                del self._cache[next(iter(self._cache))]
        return PromptsArrived(
            prompts=await self._refs(batch.prompts), source_positions=tuple(batch.positions), exhausted=batch.exhausted
        )

    async def _name_held_out(self, count: int) -> HeldOutPromptsArrived:
        """From the first one on, whatever was asked before: the core asks until it has heard."""
        if self._held_out is None:
            return HeldOutPromptsArrived(prompts=())
        self._held_out.seek("")
        batch = await asyncio.to_thread(self._held_out.next, count)
        return HeldOutPromptsArrived(prompts=await self._refs(batch.prompts, HELD_OUT))

    async def _refs(self, prompts: Sequence[Prompt], kind: str = "") -> tuple[PromptRef, ...]:
        """With predictions made in a thread. kind: goes before the ids that the predictor hears."""
        ids = [kind + prompt.prompt_id for prompt in prompts]
        estimates = await asyncio.to_thread(self._predictor.predict, ids, [prompt.text for prompt in prompts])
        return tuple(
            PromptRef(
                prompt_id=prompt.prompt_id,
                prompt_tokens=len(prompt.prompt_ids),
                predicted_tokens=estimate.mean_tokens,
                predicted_sigma=estimate.log_sigma,
                eval_set=prompt.eval_set,
                sampling=self._sampling.get(prompt.eval_set),
            )
            for prompt, estimate in zip(prompts, estimates, strict=True)
        )
