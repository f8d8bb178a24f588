"""What the run is doing now, as one JSON object: for the live view, ``/status`` and redis-cli.

run, elapsed_s       name; seconds on the run's clock
events_cursor        id of the last entry of the events log that is applied
...                  every field of ``core.view.PipelineView``: trained_version, num_admitted, num_batches, newest
                     {epoch, version, digest}, waiting_prompts, pending, running, scoring, ready, in_flight_samples,
                     rounds_outstanding, retained_bytes, paused, checkpoint_requested, stop_reason, finish_reason,
                     settings {key: value} of those that may change, ...
                     num_requests: that a service run got so far, null where the run trains
                     batches: [{batch, stages {stage: groups}, ended {outcome: groups}, sent, owed, closed, trained}]
                     evaluation: null, or the one under way: {number, weights, problems, waiting, running, scoring,
                     answered, seconds, held}
                     ranker: null, or how right predictions of lengths were: {state (not_yet_measured, trusted,
                     not_trusted), num_groups, recall_20, recall_10, recall_5, kendall_tau, drift, known_prompts,
                     refits}
                     scaling: null, or how many generation workers there are to be: {min_workers, max_workers, draining,
                     changed (batch, -1 never), from_workers, to_workers, reason}
wait                 null, or what is waited for now, also when all is well: {stage, waits_for, owner, waited_s}
blocked              null, or the same once nothing progressed for liveness.warn_s, with still_s, seconds since then
generation           the core's side of each generation worker: [{worker_id, capacity, in_flight, groups, loaded,
                     loading, fit}]
longest              groups that have been generated for the longest: [{group_id, worker_id, running_s, missing
                     [sample], group_size, predicted_tokens, attempt}]
queues               {stream: entries}
workers              every live worker, by its lease: [{worker, kind, doing, since_s, running, waiting, weights
                     "epoch.version.digest", counters {name: total}, kv_use 0..1, idle 0..1, tokens_per_s}]; the last
                     two are missing in the first seconds
requests             of a service run, those that are not all taken: {number: {samples, started, ended, failed, taken}}
last                 the last line of metrics.jsonl, {} before the first batch
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from orchestrator.core.state import PipelineState
from orchestrator.loop.decide import Decider
from orchestrator.loop.membership import Membership
from orchestrator.loop.watchdog import Watchdog, shown_wait
from orchestrator.observability.metrics import MetricsLog
from transport.broker import keys
from transport.broker.base import Broker
from transport.contracts.messages import WorkerStatus
from transport.contracts.types import WorkerId
from transport.process.clock import Clock

RATE_WINDOW_S = 10.0
"""Rates and idle shares are taken over this long."""
PUBLISH_S = 0.5
MAX_SHARE = 0.005
"""Of one core that making the status may take: with a thousand workers or ten thousand groups it comes every second or
two instead."""
TIME_TO_LIVE_S = 10.0
"""A status older than this is none: the orchestrator is away."""


class StatusBoard:
    """The newest status, and how old it is. ``latest`` is empty before the first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_s = clock.now_s()
        self.latest: dict[str, Any] = {}

    def put(self, status: dict[str, Any]) -> None:
        self.latest = status
        self._at_s = self._clock.now_s()

    @property
    def age_s(self) -> float:
        """Seconds since the newest status, or since the start where there was none."""
        return self._clock.now_s() - self._at_s


async def publish_status(
    broker: Broker,
    state: PipelineState,
    membership: Membership,
    metrics: MetricsLog,
    watchdog: Watchdog,
    clock: Clock,
    board: StatusBoard,
    decider: Decider,
) -> None:
    """Make the status, on the board and in the broker, forever."""
    usage = UsageWindow()
    while True:
        queues = await broker.streams()
        began_s = time.thread_time()
        view = msgspec.to_builtins(state.view())
        status = {
            "run": broker.run,
            "elapsed_s": round(clock.now_s(), 1),
            "events_cursor": decider.cursor,
            **view,
            "wait": shown_wait(state.wait(), clock.now_s()),
            "blocked": watchdog.blocked(state),
            "generation": view["workers"],
            "longest": msgspec.to_builtins(state.longest_running()),
            "queues": queues,
            "workers": usage.update(membership.statuses),
            "last": metrics.last_line,
            "requests": state.request_counts(),
        }
        board.put(status)
        encoded = msgspec.json.encode(status)
        took_s = time.thread_time() - began_s
        await broker.put_meta(keys.STATUS, encoded, ttl_s=TIME_TO_LIVE_S)
        await asyncio.sleep(min(max(PUBLISH_S, took_s / MAX_SHARE), TIME_TO_LIVE_S / 4))


class UsageWindow:
    """Busy shares and token rates of the workers over the last RATE_WINDOW_S, from their leases."""

    def __init__(self) -> None:
        self._seen: dict[WorkerId, deque[WorkerStatus]] = {}

    def update(self, leases: Mapping[WorkerId, WorkerStatus]) -> list[dict[str, Any]]:
        """One readable row a live worker, in order of name."""
        for gone in self._seen.keys() - leases.keys():
            del self._seen[gone]
        for worker_id, status in leases.items():
            history = self._seen.setdefault(worker_id, deque())
            if not history or status.elapsed_s > history[-1].elapsed_s:
                history.append(status)
            while history[-1].elapsed_s - history[0].elapsed_s > RATE_WINDOW_S:
                history.popleft()
        return [self._row(self._seen[worker_id]) for worker_id in sorted(leases)]

    @staticmethod
    def _row(history: deque[WorkerStatus]) -> dict[str, Any]:
        first, last = history[0], history[-1]
        elapsed_s = last.elapsed_s - first.elapsed_s
        row: dict[str, Any] = {
            "worker": last.worker_id,
            "kind": last.kind.value,
            "doing": last.doing,
            "since_s": round(last.since_s, 1),
            "running": last.running,
            "waiting": last.waiting,
            "weights": str(last.weights) if last.weights else "",
            "counters": last.counters,
            "kv_use": last.kv_use,
        }
        if elapsed_s > 0:
            row["idle"] = round(1.0 - (last.busy_s - first.busy_s) / elapsed_s, 3) + 0.0  # never -0.0
            row["tokens_per_s"] = (last.counters.get("tokens", 0.0) - first.counters.get("tokens", 0.0)) / elapsed_s
        return row
