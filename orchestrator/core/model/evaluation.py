"""An evaluation: held-out problems, asked of one version of the weights.

Owns: the nouns and their own arithmetic. Never: decisions: when one begins and ends (``evaluation_schedule.py``), who
answers what (``evaluation_attempts.py``). Invariant: a problem is in exactly one place: it waits, one try at it is
open, its answer is scored, or its attempts are used up.

    waits ──dispatch──► open try ──row of the pinned weights──► open try, to be scored ──► answered
      ▲                   │                                       │
      └── lost, failed, another version, timed out; each try has an id of its own ──► used up after max_attempts
"""

from __future__ import annotations

import msgspec

from orchestrator.core.model.batches import MISSING
from orchestrator.core.model.outbox import AdmissionKey, CommandId
from transport.contracts.messages import EvaluationOutcome, GroupScored, PromptRef
from transport.contracts.types import GroupId, WeightIdentity, WorkerId


class Try(msgspec.Struct, kw_only=True):
    """One attempt at one problem. worker_id: who generates it, NOBODY once its row exists.

    tokens: of its row, MISSING before.  deadline_s: when it is taken back.
    """

    group_id: GroupId
    problem: int
    worker_id: WorkerId
    admission: AdmissionKey
    dispatched: CommandId
    deadline_s: float
    tokens: int = MISSING


class Evaluation(msgspec.Struct, kw_only=True):
    """One that is under way. weights: the pin, under which every token of every answer is sampled.

    opened_s: when the first problem was dispatched, None before.  newer_s: since when newer weights wait for it.
    waiting: problems without a try.  tries: the open ones.  num_slots: tries so far.
    failures: of each problem.  deaths: of workers while it ran there, for each problem.
    The rest are sums over the answers; tokens and engine_s also count those that could not be used.
    """

    number: int
    weights: WeightIdentity
    num_problems: int
    waiting: list[int]
    opened_s: float | None = None
    newer_s: float | None = None
    tries: dict[GroupId, Try] = msgspec.field(default_factory=dict[GroupId, Try])
    failures: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    deaths: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    num_slots: int = 0
    answered: int = 0
    reward: float = 0.0
    components: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    response_tokens: int = 0
    tokens: int = 0
    engine_s: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self.waiting and not self.tries

    def count(self, tried: Try, event: GroupScored) -> None:
        """The answer is scored."""
        self.answered += 1
        self.reward += event.rewards[0]
        self.response_tokens += tried.tokens
        for name, value in event.components.items():
            self.components[name] = self.components.get(name, 0.0) + value

    def outcome(self, now_s: float, reason: str) -> EvaluationOutcome:
        """What is told of it. A component that an answer does not have counts as 0."""
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
        )


class Evaluations(msgspec.Struct, kw_only=True):
    """All of a run's.

    problems: None before they were named.  reached: newest version that was evaluated or given up, -1 before.
    num_opened: numbers given so far.  current: the one that is under way; there is at most one.
    """

    problems: list[PromptRef] | None = None
    requested: bool = False
    reached: int = -1
    num_opened: int = 0
    current: Evaluation | None = None

    def due(self, version: int, every: int) -> bool:
        """Whether ``version`` is to be evaluated: the first of all, then the first at or after each multiple."""
        return every > 0 and version // every > self.reached // every
