"""The tries of the evaluation that runs: who answers a held-out problem, and which answers count.

A try's life is drawn in ``evaluation.py``. Its rules:

- **The pin holds** twice: a worker with an open try is not told to load (``fleet.keeps``), and a row counts only if its
  oldest and its newest token are of the pinned weights. Any other is dropped and its problem asked again.
- **The budget**: at most ``eval_budget`` of a worker's slots (one at least). Once newer weights wait for the worker, it
  may also take what training leaves free: the sooner it is through, the sooner they are loaded.
- **Priority** inside an engine is above training's, so that a full queue cannot keep the pin in service. What training
  loses is bounded by the budget, not by the priority.
- **Every try has an id of its own**: a late row of one that was taken back means nothing, and no row is judged twice.

Owns: these. Never: when an evaluation begins and ends (``evaluation_schedule.py``). Source: ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from orchestrator.core.model.batches import MISSING, NOBODY
from orchestrator.core.model.evaluation import Evaluation, Try
from orchestrator.core.model.outbox import AbortKey, AdmissionKey, CommandId, DispatchKey, parse_entry_id
from orchestrator.core.model.pipeline import Pipeline
from orchestrator.core.model.workers import Worker, age
from transport.contracts.messages import (
    EVALUATION,
    AbortRollouts,
    AdmitGroups,
    DispatchGroups,
    DropRows,
    Event,
    GroupAdmitted,
    GroupPlan,
    GroupScored,
    PromptRef,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    ScoringFailed,
    WorkerLost,
    WorkerReported,
)
from transport.contracts.types import FinishReason, GroupId, RowId, evaluation_id, parse_row_id, row_id

PRIORITY = 1e12
"""Above that of any group of any batch, see ``dispatch.plan_priority``."""


class EvaluationTries:
    """Works on the pipeline it is given; holds no state of its own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._p = pipeline

    # -- problems go out

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
            self._begin(current, current.waiting.pop(0), worker)
            if taken < -1:
                heapq.heapreplace(heap, (taken + 1, place, worker))
            else:
                heapq.heappop(heap)
        self._keep_waiting_workers(current)

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

    def _begin(self, current: Evaluation, problem: int, worker: Worker) -> None:
        p = self._p
        assert p.evaluations.problems is not None
        prompt = p.evaluations.problems[problem]
        group_id = evaluation_id(current.number, current.num_slots)
        current.num_slots += 1
        if current.opened_s is None:
            current.opened_s = p.now_s
        admission, dispatched = self._emit_plan(group_id, prompt, worker)
        worker.evaluate(group_id, prompt.predicted_tokens)
        current.tries[group_id] = Try(
            group_id=group_id,
            problem=problem,
            worker_id=worker.worker_id,
            admission=admission,
            dispatched=dispatched,
            deadline_s=p.now_s + p.settings.rollout_timeout_s,
        )

    def _emit_plan(self, group_id: GroupId, prompt: PromptRef, worker: Worker) -> tuple[AdmissionKey, CommandId]:
        """A group of one sample, beside the batches."""
        outbox = self._p.outbox
        admitted = GroupAdmitted(group_id=group_id, prompt_id=prompt.prompt_id, group_size=1)
        admission = AdmissionKey(outbox.next_id)
        outbox.emit_until(admission, AdmitGroups(groups=(admitted,)))
        plan = GroupPlan(
            group_id=group_id,
            batch=EVALUATION,
            prompt_id=prompt.prompt_id,
            samples=(0,),
            group_size=1,
            predicted_tokens=prompt.predicted_tokens,
            priority=PRIORITY + prompt.predicted_tokens,
        )
        return admission, outbox.emit_until(
            DispatchKey(group_id), DispatchGroups(worker_id=worker.worker_id, plans=(plan,))
        )

    def _keep_waiting_workers(self, current: Evaluation) -> None:
        """Workers without a try are kept from newer weights only while one may be given to them."""
        self._p.fleet.pin_to(current.weights, wanted=bool(current.waiting))

    # -- what is told

    def take(self, event: Event) -> bool:
        """Apply what is told of a try. Returns whether it was."""
        if self._p.evaluations.current is None:
            return False
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

    def worker_lost(self, worker: Worker, lost: WorkerLost) -> None:
        """Its unanswered problems go to others that serve the pin; a problem that kills workers is given up, too."""
        current = self._p.evaluations.current
        for group_id in list(worker.evaluating):
            tried = self._try(group_id)
            if current is None or tried is None:
                continue
            self._end(tried)
            deaths = current.deaths[tried.problem] = current.deaths.get(tried.problem, 0) + (not lost.left)
            if deaths < self._p.settings.max_deaths:
                self._wait(current, tried.problem)

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
        """Take back what is late."""
        p, current = self._p, self._p.evaluations.current
        if current is not None:
            self._again_all(tried.group_id for tried in current.tries.values() if tried.deadline_s <= p.now_s)

    def rows_told(self) -> list[RowId]:
        """Rows that must exist: those that wait for their score."""
        current = self._p.evaluations.current
        tries = current.tries.values() if current is not None else ()
        return [row_id(tried.group_id, 0) for tried in tries if tried.tokens != MISSING]

    # -- the end of a try

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
            self._wait(current, tried.problem)

    def _wait(self, current: Evaluation, problem: int) -> None:
        current.waiting.append(problem)
        self._keep_waiting_workers(current)

    def end_all(self) -> None:
        """Nothing of the evaluation is wanted any more."""
        current = self._p.evaluations.current
        for tried in list(current.tries.values()) if current is not None else ():
            self._end(tried)

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
        p.outbox.confirm(tried.admission)
        p.outbox.confirm(DispatchKey(group_id))
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
            p.outbox.emit_until(AbortKey(worker.worker_id, group_id), command)
            worker.aborting[group_id] = None
