"""What an environment says, as the tokens that follow a policy's turn.

    so far   ...<|im_start|>assistant|12 + 7 =           the policy's own ids, as they were sampled
    added    <|im_end|>|<|im_start|>tool|Result: 19<|im_end|>|<|im_start|>assistant|

The chat template is asked what stands behind a turn of the assistant; nothing of the turn itself, or of what was before
it, is encoded again. Without a template the texts are added as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from workers.environments.environment import Message
from workers.errors import ModelError
from workers.models import load_tokenizer

ChatMessage: TypeAlias = Mapping[str, Any]
"""``role``, ``content``, and what else a chat template reads."""
Tools: TypeAlias = "list[dict[str, Any]] | None"
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

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """Likewise, with special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @property
    def templated(self) -> bool:
        """Whether messages become text by a template."""
        return self._templated

    def prompt(self, conversation: Sequence[ChatMessage], tools: Tools = None) -> str:
        """A whole conversation as the text before the policy's turn. Raises ModelError: the template refuses it."""
        if not self._templated:
            return "".join(str(message.get("content") or "") for message in conversation)
        return self._render(conversation, tools, conversation)

    def behind_turn(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Ids that lead from a turn of the policy, which ends with ``last_token``, over ``messages`` to its next turn.

        Raises ModelError: the template refuses the messages, or loses the turn.
        """
        return self.behind([{"role": one.role, "content": one.content} for one in messages], last_token)

    def behind(self, said: Sequence[ChatMessage], last_token: int, tools: Tools = None) -> list[int]:
        """Likewise for messages as chat templates take them."""
        if not self._templated:
            return self.ids(self.prompt(said))
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN}, *said]
        text = self._render(conversation, tools, said)
        _, found, behind = text.partition(TURN)
        if not found:
            raise ModelError("the model's chat template leaves out what the assistant said")
        ids = self.ids(behind)
        return ids[1:] if ids and ids[0] == last_token else ids  # the end of the turn was sampled

    def behind_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids that lead from the end of a prompt over ``messages`` to the policy's first turn.

        A prompt of a template ends where the assistant begins; its empty turn is ended first. Raises ModelError.
        """
        return self.behind_turn(messages, -1)

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """special: with what the tokenizer adds by itself, where no template has."""
        return self._tokenizer(text, add_special_tokens=special)["input_ids"]

    def _render(self, conversation: Sequence[ChatMessage], tools: Tools, said: Sequence[ChatMessage]) -> str:
        """said: what of it is blamed where the template refuses it."""
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                list(conversation), tools=tools, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            roles = ", ".join(sorted({str(message.get("role")) for message in said}))
            raise ModelError(f"the model's chat template refuses messages of {roles or 'nobody'}: {error}") from error
