"""The one mutable truth of a run: every fact that a decision rests on.

Owns: the fields, and the questions that need nothing else. Never: decisions, functions, clocks. Invariant: it encodes
to MessagePack whole, so a snapshot is the state and nothing is remembered elsewhere.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.core.model.autoscale import Elastic
from orchestrator.core.model.groups import Batch, Group, PendingEntry, Stage
from orchestrator.core.model.lanes import Evaluations, Request
from orchestrator.core.model.outbox import CommandId, Outbox
from orchestrator.core.model.plans import Plans
from orchestrator.core.model.retention import Retention
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.model.staleness import Lineage
from orchestrator.core.model.workers import Fleet
from transport.contracts.messages import PromptRef, PromptsArrived
from transport.contracts.types import GroupId


class Deadline(NamedTuple):
    """A dispatched group must be whole by then. Obsolete once the group has another attempt or stage."""

    at_s: float
    group_id: GroupId
    attempt: int


class WaitingPrompt(NamedTuple):
    """A prompt, its place in the stream of all prompts, and the source's state after it."""

    prompt: PromptRef
    ordinal: int
    source_position: str


class PromptQueue(msgspec.Struct, kw_only=True):
    """Prompts read from the source and not yet bound to a slot; they leave in the order in which they arrived.

    requested: of the open request, 0 when there is none; there is at most one, so that a repeated answer is known.
    last_position: the source's state after the last arrival.
    """

    waiting: list[WaitingPrompt] = msgspec.field(default_factory=list[WaitingPrompt])
    requested: int = 0
    num_arrived: int = 0
    last_position: str = ""
    exhausted: bool = False

    @property
    def ended(self) -> bool:
        """No prompt waits and none will come."""
        return self.exhausted and not self.waiting

    def arrive(self, event: PromptsArrived) -> bool:
        """Take an answer. Returns False for one that was taken before."""
        repeated = bool(event.source_positions) and event.source_positions[-1] == self.last_position != ""
        if not self.requested or repeated:
            return False
        for prompt, position in zip(event.prompts, event.source_positions, strict=True):
            self.waiting.append(WaitingPrompt(prompt, self.num_arrived, position))
            self.num_arrived += 1
            self.last_position = position
        self.requested = 0
        self.exhausted = event.exhausted
        return True

    def take(self, count: int) -> list[WaitingPrompt]:
        """The next ``count`` prompts, or as many as there are."""
        taken = self.waiting[:count]
        del self.waiting[:count]
        return taken


class Training(msgspec.Struct, kw_only=True):
    """What the trainer has been sent.

    dp_size: ranks that want a share of every round, 0 before a trainer was ready.  batch: oldest batch not closed.
    trained_version: batches trained in the current lineage.  rounds: id -> batch of rounds it has not confirmed.
    progress_s: when it last confirmed one (or got one while idle).  source_*: furthest prompt of any closed batch.
    finish_id: where FinishTraining stands on the rounds log.
    rank_tokens: sent to each rank since the last close, where all of them met; empty after one.
    damaged: checkpoints that the trainer could not use when it started last, and why.
    """

    dp_size: int = 0
    batch: int = 0
    trained_version: int = 0
    rounds: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    progress_s: float = 0.0
    source_ordinal: int = -1
    source_position: str = ""
    finish_id: CommandId | None = None
    rank_tokens: list[int] = msgspec.field(default_factory=list[int])
    damaged: tuple[str, ...] = ()


WaitStage: TypeAlias = Literal["prompts", "weights", "generation", "scoring", "training", "deciding"]


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline waits for. owner: who should act, worker ids where they are known, else a role.

    since_s: on the run's clock, when the wait became this one; progress within a stage makes it another one.
    """

    stage: WaitStage
    waits_for: str
    owner: str
    since_s: float

    def is_same(self, other: Wait) -> bool:
        """Whether nothing of it has changed."""
        return (self.stage, self.waits_for, self.owner) == (other.stage, other.waits_for, other.owner)

    def __str__(self) -> str:
        return f"{self.stage} waits for {self.waits_for}; to act: {self.owner}"


class Pipeline(msgspec.Struct, kw_only=True):
    """All of it. now_s: the run's clock at the last event.  next_batch: first batch not admitted yet.

    configured: the settings that the run was last started with; ``settings`` are those with what was changed since.
    groups: of all lanes.  pending: heap of those that wait for any worker.
    evaluations: of held-out problems, beside the batches.  plans: which worker is to start which of the pending groups.
    paused: nothing is dispatched, by request.  wait: what it waited for at the last tick.
    requests: of a service run, by number, those that are not all taken.  last_request: highest number so far.
    elastic: seconds of both stages, by which generation workers come and go.
    """

    settings: CoreSettings
    configured: CoreSettings
    now_s: float = 0.0
    outbox: Outbox = msgspec.field(default_factory=Outbox)
    prompts: PromptQueue = msgspec.field(default_factory=PromptQueue)
    batches: dict[int, Batch] = msgspec.field(default_factory=dict[int, Batch])
    groups: dict[GroupId, Group] = msgspec.field(default_factory=dict[GroupId, Group])
    pending: list[PendingEntry] = msgspec.field(default_factory=list[PendingEntry])
    num_enqueued: int = 0
    deadlines: list[Deadline] = msgspec.field(default_factory=list[Deadline])
    next_batch: int = 0
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    lineage: Lineage = msgspec.field(default_factory=Lineage)
    training: Training = msgspec.field(default_factory=Training)
    retention: Retention = msgspec.field(default_factory=Retention)
    paused: bool = False
    stop_reason: str = ""
    finish_reason: str = ""
    wait: Wait | None = None
    evaluations: Evaluations = msgspec.field(default_factory=Evaluations)
    requests: dict[int, Request] = msgspec.field(default_factory=dict[int, Request])
    last_request: int = 0
    plans: Plans = msgspec.field(default_factory=Plans)
    elastic: Elastic = msgspec.field(default_factory=Elastic)

    @property
    def stopping(self) -> bool:
        return bool(self.stop_reason)

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    def frozen(self, batch: int) -> bool:
        """Whether nothing more happens for ``batch`` in this life of the run: it was stopped before it started.

        Its groups keep what they have, so that a resumed run goes on with them.
        """
        if not self.stopping or batch < self.training.batch:
            return False
        return batch > self.training.batch or not self.batches[batch].started

    def live(self, group_id: GroupId) -> Group | None:
        """The group, unless it is unknown, freed or ended: late and repeated events find nothing."""
        group = self.groups.get(group_id)
        return None if group is None or group.stage is Stage.ENDED else group

    def awaited_by(self, deadline: Deadline) -> Group | None:
        """The group that must be whole by then, None once that is obsolete."""
        group = self.groups.get(deadline.group_id)
        runs = group is not None and group.stage is Stage.RUNNING and group.attempt == deadline.attempt
        return group if runs else None

    def last_batch_admitted(self) -> bool:
        """Whether no batch will be admitted after those that were."""
        return self.next_batch >= self.settings.num_batches or self.prompts.ended
