"""``streamrl-worker evaluate``: the held-out problems of a run, answered greedily by one model.

Owns: nothing that lasts. Reads ``eval.jsonl``, ``config.toml`` and checkpoints of the run's directory, also while it is
live; the reward is the run's own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, SamplingParams, Struct
from transport.process.clock import MonotonicClock
from workers.commands.export import export_checkpoint, read_settings
from workers.errors import EvaluationError, RunFilesError
from workers.generation.engine import Completion, EngineFailure, GenerationEngine, GenerationRequest, serving
from workers.models import load_detokenizer, prepare_model, stop_token_ids
from workers.scoring.reward_pool import RewardPool
from workers.scoring.rewards import RewardSpec, reward_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How problems are asked; see ``evaluate_run``."""

    samples: int
    temperature: float
    seed: int
    passed_by: str


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
    samples: int = 1,
    temperature: float | None = None,
    passed_by: str = "right",
) -> dict[str, float]:
    """Mean reward and components over the answers to the held-out problems of ``run_dir``.

    model: "base" (what the run started from), "final" (what it ended with), "checkpoint" (the newest; with ":N", of
    version N; then the answer names it), or a Hugging Face directory.
    reward, reward_path: the user's own "module:function", and where it lies: what a run's directory names is not
    imported unless the caller names it too, because the directory may be another user's.
    samples: answers to each problem; of several also pass@k is told.  temperature: of the answers; None: greedy, and
    that of the run's samples where there are several.  passed_by: component of the reward that is 1 where one passes.
    Raises: RunFilesError when the run's files are not there; ModelError; EvaluationError; RewardError;
    RewardSetupError.
    """
    settings = read_settings(run_dir)
    problems = _read_problems(run_dir / "eval.jsonl")
    spec = reward_spec(settings, reward, reward_path)
    drawn = (settings.sampling.temperature if samples > 1 else 0.0) if temperature is None else temperature
    if samples > 1 and drawn == 0:
        raise RunFilesError(
            "--temperature 0 gives the same answer every time: give one above it, or leave --samples out"
        )
    ask = Asking(samples=samples, temperature=drawn, seed=settings.eval.seed, passed_by=passed_by)
    if model == "final" and not (run_dir / "model").exists():
        raise RunFilesError(f"{run_dir} has no final model yet, which a run writes at its end: try --model checkpoint")
    kind, _, number = model.partition(":")
    if kind != "checkpoint":
        paths = {"base": settings.model.path, "final": str(run_dir / "model")}
        directory = prepare_model(paths.get(model, model), cache_dir=cache_dir, trust_remote_code=trust_remote_code)
        return asyncio.run(_evaluate(settings, problems, directory, spec, ask))
    if number and not number.isdecimal():
        raise RunFilesError(f'--model {model}: write "checkpoint", or "checkpoint:" and a version, like checkpoint:20')
    with tempfile.TemporaryDirectory(prefix="streamrl-checkpoint-") as copy:
        directory, dtype = Path(copy) / "model", settings.generation.dtype
        version = int(number) if number else None
        meta = export_checkpoint(run_dir, version, directory, dtype=dtype, cache_dir=cache_dir, trust=trust_remote_code)
        return {"version": meta.version, **asyncio.run(_evaluate(settings, problems, directory, spec, ask))}


def _read_problems(path: Path) -> list[HeldOut]:
    try:
        problems = msgspec.json.decode(b"[" + b",".join(path.read_bytes().splitlines()) + b"]", type=list[HeldOut])
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFilesError(f"{path} does not hold the run's held-out problems: {error}") from error
    if not problems:
        raise RunFilesError(f"{path} is empty: the run holds out no problems (eval.problems)")
    return problems


