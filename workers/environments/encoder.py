"""What an environment or an agent says, as the tokens that follow a policy's turn.

    so far   ...<|im_start|>assistant|12 + 7 =           the policy's own ids, as they were sampled
    added    <|im_end|>|<|im_start|>tool|Result: 19<|im_end|>|<|im_start|>assistant|

The chat template is asked what stands behind a turn of the assistant; nothing of the turn itself, or of what was
before it, is encoded again. Results of tools answer to calls, so the turn that stands for the policy's has such calls
where the template writes results behind them, or refuses a result without one. Without a template the texts are added
as they are.

Invariant: what is said is in what is added, or ModelError says why not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transport.contracts.chat_template import ChatMessage, ChatTemplate, TemplateError, Tools
from workers.environments.environment import Message
from workers.errors import ModelError
from workers.models import load_tokenizer

TURN = "the turn before 7f3a"
"""Stands for the policy's turn while the template is asked what comes after it: short, and in no template."""
CALL = "call7f3a{}q"
"""Stands for the arguments of a call of that turn."""


class ObservationEncoder:
    """tokenizer: of transformers.  templated: whether its chat template is used (data.chat_template).  arguments: the
    run's chat_template_kwargs.

    Raises (constructor) ModelError: the template reads no such argument.
    """

    def __init__(self, tokenizer: Any, *, templated: bool, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._templated = templated and bool(tokenizer.chat_template)
        try:
            self._template = ChatTemplate(tokenizer, arguments if self._templated else None)
        except TemplateError as error:
            raise ModelError(str(error)) from error

    @staticmethod
    def of(directory: Path, *, templated: bool, arguments: Mapping[str, Any] | None = None) -> ObservationEncoder:
        """With the tokenizer of the model in ``directory``. Raises ModelError."""
        return ObservationEncoder(load_tokenizer(directory), templated=templated, arguments=arguments)

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

    def prompt(
        self, conversation: Sequence[ChatMessage], tools: Tools = None, arguments: Mapping[str, Any] | None = None
    ) -> str:
        """A whole conversation as the text before the policy's turn.

        Raises ModelError: the template refuses it or leaves out a part of it, or reads no such argument.
        """
        if not self._templated:
            if tools or arguments:
                what = "tools" if tools else "chat_template_kwargs"
                raise ModelError(f"without a chat template there is no place for {what}: leave them out")
            return "".join(str(message.get("content") or "") for message in conversation)
        try:
            self._template.check_arguments(arguments or {})
            return self._template.render(conversation, tools, arguments)
        except TemplateError as error:
            raise ModelError(str(error)) from error

    def behind_turn(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """Ids that lead from a turn of the policy, which ends with ``last_token``, over ``messages`` to its next turn.

        Raises ModelError: the template refuses the messages, or leaves out the turn or what is said.
        """
        return self.behind([{"role": one.role, "content": one.content} for one in messages], last_token)

    def behind(
        self,
        said: Sequence[ChatMessage],
        last_token: int,
        tools: Tools = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Likewise for messages as chat templates take them. calls: those of the turn, where they are known."""
        if not self._templated:
            return self.ids(self.prompt(said, tools, arguments))
        reasons: list[str] = []
        for turn, anchors in _stand_ins(said, calls):
            conversation = [{"role": "user", "content": "?"}, turn, *_answering(said, turn)]
            try:
                self._template.check_arguments(arguments or {})
                text = self._template.plain(conversation, tools, arguments, blamed=said)
                return self._behind(text, said, anchors, last_token, asked=(conversation, tools, arguments))
            except TemplateError as error:
                reasons.append(str(error))
        raise ModelError(next((one for one in reasons if "leaves out" in one), reasons[0]))

    def _behind(
        self,
        text: str,
        said: Sequence[ChatMessage],
        anchors: Sequence[str],
        last_token: int,
        *,
        asked: tuple[Sequence[ChatMessage], Tools, Mapping[str, Any] | None],
    ) -> list[int]:
        """Ids of what ``text`` has behind the turn that ``anchors`` stand in. Raises TemplateError."""
        ends = [place + len(anchor) for anchor in anchors if (place := text.find(anchor)) >= 0]
        if not ends:
            raise TemplateError("the model's chat template leaves out what the assistant said")
        behind = text[max(ends) :]
        if lost := self._template.lost(said, behind):
            raise TemplateError(self._template.leaves_out(lost))
        self._template.check_shape(*asked, since=2)  # what stands before was not said
        end = self.whole_text([last_token]) if last_token >= 0 else ""
        if anchors[0] is not TURN:  # behind its last call the turn has signs of its own, up to its end
            cut = behind.find(end) if end else -1
            if cut < 0 and (special := self._first_special(behind)) is not None:
                place, token = special
                cut = place + (len(token) if end else 0)  # the turn was sampled with another end
            if cut < 0:
                raise TemplateError("the model's chat template does not say where a turn with calls ends")
            behind = behind[cut:]
        elif any(CALL.format(number) in behind for number in range(len(said))):
            raise TemplateError("the model's chat template writes calls behind what the assistant said")
        elif end and behind.lstrip().startswith(end):
            behind = behind.lstrip()  # a blank that the template writes before the end was not sampled
        ids = self.ids(behind)
        return ids[1:] if ids and ids[0] == last_token else ids  # the end of the turn was sampled

    def _first_special(self, text: str) -> tuple[int, str] | None:
        """(place, text) of the first special token, None without one."""
        added = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return min(((place, token) for token in added if (place := text.find(token)) >= 0), default=None)

    def behind_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids that lead from the end of a prompt over ``messages`` to the policy's first turn.

        A prompt of a template ends where the assistant begins; its empty turn is ended first. Raises ModelError.
        """
        return self.behind_turn(messages, -1)

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """special: with what the tokenizer adds by itself, where no template has; a beginning that ``text`` has already
        is not written twice.
        """
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        begin = self._tokenizer.bos_token_id
        return ids[1:] if special and begin is not None and ids[:2] == [begin, begin] else ids


def _stand_ins(
    said: Sequence[ChatMessage], calls: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Sequence[str]]]:
    """(a turn that may stand for the policy's, texts of it by which its end is found), the likeliest first."""
    plain = {"role": "assistant", "content": TURN}
    results = [message for message in said if message.get("role") == "tool"]
    if not results:
        yield plain, [TURN]
        return
    named = [message for message in results if message.get("tool_call_id")]
    made = [_call(message, number, calls) for number, message in enumerate(results)]
    marks = [CALL.format(number) for number in range(len(made))]
    with_calls = [
        ({**plain, "tool_calls": made}, [*marks, TURN]),
        ({**plain, "content": "", "tool_calls": made}, marks),
        ({**plain, "tool_calls": made}, [TURN]),  # a template that writes no calls
    ]
    if named:
        yield from with_calls
        yield plain, [TURN]
    else:
        yield plain, [TURN]
        yield from with_calls


def _call(result: ChatMessage, number: int, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The call that a result answers to."""
    identity = result.get("tool_call_id") or hashlib.blake2b(str(number).encode()).hexdigest()[:9]
    known = next((call for call in calls if call.get("id") == identity), calls[number] if number < len(calls) else {})
    name = result.get("name") or known.get("function", {}).get("name") or "tool"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": {"with": CALL.format(number)}}}


def _answering(said: Sequence[ChatMessage], turn: Mapping[str, Any]) -> list[ChatMessage]:
    """``said`` with results that name the calls of ``turn``."""
    calls = iter(turn.get("tool_calls") or ())
    answering: list[ChatMessage] = []
    for message in said:
        call = next(calls, None) if message.get("role") == "tool" else None
        named = {"tool_call_id": call["id"], "name": call["function"]["name"]} if call else {}
        answering.append({**named, **message} if call else message)
    return answering
