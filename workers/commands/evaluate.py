"""``streamrl-worker evaluate``: the held-out problems of a run, answered greedily by one model.

Owns: nothing that lasts. Reads ``eval.jsonl`` and ``config.toml`` of the run's directory; the reward is the run's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, SamplingParams, Struct
from transport.process.clock import MonotonicClock
from workers.errors import EvaluationError
from workers.generation.embedded.engine import EmbeddedEngine, EmbeddedSettings
from workers.generation.engine import Completion, EngineFailure, GenerationRequest, serving
from workers.models.facts import stop_token_ids
from workers.models.resolve import prepare_model
from workers.scoring.reward_pool import RewardPool
from workers.scoring.rewards import Reward, RewardSpec, reward_spec
from workers.scoring.tasks import load_detokenizer


class HeldOut(Struct, frozen=True, kw_only=True):
    """One line of ``eval.jsonl``. entry: JSON, what the reward needs."""

    prompt_id: str
    text: str
    prompt_ids: list[int]
    entry: str


def evaluate_run(
    run_dir: Path,
    model: str,
    *,
    cache_dir: Path,
    trust_remote_code: bool = False,
    reward: str = "",
    reward_path: str = "",
) -> dict[str, float]:
    """Mean reward and components over the held-out problems of ``run_dir``.

    model: "base" (what the run started from), "final" (what it ended with) or a Hugging Face directory.
    reward, reward_path: the user's own "module:function", and where it lies: what a run's directory names is not
    imported unless the caller names it too, because the directory may be another user's.
    Raises: EvaluationError when the run's files are not there; ModelError; RewardError, RewardSetupError.
    """
    settings = _read_settings(run_dir / "config.toml")
    problems = _read_problems(run_dir / "eval.jsonl")
    paths = {"base": settings.model.path, "final": str(run_dir / "model")}
    directory = prepare_model(paths.get(model, model), cache_dir=cache_dir, trust_remote_code=trust_remote_code)
    return asyncio.run(_evaluate(settings, problems, directory, reward_spec(settings, reward, reward_path)))


def _read_settings(path: Path) -> Settings:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Settings)
    except (OSError, msgspec.MsgspecError) as error:
        raise EvaluationError(f"{path} is not the configuration of a run: {error}") from error


def _read_problems(path: Path) -> list[HeldOut]:
    try:
        problems = msgspec.json.decode(b"[" + b",".join(path.read_bytes().splitlines()) + b"]", type=list[HeldOut])
    except (OSError, msgspec.MsgspecError) as error:
        raise EvaluationError(f"{path} does not hold the run's held-out problems: {error}") from error
    if not problems:
        raise EvaluationError(f"{path} is empty: the run holds out no problems (eval.problems)")
    return problems


async def _evaluate(
    settings: Settings, problems: Sequence[HeldOut], directory: Path, spec: RewardSpec
) -> dict[str, float]:
    engine = EmbeddedEngine(EmbeddedSettings.of(settings.generation, directory), MonotonicClock())
    async with serving(engine):
        sampling = SamplingParams(
            max_new_tokens=settings.sampling.max_new_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids(directory),
        )
        completions = await _answer(engine, problems, sampling)
    rewards = await _score(settings, spec, problems, completions, directory)
    means = {name: fmean(reward.components[name] for reward in rewards) for name in rewards[0].components}
    lengths = fmean(len(completion.response_ids) for completion in completions)
    return {"reward": fmean(reward.value for reward in rewards), **means, "response_tokens": lengths}


async def _answer(engine: EmbeddedEngine, problems: Sequence[HeldOut], sampling: SamplingParams) -> list[Completion]:
    """[N] one completion a problem, in their order."""
    for index, problem in enumerate(problems):
        request = GenerationRequest(
            group_id=GroupId(str(index)),
            prompt_ids=np.asarray(problem.prompt_ids, dtype=np.int32),
            samples=(0,),
            sampling=sampling,
        )
        engine.submit(request)
    answers: dict[int, Completion] = {}
    while len(answers) < len(problems):
        for result in await engine.results():
            if isinstance(result, EngineFailure):
                raise EvaluationError(f"held-out problem {problems[int(result.group_id)].prompt_id}: {result.reason}")
            answers[int(result.group_id)] = result
    return [answers[index] for index in range(len(problems))]


async def _score(
    settings: Settings,
    spec: RewardSpec,
    problems: Sequence[HeldOut],
    completions: Sequence[Completion],
    directory: Path,
) -> list[Reward]:
    detokenize = load_detokenizer(directory)
    pool = RewardPool.of(settings, spec, processes=1)
    try:
        await pool.start()
        return [
            await pool.score(problem.text, detokenize(completion.response_ids.tolist()), problem.entry.encode())
            for problem, completion in zip(problems, completions, strict=True)
        ]
    finally:
        await pool.close()
