"""What is said reaches the policy under any chat template, or is refused by name; arguments of templates are read."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.errors import DataError
from orchestrator.prompts.source import PromptEncoder
from transport.contracts import chat_template
from transport.contracts.chat_template import ChatTemplate, TemplateError
from transport.contracts.settings import DataSettings
from workers.environments.encoder import ObservationEncoder
from workers.errors import ModelError
from workers.models import character_tokenizer

END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
EACH = "{% for m in messages %}" + TURN + "{% endfor %}" + END
SOME = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}" + TURN + "{% endif %}{% endfor %}" + END
)
BEHIND_CALLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}" + TURN + "{% if m.tool_calls %}{% set ns = namespace(on=true) %}"
    "{% for r in messages[loop.index0 + 1:] %}{% if ns.on and r.role == 'tool' %}<|im_start|>result\n{{ r.content }}"
    "<|im_end|>{% else %}{% set ns.on = false %}{% endif %}{% endfor %}{% endif %}{% endif %}{% endfor %}" + END
)
"""As Gemma 4's: results are written where the assistant asked for them."""
CALL_FIRST = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}" + TURN + "{% endfor %}" + END
)
ONCE = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.content != ns.last %}" + TURN + "{% endif %}"
    "{% set ns.last = m.content %}{% endfor %}" + END
)
WITH_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + END
)
RESULTS = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"sunny {n}"} for n in (1, 2)]


def tokenizer_of(template: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [EACH, BEHIND_CALLS, CALL_FIRST, WITH_CALLS])
@pytest.mark.parametrize("said", [RESULTS[:1], RESULTS, [{"role": "tool", "content": "sunny 1"}]])
@pytest.mark.parametrize("end", [True, False])
def test_results_of_tools_reach_the_policy_behind_its_own_tokens(template: str, said: list[Any], end: bool) -> None:
    if template is CALL_FIRST and len(said) > 1:
        pytest.skip("the template refuses a second result")
    tokenizer = tokenizer_of(template)
    last = tokenizer.eos_token_id if end else -1
    text = tokenizer.decode(ObservationEncoder(tokenizer, templated=True).behind(said, last))
    assert text.startswith("<|im_start|>" if end else "<|im_end|><|im_start|>")
    assert text.endswith("<|im_start|>assistant\n")
    assert [text.count(one["content"]) for one in said] == [1] * len(said)
    assert "7f3a" not in text, "nothing of the turn that stands for the policy's"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (SOME, [{"role": "user", "content": "?"}, {"role": "tool", "content": "21"}], "leaves out .* of the role tool"),
        (ONCE, [{"role": "user", "content": "again"}] * 2, "leaves out .* of the role user"),
        (CALL_FIRST, [{"role": "tool", "content": "21"}], "refuses messages of tool: a result without a call"),
        (EACH, [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
         "leaves out what a message of the role assistant says, beside a call"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused_by_role(template: str, messages: list[Any], says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        ChatTemplate(tokenizer_of(template)).render(messages)


def test_thoughts_of_earlier_turns_may_be_left_out_and_what_was_said_may_not() -> None:
    without = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}|{% endfor %}" + END
    said = [{"role": "assistant", "content": "<think>hm</think> five"}, {"role": "user", "content": "why?"}]
    assert "five|why?|" in ChatTemplate(tokenizer_of(without)).render(said)
    said[1] = {"role": "user", "content": "<think>hm</think> six"}
    with pytest.raises(TemplateError, match="role user"):
        ChatTemplate(tokenizer_of(without)).render(said)


def test_a_result_that_a_template_writes_as_json_is_found() -> None:
    as_json = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}" + END
    assert ChatTemplate(tokenizer_of(as_json)).render([{"role": "user", "content": 'say "a"\n\u00e9'}])


def test_tools_that_a_template_has_no_place_for_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with pytest.raises(TemplateError, match="no place for tools: it leaves out 'weather'"):
        ChatTemplate(tokenizer_of(EACH)).render([{"role": "user", "content": "?"}], tools)
    shown = "{{ tools | tojson }}" + EACH
    assert "weather" in ChatTemplate(tokenizer_of(shown)).render([{"role": "user", "content": "?"}], tools)


def test_arguments_of_templates_are_obeyed_or_refused_by_name() -> None:
    thinking = EACH + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    off = {"enable_thinking": False}
    encoder = PromptEncoder(tokenizer_of(thinking), DataSettings(chat_template_kwargs=dict(off)))
    assert encoder.render("1 + 1?").endswith("assistant\n<think></think>")
    observed = ObservationEncoder(tokenizer_of(thinking), templated=True, arguments=off)
    assert observed.prompt([{"role": "user", "content": "?"}]).endswith("<think></think>")
    assert not observed.prompt([{"role": "user", "content": "?"}], arguments={"enable_thinking": True}).endswith(">")
    for wrong in ("enable_thinkin", "messages"):
        with pytest.raises(DataError, match=rf"reads no '{wrong}' .*it reads enable_thinking"):
            PromptEncoder(tokenizer_of(thinking), DataSettings(chat_template_kwargs={wrong: True}))
        with pytest.raises(ModelError, match=rf"reads no '{wrong}'"):
            observed.prompt([{"role": "user", "content": "?"}], arguments={wrong: True})


def test_a_beginning_of_text_is_written_once() -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    tokenizer.chat_template = None
    from tokenizers.processors import TemplateProcessing

    begin = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    encoder = PromptEncoder(tokenizer, DataSettings())
    assert list(encoder.encode(f"{begin[0]}a")) == list(encoder.encode("a"))
    observed = ObservationEncoder(tokenizer, templated=True)
    assert observed.ids(f"{begin[0]}a", special=True) == observed.ids("a", special=True)


def test_a_template_that_loops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.2)
    loops = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}" + EACH
    with pytest.raises(DataError, match="it loops"):
        PromptEncoder(tokenizer_of(loops), DataSettings()).render("1 + 1?")
    too_wide = "{% for a in range(10 ** 9) %}{% endfor %}" + EACH
    with pytest.raises(DataError, match="refuses messages of user"):
        PromptEncoder(tokenizer_of(too_wide), DataSettings()).render("1 + 1?")


def test_a_template_that_reads_the_clock_is_said_and_keeps_a_date() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}" + EACH
    assert PromptEncoder(tokenizer_of(dated), DataSettings()).reads_clock
    pinned = PromptEncoder(tokenizer_of(dated), DataSettings(chat_template_kwargs={"today": "2026-01-31"}))
    assert not pinned.reads_clock
    assert pinned.render("1 + 1?").startswith("31 Jan 2026")
    assert not PromptEncoder(tokenizer_of(EACH), DataSettings()).reads_clock
    assert not PromptEncoder(tokenizer_of(dated), DataSettings(chat_template=False)).reads_clock
    with pytest.raises(DataError, match="give a date as 2026-01-31"):
        PromptEncoder(tokenizer_of(dated), DataSettings(chat_template_kwargs={"today": "tomorrow"}))
    with pytest.raises(DataError, match="reads no 'today'"):
        PromptEncoder(tokenizer_of(EACH), DataSettings(chat_template_kwargs={"today": "2026-01-31"}))
