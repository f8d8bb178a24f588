"""No progress is an event too: after one limit it is said everywhere, after a second it stops the run.

    progress ──► still for warn_s ──► log, status (``blocked``), terminal: stage, what it waits for, since when, who
                 still for stall_s ──► StalledError: exit code 3, everything kept for --resume; where all that it
                                       waits for lives and is asked again, RETRIED_STALLS times as late
    most groups get no rewards: these fail, or their samples cannot be generated
                 ──► RunFailedError: training on the rest would be called a success

Owns: when something last progressed. Never: what to do about a slow worker (the core has deadlines for that), or what
the run waits for (``core/view.py``). Invariant: what can repeat for ever while nothing gets done is
no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from orchestrator.core.model.pipeline import Wait
from orchestrator.errors import RunFailedError, StalledError
from transport.broker.reach import Away
from transport.contracts import messages
from transport.contracts.messages import Command, Event
from transport.contracts.settings import LivenessSettings
from transport.contracts.types import GroupId
from transport.process.clock import Clock

log = structlog.get_logger(__name__)

SCORED_GROUPS, MIN_FAILED_GROUPS = 32, 8
"""Groups. A run is judged by its last SCORED_GROUPS; sooner only where all of the first MIN_FAILED_GROUPS failed."""
RETRIED_STALLS = 3
"""Times ``stall_s`` for which a run waits for workers that live and are asked again: a network may come back."""
NO_PROGRESS = (
    messages.Tick,
    messages.BrokerUsage,
    messages.RankerJudged,
    messages.WorkerReported,
    messages.RolloutFailed,
    messages.RowsMissing,
    messages.WeightsFailed,
    messages.WorkerLost,
    messages.WorkerStarted,
)
"""Events that may repeat forever while nothing gets done."""


class Waiting(Protocol):
    """What knows what the run waits for (core.state.PipelineState)."""

    @property
    def paused(self) -> bool: ...

    def wait(self) -> Wait | None: ...

    def describe_wait(self) -> str: ...


def shown_wait(wait: Wait | None, now_s: float) -> dict[str, Any] | None:
    """A wait as people read it: for how long, and not since when on a clock of its own."""
    if wait is None:
        return None
    waited_s = round(max(0.0, now_s - wait.since_s), 1)
    why = {"why": wait.why} if wait.why else {}
    return {"stage": wait.stage, "waits_for": wait.waits_for, "owner": wait.owner, "waited_s": waited_s, **why}


def wait_for_broker(away: Away) -> dict[str, Any]:
    """What a run waits for while its broker is away, as ``shown_wait`` and ``Watchdog.blocked`` say it."""
    seconds = round(away.seconds, 1)
    return {
        "stage": "broker",
        "waits_for": f"broker {away.address} to answer, until {away.until_s:g} s",
        "owner": "the broker's host, or the network to it",
        "waited_s": seconds,
        "why": away.reason,
        "still_s": seconds,
    }


class Watchdog:
    def __init__(
        self,
        liveness: LivenessSettings,
        clock: Clock,
        *,
        max_failed_share: float = 1.0,
        away: Callable[[], Away | None] = lambda: None,
    ) -> None:
        """max_failed_share: share of the last groups without rewards that ends the run; 1: never.  away: whether the
        broker is, whose bound is its own (``broker.outage_s``): nothing else is to blame meanwhile.
        """
        self._away = away
        self._max_failed_share = max_failed_share
        self._judged: dict[GroupId, str] = {}  # of the last groups, why they have no rewards, or ""
        self._liveness = liveness
        self._clock = clock
        self._progress_s = clock.now_s()
        self._reached: dict[tuple[str, str], int] = {}
        self._warned_of: Wait | None = None
        self.pending: Mapping[str, str] = {}
        """Processes that an engine has not started yet, and its reason: often why nothing progresses."""
        self.troubles: Mapping[str, str] = {}
        """Live workers that go on with something wrong, and what it is: a server, an environment, a disk."""
        self.starting: Mapping[str, float] = {}
        """Live workers that cannot take work yet, and for how long, seconds: an engine's server loads its model."""
        self._failure = ""
        """Reason of the newest failed attempt at a sample since something progressed: an environment, a server."""

    def observe(self, event: Event, commands: Sequence[Command] = ()) -> None:
        """commands: what was decided on ``event``."""
        for told in (event, *commands):  # of one group, some: it counts once
            match told:
                case messages.GroupScored():
                    self._judge(told.group_id, "")
                case messages.ScoringFailed():  # of held-out problems, too, which are no slots
                    self._judge(told.group_id, told.reason)
                case messages.SlotOutcome(outcome="dead"):
                    self._judge(told.group_id, told.reason)
                    log.warning("a group is dead", group=told.group_id, reason=told.reason)
                case messages.RolloutFailed():
                    self._failure = told.reason
                case _:
                    pass
        if self._is_progress(event):
            self._failure = ""
            self._progress_s = self._clock.now_s()
            self._warned_of = None

    def blocked(self, state: Waiting) -> dict[str, Any] | None:
        """For the status: the wait and for how long nothing progressed, once that is over ``warn_s``."""
        still_s = self._still_s()
        wait = state.wait() if still_s >= self._liveness.warn_s else None
        shown = shown_wait(wait and self._explained(wait), self._clock.now_s())
        pending = {"pending": dict(self.pending)} if self.pending else {}
        return shown and {**shown, "still_s": round(still_s, 1), **pending}

    def check(self, state: Waiting) -> None:
        """Warn of each new wait from ``warn_s`` on. Raises StalledError at ``stall_s``.

        A pause is no stall, nor is a service without a request. Raises RunFailedError for groups without rewards.
        """
        self.check_groups()
        if self._away() is not None:
            self._progress_s = self._clock.now_s()
            return
        still_s = self._still_s()
        if still_s < min(self._liveness.warn_s, self._liveness.stall_s):
            return  # what it waits for takes a look at every group
        wait = state.wait()
        if state.paused or wait is None:
            self._progress_s = self._clock.now_s()
            return
        if still_s >= self._liveness.stall_s * (RETRIED_STALLS if wait.retried else 1):
            raise StalledError(f"no progress for {still_s:.0f} s: {self._detail(state, wait)}")
        if still_s < self._liveness.warn_s:
            return
        if self._warned_of is None or not wait.is_same(self._warned_of):
            self._warned_of = wait
            named = msgspec.to_builtins(self._explained(wait))
            log.warning("no progress", seconds=round(still_s), **named, detail=self._detail(state, wait))

    def _explained(self, wait: Wait) -> Wait:
        """The wait with why its owner does not act, where the core knows of no reason."""
        owners = wait.owner.replace(",", " ").split()
        causes = [trouble for worker, trouble in sorted(self.troubles.items()) if worker in owners]
        causes += [
            f"{worker} starts since {since_s:.0f} s"
            for worker, since_s in sorted(self.starting.items())
            if worker.partition("-")[0] in owners
        ]
        if self._failure and wait.stage == "generation":
            causes.append(f"the last attempt failed: {self._failure}")
        return msgspec.structs.replace(wait, why=wait.why or "; ".join(dict.fromkeys(causes)))

    def _detail(self, state: Waiting, wait: Wait) -> str:
        """All that is known, in words: the wait, its cause, and processes that are not started yet."""
        cause = "" if wait.why else self._explained(wait).why
        waiting = ", ".join(f"{name} ({reason})" for name, reason in self.pending.items())
        parts = (state.describe_wait(), cause, waiting and f"not started yet: {waiting}")
        return "; ".join(filter(None, parts))

    def _judge(self, group_id: GroupId, failed: str) -> None:
        self._judged[group_id] = failed
        for former in list(self._judged)[:-SCORED_GROUPS]:
            del self._judged[former]

    def check_groups(self) -> None:
        """When most groups have no rewards, the rest is a biased sample of what the policy does: RunFailedError."""
        failed = [reason for reason in self._judged.values() if reason]
        if len(failed) < MIN_FAILED_GROUPS or self._max_failed_share == 1.0:
            return
        if len(failed) == len(self._judged) or len(failed) >= self._max_failed_share * SCORED_GROUPS:
            raise RunFailedError(
                f"{len(failed)} of the last {len(self._judged)} groups have no rewards "
                f"(scoring.max_failed_share is {self._max_failed_share:g}), the last one because of: {failed[-1]}"
            )

    async def watch(self, state: Waiting) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.check(state)

    def _still_s(self) -> float:
        return self._clock.now_s() - self._progress_s

    def _is_progress(self, event: Event) -> bool:
        """What every restart of a process brings counts once: it joins, says that it is ready, loads weights."""
        match event:
            case messages.WorkerJoined():
                version = 0
            case messages.TrainerReady() | messages.WeightsLoaded():
                version = event.weights.version
            case _:
                return not isinstance(event, NO_PROGRESS)
        key = (type(event).__name__, event.worker_id.rpartition(".")[0])  # whichever of its incarnations it was
        if version <= self._reached.get(key, -1):
            return False
        self._reached[key] = version
        return True
