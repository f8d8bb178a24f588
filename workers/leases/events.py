"""The envelope of an event for the orchestrator: its bytes, and fields that a person can read in redis-cli."""

from __future__ import annotations

from transport.broker import keys
from transport.broker.base import Append, Entry
from transport.contracts.messages import Event, encode


def event_entry(event: Event, **fields: str | int) -> Entry:
    """An entry of the events log. fields: shown beside the name of the event."""
    shown = {"event": type(event).__name__} | {name: str(value) for name, value in fields.items()}
    return Entry(fields=shown, payload=encode(event))


def event_append(event: Event, **fields: str | int) -> Append:
    """The same, as part of a commit."""
    return Append(stream=keys.EVENTS, entry=event_entry(event, **fields))
