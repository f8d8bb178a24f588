"""The one mutable truth of a run: every fact that a decision rests on.

Owns: the fields, and the questions that need nothing else. Never: decisions, functions, clocks. Invariant: it encodes
to MessagePack whole, so a snapshot is the state and nothing is remembered elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from orchestrator.core.model.autoscale import Elastic
from orchestrator.core.model.groups import Batch, Group, PendingEntry, Stage
from orchestrator.core.model.lanes import Evaluations, Request
from orchestrator.core.model.outbox import CommandId, Outbox
from orchestrator.core.model.precision import Precision
from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.model.staleness import Lineage
from orchestrator.core.model.workers import Fleet
from transport.contracts.messages import PromptRef, PromptsArrived, RankerJudged
from transport.contracts.types import GroupId, WorkerId

SLOWDOWN_TOLERANCE = 1.3
"""Factor by which workers' speeds may differ without meaning anything: expectations leave out as much."""
SLOWDOWN_FADING = 0.95
"""Of a worker's slowdown with every sample: about the last 20 count."""
ENOUGH_SAMPLES = 64.0
"""Samples (after fading) before predictions are corrected; a correlation is then known to about 0.12."""
BATCH_FADING = 0.8
"""Weight of what was known, when another batch is added: lengths drift as the policy learns (StreamRL sec. 5.2)."""


class Calibration(msgspec.Struct, kw_only=True):
    """A regression of lengths on what was predicted: faded sums over finished samples of x = log predicted and y = log
    actual tokens.

    claimed: of the squared spreads that were predicted with them. A ranker that knows nothing is found out: its
    corrected predictions are nearly equal and as wide as the workload, and then no plan can be built on them.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    claimed: float = 0.0

    @property
    def known(self) -> bool:
        return self.weight >= ENOUGH_SAMPLES

    @property
    def explained(self) -> float:
        """Share of the variance of log lengths that predictions explain, in [0, 1]; 0 while too little is known."""
        if not self.known:
            return 0.0
        _, _, var_x, var_y, covariance = self._moments()
        if covariance <= 0 or var_x <= 1e-9 or var_y <= 1e-9:
            return 0.0
        return min(1.0, covariance * covariance / (var_x * var_y))

    def _moments(self) -> tuple[float, float, float, float, float]:
        """(mean x, mean y, variance of x, variance of y, covariance)."""
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        var_x = max(0.0, self.xx / self.weight - mean_x * mean_x)
        var_y = max(0.0, self.yy / self.weight - mean_y * mean_y)
        return mean_x, mean_y, var_x, var_y, self.xy / self.weight - mean_x * mean_y

    def fade(self) -> None:
        """What follows is newer than all that came before."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) * BATCH_FADING)

    def add(self, predicted_tokens: float, sigma: float, tokens: int) -> None:
        """One finished sample. Without a usable prediction there is nothing to learn."""
        if not 0 < predicted_tokens < math.inf or tokens < 1:
            return
        x, y = math.log(predicted_tokens), math.log(tokens)
        self.weight += 1.0
        self.x, self.y = self.x + x, self.y + y
        self.xx, self.xy, self.yy = self.xx + x * x, self.xy + x * y, self.yy + y * y
        self.claimed += sigma * sigma if 0 < sigma < math.inf else 0.0

    def corrected(self, predicted_tokens: float, sigma: float) -> tuple[float, float]:
        """(expected tokens, spread of the log length) as experience has it.

        The regression shrinks predictions towards the mean by what they explain. The spread is what it leaves; where
        predictions said how sure they were, their own spreads, scaled so that they are right on average.
        """
        if not self.known or not 0 < predicted_tokens < math.inf:
            return predicted_tokens, sigma
        mean_x, mean_y, var_x, var_y, covariance = self._moments()
        slope = max(0.0, covariance / var_x) if var_x > 1e-9 else 0.0
        left = math.sqrt(max(0.0, var_y - slope * (2 * covariance - slope * var_x)))
        claimed = math.sqrt(self.claimed / self.weight)
        spread = sigma * left / claimed if claimed > 0 and 0 < sigma < math.inf else left
        return math.exp(mean_y + slope * (math.log(predicted_tokens) - mean_x) + spread * spread / 2), spread


