"""Rolling membership: a finished group takes the place of one that still runs, first finished, first trained.

Owns: the exchange of two places between batches. Never: their number; every batch keeps as many as it was admitted
with. Invariant: nobody is moved behind the staleness bound: a long sample is moved on while its oldest tokens may be
trained later, and then its batch waits for it.

    batch b    ██ ██ ░░ ██      ░░ runs since version v ──┐ exchanged, if a - v <= max_staleness
    batch a    ░░ ██ ░░ ░░      ██ is ready ──────────────┘ (a > b)

Source: ours; AReaL and PipelineRL train whatever is finished. Price: a batch is trained on shorter responses than it
was admitted with, and a later one on longer ones; the close of a batch says by how many tokens.
"""

from __future__ import annotations

import heapq

from orchestrator.core.model.batches import Batch, Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.staleness import is_too_old


class Rolling:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    def pull_forward(self, ready: Group) -> None:
        """``ready`` was scored just now: give it the place of a group that still runs for an earlier batch."""
        p = self._p
        if p.settings.membership != "rolling" or p.stopping:
            return
        for index in range(p.training.batch, ready.batch):
            runs = self._last(p.batches[index], ready.batch)
            if runs is not None:
                self._exchange(runs, ready)
                return

    def _last(self, batch: Batch, later: int) -> Group | None:
        """The running group of ``batch`` that is expected to end last, if it may be trained with ``later``."""
        max_staleness = self._p.settings.max_staleness
        while batch.movable:
            group = self._p.groups.get(batch.movable[0].group_id)
            runs = group is not None and group.stage is Stage.RUNNING and group.batch == batch.index and not group.sent
            if group is not None and runs and not is_too_old(batch.index + 1, group.oldest_version, max_staleness):
                return None if is_too_old(later, group.oldest_version, max_staleness) else group
            heapq.heappop(batch.movable)
        return None

    def _exchange(self, runs: Group, ready: Group) -> None:
        """Both batches keep the number of their places, and of those that are not settled."""
        earlier, later = self._p.batches[runs.batch], self._p.batches[ready.batch]
        _replace(earlier, runs, ready)
        _replace(later, ready, runs)
        runs.batch, ready.batch = later.index, earlier.index
        runs.part, ready.part = ready.part, runs.part
        earlier.num_moved += 1
        earlier.moved_tokens += ready.loss_tokens - runs.predicted_tokens * len(runs.tokens)
        later.moved_tokens -= ready.loss_tokens - runs.predicted_tokens * len(runs.tokens)
        later.may_exchange(runs)


def _replace(batch: Batch, old: Group, new: Group) -> None:
    batch.group_ids[batch.group_ids.index(old.group_id)] = new.group_id
