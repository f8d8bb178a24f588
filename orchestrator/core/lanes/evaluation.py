"""The eval lane: every ``eval_every`` versions, and of the first and the last ones (``eval_ends``), the newest weights
are pinned, and every held-out problem is answered once under them.

    due ──► pinned ──► problems go out as slots allow ──► rows ──► scores ──► EvaluationOutcome, rows dropped
                          │ a worker that serves the pin takes no newer weights while it is needed
                          └ ends short, by name: hold_s after newer weights came, timeout_s after it began, no worker
                            serves the pin, the trainer started again, the run stops or is over, or its end has waited
                            for this one long enough (``LAST_SHARE``)

- **No deadlock with the gate**: whatever waits for newer weights waits ``eval_hold_s`` longer at most.
- **The pin holds** twice: a worker with an open attempt is not sent to load (``Fleet.keeps``), and a row counts only if
  its oldest and its newest token are of the pinned weights. Any other is dropped and its problem attempted again.
- **The budget**: at most ``eval_budget`` of a worker's slots (one at least). Once newer weights wait for the worker, it
  may also take what training leaves free: the sooner it is through, the sooner they are loaded.
- **Priority** inside an engine is above training's, so that a full queue cannot keep the pin in service. What training
  loses is bounded by the budget, not by the priority.
- **Every attempt is a group of its own** of one sample: a late row of one that was taken back means nothing, and no row
  is judged twice.

Owns: these. Never: batches; an evaluation is in none, so nothing of it can be in a round. Source: ours.
"""

from __future__ import annotations

import heapq

from orchestrator.core.model.groups import Group, Lane, Outcome
from orchestrator.core.model.lanes import Attempt, Evaluation
from orchestrator.core.model.outbox import HeldOutPromptsKey
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, age
from orchestrator.core.rollout.lifecycle import (
    UNWANTED,
    Cause,
    GroupLane,
    announce,
    start,
    withdraw,
)
from transport.contracts.messages import (
    DropRows,
    GroupScored,
    HeldOutAnswer,
    PromptRef,
    RequestHeldOutPrompts,
    RolloutFinished,
    ScoringFailed,
    WorkerLost,
)
from transport.contracts.types import FinishReason, RowId, evaluation_id

LAST_SHARE = 0.05
"""Share of a run's time for which its end waits for the evaluation of the last weights."""
LAST_S = 10.0
"""Seconds for which a short run waits all the same."""


def why_over(p: Pipeline) -> str:
    """Why nothing more will be sent to the trainer; "" while something will."""
    if p.stopping:
        in_training = p.training.batch in p.batches and not p.frozen(p.training.batch)
        return "" if in_training else p.stop_reason
    if not p.last_batch_admitted() or p.training.batch < p.next_batch:
        return ""
    return "all batches are trained" if p.training.batch >= p.settings.num_batches else "the data ended"


def awaits_last_evaluation(p: Pipeline) -> bool:
    """Whether all is trained, and the last weights are still to be evaluated; the first call begins the wait."""
    evaluations = p.evaluations
    if not p.settings.eval_ends or p.stopping or evaluations.problems == [] or not why_over(p):
        return False
    if evaluations.last_until_s is None:
        evaluations.last_until_s = p.now_s + max(LAST_S, LAST_SHARE * p.now_s)
    return evaluations.reached < p.training.batch and p.now_s < evaluations.last_until_s