class Probes(msgspec.Struct, kw_only=True):
    """What probes of groups came to, since the run began.

    num_started: samples that started before the others of their group.  num_followed: groups whose others started
    before the probe had ended.
    """

    num_started: int = 0
    num_followed: int = 0


class Start(msgspec.Struct, kw_only=True):
    """Of the next batch whose workers begin together. batch: no earlier one waits.  at_s: it waits no longer, 0 while
    no worker can take it.
    """

    batch: int = 0
    at_s: float = 0.0


class Plans(msgspec.Struct, kw_only=True):
    """All of it.

    next_batch: first batch that no plan was asked for.  awaited: batch -> until when it waits for its plan.
    queues: heap of each worker's planned groups.
    planned: group -> worker in whose queue it is.  backlog: worker -> predicted tokens of those.
    limits: worker -> samples that its share meant it to run at once; beyond it takes nothing of others.
    crowded: workers whose memory is too small for all of their share at once.
    slowdowns: worker -> seconds of its samples, over those that were expected.
    calibration: what predictions were worth.  ranker: how it was judged last, None where there is none.
    probes: what they came to.  start: of the next batch, where nothing is planned.
    Invariant: a planned group is pending and in exactly one worker's queue; the first of a queue is planned, others may
    be obsolete.
    """

    next_batch: int = 0
    awaited: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    queues: dict[WorkerId, list[PendingEntry]] = msgspec.field(default_factory=dict[WorkerId, list[PendingEntry]])
    planned: dict[GroupId, WorkerId] = msgspec.field(default_factory=dict[GroupId, WorkerId])
    backlog: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    limits: dict[WorkerId, int] = msgspec.field(default_factory=dict[WorkerId, int])
    crowded: list[WorkerId] = msgspec.field(default_factory=list[WorkerId])
    slowdowns: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    ranker: RankerJudged | None = None
    probes: Probes = msgspec.field(default_factory=Probes)
    start: Start = msgspec.field(default_factory=Start)

    def awaits(self, batch: int, now_s: float) -> bool:
        """Whether groups of ``batch`` wait for a plan that may still come in time."""
        return self.awaited.get(batch, now_s) > now_s

    def put(self, worker_id: WorkerId, entry: PendingEntry, tokens: float) -> None:
        """The group of ``entry`` is to start at this worker. tokens: predicted, of its missing samples."""
        heapq.heappush(self.queues.setdefault(worker_id, []), entry)
        self.planned[entry.group_id] = worker_id
        self.backlog[worker_id] = self.backlog.get(worker_id, 0.0) + tokens

    def remove(self, group: Group) -> None:
        """The group is no longer planned, if it was: it starts, ends, or waits for any worker."""
        worker_id = self.planned.pop(group.group_id, None)
        if worker_id is None:
            return
        self.backlog[worker_id] = max(0.0, self.backlog[worker_id] - group.num_missing * group.predicted_tokens)
        queue = self.queues[worker_id]
        while queue and self.planned.get(queue[0].group_id) != worker_id:
            heapq.heappop(queue)
        if not queue:
            del self.queues[worker_id], self.backlog[worker_id]

    def next_for(self, worker_id: WorkerId, batch: int) -> GroupId | None:
        """What the worker is to start next, if it is of ``batch``."""
        queue = self.queues.get(worker_id)
        return queue[0].group_id if queue and queue[0].batch == batch else None

    def earliest_batch(self) -> int | None:
        """The earliest of any planned group, None when nothing is planned."""
        return min([queue[0].batch for queue in self.queues.values()]) if self.queues else None

    def forget_worker(self, worker_id: WorkerId) -> list[GroupId]:
        """It takes nothing any more. Returns the groups that were planned for it, in its order."""
        queue = sorted(self.queues.pop(worker_id, []))
        self.backlog.pop(worker_id, None)
        self.limits.pop(worker_id, None)
        self.note_share(worker_id, crowded=False)
        self.slowdowns.pop(worker_id, None)
        left = [entry.group_id for entry in queue if self.planned.get(entry.group_id) == worker_id]
        for group_id in left:
            del self.planned[group_id]
        return left

    def note_share(self, worker_id: WorkerId, *, crowded: bool) -> None:
        """Whether the worker's memory is too small for all of its new share at once."""
        if worker_id in self.crowded:
            self.crowded.remove(worker_id)
        if crowded:
            self.crowded.append(worker_id)

    def observe_slowdown(self, worker_id: WorkerId, seconds: float, expected_s: float) -> None:
        """A sample held a slot of the worker for ``seconds``; 0 where it was not measured."""
        if seconds <= 0 or expected_s <= 0:
            return
        slowdown = seconds / expected_s
        self.slowdowns[worker_id] = (
            SLOWDOWN_FADING * self.slowdowns.get(worker_id, slowdown) + (1 - SLOWDOWN_FADING) * slowdown
        )

    def slowdown(self, worker_id: WorkerId) -> float:
        """The worker's, relative to the median of all; 1 where it was not measured, or is like the others."""
        if worker_id not in self.slowdowns:
            return 1.0
        ratio = self.slowdowns[worker_id] / median(self.slowdowns.values())
        return ratio if max(ratio, 1 / ratio) > SLOWDOWN_TOLERANCE else 1.0

    def measured_slowdown(self, worker_id: WorkerId) -> float:
        """The worker's as measured; where it was not, the median of all, of which there must be one."""
        return self.slowdowns.get(worker_id) or median(self.slowdowns.values())

    def may_trust(self, *, measured: bool) -> bool:
        """Whether plans may rely on predictions. measured: only once they were compared with lengths of a batch."""
        distrusted = self.ranker is not None and not self.ranker.trusted
        return not distrusted and (self.calibration.known or not measured)


