"""What workers say on a broker: events, as they stand on the log and inside a commit, and leases."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from transport.broker import keys
from transport.broker.base import Append, Entry
from transport.contracts.messages import Event, WorkerStatus, encode, worker_status_decoder
from transport.contracts.types import WorkerId
from transport.errors import MessageError


def event_entry(event: Event, **fields: str | int) -> Entry:
    """Of the events log: an event's bytes, and fields that a person can read in redis-cli beside its name."""
    shown = {"event": type(event).__name__} | {name: str(value) for name, value in fields.items()}
    return Entry(fields=shown, payload=encode(event))


def event_append(event: Event, **fields: str | int) -> Append:
    return Append(stream=keys.EVENTS, entry=event_entry(event, **fields))


def read_statuses(leases: Mapping[WorkerId, bytes]) -> dict[WorkerId, WorkerStatus]:
    """What live workers report of themselves; the orchestrator's log names leases that cannot be read."""
    statuses: dict[WorkerId, WorkerStatus] = {}
    for worker, raw in leases.items():
        with suppress(MessageError):
            statuses[worker] = worker_status_decoder.decode(raw)
    return statuses
