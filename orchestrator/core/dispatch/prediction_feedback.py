"""What plans learn from samples that ended: how slow workers are, and what predictions were worth."""

from __future__ import annotations

from orchestrator.core.model.groups import MISSING, Batch, Lane
from orchestrator.core.model.pipeline import Pipeline
from transport.contracts.messages import RolloutFinished
from transport.contracts.types import parse_row_id


def observe_speed(p: Pipeline, event: RolloutFinished) -> None:
    """The seconds of a sample, over those of its steps at the batch that ran meanwhile.

    The batch is taken as the mean of what its share began with and what is left now.
    """
    if not (p.settings.plans or p.settings.migrate_running):
        return
    group, worker = p.groups.get(parse_row_id(event.row_id)[0]), p.fleet.workers.get(event.worker_id)
    if group is None or worker is None or group.worker_id != event.worker_id or group.lane is Lane.EVAL:
        return
    in_flight = min(worker.capacity, worker.in_flight)
    batch = (p.plans.limits.get(worker.worker_id, in_flight) + in_flight) / 2
    context = batch * (group.prompt_tokens + event.response_tokens / 2)
    expected_s = event.response_tokens * p.settings.decode_cost.step_s(batch, context)
    p.plans.observe_slowdown(worker.worker_id, event.engine_s, expected_s)


def compare_lengths(p: Pipeline, batch: Batch) -> None:
    """What was predicted for a whole batch with what came: what comes first of a batch are its short samples."""
    calibration = p.plans.calibration
    calibration.fade()
    for group in (p.groups[group_id] for group_id in batch.members):
        for tokens in group.tokens:
            if tokens != MISSING:
                calibration.add(group.predicted_tokens, group.predicted_sigma, tokens)
