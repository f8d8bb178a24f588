"""One sample of a group before its others, and what it shows of them.

    pending ──probe──► one sample runs ──ends──► pending: the others, as long as it was, for any worker
                          │                          │
                          └── its worker has room ───┴──► the others run: where it runs, or where there is room

Owns: whether a probe pays, and when the others follow a probe that still runs. Never: how (``rollout/lifecycle.py``).
Invariant: no slot is empty for a probe. The others of a running probe stand in the order of all that wait, longest
expected first, and only the worker is fixed; so a probe that is slow, lost or taken back holds nothing up.
Source: Seer (OSDI'26), sec. on context-aware scheduling. Differs: the others may run beside their probe; the ranker's
prediction counts, too; where nothing has to wait there are no probes.
"""

from __future__ import annotations

import heapq
import math

from orchestrator.core.model.groups import NO_PROBE, Group, Stage
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, with_room
from orchestrator.core.rollout.lifecycle import GOOD_RANKER, follow, may_probe, may_take


def probe_pays(p: Pipeline, group: Group) -> bool:
    """Whether ``group``, which is next, starts with one sample: others wait in any case, and lengths are not known.

    What waits is counted by its entries, of which some may be out of date: a probe too many costs nothing, as its
    others follow at once where slots are free.
    """
    if not may_probe(p, group) or p.plans.calibration.explained >= GOOD_RANKER:
        return False
    free = sum(max(0, worker.capacity - worker.in_flight) for worker in p.fleet.workers.values() if worker.healthy)
    return len(p.pending) * len(group.tokens) > free


def follow_longest(p: Pipeline, group: Group | None) -> bool:
    """Send the others of one running probe after it, where its worker has room and nothing longer waits.

    group: the next of those that wait for any worker. Returns whether a probe was followed.
    """
    if not p.settings.probes:
        return False
    before = (math.inf, 0.0)
    if group is not None:
        before = (group.batch, -math.inf if probe_pays(p, group) else -group.expected_tokens)
    chosen: Group | None = None
    for worker in p.fleet.workers.values():
        probed = _longest_probed(p, worker)
        if probed is None or (probed.batch, -probed.expected_tokens) > before or p.frozen(probed.batch):
            continue
        if with_room([worker], probed.num_missing - 1, len(probed.tokens)) and may_take(p, worker, probed):
            chosen, before = probed, (probed.batch, -probed.expected_tokens)
    if chosen is not None:
        follow(p, chosen)
    return chosen is not None


def _longest_probed(p: Pipeline, worker: Worker) -> Group | None:
    """Of the groups of which one sample runs there alone, that of the earliest batch which is expected to be longest.

    Drops obsolete entries.
    """
    while worker.probing:
        entry = worker.probing[0]
        group = p.groups.get(entry.group_id)
        runs = group is not None and group.stage is Stage.RUNNING and group.worker_id == worker.worker_id
        if group is not None and runs and group.probe != NO_PROBE and entry.order_key == -group.expected_tokens:
            return group
        heapq.heappop(worker.probing)
    return None
