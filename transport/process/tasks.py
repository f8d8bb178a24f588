"""Work that goes on beside a block of a coroutine, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def beside(work: Coroutine[object, object, None], *, name: str) -> AsyncGenerator[None]:
    """Run ``work`` as a task while the block lasts. Its own failure ends it alone: the block goes on."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
