"""Plans of dispatch as far as they are carried out, and what is known of the predictions that they rest on.

Owns: the queue of each worker, how slow workers are, and what predictions turned out to be worth. Never: the gate, and
the choice of a plan. Invariant: a planned group is pending and in exactly one worker's queue; the first of a queue is
planned, others may be obsolete.
"""

from __future__ import annotations

import heapq
import math
from statistics import median

import msgspec

from orchestrator.core.model.groups import Group, PendingEntry
from transport.contracts.messages import RankerJudged
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
        """Whether there is enough to judge by."""
        return self.weight >= ENOUGH_SAMPLES

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
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        var_x = max(0.0, self.xx / self.weight - mean_x * mean_x)
        var_y = max(0.0, self.yy / self.weight - mean_y * mean_y)
        covariance = self.xy / self.weight - mean_x * mean_y
        slope = max(0.0, covariance / var_x) if var_x > 1e-9 else 0.0
        left = math.sqrt(max(0.0, var_y - slope * (2 * covariance - slope * var_x)))
        claimed = math.sqrt(self.claimed / self.weight)
        spread = sigma * left / claimed if claimed > 0 and 0 < sigma < math.inf else left
        return math.exp(mean_y + slope * (math.log(predicted_tokens) - mean_x) + spread * spread / 2), spread


class Plans(msgspec.Struct, kw_only=True):
    """All of it.

    next_batch: first batch that no plan was asked for.  awaited: batch -> until when it waits for its plan.
    queues: heap of each worker's planned groups.
    planned: group -> worker in whose queue it is.  backlog: worker -> predicted tokens of those.
    limits: worker -> samples that its share meant it to run at once; beyond it takes nothing of others.
    slowdowns: worker -> seconds of its samples, over those that were expected.
    calibration: what predictions were worth.  ranker: how it was judged last, None where there is none.
    """

    next_batch: int = 0
    awaited: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    queues: dict[WorkerId, list[PendingEntry]] = msgspec.field(default_factory=dict[WorkerId, list[PendingEntry]])
    planned: dict[GroupId, WorkerId] = msgspec.field(default_factory=dict[GroupId, WorkerId])
    backlog: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    limits: dict[WorkerId, int] = msgspec.field(default_factory=dict[WorkerId, int])
    slowdowns: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    ranker: RankerJudged | None = None

    # -- queues

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
        self.slowdowns.pop(worker_id, None)
        left = [entry.group_id for entry in queue if self.planned.get(entry.group_id) == worker_id]
        for group_id in left:
            del self.planned[group_id]
        return left

    # -- how slow workers are

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
