"""An engine around an engine: a request for samples becomes episodes of turns, and a completion is a whole episode.

    submit ─► reset ─► inner engine: a turn ─► step ─► done ─► results: one Completion, all turns in it
                            ▲                   │
                            └── next turn ◄─────┘ prompt + all ids so far + what the template adds
                                                  (while a step is waited for, another sample has the slot)

Token-exact: what was sampled stays as it was sampled, what is added is encoded once. A later turn goes before groups
that have not begun, and is a prompt of the inner engine, whichever that is: embedded, a server, or emulated.

Owns: open episodes. Never: the broker; when a sample is given up (the core); processes of environments (pool.py).
Invariant: every submitted sample comes out exactly once; no episode is longer than sampling.max_new_tokens, all
segments together, so a prompt that fits into the context stays in it; one that fails has no reward at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from transport.contracts.settings import EnvironmentSettings
from transport.contracts.types import (
    FinishReason,
    GroupId,
    SegmentKind,
    WeightIdentity,
)
from transport.errors import first_error
from workers.environments.encoder import ObservationEncoder
from workers.environments.environment import TOOL, Message, Observed
from workers.environments.pool import Environments, EpisodeLink, OneTurn
from workers.environments.transcript import LATER_TURN_PRIORITY, Transcript, turn_seed
from workers.errors import EnvironmentFailedError, ModelError
from workers.generation.engine import (
    ABORTED_UNSTARTED,
    Completion,
    EngineFailure,
    EngineInfo,
    EngineLoad,
    GenerationEngine,
    GenerationRequest,
    Progress,
    Result,
    ResultQueue,
    SampleKey,
)

if TYPE_CHECKING:
    import torch

log = structlog.get_logger(__name__)

EpisodeKey = tuple[GroupId, int, int]
"""Group, attempt, sample."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode(Transcript):
    """One sample so far.

    waits: for its environment, and not for the engine.  stopped: it was aborted, and comes out when the engine gives it
    back.
    """

    request: GenerationRequest
    sample: int
    link: EpisodeLink | OneTurn
    reward: float | None = None
    waits: bool = True
    stopped: bool = False

    @property
    def key(self) -> EpisodeKey:
        return *self.request.key, self.sample

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.request.limit(self.sample) - len(self.token_ids)

    def ended(self, reason: FinishReason) -> Completion:
        return self.completion(self.request, self.sample, reason, reward=self.reward)

    def aborted(self) -> Result:
        if self.turns:
            return self.ended(FinishReason.ABORT)
        return self.request.failure((self.sample,), ABORTED_UNSTARTED)


