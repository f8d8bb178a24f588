"""``streamrl-orchestrator pause | resume | drain | checkpoint | set``: ask a running run, and wait for its answer.

Invariant: it returns only once the orchestrator has applied the request, and says so when it could not take it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.cli.run_broker import run_broker
from orchestrator.config.run_directory import find_run
from orchestrator.config.toml_source import parse_override, to_toml
from orchestrator.errors import RunFailedError
from orchestrator.loop.control import REQUESTS, append_event, change
from transport.broker import keys
from transport.broker.base import Broker, parse_entry_id
from transport.contracts.messages import Event
from transport.contracts.settings import Settings
from transport.errors import TransientError

HEARD_S = 15.0
"""How long an orchestrator may take to apply a request; it does so in milliseconds, and is restarted in seconds."""
POLL_S = 0.1

SAID = {
    "pause": "paused: running samples finish, nothing new is dispatched; go on with: streamrl-orchestrator resume {}",
    "resume": "it goes on",
    "drain": "draining: what is under way finishes and is saved, then the run ends",
    "checkpoint": "a checkpoint follows the batch in training",
}

Status = Mapping[str, Any]
MakeEvent = Callable[[Settings, Status], Event]


def main(run_dir: Path, request: str, broker_url: str | None = None) -> int:
    """Ask for one of REQUESTS. Returns 0 once it is applied. Raises ConfigError, RunFailedError, StreamError."""
    asyncio.run(_ask(run_dir, broker_url, lambda settings, status: REQUESTS[request](), ends=request == "drain"))
    print(SAID[request].format(run_dir))
    return 0


def main_set(run_dir: Path, assignment: str, broker_url: str | None = None) -> int:
    """Set ``section.key=value``. Returns 0 once it holds."""
    wanted = parse_override(assignment)
    value = wanted.text if wanted.text is not None and not isinstance(wanted.value, int | float | str) else wanted.value
    status = asyncio.run(
        _ask(
            run_dir,
            broker_url,
            lambda settings, status: change(settings, status["settings"], status["num_admitted"], wanted.key, value),
        )
    )
    if status["settings"][wanted.key] != value:
        raise RunFailedError(
            f"{wanted.key} was not taken: the run is at its end ({status['finish_reason'] or 'finishing'})"
        )
    print(f"{wanted.key} = {to_toml(status['settings'][wanted.key])} from now on")
    return 0


async def _ask(run_dir: Path, broker_url: str | None, make_event: MakeEvent, *, ends: bool = False) -> Status:
    """Send the event and return the first status that has it.

    broker_url: see find_run.  ends: the event ends the run, so its end is an answer too.
    Raises RunFailedError where no orchestrator answers.
    """
    rundir, settings = find_run(run_dir, broker_url)
    async with run_broker(rundir, settings, live=True) as broker:
        status = await _status(broker)
        if status is None:
            raise RunFailedError(f"{run_dir} is not running: its orchestrator gives no status")
        entry_id = await append_event(broker, make_event(settings, status), by="command line")
        try:
            async with asyncio.timeout(HEARD_S):
                return await _heard(broker, entry_id, ends=ends)
        except TransientError:
            if not ends:
                raise
            return status  # its broker went with it
        except TimeoutError:
            raise RunFailedError(f"the orchestrator of {run_dir} has not heard within {HEARD_S:.0f} s") from None


async def _heard(broker: Broker, entry_id: str, *, ends: bool) -> Status:
    """The first status at or beyond ``entry_id``; where the event ends the run, also the last one there is."""
    while True:
        status = await _status(broker)
        if status is not None and parse_entry_id(status["events_cursor"]) >= parse_entry_id(entry_id):
            return status
        if ends and await broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
            return status or {}
        await asyncio.sleep(POLL_S)


async def _status(broker: Broker) -> Status | None:
    raw = await broker.get_meta(keys.STATUS)
    return None if raw is None else json.loads(raw)
