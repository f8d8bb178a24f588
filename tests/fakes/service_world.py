"""A world around the state of a service run: requests, their readers, and workers that generate for them.

A reader reads results in the order of their numbers and says later how many it has. What it may rely on is checked as
the state decides: numbers never change, nothing is freed before it was taken, the window holds, each sample comes once.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.view import rows_reported
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    Command,
    DispatchGroups,
    DropRows,
    Event,
    PromptRef,
    PromptsSubmitted,
    RequestCancelled,
    RowsMissing,
    SamplesTaken,
    Tick,
    WeightsPublished,
)
from transport.contracts.types import GroupId, PromptId, RowId, WeightIdentity, parse_row_id, row_id

KEEP_S = 100.0


class Reader:
    """Of one request. got: results that it read.  taken: of those, how many it said that it has.

    numbered: all results that there are, as far as they were ever seen.
    """

    def __init__(self, num_prompts: int, group_size: int, now_s: float) -> None:
        self.num_prompts, self.group_size = num_prompts, group_size
        self.got: list[RowId] = []
        self.numbered: list[RowId] = []
        self.taken = 0
        self.active_s = now_s
        self.cancelled = self.expired = False

    @property
    def open(self) -> bool:
        return not (self.cancelled or self.expired) and self.taken < self.num_prompts * self.group_size


class ServiceWorld(PipelineWorld):
    """readers: of every request that was submitted, by its number."""

    def __init__(self, *, window: int, max_attempts: int = 3, max_deaths: int = 3) -> None:
        settings = CoreSettings(
            num_batches=1,
            groups_per_batch=1,
            group_size=1,
            max_staleness=16,
            service=True,
            service_window=window,
            service_keep_s=KEEP_S,
            max_attempts=max_attempts,
            max_deaths=max_deaths,
            rollout_timeout_s=10.0,
        )
        super().__init__(settings)
        self.readers: dict[int, Reader] = {}
        self.weights = WeightIdentity(epoch=0, version=0)

    # -- what clients and the publisher do

    def submit(self, num_prompts: int, group_size: int) -> int:
        number = len(self.readers) + 1
        self.readers[number] = Reader(num_prompts, group_size, self.now_s)
        prompts = [
            PromptRef(prompt_id=PromptId(f"{number}/{index}"), prompt_tokens=3, predicted_tokens=5.0)
            for index in range(num_prompts)
        ]
        self.tell(PromptsSubmitted(request=number, prompts=tuple(prompts), group_size=group_size))
        return number

    def publish(self, *, anew: bool = False) -> None:
        """Newer weights; anew: of another publisher, which begins with those that were served."""
        epoch = self.weights.epoch + (anew or not self.weights.epoch)
        self.weights = WeightIdentity(epoch=epoch, version=self.weights.version + (not anew and self.weights.epoch > 0))
        self.tell(WeightsPublished(weights=self.weights))

    def read(self, number: int, count: int) -> None:
        """Read the next results, as far as they are there. One whose row is made again is waited for."""
        request, reader = self.state.pipeline.requests.get(number), self.readers[number]
        if request is None:
            return
        for row in request.results[len(reader.got) :][:count]:
            if row not in request.failed and row not in self.rows:
                if row in request.remade:
                    return
                assert self._has_failed(row), f"result {row} has no row, and none is coming"
            reader.got.append(row)

    def _has_failed(self, row: RowId) -> bool:
        """Whether its group was given up: then a row that is lost stays lost, and the reader hears so."""
        group_id, _ = parse_row_id(row)
        request = self.state.pipeline.requests.get(int(group_id.partition("/")[0]))
        return request is not None and any(parse_row_id(failed)[0] == group_id for failed in request.failed)

    def take(self, number: int, upto: int) -> None:
        """The reader has its first ``upto`` results."""
        reader = self.readers[number]
        reader.taken = max(reader.taken, upto)
        reader.active_s = self.now_s
        self.tell(SamplesTaken(request=number, upto=upto))

    def cancel(self, number: int) -> None:
        self.readers[number].cancelled = True
        self.tell(RequestCancelled(request=number, reason="not wanted"))

    def lose_tail(self, num_rows: int, num_plans: int, num_rounds: int, num_controls: int) -> None:
        self._lose(num_rows, num_plans, num_rounds, num_controls)
        if missing := tuple(row for row in rows_reported(self.state.pipeline) if row not in self.rows):
            self.tell(RowsMissing(row_ids=missing))

    # -- what a reader may rely on

    def tell(self, event: Event) -> list[Command]:
        commands = super().tell(event)
        self._note_expired()
        for number, request in self.state.pipeline.requests.items():
            reader = self.readers[number]
            seen = len(reader.numbered)
            assert request.results[:seen] == reader.numbered, f"numbers of request {number} changed"
            reader.numbered = list(request.results)
            ahead = request.started - request.taken
            assert ahead <= max(self.settings.service_window, reader.group_size), "more is generated than the window"
        return commands

    def _note_expired(self) -> None:
        for number, reader in self.readers.items():
            if (
                reader.open
                and number <= self.state.pipeline.last_request
                and number not in self.state.pipeline.requests
            ):
                assert len(reader.numbered) == reader.num_prompts * reader.group_size, f"{number} expired unfinished"
                assert self.now_s > reader.active_s + KEEP_S, f"request {number} expired too soon"
                reader.expired = True

    def _check_dispatch(self, command: DispatchGroups) -> None:
        (plan,) = command.plans
        worker = self.workers[command.worker_id]
        assert not self.state.paused, "dispatched during a pause"
        assert worker.weights is not None
        assert plan.group_id not in self.dropped
        assert not self.readers[plan.batch].cancelled
        assert all(row_id(plan.group_id, sample) not in self.rows for sample in plan.samples)

    def _drop(self, command: DropRows) -> None:
        """What every sample of was taken, or nobody wants, or nobody came for."""
        self._note_expired()
        for group_id in command.group_ids:
            reader = self.readers[int(group_id.partition("/")[0])]
            taken = set(reader.got[: reader.taken])
            rows = [row_id(group_id, sample) for sample in range(reader.group_size)]
            assert not reader.open or taken.issuperset(rows), f"{group_id} is freed and was not taken"
            for row in rows:
                self.rows.pop(row, None)
        self.dropped |= set(command.group_ids)

    def check_answered(self) -> None:
        """Each request that is not open any more was answered whole, each sample once, or given up by its client."""
        for number, reader in self.readers.items():
            assert not reader.open, f"request {number} is not answered"
            assert len(set(reader.got)) == len(reader.got), f"a sample of request {number} came twice"
            if not (reader.cancelled or reader.expired):
                groups = [GroupId(f"{number}/{index}") for index in range(reader.num_prompts)]
                wanted = {row_id(group_id, sample) for group_id in groups for sample in range(reader.group_size)}
                assert set(reader.got) == wanted
        assert not self.state.pipeline.requests
        assert not self.rows, "rows are left"

    # -- a world without further faults

    def turn(self) -> None:
        self.now_s += 1.0
        self.supervise()
        if not self.weights.epoch:
            self.publish()
        if not self.state.view().workers:
            self.join()
        for worker_id in list(self.workers):
            self._work(worker_id)
        for number, reader in self.readers.items():
            if reader.open:
                self.read(number, 1000)
                if len(reader.got) > reader.taken:
                    self.take(number, len(reader.got))
        self.tell(Tick())

    def run_to_answers(self, max_turns: int = 200) -> None:
        for _ in range(max_turns):
            if not any(reader.open for reader in self.readers.values()):
                return
            self.turn()
        raise AssertionError(f"requests are not answered: {self.counts()}: {self.state.view()}")

    def counts(self) -> Mapping[int, Mapping[str, int]]:
        return {number: request.counts() for number, request in self.state.pipeline.requests.items()}
