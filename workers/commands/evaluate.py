"""``streamrl-worker evaluate``: the held-out problems of a run, answered greedily by one model.

Owns: nothing that lasts. Reads ``eval.jsonl``, ``config.toml`` and checkpoints of the run's directory, also while it is
live; the reward is the run's own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from transport.contracts.pass_at_k import pass_rates
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, SamplingParams, Struct
from transport.process.clock import MonotonicClock
from workers.commands.export import export_checkpoint, read_settings
from workers.errors import EvaluationError, RunFilesError
from workers.generation.engine import Completion, EngineFailure, GenerationEngine, GenerationRequest, serving
from workers.models import load_detokenizer, prepare_model, stop_token_ids
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import RewardSpec, reward_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How problems are asked; see ``evaluate_run``."""

    samples: int
    temperature: float
    seed: int
    passed_by: str


class HeldOut(Struct, frozen=True, kw_only=True):
    """One line of ``eval.jsonl``. entry: JSON, what the reward needs.  eval_set: of ``[eval.sets]``, "" without."""

    prompt_id: str
    text: str
    prompt_ids: list[int]
    entry: str
    eval_set: str = ""


TOKENS = "response_tokens"


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
    """Mean reward and components over the answers to the held-out problems of ``run_dir``, and again of each of its
    named sets as ``NAME/...``.

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
    if settings.environment.name:
        raise RunFilesError(
            f"the answers of run {settings.run.name!r} are episodes (environment.name), and this command asks for one "
            "turn: have the run evaluate itself (eval.every)"
        )
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
    pool = open_pool(settings, spec, processes=1)
    try:
        await pool.start()
        rewards = [
            await pool.score(problem.text, detokenize(completion.response_ids.tolist()), problem.entry.encode())
            for problem, answers in zip(problems, completions, strict=True)
            for completion in answers
        ]
    finally:
        await pool.close()
    lengths = [len(completion.response_ids) for answers in completions for completion in answers]
    judged = [
        {"reward": reward.value, **reward.components, TOKENS: length}
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    named = {problem.eval_set: None for problem in problems if problem.eval_set}
    of_sets = {
        f"{name}/{key}": value
        for name in named
        for key, value in figures(
            [one for place, one in enumerate(judged) if problems[place // ask.samples].eval_set == name],
            ask.samples,
            ask.passed_by,
        ).items()
    }
    return figures(judged, ask.samples, ask.passed_by) | of_sets


def figures(answers: Sequence[Mapping[str, float]], samples: int, passed_by: str) -> dict[str, float]:
    """Means of ``samples`` answers to each problem, problem after problem; of several answers pass@k, too.

    answers: what is known of each, with the same keys.  Raises RunFilesError: none of them is ``passed_by``.
    """
    means = {name: fmean(one[name] for one in answers) for name in answers[0]}
    if samples == 1:
        return means
    if passed_by not in means:
        raise RunFilesError(
            f"the reward has no component {passed_by!r} that says whether an answer passes; --passed-by takes one of "
            f"{', '.join(name for name in means if name != TOKENS)}"
        )
    passed = [one[passed_by] >= 1 for one in answers]
    num_right = [sum(passed[first : first + samples]) for first in range(0, len(passed), samples)]
    return means | pass_rates(samples, num_right)


async def _answers(engine: GenerationEngine, problems: Sequence[HeldOut], samples: int) -> list[list[Completion]]:
    """[problems][samples] completions, in the order of problems and samples."""
    answers: dict[tuple[int, int], Completion] = {}
    while len(answers) < len(problems) * samples:
        for result in await engine.results():
            if isinstance(result, EngineFailure):
                raise EvaluationError(f"held-out problem {problems[int(result.group_id)].prompt_id}: {result.reason}")
            answers[int(result.group_id), result.sample] = result
    return [[answers[problem, sample] for sample in range(samples)] for problem in range(len(problems))]
