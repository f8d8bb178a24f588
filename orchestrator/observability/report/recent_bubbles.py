"""Where the idle seconds of the last few batches went, for whoever looks at a run that goes on.

The same accounting as of a whole run (orchestrator/observability/report/bubbles.py), over events that are still in
memory. Owns: which batches are told of. Invariant: it looks back over whole batches whose samples have all ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.observability.report.bubbles import stages, total, usage_by_window
from orchestrator.observability.report.spans import build_timeline
from transport.contracts.messages import JournalRecord

BATCHES = 10
"""Enough to even out one odd batch."""
UNSETTLED = 2
"""The newest batches are left out: samples that still run have told nothing of themselves, and would look idle."""


def recent_bubbles(records: Sequence[JournalRecord]) -> dict[str, Any]:
    """Seconds by cause over the last whole batches in ``records``, {} before there are any.

    Returns: {batches: [first, last], stages: {stage: {"computing": s, cause: s, ...}}}; generation is summed over its
    workers. About 10 us an event.
    """
    timeline = build_timeline(records)
    settled = timeline.trained[: len(timeline.trained) - UNSETTLED][-BATCHES - 1 :]
    if len(settled) < 2:
        return {}
    before, last = settled[0], settled[-1]
    usage = usage_by_window(timeline, [before.at_s, last.at_s])
    by_stage: dict[str, dict[str, float]] = {}
    for stage, tracks in stages(timeline).items():
        of_stage = total([usage[track][0] for track in tracks])
        idle = {cause.value: round(seconds, 3) for cause, seconds in of_stage.idle_s.items()}
        by_stage[stage] = {"computing": round(of_stage.busy_s, 3), **idle}
    return {"batches": [before.batch + 1, last.batch], "stages": by_stage}
