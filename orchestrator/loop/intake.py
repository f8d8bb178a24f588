"""Deliveries become events: the events log, the clock, the leases, the broker's memory.

Owns: the loops that read. Never: decides; whatever they see goes into the inbox as an event. Invariant: the events log
is read in order and each entry enters the inbox once, with the cursor that follows it; one that is not an event, or on
which the core once failed, never does: it is logged, and kept among the dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

import structlog

from orchestrator.errors import EventFailedError
from transport.broker import keys
from transport.broker.base import Broker, Commit, Entry, Fence
from transport.broker.entries import buried
from transport.broker.lua import MAX_DEAD_LETTERS
from transport.contracts.messages import BrokerUsage, Event, Tick, encode, event_decoder
from transport.errors import MessageError

log = structlog.get_logger(__name__)

READ_COUNT = 512
READ_WAIT_S = 1.0
GATHER_S, MAX_GATHER_S = 0.003, 0.008
"""For each event of a read, how long to wait before the next one, and at most. An event that comes alone is read at
once, and delays only those that follow it closely; where hundreds come a second, one read brings several: a round trip,
and one for the commands, cost more than deciding on what they bring."""
TICK_S = 0.5
USAGE_S = 2.0
MAX_BURIED = 1000
"""Bad entries that one process keeps, because a writer of bad entries writes many. The others are only counted."""
MAX_EVIDENCE_BYTES = 16 * 1024
"""Kept of one bad entry: enough for any event."""


class Arrival(NamedTuple):
    """An event and, if it came from the events log, the cursor to go on from after it."""

    event: Event
    cursor: str | None = None


Inbox = asyncio.Queue[Arrival]
"""Bounded: when the core is behind, the events wait in the broker, where they are safe and can be seen."""


def new_inbox() -> Inbox:
    return asyncio.Queue(maxsize=4 * READ_COUNT)


async def read_events(broker: Broker, inbox: Inbox, cursor: str) -> None:
    """Forward the events log from ``cursor`` on, forever, except what is not an event or was buried before."""
    passed_over = await _buried_events(broker)
    num_buried = 0
    while True:
        entries = await broker.read(keys.EVENTS, cursor, count=READ_COUNT, wait_s=READ_WAIT_S)
        for entry in entries:
            cursor = entry.entry_id
            if cursor in passed_over:
                log.warning("skipped an event that is among the dead letters", entry=cursor)
                continue
            try:
                event = event_decoder.decode(entry.entry.payload)
            except MessageError as error:
                num_buried += 1
                log.warning("skipped an entry that is not an event", entry=cursor, error=str(error), so_far=num_buried)
                if num_buried <= MAX_BURIED:
                    await _bury(broker, cursor, entry.entry, str(error))
                continue
            await inbox.put(Arrival(event, cursor))
        if 0 < len(entries) < READ_COUNT:
            await asyncio.sleep(min(GATHER_S * len(entries), MAX_GATHER_S))


async def burying(deciding: Coroutine[Any, Any, None], broker: Broker) -> None:
    """``deciding``; if the core fails on an event of the log, bury that event, so that the next start skips it.

    Source: ours. The event did not reach the journal, so without this it would be read, and fail, at every start.
    """
    try:
        await deciding
    except EventFailedError as error:
        log.error("the core failed on an event", entry=error.entry_id, exc_info=error)
        if error.entry_id:
            entry = Entry(fields={"event": type(error.event).__name__}, payload=encode(error.event))
            await _bury(broker, error.entry_id, entry, str(error.__cause__))
        raise


async def _bury(broker: Broker, entry_id: str, entry: Entry, reason: str) -> None:
    """Put an entry of the events log among the dead letters; the log keeps it."""
    fields, room = dict[str, str](), MAX_EVIDENCE_BYTES
    for name, value in entry.fields.items():
        room -= len(name) + len(value)
        if room >= 0:
            fields[name] = value
    evidence = Entry(fields=fields, payload=entry.payload[:MAX_EVIDENCE_BYTES])
    await broker.append(keys.DEAD, buried(keys.EVENTS, entry_id, reason, evidence))


async def _buried_events(broker: Broker) -> frozenset[str]:
    letters = await broker.dead_letters(count=MAX_DEAD_LETTERS)
    return frozenset(letter.entry_id for letter in letters if letter.queue == keys.EVENTS)


async def tick(inbox: Inbox) -> None:
    """Report to the core that time passes, forever."""
    while True:
        await asyncio.sleep(TICK_S)
        await inbox.put(Arrival(Tick()))


async def watch_usage(broker: Broker, fence: Fence, inbox: Inbox) -> None:
    """Report to the core how many bytes of rows the broker retains, when that changes, forever.

    It asks in a fenced step, so that an orchestrator that was replaced learns of it soon, even with nothing to write.
    Raises FencedError.
    """
    last = -1
    while True:
        retained = (await broker.commit(Commit(fence=fence))).retained_bytes
        if retained != last:
            await inbox.put(Arrival(BrokerUsage(retained_bytes=retained)))
            last = retained
        await asyncio.sleep(USAGE_S)
