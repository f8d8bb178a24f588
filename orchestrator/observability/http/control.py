"""Requests to change the run, over HTTP; the guard lets only those pass that know the key.

Owns: the form of a request and its answer. Never: what may be asked (``loop/control.py``), what follows (the core).

    POST /control/pause | resume | drain | checkpoint
    POST /control/set       {"key": "run.batches", "value": 80}

202 {"asked": ..., "entry": id}: it is on the events log, and applied once ``events_cursor`` in ``/status`` has reached
the entry. 400: it cannot be asked, and why. 503: the broker does not answer; whether it was asked is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from orchestrator.core.observe.view import PipelineView
from orchestrator.errors import ConfigError
from orchestrator.loop.control import REQUESTS, append_event, change
from orchestrator.observability.http.answers import answer
from transport.broker.base import Broker
from transport.contracts.messages import Event
from transport.contracts.settings import Settings
from transport.errors import TransientError

APPEND_S = 5.0
"""How long a client waits for a broker that is away."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``set``."""

    key: str
    value: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | float | str


class ControlRoutes:
    """The route that appends requests to the events log."""

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
