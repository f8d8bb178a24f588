"""The broker of a run, for a command that looks into the run or asks something of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from orchestrator.config.run_directory import RunDir
from orchestrator.errors import RunFailedError
from transport.broker.base import Broker
from transport.broker.connect import connect
from transport.broker.embedded import EmbeddedServer
from transport.contracts.settings import Settings
from transport.contracts.types import RunName
from transport.errors import BrokerUnavailableError, RunExistsError

ANSWER_S = 3.0
"""A command is not worth waiting longer for a broker."""


@asynccontextmanager
async def run_broker(rundir: RunDir, settings: Settings, *, live: bool = False) -> AsyncIterator[Broker]:
    """The broker that the run names, its embedded one while that lives, or that one started for as long as we look.

    live: never start it, because a request to a run that is over would wait in it for the next one.
    Raises: RunFailedError: the embedded one is not there and shall not be started.  BrokerUnavailableError.
    """
    url, password = settings.broker.url, settings.broker.password
    async with AsyncExitStack() as stack:
        if not url:
            server = EmbeddedServer(rundir.broker, appendfsync=settings.broker.appendfsync)
            if live:
                server.attach()
            else:
                stack.push_async_callback(server.stop)
                try:
                    await server.start()
                except RunExistsError:
                    server.attach()
            url, password = server.url, server.password
        try:
            name = RunName(settings.run.name)
            broker = await connect(settings.broker, name, url=url, password=password, outage_s=ANSWER_S)
        except BrokerUnavailableError as error:
            if settings.broker.url or not live:
                raise
            raise RunFailedError(f"{rundir.path} is not running: the broker that it brought has ended") from error
        stack.push_async_callback(broker.close)
        yield broker
