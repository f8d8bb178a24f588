"""SGLang's HTTP interface: one method for each call, typed answers, a deadline on all of them.

Owns: paths, bodies and answers of the tested versions. Never: decides when to call, retries. Invariant: whatever the
server does, a call ends with an answer, ServerAnswerError (it answers, but not this) or ServerUnavailableError, of
which ServerUnreachableError says that it never got the call.

Connections are kept: one for each running sample, a few for control. aiohttp, because its parser is C and a sample
costs a third of httpx's CPU; SGLang itself depends on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from transport.process.secret import ENGINE_KEY
from workers.errors import ServerAnswerError, ServerUnavailableError, ServerUnreachableError
from workers.generation.server.order import LOADER, LoadOrder, outcome_name, to_payload

CALL_S = 10.0
"""For what the server answers from memory."""
UPDATE_S = 300.0
"""For new weights: minutes mean that the device or the network hangs."""
CONNECT_S = 5.0
KEEP_ALIVE_S = 2.0
"""Less than the server's five seconds, or a request meets a connection that is just being closed."""
CONTROL_CONNECTIONS = 8
SHOWN_CHARACTERS = 300
UNIX = "unix:"
UNAUTHORIZED = 401

BASE_LABEL = "default"
"""What SGLang calls the weights that it was started with."""

T = TypeVar("T")
EVENT = b"data: "
LAST_EVENT = b"data: [DONE]"
END_OF_EVENT = b"\n\n"
NEVER = 1 << 30
"""Tokens between two chunks: the first comes with the first token, the next with the last one."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the server says; fields that we do not read are ignored."""


class FinishedBy(Answer, frozen=True, kw_only=True):
    """type: stop, length or abort.  message: why the server aborted, if it did on its own."""

    type: str
    message: str = ""


class ServedSpan(Answer, frozen=True, kw_only=True):
    """Output tokens ``[start, end)`` were sampled under the weights labelled ``version``."""

    version: str
    start: int
    end: int


class MetaInfo(Answer, frozen=True, kw_only=True):
    """output_token_logprobs: (logprob, token id, text) of each output token so far."""

    finish_reason: FinishedBy | None = None
    cached_tokens: int = 0
    weight_versions: tuple[ServedSpan, ...] = ()
    output_token_logprobs: list[tuple[float | None, int, Any]] = msgspec.field(
        default_factory=list[tuple[float | None, int, Any]]
    )


class ErrorDetail(Answer, frozen=True, kw_only=True):
    message: str
    code: int = 0


class Chunk(Answer, frozen=True, kw_only=True):
    """One event of a stream: everything so far, not only what is new."""

    output_ids: list[int] = msgspec.field(default_factory=list[int])
    meta_info: MetaInfo | None = None
    error: ErrorDetail | None = None


class SamplingBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As SGLang names them. top_k: -1 is off.  sampling_seed: honoured only by a deterministic server."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    top_k: int = -1
    sampling_seed: int | None = None
    stream_interval: int = 1


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """input_ids: a JSON array, encoded once for a group.  extra_key: the cache's namespace."""

    rid: str
    input_ids: msgspec.Raw
    sampling_params: SamplingBody
    extra_key: str
    stream: bool
    return_logprob: bool
    priority: int | None = None


class ModelInfo(Answer, frozen=True, kw_only=True):
    """What it serves. weight_version: the label that the last update gave, "default" before any."""

    model_path: str
    weight_version: str = ""
    model_type: str | None = None
    is_generation: bool = True


class ServerInfo(Answer, frozen=True, kw_only=True):
    """What it was started with, and what became of that."""

    version: str
    max_total_num_tokens: int
    context_length: int | None = None
    max_running_requests: int | None = None
    tp_size: int = 1
    enable_priority_scheduling: bool = False
    enable_deterministic_inference: bool = False
    custom_weight_loader: list[str] | None = None


class Load(Answer, frozen=True, kw_only=True):
    """One snapshot of its scheduler. token_usage: part of the KV memory in use, 0 to 1."""

    token_usage: float = 0.0


class Loads(Answer, frozen=True, kw_only=True):
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKind:
    """tested: its versions; the interface has changed between minor ones before, so another is told about.  loader: of
    ours, that it has to have, as ``option`` says.
    """

    name: str
    tested: tuple[str, ...]
    loader: str
    option: str


_encoder = msgspec.json.Encoder()