class Checkpoint(NamedTuple):
    """A durable checkpoint. cursor: last entry of the rounds log that it contains."""

    version: int
    cursor: CommandId


BASE_MODEL = Checkpoint(0, CommandId(0, 0))


def note_checkpoint(saved: list[Checkpoint], checkpoint: Checkpoint, keep: int) -> bool:
    """Add the newest checkpoint of a reader of the rounds log. Returns False for one that is known or older."""
    if saved and checkpoint <= saved[-1]:
        return False
    if saved and checkpoint.version == saved[-1].version:
        saved.pop()  # the same weights saved again, further along the log
    saved.append(checkpoint)
    del saved[: -max(1, keep)]
    return True


def is_saved(checkpoints: Sequence[Checkpoint], command_id: CommandId) -> bool:
    """Whether the newest contains what the rounds log holds up to this command."""
    return bool(checkpoints) and checkpoints[-1].cursor >= command_id


class Critic(msgspec.Struct, kw_only=True):
    """What the critic said of itself: the second reader of the rounds log, with a lineage of its own.

    epoch: of its fencing token, 0 before one was ready.  version: batches trained.  checkpoints: as in Retention.
    """

    epoch: int = 0
    version: int = 0
    checkpoints: list[Checkpoint] = msgspec.field(default_factory=list[Checkpoint])