class EvaluationLane(GroupLane):
    """A group is one attempt at one held-out problem. Holds no state of its own."""

    @property
    def current(self) -> Evaluation:
        """The evaluation that is under way, where there is one: there is a group of it, or it was checked."""
        assert self._p.evaluations.current is not None
        return self._p.evaluations.current

    def advance(self) -> None:
        """End what is over, begin what is due. Before weights and dispatch, which respect the pin."""
        p = self._p
        if p.evaluations.current is not None:
            self._advance(p.evaluations.current)
        if p.evaluations.current is None and self._is_due() and self._may_open():
            self._open()

    def _advance(self, current: Evaluation) -> None:
        newest = self._p.fleet.newest
        if self._p.finished:
            self.give_up("the run is over")
        elif not current.waiting and not current.attempts:
            whole = current.answered == current.num_problems
            self._close("" if whole else "attempts at some problems are used up")
        elif current.newer_s is None and newest is not None and age(newest) > age(current.weights):
            current.newer_s = self._p.now_s

    def _is_due(self) -> bool:
        """The first weights of all are due, then the first at or after each multiple, then the last ones."""
        p, every, reached = self._p, self._p.settings.eval_every, self._p.evaluations.reached
        if p.fleet.newest is None:
            return False
        version = p.fleet.newest.version
        if every and version // every > reached // every:
            return True
        return p.settings.eval_ends and (reached < 0 or (version >= p.training.batch and awaits_last_evaluation(p)))

    def _may_open(self) -> bool:
        p = self._p
        return (
            p.evaluations.problems != []
            and not (p.finished or p.stopping or p.paused or p.settings.service)
            and p.training.finish_id is None
            and not p.retention.over_budget
        )

    def _open(self) -> None:
        """Pin the newest weights; request the problems first, if they are not known."""
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

    def dispatch(self) -> None:
        """Hand out problems, to the worker with the most room first. After training's dispatch, which goes first."""
        p, current = self._p, self._p.evaluations.current
        if current is None or not current.waiting or p.paused or p.stopping:
            return
        room = [(-self._room(worker), place, worker) for place, worker in enumerate(p.fleet.workers.values())]
        heap = [entry for entry in room if entry[0] < 0]
        heapq.heapify(heap)
        while heap and current.waiting:
            taken, place, worker = heap[0]
            self._attempt(current.waiting.pop(0), worker)
            if taken < -1:
                heapq.heapreplace(heap, (taken + 1, place, worker))
            else:
                heapq.heappop(heap)
        self._update_pin()

    def _room(self, worker: Worker) -> int:
        """Problems that may be given to the worker now: it serves the pin, and is not on its way to other weights."""
        serves = worker.loaded is not None and age(worker.loaded) == age(self.current.weights)
        leaves = worker.loading is not None or worker.worker_id == self._p.fleet.next_to_load
        if leaves or not serves or not worker.healthy:
            return 0
        allowed = max(1, int(worker.capacity * self._p.settings.eval_budget))
        if self._p.fleet.behind(worker) or self._p.evaluations.last_until_s is not None:
            allowed = max(allowed, worker.capacity - (worker.in_flight - worker.evaluating))
        return allowed - worker.evaluating

    def _attempt(self, problem: int, worker: Worker) -> None:
        p, current = self._p, self.current
        name = evaluation_id(current.number, current.num_attempts)
        group = Group.of(self._problem(problem), name, current.number, 1, lane=Lane.EVAL)
        p.groups[group.group_id] = group
        current.num_attempts += 1
        if current.opened_s is None:
            current.opened_s = p.now_s
        current.attempts[group.group_id] = Attempt(problem=problem, deadline_s=self._deadline_s())
        announce(p, [group])
        start(p, group, worker)

    def _problem(self, place: int) -> PromptRef:
        assert self._p.evaluations.problems is not None
        return self._p.evaluations.problems[place]

    def _deadline_s(self) -> float:
        return self._p.now_s + self._p.settings.rollout_timeout_s

    def _update_pin(self) -> None:
        """Workers without an attempt are kept from newer weights only while one may be given to them."""
        self._p.fleet.pin_to(self.current.weights, wanted=bool(self.current.waiting))

    # -- what differs in the life of a group

    def finished(self, group: Group, sample: int, event: RolloutFinished) -> None:
        self.current.tokens += event.policy_tokens
        self.current.engine_s += event.engine_s
        super().finished(group, sample, event)

    def why_unusable(self, group: Group, event: RolloutFinished) -> Cause | None:
        """It counts if all of it is of the pinned weights."""
        if event.finish_reason is FinishReason.ABORT:
            return Cause.ABORTED
        pinned = age(event.oldest) == age(event.newest) == age(self.current.weights)
        return None if pinned else Cause.OTHER_WEIGHTS

    def row_arrived(self, group: Group, event: RolloutFinished) -> None:
        """From now on the deadline is that of scoring."""
        self.current.attempts[group.group_id].deadline_s = self._deadline_s()

    def vanished(self, group: Group, sample: int, row: RowId) -> bool:
        """An answer that is scored needs its row no more; any other is asked for again, under another id."""
        self.retry(group, "its row went missing")
        return False

    def scored(self, group: Group, event: GroupScored) -> None:
        """A score without its row's event (the broker lost it) does not say under which weights: attempted again."""
        if len(event.rewards) != 1:
            return
        if group.num_missing:
            self.retry(group, "its row was not reported")
            return
        current = self.current
        current.answered += 1
        current.reward += event.rewards[0]
        current.response_tokens += group.tokens[0]
        for name, value in event.components.items():
            current.components[name] = current.components.get(name, 0.0) + value
        problem = self._problem(self._drop(group))
        if problem.eval_set:
            current.answers.append(
                HeldOutAnswer(
                    eval_set=problem.eval_set,
                    prompt_id=problem.prompt_id,
                    reward=event.rewards[0],
                    components=event.components,
                    response_tokens=group.tokens[0],
                )
            )

    def scoring_failed(self, group: Group, event: ScoringFailed) -> None:
        self.retry(group, event.reason)

    def end(self, group: Group, outcome: Outcome, reason: str, *, free: bool = False) -> None:
        """Whatever ends it unanswered is a failed attempt."""
        self.retry(group, reason)

    def retry(self, group: Group, reason: str, *, exclude_worker: bool = False, abort: str = "") -> None:
        """The problem waits for another attempt, unless its attempts are used up."""
        current, problem = self.current, self._drop(group)
        failures = current.failures[problem] = current.failures.get(problem, 0) + 1
        if failures < self._p.settings.max_attempts:
            self._wait(problem)

    def worker_lost(self, group: Group, lost: WorkerLost) -> None:
        """The problem goes to others that serve the pin; one that kills workers is given up."""
        current, problem = self.current, self._drop(group)
        deaths = current.deaths[problem] = current.deaths.get(problem, 0) + (not lost.left)
        if deaths < self._p.settings.max_deaths:
            self._wait(problem)

    def _wait(self, problem: int) -> None:
        self.current.waiting.append(problem)
        self._update_pin()

    def _drop(self, group: Group) -> int:
        """Nothing of this attempt is wanted any more. Returns its problem."""
        p = self._p
        withdraw(p, group, "" if p.finished else UNWANTED)
        p.outbox.emit(DropRows(group_ids=(group.group_id,)))
        del p.groups[group.group_id]
        return self.current.attempts.pop(group.group_id).problem

    # -- the end of an evaluation

    def expire(self) -> None:
        p, current = self._p, self._p.evaluations.current
        if current is None:
            return
        for name in [name for name, attempt in current.attempts.items() if attempt.deadline_s <= p.now_s]:
            self.retry(p.groups[name], "timed out")
        waited_s = p.now_s - current.newer_s if current.newer_s is not None else -1.0
        last_until_s = p.evaluations.last_until_s
        if current.opened_s is not None and p.now_s - current.opened_s >= p.settings.eval_timeout_s:
            self._close(f"it took longer than eval.timeout_s ({p.settings.eval_timeout_s:g} s)")
        elif last_until_s is not None and p.now_s >= last_until_s:
            self._close(f"the run's end had waited for it for {LAST_SHARE:.0%} of the run's time")
        elif waited_s >= p.settings.eval_hold_s:
            self._close(f"newer weights had waited for eval.hold_s ({p.settings.eval_hold_s:g} s)")
        elif waited_s >= 0 and current.waiting:
            known = [w for worker in p.fleet.workers.values() for w in (worker.loaded, worker.loading)]
            if not any(weights is not None and age(weights) == age(current.weights) for weights in known):
                self._close(f"no worker serves {current.weights} any more")

    def give_up(self, reason: str) -> None:
        """End the current evaluation short, so that the same version may be evaluated again if it is still newest."""
        evaluations = self._p.evaluations
        if evaluations.current is not None:
            reached = evaluations.reached
            self._close(reason)
            evaluations.reached = reached

    def _close(self, reason: str) -> None:
        p, current = self._p, self.current
        for name in list(current.attempts):
            self._drop(p.groups[name])
        p.evaluations.current = None
        p.evaluations.reached = current.weights.version
        p.fleet.pin_to(None, wanted=False)
        p.outbox.emit(current.outcome(p.now_s, reason))
