"""Environments: what a response talks to, turn after turn; and the child process in which they live.

    built in   by its name: ``calculator``
    a user's   ``module:function``, called with environment.params for each episode; what it returns is the environment

The child is started by pool.py as ``python -m workers.environments.environment``, in a jail where that works: this
module imports little. One child holds many episodes, and answers one call at a time.

    parent: Setup once, then a Reset or a Step at a time;  child: Ready once, then an Observed or a Failed to each

Owns: the protocol, what an environment may return, the child's end of the frames. Never: when a child starts or ends,
tokens. Invariant: what is answered is an observation as it is defined here, or Failed with a reason.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import msgspec

from transport.contracts.chat_template import ROLES
from transport.contracts.settings import ParamValue
from transport.contracts.types import MAX_NUMBER, Struct
from workers.errors import EnvironmentSetupError
from workers.scoring.child import MAX_ANSWER_BYTES, frame, own_streams, read_frame
from workers.scoring.jail import confine
from workers.user_functions.imports import find_in, import_function, limits, raised

TOOL = "tool"
"""Role of a message that is given as a text."""
BUILT_IN: Mapping[str, str] = {"calculator": "workers.environments.calculator:Calculator"}
"""Name -> where it is. One of these is of this package, so a run's settings alone may choose it."""

Messages: TypeAlias = "str | Sequence[Mapping[str, str]] | None"
"""What is said to the policy: a text, which is a tool's message; ``{"role", "content"}`` each; or nothing."""
Said: TypeAlias = "Messages | Mapping[str, Messages]"
"""After a turn, ``{ANEW: messages}``, too: they stand behind the prompt alone, and the turns before are forgotten."""
ANEW = "anew"


@runtime_checkable
class Environment(Protocol):
    """One episode. Its calls come one after another; they may raise, and must not take longer than their limit.

    An episode whose process died is replayed: the same calls again, in a new process, must give the same answers.
    """

    def reset(self, prompt: str, entry: dict[str, Any]) -> Messages:
        """Begin. prompt: as the policy reads it.  entry: ``question``, ``answer`` and ``metadata`` of its row.

        Returns what is said beyond the prompt, before the policy's first turn.
        """
        ...

    def step(self, text: str, tokens: Sequence[int]) -> tuple[Said, bool, float | None]:
        """Hear a turn of the policy, as text and as token ids.

        Returns (what is said to it, whether the episode is over, reward or None). The rewards of an episode are summed;
        where none of its steps gives one, it is scored as any response is (scoring.reward).
        """
        ...


# --- the messages between pool.py and the child -----------------------------------------------------------------------


class Setup(Struct, frozen=True, kw_only=True):
    """name: built in, or ``module:function``.  path: directory of its module.  timeout_s: of one call."""

    name: str
    path: str
    params: dict[str, ParamValue]
    timeout_s: float
    memory_bytes: int
    jailed: bool


class Reset(Struct, frozen=True, kw_only=True, tag=True):
    """Begin an episode. number: names it from now on.  over: episodes that are not asked of any more."""

    number: int
    prompt: str
    entry: bytes
    over: tuple[int, ...] = ()


class Step(Struct, frozen=True, kw_only=True, tag=True):
    """A turn of the policy in episode ``number``."""

    number: int
    text: str
    tokens: tuple[int, ...]


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """The environment is imported."""


class Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str


class Observed(Struct, frozen=True, kw_only=True, tag=True):
    """What an environment answered. anew: behind the prompt alone.  reward: of this step alone."""

    messages: tuple[Message, ...] = ()
    anew: bool = False
    done: bool = False
    reward: float | None = None


class Failed(Struct, frozen=True, kw_only=True, tag=True):
    """The call gave no observation, and why. Also the answer to a Setup that cannot be done."""

    reason: str


Answer: TypeAlias = Ready | Observed | Failed


# --- what an environment may return -----------------------------------------------------------------------------------


class GarbageError(ValueError):
    """What an environment returned is no observation; the message says why."""


def read_messages(said: object) -> tuple[Message, ...]:
    """Raises GarbageError."""
    if said is None:
        return ()
    if isinstance(said, str):
        return (Message(role=TOOL, content=said),)
    if not isinstance(said, list | tuple):
        raise GarbageError(f"it says {type(said).__name__}, neither a text nor a list of messages")
    messages: list[Message] = []
    for one in cast("Sequence[object]", said):
        message = cast("Mapping[object, object]", one) if isinstance(one, dict) else {}
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str) or not role or len(message) != 2:
            raise GarbageError("it says a message that is not {'role': text, 'content': text}")
        if role not in ROLES:
            raise GarbageError(
                f"it says a message of the role {role[:50]!r}, which is none of {', '.join(sorted(ROLES))}"
            )
        messages.append(Message(role="system" if role == "developer" else role, content=content))
    return tuple(messages)


