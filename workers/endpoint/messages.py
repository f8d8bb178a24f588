"""What clients of OpenAI's API send, what they are answered, and which of it means the same.

    /v1/chat/completions   ChatRequest        ─► chat_answer, chat_chunks
    /v1/completions        CompletionRequest  ─► text_answer, text_chunks

Owns: the form of requests and answers, what is refused of them. Never: tokens, sessions. Invariant: a field that would
change the prompt or what is sampled is obeyed or refused by name (NEUTRAL). Other fields that we do not know are
ignored, as new clients send new ones.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from transport.contracts.types import MAX_TOP_K, FinishReason, Struct
from transport.errors import DECODE_ERRORS
from workers.errors import EndpointRefusedError

MAX_STOPS = 16
"""Strings in a request. OpenAI allows 4; each costs a search for every token."""
MAX_MESSAGES = 4096
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
T = TypeVar("T")


NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("presence_penalty", "frequency_penalty", "logit_bias", "min_p", "min_tokens", "min_new_tokens"),
            *("typical_p", "stop_token_ids", "bad_words", "allowed_token_ids", "logits_processors", "grammar"),
            *("custom_logit_processor", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("guided_decoding_backend", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
            *("xtc_probability", "dry_multiplier", "use_beam_search", "ignore_eos", "include_stop_str_in_output"),
            *("continue_final_message", "echo", "suffix", "chat_template", "documents", "prompt_logprobs"),
            *("truncate_prompt_tokens", "reasoning_effort", "thinking", "functions", "function_call", "lora_path"),
            *("custom_params", "kv_transfer_params", "prediction", "audio", "web_search_options", "verbosity"),
            *("enable_thinking", "thinking_budget", "top_a", "smoothing_factor", "mirostat", "session_params"),
            *("mm_processor_kwargs", "media_io_kwargs", "vllm_xargs", "no_stop_trim"),
        ),
        (None, 0, "", False, (), {}),
    ),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of", "tfs", "n"), (None, 1)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    "add_special_tokens": (None, False),
    "parallel_tool_calls": (None, True),
    "modalities": (None, ["text"]),
}
"""Fields of OpenAI's, vLLM's and SGLang's that would change prompt or samples -> the values that change none."""
INSTEAD = {
    "enable_thinking": "give it in chat_template_kwargs",
    "reasoning_effort": "give it in chat_template_kwargs where the model's template reads it",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "chat_template": "the run's model has its own",
    "stop_token_ids": "a response ends with the model's own; give stop for texts",
}
"""What to write in place of a field that is refused."""


# --- requests ---------------------------------------------------------------------------------------------------------


class Part(Struct, frozen=True, kw_only=True):
    type: str
    text: str = ""


class FunctionCall(Struct, frozen=True, kw_only=True):
    """arguments: JSON in a string, as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(Struct, frozen=True, kw_only=True):
    function: FunctionCall
    id: str = ""
    type: str = "function"


class Message(Struct, frozen=True, kw_only=True):
    """One of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Raises EndpointRefusedError: it has a part that is not text."""
        if not isinstance(self.content, list):
            return self.content or ""
        if other := next((part.type for part in self.content if part.type not in ("text", "refusal")), ""):
            raise refused(f"content of type {other!r} is not supported: the model reads text", param="messages")
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: arguments of calls as what their JSON says."""
        shown: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.name:
            shown["name"] = self.name
        if self.tool_call_id:
            shown["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _parsed(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return shown

    def meaning(self) -> bytes:
        """Equal for two messages that mean the same: clients strip and leave out what is empty, rename calls, and write
        the JSON of their arguments anew.
        """
        calls = [(call.function.name, _canonical(call.function.arguments)) for call in self.tool_calls or ()]
        return json.dumps([self.role, self.text.strip(), self.name or "", calls]).encode()


def _parsed(arguments: str) -> Any:
    """What the JSON says. Raises EndpointRefusedError for text that UTF-8 cannot say, which JSON writes as \\ud800."""
    try:
        found = json.loads(arguments)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused(
            f"arguments of a call hold half of a surrogate pair, which is no text: {error.reason}", param="messages"
        ) from error
    except (ValueError, RecursionError):
        return arguments
    return found


def _canonical(arguments: str) -> str:
    """Equal for what a template renders alike: the same JSON, whatever its blanks and the order of its keys."""
    try:
        return json.dumps(_parsed(arguments), sort_keys=True)
    except RecursionError:  # so deep that it can be read and not written
        return arguments


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class Request(Struct, frozen=True, kw_only=True):
    """What both kinds have. Values of None are as if they were left out."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOP_K)] | None = None
    return_token_ids: bool | None = None
    """As of vLLM: the ids of prompt and answer beside the text."""

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop if isinstance(self.stop, list) else [self.stop] if self.stop else []
        return tuple(one for one in stop if one)

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have at most."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return False

    @staticmethod
    def check_fields(given: Mapping[str, Any], kind: type[Request]) -> None:
        """Raises EndpointRefusedError for a field that would change prompt or samples, and that ``kind`` has not."""
        known = kind.__struct_fields__
        for name in given.keys() & NEUTRAL.keys():
            value = tuple(given[name]) if given[name] == [] else given[name]
            if name not in known and not any(value == one and type(value) is type(one) for one in _as_numbers(name)):
                remedy = INSTEAD.get(name, "leave it out")
                raise refused(
                    f"{name} would change the prompt or what is sampled, and is not supported: {remedy}", param=name
                )

    def check(self) -> None:
        """Raises EndpointRefusedError for what no engine of a run does."""
        if self.n not in (None, 1):
            raise refused("n must be 1: lease a session for each sample", param="n")
        if len(self.stops) > MAX_STOPS:
            raise refused(f"stop may have {MAX_STOPS} strings at most", param="stop")


class ChatRequest(Request, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        Request.check(self)
        if self.top_logprobs:
            raise refused("top_logprobs must be 0: engines report the sampled token alone", param="top_logprobs")
        if self.tool_choice not in (None, "auto", "none"):
            raise refused('tool_choice must be "auto" or "none": nothing forces the policy', param="tool_choice")
        if self.response_format and self.response_format.get("type") != "text":
            raise refused("response_format must be text: nothing forces the policy", param="response_format")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return self.tools if self.tools and self.tool_choice != "none" else None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``. prompt: a text, or token ids."""

    prompt: str | list[int | str]
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self) -> None:
        Request.check(self)
        if isinstance(self.prompt, list) and any(isinstance(one, str) for one in self.prompt) and len(self.prompt) > 1:
            raise refused("prompt must be one text, or one list of token ids", param="prompt")
        if self.logprobs:
            raise refused("logprobs must be 0: engines report the sampled token alone", param="logprobs")

    @property
    def text_or_ids(self) -> str | list[int]:
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
        return prompt if isinstance(prompt, str) else [one for one in prompt if isinstance(one, int)]


