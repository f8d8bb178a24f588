"""Events in adversarial orders: workers come and go, reports repeat, rows vanish, trainers restart, loads fail, the
orchestrator dies and recovers, the broker loses its tail.

After every event the state's own invariants hold, a restored snapshot decides the same, and the commands obey what a
reader of the streams relies on (``tests/fakes/pipeline_world.py``). From wherever the faults led, the run then ends.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from orchestrator.core.dispatch.compute import PLANNERS
from orchestrator.core.model.settings import LEAST_LOADED, PULLED, CoreSettings, ScalingSettings
from tests.fakes.obeyed_pipeline import HELD_OUT, groups_of
from tests.fakes.pipeline_world import PipelineWorld
from tests.property.exploring import explore
from tests.property.fleet_rules import FleetRules
from transport.contracts.messages import (
    BrokerUsage,
    CheckpointRequested,
    ResumeRequested,
    ScoringFailed,
    SettingChanged,
    StopRequested,
    TrainRound,
)
from transport.contracts.types import UpdateMode, parse_row_id

SCALING = st.builds(
    ScalingSettings,
    min_workers=st.integers(1, 2),
    max_workers=st.integers(2, 4),
    confirm=st.integers(1, 2),
    rest=st.integers(0, 1),
)


def _is_possible(core: CoreSettings) -> bool:
    moved_twice = core.defers and core.membership == "rolling"
    return core.rollout_batches <= core.max_staleness + 1 and not moved_twice


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
        oversampled_groups=st.sampled_from([0, 0, 1, 2]),
        oversampled_tail=st.sampled_from(["drop", "defer"]),
        drop_no_signal=st.booleans(),
        max_refills=st.integers(0, 3),
        max_attempts=st.just(3),
        max_deaths=st.integers(1, 4),
        rollout_timeout_s=st.just(10.0),
        micro_batch_tokens=st.sampled_from([10, 40]),
        round_tokens=st.sampled_from([0, 0, 8, 1000]),
        mini_batches=st.integers(1, 2),
        epochs=st.integers(1, 2),
        record_logprobs=st.booleans(),
        checkpoint_every=st.integers(0, 3),
        max_retained_bytes=st.just(1000),
        eval_every=st.integers(0, 2),
        eval_ends=st.booleans(),
        eval_problems=st.just(HELD_OUT),
        eval_budget=st.sampled_from([0.25, 1.0]),
        eval_hold_s=st.sampled_from([0.0, 5.0]),
        eval_timeout_s=st.sampled_from([8.0, 60.0]),
        dispatch=st.sampled_from([LEAST_LOADED, PULLED, *PLANNERS]),
        probes=st.booleans(),
        plan_wait_s=st.sampled_from([0.0, 5.0]),
        migrate_running=st.booleans(),
        scaling=st.none() | SCALING,
        critic=st.booleans(),
    ).filter(_is_possible)


SETTING_CHANGES = st.one_of(
    st.tuples(st.just("run.batches"), st.integers(0, 6)),
    st.tuples(st.just("pipeline.max_staleness"), st.integers(-1, 2)),
    st.tuples(st.just("pipeline.update"), st.sampled_from([*(mode.value for mode in UpdateMode), "sideways"])),
    st.tuples(st.just("pipeline.max_refills"), st.integers(0, 3)),
    st.tuples(st.just("trainer.checkpoint_every"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["pipeline.group_size", "nonsense"]), st.integers(0, 3)),
)
"""Good ones, and ones that the core must not take."""


class PipelineMachine(FleetRules):
    @initialize(
        core=core_settings(), prompts=st.sampled_from([7, 1000]), stops=st.integers(0, 1), claims_at_once=st.booleans()
    )
    def begin(self, core, prompts, stops, claims_at_once):
        self.stops_left = stops
        self.world = PipelineWorld(core, prompts)
        self.world.claims_at_once = claims_at_once
        self.world.start_trainer()
        if core.critic:
            self.world.start_critic()
        self.world.join()

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

    @precondition(lambda self: self.world.scorable())
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

    @rule(dp_size=st.integers(1, 2), damaged=st.booleans())
    def trainer_starts(self, dp_size, damaged):
        """The one before the newest checkpoint is enough, unless a full broker was relieved of what it needs."""
        checkpoints = self.world.checkpoints
        kept = len(checkpoints) > 1 and checkpoints[-2][0] >= self.world.state.pipeline.retention.freed.version
        self.world.start_trainer(dp_size, damaged=damaged and kept)

    @precondition(lambda self: self.world.trainer.epoch and self.world.unread())
    @rule(silent=st.booleans(), count=st.integers(1, 4))
    def train(self, silent, count):
        for _ in range(min(count, len(self.world.unread()))):
            self.world.train(silent=silent)

    @precondition(lambda self: self.world.settings.critic)
    @rule(damaged=st.booleans())
    def critic_starts(self, damaged):
        checkpoints = self.world.critic_checkpoints
        kept = len(checkpoints) > 1 and checkpoints[-2][0] >= self.world.state.pipeline.retention.freed.version
        self.world.start_critic(damaged=damaged and kept)

    @precondition(lambda self: self.world.settings.critic and self.world.critic_unread())
    @rule(silent=st.booleans(), count=st.integers(1, 4))
    def train_critic(self, silent, count):
        for _ in range(min(count, len(self.world.critic_unread()))):
            self.world.train_critic(silent=silent)

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def broker_loses_row(self, data):
        row = data.draw(st.sampled_from(sorted(self.world.rows)))
        self.world.lose_row(row, parse_row_id(row)[0])

    @rule(used=st.sampled_from([10, 1000, 2000]))
    def usage(self, used):
        self.world.tell(BrokerUsage(retained_bytes=used))

    @precondition(lambda self: self.world.state.view().trained_version > 0 and self.stops_left)
    @rule(resume=st.booleans())
    def stop(self, resume):
        self.stops_left -= 1
        self.world.tell(StopRequested(reason="ctrl-c"))
        if resume:
            self.world.resume()

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
        unsaved = [at for at, _ in self.world.log if at > self.world.saved_by_all[1]]
        assert set(unsaved) <= set(ids)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.dies_at_next = None
        world.tell(BrokerUsage(retained_bytes=0))
        world.tell(ResumeRequested())
        was_over = bool(world.finished)  # who starts again behind the end may do so from an older checkpoint
        world.run_to_end(max_turns=250)
        view = world.state.view()
        assert world.trainer.version == view.trained_version
        if world.settings.critic and not was_over:
            assert world.critic.version == view.trained_version
        if not view.stop_reason:
            assert set(world.outcomes) == world.admitted, "a slot did not end"
        if world.settings.defers:
            assert not any(one.reason.startswith("over-sampled") for one in world.outcomes.values()), "one was dropped"


def test_a_run_survives_events_in_any_order():
    explore(PipelineMachine)
