"""The table of renames: what a recorded golden calls something, and what the code calls it now.

**You renamed a field, a message, a value or a setting of the core, and `tests/golden` fails? Add one line to
``RENAMES`` in the same commit.** The key says the name as it stands in the recorded files, the value says the new one:

    "RankerJudged": "RankerMeasured",                     a message (its tag on the wire)
    "RankerJudged.worth_it": "trusted",                   a field of a message
    "ComputePlan.workers.pace": "slowdown",               a field of a struct inside a message; lists do not count
    "*.predicted_sigma": "predicted_spread",              a field of this name wherever it stands in any message
    "settings.move_running": "migrate_running",           a field of CoreSettings, as in "settings.decode_cost.fixed_s"
    "SettingChanged.key=pipeline.update": "pipeline.weight_update",     a value, exactly
    "FinishRun.reason~all batches are trained": "training is complete", a part of a text (a regular expression)
    "TrainerReady.damaged": None,                         a field that is gone, and that decided nothing
    "DispatchGroups.plans.lane": Added("train"),          a field that is new, and always has this value here

Always write keys in the recorded names, all of them, also where two lines meet: with "RankerJudged" renamed, its field
is still "RankerJudged.worth_it". A second renaming of the same thing changes the value of its line.

The comparison is then "equal after the renaming alone". Digests of simulated runs are compared in the recorded names,
so each name must keep exactly one counterpart; texts (fields named ``reason``) do not count there.

``python -m tests.golden.migrate`` rewrites the recorded files by this table, which is empty afterwards.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Added:
    """A field that the recorded messages do not have. value: what it has in all of these runs."""

    value: Any


RENAMES: dict[str, str | Added | None] = {}

SETTINGS = "settings"
"""In the place of a message's tag: the settings of the core."""


class Renaming:
    """A table that can be read both ways. Paths are tuples of recorded names that begin with the recorded tag."""

    def __init__(self, table: Mapping[str, str | Added | None]) -> None:
        self._tags: dict[str, str] = {}
        self._fields: defaultdict[tuple[str, ...], dict[str, str | None]] = defaultdict(dict)
        self._added: defaultdict[tuple[str, ...], dict[str, Any]] = defaultdict(dict)
        self._values: defaultdict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
        self._texts: defaultdict[tuple[str, ...], list[tuple[re.Pattern[str], str]]] = defaultdict(list)
        for key, new in table.items():
            self._add(key, new)

    def _add(self, key: str, new: str | Added | None) -> None:
        place, sign, old = re.fullmatch(r"([\w.*]+)([=~]?)(.*)", key, re.DOTALL).groups()  # type: ignore[union-attr]
        *parent, name = place.split(".")
        match new:
            case Added(value):
                self._added[tuple(parent)][name] = value
            case str() if sign == "=":
                self._values[*parent, name][old] = new
            case str() if sign == "~":
                self._texts[*parent, name].append((re.compile(old), new))
            case str() if not parent:
                self._tags[name] = new
            case _:
                self._fields[tuple(parent)][name] = new

    def message(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """A recorded message in today's names."""
        tag = recorded["type"]
        return {**self._forward((tag,), recorded), "type": self._tags.get(tag, tag)}

    def settings(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """Recorded settings in today's names."""
        return self._forward((SETTINGS,), recorded)

    def as_recorded(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message of today in the recorded names."""
        tag = _old_name(self._tags, message["type"])
        return {**self._backward((tag,), message), "type": tag}

    def _forward(self, path: tuple[str, ...], value: Any) -> Any:
        match value:
            case dict():
                renamed = {
                    new: self._forward((*path, old), inner)
                    for old, inner in value.items()
                    if (new := self._renamed(path).get(old, old)) is not None
                }
                return {**self._of(self._added, path), **renamed}
            case list():
                return [self._forward(path, inner) for inner in value]
            case str():
                return self._text(path, self._of(self._values, path).get(value, value))
            case _:
                return value

    def _text(self, path: tuple[str, ...], text: str) -> str:
        for pattern, replacement in [*self._texts.get(path, ()), *self._texts.get(("*", path[-1]), ())]:
            text = pattern.sub(replacement, text)
        return text

    def _backward(self, path: tuple[str, ...], value: Any) -> Any:
        match value:
            case dict():
                added = self._of(self._added, path)
                renames = self._renamed(path)
                found: dict[str, Any] = {}
                for new, inner in value.items():
                    if not (new in added and added[new] == inner):
                        old = _old_name(renames, new)
                        found[old] = self._backward((*path, old), inner)
                return found
            case list():
                return [self._backward(path, inner) for inner in value]
            case str():
                return _old_name(self._of(self._values, path), value)
            case _:
                return value

    def _renamed(self, path: tuple[str, ...]) -> dict[str, str | None]:
        everywhere = {} if path[0] == SETTINGS else self._fields.get(("*",), {})
        return {**everywhere, **self._fields.get(path, {})}

    @staticmethod
    def _of(rules: Mapping[tuple[str, ...], dict[str, Any]], path: tuple[str, ...]) -> dict[str, Any]:
        return {**rules.get(("*", path[-1]), {}), **rules.get(path, {})}


def _old_name(renames: Mapping[str, str | None], new: str) -> str:
    return next((old for old, renamed in renames.items() if renamed == new), new)
