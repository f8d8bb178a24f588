"""Requests of a service run in the core: what reaches a reader, in which order, and what is freed when."""

from __future__ import annotations

from orchestrator.core.model.settings import CoreSettings
from orchestrator.core.state import PipelineState
from tests.fakes.pipeline_invariants import check
from transport.contracts.messages import (
    AbortRollouts,
    AdmitGroups,
    Command,
    DispatchGroups,
    DropRows,
    Event,
    FinishRun,
    GroupPlan,
    LoadWeights,
    PromptRef,
    PromptsSubmitted,
    RequestCancelled,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    RunResumed,
    SamplesTaken,
    StopRequested,
    Tick,
    WeightsLoaded,
    WeightsPublished,
    WorkerJoined,
)
from transport.contracts.types import (
    FinishReason,
    GroupId,
    PromptId,
    RowId,
    SamplingParams,
    WeightIdentity,
    WorkerId,
    WorkerKind,
)

FIRST = WeightIdentity(epoch=1, version=0)
SECOND = WeightIdentity(epoch=1, version=1)
WORKER = WorkerId("generate-0.1")


class Service:
    """A state that is told things, and what it commanded."""

    def __init__(self, *, window: int = 1024, max_attempts: int = 2, worker: bool = True) -> None:
        settings = CoreSettings(
            num_batches=1,
            groups_per_batch=1,
            group_size=2,
            max_staleness=2**31,
            service=True,
            service_window=window,
            service_keep_s=60.0,
            max_attempts=max_attempts,
        )
        self.state = PipelineState(settings)
        self.now_s = 0.0
        if worker:
            self.tell(WorkerJoined(worker_id=WORKER, kind=WorkerKind.GENERATE, capacity=64))
            self.tell(WeightsPublished(weights=FIRST))
            self.tell(WeightsLoaded(worker_id=WORKER, weights=FIRST))

    def tell(self, event: Event) -> list[Command]:
        commands = self.state.handle(event, self.now_s)
        check(self.state.pipeline)
        assert PipelineState.restore(self.state.snapshot()).snapshot() == self.state.snapshot()
        return commands

    def submit(
        self, request: int, prompts: int, size: int = 1, sampling: SamplingParams | None = None
    ) -> list[GroupPlan]:
        refs = tuple(
            PromptRef(prompt_id=PromptId(f"{request}/{index}"), prompt_tokens=3, predicted_tokens=8.0)
            for index in range(prompts)
        )
        return plans(self.tell(PromptsSubmitted(request=request, prompts=refs, group_size=size, sampling=sampling)))

    def finish(self, row: str, weights: WeightIdentity = FIRST) -> list[Command]:
        return self.tell(
            RolloutFinished(
                row_id=RowId(row),
                worker_id=WORKER,
                response_tokens=4,
                finish_reason=FinishReason.STOP,
                oldest=weights,
                newest=weights,
            )
        )

    def take(self, request: int, upto: int) -> list[Command]:
        return self.tell(SamplesTaken(request=request, upto=upto))

    def results(self, request: int) -> list[str]:
        found = self.state.pipeline.requests.get(request)
        assert found is not None
        return list(found.results)


def plans(commands: list[Command]) -> list[GroupPlan]:
    return [plan for command in commands if isinstance(command, DispatchGroups) for plan in command.plans]


def dropped(commands: list[Command]) -> list[GroupId]:
    return [group for command in commands if isinstance(command, DropRows) for group in command.group_ids]


def test_samples_are_numbered_as_they_end_and_freed_once_taken():
    service = Service()
    assert [plan.group_id for plan in service.submit(1, prompts=2, size=2)] == ["1/0", "1/1"]
    for row in ("1/1/0", "1/0/1", "1/0/0"):
        service.finish(row)
    assert service.results(1) == ["1/1/0", "1/0/1", "1/0/0"]
    assert dropped(service.take(1, 2)) == []
    assert dropped(service.take(1, 3)) == ["1/0"]
    service.finish("1/1/1")
    assert dropped(service.take(1, 4)) == ["1/1"]
    assert service.state.pipeline.requests == {}
    assert service.take(1, 4) == [], "a late word of its reader"


def test_what_comes_twice_counts_once():
    service = Service()
    service.submit(1, prompts=1, size=2)
    assert service.submit(1, prompts=1, size=2) == []
    service.finish("1/0/0")
    service.finish("1/0/0")
    service.take(1, 1)
    service.take(1, 1)
    service.finish("1/0/1")
    assert service.results(1) == ["1/0/0", "1/0/1"]


