"""The endpoint over HTTP: OpenAI's calls, and those by which an agent gets its work and says what came of it.

    POST /v1/chat/completions, /v1/completions; GET /v1/models         with the key of a session, or with the run's
         /sessions/NAME/v1/...                                         the same, for clients that cannot change the key
    POST /v1/sessions                 lease a sample                   with the run's key
    GET  /v1/sessions/NAME            how it stands                    with the run's key, or the session's own
    POST /v1/sessions/NAME/reward     {"reward": 1.0}
    POST /v1/sessions/NAME/end        {"reward": 1.0}, or nothing: the sample is sealed
    POST /v1/sessions/NAME/fail       {"reason": "..."}: another agent gets it
    POST /v1/sessions/NAME/heartbeat  it still works

Owns: routes, keys, the form of answers. Never: what follows (engine.py), the form of OpenAI's (messages.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from transport.contracts.messages import OwnPrompt
from transport.contracts.types import Finite, RunName, Struct, is_evaluation
from transport.errors import TransientError
from transport.process.files import replace
from transport.process.http import (
    HEALTH,
    BodyLimit,
    Guard,
    answer,
    listen,
    listen_again,
    presented_key,
    serve_http,
    write_address,
)
from transport.process.secret import Purpose, derive, own_secret
from workers.endpoint.engine import SessionEngine
from workers.endpoint.messages import (
    Answer,
    ChatRequest,
    Chunks,
    CompletionRequest,
    chat_answer,
    decode,
    refused,
    text_answer,
)
from workers.endpoint.sessions import End, Session
from workers.endpoint.stream import TurnStream
from workers.errors import EndpointRefusedError, EndpointSetupError

log = structlog.get_logger(__name__)

BODY = BodyLimit(8 * 1024 * 1024, 30.0)
"""A conversation of a million tokens; a body is held until it is encoded."""
KEEPALIVE_S = 15.0
"""Between two comments in a stream of events whose turn is not ready: proxies close what is silent for a minute."""
KEY_WANTED = (
    "the API key is missing or wrong: give a session's own key (POST /v1/sessions), or the run's, "
    "which is in the file endpoint.key of the run's directory"
)
CODES = {401: "invalid_api_key", 408: "timeout", 413: "request_too_large", 404: "not_found", 503: "unavailable"}
T = TypeVar("T")


class Lease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/sessions``. group: only a sample of this one will do.  prompt: the agent's own, for a sample
    of its group.  wait_s: instead of endpoint.wait_s.
    """

    group: str = ""
    prompt: OwnPrompt | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None


