"""A user's reward function, called by the names of its parameters.

    ours       (prompt, response, entry)                      one response
               (prompts, responses, entries)                  a batch of them, which returns a list
    verl       (data_source, solution_str, ground_truth, extra_info=None), and its batch form
    TRL        (prompts, completions, **columns), columns of the data as lists
    OpenRLHF   (queries, prompts, labels)

A parameter is a name of ``MEANINGS``, its plural, or a column of the row. Three parameters without known names are
called in the order of ours. Names that say something else are never called by position.

Owns: the call, and the meaning of what it returns. Never: which process calls. Invariant: a parameter gets what its
name says, or the function is refused by name.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, cast

import msgspec

from transport.contracts.types import MAX_NUMBER, Struct
from workers.errors import RewardError, RewardSetupError
from workers.scoring.graders import Entry


class Reward(Struct, frozen=True, kw_only=True):
    """value: what the policy is trained on.  components: its parts, for people."""

    value: float
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])


Unit = tuple[str, str, Entry]
"""(prompt, response, entry)."""
Value = Callable[[str, str, Entry], Any]
"""What a parameter gets of one unit."""

_Inspected = inspect.Parameter


def _columns(entry: Entry) -> Mapping[str, Any]:
    """The row's columns by name: those of the data, then those of the entry."""
    metadata = entry.get("metadata")
    others = cast("Mapping[str, Any]", metadata) if isinstance(metadata, dict) else {}
    return {**entry, **others}


def _prompt(prompt: str, response: str, entry: Entry) -> Any:
    return prompt


def _response(prompt: str, response: str, entry: Entry) -> Any:
    return response


def _entry(prompt: str, response: str, entry: Entry) -> Any:
    return dict(entry)


def _answer(prompt: str, response: str, entry: Entry) -> Any:
    return entry.get("answer")


def _question(prompt: str, response: str, entry: Entry) -> Any:
    """The data's own prompt: its messages, or its text."""
    return entry.get("messages") or entry.get("question", prompt)


def _said(prompt: str, response: str, entry: Entry) -> Any:
    """The response as TRL has it: a list of one message where the prompt is a list of messages."""
    return [{"role": "assistant", "content": response}] if entry.get("messages") else response


def _both(prompt: str, response: str, entry: Entry) -> Any:
    return prompt + response


def _source(prompt: str, response: str, entry: Entry) -> Any:
    return _columns(entry).get("data_source", entry.get("part", ""))


def _extra(prompt: str, response: str, entry: Entry) -> Any:
    return _columns(entry).get("extra_info", entry.get("metadata"))