def _as_numbers(name: str) -> Iterator[object]:
    """The neutral values of a field, whole numbers as decimal fractions, too."""
    for one in NEUTRAL[name]:
        yield one
        if type(one) is int:
            yield float(one)


def refused(reason: str, *, param: str = "", status: int = 400, code: str = "invalid_request") -> EndpointRefusedError:
    return EndpointRefusedError(status, code, reason, param=param)


_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `([^`]*)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Raises EndpointRefusedError that says what is wrong with it, and names the field."""
    try:
        asked = msgspec.json.decode(body, type=kind)
        if isinstance(asked, Request):
            Request.check_fields(msgspec.json.decode(body, type=dict[str, Any]), type(asked))
        return asked
    except (*DECODE_ERRORS, UnicodeDecodeError) as error:
        reason = str(error) if body else "the body is empty"
        reason = f"the body is not what it must be: {reason}"
        raise refused(reason, param=_blamed(str(error)), code="invalid_json") from error


def _blamed(reason: str) -> str:
    """The path of the field that msgspec refuses, "prompt.question" say; "" where it names none."""
    place = _PLACE.search(reason)
    field = _FIELD.search(reason)
    parts = [place[1] if place else "", field[1] if field else ""]
    return ".".join(part for part in parts if part)


def digests(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, answered: Container[bytes]
) -> list[bytes]:
    """For each beginning of a conversation what is equal where it means the same: [1 + len(messages)], that of no
    message first.

    answered: digests of conversations that end with an answer of the policy. An answer has no name; one that its client
    gives it is not compared. Those of other messages are.
    """
    found = [hashlib.blake2b(json.dumps(tools or None, sort_keys=True).encode(), digest_size=16).digest()]
    for message in messages:
        named = message.role == "assistant" and message.name
        if named and (plain := digest_behind(found[-1], msgspec.structs.replace(message, name=None))) in answered:
            found.append(plain)
        else:
            found.append(digest_behind(found[-1], message))
    return found


def digest_behind(before: bytes, message: Message) -> bytes:
    """That of a conversation with one more message. before: its digest without it."""
    return hashlib.blake2b(before + message.meaning(), digest_size=16).digest()


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn of the policy. text: without what ended it.  tokens: the text of each id.  prompt_ids, token_ids: as the
    engine had them.  fingerprint: which weights.
    """

    text: str
    reason: FinishReason
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[str]
    fingerprint: str
    tool_calls: Sequence[ToolCall] = ()
    not_obeyed: Sequence[str] = ()
    """Fields of the request that a session does not obey, since it samples as its run does."""
    created_s: int = 0
    identity: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def message(self) -> Message:
        calls = list(self.tool_calls)
        return Message(role="assistant", content=self.text, tool_calls=calls or None)

    @property
    def usage(self) -> dict[str, int]:
        prompt, answer = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.tool_calls else self.reason.value


def chat_answer(asked: ChatRequest, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.tool_calls:
        message |= {"content": answer.text or None, "tool_calls": _calls(answer)}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": _chat_logprobs(answer.tokens, answer.logprobs) if asked.wants_logprobs else None,
    }
    return _whole(asked, answer, "chat.completion", choice)


