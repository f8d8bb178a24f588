"""The plans that a generation worker holds, and what it writes of them: rows, failures, and the ack of what is done.

Owns: which samples of which plan are still to come, what was aborted, the columns of a row. Never: I/O.
Invariant: a plan leaves only after the commit that acknowledged it, so a report never misses a group that is at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from transport.broker import keys
from transport.broker.base import ZERO_ID, Ack, Append, Commit, RowWrite, parse_entry_id
from transport.contracts.messages import AbortRollouts, GroupPlan, RolloutFailed, RolloutFinished, RolloutInfo, encode
from transport.contracts.types import Column, FinishReason, GroupId, WorkerId, row_id
from transport.rows.columns import encode_array
from workers.generation.engine import Completion, EngineFailure
from workers.leases.events import event_append

REMEMBERED_ABORTS = 4096
"""Aborts kept for plans that are not claimed yet; more than a worker's queue ever holds."""


@dataclass(slots=True, kw_only=True)
class HeldPlan:
    """One claimed plan. to_come: samples that have no result yet.  aborted: the rest of them is not wanted.
    prompt_tokens: of its prompt, once that was read.
    """

    entry_id: str
    plan: GroupPlan
    to_come: set[int] = field(init=False)
    aborted: bool = False
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.to_come = set(self.plan.samples)

    @property
    def key(self) -> tuple[GroupId, int]:
        return self.plan.group_id, self.plan.attempt


class HeldPlans:
    """By (group, attempt), in the order in which they were claimed."""

    def __init__(self) -> None:
        self._held: dict[tuple[GroupId, int], HeldPlan] = {}
        self._aborts: dict[tuple[GroupId, int], None] = {}  # an ordered set
        self.cursor = ZERO_ID

    def add(self, entry_id: str, plan: GroupPlan) -> HeldPlan:
        """A plan was claimed. It is aborted from the start when its abort came before it."""
        held = HeldPlan(entry_id=entry_id, plan=plan)
        held.aborted = self._aborts.pop(held.key, 0) is None
        self._held[held.key] = held
        self.claimed(entry_id)
        return held

    def claimed(self, entry_id: str) -> None:
        self.cursor = max(self.cursor, entry_id, key=parse_entry_id)

    def get(self, group_id: GroupId, attempt: int) -> HeldPlan | None:
        return self._held.get((group_id, attempt))

    def of_group(self, group_id: GroupId) -> list[HeldPlan]:
        return [held for held in self._held.values() if held.plan.group_id == group_id]

    def remove(self, plans: Iterable[HeldPlan]) -> None:
        for held in plans:
            self._held.pop(held.key, None)

    def abort(self, command: AbortRollouts) -> list[HeldPlan]:
        """Mark what ``command`` means. Returns what is held of it; the rest is remembered until it is claimed."""
        attempts: Sequence[int | None] = command.attempts or [None] * len(command.group_ids)
        stopped: list[HeldPlan] = []
        for group_id, attempt in zip(command.group_ids, attempts, strict=False):
            meant = [held for held in self.of_group(group_id) if attempt in (None, held.plan.attempt)]
            stopped += meant
            if not meant and attempt is not None:
                self._aborts[group_id, attempt] = None
        for held in stopped:
            held.aborted = True
        while len(self._aborts) > REMEMBERED_ABORTS:
            del self._aborts[next(iter(self._aborts))]
        return stopped

    def lose(self, entry_ids: Iterable[str]) -> list[HeldPlan]:
        """Leases that went to another worker: forget these plans without an acknowledgement."""
        lost = set(entry_ids)
        plans = [held for held in self._held.values() if held.entry_id in lost]
        self.remove(plans)
        return plans

    @property
    def group_ids(self) -> tuple[GroupId, ...]:
        return tuple(dict.fromkeys(held.plan.group_id for held in self._held.values()))

    @property
    def num_samples(self) -> int:
        """Samples that are to come."""
        return sum(len(held.to_come) for held in self._held.values())


def row_write(completion: Completion, held: HeldPlan, worker_id: WorkerId) -> RowWrite:
    """The row of one finished sample, and the event that reports it if the row is new."""
    num_tokens = len(completion.response_ids)
    info = RolloutInfo(
        worker_id=worker_id,
        finish_reason=completion.finish_reason,
        prompt_tokens=held.prompt_tokens,
        response_tokens=num_tokens,
        spans=completion.spans,
        attempt=completion.attempt,
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
    )
    columns = {
        Column.RESPONSE_IDS: encode_array(Column.RESPONSE_IDS, completion.response_ids),
        Column.ROLLOUT_LOGPROBS: encode_array(Column.ROLLOUT_LOGPROBS, completion.logprobs),
        Column.ROLLOUT_INFO: encode(info),
    }
    row = row_id(completion.group_id, completion.sample)
    finished = RolloutFinished(
        row_id=row,
        worker_id=worker_id,
        response_tokens=num_tokens,
        finish_reason=completion.finish_reason,
        oldest=completion.spans[0].weights,
        newest=completion.spans[-1].weights,
        num_bytes=sum(map(len, columns.values())),
        queued_s=completion.queued_s,
        engine_s=completion.engine_s,
    )
    append = event_append(
        finished,
        row=row,
        worker=worker_id,
        weights=str(finished.newest),
        tokens=num_tokens,
        predicted_tokens=round(held.plan.predicted_tokens),
        finish=completion.finish_reason.value,
    )
    return RowWrite(row_id=row, columns=columns, on_insert=(append,))


def failure_append(failure: EngineFailure, worker_id: WorkerId) -> Append:
    event = RolloutFailed(
        group_id=failure.group_id,
        worker_id=worker_id,
        samples=failure.samples,
        reason=failure.reason,
        retryable=failure.retryable,
    )
    return event_append(event, group=failure.group_id, worker=worker_id, reason=failure.reason)


@dataclass(slots=True)
class Publication:
    """One commit, and the plans that it finishes."""

    commit: Commit
    finished: list[HeldPlan] = field(default_factory=list[HeldPlan])


def publication(results: Sequence[Completion | EngineFailure], plans: HeldPlans, worker_id: WorkerId) -> Publication:
    """Everything that is ready, in one commit, with the ack of each plan whose last sample is among it.

    One commit and not one for each sample: an ack can then never overtake a row of its group.
    """
    rows: list[RowWrite] = []
    appends: list[Append] = []
    touched: dict[str, HeldPlan] = {}
    for result in results:
        held = plans.get(result.group_id, result.attempt)
        if held is None:
            continue  # its lease was lost: the worker that has it now writes it
        touched[held.entry_id] = held
        if isinstance(result, Completion):
            held.to_come.discard(result.sample)
            if result.finish_reason is not FinishReason.ABORT:
                rows.append(row_write(result, held, worker_id))
        else:
            held.to_come.difference_update(result.samples)
            if not held.aborted:
                appends.append(failure_append(result, worker_id))
    finished = [held for held in touched.values() if not held.to_come]
    acks = [Ack(queue=keys.plans(worker_id), entry_id=held.entry_id) for held in finished]
    return Publication(Commit(rows=rows, appends=appends, acks=acks), finished)
