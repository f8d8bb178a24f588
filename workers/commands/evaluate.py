"""``streamrl-worker evaluate``: the held-out problems of a run, answered greedily by one model, in
episodes where it has an environment.

Owns: ``evaluated.jsonl`` of the run's directory. Reads ``eval.jsonl``, ``config.toml`` and checkpoints there, also
while the run is live; reward and environment are the run's own. Invariant: an answer that an environment failed is
asked again, and is an error at the limit, never a zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from transport.contracts.ledger import EVALUATED
from transport.contracts.pass_at_k import pass_rates
from transport.contracts.settings import Settings
from transport.contracts.types import GroupId, SamplingParams, Struct
from transport.errors import DECODE_ERRORS
from transport.process import files
from transport.process.clock import MonotonicClock
from transport.process.files import writing
from workers.commands.build import with_environment
from workers.commands.export import export_checkpoint, read_settings
from workers.errors import EvaluationError, RunFilesError
from workers.generation.engine import Completion, GenerationEngine, GenerationRequest, serving
from workers.models import load_detokenizer, prepare_model, stop_token_ids
from workers.scoring.reward_pool import open_pool
from workers.scoring.rewards import Reward, RewardSpec, reward_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How problems are asked; see ``evaluate_run``."""

    samples: int
    temperature: float
    seed: int
    passed_by: str
    environment: str
    environment_path: str


class HeldOut(Struct, frozen=True, kw_only=True):
    """One line of ``eval.jsonl``. entry: JSON, what the reward needs.  eval_set: of ``[eval.sets]``, "" without."""

    prompt_id: str
    text: str
    prompt_ids: list[int]
    entry: str
    eval_set: str = ""


class Answer(Struct, frozen=True, kw_only=True):
    """One line of the file of answers.

    response: what the policy wrote, without what an environment said.  figures: reward, its components, tokens.
    """

    prompt_id: str
    sample: int
    response: str
    figures: dict[str, float]
    eval_set: str = ""


TOKENS = "response_tokens"
METRICS = "metrics.jsonl"


WORDS = ("base", "final", "checkpoint")
PREFIXES = ("random", "package")
"""Beginnings of the models that model.path names so."""


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
    environment: str = "",
    environment_path: str = "",
    answers: Path | None = None,
) -> dict[str, float]:
    """Mean reward and components over the answers to the held-out problems of ``run_dir``, and again of each of its
    named sets as ``NAME/...``.

    model: "base" (what the run started from), "final" (what it ended with), "checkpoint" (the newest; with ":N", of
    version N; then the answer names it), or a Hugging Face directory.
    reward, reward_path: the user's own "module:function", and where it lies: what a run's directory names is not
    imported unless the caller names it too, because the directory may be another user's.
    environment, environment_path: likewise, of the run's environment.
    answers: file that gets each ``Answer`` as a line, problem after problem; None: none is kept.
    samples: answers to each problem; of several also pass@k is told.  temperature: of the answers; None: greedy, and
    that of the run's samples where there are several.  passed_by: component of the reward that is 1 where one passes.
    Raises: RunFilesError when the run's files are not there; ModelError; EvaluationError; RewardError;
    RewardSetupError; EnvironmentSetupError.
    """
    settings = read_settings(run_dir)
    kind, _, number = model.partition(":")
    is_word = kind.isalnum() and not Path(model).exists()
    if (number and kind == "checkpoint" and not number.isdecimal()) or (is_word and kind not in (*WORDS, *PREFIXES)):
        raise RunFilesError(
            f"--model {model}: write {', '.join(WORDS)}, checkpoint:N (N: a version, like 20), a directory, or "
            "OWNER/NAME of the hub"
        )
    problems = _read_problems(run_dir / "eval.jsonl")
    spec = reward_spec(settings, reward, reward_path)
    drawn = (settings.sampling.temperature if samples > 1 else 0.0) if temperature is None else temperature
    if samples > 1 and drawn == 0:
        raise RunFilesError(
            "--temperature 0 gives the same answer every time: give one above it, or leave --samples out"
        )
    ask = Asking(
        samples=samples,
        temperature=drawn,
        seed=settings.eval.seed,
        passed_by=passed_by,
        environment=environment,
        environment_path=environment_path,
    )
    if model == "final" and not (run_dir / "model").exists():
        raise RunFilesError(f"{run_dir} has no final model yet, which a run writes at its end: try --model checkpoint")
    if kind != "checkpoint":
        paths = {"base": settings.model.path, "final": str(run_dir / "model")}
        directory = prepare_model(paths.get(model, model), cache_dir=cache_dir, trust_remote_code=trust_remote_code)
        found = _figures_of(asyncio.run(_evaluate(settings, problems, directory, spec, ask)), ask, answers)
        if kind in paths:
            _keep(run_dir, 0 if kind == "base" else _last_version(run_dir), found, len(problems), ask, settings)
        return found
    with tempfile.TemporaryDirectory(prefix="streamrl-checkpoint-") as copy:
        directory, dtype = Path(copy) / "model", settings.generation.dtype
        version = int(number) if number else None
        meta = export_checkpoint(run_dir, version, directory, dtype=dtype, cache_dir=cache_dir, trust=trust_remote_code)
        found = _figures_of(asyncio.run(_evaluate(settings, problems, directory, spec, ask)), ask, answers)
        _keep(run_dir, meta.version, found, len(problems), ask, settings)
        return {"version": meta.version, **found}


