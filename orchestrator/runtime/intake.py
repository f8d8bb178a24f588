"""Deliveries become events: the events log, the clock, the leases, the broker's memory.

Owns: the loops that read. Never: decides; whatever they see goes into the inbox as an event. Invariant: the events log
is read in order and each entry enters the inbox once, with the cursor that follows it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import structlog

from transport.broker import keys
from transport.broker.base import Broker
from transport.errors import MessageError
from transport.messages import BrokerUsage, Event, Tick, event_decoder

log = structlog.get_logger(__name__)

READ_COUNT = 512
READ_WAIT_S = 1.0
GATHER_S, MAX_GATHER_S = 0.003, 0.008
"""For each event of a read, how long to wait before the next one, and at most. An event that comes alone is read at
once, and delays only those that follow it closely; where hundreds come a second, one read brings several: a round trip,
and one for the commands, cost more than deciding on what they bring."""
TICK_S = 0.5
USAGE_S = 2.0


class Arrival(NamedTuple):
    """An event and, if it came from the events log, the cursor to go on from after it."""

    event: Event
    cursor: str | None = None


Inbox = asyncio.Queue[Arrival]
"""Bounded: when the core is behind, the events wait in the broker, where they are safe and can be seen."""


def new_inbox() -> Inbox:
    return asyncio.Queue(maxsize=4 * READ_COUNT)


async def read_events(broker: Broker, inbox: Inbox, cursor: str) -> None:
    """Forward the events log from ``cursor`` on, forever. A message that cannot be read is counted and passed over."""
    while True:
        entries = await broker.read(keys.EVENTS, cursor, count=READ_COUNT, wait_s=READ_WAIT_S)
        for entry in entries:
            cursor = entry.entry_id
            try:
                event = event_decoder.decode(entry.entry.payload)
            except MessageError as error:
                log.warning("unreadable event", entry=entry.entry_id, fields=dict(entry.entry.fields), error=str(error))
                continue
            await inbox.put(Arrival(event, cursor))
        if 0 < len(entries) < READ_COUNT:
            await asyncio.sleep(min(GATHER_S * len(entries), MAX_GATHER_S))


async def tick(inbox: Inbox) -> None:
    """Tell the core that time passes, forever."""
    while True:
        await asyncio.sleep(TICK_S)
        await inbox.put(Arrival(Tick()))


async def watch_usage(broker: Broker, inbox: Inbox) -> None:
    """Tell the core how many bytes of rows the broker retains, when that changes, forever."""
    last = -1
    while True:
        retained = await broker.retained_bytes()
        if retained != last:
            await inbox.put(Arrival(BrokerUsage(retained_bytes=retained)))
            last = retained
        await asyncio.sleep(USAGE_S)