class Ending(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``end``. reward: as with ``reward``; without one, the run's reward function scores the sample."""

    reward: Finite | None = None


class RewardBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reward: Finite


class Failure(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Entry(Struct, frozen=True, kw_only=True):
    """What an agent is told of a prompt's row."""

    question: str = ""
    answer: Any = None
    metadata: Any = None


def run_key(secret: bytes, run: RunName) -> str:
    """What opens every session of a run. secret: shared with its other machines, b"" on loopback: then of this user's
    own secret, as no other user of this host may lease samples and reward them.

    Raises SecretError: none is set, and this user cannot have one.
    """
    return derive((secret or own_secret()) + run.encode(), Purpose.ENDPOINT)


class EndpointServer:
    """A Listener (engine.py). address_file, key_file: of the run's directory; written when it listens."""

    def __init__(
        self, engine: SessionEngine, *, host: str, port: int, key: str, address_file: Path, key_file: Path
    ) -> None:
        self._engine = engine
        self._host = host
        self._port = port
        self._key = key
        self._address_file = address_file
        self._key_file = key_file
        self._serving: asyncio.Task[None] | None = None
        self.base_url = ""

    async def start(self) -> None:
        """Raises EndpointSetupError."""
        try:
            again = None if self._port else listen_again(self._host, self._address_file)
            listener = again or listen(self._host, self._port)
        except OSError as error:
            raise EndpointSetupError(
                f"endpoint.host {self._host} and port {self._port} cannot be listened on: {error.strerror}; "
                "choose another endpoint.port, or 0 for a free one"
            ) from error
        self._address_file.parent.mkdir(parents=True, exist_ok=True)
        replace(self._key_file, self._key, mode=0o600)
        self.base_url = f"http://{write_address(listener, self._address_file)}/v1"
        self._serving = asyncio.create_task(serve_http(self.app(), listener), name="endpoint http")
        log.info("endpoint", base_url=self.base_url)

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    def app(self) -> Guard:
        calls: list[Route] = []
        for base in ("/v1", "/sessions/{name}/v1"):
            calls += [
                Route(f"{base}/models", self._models),
                Route(f"{base}/models/{{model:path}}", self._model),
                Route(f"{base}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{base}/completions", self._complete, methods=["POST"]),
                Route(f"{base}/responses", _no_responses, methods=["POST", "GET"]),
            ]
        work = "/v1/sessions"
        routes = [
            *calls,
            Route(HEALTH, self._health),
            Route(work, self._lease, methods=["POST"]),
            Route(work, self._overview, methods=["GET"]),
            Route(f"{work}/{{name}}", self._state, methods=["GET"]),
            Route(f"{work}/{{name}}/reward", self._reward, methods=["POST"]),
            Route(f"{work}/{{name}}/end", self._end, methods=["POST"]),
            Route(f"{work}/{{name}}/fail", self._fail, methods=["POST"]),
            Route(f"{work}/{{name}}/heartbeat", self._heartbeat, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _name_error})
        return Guard(
            app, host=self._host, opens=self._opens, body_limit=BODY, key_wanted=KEY_WANTED, refuse=error_answer
        )

    # -- keys

    def _is_run_key(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._key.encode())

    def _opens(self, key: str) -> bool:
        """Also the key of a session that has ended: it is told so."""
        return self._is_run_key(key) or self._engine.sessions.knows(key)

    def _session(self, request: HttpRequest) -> Session | None:
        """The session that a request belongs to, by its path or its key; None: the run's key and no session.

        Raises EndpointRefusedError.
        """
        name, key = request.path_params.get("name", ""), _key(request)
        if self._is_run_key(key):
            return self._engine.sessions.of_name(name) if name else None
        session = self._engine.sessions.of_key(key)
        if session is None or name not in ("", session.name):
            raise EndpointRefusedError(403, "other_session", "this is the key of another session")
        return session

    def _named(self, request: HttpRequest) -> Session:
        session = self._session(request)
        assert session is not None  # its path has a name
        self._engine.heard(session)
        return session

    def _owner(self, request: HttpRequest) -> None:
        if not self._is_run_key(_key(request)):
            raise EndpointRefusedError(403, "run_key_wanted", "this needs the run's key, not a session's")

    # -- OpenAI's calls

    async def _health(self, request: HttpRequest) -> Response:
        return answer({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        return answer({"object": "list", "data": [self._card(self._engine.model)]})

    async def _model(self, request: HttpRequest) -> Response:
        name = request.path_params["model"]
        if self._engine.model not in ("*", name):
            return error_answer(404, f"the model {name!r} is not served here", code="model_not_found")
        return answer(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "streamrl"}

    async def _chat(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            asked, session = await _body(request, ChatRequest), self._session(request)
            if asked.stream:
                stream = TurnStream()
                return self._events(asked, self._engine.chat(session, asked, stream), stream)
            turn = self._engine.chat(session, asked)
            return answer(chat_answer(asked, await _while_connected(request, turn)))
        return response.made

    async def _complete(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            asked, session = await _body(request, CompletionRequest), self._session(request)
            if asked.stream:
                stream = TurnStream()
                return self._events(asked, self._engine.complete(session, asked, stream), stream)
            turn = self._engine.complete(session, asked)
            return answer(text_answer(asked, await _while_connected(request, turn)))
        return response.made

    def _events(
        self,
        asked: ChatRequest | CompletionRequest,
        turn: Coroutine[Any, Any, Answer],
        stream: TurnStream,
    ) -> Response:
        """Server-sent events. Starlette ends them when the client has gone, and the turn is called off. An error after
        the head is an event, too.
        """

        async def events() -> AsyncIterator[bytes]:
            working = asyncio.create_task(turn, name="asked")
            working.add_done_callback(lambda _: stream.changed.set())
            chunks = Chunks(asked)
            try:
                while not working.done():
                    try:
                        async with asyncio.timeout(KEEPALIVE_S):
                            await stream.changed.wait()
                    except TimeoutError:
                        yield b": waiting\n\n"
                    if (piece := stream.take()) is not None:
                        tokens = self._engine.token_texts(piece.ids) if asked.wants_logprobs else ()
                        for chunk in chunks.piece(piece.text, tokens, piece.logprobs):
                            yield _event(chunk)
                with _answering(refusal := _Refusal()):
                    for chunk in chunks.end(working.result()):
                        yield _event(chunk)
                    yield b"data: [DONE]\n\n"
                    return
                yield b"data: " + bytes(refusal.made.body) + b"\n\n"
            finally:
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

        return StreamingResponse(events(), media_type="text/event-stream")

    # -- work

    async def _lease(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            self._owner(request)
            asked = await _body(request, Lease)
            if asked.prompt is not None and not asked.prompt.question.strip():
                raise refused("the question of a prompt of your own is empty", param="prompt.question")
            leasing = self._engine.lease(group=asked.group, prompt=asked.prompt, wait_s=asked.wait_s)
            return answer(self._work(await _while_connected(request, leasing)), 201)
        return response.made

    def _work(self, session: Session) -> dict[str, Any]:
        request = session.request
        own = self._engine.sessions.own_prompts.get(request.group_id)
        entry = own or msgspec.json.decode(request.entry or b"{}", type=Entry)
        root = self.base_url.removesuffix("/v1")
        return {
            "id": session.name,
            "key": session.key,
            "base_url": self.base_url,
            "session_url": f"{root}/sessions/{session.name}/v1",
            "model": self._engine.model,
            "group": request.group_id,
            "group_size": self._engine.sessions.group_size,
            "sample": session.seat.sample,
            "lease": session.seat.leases,
            "evaluation": is_evaluation(request.group_id),
            "prompt": own.question if own else request.prompt_text,
            "prompt_id": own.id if own else None,
            "question": entry.question,
            "answer": entry.answer,
            "metadata": entry.metadata,
            "max_tokens": session.room,
        }

    async def _overview(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            self._owner(request)
            sessions = self._engine.sessions
            return answer(
                {
                    "waiting": len(sessions.seats),
                    "agents_waiting": self._engine.num_waiting,
                    "group_size": sessions.group_size,
                    "open": [self._standing(one) for one in sessions.open.values()],
                }
            )
        return response.made

    async def _state(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            return answer(self._standing(self._named(request)))
        return response.made

    def _standing(self, session: Session) -> dict[str, Any]:
        conversation = session.conversation
        longest = conversation.longest
        turns = {id(one): one.turn for end in self._engine.trained(session) for one in end.branch}
        trained = sum(len(turn.response_ids) for turn in turns.values())
        return {
            "id": session.name,
            "group": session.request.group_id,
            "sample": session.seat.sample,
            "lease": session.seat.leases,
            "answers": len(conversation.exchanges),
            "branches": conversation.num_branches,
            "policy_tokens": trained,
            "dropped_tokens": conversation.policy_tokens - trained,
            "tokens_left": session.room + len(conversation.opening) - len(conversation.ids(longest)),
            "reward": session.reward,
        }

    async def _reward(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            asked, session = await _body(request, RewardBody), self._named(request)
            session.reward = asked.reward
            return answer({"reward": asked.reward})
        return response.made

    async def _end(self, request: HttpRequest) -> Response:
        """Once more is answered as the first time: the answer may have been lost."""
        with _answering(response := _Refusal()):
            asked = await _body(request, Ending)
            if (end := self._sealed(request)) is not None:
                if asked.reward not in (None, end.reward):
                    earned = "the run's function scores it" if end.reward is None else f"its reward is {end.reward:g}"
                    raise refused(f"it was sealed before, and {earned}", param="reward", status=409)
                return answer({"sealed": True, "tokens": end.tokens})
            session = self._named(request)
            if asked.reward is not None:
                session.reward = asked.reward
            standing = self._standing(session)
            end = await self._engine.seal(session)
            return answer({"sealed": True, "tokens": end.tokens, **standing})
        return response.made

    def _sealed(self, request: HttpRequest) -> End | None:
        name, key, sessions = request.path_params["name"], _key(request), self._engine.sessions
        end = sessions.end_of(name)
        return (
            end
            if end is not None and end.sealed and (self._is_run_key(key) or sessions.end_by_key(key) is end)
            else None
        )

    async def _fail(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            asked, session = await _body(request, Failure), self._named(request)
            reason = asked.reason or "it did not say why"
            await self._engine.give_back(session, f"its agent failed: {reason}")
            return answer({"given_back": True})
        return response.made

    async def _heartbeat(self, request: HttpRequest) -> Response:
        with _answering(response := _Refusal()):
            self._named(request)
            return answer({"ok": True})
        return response.made


# --- answers ----------------------------------------------------------------------------------------------------------


async def _no_responses(request: HttpRequest) -> Response:
    return error_answer(
        404,
        "the Responses API is not served here, only chat.completions and completions: call client.chat.completions "
        "(in an agents library, choose its model for chat completions)",
    )


def error_answer(
    status: int, reason: str, headers: dict[str, str] | None = None, *, code: str = "", param: str = ""
) -> Response:
    """As OpenAI's errors are."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": reason, "type": kind, "param": param or None, "code": code or CODES.get(status)}
    return answer({"error": error}, status, headers)


async def _name_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # the only kind it is registered for
    return error_answer(error.status_code, error.detail, dict(error.headers or {}))


class _Refusal:
    """The answer to a request that ``_answering`` ended."""

    made: Response


@contextlib.contextmanager
def _answering(refusal: _Refusal) -> Iterator[None]:
    """What is refused is an answer with the status that the error names."""
    try:
        yield
    except EndpointRefusedError as error:
        headers = {"retry-after": "1"} if error.status == 429 else {}
        refusal.made = error_answer(error.status, str(error), headers, code=error.code, param=error.param)
    except TransientError as error:  # the engine ended: its worker starts again, with other sessions
        refusal.made = error_answer(503, f"the engine ended: {error}", code="engine_failed")


async def _body(request: HttpRequest, kind: type[T]) -> T:
    """What is asked; an empty body leaves out all. To be read before its session is looked up: while it comes, another
    request may end that. Raises EndpointRefusedError.
    """
    return decode(await request.body() or b"{}", kind)


def _key(request: HttpRequest) -> str:
    return presented_key(request.headers.get("authorization", ""))


async def _while_connected(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """``work``, called off when its client goes away: nobody would hear the answer, so it is none of the conversation.

    Raises what it raises; HTTPException: the client has gone.
    """
    working = asyncio.create_task(work, name="asked")
    leaving = asyncio.create_task(_gone(request), name="client")
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HTTPException(499, "the client has gone")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
