"""What leaves an engine: results on their way to the worker, and the word that no more will come.

Owns: results nobody has taken yet, and what a caller of the engine may wait for. Invariant: each result is taken once;
what ends the serving of an engine ends every wait on it, by name. All of it on one asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from workers.errors import EngineCrashedError, StreamError
from workers.generation.engine import Result


class Delivery:
    """Of one engine, which ``put``s. serving: what produces results, from the start of the engine to its close."""

    def __init__(self) -> None:
        self.serving: asyncio.Future[None] | None = None
        self._ready: list[Result] = []
        self._has_ready = asyncio.Event()

    def put(self, *results: Result) -> None:
        if results:
            self._ready += results
            self._has_ready.set()

    async def take(self) -> list[Result]:
        """All there are, at least one. Raises EngineCrashedError when serving has ended, after its last results."""
        await self.until(self._has_ready.wait())
        ready, self._ready = self._ready, []
        self._has_ready.clear()
        return ready

    async def until(self, awaited: Awaitable[object]) -> None:
        """Wait for ``awaited`` or for the end of serving, whichever is first; then ``awaited`` is over, if need be
        cancelled. Raises what it raises; EngineCrashedError: serving has ended.
        """
        waiting = asyncio.ensure_future(awaited)
        try:
            if self.serving is None:
                raise ValueError("the engine was not started")
            await asyncio.wait({waiting, self.serving}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                cause = None if self.serving.cancelled() else self.serving.exception()
                raise EngineCrashedError(_why(cause)) from cause
            waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def _why(cause: BaseException | None) -> str:
    """An error of ours says it; a bug is named."""
    if cause is None:
        return "the engine was closed"
    return str(cause) if isinstance(cause, StreamError) else f"the engine ended: {cause!r}"
