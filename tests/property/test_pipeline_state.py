"""Events in adversarial orders: workers come and go, reports repeat, rows vanish, trainers restart, loads fail.

After every event the state's own invariants hold, a restored snapshot decides the same, and the commands obey what a
reader of the streams relies on (``tests/fakes/pipeline_world.py``). From wherever the faults led, the run then ends.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.core.model.settings import CoreSettings
from tests.fakes.obeyed_pipeline import HELD_OUT, groups_of
from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    BrokerUsage,
    CheckpointRequested,
    PauseRequested,
    ResumeRequested,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    RunResumed,
    ScoringFailed,
    SettingChanged,
    StopRequested,
    Tick,
    TrainRound,
    WorkerJoined,
    WorkerLost,
)
from transport.contracts.types import UpdateMode, parse_row_id


def core_settings() -> st.SearchStrategy[CoreSettings]:
    return st.builds(
        CoreSettings,
        num_batches=st.just(4),
        groups_per_batch=st.just(3),
        group_size=st.just(2),
        max_staleness=st.integers(0, 2),
        update=st.sampled_from(UpdateMode),
        release=st.sampled_from(["stream", "mini_batch", "batch"]),
        mini_batch_groups=st.integers(1, 2),
        rollout_batches=st.integers(1, 3),
        membership=st.sampled_from(["fixed", "rolling"]),
        oversampled_groups=st.sampled_from([0, 0, 1]),
        drop_no_signal=st.booleans(),
        max_refills=st.integers(0, 3),
        max_attempts=st.just(3),
        max_deaths=st.integers(1, 4),
        rollout_timeout_s=st.just(10.0),
        micro_batch_tokens=st.sampled_from([10, 40]),
        mini_batches=st.integers(1, 2),
        epochs=st.integers(1, 2),
        record_logprobs=st.booleans(),
        checkpoint_every=st.integers(0, 3),
        max_retained_bytes=st.just(1000),
        eval_every=st.integers(0, 2),
        eval_problems=st.just(HELD_OUT),
        eval_budget=st.sampled_from([0.25, 1.0]),
        eval_hold_s=st.sampled_from([0.0, 5.0]),
        eval_timeout_s=st.sampled_from([8.0, 60.0]),
        dispatch=st.sampled_from(["least_loaded", "even", "two_class_max", "slicing", "scored"]),
        plan_wait_s=st.sampled_from([0.0, 5.0]),
        migrate_running=st.booleans(),
    ).filter(lambda core: core.rollout_batches <= core.max_staleness + 1)


SETTING_CHANGES = st.one_of(
    st.tuples(st.just("run.batches"), st.integers(0, 6)),
    st.tuples(st.just("pipeline.max_staleness"), st.integers(-1, 2)),
    st.tuples(st.just("pipeline.update"), st.sampled_from([*(mode.value for mode in UpdateMode), "sideways"])),
    st.tuples(st.just("pipeline.max_refills"), st.integers(0, 3)),
    st.tuples(st.just("trainer.checkpoint_every"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["pipeline.group_size", "nonsense"]), st.integers(0, 3)),
)
"""Good ones, and ones that the core must not take."""


def holds_plans(machine: PipelineMachine) -> bool:
    return any(worker.plans for worker in machine.world.workers.values())


class PipelineMachine(RuleBasedStateMachine):
    world: PipelineWorld

    @initialize(core=core_settings(), prompts=st.sampled_from([7, 1000]), stops=st.integers(0, 1))
    def begin(self, core, prompts, stops):
        self.stops_left = stops
        self.world = PipelineWorld(core, prompts)
        self.world.start_trainer()
        self.world.join()

    @rule()
    def nothing_goes_wrong_for_a_while(self):
        """Gets the run far enough for the faults to meet every stage of it."""
        self.world.turn()

    def draw_plan(self, data):
        workers = [worker_id for worker_id, worker in self.world.workers.items() if worker.plans]
        worker_id = data.draw(st.sampled_from(workers))
        return worker_id, data.draw(st.sampled_from(list(self.world.workers[worker_id].plans)))

    @precondition(lambda self: self.world.num_joined < 6)
    @rule(capacity=st.integers(1, 5))
    def join(self, capacity):
        self.world.join(capacity)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def prompts(self, data):
        self.world.answer_prompts(data.draw(st.integers(0, self.world.requests[0].count)))

    @precondition(lambda self: self.world.held_out_asked)
    @rule()
    def held_out_prompts(self):
        self.world.answer_held_out()

    @precondition(lambda self: self.world.plan_requests)
    @rule(lost=st.booleans())
    def plan(self, lost):
        """The plan comes now, late, or never."""
        if lost:
            self.world.plan_requests.pop(0)
        else:
            self.world.answer_plan()

    @precondition(holds_plans)
    @rule(data=st.data())
    def finish_sample(self, data):
        worker_id, group_id = self.draw_plan(data)
        self.world.finish_sample(worker_id, group_id)

    @precondition(holds_plans)
    @rule(data=st.data())
    def finish_group(self, data):
        worker_id, group_id = self.draw_plan(data)
        while group_id in self.world.workers[worker_id].plans:
            self.world.finish_sample(worker_id, group_id)

    @precondition(lambda self: self.world.unscored)
    @rule(signal=st.booleans())
    def score(self, signal):
        self.world.score(signal=signal)

    @precondition(lambda self: self.world.unscored)
    @rule()
    def scoring_fails(self):
        group_id = self.world.unscored[0]
        sent = [command for _, command in self.world.log if isinstance(command, TrainRound)]
        if group_id not in groups_of(sent):  # rows that the trainer waits for can be scored again, not replaced
            self.world.unscored.pop(0)
            self.world.tell(ScoringFailed(group_id=group_id, reason="a reward hangs"))

    @precondition(holds_plans)
    @rule(data=st.data(), retryable=st.booleans())
    def rollout_fails(self, data, retryable):
        worker_id, group_id = self.draw_plan(data)
        plan, _ = self.world.workers[worker_id].plans.pop(group_id)
        samples = plan.samples
        self.world.tell(
            RolloutFailed(group_id=group_id, worker_id=worker_id, samples=samples, reason="oom", retryable=retryable)
        )

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), left=st.booleans())
    def lose_worker(self, data, left):
        worker_id = data.draw(st.sampled_from(list(self.world.workers)))
        del self.world.workers[worker_id]
        self.world.tell(WorkerLost(worker_id=worker_id, reason="killed", left=left))

    @precondition(holds_plans)
    @rule(data=st.data())
    def forget_plan(self, data):
        """A worker drops a group without a word; its next report shows it."""
        worker_id, group_id = self.draw_plan(data)
        del self.world.workers[worker_id].plans[group_id]
        self.world.report(worker_id)

    @precondition(lambda self: any(worker.to_load for worker in self.world.workers.values()))
    @rule(data=st.data(), fails=st.integers(0, 3))
    def load(self, data, fails):
        workers = [worker_id for worker_id, worker in self.world.workers.items() if worker.to_load]
        self.world.load(data.draw(st.sampled_from(workers)), fails=fails == 3)

    @rule(dp_size=st.integers(1, 2), damaged=st.booleans())
    def trainer_starts(self, dp_size, damaged):
        """The one before the newest checkpoint is enough, unless a full broker was relieved of what it needs."""
        checkpoints = self.world.checkpoints
        kept = len(checkpoints) > 1 and checkpoints[-2][0] >= self.world.state.freed_version
        self.world.start_trainer(dp_size, damaged=damaged and kept)

    @precondition(lambda self: self.world.trainer.epoch and self.world.unread())
    @rule(silent=st.booleans(), count=st.integers(1, 4))
    def train(self, silent, count):
        for _ in range(min(count, len(self.world.unread()))):
            self.world.train(silent=silent)

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def broker_loses_row(self, data):
        row = data.draw(st.sampled_from(sorted(self.world.rows)))
        self.world.lose_row(row, parse_row_id(row)[0])

    @precondition(lambda self: self.world.told)
    @rule(data=st.data())
    def tell_again(self, data):
        """At-least-once: anything may be told twice, as long as what it says of rows still holds."""
        event = data.draw(st.sampled_from(self.world.told))
        untrue = (
            isinstance(event, RowsMissing)
            or (isinstance(event, RolloutFinished) and event.row_id not in self.world.rows)
            or (isinstance(event, WorkerJoined) and event.worker_id not in self.world.workers)
        )
        if not untrue:
            self.world.tell(event)

    @rule(seconds=st.sampled_from([0.1, 11.0]))
    def tick(self, seconds):
        self.world.now_s += seconds
        self.world.tell(Tick())

    @rule(used=st.sampled_from([10, 1000, 2000]))
    def usage(self, used):
        self.world.tell(BrokerUsage(retained_bytes=used))

    @precondition(lambda self: self.world.state.view().trained_version > 0 and self.stops_left)
    @rule(resume=st.booleans())
    def stop(self, resume):
        self.stops_left -= 1
        self.world.tell(StopRequested(reason="ctrl-c"))
        if resume:
            self.world.finished = ""
            self.world.tell(RunResumed())

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.world.tell(PauseRequested() if paused else ResumeRequested())

    @rule()
    def checkpoint_now(self):
        self.world.tell(CheckpointRequested())

    @rule(change=SETTING_CHANGES)
    def change_setting(self, change):
        key, value = change
        self.world.tell(SettingChanged(key=key, value=value))

    @invariant()
    def what_a_broker_may_lose_is_outstanding(self):
        if not hasattr(self, "world"):
            return
        ids = [command_id for command_id, _ in self.world.state.outstanding()]
        assert ids == sorted(set(ids))
        unsaved = [at for at, _ in self.world.log if at > self.world.saved[1]]
        assert set(unsaved) <= set(ids)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.tell(BrokerUsage(retained_bytes=0))
        world.tell(ResumeRequested())
        world.run_to_end()
        view = world.state.view()
        assert world.trainer.version == view.trained_version
        if not view.stop_reason:
            assert set(world.outcomes) == world.admitted, "a slot did not end"


TestPipelineState = PipelineMachine.TestCase
TestPipelineState.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    print_blob=False,
)
