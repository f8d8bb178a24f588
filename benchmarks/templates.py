"""Figure ``templates``: what is said reaches the policy under real chat templates, or is refused by name.

The templates are files of packages that are installed for development (TRL's), each used with a tokenizer of
characters. Every case says words that occur nowhere else and looks them up in the ids that the product makes, decoded:
in a prompt (PromptEncoder, ObservationEncoder.prompt) and behind a turn (ObservationEncoder.behind). The product's own
check has no part in it.

    templates            real templates that were tried
    lost_text            words that were said, are in no ids, and were not refused
    refused              cases that the product refused, by template and reason
    refused_needlessly   of these, cases that the template renders whole by itself
    tail_differs         turns behind which the ids are not the end of the template's own whole rendering

    python -m benchmarks.templates [--list]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import DataError
from orchestrator.prompts.dataset import ChatMessage
from orchestrator.prompts.source import PromptEncoder
from transport.contracts.settings import DataSettings
from workers.environments.encoder import ObservationEncoder
from workers.errors import ModelError
from workers.models import character_tokenizer

PACKAGES = ("trl",)
"""Packages that ship templates as files."""
TURN = "policyturn"
"""What the policy said, for the whole rendering."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"tells of {name}",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("toolone", "tooltwo")
]


def call(number: int, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"place": f"argument{number}"}}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": name, "content": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """before: the conversation up to the policy's turn, whose message is turn.  said: what follows it.

    words: must be in the ids.
    """

    name: str
    before: Sequence[Mapping[str, Any]] = ({"role": "user", "content": "questionword"},)
    turn: Mapping[str, Any] = field(default_factory=dict[str, Any])
    said: Sequence[Mapping[str, Any]] = ()
    words: Sequence[str] = ()
    tools: bool = False


def cases() -> Iterator[Case]:
    user = {"role": "user", "content": "questionword"}
    yield Case(name="question", words=["questionword"])
    yield Case(
        name="system", before=[{"role": "system", "content": "systemword"}, user], words=["systemword", "questionword"]
    )
    yield Case(
        name="conversation",
        before=[user, {"role": "assistant", "content": "replyword"}, {"role": "user", "content": "secondword"}],
        words=["questionword", "replyword", "secondword"],
    )
    yield Case(
        name="equal messages",
        before=[user, {"role": "assistant", "content": "replyword"}, user],
        words=["questionword", "replyword", "questionword"],
    )
    yield Case(name="other scripts", before=[{"role": "user", "content": "日本語 ñandú"}], words=["日本語 ñandú"])
    yield Case(name="tools", before=[user], tools=True, words=["questionword", "toolone", "tooltwo"])
    plain = {"role": "assistant", "content": TURN}
    yield Case(name="user behind", turn=plain, said=[{"role": "user", "content": "nextword"}], words=["nextword"])
    yield Case(name="observation", turn=plain, said=[{"role": "tool", "content": "toolword"}], words=["toolword"])
    one = {"role": "assistant", "content": "", "tool_calls": [call(1, "toolone")]}
    both = {"role": "assistant", "content": "", "tool_calls": [call(1, "toolone"), call(2, "tooltwo")]}
    yield Case(name="result", turn=one, tools=True, said=[result(1, "toolone", "resultword")], words=["resultword"])
    yield Case(
        name="results",
        turn=both,
        tools=True,
        said=[result(1, "toolone", "resultword"), result(2, "tooltwo", "otherword")],
        words=["resultword", "otherword"],
    )
    yield Case(
        name="result in other scripts",
        turn=one,
        tools=True,
        said=[result(1, "toolone", "温度 21")],
        words=["温度 21"],
    )


def templates() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(place).rglob("*.jinja")):
                if "chat_templates" in path.parts:
                    yield f"{package}/{path.stem}", path.read_text("utf-8")


BAR = "\uff5c"
"""The wide bar of DeepSeek's special tokens."""
SPECIAL = re.compile(
    rf"<[|{BAR}][^<>|{BAR}\s'\"{{}}]+[|{BAR}]?>|<[^<>|\s'\"{{}}/]+\|>|</s>|\[/?[A-Z_]+\]|<(?:end|start)_of_turn>"
)
"""How families write special tokens."""


def character_tokens(template: str) -> Any:
    """A tokenizer with a token for every character, and the special tokens that the template writes."""
    tokenizer: Any = character_tokenizer()
    tokenizer.model_max_length = 100_000
    tokenizer.backend_tokenizer.normalizer = None
    characters = {*template, *map(chr, range(32, 127)), *"日本語ñú温度"}
    tokenizer.add_tokens(sorted(characters - set(tokenizer.get_vocab())))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    if "bos_token" in template:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    return tokenizer


