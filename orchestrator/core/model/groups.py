"""Prompt groups, the stages of their life, and the batches that they fill.

Owns: the nouns, their own arithmetic, and the table of transitions. Never: decisions. Invariant: a group changes its
stage in ``move`` alone, along ``TRANSITIONS``; ``Batch.unsettled`` counts, for each mini-batch, the slots that are
neither ready for the trainer nor ended.

    held ──window──► pending ──dispatch──► running ──all rows──► scoring ──scored──► ready ──round──► trained
                        ▲                     │                     │                  │
                        └── lost, failed ─────┴── rows missing ─────┴──────────────────┘   any, unsent ──► ended

A group is in one lane for its whole life. ``train``: a slot of a batch, ended groups are replaced. ``eval``: one
attempt at a held-out problem, gone once it is scored. ``serve``: a prompt of a request, gone once its reader has all of
its samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.core.model.outbox import AdmissionKey, CommandId
from transport.contracts.messages import PartialSample, PromptRef
from transport.contracts.types import GroupId, PromptId, SamplingParams, WorkerId

MISSING = -1
"""In ``Group.tokens``: this sample has no row."""

NO_WORKER = WorkerId("")
NO_PROBE = -1

Outcome: TypeAlias = Literal["trained", "filtered", "stale", "dead"]

STABLE_S = 60.0
"""A process that lived, or a dispatch that ran, longer resets the count: a start that fails again is far shorter."""


def deaths_in_a_row(before: int, lived_s: float) -> int:
    """Deaths in a row of a process that is started again, or of workers under one prompt, counting one now.

    Those that are far apart have nothing to do with one another; in a row they have a cause that the next start will
    meet again. Source: ours; as systemd's StartLimitIntervalSec and Erlang's max restart intensity, per time.
    """
    return 1 if lived_s > STABLE_S else before + 1


class Lane(StrEnum):
    """What a group is generated for."""

    TRAIN = "train"
    EVAL = "eval"
    SERVE = "serve"


TRAIN, EVAL, SERVE = Lane.TRAIN, Lane.EVAL, Lane.SERVE  # looked up once: a member of an enum costs 0.2 us


class Stage(StrEnum):
    """Where a group is. HELD: in the serve lane alone, by the window of its request."""

    HELD = "held"
    PENDING = "pending"
    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    ENDED = "ended"


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = MappingProxyType(
    {
        Stage.HELD: frozenset({Stage.PENDING}),
        Stage.PENDING: frozenset({Stage.PENDING, Stage.RUNNING, Stage.SCORING, Stage.READY, Stage.ENDED}),
        Stage.RUNNING: frozenset({Stage.PENDING, Stage.SCORING, Stage.READY, Stage.ENDED}),
        Stage.SCORING: frozenset({Stage.PENDING, Stage.READY, Stage.ENDED}),
        Stage.READY: frozenset({Stage.PENDING, Stage.ENDED}),
        Stage.ENDED: frozenset[Stage](),
    }
)
"""From each stage, those that may follow. PENDING to SCORING or READY: a late report completes a group that waits to be
generated again."""


class BrokenInvariantError(Exception):
    """The state contradicts itself: a bug of the core. Caught by no one."""


class Group(msgspec.Struct, kw_only=True):
    """One prompt and the samples that are generated for it.

    batch: it is trained in; of the serve lane the number of its request, of the eval lane that of the evaluation.
    mini_batch: of its slot.  tokens: [group_size] response tokens, MISSING where there is no row.
    num_missing: samples without a row.  sent: it is in a round, so it can only end trained.
    attempt: number of its next (or running) dispatch, from 0.  failures: those that count against max_attempts.
    deaths: of workers in a row that ran it, against max_deaths.  all_deaths: the same however far apart, since a sample
    of it came.  started_s: of its last dispatch.  excluded_worker: is avoided by its next dispatch.
    admission: of its prompt columns, until they are known to exist.
    newest_version: of the newest weights in any of its rows, -1 without rows.
    oldest_version: of the oldest weights that any of its samples was started under.
    sampling: how its request, or its set of held-out problems, wants it sampled, None: as the settings say.
    predicted_sigma: of a sample's log length around predicted_tokens, 0 where it is not known.
    partial: by sample, what its attempts have put on its log of samples without a row.
    deferred: it began for the batch before, which was full without it.
    learnt_tokens: expected of a sample by what others of the group got, 0 where nothing was learnt of them.
    probe: the sample that its running attempt asks for alone, NO_PROBE where it asks for all that are missing.
    followed: the others were sent after the probe, while it ran: two attempts run on one worker, this one and the one
    before.
    unreported: samples whose rows only a score of the group says to exist.
    rank: of the trainer, that got it last.
    num_tokens: prompt once + responses.  loss_tokens: what the policy chose of the responses.  Both are set when it was
    scored.
    """

    group_id: GroupId
    batch: int
    prompt_id: PromptId
    prompt_tokens: int
    predicted_tokens: float
    tokens: list[int]
    num_missing: int
    lane: Lane = Lane.TRAIN
    mini_batch: int = 0
    stage: Stage = Stage.PENDING
    outcome: Outcome | None = None
    sent: bool = False
    attempt: int = 0
    failures: int = 0
    deaths: int = 0
    all_deaths: int = 0
    started_s: float = 0.0
    worker_id: WorkerId = NO_WORKER
    excluded_worker: WorkerId = NO_WORKER
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
    partial: dict[int, PartialSample] = msgspec.field(default_factory=dict[int, PartialSample])
    deferred: bool = False
    learnt_tokens: float = 0.0
    probe: int = NO_PROBE
    followed: bool = False
    unreported: tuple[int, ...] = ()

    @property
    def first_batch(self) -> int:
        """The batch that it began for, by which its age is judged, and its urgency."""
        return self.batch - self.deferred

    @property
    def unsettled(self) -> bool:
        """Whether it is neither ready for the trainer nor ended."""
        return self.stage in (Stage.PENDING, Stage.RUNNING, Stage.SCORING) and not self.sent

    @classmethod
    def of(
        cls, prompt: PromptRef, name: GroupId, batch: int, size: int, *, lane: Lane = Lane.TRAIN, mini_batch: int = 0
    ) -> Group:
        """A new one, without rows."""
        return cls(
            group_id=name,
            batch=batch,
            lane=lane,
            mini_batch=mini_batch,
            prompt_id=prompt.prompt_id,
            prompt_tokens=prompt.prompt_tokens,
            predicted_tokens=prompt.predicted_tokens,
            predicted_sigma=prompt.predicted_sigma,
            sampling=prompt.sampling,
            tokens=[MISSING] * size,
            num_missing=size,
        )

    def move(self, stage: Stage) -> None:
        """Go on to ``stage``. Raises BrokenInvariantError where it may not follow the present one."""
        if stage not in TRANSITIONS[self.stage]:
            raise BrokenInvariantError(f"{self.group_id} is {self.stage} and cannot become {stage}")
        self.stage = stage

    @property
    def expected_tokens(self) -> float:
        """Of each of its samples without a row."""
        return self.learnt_tokens or self.predicted_tokens

    def learn(self, tokens: int, *, ended: bool, trusts: bool) -> float:
        """One of its samples has so many tokens. Returns what is expected of the others from now on.

        ended: that is its whole length, and the longest such is what the others are taken to be; what was predicted
        counts beside it if it is worth something (trusts). Of one that still runs it is the least that they are.
        Source: Seer (OSDI'26): a group is as long as the longest seen of it. Ours: running ones and the prediction.
        """
        if not ended:
            return max(self.expected_tokens, float(tokens))
        longest = float(max(1, tokens, *self.tokens))
        return max(longest, self.predicted_tokens) if trusts else longest

    @property
    def num_asked(self) -> int:
        """Samples that are expected of its worker."""
        return self.num_missing if self.probe == NO_PROBE else int(self.lacks(self.probe))

    def asks_for(self, sample: int) -> bool:
        return self.lacks(sample) and self.probe in (NO_PROBE, sample)

    def attempts(self) -> tuple[int, ...]:
        """Those that run, the newest first."""
        return (self.attempt, self.attempt - 1) if self.followed else (self.attempt,)

    def missing_samples(self) -> tuple[int, ...]:
        return tuple(sample for sample, tokens in enumerate(self.tokens) if tokens == MISSING)

    def lacks(self, sample: int) -> bool:
        """Whether it has such a sample, and no row of it."""
        return sample < len(self.tokens) and self.tokens[sample] == MISSING

    def score(self, rewards: tuple[float, ...], environment_tokens: int) -> None:
        """environment_tokens: of all its responses, those that the policy did not choose."""
        self.move(Stage.READY)
        self.rewards = rewards
        responses = sum(self.tokens)
        self.loss_tokens = max(0, responses - environment_tokens)
        self.num_tokens = self.prompt_tokens + responses


class PendingEntry(NamedTuple):
    """A group in a heap of those that wait for a worker. Obsolete once the group is not pending, or waits elsewhere."""

    batch: int
    order_key: float
    ordinal: int
    group_id: GroupId


class Exchangeable(NamedTuple):
    """A running group in the heap of those that a finished one may replace in its batch (``rollout/admission.py``)."""

    order_key: float
    group_id: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One walk of the trainer over a batch or one of its mini-batches (None: the whole batch)."""

    kind: Literal["train", "logprobs"]
    pass_index: int = 0
    mini_batch: int | None = None


def plan_phases(mini_batches: int, epochs: int, record_logprobs: bool) -> tuple[Phase, ...]:
    """Phases of every batch: old logprobs if they are recorded, then each mini-batch of each pass.

    They follow one another on the rounds log. The first streams (its groups arrive while it runs); the others find the
    batch whole.
    """
    recording = (Phase(kind="logprobs"),) if record_logprobs else ()
    passes = [
        Phase(kind="train", pass_index=pass_index, mini_batch=mini_batch)
        for pass_index in range(epochs)
        for mini_batch in range(mini_batches)
    ]
    return (*recording, *passes)


def mini_batch_of_slot(slot: int, num_slots: int, mini_batches: int) -> int:
    """Mini-batch of a slot: slots in admission order, cut into equal parts.

    Admission order, not order of arrival, or the early mini-batches would hold only short samples.
    """
    return slot * mini_batches // num_slots


class Batch(msgspec.Struct, kw_only=True):
    """Slots that are trained together and make one version.

    group_ids: every slot it ever had, but for the groups that it left to the next batch.  num_left: how many those are.
    num_deferred: groups that the batch before left to it.
    members: groups that will be trained, in the order they became ready.
    unsettled: [mini_batches].  pending_refills: mini-batch of each replacement that waits for a new prompt.
    phase: index into the run's phases.  queue: groups to put into rounds of this phase.  queue_tokens: of those, kept
    as they come and go, because a round is judged at every scored group.  released: how many of those, from the first
    on, the trainer may have now.
    source_ordinal, source_position: of the last prompt that it took.
    num_wanted: members after which the others end unused; 0: all are wanted (no over-sampling).
    exchangeable: running groups whose place a finished one may take.  num_moved: groups that were exchanged so for
    others that were ready.  moved_tokens: response tokens that it gained so, below 0 where it lost.
    """

    index: int
    refills_left: int
    unsettled: list[int]
    group_ids: list[GroupId] = msgspec.field(default_factory=list[GroupId])
    members: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    pending_refills: list[int] = msgspec.field(default_factory=list[int])
    phase: int = 0
    queue: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    queue_tokens: int = 0
    released: int = 0
    num_rounds: int = 0
    source_ordinal: int = -1
    source_position: str = ""
    outcomes_reported: bool = False
    num_wanted: int = 0
    exchangeable: list[Exchangeable] = msgspec.field(default_factory=list[Exchangeable])
    num_moved: int = 0
    moved_tokens: float = 0.0
    num_left: int = 0
    num_deferred: int = 0

    def whole(self) -> bool:
        """Whether no further group can join it."""
        return not any(self.unsettled)

    @property
    def surplus(self) -> int:
        """Of an over-sampled batch, unsettled slots beyond those that it wants; below 0 where it lacks some."""
        left = sum(self.unsettled)
        return min(left, left + len(self.members) - self.num_wanted) if self.num_wanted else 0

    def enqueue(self, group: Group) -> None:
        """It waits for a round of the present phase."""
        if group.group_id not in self.queue:
            self.queue[group.group_id] = None
            self.queue_tokens += group.num_tokens

    def dequeue(self, group: Group) -> None:
        """It waits no longer, if it did."""
        if group.group_id in self.queue:
            del self.queue[group.group_id]
            self.queue_tokens -= group.num_tokens

    def remove_member(self, group: Group) -> None:
        """The group, not yet in any round, will not be trained as it is."""
        self.unsettled[group.mini_batch] += 1
        del self.members[group.group_id]
        self.dequeue(group)
