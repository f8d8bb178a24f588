"""The evaluation lane: when held-out problems are asked, who answers them, and when it is over.

Every ``eval_every`` versions the newest weights are pinned and every held-out problem is answered once under them.

    due ──► pinned ──► problems go out as slots allow ──► rows ──► scores ──► EvaluationOutcome, rows dropped
                          │ a worker that serves the pin takes no newer weights while it is needed
                          └ ends short, by name: hold_s after newer weights came, timeout_s after it began, nobody
                            serves the pin, the trainer started again, the run stops or is over

- **The pin holds** twice: a worker with an open try is not told to load (``fleet.keeps``), and a row counts only if its
  oldest and its newest token are of the pinned weights. Any other is dropped and its problem asked again.
- **The budget**: at most ``eval_budget`` of a worker's slots (one at least). Once newer weights wait for the worker, it
  may also take what training leaves free: the sooner it is through, the sooner they are loaded.
- **Priority** inside an engine is above training's, so that a full queue cannot keep the pin in service. What training
  loses is bounded by the budget, not by the priority.
- **No deadlock with the gate**: whatever waits for newer weights waits ``eval_hold_s`` longer at most.
- **Every try has an id of its own**: a late row of one that was taken back means nothing, and no row is judged twice.

Owns: these rules. Never: batches; an evaluation is in none, so nothing of it can be in a round. Source: ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from orchestrator.core.assignments import abort_key, plan_key
from orchestrator.core.batches import MISSING, NOBODY
from orchestrator.core.evaluation import Evaluation, Try
from orchestrator.core.fleet import Worker, age
from orchestrator.core.outbox import parse_entry_id
from orchestrator.core.pipeline import Pipeline
from transport.messages import (
    EVALUATION,
    AbortRollouts,
    AdmitGroups,
    DispatchGroups,
    DropRows,
    Event,
    GroupAdmitted,
    GroupPlan,
    GroupScored,
    HeldOutPromptsArrived,
    RequestHeldOutPrompts,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    ScoringFailed,
    WorkerReported,
)
from transport.types import FinishReason, GroupId, RowId, evaluation_id, parse_row_id, row_id

REQUEST_KEY = "held-out prompts"
PRIORITY = 1e12
"""Above that of any group of any batch, see ``dispatch.plan_priority``."""


def admit_key(group_id: GroupId) -> str:
    """Key of an admission in the outbox."""
    return f"admit {group_id}"


class Evaluating:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    # -- after every event

    def advance(self) -> None:
        """End what is over, begin what is due. Before weights and dispatch, which heed the pin."""
        p, lane = self._p, self._p.evaluations
        if lane.current is not None:
            if p.finished:
                self.give_up("the run is over")
            elif lane.current.over:
                whole = lane.current.answered == lane.current.num_problems
                self._close(lane.current, "" if whole else "attempts at some problems are used up")
            elif lane.current.newer_s is None and self._is_newer(lane.current):
                lane.current.newer_s = p.now_s
        if lane.current is None and p.settings.eval_every and self._may_open():
            self._open()

    def _is_newer(self, current: Evaluation) -> bool:
        newest = self._p.fleet.newest
        return newest is not None and age(newest) > age(current.weights)

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
        p, lane = self._p, self._p.evaluations
        assert p.fleet.newest is not None
        if lane.problems is None:
            if not lane.requested:
                lane.requested = True
                p.outbox.emit_until(REQUEST_KEY, RequestHeldOutPrompts(count=p.settings.eval_problems))
            return
        problems = lane.problems[: p.settings.eval_problems]
        longest_first = sorted(range(len(problems)), key=lambda place: -problems[place].predicted_tokens)
        lane.current = Evaluation(
            number=lane.num_opened, weights=p.fleet.newest, num_problems=len(problems), waiting=longest_first
        )
        lane.num_opened += 1
        p.fleet.pin = p.fleet.newest
        self._note_waiting(lane.current)

    def dispatch(self) -> None:
        """Hand out problems, to the worker with the most room first. After training's dispatch, which goes first."""
        p, current = self._p, self._p.evaluations.current
        if current is None or not current.waiting or p.paused or p.stopping:
            return
        room = [(-self._room(worker), place, worker) for place, worker in enumerate(p.fleet.workers.values())]
        heap = [entry for entry in room if entry[0] < 0 and self._may_take(entry[2], current)]
        heapq.heapify(heap)
        while heap and current.waiting:
            taken, place, worker = heap[0]
            self._ask(current, current.waiting.pop(0), worker)
            if taken < -1:
                heapq.heapreplace(heap, (taken + 1, place, worker))
            else:
                heapq.heappop(heap)
        self._note_waiting(current)

    def _may_take(self, worker: Worker, current: Evaluation) -> bool:
        """It serves the pin, and is not on its way to other weights."""
        serves = worker.loaded is not None and age(worker.loaded) == age(current.weights)
        return serves and worker.loading is None and worker.fit and worker.worker_id != self._p.fleet.turn

    def _room(self, worker: Worker) -> int:
        """Problems that may be given to the worker now."""
        allowed = max(1, int(worker.capacity * self._p.settings.eval_budget))
        if self._p.fleet.behind(worker):
            allowed = max(allowed, worker.capacity - (worker.in_flight - len(worker.evaluating)))
        return allowed - len(worker.evaluating)

    def _ask(self, current: Evaluation, problem: int, worker: Worker) -> None:
        p = self._p
        assert p.evaluations.problems is not None
        prompt = p.evaluations.problems[problem]
        group_id = evaluation_id(current.number, current.num_slots)
        current.num_slots += 1
        if current.opened_s is None:
            current.opened_s = p.now_s
        admitted = GroupAdmitted(group_id=group_id, prompt_id=prompt.prompt_id, group_size=1)
        p.outbox.emit_until(admit_key(group_id), AdmitGroups(groups=(admitted,)))
        plan = GroupPlan(
            group_id=group_id,
            batch=EVALUATION,
            prompt_id=prompt.prompt_id,
            samples=(0,),
            group_size=1,
            predicted_tokens=prompt.predicted_tokens,
            priority=PRIORITY + prompt.predicted_tokens,
        )
        command = DispatchGroups(worker_id=worker.worker_id, plans=(plan,))
        dispatched = p.outbox.emit_until(plan_key(group_id), command)
        worker.evaluate(group_id, prompt.predicted_tokens)
        current.tries[group_id] = Try(
            group_id=group_id,
            problem=problem,
            worker_id=worker.worker_id,
            dispatched=dispatched,
            deadline_s=p.now_s + p.settings.rollout_timeout_s,
        )

    def _note_waiting(self, current: Evaluation) -> None:
        """Workers without a try are kept only while one may be given to them."""
        fleet = self._p.fleet
        fleet.pin_wanted = bool(current.waiting)
        fleet.all_told = False

    # -- what is told

    def take(self, event: Event) -> bool:
        """Apply what concerns evaluations alone. Returns whether it did."""
        if isinstance(event, HeldOutPromptsArrived):
            self._problems(event)
            return True
        return self._p.evaluations.current is not None and self._take_of_try(event)

    def _take_of_try(self, event: Event) -> bool:
        match event:
            case RolloutFinished() if tried := self._try(parse_row_id(event.row_id)[0]):
                self._finished(tried, event)
            case RolloutFailed() if tried := self._try(event.group_id):
                if tried.worker_id == event.worker_id:
                    self._again(tried)
            case GroupScored() if tried := self._try(event.group_id):
                self._scored(tried, event)
            case ScoringFailed() if tried := self._try(event.group_id):
                self._again(tried)
            case _:
                return False
        return True

    def _problems(self, event: HeldOutPromptsArrived) -> None:
        lane = self._p.evaluations
        self._p.outbox.confirm(REQUEST_KEY)
        if lane.problems is None:
            lane.problems = list(event.prompts)

    def _finished(self, tried: Try, event: RolloutFinished) -> None:
        """A row exists. It counts if all of it is of the pinned weights."""
        current = self._p.evaluations.current
        if current is None or tried.tokens != MISSING:
            return
        current.tokens += event.response_tokens
        current.engine_s += event.engine_s
        pinned = age(event.oldest) == age(event.newest) == age(current.weights)
        if not pinned or event.finish_reason is FinishReason.ABORT:
            self._again(tried)
            return
        self._release(tried)
        tried.tokens = event.response_tokens
        tried.deadline_s = self._p.now_s + self._p.settings.rollout_timeout_s

    def _scored(self, tried: Try, event: GroupScored) -> None:
        """A score without its row's event (the broker lost it) does not say under which weights: asked again."""
        current = self._p.evaluations.current
        if current is None or len(event.rewards) != 1:
            return
        if tried.tokens == MISSING:
            self._again(tried)
            return
        current.count(tried, event)
        self._end(tried)

    def missing(self, event: RowsMissing) -> None:
        """Rows vanished with the broker's tail. An answer that is scored needs its row no more."""
        for row in event.row_ids:
            tried = self._try(parse_row_id(row)[0])
            if tried is not None and tried.tokens != MISSING:
                self._again(tried)

    def worker_lost(self, worker: Worker) -> None:
        """What it had not answered goes to others that serve the pin."""
        self._again_all(worker.evaluating)

    def reconcile(self, worker: Worker, event: WorkerReported) -> None:
        """A try whose plan the worker claimed, which it does not hold and did not finish, was lost on the way."""
        current = self._p.evaluations.current
        if current is not None and worker.evaluating:
            claimed, held = parse_entry_id(event.plans_cursor), frozenset(event.held)
            self._again_all(
                group_id
                for group_id in worker.evaluating
                if group_id not in held and current.tries[group_id].dispatched <= claimed
            )

    def expire(self) -> None:
        """Look at every deadline."""
        p, current = self._p, self._p.evaluations.current
        if current is None:
            return
        late = [tried.group_id for tried in current.tries.values() if tried.deadline_s <= p.now_s]
        self._again_all(late)
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

    def trainer_restarted(self, version: int) -> None:
        """The pin was of the former trainer; what is evaluated from now on is of this one, from ``version`` on."""
        lane = self._p.evaluations
        self.give_up("the trainer started again")
        lane.reached = min(lane.reached, version)

    def give_up(self, reason: str) -> None:
        """End the current evaluation short, so that the same version may be evaluated again if it is still newest."""
        lane = self._p.evaluations
        if lane.current is not None:
            reached = lane.reached
            self._close(lane.current, reason)
            lane.reached = reached

    def rows_told(self) -> list[RowId]:
        """Rows that must exist: those that wait for their score."""
        current = self._p.evaluations.current
        tries: Sequence[Try] = list(current.tries.values()) if current is not None else []
        return [row_id(tried.group_id, 0) for tried in tries if tried.tokens != MISSING]

    # -- the end of a try, and of all

    def _try(self, group_id: GroupId) -> Try | None:
        current = self._p.evaluations.current
        return current.tries.get(group_id) if current is not None else None

    def _again_all(self, group_ids: Iterable[GroupId]) -> None:
        for group_id in list(group_ids):
            tried = self._try(group_id)
            if tried is not None:
                self._again(tried)

    def _again(self, tried: Try) -> None:
        """This try gives nothing: its problem waits for another one, unless its attempts are used up."""
        current = self._p.evaluations.current
        assert current is not None
        self._end(tried)
        failures = current.failures[tried.problem] = current.failures.get(tried.problem, 0) + 1
        if failures < self._p.settings.max_attempts:
            current.waiting.append(tried.problem)
            self._note_waiting(current)

    def _end(self, tried: Try) -> None:
        """Nothing of this try is wanted any more."""
        current = self._p.evaluations.current
        assert current is not None
        self._release(tried, abort=True)
        self._p.outbox.emit(DropRows(group_ids=(tried.group_id,)))
        del current.tries[tried.group_id]

    def _release(self, tried: Try, *, abort: bool = False) -> None:
        """Its worker is free of it."""
        p, group_id = self._p, tried.group_id
        p.outbox.confirm(admit_key(group_id))
        p.outbox.confirm(plan_key(group_id))
        worker = p.fleet.workers.get(tried.worker_id)
        tried.worker_id = NOBODY
        if worker is None:
            return
        worker.stop_evaluating(group_id)
        p.fleet.all_told = False
        if abort and not p.finished:
            command = AbortRollouts(
                worker_id=worker.worker_id, group_ids=(group_id,), reason="not wanted any more", attempts=(0,)
            )
            p.outbox.emit_until(abort_key(worker.worker_id, group_id), command)
            worker.aborting[group_id] = None

    def _close(self, current: Evaluation, reason: str) -> None:
        """Tell how it went, let go of the pin."""
        p = self._p
        for tried in list(current.tries.values()):
            self._end(tried)
        p.evaluations.current = None
        p.evaluations.reached = current.weights.version
        p.fleet.pin, p.fleet.pin_wanted, p.fleet.all_told = None, False, False
        p.outbox.emit(current.outcome(p.now_s, reason))
