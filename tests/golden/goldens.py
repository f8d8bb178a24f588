"""Recorded runs as files, read in today's names: settings, then every event with the commands that it caused.

A golden is ``journals/<name>.jsonl.gz``: a line of the core's settings, then one line an event with the run's clock and
its commands, all as plain JSON in the names of the day on which it was recorded (``renames.py`` leads to today's).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from tests.golden.renames import RENAMES, Renaming
from transport.contracts.messages import Command, Event, JournalRecord

HERE = Path(__file__).parent
JOURNALS = HERE / "journals"
DIGESTS = HERE / "digests.json"
RESTORES = 8
"""Times in a replay that the state is written as a snapshot and read back: that must not change a decision either."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a golden, and its commands, as plain values."""

    now_s: float
    event: dict[str, Any]
    commands: list[dict[str, Any]]

    @property
    def as_line(self) -> dict[str, Any]:
        return {"now_s": self.now_s, "event": self.event, "commands": self.commands}


@dataclass(frozen=True, slots=True)
class Golden:
    """A recorded run. settings: of the core, every one of them."""

    settings: dict[str, Any]
    moments: list[Moment]

    def renamed(self, renaming: Renaming) -> Golden:
        """The same run in the names that ``renaming`` leads to."""
        moments = [
            Moment(one.now_s, renaming.message(one.event), [renaming.message(command) for command in one.commands])
            for one in self.moments
        ]
        return Golden(renaming.settings(self.settings), moments)


def journal_path(name: str) -> Path:
    return JOURNALS / f"{name}.jsonl.gz"


def read(path: Path) -> Golden:
    """A golden as it was recorded."""
    first, *lines = map(json.loads, gzip.decompress(path.read_bytes()).splitlines())
    return Golden(first["settings"], [Moment(line["now_s"], line["event"], line["commands"]) for line in lines])


def write(path: Path, golden: Golden) -> None:
    lines = [{"settings": golden.settings}, *(moment.as_line for moment in golden.moments)]
    text = "".join(canonical(line) + "\n" for line in lines)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def canonical(value: object) -> str:
    """One text for equal values: keys in order, floats in full."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def plain(message: Event | Command | CoreSettings) -> Any:
    """A message as JSON knows it, without the fields that have their defaults, as on the wire."""
    return json.loads(canonical(msgspec.to_builtins(message)))


def recorded(settings: CoreSettings, records: Iterable[JournalRecord]) -> Golden:
    """What a state under ``settings`` does at these events."""
    state = PipelineState(settings)
    moments = [
        Moment(record.now_s, plain(record.event), [plain(one) for one in state.handle(record.event, record.now_s)])
        for record in records
    ]
    return Golden(plain(settings), moments)


# -- what a test does with them


class UnknownNameError(Exception):
    """A recorded name that the code does not know any more."""


def today(name: str) -> Golden:
    """The golden of this name in today's names."""
    return read(journal_path(name)).renamed(Renaming(RENAMES))


def replayed(golden: Golden) -> Iterator[tuple[Moment, list[dict[str, Any]]]]:
    """Each moment, with the commands that the state gives for its event now. Raises UnknownNameError."""
    state = PipelineState(_known(golden.settings, CoreSettings))
    restore_every = max(1, len(golden.moments) // RESTORES)
    for number, moment in enumerate(golden.moments, 1):
        commands = state.handle(_known(moment.event, Event), moment.now_s)
        yield moment, [plain(command) for command in commands]
        if number % restore_every == 0:
            state = PipelineState.restore(state.snapshot())


def _known(value: dict[str, Any], kind: Any) -> Any:
    """``value`` as ``kind``. Readers of the wire ignore fields that they do not know; a rename must not hide there."""
    try:
        decoded = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UnknownNameError(f"{value.get('type', 'the settings')}: {error}: {canonical(value)}") from error
    if unknown := sorted(_paths(value) - _paths(plain(decoded))):
        raise UnknownNameError(f"{value.get('type', 'the settings')} has no {', '.join(unknown)}: {canonical(value)}")
    return decoded


def _paths(value: Any, prefix: str = "") -> set[str]:
    """Dotted names of all fields."""
    match value:
        case dict():
            return {
                path for key, inner in value.items() for path in {f"{prefix}{key}", *_paths(inner, f"{prefix}{key}.")}
            }
        case list():
            return {path for inner in value for path in _paths(inner, prefix)}
        case _:
            return set()


# -- digests of simulated runs

NUM_MARKS = 16


def digest(
    history: Sequence[tuple[JournalRecord, Sequence[Command]]], renaming: Renaming | None = None
) -> dict[str, Any]:
    """What identifies a history in the recorded names: one sha256 of every event and command, how many of each kind,
    and short digests of its beginnings, by which the first difference is found."""
    renaming = renaming or Renaming(RENAMES)
    total, marks, kinds = hashlib.sha256(), list[str](), Counter[str]()
    mark_at = {len(history) * mark // NUM_MARKS for mark in range(1, NUM_MARKS + 1)}
    for number, (record, commands) in enumerate(history, 1):
        messages = [renaming.as_recorded(plain(message)) for message in (record.event, *commands)]
        kinds.update(message["type"] for message in messages)
        total.update(canonical([record.now_s, [_without_texts(message) for message in messages]]).encode())
        if number in mark_at:
            marks.append(f"{number}:{total.hexdigest()[:8]}")
    return {"sha256": total.hexdigest(), "marks": " ".join(marks), "kinds": dict(sorted(kinds.items()))}


def _without_texts(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_texts(inner) for key, inner in value.items() if key != "reason"}
        case list():
            return [_without_texts(inner) for inner in value]
        case _:
            return value
