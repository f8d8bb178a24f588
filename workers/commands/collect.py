"""``streamrl-worker collect``: answers of the policy alone to a set of prompts, as lengths and rewards.

    stdin    line 1 CollectJob; then a CollectPrompt a line
    stdout   a Collected a line, each the moment all of its answers are scored

Started by ``streamrl-orchestrator collect``. Nothing is trained, and there is no broker. Invariant: every prompt comes
out once; an answer whose reward fails has no reward and says why, never a zero.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from transport.contracts.collection import Collected, CollectedAnswer, CollectedPrompt, CollectJob, CollectPrompt
from transport.contracts.types import FinishReason, GroupId
from workers.commands.build import ServerChoice, engine_of, with_environment
from workers.errors import EvaluationError, RewardError
from workers.generation.engine import Completion, EngineFailure, GenerationEngine, GenerationRequest, serving
from workers.models import Detokenize, load_detokenizer, stop_token_ids
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import RewardSource, reward_spec

REWARD_PROCESSES = 2
QUEUED_FACTOR = 2
"""Samples that are with the engine, over its slots: enough that none is free while one ends."""


@dataclass(slots=True)
class _Open:
    """A prompt that is being answered."""

    prompt: CollectPrompt
    lengths: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    errors: list[str] = field(default_factory=list[str])
    answers: list[CollectedAnswer] = field(default_factory=list[CollectedAnswer])
    pending: int = 0


async def collect(
    job: CollectJob,
    prompts: Sequence[CollectPrompt],
    write: Callable[[Collected], None],
    server: ServerChoice,
    log_path: Path,
) -> None:
    """Raises ModelError, RewardSetupError; EvaluationError naming a prompt that the engine cannot answer."""
    settings, directory = job.settings, Path(job.model_dir)
    engine = engine_of(settings, directory, log_path, settings.model.trust_remote_code, server)
    if settings.environments:  # the settings are those of the one who called: no run's
        allowed, path = ",".join(settings.own_environments), settings.environment.path
        engine = await with_environment(engine, settings, directory, allowed, path)
    async with AsyncExitStack() as stack:
        pool = None
        if job.rewards:
            spec = reward_spec(settings, settings.scoring.reward, settings.scoring.reward_path)
            pool = open_pool(settings, spec, processes=REWARD_PROCESSES)
            stack.push_async_callback(pool.close)
            await pool.start()
        await stack.enter_async_context(serving(engine))
        await _Collection(job, engine, pool, load_detokenizer(directory), stop_token_ids(directory), write).run(prompts)


class _Collection:
    def __init__(
        self,
        job: CollectJob,
        engine: GenerationEngine,
        pool: RewardSource | None,
        detokenize: Detokenize,
        stops: tuple[int, ...],
        write: Callable[[Collected], None],
    ) -> None:
        self._job = job
        self._engine = engine
        self._pool = pool
        self._detokenize = detokenize
        self._stops = stops
        self._write = write
        self._open: dict[GroupId, _Open] = {}
        self._ended = asyncio.Event()

    async def run(self, prompts: Sequence[CollectPrompt]) -> None:
        most = max(1, QUEUED_FACTOR * self._job.settings.generation.slots // self._job.samples)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read(group), name="answers")
            for index, prompt in enumerate(prompts):
                while len(self._open) >= most:
                    await self._one_ended()
                self._submit(GroupId(str(index)), prompt)
            while self._open:
                await self._one_ended()
            reading.cancel()

    async def _one_ended(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    def _submit(self, group_id: GroupId, prompt: CollectPrompt) -> None:
        sampling = self._job.settings.sampling.params
        self._open[group_id] = _Open(prompt, pending=self._job.samples)
        self._engine.submit(
            GenerationRequest(
                group_id=group_id,
                prompt_ids=np.asarray(prompt.prompt_ids, dtype=np.int32),
                samples=range(self._job.samples),
                sampling=replace(sampling, stop_token_ids=self._stops, seed=prompt.seed),
                prompt_text=prompt.text,
                entry=prompt.entry.encode(),
            )
        )

    async def _read(self, group: asyncio.TaskGroup) -> None:
        while True:
            for result in await self._engine.results():
                one = self._open[result.group_id]
                if isinstance(result, EngineFailure):
                    raise EvaluationError(f"prompt {one.prompt.id} cannot be answered: {result.reason}")
                group.create_task(self._finish(result, one), name=f"score {one.prompt.id}")

    async def _reward(self, pool: RewardSource, completion: Completion, prompt: CollectPrompt) -> float:
        """The environment's, where it gave one. Raises RewardError."""
        if completion.reward is not None:
            return completion.reward
        response = self._detokenize(completion.policy_ids)
        return (await pool.score(prompt.text, response, prompt.entry.encode())).value

    async def _finish(self, completion: Completion, one: _Open) -> None:
        one.lengths.append(len(completion.response_ids))
        reward: float | None = None
        if self._pool is not None:
            try:
                reward = await self._reward(self._pool, completion, one.prompt)
                one.rewards.append(reward)
            except RewardError as error:
                one.errors.append(str(error))
        if self._job.answers and completion.finish_reason is FinishReason.STOP:  # a cut one is no example
            response = self._detokenize(completion.policy_ids)
            one.answers.append(CollectedAnswer(response=response, reward=reward))
        one.pending -= 1
        if not one.pending:
            del self._open[completion.group_id]
            self._ended.set()
            line = CollectedPrompt(
                id=one.prompt.id,
                prompt=one.prompt.question,
                model=self._job.settings.model.path,
                output_tokens=one.lengths,
                rewards=one.rewards,
                errors=one.errors,
            )
            self._write(Collected(line=line, answers=one.answers))