def _last_version(run_dir: Path) -> int:
    """The version of the run's final model. Raises RunFilesError: its metrics do not say."""
    path = run_dir / METRICS
    with contextlib.suppress(OSError, *DECODE_ERRORS):
        versions = [msgspec.json.decode(line, type=_Version).version for line in path.read_bytes().splitlines()]
        if versions:
            return max(versions)
    raise RunFilesError(f"{path} does not say which version the final model is: try --model checkpoint")


class _Version(Struct, frozen=True):
    version: int = 0


def _keep(
    run_dir: Path, version: int, figures: Mapping[str, float], problems: int, ask: Asking, settings: Settings
) -> None:
    """Add a line to EVALUATED, for report and comparison, where the run's own evaluations ask in this way.

    A directory that this user may not write keeps none.
    """
    if ask.samples > 1 or ask.temperature != settings.eval.temperature:
        return
    named = {f"eval/{name}" if "/" in name else f"eval_{name}": value for name, value in figures.items()}
    line = {"version": version, **named, "eval_problems": problems, "eval_answered": problems, "eval_short": ""}
    with contextlib.suppress(OSError), (run_dir / EVALUATED).open("ab") as file:
        file.write(b"\n" + msgspec.json.encode(line) + b"\n")  # a line that a kill tore ends here


def _figures_of(given: Sequence[Answer], ask: Asking, path: Path | None) -> dict[str, float]:
    """Of all answers, then of each named set; they are written to ``path``. Raises RunFilesError."""
    if path is not None:
        with writing(path):
            files.replace(path, b"".join(msgspec.json.encode(answer) + b"\n" for answer in given))
    found = figures([answer.figures for answer in given], ask.samples, ask.passed_by)
    for name in dict.fromkeys(answer.eval_set for answer in given if answer.eval_set):
        of_set = [answer.figures for answer in given if answer.eval_set == name]
        found |= {f"{name}/{key}": value for key, value in figures(of_set, ask.samples, ask.passed_by).items()}
    return found


def _read_problems(path: Path) -> list[HeldOut]:
    try:
        problems = msgspec.json.decode(b"[" + b",".join(path.read_bytes().splitlines()) + b"]", type=list[HeldOut])
    except (OSError, *DECODE_ERRORS) as error:
        raise RunFilesError(f"{path} does not hold the run's held-out problems: {error}") from error
    if not problems:
        raise RunFilesError(f"{path} is empty: the run holds out no problems (eval.problems)")
    return problems


