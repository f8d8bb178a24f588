"""The service interface over HTTP: ``generate`` and ``update`` of a run that trains nothing (docs/service.md).

Owns: the form of requests and answers, and what a body may hold. Never: what follows (``serving/service.py``); who may
ask (``guard.py``).

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
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from orchestrator.errors import DataError, RefusedError
from orchestrator.observability.http.answers import answer, number_of
from orchestrator.observability.http.guard import BodyLimit
from orchestrator.serving.prompts import ServicePrompts
from orchestrator.serving.request_store import StoredPrompt, Ticket
from orchestrator.serving.service import Service
from transport.contracts.messages import UpdateRequest, WeightManifest
from transport.contracts.settings import SamplingSettings, Settings
from transport.contracts.types import SamplingParams
from transport.errors import TransientError

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


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn, as a chat template reads it."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that the model's chat template makes."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /generate``. What is left out is as in the run's section ``sampling``.

    prompts: each a text, a list of token ids, or {"messages": [...]}.  samples: of each prompt.  id: names the request.
    acknowledge: the reader says with ``taken`` what it has; else what was sent counts as taken.
    """

    prompts: Annotated[list[str | list[int] | Chat], msgspec.Meta(min_length=1)]
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


class ServiceApi:
    """The routes of one service."""

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
        try:
            ticket = await self._accept(request)
        except RefusedError as error:
            raise HTTPException(error.status, str(error)) from error
        return self._stream(ticket, self._service.first_untaken(ticket))

    async def _accept(self, request: Request) -> Ticket:
        """One body at a time: they are the only large things that come in."""
        try:
            async with asyncio.timeout(BODY_S), self._reading:
                asked = await asyncio.to_thread(_decode, await request.body(), Generate)
                name = asked.id or secrets.token_hex(8)
                if NAME.fullmatch(name) is None:
                    raise RefusedError(
                        400, "id must be 1 to 64 letters, digits, - _ . beginning with a letter or digit"
                    )
                sampling = sampling_of(asked, self._settings.sampling)
                self._service.check_room(name, len(asked.prompts))
                prompts = await self._encode(asked, sampling.max_new_tokens)
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
        asked = request.query_params.get("from")
        first = untaken if asked is None else number_of(asked)
        if first is None or first > ticket.num_samples:
            raise HTTPException(400, f"from must be a number of a sample, 0 to {ticket.num_samples}")
        if first < untaken:
            raise HTTPException(410, f"samples before {untaken} were taken and are gone")
        return self._stream(ticket, first)

    async def taken(self, request: Request) -> Response:
        ticket = self._find(request)
        upto = _decode(await request.body(), Taken).upto
        try:
            await self._service.take(ticket, upto)
        except RefusedError as error:
            raise HTTPException(error.status, str(error)) from error
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
        try:
            return answer(await self._service.update(update, asked.wait_s))
        except RefusedError as error:
            raise HTTPException(error.status, str(error)) from error
        except TransientError as error:
            raise HTTPException(503, "the broker does not answer") from error

    def _find(self, request: Request) -> Ticket:
        try:
            return self._service.find(request.path_params["name"])
        except RefusedError as error:
            raise HTTPException(error.status, str(error)) from error

    def _stream(self, ticket: Ticket, start: int) -> Response:
        headers = {"x-request-id": ticket.name, "x-num-samples": str(ticket.num_samples)}
        return SampleStream(self._service.stream(ticket, start), media_type=NDJSON, headers=headers)


class SampleStream(StreamingResponse):
    """A stream whose reader may be slow, but not for ever."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            async with asyncio.timeout(READER_S):
                await send(message)

        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            log.warning("a reader took nothing", seconds=READER_S, path=scope["path"])


T = TypeVar("T")


def _decode(body: bytes, kind: type[T]) -> T:
    """Raises HTTPException 400 that says what is wrong with it."""
    if not body:
        raise HTTPException(400, "the body is empty; it must be JSON, see docs/service.md")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the body is not what it must be: {error}") from error


def sampling_of(asked: Generate, run: SamplingSettings) -> SamplingParams:
    """The run's sampling with what the request wants otherwise. Raises RefusedError above the run's limit."""
    if asked.max_new_tokens is not None and asked.max_new_tokens > run.max_new_tokens:
        raise RefusedError(
            400,
            f"max_new_tokens is at most {run.max_new_tokens} here (sampling.max_new_tokens): workers keep room for it",
        )

    def chosen(wanted: Any, default: Any) -> Any:
        return default if wanted is None else wanted

    return SamplingParams(
        max_new_tokens=chosen(asked.max_new_tokens, run.max_new_tokens),
        temperature=chosen(asked.temperature, run.temperature),
        top_p=chosen(asked.top_p, run.top_p),
        top_k=chosen(asked.top_k, run.top_k),
    )
