"""What the live page asks for beside the status: lanes, curves and samples, gathered while the run goes on.

lanes        {cell_s, cells, until_s, states [name], lanes [{place, kind, doing, busy}], lanes_left_out}
             doing, busy: a character a cell, the newest last: the state's letter (a is states[0], a space: not there),
             and the share of the cell in which it computed, in ninths
curves       {name: [number or null]}, one list a number of metrics.jsonl, a point a batch (thinned)
bubbles      {batches [first, last], stages {generation, trainer: {"computing" or a cause: seconds}}}, {} at first
evaluations  the newest lines of evaluations in metrics.jsonl, oldest first
components   names of the reward's components among the curves
samples      newest first: [{row, reward, components, worker, tokens, finish, versions, engine_s, prompt, prompt_cut,
             response, response_cut}]; what a model wrote is there as it is: whoever shows it escapes it
"""

from __future__ import annotations

import asyncio
from typing import Any

from orchestrator.loop.membership import Membership
from orchestrator.observability.history import MAX_POINTS, LaneHistory
from orchestrator.observability.metrics import MetricsLog
from orchestrator.observability.report.recent_bubbles import recent_bubbles
from orchestrator.observability.samples import RecentSamples
from transport.process.clock import Clock

LOOK_S = 0.5
"""A cell of a lane is looked at twice."""
LOOKS_A_BUBBLE = 4
"""A page asks every two seconds."""
PATIENCE_S = 10.0
"""Bubbles are accounted for while somebody asked not longer ago."""


class LookBack:
    """Gathers; ``latest`` puts it together for whoever asks, about 1 ms for a long run."""

    def __init__(self, membership: Membership, metrics: MetricsLog, samples: RecentSamples, clock: Clock) -> None:
        self._membership = membership
        self._metrics = metrics
        self._samples = samples
        self._clock = clock
        self._lanes = LaneHistory()
        self._asked_s = -PATIENCE_S
        self._bubbles: dict[str, Any] = {}

    async def watch(self) -> None:
        """Note what the workers do, and account for bubbles while somebody looks, forever."""
        while True:
            for _ in range(LOOKS_A_BUBBLE):
                self._lanes.note(self._membership.statuses, self._clock.now_s())
                await asyncio.sleep(LOOK_S)
            if self._clock.now_s() - self._asked_s < PATIENCE_S:
                self._bubbles = await asyncio.to_thread(recent_bubbles, self._metrics.recent.records())

    def latest(self) -> dict[str, Any]:
        self._asked_s = self._clock.now_s()
        return {
            "lanes": self._lanes.as_dict(),
            "curves": self._metrics.curves.as_dict(),
            "bubbles": self._bubbles,
            "evaluations": self._metrics.evaluations[-MAX_POINTS:],
            "components": sorted(self._metrics.components),
            "samples": self._samples.newest_first,
        }