class EpisodeEngine:
    """A GenerationEngine (engine.py of generation). inner: generates the turns."""

    def __init__(
        self,
        inner: GenerationEngine,
        pool: Environments,
        encoder: ObservationEncoder,
        settings: EnvironmentSettings,
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._encoder = encoder
        self._settings = settings
        self._results = ResultQueue()
        self._episodes: dict[EpisodeKey, Episode] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._info = EngineInfo(name="not started", capacity=0, max_context=0, vocab_size=0)

    async def start(self) -> EngineInfo:
        """Raises ModelError; EnvironmentSetupError: the environment cannot be had here."""
        await self._pool.start()
        self._info = info = await self._inner.start()
        started = asyncio.Event()
        self._results.serving = asyncio.create_task(self._serve(started), name="episodes")
        await self._results.until(started.wait())
        return info

    async def _serve(self, started: asyncio.Event) -> None:
        """Take turns from the inner engine until it is closed. Raises what ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                started.set()
                while True:
                    for result in await self._inner.results():
                        self._take(result)
        except BaseExceptionGroup as failures:
            raise first_error(failures) from None

    def submit(self, request: GenerationRequest) -> None:
        # room for the whole episode; ids are checked by an engine that reads them
        if reason := request.why_impossible(max_context=self._info.max_context, vocab_size=2**31):
            self._results.put(request.failure(request.samples, reason, retryable=False))
            return
        opened = [
            Episode(request=request, sample=sample, link=self._pool.open(request.entry)) for sample in request.samples
        ]
        self._episodes.update((episode.key, episode) for episode in opened)
        self._begin(self._reset(request, opened), f"reset {request.group_id}")

    async def results(self) -> list[Result]:
        return await self._results.take()

    async def abort(self, groups: Collection[tuple[GroupId, int]]) -> None:
        """Episodes that wait for their environment come out now; the others when the inner engine gives them back."""
        for episode in [one for one in self._episodes.values() if one.request.key in groups]:
            episode.stopped = True
            if episode.waits:
                self._end(episode, episode.aborted())
        await self._inner.abort(groups)

    async def progress(self, known: Mapping[SampleKey, int]) -> list[Progress]:
        """None: an episode starts over elsewhere, and its environment with it."""
        return []

    async def load_weights(self, weights: WeightIdentity, tensors: Mapping[str, torch.Tensor]) -> None:
        await self._inner.load_weights(weights, tensors)

    async def use_full_precision(self, reason: str) -> None:
        await self._inner.use_full_precision(reason)

    def load(self) -> EngineLoad:
        """A sample that waits for its environment has no slot, so one more fits; as many again as there are slots."""
        load, waits = self._inner.load(), sum(episode.waits for episode in self._episodes.values())
        capacity = (load.capacity or self._info.capacity) + min(waits, self._info.capacity)
        trouble = load.trouble or (f"its environment fails: {self._pool.problem}" if self._pool.problem else "")
        return replace(load, waiting=load.waiting + waits, capacity=capacity, trouble=trouble)

    async def close(self) -> None:
        try:
            await self._results.end_serving()
        finally:
            await self._pool.close()
            await self._inner.close()

    # -- an episode, from its reset to its end

    def _begin(self, work: Coroutine[object, object, None], name: str) -> None:
        if self._tasks is None:
            work.close()
            raise ValueError("the engine was not started")
        self._tasks.create_task(work, name=name)

    async def _reset(self, request: GenerationRequest, opened: Sequence[Episode]) -> None:
        """Begin the episodes of a group; those to whom nothing is said go on together, so that their prompt is computed
        once."""
        prompt, entry = request.prompt_text, request.entry
        said = await asyncio.gather(*(self._ask(one, one.link.reset(prompt, entry)) for one in opened))
        together: list[Episode] = []
        for episode, observed in zip(opened, said, strict=True):
            if observed is None or self._episodes.get(episode.key) is not episode:
                continue  # it failed, or was aborted
            if not observed.messages:
                together.append(episode)
            elif self._observe(episode, observed.messages):
                self._submit([episode])
        if together:
            self._submit(together)

    def _take(self, result: Result) -> None:
        """A turn of the policy, or why there is none."""
        if isinstance(result, EngineFailure):
            for sample in result.samples:
                if episode := self._episodes.get((result.group_id, result.attempt, sample)):
                    self._end(episode, replace(result, samples=(sample,)))
            return
        episode = self._episodes.get((result.group_id, result.attempt, result.sample))
        if episode is None:
            return
        episode.add_turn(result)
        if episode.stopped or result.finish_reason is FinishReason.ABORT:
            self._end(episode, episode.ended(FinishReason.ABORT))
            return
        episode.waits = True
        self._begin(self._step(episode, result), f"step {episode.key}")

    async def _step(self, episode: Episode, turn: Completion) -> None:
        """Tell the environment of a turn, also of the last one: it may be what judges it."""
        ids = turn.response_ids.tolist()
        observed = await self._ask(episode, episode.link.step(self._encoder.text(ids), ids))
        if observed is None or self._episodes.get(episode.key) is not episode:
            return
        if observed.reward is not None:
            episode.reward = (episode.reward or 0.0) + observed.reward
        if observed.done:
            self._end(episode, episode.ended(turn.finish_reason))
        elif episode.turns >= self._settings.max_turns:
            self._end(episode, episode.ended(FinishReason.LENGTH))
        elif self._observe(episode, observed.messages, anew=observed.anew):
            self._submit([episode])

    async def _ask(self, episode: Episode, call: Coroutine[object, object, Observed]) -> Observed | None:
        """None: there is no answer, and the episode has ended for this reason; another attempt may succeed."""
        try:
            return await call
        except EnvironmentFailedError as error:
            if self._episodes.get(episode.key) is episode:
                self._end(episode, episode.request.failure((episode.sample,), str(error)))
            return None

    def _observe(self, episode: Episode, messages: Sequence[Message], *, anew: bool = False) -> bool:
        """Add what is said to the policy. anew: behind the prompt alone, as another sample of the same row.

        False: the episode has ended, because no turn fits behind it, or because it cannot be said."""
        try:
            last = episode.token_ids[-1] if episode.token_ids and not anew else None
            encoder = self._encoder
            if last is not None:
                ids = encoder.behind_turn(messages, last)
            else:
                ids = encoder.behind_prompt(messages) if messages else []
        except ModelError as error:
            self._end(episode, episode.request.failure((episode.sample,), str(error), retryable=False))
            return False
        if len(ids) >= episode.room:
            return self._outgrown(episode, len(ids))
        if anew:
            episode.end_branch()
        from_tool = bool(messages) and all(message.role == TOOL for message in messages)
        episode.add_observation(ids, SegmentKind.TOOL if from_tool else SegmentKind.ENVIRONMENT)
        return True

    def _outgrown(self, episode: Episode, added: int) -> bool:
        log.info("an episode is at its limit", group=episode.request.group_id, turns=episode.turns, added=added)
        if episode.turns:
            self._end(episode, episode.ended(FinishReason.LENGTH))
        else:
            why = f"what the environment says first has {added} tokens, and a response may have {episode.room}"
            self._end(episode, episode.request.failure((episode.sample,), f"{why} (sampling.max_new_tokens)"))
        return False

    def _submit(self, episodes: Sequence[Episode]) -> None:
        """The next turn of episodes of one group, all of them with the same ids so far."""
        first = episodes[0]
        request, turn = first.request, first.turns
        limits = [self._turn_limit(episode) for episode in episodes]
        ids: NDArray[np.int32] = np.concatenate([request.prompt_ids, np.array(first.branch_ids, np.int32)])
        drawn = msgspec.structs.replace(
            request.sampling, max_new_tokens=max(limits), seed=turn_seed(request.sampling.seed, turn)
        )
        for episode in episodes:
            episode.waits = False
        self._inner.submit(
            replace(
                request,
                prompt_ids=ids,
                samples=tuple(episode.sample for episode in episodes),
                sampling=drawn,
                priority=request.priority + (LATER_TURN_PRIORITY if turn else 0.0),
                keep=turn + 1 < self._settings.max_turns,
                limits=limits if request.limits else (),
            )
        )

    def _turn_limit(self, episode: Episode) -> int:
        """Tokens that its next turn may have; of a forced length an equal part in each turn."""
        left = self._settings.max_turns - episode.turns
        if episode.request.limits:
            return max(1, episode.room // left)
        most = self._settings.max_turn_tokens or episode.room
        return min(most, episode.room)

    def _end(self, episode: Episode, result: Result) -> None:
        self._episodes.pop(episode.key, None)
        episode.link.close()
        self._results.put(result)
