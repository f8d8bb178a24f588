"""What can be asked over HTTP, and the answers.

Invariant: an answer costs no broker round trip, so that asking often cannot slow the run; every route requires the key
unless the guard lists it as open.

    GET /health           200 while the orchestrator decides and the broker answers, else 503; JSON
    GET /status           what the run is doing now (the form is in status.py), and ``age_s``; JSON
    GET /history          what the live page draws of the past (page_history.py); JSON
    GET /batches?from=N   lines N, N+1, ... of metrics.jsonl: {"from": N, "batches": [...]}; JSON
    GET /metrics          the same numbers for Prometheus
    GET /                 the live page, static files: open, and empty until it is given the key
    POST /control/pause | resume | drain | checkpoint
    POST /control/set     {"key": "run.batches", "value": 80}
    POST /generate, /update   see serving/http.py

A request to change the run is answered with 202 {"asked": ..., "entry": id}: it is on the events log, and applied once
``events_cursor`` in ``/status`` has reached the entry. 400: it cannot be asked, and why. 503: the broker does not
answer, and whether the request was taken is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from orchestrator.core.observe.view import PipelineView
from orchestrator.errors import ConfigError
from orchestrator.loop.control import REQUESTS, append_event, change
from orchestrator.observability.http.answers import answer, name_error, number_of
from orchestrator.observability.http.exposition import exposition
from orchestrator.observability.http.guard import BodyLimit, Guard
from orchestrator.observability.http.status import StatusBoard
from orchestrator.observability.metrics_file import BatchLines
from transport.broker.base import Broker
from transport.contracts.messages import Event
from transport.contracts.settings import Settings
from transport.errors import TransientError

HEALTHY_AGE_S = 5.0
"""A status is made twice a second; one that is older says that deciding or the broker stands still."""
MAX_BATCHES = 1000
"""Lines in one answer; a page asks on from where the answer ended."""
STATIC = Path(str(files("orchestrator.observability.http") / "static"))


class Api:
    """The read-only routes over one board."""

    def __init__(self, board: StatusBoard, metrics: Path, page_history: Callable[[], Mapping[str, Any]]) -> None:
        """metrics: metrics.jsonl.  page_history: the answer to /history, made when it is asked for."""
        self._board = board
        self._lines = BatchLines(metrics)
        self._page_history = page_history

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/status", self.status),
            Route("/history", self.history),
            Route("/batches", self.batches),
            Route("/metrics", self.metrics),
        ]

    async def health(self, request: Request) -> Response:
        age_s = self._board.age_s
        healthy = age_s <= HEALTHY_AGE_S
        reason = "" if healthy else f"no status for {age_s:.0f} s: the broker does not answer, or deciding stands still"
        return answer({"healthy": healthy, "reason": reason}, 200 if healthy else 503)

    async def status(self, request: Request) -> Response:
        if not self._board.latest:
            raise HTTPException(503, "the run is starting")
        return answer({**self._board.latest, "age_s": round(self._board.age_s, 1)})

    async def history(self, request: Request) -> Response:
        return answer(self._page_history())

    async def batches(self, request: Request) -> Response:
        first = number_of(request.query_params.get("from", "0"))
        if first is None:
            raise HTTPException(400, "from must be a number of a line, from 0")
        lines = await asyncio.to_thread(self._lines.read, first, MAX_BATCHES)
        return answer({"from": first, "batches": lines})

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._board.latest), media_type=CONTENT_TYPE_PLAIN_0_0_4)


# --- requests to change the run ---------------------------------------------------------------------------------------

APPEND_S = 5.0
"""How long a client waits for a broker that is away."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``set``."""

    key: str
    value: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | float | str


class ControlRoutes:
    """The route that appends requests to the events log; what may be asked is in ``loop/control.py``."""

    def __init__(self, broker: Broker, settings: Settings, view: Callable[[], PipelineView]) -> None:
        """view: the run as it is now."""
        self._broker = broker
        self._settings = settings
        self._view = view

    def routes(self) -> list[Route]:
        return [Route("/control/{request}", self.ask, methods=["POST"])]

    async def ask(self, request: Request) -> Response:
        name = request.path_params["request"]
        event = await self._event(name, request)
        try:
            async with asyncio.timeout(APPEND_S):
                entry_id = await append_event(self._broker, event, by="http")
        except (TimeoutError, TransientError) as error:
            raise HTTPException(503, "the broker does not answer") from error
        return answer({"asked": name, "entry": entry_id}, 202)

    async def _event(self, name: str, request: Request) -> Event:
        if name in REQUESTS:
            return REQUESTS[name]()
        if name != "set":
            raise HTTPException(404, f"there is no {name!r}; there are {', '.join([*REQUESTS, 'set'])}")
        try:
            wanted = msgspec.json.decode(await request.body(), type=Change)
            view = self._view()
            return change(self._settings, view.settings, view.num_admitted, wanted.key, wanted.value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            raise HTTPException(400, str(error)) from error


# --- all of it --------------------------------------------------------------------------------------------------------


def build_app(
    routes: Sequence[BaseRoute], *, host: str, key: str, body_limits: Mapping[str, BodyLimit] | None = None
) -> ASGIApp:
    """``routes`` and the live page, behind the guard, whose arguments the others are."""
    page = Mount("/", StaticFiles(directory=STATIC, html=True))
    app = Starlette(routes=[*routes, page], exception_handlers={HTTPException: name_error})
    return Guard(app, host=host, key=key, open_paths=page_paths(), body_limits=body_limits)


def page_paths() -> list[str]:
    """Of the files that make the live page."""
    return ["/", *(f"/{file.relative_to(STATIC).as_posix()}" for file in STATIC.rglob("*") if file.is_file())]
