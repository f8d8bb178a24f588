"""One entry under an id of the test's choice."""

from __future__ import annotations

from transport.broker.base import Broker, Entry, Fence, StreamWrite


async def append_at(
    broker: Broker, log: str, entry: Entry, entry_id: str, *, fence: Fence | None = None, is_queue: bool = False
) -> str | None:
    """Its id, or None when it was already there."""
    write = StreamWrite(stream=log, entries=[(entry_id, entry)], is_queue=is_queue)
    (added,) = await broker.append_many([write], fence=fence)
    return entry_id if added else None
