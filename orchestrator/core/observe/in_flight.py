"""Which groups have been generated for the longest.

Owns: the question. Invariant: read from the deadlines that the state keeps anyway, so it costs no memory of its own.
"""

from __future__ import annotations

import heapq

import msgspec

from orchestrator.core.model.pipeline import Deadline, Pipeline
from transport.contracts.types import GroupId, WorkerId

MAX_SHOWN = 8


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    """A group that a worker generates. running_s: since it was dispatched.  missing: samples that have not come yet."""

    group_id: GroupId
    worker_id: WorkerId
    running_s: float
    missing: tuple[int, ...]
    group_size: int
    predicted_tokens: float
    attempt: int


def longest_running(pipeline: Pipeline) -> tuple[RunningView, ...]:
    """At most MAX_SHOWN groups, the one that was dispatched first at the head. Linear in dispatched groups."""
    running = (deadline for deadline in pipeline.deadlines if pipeline.awaited_by(deadline) is not None)
    return tuple(_view(pipeline, deadline) for deadline in heapq.nsmallest(MAX_SHOWN, running))


def _view(pipeline: Pipeline, deadline: Deadline) -> RunningView:
    group = pipeline.groups[deadline.group_id]
    dispatched_s = deadline.at_s - pipeline.settings.rollout_timeout_s
    return RunningView(
        group_id=group.group_id,
        worker_id=group.worker_id,
        running_s=max(0.0, pipeline.now_s - dispatched_s),
        missing=group.missing_samples(),
        group_size=len(group.tokens),
        predicted_tokens=group.predicted_tokens,
        attempt=group.attempt,
    )