def text_answer(asked: CompletionRequest, answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "logprobs": _text_logprobs(answer.tokens, answer.logprobs) if asked.wants_logprobs else None,
    }
    return _whole(asked, answer, "text_completion", choice)


def _whole(asked: Request, answer: Answer, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = _head(asked, kind, answer.identity, answer.created_s, answer.fingerprint)
    whole = {**head, "choices": [choice], "usage": answer.usage, **_not_obeyed(answer)}
    if asked.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
        whole["prompt_token_ids"] = list(answer.prompt_ids)
    return whole


def _not_obeyed(answer: Answer | None) -> dict[str, list[str]]:
    """The field of an answer that names what was not obeyed; none where all was."""
    return {"not_obeyed": list(answer.not_obeyed)} if answer is not None and answer.not_obeyed else {}


def _head(asked: Request, kind: str, identity: str, created_s: int, fingerprint: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{identity}",
        "object": kind,
        "created": created_s,
        "model": asked.model,
        "system_fingerprint": fingerprint,
    }


class Chunks:
    """An answer as a stream of events has it: pieces while it is generated, then ``end`` with what is left."""

    def __init__(self, asked: ChatRequest | CompletionRequest) -> None:
        self._asked = asked
        self._chat = isinstance(asked, ChatRequest)
        self._identity = secrets.token_hex(12)
        self._created_s = int(time.time())
        self._begun = False
        self._text = ""
        self._logprobs = self._characters = 0  # told so far: of how many tokens, and their characters

    def piece(self, text: str, tokens: Sequence[str], logprobs: Sequence[float]) -> Iterator[dict[str, Any]]:
        """tokens: the text of each id, where logprobs are wanted."""
        wanted = self._asked.wants_logprobs
        if self._chat and not self._begun:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        self._begun = True
        if not text and not (wanted and tokens):
            return
        if self._chat:
            said = {"delta": {"content": text}, "logprobs": _chat_logprobs(tokens, logprobs) if wanted else None}
        else:
            of_tokens = _text_logprobs(tokens, logprobs, self._characters) if wanted else None
            said = {"text": text, "logprobs": of_tokens}
        yield self._chunk(said)
        self._text += text
        self._logprobs += len(tokens)
        self._characters += sum(map(len, tokens))

    def end(self, answer: Answer) -> Iterator[dict[str, Any]]:
        rest = answer.text[len(self._text) :] if answer.text.startswith(self._text) else ""
        yield from self.piece(rest, answer.tokens[self._logprobs :], answer.logprobs[self._logprobs :])
        if self._chat and answer.tool_calls:
            calls = [{"index": index, **call} for index, call in enumerate(_calls(answer))]
            yield self._chunk({"delta": {"tool_calls": calls}})
        yield self._chunk({"delta": {}} if self._chat else {"text": ""}, answer)
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield {**self._head(answer), "choices": [], "usage": answer.usage}

    def _chunk(self, said: dict[str, Any], ended: Answer | None = None) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, **said, "finish_reason": ended.finish_reason if ended else None}
        return {**self._head(ended), "choices": [choice], **_not_obeyed(ended)}

    def _head(self, answer: Answer | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        fingerprint = answer.fingerprint if answer else ""
        return _head(self._asked, kind, self._identity, self._created_s, fingerprint)


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in answer.tool_calls
    ]


def _chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(tokens: Sequence[str], logprobs: Sequence[float], begin: int = 0) -> dict[str, Any]:
    offsets = [begin]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": list(tokens),
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


# --- calls of tools ---------------------------------------------------------------------------------------------------

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


def find_tool_calls(text: str, form: str) -> tuple[str, list[ToolCall]]:
    """(what the policy says beside its calls, the calls). One that is no JSON with a name stays text, and is no call.

    form: of ``endpoint.tool_calls``.
    """
    if form == "json":
        call = _call(text)
        return ("", [call]) if call is not None else (text, [])
    if form != "hermes" or TOOL_CALL not in text:
        return text, []
    calls = [_call(found) for found in _tagged(text)]
    read = [call for call in calls if call is not None]
    if not read or len(read) < len(calls):
        return text, []  # half of what it wanted would be another plan than its own
    return text.partition(TOOL_CALL)[0].strip(), read


def _tagged(text: str) -> Iterator[str]:
    """Content of each tag, up to its end or the text's; in linear time, since a policy may write any text."""
    at = text.find(TOOL_CALL)
    while at >= 0:
        end = text.find(TOOL_CALL_END, at)
        end = len(text) if end < 0 else end
        yield text[at + len(TOOL_CALL) : end].strip()
        at = text.find(TOOL_CALL, end)


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not _is_text(written + found["name"]):  # what the policy wrote as \\ud800 cannot be sent
        return None
    return ToolCall(id=f"call_{secrets.token_hex(8)}", function=FunctionCall(name=found["name"], arguments=written))


def _is_text(text: str) -> bool:
    """Whether UTF-8 can say it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
