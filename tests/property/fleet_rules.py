"""What may happen to generation workers, orchestrator and broker of any run, whatever it generates for."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.fakes.pipeline_world import PipelineWorld
from transport.contracts.messages import (
    PauseRequested,
    ResumeRequested,
    RolloutFailed,
    RolloutFinished,
    RowsMissing,
    Tick,
    WorkerJoined,
)


def holds_plans(machine: FleetRules) -> bool:
    return any(worker.plans for worker in machine.world.workers.values())


class FleetRules(RuleBasedStateMachine):
    """Rules over a ``world`` that a machine of its own makes."""

    world: PipelineWorld

    def draw_plan(self, data):
        workers = [worker_id for worker_id, worker in self.world.workers.items() if worker.plans]
        worker_id = data.draw(st.sampled_from(workers))
        return worker_id, data.draw(st.sampled_from(list(self.world.workers[worker_id].plans)))

    @rule()
    def nothing_goes_wrong_for_a_while(self):
        """Gets the run far enough for the faults to meet every stage of it."""
        self.world.turn()

    @precondition(lambda self: self.world.num_joined < 6)
    @rule(capacity=st.integers(1, 5))
    def join(self, capacity):
        self.world.join(capacity)

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

    @precondition(holds_plans)
    @rule(data=st.data(), retryable=st.booleans())
    def rollout_fails(self, data, retryable):
        worker_id, group_id = self.draw_plan(data)
        plan, _ = self.world.workers[worker_id].plans.pop(group_id)
        samples = plan.samples
        self.world.tell(
            RolloutFailed(group_id=group_id, worker_id=worker_id, samples=samples, reason="oom", retryable=retryable)
        )

    @precondition(lambda self: any(worker.queue for worker in self.world.workers.values()))
    @rule(data=st.data())
    def claim(self, data):
        queues = [worker for worker in self.world.workers.values() if worker.queue]
        data.draw(st.sampled_from(queues)).claim()

    @precondition(lambda self: self.world.workers)
    @rule(data=st.data(), left=st.booleans())
    def lose_worker(self, data, left):
        self.world.lose_worker(data.draw(st.sampled_from(list(self.world.workers))), left=left)

    @precondition(lambda self: self.world.killed or self.world.num_spawned < self.world.spawn_total)
    @rule()
    def supervise(self):
        self.world.supervise()

    @rule(death=st.sampled_from(["applied", "journaled"]))
    def orchestrator_dies(self, death):
        """At the next event, whatever it is."""
        self.world.dies_at_next = death

    @rule(rows=st.integers(0, 3), plans=st.integers(0, 3), rounds=st.integers(0, 3), controls=st.integers(0, 1))
    def broker_loses_its_tail(self, rows, plans, rounds, controls):
        self.world.lose_tail(rows, plans, rounds, controls)

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

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.world.tell(PauseRequested() if paused else ResumeRequested())
