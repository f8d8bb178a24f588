"""The service interface over HTTP: ``generate`` and ``update`` of a run that trains nothing (docs/service.md).

Owns: the form of requests and answers, and what a body may hold. Never: what follows (``serving/service.py``); who may
ask (``transport/process/http.py``).

    POST   /generate              prompts; the answer is the stream of their samples, NDJSON, each as it ends
    GET    /generate/{name}       the rest of that stream, ``?from=N``
    POST   /generate/{name}/taken {"upto": N}: the reader has its first N samples
    DELETE /generate/{name}       drop the rest
    POST   /update                weights from a checkpoint, or by their manifest
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from orchestrator.errors import DataError, RefusedError
from orchestrator.prompts.dataset import ChatMessage
from orchestrator.prompts.source import ModelTokenizer, context_limit, load_tokenizer, text_config
from orchestrator.serving.service import Service, StoredPrompt, Ticket
from transport.contracts.messages import UpdateRequest, WeightManifest
from transport.contracts.settings import SamplingSettings, Settings
from transport.contracts.types import SamplingParams
from transport.errors import DECODE_ERRORS, TransientError
from transport.process.http import BodyLimit, answer, number_of

log = structlog.get_logger(__name__)

MAX_GENERATE_BYTES = 32 * 1024 * 1024
"""Of a body with prompts: 10,000 of 500 tokens. One is read at a time, so this bounds what bodies take together."""
BODY_S = 60.0
"""How long a client's prompts may take, from the first byte to the last token id, with the wait for its turn."""
BODY_LIMITS = {"/generate": BodyLimit(MAX_GENERATE_BYTES, BODY_S)}
"""For the guard, by path; any other path has the guard's own small limit."""
MAX_PATH_CHARACTERS = 1024
NO_CONTROL_CHARACTERS = r"^[^\x00-\x1f\x7f]*\Z"
READER_S = 300.0
"""A reader that takes nothing for so long is let go; what it has not taken is kept for when it comes back."""
MAX_WAIT_S = 600.0
NDJSON = "application/x-ndjson"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that the model's chat template makes. chat_template_kwargs: over those of ``data``."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    chat_template_kwargs: dict[str, Any] = {}


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /generate``. What is left out is as in the run's section ``sampling``.

    prompts: each a text, a list of token ids, or {"messages": [...]}.  samples: of each prompt.  id: names the request.
    entries: where the run has an environment, what it is told of each prompt; none: nothing of any.
    acknowledge: the reader says with ``taken`` what it has; else what was sent counts as taken.
    """

    prompts: Annotated[list[str | list[int] | Chat], msgspec.Meta(min_length=1)]
    entries: list[dict[str, Any]] = []
    samples: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    id: str = ""
    max_new_tokens: Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    acknowledge: bool = False


class Taken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``taken``."""

    upto: Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /update``: one of the two. path: of a checkpoint, below the publisher's --weights-dir."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH_CHARACTERS, pattern=NO_CONTROL_CHARACTERS)] = ""
    manifest: WeightManifest | None = None
    wait_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_WAIT_S)] = 120.0


class ServicePrompts:
    """Makes token ids of the prompts of requests, for one model; may be used from several threads.

    Invariant: an accepted prompt fits the model: every id is a word of it, and the response has room.
    """

    def __init__(self, settings: Settings, model_dir: Path) -> None:
        """Raises DataError where the model directory cannot be read."""
        tokenizer = load_tokenizer(model_dir)
        self._tokenizer = ModelTokenizer(tokenizer, settings.data.chat_template_kwargs)
        self._limit = context_limit(settings, model_dir)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        self._vocab_size = int(text_config(model_dir)["vocab_size"])

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
        ids = prompt if isinstance(prompt, list) else self._tokenizer.ids(text, special=isinstance(prompt, str))
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
        if not self._tokenizer.has_template:
            raise DataError(f"prompt {index} has messages, but the model has no chat template: send text or token ids")
        messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
        try:
            text = self._tokenizer.render(messages, prompt.chat_template_kwargs)
        except DataError as error:
            raise DataError(f"prompt {index}: {error}") from error
        self._check_length(index, len(text), room)
        return text

    def _check_length(self, index: int, characters: int, room: int) -> None:
        if characters > room * self._longest_token:
            raise DataError(
                f"prompt {index} has {characters} characters; there is room for {room} tokens, and none is longer than "
                f"{self._longest_token} characters"
            )


@contextmanager
def answering_refusals() -> Iterator[None]:
    """What the service refuses is an answer with the status that it names."""
    try:
        yield
    except RefusedError as error:
        raise HTTPException(error.status, str(error)) from error


