"""Generation workers as the core sees them, and which of them should take newer weights.

Owns: who is there, what each holds and serves, whose slot it is to load. Never: which group goes where. Invariant: at
most one load of one worker is open, and it is of the newest weights that were known when it was issued.

    in_flight   every worker loads at once, between two decode steps; running samples are kept
    staggered   one worker after another: no new group for it, its running groups finish, it loads, the next one
    barrier     each worker at its own batch boundary: groups of its current batch yes, of later ones no, then it loads
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from orchestrator.core.model.groups import EVAL, NO_WORKER, Group, PendingEntry
from transport.contracts.types import GroupId, UpdateMode, WeightIdentity, WorkerId, WorkerKind

MAX_LOAD_ATTEMPTS = 3
"""Failed loads in a row after which a worker stands aside: it gets no groups until a load succeeds."""
MAX_PAUSE_S = 8.0
"""Seconds between two loads of a worker that stands aside, at most. When a network comes back, a load that is
under way fails within 16 s (its last SYN was lost) or succeeds: a longer pause would make the worker the late one."""


def pause_s(num_failures: int) -> float:
    """Seconds before the next load after ``num_failures`` in a row: none at first, then 1, 2, 4 .. MAX_PAUSE_S."""
    if num_failures < MAX_LOAD_ATTEMPTS:
        return 0.0
    return min(MAX_PAUSE_S, 2.0 ** min(num_failures - MAX_LOAD_ATTEMPTS, 16))


class Worker(msgspec.Struct, kw_only=True):
    """One generation worker.

    capacity: samples it decodes at once.  loaded: weights it serves.  loading: weights that it was sent to load.
    load_failures: loads that failed since the last one that succeeded.  load_problem: why the last of them failed.
    refused_s: when it failed for a reason that asking again cannot mend, None: it did not.
    retry_at_s: when it is asked to load again, 0: at once.  aside_s: since when it stands aside, None: it does not.
    groups: dispatched to it and not finished.  evaluating: how many of them are of the eval lane.
    in_flight: samples expected of them.  predicted_load: their tokens.
    batch: newest batch it was given groups of.  aborting: groups that it should stop, not yet seen stopped.
    draining: it gets nothing more, and leaves when it holds nothing.
    probing: heap of its groups of which one sample runs alone, and of some that were.
    """

    worker_id: WorkerId
    capacity: int
    loaded: WeightIdentity | None = None
    loading: WeightIdentity | None = None
    load_deadline_s: float = 0.0
    load_failures: int = 0
    load_problem: str = ""
    refused_s: float | None = None
    retry_at_s: float = 0.0
    aside_s: float | None = None
    groups: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    evaluating: int = 0
    in_flight: int = 0
    predicted_load: float = 0.0
    batch: int = -1
    aborting: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    draining: bool = False
    probing: list[PendingEntry] = msgspec.field(default_factory=list[PendingEntry])

    @property
    def healthy(self) -> bool:
        return not self.stands_aside and not self.draining

    @property
    def stands_aside(self) -> bool:
        return self.load_failures >= MAX_LOAD_ATTEMPTS

    def load_failed(self, problem: str, now_s: float) -> None:
        self.loading = None
        self.load_failures += 1
        self.load_problem = problem
        if self.stands_aside:
            self.retry_at_s = now_s + pause_s(self.load_failures)
            self.aside_s = now_s if self.aside_s is None else self.aside_s

    def may_load_again(self) -> None:
        """Forget the loads that failed before."""
        self.load_failures, self.load_problem, self.refused_s = 0, "", None
        self.retry_at_s, self.aside_s = 0.0, None

    def take(self, group: Group) -> None:
        self.groups[group.group_id] = None
        self.add(group, group.num_asked)
        if group.lane is EVAL:
            self.evaluating += 1
        else:
            self.batch = max(self.batch, group.batch)

    def release(self, group: Group) -> None:
        del self.groups[group.group_id]
        self.subtract(group, group.num_asked)
        if group.lane is EVAL:
            self.evaluating -= 1

    def add(self, group: Group, num_samples: int) -> None:
        """So many samples of ``group`` are expected of it."""
        self.in_flight += num_samples
        self.predicted_load += num_samples * group.expected_tokens

    def subtract(self, group: Group, num_samples: int) -> None:
        """So many samples of ``group`` came, or will not come from here."""
        self.in_flight -= num_samples
        self.predicted_load -= num_samples * group.expected_tokens
        if not self.in_flight:
            self.predicted_load = 0.0  # rounding must not outlive the work


def with_room(workers: Iterable[Worker], num_samples: int, group_size: int) -> list[Worker]:
    """Workers that may hold ``num_samples`` more: their slots, and one group of lookahead.

    The lookahead keeps slots busy while a plan travels; more of it would fix the order of groups too early.
    It is asked at every event while a group waits, of a thousand workers too: one comparison each, before other rules.
    """
    lookahead = group_size - num_samples
    return [worker for worker in workers if worker.in_flight <= worker.capacity + lookahead]


class Fleet(msgspec.Struct, kw_only=True):
    """All workers, the newest weights, and which worker is the next to load them.

    workers: generation workers in order of joining.  others: scoring workers and the trainer.  missing: those of
    ``others`` that were lost, and whose place nobody has taken yet.
    next_to_load: where workers load one after another.
    loads_pending: some worker may have to be sent to load; where none has, no event looks at every worker.
    pin: weights that an open evaluation needs in service.  pin_wanted: some of its problems wait for a worker.
    """

    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict[WorkerId, Worker])
    others: dict[WorkerId, WorkerKind] = msgspec.field(default_factory=dict[WorkerId, WorkerKind])
    missing: dict[WorkerId, WorkerKind] = msgspec.field(default_factory=dict[WorkerId, WorkerKind])
    newest: WeightIdentity | None = None
    next_to_load: WorkerId = NO_WORKER
    loads_pending: bool = True
    pin: WeightIdentity | None = None
    pin_wanted: bool = False

    def publish(self, weights: WeightIdentity) -> None:
        """Newer weights exist: every worker is asked at once, and pauses begin anew.

        One that stands aside does so until it loads them: what keeps it from one version mostly keeps it from the next.
        """
        self.newest = weights
        self.loads_pending = True
        for worker in self.workers.values():
            worker.load_failures = MAX_LOAD_ATTEMPTS if worker.stands_aside else 0
            worker.retry_at_s, worker.refused_s = 0.0, None

    def pin_to(self, weights: WeightIdentity | None, *, wanted: bool) -> None:
        """An evaluation needs workers that serve ``weights``, None: no more. wanted: also those without an attempt."""
        self.pin, self.pin_wanted = weights, wanted
        self.loads_pending = True

    def ids(self) -> list[WorkerId]:
        """Every worker that the core counts on, of all kinds."""
        return [*self.workers, *self.others]

    def serving(self) -> list[Worker]:
        """Workers that may take groups, in order of joining."""
        return [worker for worker in self.workers.values() if worker.healthy and worker.loaded is not None]

    def behind(self, worker: Worker) -> bool:
        """Whether the worker serves something else than the newest weights."""
        return self.newest is not None and (worker.loaded is None or age(worker.loaded) < age(self.newest))

    def keeps(self, worker: Worker) -> bool:
        """Whether the worker may not take newer weights yet: an evaluation needs those that it serves."""
        needed = self.pin_wanted or worker.evaluating > 0
        return self.pin is not None and needed and worker.loaded is not None and age(worker.loaded) == age(self.pin)

    def holds_back(self, worker: Worker, batch: int, update: UpdateMode, rollout_batches: int) -> bool:
        """Whether a group of ``batch`` must wait because this worker is on its way to newer weights.

        rollout_batches: batches between which a worker has no boundary, see ``staleness.may_admit``.
        """
        if update is UpdateMode.STAGGERED:
            return worker.worker_id == self.next_to_load
        begins = batch // rollout_batches > worker.batch // rollout_batches
        return update in (UpdateMode.BARRIER, UpdateMode.TOGETHER) and begins and self.behind(worker)

    def loads_due(self, update: UpdateMode) -> Iterator[Worker]:
        """Workers that have to load the newest weights now, in order of joining."""
        if not self.loads_pending:
            return
        for worker in self.workers.values():
            if self._may_load(worker) and self._is_ready(worker, update):
                yield worker
        waiting = any(self._may_load(worker) for worker in self.workers.values())
        self.loads_pending = bool(self.next_to_load) or waiting

    def end_pauses(self, now_s: float) -> None:
        """Workers whose pause is over may be asked to load again."""
        for worker in self.workers.values():
            if worker.stands_aside and worker.aside_s is None:  # a snapshot of before there were pauses
                worker.aside_s = now_s
            if worker.stands_aside and worker.loading is None and worker.retry_at_s <= now_s:
                worker.retry_at_s = 0.0
                self.loads_pending = True

    def _may_load(self, worker: Worker) -> bool:
        """Behind, there to stay, not in a pause, and not already loading something of this epoch."""
        if self.newest is None or worker.draining or worker.retry_at_s:
            return False
        if not self.behind(worker) or self.keeps(worker):
            return False
        return worker.loading is None or worker.loading.epoch != self.newest.epoch

    def _is_ready(self, worker: Worker, update: UpdateMode) -> bool:
        """Whether it may stop for a load; at once where it serves nothing, or a former epoch: it gets no work then."""
        if update is UpdateMode.IN_FLIGHT or worker.loaded is None or self.newest is None:
            return True
        if worker.loaded.epoch != self.newest.epoch:
            return True
        if worker.stands_aside:  # nobody waits for its turn
            return len(worker.groups) == worker.evaluating
        if update is UpdateMode.TOGETHER:
            return all(len(one.groups) == one.evaluating for one in self.workers.values() if one.healthy)
        finished = len(worker.groups) == worker.evaluating
        return finished and (update is UpdateMode.BARRIER or worker.worker_id == self.next_to_load)

    def choose_next_to_load(self) -> None:
        """The next of those that are behind: the oldest weights first, those that failed last."""

        def order(worker: Worker) -> tuple[int, tuple[int, int], int]:
            return worker.load_failures, age(worker.loaded) if worker.loaded else (0, 0), worker.in_flight

        if not self.loads_pending:
            return
        holder = self.workers.get(self.next_to_load)
        if holder is not None and self.behind(holder) and not holder.load_failures and not self.keeps(holder):
            return
        waiting = [w for w in self.workers.values() if w.healthy and self.behind(w) and not self.keeps(w)]
        following = min(waiting, key=order, default=None)
        self.next_to_load = following.worker_id if following is not None else NO_WORKER


def age(weights: WeightIdentity) -> tuple[int, int]:
    """Sort key, older first. The digest is left out: one epoch publishes a version once."""
    return weights.epoch, weights.version
