"""``pause | resume | drain | checkpoint | set`` of a run, and ``retry | drop`` of units that were given up.

A request returns only once the orchestrator has applied it, and says so when it could not take it.

A dead letter is taken out only in the one atomic step that puts it back, as a new entry of its queue, or forgets it. It
may go back while its unit is still wanted: its group's rows are in the broker. The core ends the slot of a group as
soon as scoring has given it up, drops its rows and takes another prompt, so most letters of a live run are only
evidence: retrying one is refused. (Were it not, the unit would be acknowledged without effect, because its rows are
gone; and scores of a group that has ended are ignored.) Worth a retry are rows of a round that the trainer waits for,
units given up while no orchestrator was alive, and tasks that users declared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orchestrator.config.load import parse_override
from orchestrator.config.run_directory import RunDir, find_run, resume_command
from orchestrator.config.schema import to_toml
from orchestrator.errors import ConfigError, RunFailedError, printable
from orchestrator.launch.ownership import read_identity
from orchestrator.loop.intake import REQUESTS, append_event, change
from orchestrator.observability.http.status import read_status
from orchestrator.observability.standing import State, read_standing
from transport.broker import keys
from transport.broker.base import MAX_DEAD_LETTERS, Broker, DeadLetter, parse_entry_id
from transport.broker.embedded import EmbeddedServer
from transport.broker.ownership import not_here
from transport.broker.redis_streams import connect
from transport.contracts.messages import Event
from transport.contracts.settings import Settings
from transport.contracts.types import Column, GroupId, RunName
from transport.errors import BrokerUnavailableError, DirectoryError, RunExistsError, TransientError
from transport.process.programs import command

ANSWER_S = 3.0
"""A command is not worth waiting longer for a broker."""
HEARD_S = 15.0
"""How long an orchestrator may take to apply a request; it does so in milliseconds, and is restarted in seconds."""
POLL_S = 0.1

SAID = {
    "pause": "paused: running samples finish, nothing new is dispatched; go on with: {}",
    "resume": "it goes on",
    "drain": "draining: what is under way finishes and is saved, then the run ends",
    "checkpoint": "a checkpoint follows the batch in training",
}
DISPATCHED_AGAIN = "the orchestrator dispatches its group again by itself"
GONE = "its group has ended: the rows are dropped, and another prompt took its place"
UNKNOWN = "there is no such dead letter"
FOREIGN = "it came from no queue of this run"

Status = Mapping[str, Any]
MakeEvent = Callable[[Settings, Status], Event]


def _not_running(rundir: RunDir) -> str:
    """How the run ended, and how to go on with it. Raises what read_standing raises."""
    standing = read_standing(rundir.path)
    go_on = standing.go_on
    if standing.state is State.FINISHED:
        go_on = resume_command(rundir.path, standing.settings, f"run.batches={2 * max(1, standing.trained)}")
    return f"{rundir.path} is not running: {standing}" + (f"; go on with: {go_on}" if go_on else "")


@asynccontextmanager
async def open_run(
    run_dir: Path, broker_url: str | None = None, *, live: bool = False, reads: bool = False
) -> AsyncIterator[tuple[RunDir, Settings, Broker]]:
    """The run in ``run_dir`` with the broker that it names, or its embedded one; where that is not alive, it is started
    for as long as we look.

    broker_url: see find_run.  live: never start it, because a request to a run that is over would wait in it for the
    next one.  reads: nothing is written, so a copy of it will do where its disk is full or read-only.
    Raises: what find_run raises.  RunFailedError: the embedded one is not there and shall not be started.
    BrokerUnavailableError.  OtherRunError: the name of the run is another one's on that broker.
    """
    rundir, settings = find_run(run_dir, broker_url)
    url, password = settings.broker.url, settings.broker.password
    async with AsyncExitStack() as stack:
        if not url:
            server = EmbeddedServer(rundir.broker, appendfsync=settings.broker.appendfsync)
            if live:
                server.attach()
            else:
                stack.push_async_callback(server.stop)
                try:
                    await server.start()
                except RunExistsError:
                    server.attach()
                except DirectoryError:
                    if not reads:
                        raise
                    copy = Path(stack.enter_context(TemporaryDirectory(prefix="streamrl-broker-")))
                    server = server.copied(copy / "broker")
                    stack.push_async_callback(server.stop)
                    await server.start()
            url, password = server.url, server.password
        try:
            name = RunName(settings.run.name)
            broker = await connect(settings.broker, name, url=url, password=password, outage_s=ANSWER_S)
        except BrokerUnavailableError as error:
            if settings.broker.url or not live:
                raise
            raise RunFailedError(_not_running(rundir)) from error
        stack.push_async_callback(broker.close)
        known = read_identity(rundir)
        if known is not None and (owner := await broker.owner()) is not None:
            if owner.claim.run_id != known.run_id:
                raise not_here(broker.run, rundir.path, owner)
            await broker.join_run(known.run_id)
        yield rundir, settings, broker


# -- requests


def main(run_dir: Path, request: str, broker_url: str | None = None) -> int:
    """Ask for one of REQUESTS. Returns 0 once it is applied. Raises ConfigError, RunFailedError, StreamError."""
    asyncio.run(_ask(run_dir, broker_url, lambda settings, status: REQUESTS[request](), ends=request == "drain"))
    print(SAID[request].format(command("streamrl-orchestrator", "resume", run_dir)))
    return 0


def main_set(run_dir: Path, assignment: str, broker_url: str | None = None) -> int:
    """Set ``section.key=value``. Returns 0 once it holds."""
    wanted = parse_override(assignment)
    key = wanted.key
    value = wanted.value if isinstance(wanted.value, int | float | str) else wanted.text

    def make_event(settings: Settings, status: Status) -> Event:
        return change(settings, status["settings"], status["num_admitted"], key, value)

    status = asyncio.run(_ask(run_dir, broker_url, make_event))
    if status["settings"][key] != value:
        raise RunFailedError(f"{key} was not taken: the run is at its end ({status['finish_reason'] or 'finishing'})")
    print(f"{key} = {to_toml(status['settings'][key])} from now on")
    return 0


async def _ask(run_dir: Path, broker_url: str | None, make_event: MakeEvent, *, ends: bool = False) -> Status:
    """Send the event and return the first status that has it.

    ends: the event ends the run, so its end is an answer too.  Raises RunFailedError where no orchestrator answers.
    """
    async with open_run(run_dir, broker_url, live=True) as (_, settings, broker):
        before = await read_status(broker)
        if before is None:
            raise RunFailedError(f"{run_dir} is not running: its orchestrator gives no status")
        entry_id = await append_event(broker, make_event(settings, before), by="command line")
        try:
            async with asyncio.timeout(HEARD_S):
                while True:
                    status = await read_status(broker)
                    if status is not None and parse_entry_id(status["events_cursor"]) >= parse_entry_id(entry_id):
                        return status
                    if ends and await broker.get_meta(keys.STATE) == keys.STATE_FINISHED:
                        return status or {}
                    await asyncio.sleep(POLL_S)
        except TransientError:
            if ends:
                return before  # its broker went with it
            raise
        except TimeoutError:
            raise RunFailedError(f"the orchestrator of {run_dir} has not heard within {HEARD_S:.0f} s") from None


# -- dead letters


def main_letters(
    run_dir: Path, letter_ids: Sequence[str], broker_url: str | None = None, *, all_letters: bool, drop: bool
) -> int:
    """Retry or drop dead letters of ``run_dir`` and say what became of each.

    Returns 0, or 1 when one that was named stays where it is. Raises ConfigError for ids that can be none.
    """
    if bool(letter_ids) == all_letters:
        raise ConfigError("name the dead letters (inspect shows their ids), or give --all")
    for letter_id in letter_ids:
        try:
            parse_entry_id(letter_id)
        except ValueError as error:
            raise ConfigError(f"{letter_id!r} is no id of a dead letter, like 1763627143210-0") from error
    return asyncio.run(_letters(run_dir, letter_ids, broker_url, drop=drop))


async def _letters(run_dir: Path, letter_ids: Sequence[str], broker_url: str | None, *, drop: bool) -> int:
    async with open_run(run_dir, broker_url) as (_, _, broker):
        letters = {letter.letter_id: letter for letter in await broker.dead_letters(count=MAX_DEAD_LETTERS)}
        if not letter_ids and not letters:
            print("there are no dead letters", flush=True)
        kept = 0
        for letter_id in letter_ids or list(letters):
            letter = letters.get(letter_id)
            problem = UNKNOWN if letter is None else await _take(broker, letter, drop=drop)
            kept += bool(problem)
            done = "" if letter is None else "kept " if problem else "dropped " if drop else "retried "
            unit = f" of {letter.queue} {letter.entry.fields.get('unit', '')}".rstrip() if letter else ""
            print(printable(f"{done}{letter_id}{unit}{problem and ': '}{problem}"), flush=True)
    return 1 if kept and letter_ids else 0


async def _take(broker: Broker, letter: DeadLetter, *, drop: bool) -> str:
    """Drop or retry one letter. Returns why it stays, "" when it does not."""
    if drop:
        return "" if await broker.drop_dead(letter.letter_id) else UNKNOWN
    if problem := await why_not(broker, letter):
        return problem
    return "" if await broker.retry_dead(letter.letter_id) is not None else UNKNOWN


async def why_not(broker: Broker, letter: DeadLetter) -> str:
    """Why ``letter`` may not go back to its queue, "" when it may."""
    if letter.queue.startswith("plans:"):
        return DISPATCHED_AGAIN
    if letter.queue == keys.EVENTS:
        return "the orchestrator could not apply it as an event, and a retry would fail again"
    if not letter.queue.startswith("tasks:"):
        return FOREIGN
    group = letter.entry.fields.get("group", "")
    (columns,) = await broker.read_groups([GroupId(group)], [Column.PROMPT_IDS])
    return "" if columns else GONE