async def _evaluate(
    settings: Settings, problems: Sequence[HeldOut], directory: Path, spec: RewardSpec, ask: Asking
) -> dict[str, float]:
    from workers.generation.embedded.engine import EmbeddedEngine  # and torch: what is wrong is said before

    engine, stops = EmbeddedEngine(settings.generation, directory, MonotonicClock()), stop_token_ids(directory)
    async with serving(engine):
        for index, problem in enumerate(problems):
            sampling = SamplingParams(
                max_new_tokens=settings.sampling.max_new_tokens,
                temperature=ask.temperature,
                top_p=settings.sampling.top_p if ask.temperature else 1.0,
                top_k=settings.sampling.top_k if ask.temperature else 0,
                stop_token_ids=stops,
                seed=ask.seed + index,
            )
            request = GenerationRequest(
                group_id=GroupId(str(index)),
                prompt_ids=np.asarray(problem.prompt_ids, dtype=np.int32),
                samples=range(ask.samples),
                sampling=sampling,
            )
            engine.submit(request)
        completions = await _answers(engine, problems, ask.samples)
    detokenize = load_detokenizer(directory)
    pool = RewardPool.of(settings, spec, processes=1)
    try:
        await pool.start()
        rewards = [
            await pool.score(problem.text, detokenize(completion.response_ids.tolist()), problem.entry.encode())
            for problem, answers in zip(problems, completions, strict=True)
            for completion in answers
        ]
    finally:
        await pool.close()
    means = {name: fmean(reward.components[name] for reward in rewards) for name in rewards[0].components}
    lengths = fmean(len(completion.response_ids) for answers in completions for completion in answers)
    passes = pass_rates([{**one.components, "reward": one.value} for one in rewards], ask.samples, ask.passed_by)
    return {"reward": fmean(reward.value for reward in rewards), **means, **passes, "response_tokens": lengths}


def pass_rates(components: Sequence[Mapping[str, float]], samples: int, passed_by: str) -> dict[str, float]:
    """``pass@1`` ... of ``samples`` answers to each problem, problem after problem; {} where there is one answer each.

    Raises RunFilesError: the reward has no component ``passed_by``.
    """
    if samples == 1:
        return {}
    if passed_by not in components[0]:
        raise RunFilesError(
            f"the reward has no component {passed_by!r} that says whether an answer passes; --passed-by takes one of "
            f"{', '.join(components[0])}"
        )
    passed = [one[passed_by] >= 1 for one in components]
    num_right = [sum(passed[first : first + samples]) for first in range(0, len(passed), samples)]
    return {f"pass@{k}": pass_at_k(samples, num_right, k) for k in ks(samples)}


async def _answers(engine: GenerationEngine, problems: Sequence[HeldOut], samples: int) -> list[list[Completion]]:
    """[problems][samples] completions, in the order of problems and samples."""
    answers: dict[tuple[int, int], Completion] = {}
    while len(answers) < len(problems) * samples:
        for result in await engine.results():
            if isinstance(result, EngineFailure):
                raise EvaluationError(f"held-out problem {problems[int(result.group_id)].prompt_id}: {result.reason}")
            answers[int(result.group_id), result.sample] = result
    return [[answers[problem, sample] for sample in range(samples)] for problem in range(len(problems))]


def pass_at_k(num_samples: int, num_right: Sequence[int], k: int) -> float:
    """Mean over problems of 1 - C(n - c, k) / C(n, k).

    Args:   num_samples: n answers to each problem.  num_right: [P] c of them are right, in [0, n].  k: in [1, n].
    Raises: ValueError: no problem, or a number out of its range.
    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, eq. 1.
    """
    if not num_right or not 1 <= k <= num_samples or not all(0 <= right <= num_samples for right in num_right):
        raise ValueError(f"need 1 <= k <= {num_samples} and counts in [0, {num_samples}], got k = {k} of {num_right}")
    return fmean(1.0 - comb(num_samples - right, k) / comb(num_samples, k) for right in num_right)


def ks(num_samples: int) -> list[int]:
    """The k that are told for n answers: 1, 2, 4, ... and n itself."""
    return [*(1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples), num_samples]
