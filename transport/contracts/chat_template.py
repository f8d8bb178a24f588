"""A model's chat template: messages become the text that the model reads, and nothing that was said is lost.

    messages, tools, arguments ─► apply_chat_template ─► text
                                        └─► each message's text is in it, else TemplateError names the role

A template may leave out a role, a tool's result behind the wrong turn, or one of two equal messages, without an error.
So each shape of a conversation (its roles and calls) is rendered once more with a mark in place of each text: a mark
that is missing is a message that is lost. The texts themselves are looked up in every rendering.

Owns: the rendering of messages, and what templates may leave out (thoughts of earlier turns). Never: encodes text.
Invariant: what is returned contains every text that was said, as it was said or as JSON writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias, cast

from transport.process.patience import TooLongError, ended_after

ChatMessage: TypeAlias = Mapping[str, Any]
"""``role``, ``content``, and what else a chat template reads: ``tool_calls``, ``tool_call_id``, ``name``."""
Tools: TypeAlias = "list[dict[str, Any]] | None"
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. Most templates leave out a message of another role without a word, or make up a speaker."""
THOUGHT_ENDS = "</think>"
"""Templates of reasoning models leave out what an earlier turn of the assistant thought, on purpose."""
OWN_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)
"""Variables of a template that are no arguments of a user's."""
MARK = "mark7f3a{}q"
"""Stands for a text: letters and digits alone, which no template escapes, and which are in none."""


RENDER_S = 20.0
"""Seconds after which a template is taken to loop: longest of 72 real ones is below .1 s."""
CLOCK = "strftime_now"
"""Function of transformers by which a template reads the clock."""
TODAY = "today"
"""Argument of ours that answers it: a date as 2026-01-31."""


class TemplateError(Exception):
    """The template refuses messages, or leaves some out. The message says which and why."""


class ChatTemplate:
    """The chat template of a tokenizer. arguments: a run's ``chat_template_kwargs``.

    Raises (constructor) TemplateError: the template reads no argument of such a name.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._whole: set[tuple[object, ...]] = set()
        """Shapes of conversations of which nothing is left out."""
        self._variables: frozenset[str] | None = None  # found when first asked for
        self.arguments = dict(arguments or {})
        self.check_arguments(self.arguments)

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._tokenizer.chat_template)

    @property
    def reads_clock(self) -> bool:
        """Whether the text depends on the day on which it is rendered."""
        return CLOCK in self.variables and not {TODAY, "date_string"} & self.arguments.keys()

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set."""
        if self._variables is None:
            from jinja2 import Environment, TemplateSyntaxError, meta

            names: set[str] = set()
            for source in self._sources():
                try:
                    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_without_generation(source))
                except TemplateSyntaxError:  # it is refused when it is rendered
                    continue
                names |= meta.find_undeclared_variables(tree)
            self._variables = found = frozenset(names)
            return found
        return self._variables

    def _sources(self) -> list[str]:
        template: Any = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            return [str(one) for one in cast("Mapping[str, object]", template).values()]
        return [str(template)] if template else []

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raises TemplateError for an argument that the template does not read."""
        for name, value in arguments.items():
            if name == TODAY and CLOCK in self.variables:
                for source in self._sources():
                    _on_day(source, value)
            elif name in OWN_NAMES or name not in self.variables:
                own = {TODAY} if CLOCK in self.variables else set[str]()
                known = sorted((self.variables - OWN_NAMES - _FUNCTIONS) | own)
                raise TemplateError(
                    f"the model's chat template reads no {name!r} (chat_template_kwargs); it reads "
                    f"{', '.join(known) or 'no argument at all'}"
                )

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        blamed: Sequence[ChatMessage] | None = None,
    ) -> str:
        """The text before the assistant's next turn.

        Args:   arguments: over those of the run.  blamed: the messages that an error names, all of them by default.
        Raises: TemplateError: the template refuses the messages or the tools, or leaves out what one of them says.
        """
        text = self.plain(messages, tools, arguments, blamed=blamed)
        if lost := self.lost(messages, text):
            raise TemplateError(self.leaves_out(lost))
        self.check_shape(messages, tools, arguments)
        missing = next((name for name in map(_tool_name, tools or ()) if name not in text), "")
        if tools and (missing or text == self.plain(messages, None, arguments)):
            raise TemplateError(
                f"the model's chat template has no place for tools: it leaves out {missing or _tool_name(tools[0])!r}; "
                "describe them in a message, or use a model that knows tools"
            )
        return text

    def plain(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        blamed: Sequence[ChatMessage] | None = None,
        answered: bool = False,
    ) -> str:
        """Text that the template makes of the messages, whatever it leaves out. Raises TemplateError: it refuses them.

        answered: the last message is the assistant's, and no further turn of it begins.
        """
        from jinja2 import TemplateError as JinjaError

        given = {**self.arguments, **(arguments or {})}
        if TODAY in given and CLOCK in self.variables:
            given["chat_template"] = _on_day(self._tokenizer.get_chat_template(None, tools), given[TODAY])
        asked = list(messages)
        for again in (False, True):
            try:
                with ended_after(RENDER_S):
                    return self._tokenizer.apply_chat_template(
                        asked, tools=tools, tokenize=False, add_generation_prompt=not answered, **given
                    )
            except TooLongError:
                raise TemplateError(f"the model's chat template took more than {RENDER_S:.0f} s: it loops") from None
            except (
                JinjaError,
                TypeError,
                ValueError,
                ArithmeticError,
                RecursionError,
                AttributeError,
                LookupError,
            ) as error:
                if not again and any(message.get("tool_calls") for message in messages):
                    asked = [_with_written_arguments(message) for message in messages]  # some templates want text
                    continue
                roles = ", ".join(sorted({str(one.get("role")) for one in (messages if blamed is None else blamed)}))
                reason = f"the model's chat template refuses messages of {roles or 'no role'}: {error}"
                raise TemplateError(reason) from error
        raise AssertionError

    def lost(self, messages: Sequence[ChatMessage], text: str) -> ChatMessage | None:
        """The first message whose text is not in ``text``, or not as often as messages say it."""
        said = Counter(map(_said, messages))
        for message in messages:
            wanted = _said(message)
            if not _stands(wanted, text) or (wanted and wanted in text and text.count(wanted) < said[wanted]):
                return message
        return None

    def check_shape(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        since: int = 0,
    ) -> None:
        """Raises TemplateError where the template leaves out a message of such a conversation, whatever it says.

        since: index of the first message that must not be left out.
        """
        shape = (since, bool(tools), repr(sorted((arguments or {}).items())), *map(_shape, messages))
        if shape in self._whole:
            return
        if lost := self._lost_marks(messages, tools, arguments, since):
            raise TemplateError(self.leaves_out(lost))
        self._whole.add(shape)

    def _lost_marks(
        self, messages: Sequence[ChatMessage], tools: Tools, arguments: Mapping[str, Any] | None, since: int
    ) -> ChatMessage | None:
        """The first message that is left out where all texts differ; None where none is, or it cannot be known."""
        marked = [_marked(message, number) for number, message in enumerate(messages)]
        try:
            text = self.plain(marked, tools, arguments)
        except TemplateError:  # it wants something else than a mark there, and did render what was said
            return None
        for number, message in enumerate(messages[since:], since):
            calls = range(len(message.get("tool_calls") or ()))
            marks = [MARK.format(f"{number}c{call}") for call in calls]
            if _said(message):
                marks.append(MARK.format(number))
            if any(mark not in text for mark in marks):
                return message
        return None

    def leaves_out(self, message: ChatMessage) -> str:
        """Error text for a ``message`` that is left out, with what to do."""
        role = str(message.get("role"))
        beside = ", beside a call of a tool" if message.get("tool_calls") else ""
        return (
            f"the model's chat template leaves out what a message of the role {role} says{beside}: use a role that it "
            'knows ("user" is one), or another template'
        )


_FUNCTIONS = frozenset(
    ("raise_exception", "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", "loop")
)
"""Names that are in every template's surroundings, and no arguments."""


