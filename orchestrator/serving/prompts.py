"""Prompts of requests become token ids, checked before they are accepted.

Owns: what a prompt of a request may be. Never: training data (``prompts.py``). Invariant: an accepted prompt fits the
model: every id is a word of it, and the response has room.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orchestrator.errors import DataError
from orchestrator.prompts.source import context_limit, load_tokenizer
from orchestrator.serving.request_store import StoredPrompt
from transport.contracts.settings import Settings


class Turn(Protocol):
    """One message of a chat."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


class Chat(Protocol):
    """A prompt for the model's chat template."""

    @property
    def messages(self) -> Sequence[Turn]: ...


class ServicePrompts:
    """For one model. May be used from several threads."""

    def __init__(self, settings: Settings, model_dir: Path) -> None:
        """Raises DataError where the model directory cannot be read."""
        self._tokenizer: Any = load_tokenizer(model_dir)
        self._limit = context_limit(settings, model_dir)
        self._longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        config = json.loads((model_dir / "config.json").read_bytes())
        self._vocab_size = int((config.get("text_config") or config)["vocab_size"])
        self._lock = threading.Lock()  # encoding changes the tokenizer's own settings while it runs

    def encode(
        self, prompts: Sequence[str | list[int] | Chat], max_new_tokens: int, *, wanted: threading.Event | None = None
    ) -> list[StoredPrompt]:
        """Raises DataError naming the first prompt that cannot be generated from, and why.

        wanted: cleared when the answer is not wanted any more; the work then ends after the current prompt.
        """
        encoded: list[StoredPrompt] = []
        for index, prompt in enumerate(prompts):
            if wanted is not None and not wanted.is_set():
                raise DataError(f"prompt {index} is not wanted any more")
            encoded.append(self._encode(index, prompt, self._limit - max_new_tokens))
        return encoded

    def _encode(self, index: int, prompt: str | list[int] | Chat, room: int) -> StoredPrompt:
        text = "" if isinstance(prompt, list) else self._text(index, prompt, room)
        ids = prompt if isinstance(prompt, list) else self._tokenize(text, special=isinstance(prompt, str))
        if not ids:
            raise DataError(f"prompt {index} has no tokens")
        if len(ids) > room:
            raise DataError(f"prompt {index} has {len(ids)} tokens; beside max_new_tokens there is room for {room}")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise DataError(f"prompt {index} has token ids outside [0, {self._vocab_size})")
        return StoredPrompt(text=text, ids=np.asarray(ids, dtype="<i4").tobytes())

    def _text(self, index: int, prompt: str | Chat, room: int) -> str:
        """The text as the model reads it. One that must be too long is refused before it is rendered and tokenised,
        which takes 140 bytes of memory a character.
        """
        if isinstance(prompt, str):
            self._check_length(index, len(prompt), room)
            return prompt
        self._check_length(index, sum(len(turn.role) + len(turn.content) + 1 for turn in prompt.messages), room)
        text = self._render(index, prompt)
        self._check_length(index, len(text), room)
        return text

    def _check_length(self, index: int, characters: int, room: int) -> None:
        if characters > room * self._longest_token:
            raise DataError(
                f"prompt {index} has {characters} characters; there is room for {room} tokens, and none is longer than "
                f"{self._longest_token} characters"
            )

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            return self._tokenizer(text, add_special_tokens=special)["input_ids"]

    def _render(self, index: int, chat: Chat) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise DataError(f"prompt {index} has messages, but the model has no chat template: send text or token ids")
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.messages]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise DataError(f"prompt {index}: the model's chat template refuses it: {error}") from error
