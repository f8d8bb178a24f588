"""Rewards: what one response is worth, with named components; and the child process that computes them.

    own verifier     a grader of the task, reasoning_gym's or ours, or a comparison with the entry's answer (jsonl, hf)
    user's function  ``module:function``, called with one response or with a batch of them (UserReward)

The own verifiers pay 1 for a right answer, ``well_formed_reward`` for a wrong one in the asked form, else 0, so that a
model that cannot do the task yet has a first step to climb.

The child is started by reward_pool.py as ``python -m workers.scoring.rewards``, in a jail where that works (jail.py),
for some rewards once an answer: this module imports little.

    parent: Setup once, then a ScoreRequest at a time;  child: Ready once, then Scores to each

Owns: extraction, verification, the meaning of what a user's function returns, the child's end of the frames. Never:
when a child starts or ends. Invariant: a reward is a finite number or a RewardError, never a silent zero; every request
is answered, or the process ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, Protocol, TypeAlias, cast

import msgspec

from transport.contracts.gym_tasks import refusal
from transport.contracts.settings import ParamValue, Settings, data_parts
from transport.contracts.types import MAX_NUMBER, Struct
from workers.errors import RewardError, RewardSetupError
from workers.scoring.child import frame, own_streams, read_frame
from workers.scoring.graders import OUR_GRADERS, Entry, Grade, bounded, forbid_code_from_text
from workers.scoring.jail import confine
from workers.user_functions.imports import find_in, import_function


class VerifiedPart(Struct, frozen=True, kw_only=True):
    """What the own verifier grades in one part of ``[data.mix]``."""

    source: Literal["reasoning_gym", "jsonl", "hf"]
    task: str
    params: dict[str, ParamValue]


class RewardSpec(Struct, frozen=True, kw_only=True):
    """Which reward to build.

    function: "module:function", checked against the worker's own command line.  path: directory of its module, from
    there too; "": only what is installed is found.  executes_answers: it runs what a model wrote.
    parts: by the name that an entry gives as its ``part``; {} where the run has only one.
    """

    source: Literal["reasoning_gym", "jsonl", "hf"]
    task: str
    params: dict[str, ParamValue]
    answer_marker: str
    well_formed_reward: float
    function: str = ""
    path: str = ""
    executes_answers: bool = False
    parts: dict[str, VerifiedPart] = msgspec.field(default_factory=dict[str, VerifiedPart])


class Reward(Struct, frozen=True, kw_only=True):
    """value: what the policy is trained on.  components: its parts, for people."""

    value: float
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class RewardSource(Protocol):
    """What a run has its rewards of: processes of a function, jails of answers, or a model. ``close`` comes last.

    failures: calls that ended with an error.  jailed: whether it runs in a jail; None: it runs nobody's code.
    """

    failures: int

    @property
    def jailed(self) -> bool | None: ...

    async def start(self, trial: Sequence[Sample] = ()) -> None:
        """Raises RewardSetupError: there is none here, or it computes nothing for any of ``trial``; ModelError."""
        ...

    async def score(self, prompt: str, response: str, entry: bytes) -> Reward:
        """entry: the column TASK_ENTRY. Raises RewardError."""
        ...

    async def close(self) -> None: ...


Scorer = Callable[[str, str, Entry], Reward]
"""(prompt, response, entry) -> Reward. Raises RewardError."""


def reward_spec(settings: Settings, allowed: str, path: str = "") -> RewardSpec:
    """The run's reward, if this worker may compute it.

    Args:   allowed: "module:function" from the worker's own command line; "" allows the own verifiers only.
            path: where its module lies on this machine.
    Raises: RewardSetupError: the run's setting names another function. A setting alone never imports code.
    """
    wanted = settings.scoring.reward
    if wanted != allowed:
        raise RewardSetupError(
            f"the run wants reward {wanted or '(own verifier)'!r}, this worker allows {allowed or '(own verifier)'!r}; "
            f"start it with --reward {wanted}, and --reward-path where its module is not installed"
            if wanted
            else f"the run uses the data's own verifier; drop --reward {allowed}"
        )
    return RewardSpec(
        source=settings.data.source,
        task=settings.data.task,
        params=settings.data.params,
        answer_marker=settings.scoring.answer_marker,
        well_formed_reward=settings.scoring.well_formed_reward,
        function=wanted,
        path=path,
        executes_answers=settings.scoring.executes_answers,
        parts={
            name: VerifiedPart(source=data.source, task=data.task, params=data.params)
            for name, data in data_parts(settings.data).items()
            if name
        },
    )


def build_reward(spec: RewardSpec) -> Scorer:
    """Import what the reward needs. Takes seconds; raises RewardSetupError that says what is missing."""
    if spec.function:
        return _user_reward(spec.function, spec.path)
    grades = {name: _grade_of(part) for name, part in spec.parts.items()}
    if not grades or spec.source != "reasoning_gym":  # held-out rows of a file of their own are of no part
        grades[""] = _grade_of(VerifiedPart(source=spec.source, task=spec.task, params=spec.params))
    return _own_verifier(spec, grades)


def _grade_of(part: VerifiedPart) -> Grade:
    return _gym_grade(part) if part.source == "reasoning_gym" else _answer_grade()


# --- the answer in a response -----------------------------------------------------------------------------------------

DECORATION = "*` '\"\u2018\u2019\u201c\u201d"
"""Emphasis and quotation marks around an answer: a model that quotes the asked form closes the quote after it."""


def extract_answer(response: str, marker: str) -> str | None:
    """What follows the last ``marker`` on its line, without the decoration models put around answers.

    The marker is found in any case. Returns None where there is no marker or nothing after it; the next line counts
    when the marker's own has nothing.
    """
    ends = [found.end() for found in re.finditer(re.escape(marker), response, re.IGNORECASE)]
    if not ends:
        return None
    rest = response[ends[-1] :].lstrip(" \t*:=\r\n")
    line = rest.split("\n", 1)[0].strip()
    for opening, closing in (("\\boxed{", "}"), ("\\(", "\\)"), ("<", ">"), ("**", "**"), ("$", "$"), ("`", "`")):
        if line.startswith(opening) and line.endswith((closing, closing + ".")):
            line = line[len(opening) : line.rindex(closing)].strip()
    return line.strip(DECORATION).removesuffix(".").strip(DECORATION) or None


def as_number(text: str) -> float | None:
    """The number that ``text`` is: ``1,000``, ``-3.50``, ``$7``, ``12%`` count; None for anything else."""
    bare = text.strip().lstrip("$€£").rstrip("%").strip().replace("\u2212", "-")
    return float(bare.replace(",", "")) if re.fullmatch(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)", bare) else None


def _gold(entry: Entry) -> str:
    """The right answer; GSM8K writes its reasoning before ``####``."""
    return str(entry.get("answer", "")).rsplit("####", 1)[-1].strip()