MEANINGS: Mapping[Value, Sequence[str]] = {
    _prompt: ("prompt", "prompt_str", "prompt_text", "instruction", "input_text"),
    _response: (
        *("response", "solution_str", "output", "reply", "generation", "prediction", "response_str", "model_output"),
        *("generated_text", "candidate", "predict_str"),
    ),
    _said: ("completion",),
    _entry: ("entry", "row", "example", "item"),
    _answer: ("ground_truth", "label", "solution", "reference", "target", "gold", "expected", "reference_answer"),
    _question: ("question", "problem"),
    _both: ("query",),
    _source: ("data_source",),
    _extra: ("extra_info",),
}
"""What a parameter's name means. ``answer`` is the row's beside a parameter for the response, and else the response."""
_BY_NAME = {name: value for value, names in MEANINGS.items() for name in names}
_RESPONSES = frozenset((_response, _said, _both))
_PLURALS = {"queries": "query", "entries": "entry", **{f"{name}s": name for name in _BY_NAME}}
_PLACES: Sequence[frozenset[Value]] = (
    frozenset((_prompt, _question)),
    frozenset((_response, _said)),
    frozenset((_entry,)),
)
"""What each parameter of ours may be called, by its place."""
_NOT_GIVEN = frozenset(
    (
        *("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "args", "sample", "samples"),
        *("state", "info"),
    )
)
"""Parameters of other trainers that a reward does not get here."""


class UserReward:
    """A function of the user's. takes_batches: its parameters are of several responses, and it returns a list.

    An ``async`` function is awaited, in an event loop that lasts as long as this process.
    Raises (constructor): RewardSetupError: a parameter has no known meaning, or none is the response.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._is_class = inspect.isclass(function)
        self._runner = asyncio.Runner()
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # one written in C
            self._signature = inspect.Signature([_Inspected("arguments", _Inspected.VAR_POSITIONAL)])
        parameters = list(self._signature.parameters.values())
        various = (_Inspected.VAR_POSITIONAL, _Inspected.VAR_KEYWORD)
        self._wanted = [one for one in parameters if one.kind not in various]
        self._takes_columns = any(one.kind is _Inspected.VAR_KEYWORD for one in parameters)
        self.takes_batches = any(one.name in _PLURALS for one in self._wanted)
        self._ours = not self.takes_batches and self._is_ours(parameters)
        self._check()

    def _is_ours(self, parameters: Sequence[inspect.Parameter]) -> bool:
        """Whether it is called ``(prompt, response, entry)`` by position: no name says otherwise."""
        if any(one.kind is _Inspected.VAR_POSITIONAL for one in parameters) and not self._required():
            return True
        positional = [one for one in self._required() if one.kind is not _Inspected.KEYWORD_ONLY]
        if len(positional) != 3 or len(positional) != len(self._required()):
            return False
        meanings = [_BY_NAME.get(one.name) for one in positional]
        return all(meaning is None or meaning in place for meaning, place in zip(meanings, _PLACES, strict=True))

    def _required(self) -> list[inspect.Parameter]:
        return [one for one in self._wanted if one.default is _Inspected.empty]

    def _check(self) -> None:
        """Raises RewardSetupError."""
        if self._ours:
            return
        names = [_PLURALS.get(one.name, one.name) if self.takes_batches else one.name for one in self._wanted]
        if other := next((one.name for one in self._required() if one.name in _NOT_GIVEN), ""):
            raise self._refused(f"{other!r} is of another trainer, and a reward gets no such thing here")
        if not any(_BY_NAME.get(name) in _RESPONSES or name == "answer" for name in names):
            kind = f"{self._name.rpartition(':')[2]} is a class, not a function; " if self._is_class else ""
            raise self._refused(f"{kind}none of them is the response")
        singles = [one.name for one in self._required() if _BY_NAME.get(one.name) in (_prompt, _response, _entry)]
        if self.takes_batches and singles:
            raise self._refused(f"{singles[0]!r} is of one response, and others are of several")

    def _refused(self, reason: str) -> RewardSetupError:
        name = self._name.rpartition(":")[2]
        return RewardSetupError(
            f"reward {self._name!r} has the parameters {self._signature}: {reason}. It is called (prompt, response, "
            "entry), or for a batch (prompts, responses, entries). Write beside it, and name in scoring.reward: "
            f'def reward(prompt, response, entry): return {name}(...), with entry["answer"] and entry["metadata"]'
        )

    def __call__(self, prompt: str, response: str, entry: Entry) -> Reward:
        if not self.takes_batches:
            if self._ours:
                return read_reward(self._call([prompt, response, dict(entry)], {}))
            return read_reward(self._call(*self._arguments([(prompt, response, entry)], batch=False)))
        (one,) = self.score_batch([(prompt, response, entry)])
        if isinstance(one, RewardError):
            raise one
        return one

    def score_batch(self, samples: Sequence[Unit]) -> list[Reward | RewardError]:
        """One call for all. Raises RewardError where it returns something else than a reward for each."""
        result = self._call(*self._arguments(samples, batch=True))
        if isinstance(result, Mapping) and "rewards" in result:  # OpenRLHF's
            result = cast("Mapping[str, Any]", result)["rewards"]
        if hasattr(result, "tolist"):
            result = cast("Any", result).tolist()
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

    def _arguments(self, units: Sequence[Unit], *, batch: bool) -> tuple[list[Any], dict[str, Any]]:
        """(positional, named) arguments. Raises RewardError: a parameter is neither a known name nor a column."""
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for one in self._wanted:
            values = self._values(one.name, units, batch=batch)
            if values is None and one.default is _Inspected.empty:
                columns = ", ".join(sorted(_columns(units[0][2])))
                raise RewardError(
                    str(self._refused(f"{one.name!r} is neither a known name nor a column of the row ({columns})"))
                )
            if values is None:
                continue
            argument = values if batch else values[0]
            if one.kind is _Inspected.POSITIONAL_ONLY:
                positional.append(argument)
            else:
                named[one.name] = argument
        if self._takes_columns and batch:  # TRL's: prompts, completions, and each column of the data
            given = {"prompts", "completions", *(name for unit in units for name in _columns(unit[2]))}
            for name in given - named.keys() - {"metadata", "messages"}:
                if (values := self._values(name, units, batch=True)) is not None:
                    named[name] = values
        return positional, named

    def _values(self, name: str, units: Sequence[Unit], *, batch: bool) -> list[Any] | None:
        """Of each unit what ``name`` means; None where it means nothing."""
        single = _PLURALS.get(name, name) if batch else name
        value = _BY_NAME.get(single)
        if value is _prompt and batch and "completions" in self._signature.parameters:
            value = _question  # TRL's prompts are the data's
        others = {_BY_NAME.get(_PLURALS.get(one.name, one.name)) for one in self._wanted if one.name != name}
        has_response = not _RESPONSES.isdisjoint(others)
        if name == "answer":
            value = _answer if has_response else _response
        elif value is _answer or (value in _RESPONSES and has_response):
            value = None if all(name in _columns(entry) for _, _, entry in units) else value  # a column of that name
        if value is not None:
            return [value(*unit) for unit in units]
        columns = [_columns(entry) for _, _, entry in units]
        if not any(name in one for one in columns):
            return None
        return [one.get(name) for one in columns]

    def _call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> object:
        async def finish(result: Awaitable[object]) -> object:
            return await result

        result = self._function(*arguments, **named)
        return self._runner.run(finish(result)) if inspect.isawaitable(result) else result


def read_reward(result: object) -> Reward:
    """What a user's function returned: a number, or a mapping with "reward" (or "score") whose other numbers are
    components.

    Raises: RewardError: anything else, or a number that is not finite.
    """
    if isinstance(result, Mapping):
        found = {str(name): value for name, value in cast("Mapping[object, object]", result).items()}
        if "reward" not in found and "score" in found:  # verl's, with texts beside it
            found = {name: value for name, value in found.items() if name == "score" or isinstance(value, Real)}
            found["reward"] = found.pop("score")
        numbers = {name: _finite(name, value) for name, value in found.items()}
        if "reward" not in numbers:
            raise RewardError(f'the reward function returned a dict without "reward": {sorted(numbers)}')
        return Reward(value=numbers.pop("reward"), components=numbers)
    return Reward(value=_finite("reward", result))


def _finite(name: str, value: object) -> float:
    if not isinstance(value, Real) and hasattr(value, "item"):
        with suppress(ValueError, RuntimeError):  # an array or a tensor of several numbers
            value = value.item()  # type: ignore[union-attr]  # a scalar of numpy or torch
    if not isinstance(value, Real):
        raise RewardError(f"the reward function returned {name} = {value!r:.60} ({type(value).__name__}), not a number")
    number = float(value)
    if not abs(number) <= MAX_NUMBER:
        raise RewardError(f"the reward function returned {name} = {number}: not finite, or beyond {MAX_NUMBER:g}")
    return number