class ServiceApi:
    def __init__(self, service: Service, prompts: ServicePrompts, settings: Settings) -> None:
        self._service = service
        self._prompts = prompts
        self._settings = settings
        self._reading = asyncio.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/generate/{name}", self.resume, methods=["GET"]),
            Route("/generate/{name}", self.cancel, methods=["DELETE"]),
            Route("/generate/{name}/taken", self.taken, methods=["POST"]),
            Route("/update", self.update, methods=["POST"]),
        ]

    async def generate(self, request: Request) -> Response:
        with answering_refusals():
            ticket = await self._accept(request)
        return self._stream(ticket, self._service.first_untaken(ticket))

    async def _accept(self, request: Request) -> Ticket:
        """One body at a time: they are the only large things that come in."""
        try:
            async with asyncio.timeout(BODY_S), self._reading:
                asked = await asyncio.to_thread(_decode, await request.body(), Generate)
                name = asked.id or secrets.token_hex(8)
                if NAME.fullmatch(name) is None:
                    reason = "id must be 1 to 64 letters (a-z, A-Z), digits, - _ . beginning with a letter or digit"
                    raise RefusedError(400, reason)
                sampling = sampling_of(asked, self._settings.sampling)
                self._service.check_room(name, len(asked.prompts))
                if asked.entries and len(asked.entries) != len(asked.prompts):
                    reason = f"entries must be one for each of the {len(asked.prompts)} prompts, or none at all"
                    raise RefusedError(400, reason)
                if asked.entries and not self._settings.environment.name:
                    raise RefusedError(400, "entries are for an environment, and the run has none (environment.name)")
                encoded = await self._encode(asked, sampling.max_new_tokens)
                prompts = [
                    msgspec.structs.replace(prompt, entry=msgspec.json.encode(entry).decode())
                    for prompt, entry in zip(encoded, asked.entries or [{}] * len(encoded), strict=True)
                ]
        except TimeoutError as error:
            reason = f"the prompts were not received and tokenised within {BODY_S:.0f} s: send fewer at a time"
            raise HTTPException(408, reason, {"connection": "close"}) from error
        except DataError as error:
            raise RefusedError(400, str(error)) from error
        return await self._service.submit(name, prompts, asked.samples, sampling, acknowledged=asked.acknowledge)

    async def _encode(self, asked: Generate, max_new_tokens: int) -> list[StoredPrompt]:
        """Off the loop. When it takes too long, or the client is gone, the thread ends after the prompt at hand."""
        wanted = threading.Event()
        wanted.set()
        try:
            return await asyncio.to_thread(self._prompts.encode, asked.prompts, max_new_tokens, wanted=wanted)
        finally:
            wanted.clear()

    async def resume(self, request: Request) -> Response:
        ticket = self._find(request)
        untaken = self._service.first_untaken(ticket)
        first = number_of(request.query_params.get("from", str(untaken)))
        if first is None or first > ticket.num_samples:
            raise HTTPException(400, f"from must be a number of a sample, 0 to {ticket.num_samples}")
        if first < untaken:
            raise HTTPException(410, f"samples before {untaken} were taken and are gone")
        return self._stream(ticket, first)

    async def taken(self, request: Request) -> Response:
        ticket = self._find(request)
        upto = _decode(await request.body(), Taken).upto
        with answering_refusals():
            await self._service.take(ticket, upto)
        return answer({"taken": upto}, 202)

    async def cancel(self, request: Request) -> Response:
        ticket = self._find(request)
        await self._service.cancel(ticket)
        return answer({"cancelled": ticket.name}, 202)

    async def update(self, request: Request) -> Response:
        asked = _decode(await request.body(), Update)
        if bool(asked.path) == (asked.manifest is not None):
            raise HTTPException(400, 'name "path" or "manifest", one of them')
        update = UpdateRequest(update=secrets.token_hex(8), path=asked.path, manifest=asked.manifest)
        with answering_refusals():
            try:
                return answer(await self._service.update(update, asked.wait_s))
            except TransientError as error:
                raise HTTPException(503, "the broker does not answer") from error

    def _find(self, request: Request) -> Ticket:
        with answering_refusals():
            return self._service.find(request.path_params["name"])

    def _stream(self, ticket: Ticket, start: int) -> Response:
        headers = {"x-request-id": ticket.name, "x-num-samples": str(ticket.num_samples)}
        return SampleStream(self._service.stream(ticket, start), media_type=NDJSON, headers=headers)


class SampleStream(StreamingResponse):
    """A stream whose reader may be slow, but not for ever."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(READER_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except TimeoutError:
            log.warning("a reader took nothing", seconds=READER_S, path=scope["path"])


T = TypeVar("T")


def _decode(body: bytes, kind: type[T]) -> T:
    """Raises HTTPException 400 that says what is wrong with it."""
    if not body:
        raise HTTPException(400, "the body is empty; it must be JSON, see docs/service.md")
    try:
        return msgspec.json.decode(body, type=kind)
    except (*DECODE_ERRORS, UnicodeDecodeError) as error:
        raise HTTPException(400, f"the body is not what it must be: {error}") from error


def sampling_of(asked: Generate, run: SamplingSettings) -> SamplingParams:
    """The run's sampling with what the request wants otherwise. Raises RefusedError above the run's limit."""
    if asked.max_new_tokens is not None and asked.max_new_tokens > run.max_new_tokens:
        limit = f"max_new_tokens is at most {run.max_new_tokens} here (sampling.max_new_tokens)"
        raise RefusedError(400, f"{limit}: workers keep room for it")
    wanted = {name: getattr(asked, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    return SamplingParams(**{n: getattr(run, n) if value is None else value for n, value in wanted.items()})
