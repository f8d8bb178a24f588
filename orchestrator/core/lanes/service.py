"""The serve lane: requests of a service run, prompts that came from outside and samples that leave to their reader.

Owns: what each request still owes its reader. Never: text, tokens, sockets (``orchestrator/serving``). Invariant: a
sample gets its number in the request when its row is first reported, keeps it for ever, and its row is freed only once
the reader has taken it; so a reader that comes back goes on exactly where it was.

    submitted ──window──► pending ──► running ──► result (numbered) ──taken──► freed
                                        └─ failed max_attempts times ──► result (numbered) that says why

The window (samples of one request that are generated ahead of its reader) is the back-pressure: a slow reader holds up
its own request and nothing else. Source: StreamRL sec. 3, the generation service's ``generate`` and ``update``; ours:
numbers, window, expiry.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.model.groups import Group, Lane, Outcome, Stage
from orchestrator.core.model.lanes import Request
from orchestrator.core.model.workers import age
from orchestrator.core.rollout.lifecycle import UNWANTED, GroupLane, announce, enqueue, withdraw
from transport.contracts.messages import (
    DropRows,
    PromptsSubmitted,
    RequestCancelled,
    RolloutFinished,
    SamplesTaken,
    WeightsPublished,
)
from transport.contracts.types import GroupId, RowId, group_id, parse_row_id, row_id


class ServeLane(GroupLane):
    """A group is a prompt of a request, whose number is its ``batch``: earlier requests go first."""

    def submitted(self, event: PromptsSubmitted) -> None:
        """Take a request. One that came before changes nothing."""
        p = self._p
        if event.request <= p.last_request or p.stopping or not p.settings.service:
            return
        p.last_request = event.request
        request = Request(num_samples=len(event.prompts) * event.group_size, active_s=p.now_s)
        p.requests[event.request] = request
        for index, prompt in enumerate(event.prompts):
            name = group_id(event.request, index)
            group = Group.of(prompt, name, event.request, event.group_size, lane=Lane.SERVE)
            group.stage, group.sampling = Stage.HELD, event.sampling
            p.groups[group.group_id] = group
            request.untaken[group.group_id] = event.group_size
        request.waiting = list(reversed(request.untaken))
        self._start(request)

    def announce(self, groups: Sequence[Group]) -> None:
        for group in groups:
            announce(self._p, [group])

    def _start(self, request: Request) -> None:
        """Let groups pass while the reader's window has room; always one, or a large group would never start."""
        p = self._p
        started: list[Group] = []
        while request.waiting:
            group = p.groups[request.waiting[-1]]
            ahead = request.started - request.taken
            if ahead and ahead + len(group.tokens) > p.settings.service_window:
                break
            request.waiting.pop()
            request.started += len(group.tokens)
            enqueue(p, group)
            started.append(group)
        self.announce(started)

    def row_arrived(self, group: Group, event: RolloutFinished) -> None:
        self._note(group, event.row_id)

    def row_vanished(self, group: Group, row: RowId) -> None:
        """It keeps its number."""
        self._p.requests[group.batch].remade[row] = None

    def end(self, group: Group, outcome: Outcome, reason: str, *, free: bool = False) -> None:
        """The samples that are missing of ``group`` will not come: each is a result that says why."""
        withdraw(self._p, group, reason)
        group.move(Stage.ENDED)
        group.outcome = outcome
        request = self._p.requests[group.batch]
        for sample in group.missing_samples():
            row = row_id(group.group_id, sample)
            request.failed[row] = reason
            self._note(group, row)

    def _note(self, group: Group, row: RowId) -> None:
        """The result gets its number, unless it has one and was only made again."""
        request = self._p.requests[group.batch]
        request.active_s = self._p.now_s
        if row in request.remade:
            del request.remade[row]
        else:
            request.results.append(row)

    def samples_taken(self, event: SamplesTaken) -> None:
        """The reader has the first ``upto`` results: free them, and let more of the request start."""
        p = self._p
        request = p.requests.get(event.request)
        if request is None:
            return
        upto = min(event.upto, len(request.results))
        freed: list[GroupId] = []
        for name in (parse_row_id(row)[0] for row in request.results[request.taken : upto]):
            request.untaken[name] -= 1
            if not request.untaken[name]:
                self._forget(request, name)
                freed.append(name)
        request.taken = max(request.taken, upto)
        request.active_s = p.now_s
        if freed:
            p.outbox.emit(DropRows(group_ids=tuple(freed)))
        if request.taken == request.num_samples:
            del p.requests[event.request]
        elif not p.stopping:
            self._start(request)

    def _forget(self, request: Request, group_id: GroupId) -> None:
        withdraw(self._p, self._p.groups.pop(group_id), UNWANTED)
        del request.untaken[group_id]

    def cancelled(self, event: RequestCancelled) -> None:
        request = self._p.requests.pop(event.request, None)
        if request is None:
            return
        dropped = tuple(request.untaken)
        for dropped_id in dropped:
            self._forget(request, dropped_id)
        self._p.outbox.emit(DropRows(group_ids=dropped))

    def expire(self) -> None:
        """Forget whole requests that were not read for ``service_keep_s``."""
        p = self._p
        limit_s = p.now_s - p.settings.service_keep_s
        for number, request in list(p.requests.items()):
            if len(request.results) == request.num_samples and request.active_s < limit_s:
                self.cancelled(RequestCancelled(request=number, reason="it was not read in time"))

    def reopen(self) -> None:
        """A resumed run goes on: what was held back while it stopped may start."""
        for request in self._p.requests.values():
            self._start(request)

    def published(self, event: WeightsPublished) -> None:
        """Newer weights exist: what starts from now on starts with them. Nothing that was sampled is lost by it."""
        p = self._p
        weights = event.weights
        if not p.settings.service or (p.fleet.newest is not None and age(weights) <= age(p.fleet.newest)):
            return
        if weights.epoch != p.lineage.epoch:
            p.lineage.survived[p.lineage.epoch] = p.lineage.version
        p.lineage.epoch, p.lineage.version = weights.epoch, weights.version
        p.fleet.publish(weights)

    def is_drained(self) -> bool:
        """Whether the run was asked to end and nothing runs any more. What waits is kept for a resumed run."""
        running = any(worker.groups for worker in self._p.fleet.workers.values())
        return self._p.stopping and not running