# --- own verifiers ----------------------------------------------------------------------------------------------------

UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, SyntaxError, TypeError, ValueError),
)
"""What graders raise at an answer that they cannot read, so that it is not right. Running out of memory or time is not
among them: the answer may have been right."""


def _own_verifier(spec: RewardSpec, grades: Mapping[str, Grade]) -> Scorer:
    """grades: by the part that an entry is of; "": of an entry that names none."""

    def score(prompt: str, response: str, entry: Entry) -> Reward:
        grade = grades.get(str(entry.get("part", "")))
        if grade is None:
            raise RewardError(
                f"the task entry is of part {entry.get('part')!r:.60}, which is none of this run's data.mix"
            )
        if not _gold(entry):
            raise RewardError("the task entry has no answer to compare with")
        answer = extract_answer(response, spec.answer_marker)
        # a number where a number is asked for, or "Answer: <result>" would pay
        well_formed = answer is not None and (as_number(_gold(entry)) is None or as_number(answer) is not None)
        try:
            right = answer is not None and well_formed and grade(answer, entry)
        except UNREADABLE:
            right = False
        value = 1.0 if right else spec.well_formed_reward if well_formed else 0.0
        return Reward(value=value, components={"well_formed": float(well_formed), "right": float(right)})

    return score


def _gym_grade(spec: VerifiedPart) -> Grade:
    """Of a task whose scorer does not execute answers; full marks only count as right."""
    task, params = spec.task, spec.params
    if reason := refusal(task):
        raise RewardSetupError(reason)
    if task in OUR_GRADERS:
        return bounded(task, OUR_GRADERS[task])
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=0, **params)
    except (ValueError, TypeError, AssertionError) as error:  # it checks its configuration with assert
        raise RewardSetupError(f"reasoning_gym cannot make task {task!r} with {dict(params)}: {error}") from error
    return bounded(task, lambda answer, entry: dataset.score_answer(answer, dict(entry)) >= 1.0)


