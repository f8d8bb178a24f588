"""A turn while it is generated: ids as the engine draws them, as text that nothing later changes.

    engine ─► put ─► ids ─► text ─► held back: half a character, what a stop string or a call of a tool may begin with
                                └─► pieces ─► events of HTTP

Never: waits for an engine; knows the form of events (messages.py). Invariant: the pieces together are a beginning of
the text of the turn; a turn that an engine began anew, with other ids, is no continuation (``agrees``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
"""What a decoder gives for the bytes of half a character."""
CONTEXT = 8
"""Ids that are decoded again before new ones: the text of an id depends on those before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """text: that may be told now.  ids, logprobs: of the tokens since the last piece, whose text may still be held."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]


class TurnText:
    """decode: ids to text.  ends: where the text ends before one of these.  held_from: it may, so what comes from there
    on is not told: calls of tools come whole.  silent: nothing is told before the end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        ends: Sequence[str] = (),
        held_from: str = "",
        silent: bool = False,
    ) -> None:
        self._decode = decode
        self._ends = (*ends, held_from) if held_from else tuple(ends)
        self._silent = silent
        self._ids: list[int] = []
        self._read = 0
        self._text = ""  # of the first _read ids
        self._told = 0
        self._ended = False

    def take(self, ids: Sequence[int]) -> str:
        """The text that may be told now that these ids came, too."""
        self._ids += ids
        begin = max(0, self._read - CONTEXT)
        known, more = self._decode(self._ids[begin : self._read]), self._decode(self._ids[begin:])
        if more.endswith(REPLACEMENT) or not more.startswith(known):
            return ""
        self._text, self._read = self._text + more[len(known) :], len(self._ids)
        if self._silent or self._ended:
            return ""
        end = len(self._text)
        for one in self._ends:
            if (at := self._text.find(one, max(0, self._told - len(one)))) >= 0:
                end, self._ended = min(end, at), True
            else:
                end = min(end, self._maybe_begins(one))
        piece = self._text[self._told : end]
        self._told = max(self._told, end)
        return piece

    def _maybe_begins(self, one: str) -> int:
        """Where the longest end of the text begins that ``one`` may go on from."""
        size = len(self._text)
        return next((size - part for part in range(len(one) - 1, 0, -1) if self._text.endswith(one[:part])), size)


class TurnStream:
    """What an engine puts and a client's answer takes, on one loop. text: set before the turn is asked for."""

    def __init__(self) -> None:
        self.text: TurnText | None = None
        self.changed = asyncio.Event()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._taken = 0
        self._torn = False

    def put(self, start: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens from ``start`` on. An engine that lost them computes a sample again, and puts it again."""
        have = len(self._ids)
        if start > have or self._ids[start : start + len(ids)] != list(ids[: have - start]):
            self._torn = True
            return
        self._ids += ids[have - start :]
        self._logprobs += logprobs[have - start :]
        self.changed.set()

    def agrees(self, ids: Sequence[int]) -> bool:
        """Whether what was put is the beginning of the turn that came out."""
        return not self._torn and self._ids == list(ids[: len(self._ids)])

    def take(self) -> Piece | None:
        """What came since the last time."""
        self.changed.clear()
        ids, logprobs = self._ids[self._taken :], self._logprobs[self._taken :]
        if not ids or self.text is None:
            return None
        self._taken = len(self._ids)
        return Piece(text=self.text.take(ids), ids=ids, logprobs=logprobs)
