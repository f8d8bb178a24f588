"""An event loop in a thread of its own, so that plain blocking code can use the asyncio parts of this program.

Owns: the thread and the loop. Invariant: no call waits longer than its deadline, also when it was interrupted, and no
task outlives ``close``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from workers.errors import ClientTimeoutError

T = TypeVar("T")

CLOSE_S = 5.0


class LoopThread:
    """A daemon thread: a program that ends without closing it is not held up.

    limit_s: what a call may take beyond what it waits for.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T], *, what: str, wait_s: float = 0.0) -> T:
        """The result of ``work``. Raises ClientTimeoutError, which names ``what``, when it takes too long."""
        future = asyncio.run_coroutine_threadsafe(_limited(work, what, wait_s + self._limit_s), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C too: the caller is gone, so its work ends
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs and end the thread. Doing so twice is no error."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()


async def _limited(work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise ClientTimeoutError(f"{what}: not done after {timeout_s:.1f} s") from None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