class SglangClient:
    """The server at ``url``. ``open`` before the first call, ``close`` at the end.

    url: http://host:port, or unix:path.  connections: samples that run at once.  request_s: limit of one sample.
    key: that it asks for, "" for none.
    """

    kind = ServerKind(name="SGLang", tested=("0.5.23",), loader=LOADER, option="--custom-weight-loader")

    def __init__(self, url: str, *, connections: int, request_s: float, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._socket = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else ""
        self._base = "http://localhost" if self._socket else self.url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connections = connections
        self._request_s = request_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        limit = self._connections + CONTROL_CONNECTIONS
        connector = (
            aiohttp.UnixConnector(self._socket, limit=limit, keepalive_timeout=KEEP_ALIVE_S)
            if self._socket
            else aiohttp.TCPConnector(limit=limit, keepalive_timeout=KEEP_ALIVE_S)
        )
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # --- what it is and how it is -------------------------------------------------------------------------------------

    async def health(self, deadline_s: float) -> None:
        """Have it compute a token, or be at it. Raises as everything here."""
        await self._call("GET", "/health", None, deadline_s)

    async def model_info(self) -> ModelInfo:
        return self._read(ModelInfo, await self._call("GET", "/model_info"))

    async def server_info(self) -> ServerInfo:
        return self._read(ServerInfo, await self._call("GET", "/server_info"))

    async def load(self) -> Load:
        """Of its first scheduler; several (data parallel) cannot take new weights together."""
        loads = self._read(Loads, await self._call("GET", "/v1/loads?include=core")).loads
        return loads[0] if loads else Load()

    # --- samples ------------------------------------------------------------------------------------------------------

    async def generate(self, body: GenerateBody) -> AsyncGenerator[Chunk, None]:
        """The chunks of one sample; the last one has a finish_reason. Raises also when the stream ends before it."""
        finished = False
        path, data = self._samples(body)
        async with self._request("POST", path, data, self._request_s) as response:
            async for chunk in self._told(_events(response)):
                if chunk.error is not None:
                    raise ServerAnswerError(self.url, chunk.error.code, chunk.error.message)
                finished = finished or (chunk.meta_info is not None and chunk.meta_info.finish_reason is not None)
                yield chunk
        if not finished:
            raise ServerUnavailableError(self.url, "its answer ended before the sample did")

    def _samples(self, body: GenerateBody) -> tuple[str, bytes]:
        """Where to ask for a sample, and how."""
        return "/generate", _encoder.encode(body)

    async def _told(self, events: AsyncIterator[bytes]) -> AsyncGenerator[Chunk, None]:
        """What the events say."""
        async for event in events:
            yield self._read(Chunk, event)

    async def abort(self, rid: str) -> None:
        """Stop one sample: its stream ends with what it has. The server stops every rid that begins with ``rid``."""
        await self._call("POST", "/abort_request", {"rid": rid})

    # --- weights ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop between two steps; running samples keep their KV. The server's default would abort them."""
        await self._call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})  # without a body it answers 400 and stays paused

    async def begin_update(self) -> None:
        await self._call("POST", "/begin_weight_update", {}, UPDATE_S)

    async def end_update(self) -> None:
        await self._call("POST", "/end_weight_update", {}, UPDATE_S)

    async def update(self, order: LoadOrder, ranks: int, label: str | None) -> None:
        """Have the loader carry out ``order`` in each of its ``ranks`` processes. label: of tokens from then on,
        whatever the loader did; None: as before.
        """
        body = {
            "serialized_named_tensors": [to_payload(order)] * ranks,
            "load_format": LOADER,
            "flush_cache": False,  # refused while samples run; the cache is divided by extra_key
            "abort_all_requests": False,
            "weight_version": label,
        }
        await self._call("POST", "/update_weights_from_tensor", body, UPDATE_S)

    async def outcome(self, number: int) -> bytes:
        """What the loader left to be asked for of the order ``number`` (sglang_loader.py)."""
        raw = await self._call("POST", "/get_weights_by_name", {"name": outcome_name(number), "truncate_size": 1})
        return bytes(self._read(list[int], raw))

    async def label(self, version: str) -> None:
        """Tokens sampled from now on are of weights ``version``."""
        await self._call("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    # --- the wire -----------------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, deadline_s: float = CALL_S
    ) -> bytes:
        data = None if body is None else _encoder.encode(body)
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
                    if response.status == UNAUTHORIZED:
                        reason += f" (it requires a key; set {ENGINE_KEY} for a server that runs elsewhere)"
                    raise ServerAnswerError(self.url, response.status, f"{path}: {reason}")
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServerUnreachableError(self.url, f"{path}: {error}") from error
        except TimeoutError as error:
            raise ServerUnavailableError(self.url, f"{path} was not done within {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailableError(self.url, f"{path}: {error or type(error).__name__}") from error

    def _read(self, kind: type[T], raw: bytes) -> T:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServerAnswerError(self.url, 0, f"{error}: {_shown(raw)}") from error


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Split here: aiohttp's own lines are limited, a long sample's chunk is not."""
    buffer = bytearray()
    async for piece in response.content.iter_any():
        searched = max(0, len(buffer) - 1)
        buffer += piece
        while (end := buffer.find(END_OF_EVENT, searched)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(END_OF_EVENT)]
            searched = 0
            if event.startswith(EVENT) and not event.startswith(LAST_EVENT):
                yield event[len(EVENT) :]


def _shown(raw: bytes) -> str:
    """The beginning of an answer, for a message."""
    text = raw.decode("utf-8", "replace").strip()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
