"""When held-out problems are evaluated: which version is due, how long it may take, and when it is over.

Every ``eval_every`` versions the newest weights are pinned and every held-out problem is answered once under them.

    due ──► pinned ──► problems go out as slots allow ──► rows ──► scores ──► EvaluationOutcome, rows dropped
                          │ a worker that serves the pin takes no newer weights while it is needed
                          └ ends short, by name: hold_s after newer weights came, timeout_s after it began, nobody
                            serves the pin, the trainer started again, the run stops or is over

**No deadlock with the gate**: whatever waits for newer weights waits ``eval_hold_s`` longer at most.

Owns: the beginning and the end of an evaluation. Never: who answers a problem (``evaluation_attempts.py``), and
batches; an evaluation is in none, so nothing of it can be in a round. Source: ours.
"""

from __future__ import annotations

from orchestrator.core.lanes.evaluation_attempts import EvaluationTries
from orchestrator.core.model.evaluation import Evaluation
from orchestrator.core.model.outbox import HeldOutPromptsKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import age
from transport.contracts.messages import HeldOutPromptsArrived, RequestHeldOutPrompts


class EvaluationSchedule:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline, tries: EvaluationTries) -> None:
        self._p = pipeline
        self._tries = tries

    # -- after every event

    def advance(self) -> None:
        """End what is over, begin what is due. Before weights and dispatch, which heed the pin."""
        p = self._p
        if p.evaluations.current is not None:
            self._advance(p.evaluations.current)
        if p.evaluations.current is None and p.settings.eval_every and self._may_open():
            self._open()

    def _advance(self, current: Evaluation) -> None:
        newest = self._p.fleet.newest
        if self._p.finished:
            self.give_up("the run is over")
        elif current.over:
            whole = current.answered == current.num_problems
            self._close(current, "" if whole else "attempts at some problems are used up")
        elif current.newer_s is None and newest is not None and age(newest) > age(current.weights):
            current.newer_s = self._p.now_s

    def _may_open(self) -> bool:
        p = self._p
        newest = p.fleet.newest
        return (
            newest is not None
            and p.evaluations.due(newest.version, p.settings.eval_every)
            and p.evaluations.problems != []
            and not (p.finished or p.stopping or p.paused or p.settings.service)
            and p.training.finish_id is None
            and not p.retention.over_budget
        )

    def _open(self) -> None:
        """Pin the newest weights; ask for the problems first, if they are not known."""
        p, evaluations = self._p, self._p.evaluations
        assert p.fleet.newest is not None
        if evaluations.problems is None:
            if not evaluations.requested:
                evaluations.requested = True
                p.outbox.emit_until(HeldOutPromptsKey(), RequestHeldOutPrompts(count=p.settings.eval_problems))
            return
        problems = evaluations.problems[: p.settings.eval_problems]
        longest_first = sorted(range(len(problems)), key=lambda place: -problems[place].predicted_tokens)
        evaluations.current = Evaluation(
            number=evaluations.num_opened, weights=p.fleet.newest, num_problems=len(problems), waiting=longest_first
        )
        evaluations.num_opened += 1
        p.fleet.pin_to(evaluations.current.weights, wanted=bool(longest_first))

    # -- what is told

    def problems_arrived(self, event: HeldOutPromptsArrived) -> None:
        """They are the same for the whole run."""
        evaluations = self._p.evaluations
        self._p.outbox.confirm(HeldOutPromptsKey())
        if evaluations.problems is None:
            evaluations.problems = list(event.prompts)

    def trainer_restarted(self, version: int) -> None:
        """The pin was of the former trainer; what is evaluated from now on is of this one, from ``version`` on."""
        evaluations = self._p.evaluations
        self.give_up("the trainer started again")
        evaluations.reached = min(evaluations.reached, version)

    def expire(self) -> None:
        """Look at the deadlines of the whole; those of single tries were looked at before."""
        p, current = self._p, self._p.evaluations.current
        if current is None:
            return
        waited_s = p.now_s - current.newer_s if current.newer_s is not None else -1.0
        if current.opened_s is not None and p.now_s - current.opened_s >= p.settings.eval_timeout_s:
            self._close(current, f"it took longer than eval.timeout_s ({p.settings.eval_timeout_s:g} s)")
        elif waited_s >= p.settings.eval_hold_s:
            self._close(current, f"newer weights had waited for eval.hold_s ({p.settings.eval_hold_s:g} s)")
        elif waited_s >= 0 and current.waiting and not self._served(current):
            self._close(current, f"no worker serves {current.weights} any more")

    def _served(self, current: Evaluation) -> bool:
        """Whether some worker serves the pin, or will."""
        weights = [w for worker in self._p.fleet.workers.values() for w in (worker.loaded, worker.loading)]
        return any(one is not None and age(one) == age(current.weights) for one in weights)

    # -- the end

    def give_up(self, reason: str) -> None:
        """End the current evaluation short, so that the same version may be evaluated again if it is still newest."""
        evaluations = self._p.evaluations
        if evaluations.current is not None:
            reached = evaluations.reached
            self._close(evaluations.current, reason)
            evaluations.reached = reached

    def _close(self, current: Evaluation, reason: str) -> None:
        """Tell how it went, let go of the pin."""
        p = self._p
        self._tries.end_all()
        p.evaluations.current = None
        p.evaluations.reached = current.weights.version
        p.fleet.pin_to(None, wanted=False)
        p.outbox.emit(current.outcome(p.now_s, reason))
