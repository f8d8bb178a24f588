"""Beginnings of samples that still run, so that a sample which is taken back goes on elsewhere.

    attempt 0    0 ──── 512 ──── 1024 ─ ─ (killed: what came after is lost)
    attempt 1                    1024 ──── 1400 ──── (its row is written: the log is deleted)

A worker puts what its running samples have got since on the log of their group; whoever gets the group next reads it.
An attempt only ever adds to what it went on from, so the beginning of an earlier attempt never changes: one that is
still running, unknown to anyone, can write on without harm. A log goes with its group, at the latest.

Owns: how such a log is written and read. Never: who may go on from what (the core, ``GroupPlan.partial``).
Invariant: tokens, logprobs and weights of a beginning are those of one sample, without a gap; what does not fit to what
was read before it is left out, and only makes the beginning shorter. Source: ours; AReaL and verl keep the tokens of an
interrupted sample where it runs, and lose them with the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import lt

import numpy as np
from numpy.typing import NDArray

from transport.broker import keys
from transport.broker.base import ZERO_ID, Append, Broker, Entry
from transport.contracts.messages import PartialTokens, encode, partial_decoder
from transport.contracts.types import Column, GroupId, VersionSpan, WeightIdentity
from transport.errors import MessageError
from transport.rows.columns import decode_array

READ_ENTRIES = 256
"""Of one round trip."""


def _no_ids() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


def _no_logprobs() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first tokens of a sample. token_ids: [K] int32.  logprobs: [K] float32, as of a whole response.
    spans: weights of each token, in order, covering [0, K).
    """

    token_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    logprobs: NDArray[np.float32] = field(default_factory=_no_logprobs)
    spans: tuple[VersionSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest(self) -> WeightIdentity:
        return min(span.weights for span in self.spans)

    @property
    def newest(self) -> WeightIdentity:
        return max(span.weights for span in self.spans)

    def cut(self, tokens: int) -> Beginning:
        """Without what is behind the first ``tokens``."""
        if tokens >= len(self):
            return self
        return Beginning(
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            spans=clipped(self.spans, 0, tokens),
        )

    def extended(self, part: PartialTokens) -> Beginning:
        """With ``part`` from its start on. Raises MessageError where that leaves a gap, or it contradicts itself."""
        if part.start > len(self):
            raise MessageError(f"tokens from {part.start} on do not follow {len(self)}")
        token_ids = decode_array(Column.RESPONSE_IDS, part.token_ids)
        logprobs = decode_array(Column.ROLLOUT_LOGPROBS, part.logprobs)
        end = part.start + len(token_ids)
        starts, ends = [span.start for span in part.spans], [span.end for span in part.spans]
        if (
            not len(token_ids)
            or len(logprobs) != len(token_ids)
            or [*starts, end] != [part.start, *ends]
            or not all(map(lt, starts, ends))
        ):
            raise MessageError(f"tokens {part.start} to {end} and their spans do not agree")
        before = self.cut(part.start)
        return Beginning(
            token_ids=np.concatenate([before.token_ids, token_ids]),
            logprobs=np.concatenate([before.logprobs, logprobs]),
            spans=joined(before.spans, part.spans),
        )


NOTHING = Beginning()


def clipped(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """What of these spans lies in [start, end)."""
    return tuple(
        VersionSpan(start=max(span.start, start), end=min(span.end, end), weights=span.weights)
        for span in spans
        if span.end > start and span.start < end
    )


def joined(before: tuple[VersionSpan, ...], after: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Spans of ``before`` and then of ``after``, which follow one another; one where the weights stay the same."""
    if before and after and before[-1].weights == after[0].weights:
        across = VersionSpan(start=before[-1].start, end=after[0].end, weights=after[0].weights)
        return (*before[:-1], across, *after[1:])
    return (*before, *after)


def partial_append(group_id: GroupId, part: PartialTokens) -> Append:
    """Puts ``part`` on the log of its group."""
    fields = {"sample": str(part.sample), "attempt": str(part.attempt), "start": str(part.start)}
    return Append(stream=keys.partial(group_id), entry=Entry(fields=fields, payload=encode(part)))


def beginnings(parts: Iterable[PartialTokens]) -> dict[int, Beginning]:
    """By sample, of parts in any order: each attempt goes on from the one before it."""
    found: dict[int, Beginning] = {}
    broken: set[tuple[int, int]] = set()
    for part in sorted(parts, key=lambda part: (part.sample, part.attempt, part.start)):
        if (part.sample, part.attempt) in broken:
            continue
        try:
            found[part.sample] = found.get(part.sample, Beginning()).extended(part)
        except MessageError:
            broken.add((part.sample, part.attempt))
    return found


async def read_beginnings(broker: Broker, group_id: GroupId, before: int) -> dict[int, Beginning]:
    """What attempts before number ``before`` left of the samples of a group; entries that are none are skipped."""
    parts: list[PartialTokens] = []
    cursor = ZERO_ID
    while entries := await broker.read(keys.partial(group_id), cursor, count=READ_ENTRIES):
        cursor = entries[-1].entry_id
        for entry in entries:
            try:
                parts.append(partial_decoder.decode(entry.entry.payload))
            except MessageError:
                continue
    return beginnings(part for part in parts if part.attempt < before)