def _on_day(source: str, today: object) -> str:
    """The template with that date where it asks for the day's. Raises TemplateError: ``today`` is no date."""
    try:
        day = datetime.fromisoformat(str(today))
    except ValueError:
        raise TemplateError(f"chat_template_kwargs.{TODAY} is {today!r}: give a date as 2026-01-31") from None
    dated = re.sub(CLOCK + r"\(\s*([\"'])(.*?)\1\s*\)", lambda call: json.dumps(day.strftime(call[2])), source)
    if re.search(CLOCK + r"\s*\(", dated):
        raise TemplateError(f"the model's chat template makes up how it writes the date: {TODAY} cannot keep it")
    return dated


def _without_generation(source: str) -> str:
    """The template without transformers' own tag, which marks what the assistant writes."""
    return re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source)


def _shape(message: ChatMessage) -> tuple[object, ...]:
    said = _said(message)
    return (message.get("role"), bool(said), len(message.get("tool_calls") or ()), bool(message.get("name")))


def _said(message: ChatMessage) -> str:
    """The text of a message that must reach the policy; of an earlier turn's without its thoughts."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    if message.get("role") == "assistant":
        text = text.rpartition(THOUGHT_ENDS)[2]
    return text.strip()


def _stands(said: str, text: str) -> bool:
    """Whether ``said`` is in ``text``: as it is, or as JSON or HTML writes it."""
    if said in text:
        return True
    written = (json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
    if any(one in text for one in written):
        return True
    squeezed, whole = " ".join(said.split()), " ".join(text.split())
    if squeezed in whole:  # lines that a template strips
        return True
    try:  # a result that is JSON is written anew
        value = json.loads(said)
    except ValueError:
        return False
    forms = [(ascii_only, indent) for ascii_only in (True, False) for indent in (None, 2, 4)]
    return any(json.dumps(value, ensure_ascii=ascii_only, indent=indent) in text for ascii_only, indent in forms)


def _marked(message: ChatMessage, number: int) -> dict[str, Any]:
    """``message`` with marks for its text and for the arguments of its calls."""
    marked = dict(message)
    if _said(message):
        marked["content"] = MARK.format(number)
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"mark": MARK.format(f"{number}c{index}")}}}
            for index, call in enumerate(calls)
        ]
    return marked


def _with_written_arguments(message: ChatMessage) -> dict[str, Any]:
    """``message`` with the arguments of its calls as text."""
    written = dict(message)
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return written


def _tool_name(tool: Mapping[str, Any]) -> str:
    function: Any = tool.get("function", tool)
    return str(cast("Mapping[str, object]", function).get("name", "")) if isinstance(function, Mapping) else ""
