"""What a sample of several turns is made of, token by token: the turns of the policy, and what is said between them.

Never: encodes or decodes; a token that was sampled stays as it was sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from transport.contracts.types import FinishReason, Segment, SegmentKind, VersionSpan
from workers.generation.engine import Completion, GenerationRequest

LATER_TURN_PRIORITY = 1e6
"""Added to a group's priority, which is a number of tokens: an episode that began ends before others begin."""


def turn_seed(seed: int, turn: int) -> int:
    """Of a turn of a group, from 0; the first has the group's own, so an episode of one turn is as it ever was."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest(), "little") >> 1


@dataclass(slots=True, kw_only=True, eq=False)
class Transcript:
    """token_ids, logprobs: of all segments.  turns: of the policy.  queued_s, engine_s: of all of them together.
    ends: of the branches before the last one.
    """

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    segments: list[Segment] = field(default_factory=list[Segment])
    ends: list[int] = field(default_factory=list[int])
    turns: int = 0
    queued_s: float = 0.0
    engine_s: float = 0.0

    def add_turn(self, turn: Completion) -> None:
        start = len(self.token_ids)
        self.token_ids += turn.response_ids.tolist()
        self.logprobs += turn.logprobs.tolist()
        if len(turn.response_ids):
            self._add_segment(SegmentKind.POLICY)
        for span in turn.spans:  # what was added before this turn stands with its first tokens
            begin = self.spans[-1].end if self.spans else 0
            if self.spans and self.spans[-1].weights == span.weights:
                begin = self.spans.pop().start
            self.spans.append(VersionSpan(start=begin, end=start + span.end, weights=span.weights))
        self.turns += 1
        self.queued_s += turn.queued_s
        self.engine_s += turn.engine_s

    def add_observation(self, ids: Sequence[int], kind: SegmentKind) -> None:
        if ids:
            self.token_ids += ids
            self.logprobs += [0.0] * len(ids)
            self._add_segment(kind)

    @property
    def branch_ids(self) -> list[int]:
        """Of the branch that is under way."""
        return self.token_ids[self.ends[-1] if self.ends else 0 :]

    def end_branch(self) -> None:
        """What is added from now on stands behind the prompt by itself: another sample of the same row."""
        self.ends.append(len(self.token_ids))

    def _branch_ends(self) -> tuple[int, ...]:
        """Where several samples end; one that was stopped before its first turn is none."""
        chosen = max((one.end for one in self.segments if one.kind is SegmentKind.POLICY), default=0)
        ends = [end for end in self.ends if end < chosen]
        return (*ends, len(self.token_ids)) if ends else ()

    def _add_segment(self, kind: SegmentKind) -> None:
        self.segments.append(Segment(kind=kind, end=len(self.token_ids)))

    def completion(
        self, request: GenerationRequest, sample: int, reason: FinishReason, *, reward: float | None
    ) -> Completion:
        """All of it as one sample of ``request``; there is a turn in it."""
        mixed = any(segment.kind is not SegmentKind.POLICY for segment in self.segments)
        return Completion(
            group_id=request.group_id,
            sample=sample,
            attempt=request.attempt,
            response_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=reason,
            spans=tuple(self.spans),
            queued_s=self.queued_s,
            engine_s=self.engine_s,
            segments=tuple(self.segments) if mixed or self.turns > 1 else (),
            reward=reward,
            branch_ends=self._branch_ends(),
        )
