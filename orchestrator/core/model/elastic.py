"""What is remembered of workers that come and go while a run goes on. Who decides with it is ``elastic_fleet.py``."""

from __future__ import annotations

import msgspec

from orchestrator.core.fleet.autoscale import Change, Scaling
from transport.contracts.types import WorkerId


class Elastic(msgspec.Struct, kw_only=True):
    """What is remembered.

    since_s: when the newest version was trained, None before the first: until then nothing is measured.
    training_s: seconds of the trainer's work since.  idle_s: worker-seconds without a sample.  present_s: of all.
    begun_s, ended_s: since then, when the first sample ran, and when the last one came.
    spawned: workers asked for in all.  asked_s: when, of those that have not joined.  lost_s: by name without the
    incarnation, when a worker died that may be started again.  draining: who is to leave, not told yet or not gone.
    """

    scaling: Scaling = msgspec.field(default_factory=Scaling)
    since_s: float | None = None
    training_s: float = 0.0
    idle_s: float = 0.0
    present_s: float = 0.0
    begun_s: float | None = None
    ended_s: float | None = None
    spawned: int = 0
    asked_s: list[float] = msgspec.field(default_factory=list[float])
    lost_s: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    draining: list[WorkerId] = msgspec.field(default_factory=list[WorkerId])
    last: Change | None = None
