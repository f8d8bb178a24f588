"""What `collect` asks of a worker, and the lines of the file that it writes: lengths and rewards of a prompt set.

A line is also one of a log of lengths (``ranker/logs.py`` reads ``id``, ``prompt``, ``output_tokens``, ``model``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from transport.contracts.settings import Settings
from transport.contracts.types import Struct


class CollectJob(Struct, frozen=True, kw_only=True):
    """model_dir: Hugging Face directory of the policy.  samples: answers to each prompt.  rewards: score them, too.

    answers: send what was written, too.
    """

    settings: Settings
    model_dir: str
    samples: int
    rewards: bool
    answers: bool = False


class CollectPrompt(Struct, frozen=True, kw_only=True):
    """question: as the data has it.  text, prompt_ids: as the model reads it.  entry: JSON, what the reward needs."""

    id: str
    question: str
    text: str
    prompt_ids: list[int]
    entry: str
    seed: int


class CollectedPrompt(Struct, frozen=True, kw_only=True):
    """A line of the file. output_tokens: of each answer, in the order in which they ended.

    rewards: of those that could be scored, [] where none was asked for.  errors: of the others, why not.
    settings: key -> value of those that decide what is answered and earned, where they are not the defaults.
    """

    id: str
    prompt: str
    model: str
    output_tokens: list[int]
    rewards: list[float] = msgspec.field(default_factory=list[float])
    errors: list[str] = msgspec.field(default_factory=list[str])
    settings: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class CollectedAnswer(Struct, frozen=True, kw_only=True):
    """response: its text.  reward: None where it could not be scored, or was not to be."""

    response: str
    reward: float | None = None


class Collected(Struct, frozen=True, kw_only=True):
    """A line of the worker. answers: asked for, and ended by themselves; they have a file of their own."""

    line: CollectedPrompt
    answers: list[CollectedAnswer]
