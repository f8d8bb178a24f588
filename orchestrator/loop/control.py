"""Requests to a run while it goes on, as events: from the command line, and over HTTP.

    pause        nothing new is dispatched; running samples finish, what is ready is trained
    resume       the end of a pause
    drain        the batch in training finishes, then: last checkpoint, final model, the end (--resume goes on)
    checkpoint   one after the batch in training
    set          another value of a setting in core.settings.CHANGEABLE

What follows from a request, the core decides. Invariant: it travels on the events log, so it is neither lost nor
reordered when the orchestrator is just being started again, and the journal shows it like every other event.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping

import msgspec

from orchestrator.config.checks import violations
from orchestrator.config.schema import FIELDS, expected_type
from orchestrator.config.toml_source import nearest, to_toml
from orchestrator.core.model.settings import CHANGEABLE
from orchestrator.errors import ConfigError
from transport.broker import keys
from transport.broker.base import Broker, Entry
from transport.contracts.messages import (
    CheckpointRequested,
    Event,
    PauseRequested,
    ResumeRequested,
    SettingChanged,
    StopRequested,
    encode,
)
from transport.contracts.settings import Settings

Value: typing.TypeAlias = int | float | str

REQUESTS: Mapping[str, Callable[[], Event]] = {
    "pause": PauseRequested,
    "resume": ResumeRequested,
    "drain": lambda: StopRequested(reason="drained by request"),
    "checkpoint": CheckpointRequested,
}
"""Those without an argument."""


async def append_event(broker: Broker, event: Event, **fields: str) -> str:
    """Put ``event`` on the events log with readable fields. Returns the id of its entry."""
    entry = Entry(fields={"event": type(event).__name__, **fields}, payload=encode(event))
    entry_id = await broker.append(keys.EVENTS, entry)
    assert entry_id is not None  # only an id that we had chosen could be there already
    return entry_id


def change(settings: Settings, now: Mapping[str, Value], num_admitted: int, key: str, value: object) -> SettingChanged:
    """The event that sets ``key``.

    Args:   settings: the run's configuration.  now, num_admitted: what was changed of it since, and the batches that
            were begun (``settings`` and ``num_admitted`` of the status).
    Raises: ConfigError: it cannot change while the run goes on, is of another type, breaks a rule of the settings, or
            comes too late.
    """
    if key not in CHANGEABLE:
        names = ", ".join(CHANGEABLE)
        raise ConfigError(
            f"{key} cannot change while a run goes on{nearest(key, list(CHANGEABLE))}; these can: {names}", key=key
        )
    current = settings
    for changed_key, changed_value in now.items():
        current = _with(current, changed_key, changed_value)
    wanted = _with(current, key, value)
    for violation in violations(wanted):
        first = violation.keys[0]
        raise ConfigError(f"with {key} = {value}: {first} {violation.problem}", key=key)
    if key == "run.batches" and wanted.run.batches < num_admitted:
        raise ConfigError(
            f"run.batches must be at least {num_admitted}: so many batches are begun, and what is begun is trained; "
            "drain the run to end it sooner",
            key=key,
        )
    return SettingChanged(key=key, value=typing.cast("Value", value))


def _with(settings: Settings, key: str, value: object) -> Settings:
    section, _, name = key.partition(".")
    try:
        converted = msgspec.convert(value, FIELDS[key].type)
    except msgspec.ValidationError:
        shown = to_toml(value) if isinstance(value, int | float | str | bool) else str(value)
        raise ConfigError(f"{key} must be {expected_type(key)}, not {shown}", key=key) from None
    replaced = msgspec.structs.replace(getattr(settings, section), **{name: converted})
    return msgspec.structs.replace(settings, **{section: replaced})
