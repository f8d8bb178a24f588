"""What planning learns from samples that ended: how slow workers are, and what predictions were worth.

Owns: what is compared with what. Never: the sums (``plans.py``, ``dispatch/calibration.py``), nor their use. Invariant:
only whole batches tell of predictions; what comes first of a batch are its short samples.
"""

from __future__ import annotations

from orchestrator.core.model.batches import MISSING, Batch
from orchestrator.core.model.pipeline import Pipeline
from transport.contracts.messages import RolloutFinished
from transport.contracts.types import parse_row_id


class Experience:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    def observe(self, event: RolloutFinished) -> None:
        """How slow a worker is: the seconds of a sample, over those of its steps at the batch that ran meanwhile.

        The batch is taken as the mean of what its share began with and what is left now.
        """
        p = self._p
        if not (p.settings.plans or p.settings.migrate_running):
            return
        group, worker = p.groups.get(parse_row_id(event.row_id)[0]), p.fleet.workers.get(event.worker_id)
        if group is None or worker is None or group.worker_id != event.worker_id:
            return
        in_flight = min(worker.capacity, worker.in_flight)
        batch = (p.plans.limits.get(worker.worker_id, in_flight) + in_flight) / 2
        context = batch * (group.prompt_tokens + event.response_tokens / 2)
        expected_s = event.response_tokens * p.settings.decode_cost.step_s(batch, context)
        p.plans.observe_pace(worker.worker_id, event.engine_s, expected_s)

    def learn(self, batch: Batch) -> None:
        """Compare what was predicted for a whole batch with what came."""
        calibration = self._p.plans.calibration
        calibration.fade()
        for group in (self._p.groups[group_id] for group_id in batch.members):
            for tokens in group.tokens:
                if tokens != MISSING:
                    calibration.add(group.predicted_tokens, group.predicted_sigma, tokens)
