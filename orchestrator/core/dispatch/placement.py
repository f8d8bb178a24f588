"""Which worker gets the next prompt group.

Owns: the choice among workers that *may* take the group. Never: whether they may (``staleness.py``, ``fleet.py``) and
which group is next (``lpt.py``). Invariant: a pure function of its arguments; another policy is another function
passed to ``PipelineState``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from transport.contracts.types import WorkerId

BATCH_PRIORITY_TOKENS = 10_000_000
"""Longer than any response: one batch earlier outranks any difference of predicted lengths."""


class WorkerLoad(Protocol):
    """What a placement sees of a worker. in_flight: samples.  predicted_load: predicted tokens of those samples."""

    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def capacity(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def predicted_load(self) -> float: ...


AnyWorker = TypeVar("AnyWorker", bound=WorkerLoad)

Placement: TypeAlias = Callable[[Sequence[WorkerLoad], WorkerId], WorkerId]
"""(workers that may take the group, at least one; a worker to avoid or "") -> the worker that gets it."""

Order: TypeAlias = Callable[[float], float]
"""Predicted tokens of a group -> its sort key inside a batch; the lowest key goes first."""


def least_loaded(workers: Sequence[WorkerLoad], avoid: WorkerId) -> WorkerId:
    """The worker with the fewest predicted tokens per slot; the one to avoid only when it is alone.

    Together with the longest-first order this is list scheduling, so its makespan has the bound of ``lpt.py`` when
    workers are equal. Ties go to the worker that joined first.
    Source: StreamRL sec. 5.3 (greedy longest first). Ours: ``avoid``, a group that timed out goes elsewhere.
    """
    choices = [worker for worker in workers if worker.worker_id != avoid] if avoid else workers
    return min(choices or workers, key=lambda worker: worker.predicted_load / worker.capacity).worker_id


def with_room(workers: Iterable[AnyWorker], num_samples: int, group_size: int) -> list[AnyWorker]:
    """Workers that may hold ``num_samples`` more: their slots, and one group of lookahead.

    The lookahead keeps slots busy while a plan travels; more of it would fix the order of groups too early.
    It is asked at every event while a group waits, of a thousand workers too: one comparison each, before other rules.
    """
    lookahead = group_size - num_samples
    return [worker for worker in workers if worker.in_flight <= worker.capacity + lookahead]


def plan_priority(batch: int, predicted_tokens: float) -> float:
    """Priority of a plan inside an engine, higher first: the earlier batch, then the longest prediction."""
    return predicted_tokens - batch * BATCH_PRIORITY_TOKENS
