"""The Lua scripts, read from ``scripts/``, what they are called with, and the numbers that make a call safe to repeat.

Owns: how a script gets the names of keys.py and the values of a call. Never: talks to a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import msgspec

from transport.broker import keys
from transport.contracts.types import USER_PREFIX

MAX_DEAD_LETTERS = 10_000
"""Kept of the dead-letter stream. Each is a bug or a poisoned input: more would not be read."""

NUM_SLOTS = 32
"""Writes of one process that may be under way at once; each slot costs the server one small key."""

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
class ScriptCall:
    """What a script gets: readable JSON, and binary values beside it that the JSON names by their place in ARGV."""

    body: dict[str, object] = field(default_factory=dict[str, object])
    blobs: list[bytes] = field(default_factory=list[bytes])

    def blob(self, value: bytes) -> int:
        """Add a binary value. Returns what stands for it in a list of the body (see ``resolve`` in prelude.lua)."""
        self.blobs.append(value)
        return len(self.blobs) + 3

    def arguments(self) -> list[bytes]:
        return [_encoder.encode(self.body), *self.blobs]


@dataclass(slots=True)
class Slot:
    """One place in the session. number: of its last call."""

    index: int
    number: int = 0


class Session:
    """A client's numbered slots, which make its writes safe to send again (see ``once`` in scripts/prelude.lua).

    One call at a time is in a slot, and numbers ascend. ``client`` is unique to this object, so that a restarted
    process starts a new session.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.client = uuid.uuid4().hex[:12]
        self._free = [Slot(index) for index in reversed(range(num_slots))]
        self._available = asyncio.Semaphore(num_slots)

    @asynccontextmanager
    async def next_call(self) -> AsyncGenerator[Slot]:
        """A slot with a number that was never used; it is taken until the block ends."""
        async with self._available:
            slot = self._free.pop()
            slot.number += 1
            try:
                yield slot
            finally:
                self._free.append(slot)
