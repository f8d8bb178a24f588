"""``streamrl-orchestrator retry`` and ``drop``: what becomes of units that were given up.

A letter is taken out only in the one atomic step that puts it back, as a new entry of its queue, or forgets it. It may
go back while its unit is still wanted: its group's rows are in the broker. The core ends the slot of a group as soon as
scoring has given it up, drops its rows and takes another prompt, so most letters of a live run are only evidence:
retrying one is refused. (Were it not, the unit would be acknowledged without effect, because its rows are gone; and
scores of a group that has ended are ignored.) Worth a retry are rows of a round that the trainer waits for, units given
up while no orchestrator was alive, and tasks that users declared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli.run_broker import run_broker
from orchestrator.config.run_directory import find_run
from orchestrator.errors import ConfigError
from orchestrator.terminal_text import printable
from transport.broker import keys
from transport.broker.base import Broker, DeadLetter, parse_entry_id
from transport.broker.lua import MAX_DEAD_LETTERS
from transport.contracts.types import Column, GroupId

DISPATCHED_AGAIN = "the orchestrator dispatches its group again by itself"
GONE = "its group has ended: the rows are dropped, and another prompt took its place"
UNKNOWN = "there is no such dead letter"
FOREIGN = "it came from no queue of this run"
NO_EVENT = "the orchestrator could not apply it as an event, and a retry would fail again"


def main(
    run_dir: Path, letter_ids: Sequence[str], broker_url: str | None = None, *, all_letters: bool, drop: bool
) -> int:
    """Retry or drop dead letters of ``run_dir`` and say what became of each.

    Returns 0, or 1 when one that was named stays where it is. Raises ConfigError for ids that can be none.
    """
    if bool(letter_ids) == all_letters:
        raise ConfigError("name the dead letters (inspect shows their ids), or give --all")
    for letter_id in letter_ids:
        _check_id(letter_id)
    return asyncio.run(_main(run_dir, letter_ids, broker_url, drop=drop))


def _check_id(letter_id: str) -> None:
    try:
        parse_entry_id(letter_id)
    except ValueError as error:
        raise ConfigError(f"{letter_id!r} is no id of a dead letter, like 1763627143210-0") from error


async def _main(run_dir: Path, letter_ids: Sequence[str], broker_url: str | None, *, drop: bool) -> int:
    rundir, settings = find_run(run_dir, broker_url)
    async with run_broker(rundir, settings) as broker:
        letters = {letter.letter_id: letter for letter in await broker.dead_letters(count=MAX_DEAD_LETTERS)}
        if not letter_ids and not letters:
            print("there are no dead letters", flush=True)
        kept = 0
        for letter_id in letter_ids or list(letters):
            problem = await _take(broker, letters.get(letter_id), drop=drop)
            kept += bool(problem)
            print(printable(_said(letter_id, letters.get(letter_id), problem, drop=drop)), flush=True)
    return 1 if kept and letter_ids else 0


async def _take(broker: Broker, letter: DeadLetter | None, *, drop: bool) -> str:
    """Drop or retry one letter. Returns why it stays, "" when it does not."""
    if letter is None:
        return UNKNOWN
    if drop:
        return "" if await broker.drop_dead(letter.letter_id) else UNKNOWN
    problem = await why_not(broker, letter)
    if problem:
        return problem
    return "" if await broker.retry_dead(letter.letter_id) is not None else UNKNOWN


async def why_not(broker: Broker, letter: DeadLetter) -> str:
    """Why ``letter`` may not go back to its queue, "" when it may."""
    if letter.queue.startswith("plans:"):
        return DISPATCHED_AGAIN
    if letter.queue == keys.EVENTS:
        return NO_EVENT
    if not letter.queue.startswith("tasks:"):
        return FOREIGN
    group = letter.entry.fields.get("group", "")
    (columns,) = await broker.read_groups([GroupId(group)], [Column.PROMPT_IDS])
    return "" if columns else GONE


def _said(letter_id: str, letter: DeadLetter | None, problem: str, *, drop: bool) -> str:
    named = f"{letter_id} of {letter.queue} {letter.entry.fields.get('unit', '')}".rstrip() if letter else letter_id
    if problem:
        return f"kept {named}: {problem}" if letter else f"{named}: {problem}"
    return f"dropped {named}" if drop else f"retried {named}"