def read_step(returned: object) -> Observed:
    """Raises GarbageError."""
    parts = cast("tuple[object, ...]", returned) if isinstance(returned, tuple) else ()
    if len(parts) != 3:
        raise GarbageError(f"step returned {type(returned).__name__}, not (observation, done, reward)")
    said, done, reward = parts
    if getattr(done, "dtype", None) == "bool" and getattr(done, "shape", None) == ():
        done = bool(done)  # of NumPy, as gymnasium's environments say it
    if not isinstance(done, bool):
        raise GarbageError(f"step said {type(done).__name__} for done, not true or false")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, Real)):
        raise GarbageError(f"step gave {type(reward).__name__} as its reward, not a number")
    value = None if reward is None else float(reward)
    if value is not None and not (math.isfinite(value) and abs(value) <= MAX_NUMBER):
        raise GarbageError(f"step gave {value} as its reward")
    anew = isinstance(said, dict) and list(cast("dict[object, object]", said)) == [ANEW]
    messages = read_messages(cast("dict[str, object]", said)[ANEW] if anew else said)
    return Observed(messages=messages, anew=anew, done=done, reward=value)


# --- the child process ------------------------------------------------------------------------------------------------


def factory_of(setup: Setup) -> Callable[[], object]:
    """What makes the environment of one episode. Raises EnvironmentSetupError."""
    hint = f"looked for in {setup.path or 'what is installed'}; environment.path names its directory"
    name = BUILT_IN.get(setup.name, setup.name)
    made_by = import_function(name, "environment", hint, EnvironmentSetupError)
    with suppress(ValueError):  # one written in C has no signature
        signature = inspect.signature(made_by)
        try:
            signature.bind(**setup.params)
        except TypeError as error:
            raise EnvironmentSetupError(
                f"environment {setup.name!r} takes {signature}, and environment.params does not fit: {error}"
            ) from error
    return lambda: made_by(**setup.params)


class Episodes:
    """The environments of a child, by the number of their episode."""

    def __init__(self, make: Callable[[], object], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._open: dict[int, Environment] = {}

    def answer(self, request: Reset | Step) -> Observed | Failed:
        # a call that does not come back is ended by faulthandler's own thread, which needs no GIL
        faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=sys.stderr)
        try:
            return self._observe(request)
        except GarbageError as error:
            return Failed(reason=str(error))
        except (Exception, SystemExit) as error:  # the guard of one call: foreign code may raise anything
            return Failed(reason=f"the environment raised {raised(error)}"[:700])
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _observe(self, request: Reset | Step) -> Observed:
        if isinstance(request, Step):
            return read_step(self._open[request.number].step(request.text, request.tokens))
        for number in (*request.over, request.number):
            self._open.pop(number, None)
        made = self._make()
        if not isinstance(made, Environment):
            raise GarbageError(f"it is a {type(made).__name__}, which has no reset and step")
        entry = json.loads(request.entry or b"{}")
        said = made.reset(request.prompt, entry)
        if isinstance(said, tuple):
            raise GarbageError("reset returned a tuple, not a text, a list of messages or None: leave Gym's info out")
        observed = Observed(messages=read_messages(said))
        self._open[request.number] = made
        return observed


_Request: TypeAlias = Reset | Step
_request_decoder: msgspec.msgpack.Decoder[_Request] = msgspec.msgpack.Decoder(cast("type[_Request]", _Request))


def main() -> None:
    """Serve until stdin ends."""
    requests, answers = own_streams()
    if not (raw := read_frame(requests)):  # tried only, whether it starts (Jail.why_not)
        return
    setup = msgspec.msgpack.decode(raw, type=Setup)
    confine(memory_bytes=setup.memory_bytes, jailed=setup.jailed)
    limits.memory_bytes = setup.memory_bytes
    limits.jail, limits.shown = "environment.jail" if setup.jailed else "", "environment.path"
    limits.variables = "environment.variables"
    find_in(setup.path)
    try:
        episodes = Episodes(factory_of(setup), setup.timeout_s)
    except EnvironmentSetupError as error:
        answers.write(frame(Failed(reason=str(error))))
        return
    answers.write(frame(Ready()))
    while raw := read_frame(requests):
        answer = frame(episodes.answer(_request_decoder.decode(raw)))
        if len(answer) > MAX_ANSWER_BYTES:
            answer = frame(Failed(reason=f"its answer has {len(answer)} bytes, over the limit of {MAX_ANSWER_BYTES}"))
        answers.write(answer)


if __name__ == "__main__":
    main()
