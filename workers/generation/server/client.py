"""What the engine needs of an inference server: the calls each kind makes in its own words, and the HTTP they share.

Owns: connections, deadlines, errors. Never: decides when to call, retries. Invariant: whatever the server does, a call
ends with an answer, ServerAnswerError (it answers, but not this) or ServerUnavailableError, of which
ServerUnreachableError says that it never got the call.

Connections are kept: one for each running sample, a few for control. aiohttp, because its parser is C and a sample
costs a third of httpx's CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from transport.contracts.llms import BF16, Fp8
from transport.contracts.types import SamplingParams
from transport.errors import DECODE_ERRORS, PeerUnavailableError
from transport.process.secret import ENGINE_KEY
from workers.errors import ServerAnswerError, ServerUnavailableError, ServerUnreachableError, WeightsMismatchError
from workers.generation.engine import GenerationRequest
from workers.generation.server.loader import LoadOrder, LoadResult

CALL_S = 10.0
"""For what the server answers from memory."""
UPDATE_S = 300.0
"""For new weights: minutes mean that the device or the network hangs."""
CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0
"""Less than the five seconds of uvicorn, or a request meets a connection that is just being closed."""
CONTROL_CONNECTIONS = 8
SHOWN_CHARACTERS = 300
CHUNK_AT_END = 1 << 30
"""Tokens between two chunks: the first comes with the first token, the next with the last one."""
BASE_LABEL = "default"
"""What servers call the weights that they were started with."""

T = TypeVar("T")
E = TypeVar("E", bound="Event")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What an engine on a server is made of.

    directory: the model.  log: where a server of our own writes.  url, key: of a server elsewhere; empty: our own.
    gpus: that it splits the model over.  gpu_share: of their memory, that it may use; 1: what it takes by itself.
    command: program and first arguments of our own server.  slots: samples at once.  stop: texts that end one.
    max_context: tokens, 0: the model's.  drafts: tokens that a server of our own drafts for a sample and step, at most.
    fp8: what a server of our own holds in it.
    keeps_partial: what a sample has got is asked for while it runs.
    startup_s: from start to healthy.  silence_s: without an answer for so long it hangs.  request_s: of one sample.
    """

    directory: Path
    log: Path
    url: str = ""
    key: str = ""
    command: Sequence[str] = ()
    gpus: int = 1
    gpu_share: float = 1.0
    slots: int = 64
    stop: Sequence[str] = ()
    dtype: str = "bfloat16"
    max_context: int = 0
    keeps_partial: bool = False
    drafts: int = 0
    fp8: Fp8 = BF16
    trust_remote_code: bool = False
    startup_s: float = 300.0
    silence_s: float = 30.0
    request_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """tested: versions; the interface has changed between minor ones before, so another is warned of.
    client: makes one of (url, settings, key).  command: starts one of this Python.  flags: what it always gets, and
    ``*_option``: how it is told the model, the samples at once, the tokens of one, over how many GPUs the model is
    split, the share of their memory, and the loader of ours, which a server elsewhere has to have, too.  refusal: why a
    request cannot be answered by any server of this kind, "" when it can.  environment: that our own server needs.  Our
    own server finds its key in the variable ``key_variable``, or as ``key_option`` in the file that its ``--config``
    names; ``socket_option`` is for the path of a socket to listen on instead of a port.  draft_options: how it is told
    to draft so many tokens from the texts it has seen, without a model that drafts.  fp8_kv, fp8_weights: how it is
    told to hold keys and values, or weights, in fp8; weights that come are of ``dtype``, and rounded by the server.
    """

    name: str
    tested: tuple[str, ...]
    client: Callable[[str, ServerSettings, str], ServerClient]
    command: tuple[str, ...]
    model_option: str
    slots_option: str
    context_option: str
    gpus_option: str
    memory_option: str
    loader_option: str
    loader: str
    flags: tuple[str, ...]
    refusal: Callable[[GenerationRequest], str] = lambda request: ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    key_variable: str = ""
    key_option: str = ""
    socket_option: str = ""
    draft_options: Callable[[int], Sequence[str]] = lambda drafts: ()
    fp8_kv: Sequence[str] = ()
    fp8_weights: Sequence[str] = ()

    def arguments(self, settings: ServerSettings) -> list[str]:
        """Of a server of our own."""
        return [
            *(self.model_option, str(settings.directory)),
            *("--dtype", settings.dtype),
            *(self.slots_option, str(settings.slots)),
            *(self.loader_option, self.loader),
            *self.flags,
            *((self.context_option, str(settings.max_context)) if settings.max_context else ()),
            *((self.gpus_option, str(settings.gpus)) if settings.gpus > 1 else ()),
            *((self.memory_option, f"{settings.gpu_share:g}") if settings.gpu_share < 1 else ()),
            *(self.draft_options(settings.drafts) if settings.drafts else ()),
            *(self.fp8_kv if settings.fp8.kv else ()),
            *(self.fp8_weights if settings.fp8.weights else ()),
            *(("--trust-remote-code",) if settings.trust_remote_code else ()),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself. label: of its weights.  kv_tokens: that its KV memory holds.  max_context, slots:
    0 where it has no limit of its own.  processes: that hold the model together.  loaders: those it was started with.
    """

    version: str
    model: str
    model_type: str
    label: str
    kv_tokens: int
    max_context: int = 0
    slots: int = 0
    processes: int = 1
    loaders: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One sample. prompt: its token ids as JSON, encoded once for a group.  label: of the weights it is sent under,
    which divides the server's cache.  chunk_tokens: between two chunks of its stream.
    """

    rid: str
    prompt: msgspec.Raw
    label: str
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    priority: float = 0.0
    chunk_tokens: int = CHUNK_AT_END


class ServedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens ``[start, end)`` were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One event of a sample's stream: everything so far. logprobs: (logprob, token id) of each token.
    finish_reason: stop, length or abort; "" while it goes on.  message: why the server aborted it, if it did so itself.
    """

    token_ids: list[int]
    logprobs: list[tuple[float | None, int]] = field(default_factory=list[tuple[float | None, int]])
    spans: Sequence[ServedSpan] = ()
    finish_reason: str = ""
    message: str = ""
    cached_tokens: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a server answers; fields that we do not read are ignored."""


class _ErrorDetail(Answer, frozen=True, kw_only=True):
    message: str
    code: int = 0


class Event(Answer, frozen=True, kw_only=True):
    """Base of one event of a sample's stream."""

    error: _ErrorDetail | None = None


class ServerClient(ABC):
    """The server at ``url``. ``open`` before the first call, ``close`` at the end.

    url: http://host:port, or unix:path.  key: that it asks for, "" for none.
    """

    def __init__(self, url: str, settings: ServerSettings, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._base = "http://localhost" if self.url.startswith("unix:") else self.url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._max_connections = settings.slots + CONTROL_CONNECTIONS
        self._request_s = settings.request_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self.url.startswith("unix:"):
            path = self.url.removeprefix("unix:")
            connector = aiohttp.UnixConnector(path, limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S)
        else:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def health(self, deadline_s: float) -> None:
        """Have it compute, or be at it."""
        await self._call("GET", "/health", None, deadline_s)

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """Raises ModelError for a server that was started in a way that cannot do."""

    @abstractmethod
    async def kv_use(self) -> float:
        """Part of its KV memory in use, 0 to 1."""

    async def generate(self, sample: SampleRequest) -> AsyncGenerator[Chunk, None]:
        """The chunks of one sample; the last one has a finish_reason. Raises also when the stream ends before it."""
        finished = False
        path, body = self._sample_call(sample)
        async with self._request("POST", path, msgspec.json.encode(body), self._request_s) as response:
            async for chunk in self._chunks(_events(response)):
                finished = finished or bool(chunk.finish_reason)
                yield chunk
        if not finished:
            raise ServerUnavailableError(self.url, "its answer ended before the sample did")

    @abstractmethod
    def _sample_call(self, sample: SampleRequest) -> tuple[str, object]:
        """Path and body that ask for ``sample`` as a stream of events."""

    @abstractmethod
    def _chunks(self, events: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
        """What the data of the events says. Raises ServerAnswerError for an event that reports an error."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Stop one sample: its stream ends with what it has."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop between two steps; running samples keep their KV."""

    @abstractmethod
    async def resume(self) -> None: ...

    async def recover(self) -> None:
        """Undo what a worker that died in the middle of an update left behind."""
        await self.resume()

    @abstractmethod
    async def prompt_logprobs(self, prompt: Sequence[int] | str, start: int) -> list[tuple[int, float | None]]:
        """(token id, its logprob given those before it) of the tokens of a prompt from ``start`` on, at temperature 1.

        prompt: token ids; or a text, which the server encodes.  The first token of a prompt has no logprob. Needs no
        loader of ours: any server of this kind will do. Raises ServerAnswerError, also for an answer of other tokens
        than were asked; ServerUnavailableError.
        """

    async def update(self, order: LoadOrder, label: str, *, served: str, processes: int) -> None:
        """Have ``order`` carried out: running samples wait between two steps meanwhile, and go on from their KV.

        label: of tokens from then on, "" where nothing is loaded.  served: their label until now.
        Raises: WeightsMismatchError: the weights do not fit its model.  PeerUnavailableError: it cannot get them. In
                both cases it serves what it served.  ServerUnavailableError, ServerAnswerError: what it serves is
                unknown.
        """
        await self.pause()
        spoiled = False
        try:
            result = await self.load(order, label or None, processes)
            if result.number != order.number:
                raise ServerAnswerError(self.url, 0, f"its loader reports order {result.number}, not {order.number}")
            spoiled = result.spoiled
            if result.error and label and not spoiled:
                await self.set_label(served)
        finally:
            if not spoiled:  # or its samples would go on under weights that nothing names
                await self.resume()
        if spoiled:
            raise ServerAnswerError(self.url, 0, f"{label} was loaded half-way: {result.error}")
        if result.mismatch:
            raise WeightsMismatchError(result.error)
        if result.error:
            raise PeerUnavailableError(self.url, f"it cannot load {label}: {result.error}")

    @abstractmethod
    async def load(self, order: LoadOrder, label: str | None, processes: int) -> LoadResult:
        """Have the loader carry out ``order`` in each of the server's ``processes``. label: of tokens from then on;
        None: as before.
        """

    @abstractmethod
    async def label(self) -> str:
        """Of the weights that it serves."""

    @abstractmethod
    async def set_label(self, label: str) -> None:
        """Tokens sampled from now on are of weights ``label``."""

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = CALL_S
    ) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        async with self._request(method, path, data, deadline_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, data: bytes | None, deadline_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise ValueError("the client was not opened")
        timeout = aiohttp.ClientTimeout(total=deadline_s, connect=min(CONNECT_S, deadline_s))
        try:
            async with self._session.request(method, self._base + path, data=data, timeout=timeout) as response:
                if response.status != 200:
                    reason = _shown(await response.read())
                    if response.status == 401:
                        reason += f" (it requires a key; set {ENGINE_KEY} for a server that runs elsewhere)"
                    raise ServerAnswerError(self.url, response.status, f"{path}: {reason}")
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachableError(self.url, f"{path}: {error}") from error
        except TimeoutError as error:
            raise ServerUnavailableError(self.url, f"{path} was not done within {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailableError(self.url, f"{path}: {error or type(error).__name__}") from error

    def _checked(
        self, found: list[tuple[int, float | None]], prompt: Sequence[int] | str
    ) -> list[tuple[int, float | None]]:
        """``found``, if these are the last tokens of ``prompt``."""
        if not isinstance(prompt, str) and [token for token, _ in found] != list(prompt[len(prompt) - len(found) :]):
            raise ServerAnswerError(self.url, 0, "logprobs of other tokens than it was asked for")
        return found

    def _read(self, kind: type[T], raw: bytes) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (*DECODE_ERRORS, UnicodeDecodeError) as error:
            raise ServerAnswerError(self.url, 0, f"{error}: {_shown(raw)}") from error

    def _read_field(self, name: str, kind: type[T], raw: bytes) -> T:
        """One field of an object; the others are ignored."""
        fields = self._read(dict[str, msgspec.Raw], raw)
        if name not in fields:
            raise ServerAnswerError(self.url, 0, f"no {name!r}: {_shown(raw)}")
        return self._read(kind, fields[name])

    def _read_event(self, kind: type[E], raw: bytes) -> E:
        event = self._read(kind, raw)
        if event.error is not None:
            raise ServerAnswerError(self.url, event.error.code, event.error.message)
        return event


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Split here: aiohttp's own lines are limited, a long sample's chunk is not."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        searched = max(0, len(buffer) - 1)
        buffer += piece
        while (end := buffer.find(b"\n\n", searched)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            searched = 0
            if event.startswith(b"data: ") and not event.startswith(b"data: [DONE]"):
                yield event.removeprefix(b"data: ")


def _shown(raw: bytes) -> str:
    """The beginning of an answer, for a message."""
    text = raw.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
