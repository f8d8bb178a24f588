"""Plans of dispatch as far as they are carried out: who is to start which groups, in which order.

Owns: the queue of each worker, and what predictions were worth. Never: the gate, and the choice of a plan. Invariant: a
planned group is pending and in exactly one worker's queue; the first of a queue is planned, others may be obsolete.
"""

from __future__ import annotations

import heapq
from statistics import median

import msgspec

from orchestrator.core.model.batches import Group, PendingEntry
from orchestrator.core.model.calibration import Calibration
from transport.contracts.messages import RankerJudged
from transport.contracts.types import GroupId, WorkerId

ALIKE = 1.3
"""Factor by which paces may differ without meaning anything: expectations leave out as much."""
PACE_FADING = 0.95
"""Of a worker's pace with every sample: about the last 20 count."""


class Plans(msgspec.Struct, kw_only=True):
    """All of it.

    next_batch: first batch that no plan was asked for.  awaited: batch -> until when it waits for its plan.
    queues: heap of each worker's planned groups.
    planned: group -> worker in whose queue it is.  backlog: worker -> predicted tokens of those.
    limits: worker -> samples that its share meant it to run at once; beyond it takes nothing of others.
    paces: worker -> seconds of its samples, over those that were expected.  calibration: what predictions were worth.
    ranker: what it was judged last, None where nobody judges it.
    """

    next_batch: int = 0
    awaited: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    queues: dict[WorkerId, list[PendingEntry]] = msgspec.field(default_factory=dict[WorkerId, list[PendingEntry]])
    planned: dict[GroupId, WorkerId] = msgspec.field(default_factory=dict[GroupId, WorkerId])
    backlog: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    limits: dict[WorkerId, int] = msgspec.field(default_factory=dict[WorkerId, int])
    paces: dict[WorkerId, float] = msgspec.field(default_factory=dict[WorkerId, float])
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    ranker: RankerJudged | None = None

    def awaits(self, batch: int, now_s: float) -> bool:
        """Whether groups of ``batch`` wait for a plan that may still come in time."""
        return self.awaited.get(batch, now_s) > now_s

    def put(self, worker_id: WorkerId, entry: PendingEntry, tokens: float) -> None:
        """The group of ``entry`` is to start at this worker. tokens: predicted, of its missing samples."""
        heapq.heappush(self.queues.setdefault(worker_id, []), entry)
        self.planned[entry.group_id] = worker_id
        self.backlog[worker_id] = self.backlog.get(worker_id, 0.0) + tokens

    def remove(self, group: Group) -> None:
        """The group is no longer planned, if it was: it starts, ends, or waits for whoever comes."""
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
        self.paces.pop(worker_id, None)
        left = [entry.group_id for entry in queue if self.planned.get(entry.group_id) == worker_id]
        for group_id in left:
            del self.planned[group_id]
        return left

    def observe_pace(self, worker_id: WorkerId, seconds: float, expected_s: float) -> None:
        """A sample held a slot of the worker for ``seconds``; 0 where it was not measured."""
        if seconds <= 0 or expected_s <= 0:
            return
        pace = seconds / expected_s
        self.paces[worker_id] = PACE_FADING * self.paces.get(worker_id, pace) + (1 - PACE_FADING) * pace

    def pace(self, worker_id: WorkerId) -> float:
        """How slow the worker is, relative to the median of all; 1 where it was not measured, or is like the others."""
        if worker_id not in self.paces:
            return 1.0
        ratio = self.paces[worker_id] / median(self.paces.values())
        return ratio if max(ratio, 1 / ratio) > ALIKE else 1.0
