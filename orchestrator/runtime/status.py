"""The run's status as JSON under one key, for the live view and whoever asks with redis-cli."""

from __future__ import annotations

import asyncio
import json

import msgspec

from orchestrator.core.state import PipelineState
from orchestrator.runtime.membership import Membership
from orchestrator.runtime.metrics import MetricsLog, UsageWindow
from orchestrator.runtime.watchdog import Watchdog
from transport.broker import keys
from transport.broker.base import Broker
from transport.clock import Clock

PUBLISH_S = 0.5
TIME_TO_LIVE_S = 10.0
"""A status older than this is none: the orchestrator is away."""


async def publish_status(
    broker: Broker,
    state: PipelineState,
    membership: Membership,
    metrics: MetricsLog,
    watchdog: Watchdog,
    clock: Clock,
) -> None:
    """Publish the status, forever."""
    usage = UsageWindow()
    while True:
        view = msgspec.to_builtins(state.view())
        status = {
            "run": broker.run,
            "elapsed_s": round(clock.now_s(), 1),
            **view,
            "blocked": watchdog.blocked(state),
            "queues": await broker.streams(),
            "workers": usage.update(membership.statuses),
            "last": metrics.last_line,
        }
        await broker.put_meta(keys.STATUS, json.dumps(status).encode(), ttl_s=TIME_TO_LIVE_S)
        await asyncio.sleep(PUBLISH_S)