async def _evaluate(
    settings: Settings, problems: Sequence[HeldOut], directory: Path, spec: RewardSpec, ask: Asking
) -> list[Answer]:
    """[problems * samples] problem after problem."""
    from workers.generation.embedded.engine import EmbeddedEngine  # and torch: what is wrong is said before

    engine: GenerationEngine = EmbeddedEngine(settings.generation, directory, MonotonicClock())
    if settings.environments:
        engine = await with_environment(engine, settings, directory, ask.environment, ask.environment_path)
    stops = stop_token_ids(directory)
    async with serving(engine):
        completions = await _answers(
            engine,
            problems,
            [_request(settings, ask, index, problem, stops) for index, problem in enumerate(problems)],
            max_attempts=settings.pipeline.max_attempts,
        )
    detokenize = load_detokenizer(directory)
    pool = open_pool(settings, spec, processes=1)
    given: list[Answer] = []
    try:
        await pool.start()
        for problem, of_problem in zip(problems, completions, strict=True):
            for completion in of_problem:
                response = detokenize(completion.policy_ids)
                if completion.reward is None:
                    reward = await pool.score(problem.text, response, problem.entry.encode())
                else:
                    reward = Reward(value=completion.reward)
                known = {"reward": reward.value, **reward.components, TOKENS: float(len(completion.response_ids))}
                given.append(
                    Answer(
                        prompt_id=problem.prompt_id,
                        sample=completion.sample,
                        response=response,
                        figures=known,
                        eval_set=problem.eval_set,
                    )
                )
    finally:
        await pool.close()
    return given


def _request(
    settings: Settings, ask: Asking, index: int, problem: HeldOut, stops: tuple[int, ...]
) -> GenerationRequest:
    return GenerationRequest(
        group_id=GroupId(str(index)),
        prompt_ids=np.asarray(problem.prompt_ids, dtype=np.int32),
        samples=range(ask.samples),
        sampling=SamplingParams(
            max_new_tokens=settings.sampling.max_new_tokens,
            temperature=ask.temperature,
            top_p=settings.sampling.top_p if ask.temperature else 1.0,
            top_k=settings.sampling.top_k if ask.temperature else 0,
            stop_token_ids=stops,
            seed=ask.seed + index,
        ),
        prompt_text=problem.text,
        entry=problem.entry.encode(),
    )


def figures(answers: Sequence[Mapping[str, float]], samples: int, passed_by: str) -> dict[str, float]:
    """Means of ``samples`` answers to each problem, problem after problem; of several answers pass@k, too.

    answers: what is known of each; a mean is over those that have the component, as an environment's reward has none.
    Raises RunFilesError: not each of them has ``passed_by``.
    """
    names = dict.fromkeys(name for one in answers for name in one)
    means = {name: fmean(one[name] for one in answers if name in one) for name in names}
    if samples == 1:
        return means
    if any(passed_by not in one for one in answers):
        raise RunFilesError(
            f"the reward has no component {passed_by!r} that says whether an answer passes; --passed-by takes one of "
            f"{', '.join(name for name in means if name != TOKENS)}"
        )
    passed = [one[passed_by] >= 1 for one in answers]
    num_right = [sum(passed[first : first + samples]) for first in range(0, len(passed), samples)]
    return means | pass_rates(samples, num_right)


async def _answers(
    engine: GenerationEngine, problems: Sequence[HeldOut], requests: Sequence[GenerationRequest], *, max_attempts: int
) -> list[list[Completion]]:
    """[problems][samples] completions, in the order of problems and samples. Raises EvaluationError."""
    for request in requests:
        engine.submit(request)
    answers: dict[tuple[int, int], Completion] = {}
    while len(answers) < sum(len(request.samples) for request in requests):
        for result in await engine.results():
            index = int(result.group_id)
            if isinstance(result, Completion):
                answers[index, result.sample] = result
            elif result.retryable and result.attempt + 1 < max_attempts:
                engine.submit(replace(requests[index], samples=result.samples, attempt=result.attempt + 1))
            else:
                raise EvaluationError(f"held-out problem {problems[index].prompt_id}: {result.reason}")
    return [[answers[index, sample] for sample in request.samples] for index, request in enumerate(requests)]