def _answer_grade() -> Grade:
    """Equal as text or as numbers; else equal as mathematics (LaTeX, fractions, intervals)."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call that we keep time ourselves
    latex = [LatexExtractionConfig()]  # its other reader hands text to sympy's parser, which evaluates it

    def grade(answer: str, entry: Entry) -> bool:
        gold = _gold(entry)
        number, gold_number = as_number(answer), as_number(gold)
        if gold_number is not None and number is not None:
            return math.isclose(number, gold_number, rel_tol=1e-9, abs_tol=1e-9)
        if answer.casefold() == gold.casefold():
            return True
        parsed = [parse(f"${text}$", latex, parsing_timeout=0) for text in (gold, answer)]
        return bool(verify(parsed[0], parsed[1], timeout_seconds=0))

    return grade


# --- user's functions -------------------------------------------------------------------------------------------------


class UserReward:
    """A function of the user's: ``function(prompt, response, entry)``, or ``function(prompts, responses, entries)``.

    The names of its parameters say which of the two it is. The second returns a list, one reward for each response.
    An ``async`` function is awaited, in an event loop that lasts as long as this process.
    Raises (constructor): RewardSetupError: it can be called in neither way.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._runner = asyncio.Runner()
        try:
            signature = inspect.signature(function)
        except ValueError:  # one written in C
            signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)])
        self.takes_batches = set(signature.parameters) >= BATCH
        try:
            signature.bind(**dict.fromkeys(BATCH)) if self.takes_batches else signature.bind("", "", {})
        except TypeError as error:
            raise RewardSetupError(
                f"reward {name!r} has the parameters {signature}: {error}. It is called (prompt, response, entry), or "
                "for a batch (prompts, responses, entries)"
            ) from error

    def __call__(self, prompt: str, response: str, entry: Entry) -> Reward:
        if not self.takes_batches:
            return read_reward(self._call(prompt, response, dict(entry)))
        (one,) = self.score_batch([(prompt, response, entry)])
        if isinstance(one, RewardError):
            raise one
        return one

    def score_batch(self, samples: Sequence[tuple[str, str, Entry]]) -> list[Reward | RewardError]:
        """One call for all. Raises RewardError where it returns something else than a list of as many."""
        result = self._call(
            prompts=[prompt for prompt, _, _ in samples],
            responses=[response for _, response, _ in samples],
            entries=[dict(entry) for _, _, entry in samples],
        )
        if not isinstance(result, Sequence) or isinstance(result, str) or len(result) != len(samples):
            wanted = f"for {len(samples)} responses, not a list of as many"
            raise RewardError(f"the reward function returned {result!r:.60} {wanted}")
        rewards: list[Reward | RewardError] = []
        for one in cast("Sequence[object]", result):
            try:
                rewards.append(read_reward(one))
            except RewardError as error:
                rewards.append(error)
        return rewards

    def _call(self, *arguments: Any, **named: Any) -> object:
        async def finish(result: Awaitable[object]) -> object:
            return await result

        result = self._function(*arguments, **named)
        return self._runner.run(finish(result)) if inspect.isawaitable(result) else result


BATCH = {"prompts", "responses", "entries"}
"""Parameters of a function that takes a batch."""


RENAMED = {"workers.scoring.toy_rewards:digit_share": "workers.scoring.rewards:digit_share"}
"""As configurations of earlier versions name it."""


def _user_reward(name: str, path: str) -> UserReward:
    looked = f"looked for in {path or 'what is installed'}"
    hint = f"{looked}; name its directory with scoring.reward_path, on a worker with --reward-path"
    return UserReward(name, import_function(RENAMED.get(name, name), "reward", hint, RewardSetupError))


def read_reward(result: object) -> Reward:
    """What a user's function returned: a number, or a mapping with the key "reward" whose other items are components.

    Raises: RewardError: anything else, or a number that is not finite.
    """
    if isinstance(result, Mapping):
        numbers = {str(name): _finite(str(name), value) for name, value in result.items()}
        if "reward" not in numbers:
            raise RewardError(f'the reward function returned a dict without "reward": {sorted(numbers)}')
        return Reward(value=numbers.pop("reward"), components=numbers)
    return Reward(value=_finite("reward", result))