class Retention(msgspec.Struct, kw_only=True):
    """Checkpoints that are kept, oldest first, and the bytes of rows that are retained. requested: one was asked for.

    freed: rows of batches below its version, and the rounds log up to its cursor, are freed.
    Invariant: both are kept back to the checkpoint before the newest (to the base model, where there is one only), of
    the trainer and of the critic, so
    that a trainer that finds the newest damaged goes on from the one before it; back to the newest only where the
    broker is over budget, or ``keep_checkpoints`` is 1.
    """

    checkpoints: list[Checkpoint] = msgspec.field(default_factory=list[Checkpoint])
    freed: Checkpoint = BASE_MODEL
    retained_bytes: int = 0
    requested: bool = False
    force_checkpoint: bool = False
    over_budget: bool = False

    def save(self, checkpoint: Checkpoint, keep: int) -> bool:
        """Take note of a checkpoint. Returns False for one that is known or older."""
        return note_checkpoint(self.checkpoints, checkpoint, keep)

    def free(self, keep: int, critic: Critic | None = None) -> Checkpoint | None:
        """Choose the oldest checkpoint that a trainer, or the critic, may go back to.

        Returns it if that frees older rows.
        """
        back = 1 if keep == 1 or self.over_budget else 2
        readers = [self.checkpoints] if critic is None else [self.checkpoints, critic.checkpoints]
        oldest = min(saved[-back] if len(saved) >= back else BASE_MODEL for saved in readers)
        if oldest <= self.freed:
            return None
        self.freed = oldest
        return oldest

    def checkpoint_due(self, batch: int, every: int, is_last: bool) -> bool:
        """Whether a checkpoint follows ``batch``. A forced or requested one is due once."""
        forced = self.force_checkpoint or self.requested
        self.force_checkpoint = self.requested = False
        return forced or is_last or (every > 0 and (batch + 1) % every == 0)


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
    damaged: checkpoints that the trainer could not use when it started last, and why.  went_back_to: the version that
    it went on from.
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
    went_back_to: int = 0


WaitStage: TypeAlias = Literal["prompts", "weights", "generation", "scoring", "training", "deciding"]


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline waits for. owner: who should act, worker ids where they are known, else a role.

    since_s: on the run's clock, when the wait became this one; progress within a stage makes it another one.
    why: what the owner said last, "" where nothing is known.  retried: the owner lives, and is asked again and again.
    """

    stage: WaitStage
    waits_for: str
    owner: str
    since_s: float
    why: str = ""
    retried: bool = False

    def is_same(self, other: Wait) -> bool:
        return (self.stage, self.waits_for, self.owner) == (other.stage, other.waits_for, other.owner)

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.stage} waits for {self.waits_for}; to act: {self.owner}{why}"


class Pipeline(msgspec.Struct, kw_only=True):
    """All of it. now_s: the run's clock at the last event.  next_batch: first batch not admitted yet.

    configured: the settings that the run was last started with; ``settings`` are those with what was changed since.
    groups: of all lanes.  pending: heap of those that wait for any worker.
    evaluations: of held-out problems, beside the batches.  plans: which worker is to start which of the pending groups.
    paused: nothing is dispatched, by request.  wait: what it waited for at the last tick.
    requests: of a service run, by number, those that are not all taken.  last_request: highest number so far.
    elastic: seconds of both stages, by which generation workers come and go.
    critic: what it reported, where ``settings.critic``.
    precision: whether engines may go on in fp8, where ``settings.fp8``.
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
    critic: Critic = msgspec.field(default_factory=Critic)
    precision: Precision = msgspec.field(default_factory=Precision)

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
        return batch > self.training.batch or not (self.batches[batch].num_rounds or self.batches[batch].phase)

    def live(self, group_id: GroupId) -> Group | None:
        """The group, unless it is unknown, freed or ended: late and repeated events find nothing."""
        group = self.groups.get(group_id)
        return None if group is None or group.stage is Stage.ENDED else group

    def running_groups(self) -> list[Group]:
        return [self.groups[group_id] for worker in self.fleet.workers.values() for group_id in worker.groups]

    def awaited_by(self, deadline: Deadline) -> Group | None:
        """The group that must be whole by then, None once that is obsolete."""
        group = self.groups.get(deadline.group_id)
        runs = group is not None and group.stage is Stage.RUNNING and group.attempt == deadline.attempt
        return group if runs else None

    def last_batch_admitted(self) -> bool:
        """Whether no batch will be admitted after those that were."""
        return self.next_batch >= self.settings.num_batches or self.prompts.ended
