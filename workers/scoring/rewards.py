"""Rewards: what one response is worth, with named components.

    own verifier     a grader of the task, reasoning_gym's or ours, or a comparison with the entry's answer (jsonl, hf)
    user's function  ``module:function``, called with one response or with a batch of them (UserReward)

The own verifiers pay 1 for a right answer, ``well_formed_reward`` for a wrong one in the asked form, else 0, so that a
model that cannot do the task yet has a first step to climb.

Owns: extraction, verification, the meaning of what a user's function returns. Never: processes, time limits
(reward_pool.py). Invariant: a reward is a finite number or a RewardError, never a silent zero.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, cast

import msgspec

from transport.contracts.gym_tasks import refusal
from transport.contracts.settings import ParamValue, Settings
from transport.contracts.types import MAX_NUMBER, Struct
from workers.errors import RewardError, RewardSetupError
from workers.scoring.graders import OUR_GRADERS, Entry, Grade


class RewardSpec(Struct, frozen=True, kw_only=True):
    """Which reward to build.

    function: "module:function", checked against the worker's own command line.  path: directory of its module, from
    there too; "": only what is installed is found.  executes_answers: it runs what a model wrote.
    """

    source: Literal["reasoning_gym", "jsonl", "hf"]
    task: str
    params: dict[str, ParamValue]
    answer_marker: str
    well_formed_reward: float
    function: str = ""
    path: str = ""
    executes_answers: bool = False


class Reward(Struct, frozen=True, kw_only=True):
    """value: what the policy is trained on.  components: its parts, for people."""

    value: float
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])


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
            f"start it with --reward {wanted}"
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
    )


def build_reward(spec: RewardSpec) -> Scorer:
    """Import what the reward needs. Takes seconds; raises RewardSetupError that says what is missing."""
    if spec.function:
        return _user_reward(spec.function, spec.path)
    grade = _gym_grade(spec.task, spec.params) if spec.source == "reasoning_gym" else _answer_grade()
    return _own_verifier(spec, grade)


# --- the answer in a response -----------------------------------------------------------------------------------------

DECORATION = "*` '\"\u2018\u2019\u201c\u201d"
"""Emphasis and quotation marks around an answer: a model that quotes the asked form closes the quote after it."""
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)")


def extract_answer(response: str, marker: str) -> str | None:
    """What follows the last ``marker`` on its line, without the decoration models put around answers.

    The marker is found in any case. Returns None where there is no marker or nothing after it; the next line counts
    when the marker's own has nothing.
    """
    start = response.lower().rfind(marker.lower())
    if start < 0:
        return None
    rest = response[start + len(marker) :].lstrip(" \t*:=\r\n")
    line = rest.split("\n", 1)[0].strip()
    for opening, closing in (("\\boxed{", "}"), ("\\(", "\\)"), ("<", ">"), ("**", "**"), ("$", "$"), ("`", "`")):
        if line.startswith(opening) and line.endswith((closing, closing + ".")):
            line = line[len(opening) : line.rindex(closing)].strip()
    return line.strip(DECORATION).removesuffix(".").strip(DECORATION) or None


def as_number(text: str) -> float | None:
    """The number that ``text`` is: ``1,000``, ``-3.50``, ``$7``, ``12%`` count; None for anything else."""
    bare = text.strip().lstrip("$€£").rstrip("%").strip().replace("\u2212", "-")
    if not _NUMBER.fullmatch(bare):
        return None
    return float(bare.replace(",", ""))


def has_asked_form(answer: str | None, entry: Entry) -> bool:
    """There is an answer, and it is a number where a number is asked for (or "Answer: <result>" would pay)."""
    if answer is None:
        return False
    return as_number(_gold(entry)) is None or as_number(answer) is not None


def _gold(entry: Entry) -> str:
    """The right answer; GSM8K writes its reasoning before ``####``."""
    return str(entry.get("answer", "")).rsplit("####", 1)[-1].strip()


# --- own verifiers ----------------------------------------------------------------------------------------------------

UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What graders raise at an answer that they cannot read, so that it is not right. Running out of memory or time is not
among them: the answer may have been right."""


def _own_verifier(spec: RewardSpec, grade: Grade) -> Scorer:
    def score(prompt: str, response: str, entry: Entry) -> Reward:
        if not _gold(entry):
            raise RewardError("the task entry has no answer to compare with")
        answer = extract_answer(response, spec.answer_marker)
        well_formed = has_asked_form(answer, entry)
        right = answer is not None and well_formed and _is_right(grade, answer, entry)
        value = 1.0 if right else spec.well_formed_reward if well_formed else 0.0
        return Reward(value=value, components={"well_formed": float(well_formed), "right": float(right)})

    return score


def _is_right(grade: Grade, answer: str, entry: Entry) -> bool:
    try:
        return grade(answer, entry)
    except UNREADABLE:
        return False


def _gym_grade(task: str, params: Mapping[str, ParamValue]) -> Grade:
    """Of a task whose scorer does not execute answers; full marks only count as right."""
    if reason := refusal(task):
        raise RewardSetupError(reason)
    if task in OUR_GRADERS:
        return OUR_GRADERS[task]
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(task, size=1, seed=0, **params)
    except (ValueError, TypeError, AssertionError) as error:  # it checks its configuration with assert
        raise RewardSetupError(f"reasoning_gym cannot make task {task!r} with {dict(params)}: {error}") from error
    return lambda answer, entry: dataset.score_answer(answer, dict(entry)) >= 1.0


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
            raise RewardError(f"the reward function returned {result!r:.60} for {len(samples)} responses, not a list")
        return [_read_one(one) for one in cast("Sequence[object]", result)]

    def _call(self, *arguments: Any, **named: Any) -> object:
        result = self._function(*arguments, **named)
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result


BATCH = {"prompts", "responses", "entries"}
"""Parameters of a function that takes a batch."""


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _read_one(result: object) -> Reward | RewardError:
    try:
        return read_reward(result)
    except RewardError as error:
        return error


def _user_reward(name: str, path: str) -> UserReward:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RewardSetupError(
            f"reward {name!r} cannot be imported: {error} (looked for in {path or 'what is installed'}; name its "
            "directory with scoring.reward_path, on a worker with --reward-path)"
        ) from error
    if not callable(function):
        raise RewardSetupError(f"reward {name!r} is not a function")
    return UserReward(name, function)


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
