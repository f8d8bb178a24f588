"""A TCP proxy that cuts a connection after the server has done what it was asked, and before it can say so."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class CuttingProxy:
    """Forwards to 127.0.0.1:port. ``cut_replies``: how many of the next replies to swallow, closing the connection.

    ``held``: while set, replies are kept back (and the connection stays open), so that a reader can be cancelled.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.cut_replies = 0
        self.num_cut = 0
        self.num_connections = 0
        self.held = False
        self.reply_held = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.num_connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pumps = {
            asyncio.create_task(self._forward(reader, server_writer)),
            asyncio.create_task(self._answer(server_reader, writer)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._pumps -= pumps
        for end in (writer, server_writer):
            end.close()
            with suppress(OSError):
                await end.wait_closed()
        self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.cut_replies:
                self.cut_replies -= 1
                self.num_cut += 1
                return
            if self.held:
                self.reply_held.set()
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()