def end_of_turn(case: Case, tokenizer: Any) -> int:
    """The token with which the policy's turn ends as the template writes it, -1 where it writes none."""
    for turns in ([*case.before, case.turn], [*case.before, as_text(case.turn)]):
        try:
            text = tokenizer.apply_chat_template(turns, tools=TOOLS if case.tools else None, tokenize=False)
        except Exception:  # whatever a template raises at what it does not know
            continue
        ids = tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"]
        return ids[-1] if ids and ids[-1] in tokenizer.all_special_ids else -1
    return -1


def said_by_product(case: Case, tokenizer: Any) -> str:
    """The decoded ids that the product makes of a case. Raises DataError, ModelError: it is refused."""
    tools = TOOLS if case.tools else None
    encoder = ObservationEncoder(tokenizer, templated=True)
    if case.said:
        calls = case.turn.get("tool_calls") or ()
        return encoder.whole_text(encoder.behind(case.said, end_of_turn(case, tokenizer), tools, calls=calls))
    text = encoder.whole_text(encoder.ids(encoder.prompt(case.before, tools)))
    if not case.tools:
        prompts = PromptEncoder(tokenizer, DataSettings())
        turns = [ChatMessage(role=one["role"], content=one["content"]) for one in case.before]
        own = tokenizer.decode(prompts.encode(prompts.render("", turns)))
        missing = [word for word in case.words if own.count(word) < case.words.count(word)]
        text = "" if missing else text
    return text


def by_template(case: Case, tokenizer: Any) -> str:
    """What the template makes of the whole conversation, "" where it refuses it."""
    for written in (False, True):
        turns = [*case.before, *([case.turn] if case.said else []), *case.said]
        if written:
            turns = [as_text(turn) for turn in turns]
        try:
            return tokenizer.apply_chat_template(
                turns, tools=TOOLS if case.tools else None, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # whatever a template raises at what it does not know
            continue
    return ""


def as_text(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}}
        for one in turn.get("tool_calls") or ()
    ]
    return {**turn, "tool_calls": calls} if calls else dict(turn)


def holds(text: str, words: Sequence[str]) -> bool:
    escaped = json.dumps(text, ensure_ascii=True)
    return all(
        text.count(word) >= words.count(word) or escaped.count(json.dumps(json.dumps(word))[3:-3]) >= words.count(word)
        for word in words
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every refusal")
    options = parser.parse_args()
    lost: list[str] = []
    needless: list[str] = []
    differs: list[str] = []
    refused: Counter[str] = Counter()
    tried = 0
    for name, template in templates():
        tokenizer = character_tokens(template)
        tried += 1
        for case in cases():
            whole = by_template(case, tokenizer)
            try:
                text = said_by_product(case, tokenizer)
            except (DataError, ModelError) as error:
                refused[case.name] += 1
                if holds(whole, case.words):
                    needless.append(f"{name}, {case.name}: {error}")
                if options.list:
                    print(f"refused    {name}, {case.name}: {error}")
                continue
            if not holds(text, case.words):
                lost.append(f"{name}, {case.name}")
            elif (
                case.said
                and holds(whole, case.words)
                and not whole.endswith(text.removeprefix(text[: len(text) - len(text.lstrip())]))
            ):
                differs.append(f"{name}, {case.name}: {text!r:.120} against {whole[-len(text) - 20 :]!r:.160}")
    arguments = argument_cases()
    for kind, found in (("lost", lost), ("refused needlessly", needless), ("tail differs", differs)):
        for one in found:
            print(f"{kind:18} {one}")
    print(f"refused, by case: {dict(refused)}")
    print(
        json.dumps(
            {
                "templates": tried,
                "cases": tried * len(list(cases())) + arguments[0],
                "lost_text": len(lost) + arguments[1],
                "refused": sum(refused.values()),
                "refused_needlessly": len(needless),
                "tail_differs": len(differs),
            }
        )
    )


def argument_cases() -> tuple[int, int]:
    """(template arguments that were tried, those that were ignored without a word)."""
    tried = ignored = 0
    for _name, template in templates():
        tokenizer = character_tokens(template)
        for argument, values in (("enable_thinking", (True, False)), ("no_such_argument", (1, 2))):
            tried += 1
            said: set[str] = set()
            try:
                for value in values:
                    encoder = PromptEncoder(tokenizer, DataSettings(chat_template_kwargs={argument: value}))
                    said.add(encoder.render("questionword"))
            except DataError:
                continue
            reads = f"{argument} " in template or f"({argument}" in template or argument in template
            ignored += argument == "no_such_argument" or not reads
    return tried, ignored


if __name__ == "__main__":
    main()
