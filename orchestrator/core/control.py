"""What people ask of the run while it goes on, and that it goes on after an end.

Owns: what each request changes. Never: whether it may be asked (``loop/control.py``); here it is on the log, and is
obeyed as far as that is safe. Invariant: a request that cannot be taken changes nothing, and the view shows it.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

from orchestrator.core.lanes.evaluation_schedule import EvaluationSchedule
from orchestrator.core.lanes.service import Requests
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.settings import changed
from orchestrator.core.rollout.lifecycle import Rollouts
from orchestrator.core.training.rounds import Rounds
from transport.contracts.messages import (
    CheckpointRequested,
    PauseRequested,
    ResumeRequested,
    RunResumed,
    SettingChanged,
    StopRequested,
)

ControlRequest: TypeAlias = (
    StopRequested | PauseRequested | ResumeRequested | CheckpointRequested | SettingChanged | RunResumed
)


class Control:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        rounds: Rounds,
        rollouts: Rollouts,
        requests: Requests,
        evaluation_schedule: EvaluationSchedule,
    ) -> None:
        self._p = pipeline
        self._rounds = rounds
        self._rollouts = rollouts
        self._requests = requests
        self._evaluation_schedule = evaluation_schedule

    def take(self, request: ControlRequest) -> None:
        match request:
            case StopRequested():
                self._stop(request)
            case PauseRequested():
                self._p.paused = not self._p.stopping
            case ResumeRequested():
                self._p.paused = False
            case CheckpointRequested():
                self._p.retention.requested = True
            case SettingChanged():
                self._set(request)
            case RunResumed():
                self._resume_run()
            case _:
                assert_never(request)

    def _stop(self, request: StopRequested) -> None:
        """Also out of a pause: the batch in training could not finish otherwise."""
        if not self._p.stopping:
            self._p.stop_reason = request.reason or "stopped"
            self._p.paused = False
            self._evaluation_schedule.give_up("the run stops")
            if not self._p.settings.service:  # what runs of requests finishes
                self._rollouts.suspend()

    def _resume_run(self) -> None:
        self._p.stop_reason = ""
        self._p.paused = False
        self._rounds.reopen()
        self._requests.reopen()

    def _set(self, request: SettingChanged) -> None:
        """Not after the trainer's last command, either."""
        p = self._p
        wanted = changed(p.settings, request.key, request.value)
        if wanted is None or p.training.finish_id is not None:
            return
        if wanted.update is not p.settings.update:
            p.fleet.change_update()
        p.settings = wanted