def test_a_slow_reader_holds_up_its_own_request_only():
    service = Service(window=2)
    assert [plan.group_id for plan in service.submit(1, prompts=5)] == ["1/0", "1/1"]
    for row in ("1/0/0", "1/1/0"):
        assert plans(service.finish(row)) == []
    assert [plan.group_id for plan in service.submit(2, prompts=2)] == ["2/0", "2/1"]
    assert [plan.group_id for plan in plans(service.take(1, 1))] == ["1/2"]


def test_a_group_beyond_the_window_starts_alone():
    service = Service(window=2)
    assert [plan.group_id for plan in service.submit(1, prompts=2, size=8)] == ["1/0"]


def test_what_cannot_be_generated_is_a_result_that_says_why():
    service = Service(max_attempts=2)
    service.submit(1, prompts=1, size=2)
    service.finish("1/0/0")
    for _ in range(2):
        service.tell(RolloutFailed(group_id=GroupId("1/0"), worker_id=WORKER, samples=(1,), reason="out of memory"))
    request = service.state.pipeline.requests.get(1)
    assert request is not None
    assert request.results == ["1/0/0", "1/0/1"]
    assert len(request.results) == request.num_samples
    assert "out of memory" in request.failed[RowId("1/0/1")]
    assert dropped(service.take(1, 2)) == ["1/0"]


def test_rows_that_vanish_are_made_again_under_the_number_they_had():
    service = Service()
    service.submit(1, prompts=1, size=2)
    service.finish("1/0/0")
    service.finish("1/0/1")
    commands = service.tell(RowsMissing(row_ids=(RowId("1/0/0"),)))
    assert [plan.samples for plan in plans(commands)] == [(0,)]
    assert any(isinstance(command, AdmitGroups) for command in commands), "its prompt may be gone too"
    service.finish("1/0/0")
    assert service.results(1) == ["1/0/0", "1/0/1"]


def test_new_prompts_start_with_the_newest_weights_and_running_samples_go_on():
    service = Service()
    service.submit(1, prompts=1, size=1)
    loads = service.tell(WeightsPublished(weights=SECOND))
    assert [command.weights for command in loads if isinstance(command, LoadWeights)] == [SECOND]
    assert service.submit(2, prompts=1) == [], "the worker does not serve them yet"
    service.finish("1/0/0")
    assert service.results(1) == ["1/0/0"]
    assert [plan.group_id for plan in plans(service.tell(WeightsLoaded(worker_id=WORKER, weights=SECOND)))] == ["2/0"]
    assert service.tell(WeightsPublished(weights=FIRST)) == [], "an old word of a publisher"


def test_a_publisher_of_a_higher_epoch_takes_over_whatever_its_version():
    service = Service()
    service.submit(1, prompts=1, size=2)
    service.finish("1/0/0")
    other = WeightIdentity(epoch=2, version=0)
    service.tell(WeightsPublished(weights=other))
    service.finish("1/0/1", weights=FIRST)
    assert service.results(1) == ["1/0/0", "1/0/1"], "what was sampled before stays wanted"


def test_a_cancelled_request_stops_and_is_freed():
    service = Service()
    service.submit(1, prompts=2, size=1)
    service.finish("1/0/0")
    commands = service.tell(RequestCancelled(request=1, reason="its reader asked"))
    assert [command.group_ids for command in commands if isinstance(command, AbortRollouts)] == [("1/1",)]
    assert dropped(commands) == ["1/0", "1/1"]
    service.finish("1/1/0")
    assert service.state.pipeline.requests == {}


def test_a_whole_request_that_nobody_reads_is_forgotten():
    service = Service()
    service.submit(1, prompts=1)
    service.submit(2, prompts=1)
    service.finish("1/0/0")
    service.now_s = 61.0
    assert dropped(service.tell(Tick())) == ["1/0"]
    assert list(service.state.pipeline.requests) == [2], "the other one is not whole"


def test_idle_is_no_wait_and_lack_of_weights_is_one():
    assert Service().state.wait() is None
    without = Service(worker=False)
    without.submit(1, prompts=1)
    wait = without.state.wait()
    assert wait is not None
    assert (wait.stage, wait.waits_for) == ("weights", "a first version of the weights")


def test_a_drained_service_ends_when_what_runs_is_done_and_goes_on_when_resumed():
    service = Service(window=1)
    service.submit(1, prompts=2)
    assert not any(isinstance(command, FinishRun) for command in service.tell(StopRequested(reason="enough")))
    assert any(isinstance(command, FinishRun) for command in service.finish("1/0/0"))
    service.take(1, 1)
    resumed = service.tell(RunResumed())
    assert [plan.group_id for plan in plans(resumed)] == ["1/1"]


def test_a_request_may_ask_for_its_own_sampling():
    service = Service()
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0)
    (plan,) = service.submit(1, prompts=1, sampling=sampling)
    assert plan.sampling == sampling