def _finite(name: str, value: object) -> float:
    if not isinstance(value, Real) and hasattr(value, "item"):
        value = value.item()  # type: ignore[union-attr]  # a scalar of numpy or torch
    if not isinstance(value, Real):
        raise RewardError(f"the reward function returned {name} = {value!r:.60} ({type(value).__name__}), not a number")
    number = float(value)
    if not abs(number) <= MAX_NUMBER:
        raise RewardError(f"the reward function returned {name} = {number}: not finite, or beyond {MAX_NUMBER:g}")
    return number


def read_entry(raw: bytes) -> Entry:
    """The column TASK_ENTRY. Raises RewardError for anything but a JSON object."""
    try:
        entry = json.loads(raw)
    except ValueError as error:
        raise RewardError(f"the task entry is not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RewardError("the task entry is not a JSON object")
    return entry


def digit_share(prompt: str, response: str, entry: Entry) -> dict[str, float]:
    """The share of digits among the response's characters, in [0, 1]; 0 for an empty one.

    For runs that only try the pipeline out, named like a user's own function: "workers.scoring.rewards:digit_share".
    Source: ours. A random model earns about 0.15 and can learn this in a few steps, unlike any sum.
    """
    share = sum(character.isdigit() for character in response) / max(1, len(response))
    return {"reward": share, "empty": float(not response)}


def unrewarded(prompt: str, response: str, entry: Entry) -> float:
    """0 for every response: for data without answers, where nothing looks at rewards ("sft", "distill")."""
    return 0.0


# --- the child process ------------------------------------------------------------------------------------------------


class Setup(Struct, frozen=True, kw_only=True):
    """timeout_s: of one request.  memory_bytes: address space of the child.  jailed: whether it is in a jail."""

    spec: RewardSpec
    timeout_s: float
    memory_bytes: int
    jailed: bool = False


class Sample(Struct, frozen=True, kw_only=True):
    """entry: the column TASK_ENTRY as it is."""

    prompt: str
    response: str
    entry: bytes


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """Several samples only where the child is ``Ready`` for batches."""

    samples: list[Sample]


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """No reward, and why. Also the answer to a Setup that cannot be done."""

    reason: str


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """The reward is imported. takes_batches: one call may score several samples."""

    takes_batches: bool = False


class Scored(Struct, frozen=True, kw_only=True, tag=True):
    reward: Reward


Result: TypeAlias = Scored | Failed


class Scores(Struct, frozen=True, kw_only=True, tag=True):
    """One for each sample of the request, in their order."""

    results: list[Result]


_request_decoder = msgspec.msgpack.Decoder(ScoreRequest)  # here: it makes code of annotations, which the guard refuses


def main() -> None:
    """Serve until stdin ends."""
    requests, answers = own_streams()
    if not (raw := read_frame(requests)):  # tried only, whether it starts (Jail.why_not)
        return
    setup = msgspec.msgpack.decode(raw, type=Setup)
    confine(memory_bytes=setup.memory_bytes, jailed=setup.jailed)
    find_in(setup.spec.path)
    try:
        scorer = build_reward(setup.spec)
    except RewardSetupError as error:
        answers.write(frame(Failed(reason=str(error))))
        return
    if not setup.spec.function:
        forbid_code_from_text()
    answers.write(frame(Ready(takes_batches=isinstance(scorer, UserReward) and scorer.takes_batches)))
    while raw := read_frame(requests):
        answers.write(frame(_answer(scorer, _request_decoder.decode(raw).samples, setup.timeout_s)))


def _answer(scorer: Scorer, samples: list[Sample], timeout_s: float) -> Scores:
    # one that does not come back is ended by faulthandler's own thread, which needs no GIL and prints where it hangs
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    try:
        units = [(one.prompt, one.response, read_entry(one.entry)) for one in samples]
        if isinstance(scorer, UserReward) and scorer.takes_batches:
            scored = scorer.score_batch(units)
        else:
            scored = [scorer(*unit) for unit in units]
        results = [Failed(reason=str(one)) if isinstance(one, RewardError) else Scored(reward=one) for one in scored]
        return Scores(results=results)
    except RewardError as error:
        reason = str(error)
    except (Exception, SystemExit) as error:  # the guard of one unit: foreign code may raise anything
        reason = f"the reward raised {type(error).__name__}: {error}"[:500]
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Scores(results=[Failed(reason=reason) for _ in samples])


if __name__ == "__main__":
    main()
