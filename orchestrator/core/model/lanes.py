"""What the eval and the serve lane remember: the evaluation that is under way, and the requests that are open.

Owns: the nouns and their own arithmetic. Never: decisions (``lanes/``). Invariant: a problem of an evaluation is in
exactly one place: it waits, one attempt at it is open, its answer is scored, or its attempts are used up.
"""

from __future__ import annotations

import msgspec

from transport.contracts.messages import EvaluationOutcome, HeldOutAnswer, PromptRef
from transport.contracts.types import GroupId, RowId, WeightIdentity


class Attempt(msgspec.Struct, kw_only=True):
    """An open attempt at one problem. deadline_s: of its generation, then of its scoring."""

    problem: int
    deadline_s: float


class Evaluation(msgspec.Struct, kw_only=True):
    """One that is under way. weights: the pin, under which every token of every answer is sampled.

    opened_s: when the first problem was dispatched, None before.  newer_s: since when newer weights wait for it.
    waiting: problems without an attempt.  attempts: the open ones, by their group.  num_attempts: all so far.
    failures: of each problem.  deaths: of workers while it ran there, for each problem.
    answers: those to problems of named sets, one by one.
    The rest are sums over the answers; tokens and engine_s also count those that could not be used.
    """

    number: int
    weights: WeightIdentity
    num_problems: int
    waiting: list[int]
    opened_s: float | None = None
    newer_s: float | None = None
    attempts: dict[GroupId, Attempt] = msgspec.field(default_factory=dict[GroupId, Attempt])
    failures: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    deaths: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    num_attempts: int = 0
    answered: int = 0
    reward: float = 0.0
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    response_tokens: int = 0
    tokens: int = 0
    engine_s: float = 0.0
    answers: list[HeldOutAnswer] = msgspec.field(default_factory=list[HeldOutAnswer])

    def outcome(self, now_s: float, reason: str) -> EvaluationOutcome:
        """What is reported of it. A component that an answer does not have counts as 0."""
        answered = max(1, self.answered)
        return EvaluationOutcome(
            number=self.number,
            weights=self.weights,
            problems=self.num_problems,
            answered=self.answered,
            reward=self.reward / answered,
            components={name: total / answered for name, total in self.components.items()},
            response_tokens=self.response_tokens / answered,
            tokens=self.tokens,
            seconds=now_s - self.opened_s if self.opened_s is not None else 0.0,
            engine_s=self.engine_s,
            reason=reason,
            answers=tuple(self.answers),
        )


class Evaluations(msgspec.Struct, kw_only=True):
    """All of a run's.

    problems: None before they were named.  reached: newest version that was evaluated or given up, -1 before.
    num_opened: numbers given so far.  current: the one that is under way; there is at most one.
    last_until_s: until when the end of the run waits for that of the last weights; None before.
    """

    problems: list[PromptRef] | None = None
    requested: bool = False
    reached: int = -1
    num_opened: int = 0
    current: Evaluation | None = None
    last_until_s: float | None = None


class Request(msgspec.Struct, kw_only=True):
    """One request of a service run that is not all taken.

    waiting: groups that the window still holds back, next one last.  started: samples of groups that it let pass.
    num_samples: of all groups.  results: rows in the order in which they ended; the place is the sample's number.
    failed: why, for those of ``results`` that have no row.  taken: results that the reader has.
    untaken: results that the reader lacks, of each group.  remade: results whose row went missing and is made again.
    active_s: when its reader or its last sample last did something.
    """

    num_samples: int
    waiting: list[GroupId] = msgspec.field(default_factory=list[GroupId])
    started: int = 0
    results: list[RowId] = msgspec.field(default_factory=list[RowId])
    failed: dict[RowId, str] = msgspec.field(default_factory=dict[RowId, str])
    taken: int = 0
    untaken: dict[GroupId, int] = msgspec.field(default_factory=dict[GroupId, int])
    remade: dict[RowId, None] = msgspec.field(default_factory=dict[RowId, None])
    active_s: float = 0.0

    def counts(self) -> dict[str, int]:
        """Its samples: all, let pass by the window, ended, of those failed, and what the reader has."""
        return {
            "samples": self.num_samples,
            "started": self.started,
            "ended": len(self.results),
            "failed": len(self.failed),
            "taken": self.taken,
        }
