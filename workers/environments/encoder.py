"""What an environment says, as the tokens that follow a policy's turn.

    so far   ...<|im_start|>assistant|12 + 7 =           the policy's own ids, as they were sampled
    added    <|im_end|>|<|im_start|>tool|Result: 19<|im_end|>|<|im_start|>assistant|

The chat template is asked what stands behind a turn of the assistant; nothing of the turn itself, or of what was before
it, is encoded again. Without a template the texts are added as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.environments.environment import Message
from workers.errors import ModelError
from workers.models import load_tokenizer

TURN = "the turn before 7f3a"
"""Stands for the policy's turn while the template is asked what comes after it: short, and in no template."""


class ObservationEncoder:
    """tokenizer: of transformers.  templated: whether its chat template is used (data.chat_template)."""

    def __init__(self, tokenizer: Any, *, templated: bool) -> None:
        self._tokenizer = tokenizer
        self._templated = templated and bool(tokenizer.chat_template)

    @staticmethod
    def of(directory: Path, *, templated: bool) -> ObservationEncoder:
        """With the tokenizer of the model in ``directory``. Raises ModelError."""
        return ObservationEncoder(load_tokenizer(directory), templated=templated)

    def text(self, token_ids: Sequence[int]) -> str:
        """Of a policy's turn, without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def behind_turn(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Ids that lead from a turn of the policy, which ends with ``last_token``, over ``messages`` to its next turn.

        Raises ModelError: the template refuses the messages, or loses the turn.
        """
        if not self._templated:
            return self._ids("".join(message.content for message in messages))
        ids = self._ids(self._behind(messages))
        return ids[1:] if ids and ids[0] == last_token else ids  # the end of the turn was sampled

    def behind_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids that lead from the end of a prompt over ``messages`` to the policy's first turn.

        A prompt of a template ends where the assistant begins; its empty turn is ended first. Raises ModelError.
        """
        return self.behind_turn(messages, -1)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _behind(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        said = [{"role": message.role, "content": message.content} for message in messages]
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *said]
        try:
            text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(sorted({message.role for message in messages}))
            raise ModelError(f"the model's chat template refuses messages of {roles or 'nobody'}: {error}") from error
        _, found, behind = text.partition(TURN)
        if not found:
            raise ModelError("the model's chat template leaves out what the assistant said")
        return behind
