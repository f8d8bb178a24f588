"""What a generation worker writes: finished samples as rows, failures as events, and the ack of what is done.

Owns: the columns of a row and the readable fields of its event. Never: I/O, decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transport.broker import keys
from transport.broker.base import Ack, Append, Commit, Entry, RowWrite
from transport.messages import Event, RolloutFailed, RolloutFinished, RolloutInfo, encode
from transport.rows import encode_array
from transport.types import Column, FinishReason, WorkerId, row_id
from workers.generation.engine import Completion, EngineFailure
from workers.generation.plans import HeldPlan, HeldPlans


def event_entry(event: Event, **fields: str | int) -> Entry:
    """An entry of the events log: the event, and beside it what a reader with redis-cli wants to see."""
    shown = {"event": type(event).__name__} | {name: str(value) for name, value in fields.items()}
    return Entry(fields=shown, payload=encode(event))


def row_write(completion: Completion, held: HeldPlan, worker_id: WorkerId) -> RowWrite:
    """The row of one finished sample, and the event that tells of it if the row is new."""
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
    entry = event_entry(
        finished,
        row=row,
        worker=worker_id,
        weights=str(finished.newest),
        tokens=num_tokens,
        predicted_tokens=round(held.plan.predicted_tokens),
        finish=completion.finish_reason.value,
    )
    return RowWrite(row_id=row, columns=columns, on_insert=(Append(stream=keys.EVENTS, entry=entry),))


def failure_append(failure: EngineFailure, worker_id: WorkerId) -> Append:
    event = RolloutFailed(
        group_id=failure.group_id,
        worker_id=worker_id,
        samples=failure.samples,
        reason=failure.reason,
        retryable=failure.retryable,
    )
    entry = event_entry(event, group=failure.group_id, worker=worker_id, reason=failure.reason)
    return Append(stream=keys.EVENTS, entry=entry)


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
            continue  # its lease was lost: whoever has it now writes it
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
