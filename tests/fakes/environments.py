"""Environments as users write them, good and bad, for the tests; named ``tests.fakes.environments:<class>``."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Echo:
    """A good one: says each turn again, or ``says``, and after ``turns`` pays one more than the characters it heard."""

    def __init__(self, turns: int = 2, greeting: str = "", role: str = "tool", says: str = "") -> None:
        self.turns, self.greeting, self.role, self.says = turns, greeting, role, says
        self.heard: list[str] = []

    def reset(self, prompt: str, entry: dict[str, Any]) -> object:
        self.heard = []
        return self.greeting or None

    def step(self, text: str, tokens: Sequence[int]) -> object:
        self.heard.append(text)
        done = len(self.heard) == self.turns
        said = [{"role": self.role, "content": self.says or f"{len(self.heard)}:{text}"}]
        return None if done else said, done, float(1 + sum(map(len, self.heard))) if done else None


class Told(Echo):
    """Says what the prompt's entry says, and pays one a turn."""

    def reset(self, prompt: str, entry: dict[str, Any]) -> object:
        self.says = entry["says"]
        return super().reset(prompt, entry)

    def step(self, text: str, tokens: Sequence[int]) -> object:
        said, done, _ = super().step(text, tokens)  # type: ignore[misc]
        return said, done, 1.0


class Pair(Echo):
    """Its turns return two values of three."""

    def step(self, text: str, tokens: Sequence[int]) -> object:
        return "said", True


class Unpaid(Echo):
    """It judges nothing."""

    def step(self, text: str, tokens: Sequence[int]) -> object:
        said, done, _ = super().step(text, tokens)  # type: ignore[misc]
        return said, done, None


class AsTold(Echo):
    """Does what the turn says: crash, hang, raise, ...; with a file ``once``, only while that is not there.

    always: what it does whatever the turn says, but at the trial before a run, whose tokens are the bytes of a turn.
    """

    def __init__(self, once: str = "", always: str = "", **params: Any) -> None:
        super().__init__(**params)
        self._once, self._always = once, always

    def step(self, text: str, tokens: Sequence[int]) -> object:
        print("noise on standard output")
        if self._once and os.path.exists(self._once):
            return super().step(text, tokens)
        if self._once and text in ("crash", "hang", "raise"):
            Path(self._once).touch()
        match text if tuple(tokens) == tuple(text.encode()) else self._always or text:
            case "crash":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "raise":
                raise KeyError("no such thing")
            case "garbage":
                return "no tuple"
            case "nan":
                return None, False, float("nan")
            case "mute":
                return [{"role": "tool"}], False, None
            case "long":
                return "x" * 2_000_000, False, None
            case _:
                return super().step(text, tokens)


class Fickle(Echo):
    """Says something else each time."""

    def step(self, text: str, tokens: Sequence[int]) -> object:
        if text == "crash":
            os._exit(3)
        return f"{os.urandom(8).hex()}", False, None


def no_environment(**params: Any) -> object:
    return object()


class Executes(Echo):
    """Runs what each turn says, and says what ``said`` is then."""

    def step(self, text: str, tokens: Sequence[int]) -> object:
        names: dict[str, Any] = {"said": None}
        try:
            exec(text, names)
        except Exception as error:
            return f"{type(error).__name__}: {error}", False, None
        return str(names["said"]), False, None
