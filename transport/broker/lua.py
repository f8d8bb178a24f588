"""The Lua scripts, read from ``scripts/``, and the encoding of their requests.

Owns: how a script gets the names of keys.py and the values of a request. Never: talks to a server.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import msgspec

from transport.broker import keys
from transport.types import USER_PREFIX

MAX_DEAD_LETTERS = 10_000
"""Kept of the dead-letter stream. Each is a bug or a poisoned input: more would be read by nobody."""

_KEY_NAMES: dict[str, str | int] = {
    "epochs": keys.EPOCHS,
    "incarnations": keys.INCARNATIONS,
    "retained_bytes": keys.RETAINED_BYTES,
    "task_specs": keys.TASK_SPECS,
    "mark": keys.MARK,
    "streams": keys.STREAMS,
    "workers": keys.WORKERS,
    "dead": keys.DEAD,
    "tasks": keys.tasks(""),
    "lease": keys.LEASE_PREFIX,
    "row": keys.ROW_PREFIX,
    "group": keys.GROUP_PREFIX,
    "shared": keys.SHARED_PREFIX,
    "user": USER_PREFIX,
    "max_dead": MAX_DEAD_LETTERS,
}

_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic step. sha: what EVALSHA calls it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """``scripts/<name>.lua`` behind the key names and the prelude."""
    folder = files("transport.broker.scripts")
    names = ", ".join(f"{name} = {_literal(value)}" for name, value in _KEY_NAMES.items())
    parts = [f"local KEY = {{ {names} }}"]
    parts += [folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name)]
    text = "\n".join(parts)
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else f"'{value}'"


@dataclass(slots=True)
class Request:
    """A script's request: readable JSON, and binary values beside it that the JSON names by their place in ARGV."""

    body: dict[str, object] = field(default_factory=dict[str, object])
    blobs: list[bytes] = field(default_factory=list[bytes])

    def blob(self, value: bytes) -> int:
        """Add a binary value. Returns what stands for it in a list of the body (see ``resolve`` in prelude.lua)."""
        self.blobs.append(value)
        return len(self.blobs) + 3

    def arguments(self) -> list[bytes]:
        return [_encoder.encode(self.body), *self.blobs]
