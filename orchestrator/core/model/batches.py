"""Prompt groups and the batches that they fill.

Owns: the nouns and their own arithmetic. Never: decisions. Invariant: a slot ends exactly once; ``unsettled`` counts,
for each mini-batch, the slots that are neither ready for the trainer nor ended.

    pending ──dispatch──► running ──all rows──► scoring ──scored──► ready ──round──► ready, sent ──step──► trained
       ▲                     │                     │                  │
       └──lost, failed───────┴──── rows missing ───┴──────────────────┘      any of the four, unsent ──► filtered,
                                                                             stale, dead; replaced by a new slot
"""

from __future__ import annotations

import heapq
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.core.model.batching import Phase
from orchestrator.core.model.outbox import AdmissionKey, CommandId
from transport.contracts.types import GroupId, PromptId, SamplingParams, WorkerId

MISSING = -1
"""In ``Group.tokens``: this sample has no row."""

NOBODY = WorkerId("")

Outcome: TypeAlias = Literal["trained", "filtered", "stale", "dead"]


class Stage(StrEnum):
    """Where a group is. HELD: before PENDING, by the window of its request (``service.py``)."""

    HELD = "held"
    PENDING = "pending"
    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    ENDED = "ended"


class Movable(NamedTuple):
    """A running group in the heap of those that may be moved to a later batch (``rolling.py``)."""

    order_key: float
    group_id: GroupId


class Group(msgspec.Struct, kw_only=True):
    """One slot of a batch and the prompt group in it.

    part: mini-batch of its slot.  tokens: [group_size] response tokens, MISSING where there is no row.
    num_missing: samples without a row.  sent: it is in a round, so it can only end trained.
    attempt: number of its next (or running) dispatch, from 0.  failures: those that count against max_attempts.
    deaths: of workers in a row that ran it, against max_deaths.  all_deaths: the same however far apart, since a sample
    of it came.  started_s: of its last dispatch.
    admission: of its prompt columns, until they are known to exist.
    newest_version: of the newest weights in any of its rows, -1 without rows.
    oldest_version: of the oldest weights that any of its samples was started under.
    sampling: how its request wants it sampled, None: as the settings say.
    predicted_sigma: of a sample's log length around predicted_tokens, 0 where nobody says.
    rank: of the trainer, that got it last.
    num_tokens: prompt once + responses.  loss_tokens: responses only.  Both are set when it was scored.
    """

    group_id: GroupId
    batch: int
    part: int
    prompt_id: PromptId
    prompt_tokens: int
    predicted_tokens: float
    tokens: list[int]
    num_missing: int
    stage: Stage = Stage.PENDING
    outcome: Outcome | None = None
    sent: bool = False
    attempt: int = 0
    failures: int = 0
    deaths: int = 0
    all_deaths: int = 0
    started_s: float = 0.0
    worker_id: WorkerId = NOBODY
    avoid: WorkerId = NOBODY
    dispatched: CommandId = CommandId(0, 0)
    admission: AdmissionKey | None = None
    newest_version: int = -1
    oldest_version: int = -1
    num_tokens: int = 0
    loss_tokens: int = 0
    rewards: tuple[float, ...] = ()
    sampling: SamplingParams | None = None
    predicted_sigma: float = 0.0
    rank: int = 0

    def missing_samples(self) -> tuple[int, ...]:
        """Sample indices without a row."""
        return tuple(sample for sample, tokens in enumerate(self.tokens) if tokens == MISSING)

    def note_start(self, version: int) -> None:
        """What is missing of it starts under ``version``; the other rows keep theirs."""
        fresh = self.num_missing == len(self.tokens)
        self.oldest_version = version if fresh else min(self.oldest_version, version)

    def score(self, rewards: tuple[float, ...]) -> None:
        """All rows are there and scored."""
        self.stage = Stage.READY
        self.rewards = rewards
        self.loss_tokens = sum(self.tokens)
        self.num_tokens = self.prompt_tokens + self.loss_tokens


class PendingEntry(NamedTuple):
    """A group in a heap of those that wait for a worker. Obsolete once the group is not pending, or waits elsewhere."""

    batch: int
    order_key: float
    ordinal: int
    group_id: GroupId


class Batch(msgspec.Struct, kw_only=True):
    """Slots that are trained together and make one version.

    group_ids: every slot it ever had.  members: groups that will be trained, in the order they became ready.
    unsettled: [mini_batches].  owed: mini-batch of each replacement that waits for a new prompt.
    phase: index into the run's phases.  queue: groups to put into rounds of this phase.  released: how many of those,
    from the first on, the trainer may have now.
    source_ordinal, source_position: of the last prompt that it took.
    num_wanted: members after which the others end unused; 0: all are wanted (no over-sampling).
    movable: running groups that may be moved to a later batch.  num_moved: groups that were, for others that were
    ready.  moved_tokens: response tokens that it gained so, below 0 where it lost.
    """

    index: int
    refills_left: int
    unsettled: list[int]
    group_ids: list[GroupId] = msgspec.field(default_factory=list[GroupId])
    members: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    owed: list[int] = msgspec.field(default_factory=list[int])
    phase: int = 0
    queue: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    released: int = 0
    num_rounds: int = 0
    source_ordinal: int = -1
    source_position: str = ""
    outcomes_told: bool = False
    num_wanted: int = 0
    movable: list[Movable] = msgspec.field(default_factory=list[Movable])
    num_moved: int = 0
    moved_tokens: float = 0.0

    @property
    def started(self) -> bool:
        """Whether the trainer has been sent anything of it."""
        return self.num_rounds > 0 or self.phase > 0

    def settled(self, phase: Phase) -> bool:
        """Whether no further group can join ``phase``."""
        return self.whole() if phase.part is None else not self.unsettled[phase.part]

    def whole(self) -> bool:
        """Whether no further group can join it."""
        return not any(self.unsettled)

    def add_member(self, group: Group, phase: Phase) -> None:
        """The group became ready."""
        self.unsettled[group.part] -= 1
        self.members[group.group_id] = None
        if phase.part is None or phase.part == group.part:
            self.queue[group.group_id] = None

    def may_exchange(self, group: Group) -> None:
        """A group of it runs from now on, and a later one that is ready before may take its place (``rolling.py``)."""
        heapq.heappush(self.movable, Movable(-group.predicted_tokens, group.group_id))

    def remove_member(self, group: Group) -> None:
        """The group, not yet in any round, will not be trained as it is."""
        self.unsettled[group.part] += 1
        del self.members[group.group_id]
        self.queue.pop(group.group_id, None)
