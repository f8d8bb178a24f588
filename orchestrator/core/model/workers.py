"""Generation workers as the core sees them, and how they take a new version of the weights.

Owns: who is there, what each holds and serves, whose turn it is to load. Never: which group goes where. Invariant: at
most one load of one worker is open, and it is of the newest weights that were known when it was issued.

    in_flight   every worker loads at once, between two decode steps; running samples are kept
    staggered   one worker after another: no new group for it, its running groups finish, it loads, the next one
    barrier     each worker at its own batch boundary: groups of its current batch yes, of later ones no, then it loads
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from orchestrator.core.model.batches import NOBODY, Group
from transport.contracts.types import GroupId, UpdateMode, WeightIdentity, WorkerId, WorkerKind

MAX_LOAD_ATTEMPTS = 3
"""Failed loads of one version after which a worker gets no more groups until there is a newer version."""


class Worker(msgspec.Struct, kw_only=True):
    """One generation worker.

    capacity: samples it decodes at once.  loaded: weights it serves.  loading: weights it was told to load.
    groups: dispatched to it and not finished.  in_flight: samples missing from them.  predicted_load: their tokens.
    evaluating: tries at held-out problems, with their predicted tokens; in_flight and predicted_load contain them.
    batch: newest batch it was given groups of.  aborting: groups it was told to stop, not yet seen stopped.
    draining: it gets nothing more, and leaves when it holds nothing.
    """

    worker_id: WorkerId
    capacity: int
    loaded: WeightIdentity | None = None
    loading: WeightIdentity | None = None
    load_deadline_s: float = 0.0
    load_failures: int = 0
    groups: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    in_flight: int = 0
    predicted_load: float = 0.0
    batch: int = -1
    aborting: dict[GroupId, None] = msgspec.field(default_factory=dict[GroupId, None])
    evaluating: dict[GroupId, float] = msgspec.field(default_factory=dict[GroupId, float])
    draining: bool = False

    @property
    def fit(self) -> bool:
        """Whether it can be expected to serve what it is told to."""
        return self.load_failures < MAX_LOAD_ATTEMPTS and not self.draining

    def take(self, group: Group) -> None:
        """The missing samples of ``group`` will come from here."""
        self.groups[group.group_id] = None
        self.in_flight += group.num_missing
        self.predicted_load += group.num_missing * group.predicted_tokens
        self.batch = max(self.batch, group.batch)

    def release(self, group: Group) -> None:
        """Nothing more of ``group`` is expected from here."""
        del self.groups[group.group_id]
        self._subtract(group, group.num_missing)

    def finish_sample(self, group: Group) -> None:
        """One sample of ``group`` came."""
        self._subtract(group, 1)

    def evaluate(self, group_id: GroupId, predicted_tokens: float) -> None:
        """The answer to a held-out problem will come from here."""
        self.evaluating[group_id] = predicted_tokens
        self.in_flight += 1
        self.predicted_load += predicted_tokens

    def stop_evaluating(self, group_id: GroupId) -> None:
        """It came, or is not wanted any more."""
        self._free(1, self.evaluating.pop(group_id))

    def _subtract(self, group: Group, num_samples: int) -> None:
        self._free(num_samples, group.predicted_tokens)

    def _free(self, num_samples: int, predicted_tokens: float) -> None:
        self.in_flight -= num_samples
        self.predicted_load -= num_samples * predicted_tokens
        if not self.in_flight:
            self.predicted_load = 0.0  # rounding must not outlive the work


class Fleet(msgspec.Struct, kw_only=True):
    """All workers, the newest weights, and whose turn it is.

    workers: generation workers in order of joining.  others: scoring workers and the trainer.
    pin: weights that an open evaluation needs in service.  pin_wanted: some of its problems wait for a worker.
    all_told: nobody is left to be told to load, until something changes; it spares the look at every worker.
    """

    workers: dict[WorkerId, Worker] = msgspec.field(default_factory=dict[WorkerId, Worker])
    others: dict[WorkerId, WorkerKind] = msgspec.field(default_factory=dict[WorkerId, WorkerKind])
    newest: WeightIdentity | None = None
    turn: WorkerId = NOBODY
    all_told: bool = False
    pin: WeightIdentity | None = None
    pin_wanted: bool = False

    def publish(self, weights: WeightIdentity) -> None:
        """Newer weights exist: everyone gets a fresh chance to load."""
        self.newest = weights
        self.all_told = False
        for worker in self.workers.values():
            worker.load_failures = 0

    def change_update(self) -> None:
        """Workers take versions in another way from now on: nobody's turn, everyone looked at again."""
        self.turn = NOBODY
        self.all_told = False

    def pin_to(self, weights: WeightIdentity | None, *, wanted: bool) -> None:
        """An evaluation needs workers that serve ``weights``, None: no more. wanted: also those without a try of it."""
        self.pin, self.pin_wanted = weights, wanted
        self.all_told = False

    def join(self, worker: Worker) -> None:
        """A worker arrived."""
        self.workers[worker.worker_id] = worker
        self.all_told = False

    def behind(self, worker: Worker) -> bool:
        """Whether the worker serves something else than the newest weights."""
        return self.newest is not None and (worker.loaded is None or age(worker.loaded) < age(self.newest))

    def keeps(self, worker: Worker) -> bool:
        """Whether the worker may not take newer weights yet: an evaluation needs those that it serves."""
        needed = self.pin_wanted or bool(worker.evaluating)
        return self.pin is not None and needed and worker.loaded is not None and age(worker.loaded) == age(self.pin)

    def holds_back(self, worker: Worker, batch: int, update: UpdateMode, rollout_batches: int = 1) -> bool:
        """Whether a group of ``batch`` must wait because this worker is on its way to newer weights.

        rollout_batches: batches between which a worker has no boundary, see ``staleness.may_admit``.
        """
        if update is UpdateMode.STAGGERED:
            return worker.worker_id == self.turn
        begins = batch // rollout_batches > worker.batch // rollout_batches
        return update is UpdateMode.BARRIER and begins and self.behind(worker)

    def loads_due(self, update: UpdateMode) -> Iterator[Worker]:
        """Workers to be told now to load the newest weights, in order of joining."""
        if self.all_told:
            return
        for worker in self.workers.values():
            if self._may_load(worker) and (self._must_load(worker) or self._is_ready(worker, update)):
                yield worker
        self.all_told = not self.turn and not any(self._may_load(worker) for worker in self.workers.values())

    def _may_load(self, worker: Worker) -> bool:
        """Behind, fit, and not already loading something of this epoch."""
        if self.newest is None or not worker.fit or not self.behind(worker) or self.keeps(worker):
            return False
        return worker.loading is None or worker.loading.epoch != self.newest.epoch

    def _must_load(self, worker: Worker) -> bool:
        """It cannot be given work with what it serves: nothing, or weights of a former epoch."""
        return worker.loaded is None or self.newest is None or worker.loaded.epoch != self.newest.epoch

    def _is_ready(self, worker: Worker, update: UpdateMode) -> bool:
        if update is UpdateMode.IN_FLIGHT:
            return True
        return not worker.groups and (update is UpdateMode.BARRIER or worker.worker_id == self.turn)

    def pass_turn(self) -> None:
        """Give the turn to the next worker that is behind: the oldest weights first, those that failed last."""
        if self.all_told:
            return
        holder = self.workers.get(self.turn)
        if holder is not None and self.behind(holder) and not holder.load_failures and not self.keeps(holder):
            return
        waiting = [w for w in self.workers.values() if w.fit and self.behind(w) and not self.keeps(w)]
        following = min(waiting, key=_turn_order, default=None)
        self.turn = following.worker_id if following is not None else NOBODY


def age(weights: WeightIdentity) -> tuple[int, int]:
    """Sort key, older first. The digest is left out: one epoch publishes a version once."""
    return weights.epoch, weights.version


def _turn_order(worker: Worker) -> tuple[int, tuple[int, int], int]:
    return worker.load_failures, age(worker.loaded) if worker.loaded else (0, 0), worker.in_flight
